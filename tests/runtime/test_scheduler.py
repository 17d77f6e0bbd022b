"""The scheduler: which of the ready steps runs, what it records, and what it says when nothing comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from avgpipe import PipelineTimeout, Plan
from avgpipe.links.link import Key, Message
from avgpipe.ranks.world import World
from avgpipe.runtime.placement import Placement
from avgpipe.runtime.scheduler import Scheduler
from tests.runtime.test_lane import Bench


def scheduler_of(benches: list[Bench], timeout_s: float = 10) -> Scheduler:
    """A scheduler of rows that share one mailbox, as the pipelines of a worker do."""
    mailbox = benches[0].mailbox
    lanes = [lane for bench in benches for lane in bench.lanes]
    queues = [queue for bench in benches for queue in bench.row.queues]
    placement = Placement.of(benches[0].plan, benches[0].plan.workers)
    return Scheduler(lanes, queues, mailbox, World(timeout_s), placement)


def advancing(bench: Bench, log: list[str]) -> None:
    """Note the steps that a row runs."""
    for lane in bench.lanes:
        advance = lane.advance

        def noted(step: Any, advance: Any = advance) -> None:
            log.append(str(step))
            advance(step)

        lane.advance = noted  # type: ignore[method-assign]


def test_backwards_go_first_and_older_batches_before_newer_ones() -> None:
    plan = Plan(stages=1, micro_batches=2, schedule="all-forward-all-backward")
    benches, log = [Bench(plan, 0), Bench(plan, 0)], []
    for batch, bench in enumerate(benches):
        advancing(bench, log)
        bench.start(batch)
    scheduler = scheduler_of(benches)
    scheduler.run_until(lambda: benches[1].lanes[0].has_ended(1))
    older = [f"{action} of batch 0" for action in ("F0", "F1", "B0", "B1", "U")]
    assert log == [*older, *(step.replace("batch 0", "batch 1") for step in older)]


def test_a_step_that_waits_lets_others_run() -> None:
    plan = Plan(stages=2, micro_batches=1, schedule="1f1b")
    waiting, other, log = Bench(plan, 1), Bench(Plan(stages=1, micro_batches=1), 0), []
    advancing(other, log)
    waiting.start(0)
    other.start(1)
    scheduler_of([waiting, other]).run_until(lambda: other.lanes[0].has_ended(1))
    assert log == ["F0 of batch 1", "B0 of batch 1", "U of batch 1"]


def test_idle_work_is_done_only_while_nothing_can_run() -> None:
    bench = Bench(Plan(stages=2, micro_batches=1, schedule="1f1b"), 1)
    bench.start(0)
    asked = []

    def idle() -> bool:
        asked.append(True)
        x = torch.ones(1, 2, requires_grad=True)
        bench.deliver(Message.ACTIVATION, 0, 0, x, 0, 1)
        return True

    scheduler_of([bench]).run_until(lambda: bench.lanes[0].has_ended(0), idle)
    assert asked == [True]


def test_what_runs_is_recorded_and_an_evaluation_is_not() -> None:
    bench = Bench(Plan(stages=1, micro_batches=2, schedule="1f1b"), 0)
    scheduler = scheduler_of([bench])
    bench.start(0)
    scheduler.run_until(lambda: bench.lanes[0].has_ended(0), recorded=False)
    assert scheduler.events() == []
    bench.start(1)
    scheduler.run_until(lambda: bench.lanes[0].has_ended(1))
    events = [e for e in scheduler.events() if e.kind != "host"]
    assert [str(e) for e in events] == ["F0", "B0", "F1", "B1", "U"]
    assert all(e.start_s <= e.end_s for e in events)
    assert {e.batch for e in events} == {1}


def test_a_wait_names_the_message_and_its_sender() -> None:
    bench = Bench(Plan(stages=2, micro_batches=1, schedule="1f1b"), 1)
    bench.start(4)
    scheduler = scheduler_of([bench], timeout_s=0.05)
    expected = (
        r"waited 0.05 s for the activation of micro-batch 0 of batch 4 from stage 0 \(pipeline 0, stage 1\)"
    )
    with pytest.raises(PipelineTimeout, match=expected):
        scheduler.run_until(lambda: bench.lanes[0].has_ended(4))


def test_a_wait_for_messages_ends_when_they_are_there() -> None:
    bench = Bench(Plan(stages=2, micro_batches=1, schedule="1f1b"), 1)
    scheduler = scheduler_of([bench], timeout_s=0.05)
    key = Key(Message.RESULT, 0, 1, 0, 0, 0)
    bench.mailbox.put(key, 1)
    scheduler.wait_for([key])
    with pytest.raises(PipelineTimeout, match="the result"):
        scheduler.wait_for([key._replace(batch=1)])


def test_a_message_that_is_there_does_not_keep_a_wait_for_others_from_its_limit() -> None:
    """As the loss of a batch of another pipeline, while the own one waits for a peer that has died."""
    bench = Bench(Plan(stages=2, micro_batches=1, schedule="1f1b"), 1)
    bench.start(0)
    scheduler = scheduler_of([bench], timeout_s=0.05)
    key = Key(Message.LOSS, 0, 1, 0, 0, -1)
    bench.mailbox.put(key, 1)
    with pytest.raises(PipelineTimeout, match="the activation of micro-batch 0"):
        scheduler.run_until(lambda: bench.lanes[0].has_ended(0), awaited=[key])


def test_a_message_that_comes_just_before_a_wait_ends_it() -> None:
    bench = Bench(Plan(stages=2, micro_batches=1, schedule="1f1b"), 1)
    scheduler, mailbox = scheduler_of([bench], timeout_s=0.05), bench.mailbox
    key = Key(Message.RESULT, 0, 1, 0, 0, 0)
    mailbox.sources.append(lambda: mailbox.put(key, 1))  # looked into between the question and the wait
    scheduler.run_until(lambda: key in mailbox, awaited=[key])


def test_it_says_what_it_is_at() -> None:
    bench = Bench(Plan(stages=1, micro_batches=1), 0)
    scheduler, said = scheduler_of([bench]), []
    assert scheduler.doing() == "nothing yet"
    advance = bench.lanes[0].advance

    def noted(step: Any) -> None:
        said.append(scheduler.doing())
        advance(step)

    bench.lanes[0].advance = noted  # type: ignore[method-assign]
    bench.start(0)
    scheduler.run_until(lambda: bench.lanes[0].has_ended(0))
    assert said[0] == "F0 of batch 0, pipeline 0, stage 0"
    assert scheduler.doing() == "the caller's code"
