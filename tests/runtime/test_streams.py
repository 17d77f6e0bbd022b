"""What waits for what when lanes have streams, told by streams that keep account; and the clock of a device."""

from __future__ import annotations

import logging
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe import device as devices
from avgpipe.elastic.reference import Reference
from avgpipe.errors import PeerLost, PipelineTimeout
from avgpipe.runtime import streams
from avgpipe.runtime.compute import Compute
from avgpipe.runtime.stage import Stage
from avgpipe.runtime.trained_stage import TrainedStage
from tests.happens_before import clocks
from tests.patience import limit
from tests.runner import run
from tests.runtime.cases import adamw, language_model, token_batches

CPU = torch.device("cpu")


@pytest.fixture
def fake(monkeypatch):
    return on_streams(monkeypatch)


def on_streams(monkeypatch: pytest.MonkeyPatch) -> clocks.Account:
    fake = clocks.Account()
    monkeypatch.setattr(devices, "backend", fake)
    return fake


def train(plan, batches, **options):
    with Pipeline(language_model(), plan, loss_fn=nn.CrossEntropyLoss(), optimizer=adamw, **options) as p:
        losses = [r.loss for r in p.train(batches)]
        return losses, p.state_dict(), p.timeline()


class Issued:
    """The steps of a run as they were issued: (what, stage, pipeline, operation, what its stream follows)."""

    def __init__(self, fake: clocks.Account, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[tuple[str, int, int, clocks.Operation, Any]] = []
        forward, step, backward, accept = Stage.forward, TrainedStage.step, Compute.backward, Reference.accept

        def note(what: str, stage: int, pipeline: int) -> None:
            stream = fake.current_stream()
            self.rows.append((what, stage, pipeline, stream.operate(), dict(stream.clock)))

        def noted_forward(stage, value, place):
            note("F", stage.index, place.pipeline)
            return forward(stage, value, place)

        def noted_step(replica, *arguments):
            note("U", replica.stage.index, replica.pipeline)
            return step(replica, *arguments)

        def noted_backward(compute, now, step_):
            route = compute._route
            note("begin of B", route.stage, route.pipeline)
            backward(compute, now, step_)
            note("B", route.stage, route.pipeline)

        def noted_accept(rounds, pipeline, update):
            note("V", 0, pipeline)  # of which stage a round does not know; tests that look have one
            accept(rounds, pipeline, update)

        monkeypatch.setattr(Reference, "accept", noted_accept)
        monkeypatch.setattr(Stage, "forward", noted_forward)
        monkeypatch.setattr(TrainedStage, "step", noted_step)
        monkeypatch.setattr(Compute, "backward", noted_backward)

    def of(self, what: str, stage: int, pipeline: int | None = None):
        return [
            row for row in self.rows if row[:2] == (what, stage) and (pipeline is None or row[2] == pipeline)
        ]


def follows(later, earlier) -> bool:
    name, number = earlier[3]
    return later[4].get(name, 0) >= number


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_on_streams_is_the_run_without(fake, staleness, monkeypatch):
    plan = Plan(stages=3, pipelines=2, batch="per-pipeline", micro_batches=3, staleness=staleness)
    batches = token_batches(7, 8, last=5)
    losses, state, timeline = train(plan, batches, clip_grad_norm=0.5)
    monkeypatch.undo()
    plain_losses, plain_state, plain_timeline = train(plan, batches, clip_grad_norm=0.5)
    assert losses == plain_losses
    assert all(torch.equal(value, plain_state[name]) for name, value in state.items())

    def computed(t):
        return sorted(
            (e.stage, e.pipeline, e.batch, e.kind, -1 if e.micro_batch is None else e.micro_batch)
            for e in t.events
            if e.kind in "FBU"
        )

    assert computed(timeline) == computed(plain_timeline)


def test_every_stage_has_a_stream_for_each_pipeline(fake, monkeypatch):
    account = Issued(fake, monkeypatch)
    train(Plan(stages=3, pipelines=2, batch="per-pipeline", micro_batches=2), token_batches(4, 8))
    names = {(row[1], row[2]): row[3][0] for row in account.rows}
    assert len(set(names.values())) == 6
    assert all(row[3][0] == names[row[1], row[2]] for row in account.rows)


def test_messages_order_neighbouring_stages(fake, monkeypatch):
    account = Issued(fake, monkeypatch)
    train(Plan(stages=2, pipelines=2, batch="per-pipeline", micro_batches=3), token_batches(6, 9))
    for i in range(2):
        for before, after, source in [("F", "F", 0), ("begin of B", "B", 1)]:
            sources, readers = account.of(before, source, i), account.of(after, 1 - source, i)
            assert len(sources) == len(readers) == 9
            assert all(follows(reader, source) for reader, source in zip(readers, sources))


def test_the_clock_starts_once_a_stream_has_what_a_step_needs(fake, monkeypatch):
    """A stage that waits for its neighbour does not work."""
    account = Issued(fake, monkeypatch)
    started = []
    note = streams.DeviceClock.note

    def noted(clock, place, start, end):
        started.append((place, dict(start.clock)))
        note(clock, place, start, end)

    monkeypatch.setattr(streams.DeviceClock, "note", noted)
    train(Plan(stages=2, micro_batches=3), token_batches(4, 9))
    for before, kind, source in [("F", "F", 0), ("begin of B", "B", 1)]:
        starts = [clock for place, clock in started if (place[0], place[4]) == (1 - source, kind)]
        sources = account.of(before, source)
        assert len(starts) == len(sources) == 12
        assert all(clock.get(row[3].stream, 0) >= row[3].number for clock, row in zip(starts, sources))


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("staleness", [0, 1, "asynchronous"])
def test_updates_of_a_stage_are_one_chain(fake, monkeypatch, staleness, spread):
    """Of spread pipelines too, which share a reference where they share a process."""
    account = Issued(fake, monkeypatch)
    plan = Plan(
        stages=2, pipelines=3, batch="per-pipeline", micro_batches=2, staleness=staleness, spread=spread
    )
    train(plan, token_batches(9, 8))
    for k in range(2):
        updates = account.of("U", k)
        assert len(updates) == 9
        assert all(follows(later, earlier) for earlier, later in pairwise(updates))


def spread_account(staleness):
    """On a rank: what was issued, and what the caller's stream follows in the end."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake = on_streams(monkeypatch)
        account = Issued(fake, monkeypatch)
        train(
            Plan(stages=1, pipelines=2, batch="per-pipeline", staleness=staleness, spread=True),
            token_batches(8, 8),
            timeout_s=60,
        )
        return account.rows, dict(fake.current_stream().clock)


@pytest.mark.ranks
@pytest.mark.parametrize("staleness", [0, 1])
def test_updates_that_other_processes_tell_are_of_the_same_chain(staleness):
    """They are taken in whenever the scheduler looks, outside of any step. On a device a step is only issued then, so
    what is taken in on another stream would complete a round with an update that is not made yet, and move weights that
    a forward reads. Streams that keep account show the missing order, whether the device would have been late or not.
    """
    for rows, caller in run(2, spread_account, staleness=staleness):
        told = [row for row in rows if row[0] == "V"]
        assert len(told) == 4
        chain = [row for row in rows if row[0] in "UV"]
        assert all(follows(later, earlier) for earlier, later in pairwise(chain))
        for n, row in enumerate(rows):
            if row[0] == "V":
                assert all(follows(later, row) for later in rows[n + 1 :] if later[0] == "F")
        # Who reads the reference after the last batch reads what the last message made of it.
        assert caller.get(told[-1][3][0], 0) >= told[-1][3][1]


def test_weights_that_another_lane_moves_are_waited_for(fake, monkeypatch):
    account = Issued(fake, monkeypatch)
    train(
        Plan(stages=1, pipelines=2, batch="per-pipeline", micro_batches=2, staleness=0), token_batches(6, 8)
    )
    rounds = [account.of("U", 0)[n : n + 2] for n in range(0, 6, 2)]
    for i in range(2):
        for n, forward in enumerate(account.of("F", 0, i)[2:]):
            assert all(follows(forward, update) for update in rounds[n // 2])


def test_streaming_lanes_do_not_wait_for_each_others_updates(fake, monkeypatch):
    account = Issued(fake, monkeypatch)
    # The host, reading a loss, waits for more.
    monkeypatch.setattr(streams.LaneStream, "end", lambda *_: None)
    train(
        Plan(stages=1, pipelines=2, batch="per-pipeline", micro_batches=2, staleness=1), token_batches(4, 8)
    )
    forwards, updates = account.of("F", 0, 0), account.of("U", 0, 1)
    second_batch = forwards[2]
    assert not follows(second_batch, updates[0])  # of the other lane, which was issued before it
    assert account.rows.index(updates[0]) < account.rows.index(second_batch)


def test_the_host_issues_all_it_can_before_it_reads_a_loss(fake, monkeypatch):
    account = Issued(fake, monkeypatch)
    batches = iter(token_batches(4, 8))
    plan = Plan(stages=2, pipelines=2, batch="per-pipeline", micro_batches=2)
    with Pipeline(language_model(), plan, loss_fn=nn.CrossEntropyLoss(), optimizer=adamw) as p:
        next(p.train(batches))
        assert len(account.of("B", 0, 0)) == len(account.of("B", 0, 1)) == 2
        assert sum(1 for _ in batches) == 1  # the third is there already


def test_more_lanes_than_torch_has_streams_are_warned_of_once(fake, caplog):
    made = streams.Streams(CPU)
    with caplog.at_level(logging.WARNING, logger="avgpipe"):
        for _ in range(31):
            made.lane(0, moves_others=False)
        assert not caplog.records
        for _ in range(9):
            made.lane(0, moves_others=False)
    (record,) = caplog.records
    assert "32 lanes or more on cpu" in record.getMessage()


def test_streams_of_a_pipeline_that_is_closed_serve_the_next_one(fake):
    """cuBLAS keeps memory for each stream that it has worked on, to the end of the process."""

    def taken():
        plan = Plan(stages=2, pipelines=2, micro_batches=2)
        with Pipeline(language_model(), plan, loss_fn=nn.CrossEntropyLoss(), optimizer=adamw) as p:
            list(p.train(token_batches(4, 8)))
            return {lane.stream._stream.number for lane in p._session.worker.lanes.values()}

    first = taken()
    assert len(first) == 4
    assert taken() == first


def test_the_clock_reads_spans_in_the_host_s_time_and_reuses_events(fake, monkeypatch):
    monkeypatch.setattr(streams, "_UNREAD", 4)
    monkeypatch.setattr(streams, "_REBASE_MS", 5.0)
    made: list[clocks.Event] = []

    def event(*_: Any, **options: bool) -> clocks.Event:
        made.append(clocks.Event(fake))
        return made[-1]

    monkeypatch.setattr(fake, "Event", event)
    clock, stream = streams.DeviceClock(CPU), fake.current_stream()
    begin = clock._base.at
    ends = []
    for n in range(40):
        start = clock.mark(stream)
        start.at = begin + n * 1e-3
        end = clock.mark(stream)
        end.at = begin + n * 1e-3 + 5e-4
        ends.append(end.at)
        clock.note((0, 0, n, 0, "F"), start, end)
    rows = clock.rows()
    assert [row[2] for row in rows] == list(range(40))
    offset = rows[0][5] - begin
    assert abs(offset) < 0.05
    for n, row in enumerate(rows):
        assert row[5] - offset == pytest.approx(begin + n * 1e-3, abs=1e-6)
        assert row[6] - offset == pytest.approx(ends[n], abs=1e-6)
    assert len(made) < 40


def test_a_device_that_never_gets_there_ends_in_an_error(fake, monkeypatch):
    """As where a peer dies after it has announced a message: no call of the host may wait for what never comes."""
    monkeypatch.setattr(clocks.Event, "query", lambda self: False)
    begin = time.monotonic()
    with pytest.raises(PipelineTimeout, match=r"waited 0\.5 s for its device"):
        train(Plan(stages=2, micro_batches=2), token_batches(3, 8), timeout_s=0.5)
    assert time.monotonic() - begin < 0.5 + limit(4.5)


def test_a_peer_s_death_ends_the_wait_for_a_device(fake, monkeypatch):
    monkeypatch.setattr(clocks.Event, "query", lambda self: False)
    plan, loss = Plan(stages=2, micro_batches=2), nn.CrossEntropyLoss()
    with Pipeline(language_model(), plan, loss_fn=loss, optimizer=adamw, timeout_s=60) as p:
        p._session.worker.mailbox.fail(PeerLost("rank 1 has died"))
        with pytest.raises(PeerLost, match="rank 1 has died"):
            list(p.train(token_batches(3, 8)))


def test_steps_run_while_the_device_is_awaited(fake, monkeypatch):
    """Of messages that arrive meanwhile: nothing of other pipelines lies and waits."""
    batches = token_batches(2, 8)
    with Pipeline(
        language_model(), Plan(stages=2, micro_batches=2), loss_fn=nn.CrossEntropyLoss(), optimizer=adamw
    ) as p:
        feed, scheduler = p._session.feed, p._session.worker.scheduler

        class Late:
            def query(self) -> bool:
                if feed.begun == 0:
                    feed.begin([batches[0]], None)
                    return False
                return scheduler.stalled()

        scheduler.run_until_done(Late())
        assert all(lane.has_ended(0) for lane in p._session.worker.lanes.values())


def test_a_lone_pipeline_has_the_next_batch_in_hand_on_a_device(fake, monkeypatch):
    """Or the device would idle while the host reads a loss and begins it."""
    batches = iter(token_batches(6, 8))
    with Pipeline(
        language_model(), Plan(stages=2, micro_batches=2), loss_fn=nn.CrossEntropyLoss(), optimizer=adamw
    ) as p:
        next(p.train(batches))
        assert p._session.feed.next_batch == 2


def test_the_clock_marks_what_it_is_given_and_knows_its_own_beginning(fake):
    fake.default.operate()  # that the host has not waited for
    clock, stream = streams.DeviceClock(CPU), fake.Stream()
    begin = time.perf_counter()
    start = clock.mark(stream)
    stream.operate()
    clock.note((0, 0, 0, 0, "F"), start, clock.mark(stream))
    (row,) = clock.rows()
    assert begin - 0.05 < row[5] <= row[6] < time.perf_counter() + 0.05
