"""Bugs of stream order that have been in the runtime, and orders that no other test sees, left out one at a time.

Each is found. The bugs gave wrong numbers, or a stall, without an error, and passed all tests on a CPU.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from avgpipe import Audit, CudaGraphs, ElasticAveraging, Pipeline, Plan, Precision, Reference
from avgpipe.device import ReadyOnEvent
from avgpipe.elastic import group
from avgpipe.runtime import evaluate, group_sum
from avgpipe.runtime.between import RemoteUpdates
from avgpipe.runtime.streams import LaneStream
from avgpipe.runtime.worker import Worker
from tests.happens_before.on_cpu import on_streams
from tests.happens_before.operators import DEVICE, DeviceAccount
from tests.patience import limit
from tests.runner import run
from tests.runtime.cases import adamw, language_model, momentum, token_batches

pytestmark = pytest.mark.host  # they have an account of their own

LOSS = nn.CrossEntropyLoss()


def train(plan: Plan, count: int = 6) -> Counter[str]:
    with (
        on_streams(DeviceAccount()) as account,
        Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=adamw, timeout_s=60) as p,
    ):
        list(p.train(token_batches(count, 8)))
    return account.memory.found


# ---- sums of replicas' gradients, read before NCCL has made them ---------------------------------------------------


class WaitsInAThread(group_sum.SumGroup):
    """Lets a thread wait for the works, as where wait() keeps the host, and tells the lane that the sums are there."""

    def report(self, key: Any, works: list[Any]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver, daemon=True)
            self._thread.start()
        super().report(key, works)

    def _deliver(self) -> None:
        while (item := self._batches.get()) is not None:
            key, works = item
            for work in works:
                work.wait()
            self._mailbox.deliver(key, None)


def replicated(mutant: bool) -> Counter[str]:
    sums = WaitsInAThread if mutant else group_sum.SumGroup
    with mock.patch.object(group_sum, "SumGroup", sums):
        return train(Plan(stages=1, micro_batches=2, replication=(2,)))


@pytest.mark.ranks
@pytest.mark.parametrize("mutant", [False, True])
def test_sums_of_gradients_that_only_a_thread_has_waited_for(mutant: bool) -> None:
    for found in run(2, replicated, mutant=mutant):
        assert bool(found) is mutant
        assert all("collective" in text for text in found)


class NeverWaitedFor:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """As gloo's, which keeps the host; no stream waits."""
        self._work._inner.wait()


def averaged_over_ranks(mutant: bool, staleness: int) -> Counter[str]:
    dist.init_process_group("gloo")
    with on_streams(DeviceAccount()) as account:
        layer = nn.Linear(4, 4, device=DEVICE)
        averaging = Reference(layer.parameters(), 2, group=dist.group.WORLD, staleness=staleness)
        opt = ElasticAveraging(torch.optim.SGD(layer.parameters(), lr=0.1), averaging)
        sums = group.dist.all_reduce
        if mutant:
            group.dist.all_reduce = lambda *a, **k: NeverWaitedFor(sums(*a, **k))
        for _ in range(4):
            layer(torch.ones(2, 4, device=DEVICE)).sum().backward()
            opt.step()
    return account.memory.found


@pytest.mark.ranks
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("mutant", [False, True])
def test_sums_of_updates_over_ranks(mutant: bool, staleness: int) -> None:
    for found in run(2, averaged_over_ranks, mutant=mutant, staleness=staleness):
        assert bool(found) is mutant
        assert all("collective" in text for text in found)


# ---- rounds of averaging completed beside the lanes ----------------------------------------------------------------


def spread(mutant: bool, staleness: int) -> Counter[str]:
    init = RemoteUpdates.__init__

    def without(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self._averaging = nullcontext

    with mock.patch.object(RemoteUpdates, "__init__", without if mutant else init):
        return train(Plan(stages=1, pipelines=2, staleness=staleness, batch="per-pipeline", spread=True), 8)


@pytest.mark.ranks
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("mutant", [False, True])
def test_updates_of_other_processes_taken_in_beside_the_lane(mutant: bool, staleness: int) -> None:
    found = sum((Counter(found) for found in run(2, spread, mutant=mutant, staleness=staleness)), Counter())
    assert bool(found) is mutant
    assert all("race" in text for text in found)


def resumed(folder: Path, left_out: str | None) -> Counter[str]:
    """The first batch after a load is the other process's: what it adds is there before this one trains.

    So that is taken in between what the caller does: after the load, and before the weights are read.
    """
    settle = Worker.settle

    def without(worker: Worker, batches: int) -> None:
        with mock.patch.object(LaneStream, left_out) if left_out else nullcontext():
            settle(worker, batches)

    plan = Plan(stages=1, pipelines=2, staleness=0, batch="per-pipeline", spread=True)
    batches = token_batches(6, 8)
    with (
        mock.patch.object(Worker, "settle", without),
        on_streams(DeviceAccount()) as account,
        Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=adamw, timeout_s=60) as p,
    ):
        list(p.train(batches[:5]))
        p.save(folder)
        p.load(folder)
        (lane,) = p._session.worker.lanes.values()
        remote = lane.remote
        if dist.get_rank() == 0 and remote is not None:
            assert p._session.worker.mailbox.wait_until(lambda: not remote.missing(6), limit(20))
        list(p.train(batches[5:]))
        p.state_dict()
    return account.memory.found


@pytest.mark.ranks
@pytest.mark.parametrize("left_out", [None, "begin", "end"])
def test_updates_taken_in_between_what_the_caller_does(left_out: str | None, tmp_path: Path) -> None:
    found = run(2, resumed, folder=tmp_path / "saved", left_out=left_out)
    assert bool(found[0]) is (left_out is not None)
    assert all("race" in text for text in found[0])


# ---- a loss that waits for all that is issued ----------------------------------------------------------------------


@pytest.mark.parametrize("mutant", [False, True])
def test_a_loss_that_waits_for_later_batches_too(mutant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    end = LaneStream.end
    if mutant:
        monkeypatch.setattr(LaneStream, "end", lambda self, issued=None: end(self))
    known: list[dict[int, int]] = []
    issued: list[dict[int, int]] = []
    plan = Plan.for_system("pipedream", stages=2, micro_batches=1)
    with (
        on_streams(DeviceAccount()) as account,
        Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=adamw) as p,
    ):
        for _ in p.train(token_batches(6, 8)):
            known.append(dict(account.host))
            streams = [lane.stream._stream for lane in p._session.worker.lanes.values()]  # type: ignore[union-attr]
            issued.append({stream.number: stream.clock[stream.number] for stream in streams})
    # Of batches in the middle: whether the host has waited for all that the lanes had been told.
    waited = [all(known[j][s] >= n for s, n in issued[j].items()) for j in range(1, 4)]
    assert all(waited) if mutant else not any(waited)


# ---- hand-overs between stages, and their memory -------------------------------------------------------------------


def unordered(self: ReadyOnEvent) -> Any:
    return self.value


@pytest.mark.parametrize("staleness", [0, 1])
def test_activations_without_a_wait(staleness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(stages=2, pipelines=2, micro_batches=2, staleness=staleness)
    assert not train(plan)
    monkeypatch.setattr(ReadyOnEvent, "received", unordered)
    assert train(plan)


def test_memory_that_was_not_recorded_with_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceAccount, "record_stream", lambda *_: None)
    found = train(Plan(stages=2, pipelines=2, micro_batches=2))
    assert found
    assert all("without record_stream" in text for text in found)


# ---- memory that others still read ---------------------------------------------------------------------------------


@pytest.fixture(params=[False, True])
def mutant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the allocator is not told that the caller's stream reads what evaluations make."""
    if request.param:
        monkeypatch.setattr(evaluate, "used_on", lambda *_: None)
    return bool(request.param)


def evaluating(micro_batches: int) -> Pipeline:
    plan = Plan(stages=2, micro_batches=micro_batches)
    return Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=adamw)


def test_sums_of_an_evaluation_that_a_lane_may_write_again(mutant: bool) -> None:
    """The caller's stream adds up what the lane of the last stage has made, which is at the next batches meanwhile."""
    with on_streams(DeviceAccount()) as account, evaluating(2) as p:
        p.evaluate(token_batches(8, 8))
    assert bool(account.memory.found) is mutant


def test_a_prediction_that_is_forgotten_while_it_is_read(mutant: bool) -> None:
    with on_streams(DeviceAccount()) as account, evaluating(1) as p:
        output = p.predict(token_batches(1, 8)[0][0])
        output.sin()
        del output
        lane: Any = list(p._session.worker.lanes.values())[-1].stream
        with lane._stream:  # as in a batch that is under way
            torch.zeros(4, device=DEVICE)
    assert bool(account.memory.found) is mutant


class Fails(nn.Module):
    """A loss that fails in the midst of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls >= 8:
            raise RuntimeError("no more")
        return LOSS(output, target)


@pytest.mark.parametrize("mutant", [False, True])
def test_weights_that_lanes_use_after_a_failure(mutant: bool) -> None:
    end = LaneStream.end

    def only_of_batches(stream: LaneStream, issued: Any = None) -> None:
        if issued is not None or not mutant:
            end(stream, issued)

    with on_streams(DeviceAccount()) as account, mock.patch.object(LaneStream, "end", only_of_batches):
        p = Pipeline(
            language_model(), Plan(stages=2, pipelines=2, micro_batches=2), loss_fn=Fails(), optimizer=adamw
        )
        with pytest.raises(RuntimeError, match="no more"), p:
            list(p.train(token_batches(8, 8)))
        del p
        gc.collect()
        torch.zeros(4, device=DEVICE)
        assert bool(account.memory.found) is mutant


# ---- graphs on weights that move -----------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["stash", "vertical-sync", "double-buffer"])
def test_graphs_are_refused_where_weights_have_versions(weights: str) -> None:
    """A graph reads the addresses of its capture; versions are other memory."""
    system = {"double-buffer": "pipedream-2bw"}.get(weights, "pipedream")
    plan = Plan.for_system(system, stages=2, micro_batches=1 if system == "pipedream" else 2)
    assert plan.weights == weights or system == "pipedream"
    with pytest.raises(ValueError, match="a graph reads one version"):
        Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=adamw, extensions=[CudaGraphs()])


def test_a_loss_is_there_before_it_is_read() -> None:
    """The host asks for it while it issues other work, and never waits in the call that reads it."""

    class Waits(DeviceAccount):
        def host_waits(self, why: str, reads: list[torch.Tensor]) -> None:
            clock = self.current_stream().clock
            ahead.append(all(self.host.get(stream, 0) >= n for stream, n in clock.items()))
            super().host_waits(why, reads)

    ahead: list[bool] = []
    with on_streams(Waits()):
        plan = Plan(stages=2, micro_batches=2)
        with Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=adamw, extensions=[Audit("off")]) as p:
            for _ in p.train(token_batches(8, 8)):
                pass
    assert len(ahead) >= 8
    assert all(ahead)


def test_the_host_reads_nothing_but_losses() -> None:
    """A step of training waits for the device at one place; all else is issued ahead."""
    with on_streams(DeviceAccount()) as account:
        plan = Plan(stages=2, pipelines=2, micro_batches=2)
        with Pipeline(
            language_model(dropout=0.5), plan, loss_fn=LOSS, optimizer=adamw, clip_grad_norm=0.5
        ) as p:
            batches = token_batches(12, 8)
            list(p.train(batches[:4]))
            account.waited.clear()
            list(p.train(batches[4:]))
    assert [where.partition(":")[0] for where in account.waited] == ["runtime/loss.py"], account.waited
    assert sum(account.waited.values()) == 16  # a number for each pipeline's share of a batch


@pytest.mark.parametrize("optimizer", [adamw, momentum])
def test_nor_whether_an_update_is_left_out(optimizer: Any) -> None:
    """The device decides, for elastic pipelines, and adapts the scale of the losses."""
    options = [Precision(skip_nonfinite=True, loss_scale="dynamic"), Audit("off")]
    with on_streams(DeviceAccount()) as account:
        plan = Plan(stages=2, pipelines=2, micro_batches=2, batch="per-pipeline")
        with Pipeline(
            language_model(dropout=0.5), plan, loss_fn=LOSS, optimizer=optimizer, extensions=options
        ) as p:
            batches = token_batches(12, 8)
            list(p.train(batches[:4]))
            account.waited.clear()
            list(p.train(batches[4:]))
            waited = dict(account.waited)
    assert [where.partition(":")[0] for where in waited] == ["runtime/loss.py"], waited
    assert sum(waited.values()) == 8
