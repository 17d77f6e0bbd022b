"""A rank that is killed is replaced: training goes on from copies in memory, to the same bits."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from avgpipe import CheckpointError, Copies, PeerLost, Pipeline, PipelineError, PipelineTimeout, Plan
from avgpipe.checkpoint.saving import Saving
from avgpipe.checkpoint.snapshot import Snapshot
from avgpipe.fault.copies import Intervals, StateCopies
from avgpipe.fault.generation import announcement, prospect, refuse_without_copies, waited_for
from avgpipe.fault.recovery import Recovery, _Call
from avgpipe.links import group
from avgpipe.links.group import GroupLink
from avgpipe.links.link import Message
from avgpipe.model.context import Carry
from avgpipe.ranks import met
from avgpipe.ranks.environment import GENERATION, STORE_FILE
from avgpipe.ranks.launch import is_stopped
from avgpipe.ranks.limits import LIMITS
from avgpipe.runtime.session import Session, recovering
from avgpipe.runtime.worker import Worker
from avgpipe.testing import fail_at
from tests.options import grouped
from tests.patience import Deadline, limit
from tests.runner import Ranks

_LIMIT_S = 60
BATCHES = 12  # of an epoch


class Recurrent(nn.Module):
    """Goes on from batch to batch, drops out, and normalises: all that a copy must have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.carry = Carry()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.carry.get()
        x = self.linear(x) + (0.1 * before if before is not None and before.shape == x.shape else 0)
        self.carry.set(x.detach())
        out: torch.Tensor = self.dropout(torch.tanh(self.norm(x)))
        return out


def replaced(size: int, most: int = 3, function: Any = None, **arguments: Any) -> tuple[list[Any], int]:
    """Run :func:`train`, or another, on ranks that are replaced when they are killed; results, and how many were."""
    environment = {GENERATION: "0", STORE_FILE: "", "TORCHELASTIC_RUN_ID": ""}
    ranks = Ranks(size, function or train, environment=environment, **arguments)
    store, count = dist.FileStore(str(ranks.folder / "store")), 0  # type: ignore[attr-defined]
    deadline = Deadline(_LIMIT_S)
    while any(process.exitcode is None for process in ranks.processes):
        for rank, process in enumerate(ranks.processes):
            if store.check([waited_for(count)]) and is_stopped(process.pid or 0):
                ranks.kill(rank)
            if process.exitcode == -9 and count < most:
                count += 1
                ranks.replace(rank, {GENERATION: str(count)})
                store.set(prospect(count), json.dumps([rank]))
                store.set(announcement(count), json.dumps([rank]))
        assert not deadline.has_passed, ranks.outputs()
        ranks.processes[0].join(0.01)
    return ranks.results(), count


def set_interval(batches: int) -> None:
    """Have so many batches between copies, which no batch waits for, but for the first two."""
    Intervals.after = lambda *_: batches  # type: ignore[method-assign]
    StateCopies._agrees = property(lambda copies: copies._count < 2)  # type: ignore[method-assign]


def train(
    options: dict[str, Any],
    deaths: Any = (),
    copies: float | None = 0.01,
    link: str = "auto",
    interval: int | None = None,
    timeout_s: float = 20,
    end: str = "SIGKILL",
) -> Any:
    """Results by batch, evaluations after every epoch, and the weights after three epochs.

    Args:
        deaths: (generation, rank, epoch, batch or "evaluation"): when who dies.
        interval: batches between copies, which no batch waits for, but for the first two.
        end: the signal by which a rank dies, or stands still.
    """
    if interval is not None:
        set_interval(interval)
    os.environ[STORE_FILE] = str(Path(os.environ["TEST_FOLDER"], "store"))
    rank, torch_seed = int(os.environ["RANK"]), 0
    torch.manual_seed(torch_seed)
    model = nn.Sequential(*[Recurrent() for _ in range(6)])
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator))
        for _ in range(BATCHES)
    ]
    found: dict[int, float] = {}
    seen: dict[int, float] = {}
    with Pipeline(
        model,
        Plan(**options),
        loss_fn=nn.MSELoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9),
        clip_grad_norm=1.0,
        timeout_s=timeout_s,
        link=link,
        extensions=[] if copies is None else [Copies(every_s=copies)],
    ) as p:

        def dies(epoch: int, when: Any) -> None:
            if (int(os.environ[GENERATION]), rank, epoch, when) in deaths:
                os.kill(os.getpid(), getattr(signal, end))

        epoch, first = divmod(p.batches, BATCHES)
        dies(epoch, "made")
        for trained in p._session.worker.trained.values():
            trained.stage.layers[0].register_forward_pre_hook(
                lambda layer, _: None if layer.training else dies(p.batches // BATCHES, "evaluation")
            )
        while epoch < 3:
            for result in p.train(data[first:]):
                assert result.batch not in found
                found[result.batch] = result.loss
                dies(epoch, result.batch % BATCHES)
            first, epoch = 0, epoch + 1
            seen[epoch] = p.evaluate(data[:3]).loss
        return found, seen, p.state_dict()


def assert_as_undisturbed(run: list[Any], expected: Any) -> None:
    losses, seen, weights = expected
    for found, evaluated, state in run:
        assert found == {batch: loss for batch, loss in losses.items() if batch >= min(found)}
        assert evaluated == {epoch: loss for epoch, loss in seen.items() if epoch in evaluated}
        assert all(torch.equal(value, weights[name]) for name, value in state.items())
    whole = [found for found, _, _ in run if 0 in found]
    assert whole
    assert all(found.keys() == losses.keys() for found in whole)


SHAPES: list[Any] = [
    {"stages": 3, "pipelines": 2, "micro_batches": 4},
    {"stages": 2, "pipelines": 2, "micro_batches": 2, "rule": "avgpipe", "batch": "per-pipeline"},
    {"stages": 2, "micro_batches": 4},
]


@pytest.mark.ranks
@pytest.mark.promise(0)
@pytest.mark.slow
@pytest.mark.parametrize("link", ["auto", "gloo"])
@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_each_rank_is_replaced_and_training_comes_to_the_same_bits(
    options: dict[str, Any], link: str
) -> None:
    size = options["stages"]
    (expected, *_), none = replaced(size, options=options, copies=None, link=link)
    assert none == 0
    deaths = [
        (n, size - 1 - n, n, 4 + n) for n in range(size - 1)
    ]  # one in each generation, all but the first rank
    run, count = replaced(size, options=options, deaths=deaths, link=link)
    assert count == size - 1
    assert_as_undisturbed(run, expected)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_copies_that_are_taken_while_batches_run_come_to_the_same_bits(options: dict[str, Any]) -> None:
    size = options["stages"]
    (expected, *_), _ = replaced(size, options=options, copies=None)
    for batch in (5, 8, 11):
        run, count = replaced(size, options=options, interval=6, deaths=[(0, batch % size, 1, batch)])
        assert count == 1
        assert_as_undisturbed(run, expected)


@pytest.mark.ranks
@pytest.mark.slow
def test_who_is_killed_while_all_evaluate_is_replaced() -> None:
    options = SHAPES[0]
    (expected, *_), _ = replaced(3, options=options, copies=None)
    run, count = replaced(3, options=options, deaths=[(0, 1, 2, "evaluation"), (1, 0, 2, 3)])
    assert count == 2
    assert_as_undisturbed(run, expected)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_who_is_killed_again_before_there_is_another_copy_is_replaced_again(options: dict[str, Any]) -> None:
    size = options["stages"]
    (expected, *_), _ = replaced(size, options=options, copies=None)
    # One of after the first epoch's evaluation is whole by the first death.
    deaths = [(0, 1, 1, 5), (1, 1, 1, "made"), (2, size - 1, 1, 8)]
    run, count = replaced(size, options=options, interval=4, deaths=deaths)
    assert count == 3
    assert_as_undisturbed(run, expected)


def test_what_a_call_draws_is_drawn_once_however_often_a_rank_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draws: list[float] = []
    monkeypatch.setattr(Recovery, "recover", lambda *_, **__: draws.append(float(torch.rand(()))))

    @recovering
    def call(_: Pipeline) -> None:
        draws.append(float(torch.rand(())))
        if len(draws) < 5:
            raise PeerLost("rank 1 was killed")

    monkeypatch.setenv(STORE_FILE, "")
    monkeypatch.setenv("TEST_FOLDER", "")
    with made() as p:
        call(p)
        call(p)
    first, _, second, _, third, following = draws
    assert first == second == third
    assert following != first


def test_a_new_process_gets_what_calls_before_the_first_batch_have_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(STORE_FILE, "")
    monkeypatch.setenv("TEST_FOLDER", "")
    with made() as p:
        found = p.evaluate(given(2))
        p.wait_for_save()
        seven = p.once("seven", lambda: 7)
        policy = p._session.policy
        assert isinstance(policy, Recovery)
        state = p.state_dict()
        calls = [_Call(*json.loads(json.dumps(call[:2]))) for call in policy._calls]
        assert [call.found for call in calls[1:]] == [[None], [7], []]  # all make the last one again
    with made() as p:
        policy = p._session.policy
        assert isinstance(policy, Recovery)
        policy._ahead = [*calls]
        assert p.evaluate(given(2)) == found
        p.wait_for_save()
        assert p.once("seven", lambda: 8) == seven
        assert p.state_dict().keys() == state.keys()
        assert p.once("eight", lambda: 8) == 8
        assert [call[:2] for call in policy._calls] == [*(call[:2] for call in calls), ("once('eight')", [8])]
        assert policy._called == -1
        with pytest.raises(ValueError, match="weights must be"):
            p.evaluate(iter(given(2)), weights=7)
        assert policy._called == 1  # an iterator is not read again, so no process goes back to before it


def test_later_calls_that_find_a_value_or_nothing_need_not_be_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(STORE_FILE, "")
    monkeypatch.setenv("TEST_FOLDER", "")
    with made() as p:
        for _ in p.train(given(1)):
            loss = p.evaluate(given(2)).loss
            p.save(tmp_path / "saved")
            assert p.once("a call within another", lambda: p.evaluate(given(2)).loss) == loss
        policy = p._session.policy
        assert isinstance(policy, Recovery)
        evaluation, save, outer = (policy._found[1, n].found for n in range(3))
        assert (evaluation[0]["loss"], save, outer) == (loss, [None], [loss])
        assert policy._called == -1
        policy._place = 1, -1  # as a new process, which makes them once more
        found = dict(policy._found)
        assert p.evaluate(given(2)).loss == loss
        p.save(tmp_path / "not written")
        assert p.once("a call within another", lambda: 0.0) == loss
        assert policy._found == found
        assert not (tmp_path / "not written").exists()
        p.requires_grad_("0", False)
        assert policy._found == found, "batches before it trained all weights"
        assert policy._called == 1


def test_a_new_process_that_makes_other_calls_than_the_others_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(STORE_FILE, "")
    monkeypatch.setenv("TEST_FOLDER", "")
    with made() as p:
        policy = p._session.policy
        assert isinstance(policy, Recovery)
        policy._ahead = [_Call("evaluate()", [None])]
        with pytest.raises(
            PipelineError, match=r"calls wait_for_save\(\) after 0 .* have called evaluate\(\):"
        ):
            p.wait_for_save()
        policy._ahead = []
        for _ in p.train(given(1)):
            value = p.once("a value", lambda: [7])
            value.append(8)  # which is the caller's own
        policy._place, policy._made = (1, -1), 2
        for name in ("once('other')", "evaluate()"):
            policy._found[1, 0] = policy._found[1, 0]._replace(name=name)
            with pytest.raises(PipelineError, match="give"):
                p.once("a value", list)
            policy._place = 1, -1
        policy._found[1, 0] = policy._found[1, 0]._replace(name="once('a value')")
        assert p.once(find=list, what="a value") == [7]
        with pytest.raises(PipelineError, match=r"calls save\(\) after 1 results, .* made no further call:"):
            p.save(tmp_path / "not written")
        policy._place, policy._made, policy._pending = (1, 6), 1, {(1, 7): "evaluate()"}
        with pytest.raises(
            PipelineError, match=r"calls save\(\) after 1 results, .* have called evaluate\(\):"
        ):
            p.save(tmp_path / "not written")
        policy._place = 1, 6
        p.evaluate(given(1))
        p.save(tmp_path / "written")  # after that call
        assert not (tmp_path / "not written").exists()


def die_early(phase: str, rank: int, end: str) -> None:
    """Have this process end in a phase of its start, where it is the first one that is this rank."""
    places: dict[str, tuple[Any, str]] = {
        "connect": (dist, "init_process_group"),
        "agree": (Session, "_agree"),
        "build": (Worker, "_build_all"),
        "first copy": (StateCopies, "begin"),
    }

    def die() -> None:
        if (os.environ[GENERATION], int(os.environ["RANK"])) == ("0", rank):
            os.kill(os.getpid(), getattr(signal, end))

    if phase == "start":
        die()
    if phase in places:
        owner, name = places[phase]
        before = getattr(owner, name)

        def die_in_it(*args: Any, **options: Any) -> Any:
            die()
            return before(*args, **options)

        setattr(owner, name, die_in_it)


def train_from_the_start(phase: str = "", rank: int = 1, end: str = "SIGKILL", timeout_s: float = 20) -> Any:
    """Losses by batch and weights, where a rank ends before there is a whole copy."""
    die_early(phase, rank, end)
    losses = dict[int, float]()
    with made(timeout_s=timeout_s) as p:
        first = p.evaluate(given(2)).loss if not p.batches else None
        if phase == "called":
            dies(rank)
        for result in p.train(given(6)[p.batches :]):
            losses[result.batch] = result.loss
        return losses, first, p.state_dict()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", ["start", "connect", "agree", "build", "called", "first copy"])
def test_who_is_killed_before_the_first_copy_is_replaced_and_all_begin_anew(phase: str, rank: int) -> None:
    (expected, _), none = replaced(2, function=train_from_the_start)
    run, count = replaced(2, function=train_from_the_start, phase=phase, rank=rank)
    assert (none, count) == (0, 1)
    for losses, first, weights in run:
        assert (losses, first) == expected[:2]
        assert all(torch.equal(value, weights[name]) for name, value in expected[2].items())


def train_after_a_call(how: str, phase: str = "", dies_after: int | None = None) -> Any:
    """Losses by batch and weights, after a call before the first batch that a new process does not make again."""
    set_interval(4)
    die_early(phase, 1, "SIGKILL")
    losses = dict[int, float]()
    with made() as p:
        if not p.batches and how == "save":
            p.save(Path(os.environ["TEST_FOLDER"], "saved"))
        if not p.batches and how == "freeze":
            p.requires_grad_("0.linear", False)
        for result in p.train(given()[p.batches :]):
            losses[result.batch] = result.loss
            if result.batch == dies_after:
                dies(1)
        return losses, p.state_dict()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("when", [{"phase": "first copy"}, {"dies_after": 0}], ids=str)
@pytest.mark.parametrize("how", ["save", "freeze"])
def test_a_call_before_the_first_batch_is_not_made_again_where_all_begin_anew(how: str, when: Any) -> None:
    (expected, _), _ = replaced(2, function=train_after_a_call, how=how)
    run, count = replaced(2, function=train_after_a_call, how=how, **when)
    assert count == 1
    for losses, weights in run:
        assert losses == expected[0]
        assert all(torch.equal(value, weights[name]) for name, value in expected[1].items())


def train_on_short_batches(dies_after: int | None = None) -> Any:
    """Losses by batch and weights, where every fourth batch is short, and BatchNorm needs two samples."""
    data = [(x[:5], y[:5]) if n % 4 == 3 else (x, y) for n, (x, y) in enumerate(given(2 * BATCHES))]
    losses = dict[int, float]()
    with made() as p:
        for result in p.train(data[p.batches :]):
            losses[result.batch] = result.loss
            if result.batch == dies_after and os.environ[GENERATION] == "0":
                send_copies(p)
                dies(1)
        return losses, p.state_dict()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("dies_after", [5, 6, 7])
def test_a_short_batch_is_cut_alike_after_a_rank_was_replaced(dies_after: int) -> None:
    (expected, _), _ = replaced(2, function=train_on_short_batches)
    run, count = replaced(2, function=train_on_short_batches, dies_after=dies_after)
    assert count == 1
    for losses, weights in run:
        assert losses == {batch: loss for batch, loss in expected[0].items() if batch >= min(losses)}
        assert all(torch.equal(value, weights[name]) for name, value in expected[1].items())


def resume_after_two_losses(folder: str, dies: tuple[str, ...] = ()) -> Any:
    """Losses by batch and weights of a resumed run, in which a rank is lost, and its successor while it loads."""
    set_interval(100)
    if os.environ[GENERATION] in dies and os.environ["RANK"] == "1":
        Saving.load = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    with made() as p:
        if not p.batches:
            p.load(folder)
        losses = {result.batch: result.loss for result in p.train(given()[p.batches :])}
        return losses, p.state_dict()


@pytest.mark.ranks
@pytest.mark.slow
def test_a_load_that_is_repeated_may_lose_another_rank(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    replaced(2, function=save_three_batches, folder=folder)
    (expected, _), _ = replaced(2, function=resume_after_two_losses, folder=folder)
    run, count = replaced(2, function=resume_after_two_losses, folder=folder, dies=("0", "1"))
    assert count == 2
    for losses, weights in run:
        assert losses == expected[0]
        assert all(torch.equal(value, weights[name]) for name, value in expected[1].items())


def save_three_batches(folder: str) -> None:
    with made() as p:
        list(p.train(given(3)))
        p.save(folder)


def train_after_calls(folder: str | None, dies_before: str = "", rank: int = 1) -> Any:
    """Losses by batch, a prediction, and weights; where a rank ends between the calls before the first copy.

    Args:
        folder: of a checkpoint to resume from; None: weights are set.
    """
    losses = dict[int, float]()

    def at(call: str) -> None:
        if call == dies_before:
            dies(rank)

    with made() as p:
        predicted = None
        if not p.batches:
            with pytest.raises(CheckpointError):
                p.load(Path(os.environ["TEST_FOLDER"], "missing"))
            if folder is not None:
                p.load(folder)
            at("state_dict")
            state = p.state_dict()
            at("predict")
            predicted = p.predict(given(1)[0][0])
            if folder is None:
                p.load_state_dict({name: value * 0.5 for name, value in state.items()})
            at("train")
        for result in p.train(given(8)[p.batches :]):
            losses[result.batch] = result.loss
        return losses, predicted, p.state_dict()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dies_before", ["state_dict", "predict", "train"])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_rank_that_is_lost_between_loads_and_predictions_is_replaced(
    resumes: bool, dies_before: str, rank: int, tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved") if resumes else None
    if resumes:
        replaced(2, function=save_three_batches, folder=folder)
    arguments: Any = {"function": train_after_calls, "folder": folder}
    (expected, _), none = replaced(2, **arguments)
    run, count = replaced(2, **arguments, dies_before=dies_before, rank=rank)
    assert (none, count) == (0, 1)
    for losses, predicted, weights in run:
        assert losses == expected[0]
        assert torch.equal(predicted, expected[1])
        assert all(torch.equal(value, weights[name]) for name, value in expected[2].items())


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("phase", ["start", "connect", "build", "first copy"])
def test_who_stands_still_before_the_first_copy_is_replaced(phase: str) -> None:
    (expected, _), _ = replaced(2, function=train_from_the_start)
    options = {"phase": phase, "end": "SIGSTOP", "timeout_s": 3}
    run, count = replaced(2, function=train_from_the_start, **options)
    assert count == 1
    for losses, first, weights in run:
        assert (losses, first) == expected[:2]
        assert all(torch.equal(value, weights[name]) for name, value in expected[2].items())


def send_copies(p: Pipeline) -> None:
    """Have all ranks hold all copies so far."""
    p.drain()
    assert p._session.policy._copies is not None
    p._session.policy._copies.settle()
    p._session.policy._copies._send_all()
    p.world.barrier()
    time.sleep(0.2)  # for what is on its way


def train_and_fail_to_save() -> Any:
    """Losses by batch of a loop in which a checkpoint cannot be written, and a rank dies long after."""
    losses, nowhere = dict[int, float](), Path(os.environ["TEST_FOLDER"], "store", "checkpoint")  # in a file
    set_interval(100)
    with made() as p:
        for result in p.train(given(2 * BATCHES)[p.batches :]):
            losses[result.batch] = result.loss
            if result.batch == 5:
                with pytest.raises(CheckpointError):
                    p.save(nowhere)
            if result.batch == 19 and os.environ[GENERATION] == "0":
                send_copies(p)
            if result.batch == 20:
                dies(1)
    return losses


@pytest.mark.ranks
@pytest.mark.slow
def test_a_save_that_has_failed_is_not_tried_once_more_by_a_new_rank() -> None:
    (first, second), count = replaced(2, function=train_and_fail_to_save)
    assert count == 1
    assert sorted(first) == list(range(2 * BATCHES))
    assert second == {batch: loss for batch, loss in first.items() if batch >= min(second)}
    assert min(second) > 5


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("when", [5, "evaluation"])
def test_who_stands_still_is_replaced_once_the_others_have_waited(when: Any) -> None:
    options = SHAPES[0]
    (expected, *_), _ = replaced(3, options=options, copies=None)
    run, count = replaced(3, options=options, deaths=[(0, 1, 1, when)], end="SIGSTOP", timeout_s=3)
    assert count == 1
    assert_as_undisturbed(run, expected)


def made(options: dict[str, Any] = SHAPES[2], timeout_s: float = 20, **others: Any) -> Pipeline:
    """Two stages on the ranks of a test, as a script that is started anew makes them."""
    os.environ[STORE_FILE] = str(Path(os.environ["TEST_FOLDER"], "store"))
    torch.manual_seed(0)
    return Pipeline(
        nn.Sequential(Recurrent(), Recurrent()),
        Plan(**options),
        **grouped(
            loss_fn=nn.MSELoss(),
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
            timeout_s=timeout_s,
            copies_every_s=0.01,
            **others,
        ),
    )


def given(count: int = BATCHES) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(8, 8, generator=generator) for _ in "xy") for _ in range(count)]


def dies(rank: int) -> None:
    """Kill this process, where it is the first one that is this rank."""
    if (os.environ[GENERATION], int(os.environ["RANK"])) == ("0", rank):
        os.kill(os.getpid(), signal.SIGKILL)


def train_and_save(stops: bool) -> Any:
    """Losses and weights; whom rank 1 keeps waiting in a save calls no roll that could end before the test."""
    met.LIMITS = replace(LIMITS, roll_call_s=2.0 * _LIMIT_S)
    with made(timeout_s=3) as p:
        losses = {result.batch: result.loss for result in p.train(given()[p.batches :])}
        if stops and (os.environ[GENERATION], os.environ["RANK"]) == ("0", "1"):
            os.kill(os.getpid(), signal.SIGSTOP)
        p.save(Path(os.environ["TEST_FOLDER"], "c"))
        return losses, p.state_dict()


@pytest.mark.ranks
@pytest.mark.slow
def test_who_stands_still_is_replaced_though_the_others_do_not_know_who_it_is() -> None:
    (expected, _), _ = replaced(2, function=train_and_save, stops=False)
    run, count = replaced(2, function=train_and_save, stops=True)
    assert count == 1
    for losses, weights in run:
        assert losses == {batch: loss for batch, loss in expected[0].items() if batch in losses}
        assert all(torch.equal(value, weights[name]) for name, value in expected[1].items())


def train_and_load(how: str, dies_after: int | None = None) -> Any:
    """Losses of batches after the weights of the fourth were loaded behind the twelfth, and the weights.

    Copies are so far apart that the next one would not come before a rank dies, had the load not asked for one.
    """
    folder, losses = Path(os.environ["TEST_FOLDER"]), dict[int, float]()
    Intervals.after = lambda *_: 4 if how == "load" else 18  # type: ignore[method-assign]
    with made() as p:
        if not p.batches:
            list(p.train(given()[:4]))
            p.save(folder / "c")
            weights = p.state_dict()
            list(p.train(given()[4:]))
            if how == "load":
                p.load(folder / "c")
            else:
                p.load_state_dict(weights)
        begun = 4 if how == "load" else BATCHES
        for result in p.train(given()[p.batches - begun :]):
            losses[result.batch] = result.loss
            if result.batch - begun == dies_after:
                dies(1)
        return losses, p.state_dict()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(("how", "dies_after"), [("load", 4), ("load_state_dict", 8)])
def test_who_is_killed_after_a_load_does_not_take_the_others_back_to_before(
    how: str, dies_after: int
) -> None:
    (expected, _), none = replaced(2, function=train_and_load, how=how)
    run, count = replaced(2, function=train_and_load, how=how, dies_after=dies_after)
    assert (none, count) == (0, 1)
    for losses, weights in run:
        assert losses == {batch: loss for batch, loss in expected[0].items() if batch >= min(losses)}
        assert all(torch.equal(value, weights[name]) for name, value in expected[1].items())


def train_in_steps(options: dict[str, Any], dies_after: int | None = None) -> Any:
    """Losses by batch, weights, and the most batches that were kept."""
    losses, kept = dict[int, float](), 0
    Intervals.after = lambda *_: 4  # type: ignore[method-assign]
    with made(options=options) as p:
        for inputs, targets in given()[p.batches // p.plan.batches_per_round :]:
            number = p.batches
            losses[number] = p.step(inputs, targets)
            kept = max(kept, len(p._session.feed.kept or ()))
            if number == dies_after:
                dies(1)
        return losses, p.state_dict(), kept


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("options", SHAPES[1:], ids=str)
def test_steps_go_on_to_the_same_bits_and_keep_few_batches(options: dict[str, Any]) -> None:
    (expected, *_), _ = replaced(2, function=train_in_steps, options=options)
    run, count = replaced(2, function=train_in_steps, options=options, dies_after=8)
    assert count == 1
    for losses, weights, kept in run:
        assert losses == {batch: loss for batch, loss in expected[0].items() if batch >= min(losses)}
        assert all(torch.equal(value, weights[name]) for name, value in expected[1].items())
        assert kept <= 10
    assert run[0][0].keys() == expected[0].keys()


def test_a_process_that_is_alone_keeps_no_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv(STORE_FILE, "")
    with made() as p:
        list(p.train(given()))
        assert not p._session.feed.kept


def train_and_evaluate(
    options: dict[str, Any],
    every: int,
    dies_after: int | None = None,
    dies_in: int | None = None,
    interval: int | None = None,
) -> Any:
    """Losses by batch, evaluations amid the loop, and batches begun at each result.

    Args:
        dies_in: at which result a rank dies that evaluates there, when all copies so far have come.
        interval: as of :func:`train`.
    """
    losses, seen, begun = dict[int, float](), dict[int, float](), dict[int, int]()
    if interval is not None:
        set_interval(interval)
    with made(options) as p:
        for result in p.train(given(2 * BATCHES)[p.batches :]):
            losses[result.batch], begun[result.batch] = result.loss, p.batches
            if result.batch == dies_after:
                dies(1)
            if result.batch % every == every - 1:
                metric = None
                if result.batch == dies_in and os.environ[GENERATION] == "0":
                    send_copies(p)
                    metric = lambda *_: dies(1)  # noqa: E731
                seen[result.batch] = p.evaluate(given()[:2], metric).loss
    return losses, seen, begun


SHARED = {"stages": 2, "pipelines": 2, "micro_batches": 4}
BY_TURNS = {"stages": 2, "pipelines": 3, "micro_batches": 2, "rule": "avgpipe", "batch": "per-pipeline"}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("dies_after", [9, 10])
@pytest.mark.parametrize("options", [*SHAPES[1:], BY_TURNS], ids=str)
def test_calls_amid_a_loop_find_as_many_batches_begun_on_all_ranks(
    options: dict[str, Any], dies_after: int
) -> None:
    (expected, _), _ = replaced(2, function=train_and_evaluate, options=options, every=6)
    run, count = replaced(2, function=train_and_evaluate, options=options, every=6, dies_after=dies_after)
    assert count == 1
    for found in run:
        first = min(found[0])
        assert found == tuple({batch: n for batch, n in of.items() if batch >= first} for of in expected)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("options", [SHARED, BY_TURNS], ids=str)
def test_copies_that_batches_wait_for_leave_as_many_of_them_begun(options: dict[str, Any]) -> None:
    run, _ = replaced(2, function=train_and_evaluate, options=options, every=1000, interval=4)
    ahead = Plan(**options).batches_in_flight
    for _, _, begun in run:
        assert begun == {batch: min(batch + ahead, 2 * BATCHES) for batch in range(2 * BATCHES)}


@pytest.mark.ranks
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(("options", "dies_in"), [(SHARED, 12), (BY_TURNS, 11)], ids=str)
def test_who_is_killed_in_a_call_is_replaced_by_one_that_makes_it(
    options: dict[str, Any], dies_in: int
) -> None:
    arguments = {"function": train_and_evaluate, "options": options, "every": dies_in + 1, "interval": 6}
    (expected, _), _ = replaced(2, **arguments)
    run, count = replaced(2, **arguments, dies_in=dies_in)
    assert count == 1
    for losses, seen, _ in run:
        assert losses == {batch: loss for batch, loss in expected[0].items() if batch >= min(losses)}
        assert seen.keys() == expected[1].keys()
        assert seen == run[0][1]


def save_and_evaluate(dies_in: int | None = None, dies_after: int | None = None) -> Any:
    """Losses by batch, and evaluations, after every fourth batch, each between a save and another call.

    A rank dies in the evaluation after a batch, or after all calls there, before there is another copy.
    """
    losses, seen = dict[int, float](), dict[int, float]()
    is_first = os.environ[GENERATION] == "0"
    with made(SHARED) as p:
        for result in p.train(given(2 * BATCHES)[p.batches :]):
            losses[result.batch] = result.loss
            if result.batch % 4 < 3:
                continue
            if result.batch in (dies_in, dies_after) and is_first:
                send_copies(p)
            p.save(Path(os.environ["TEST_FOLDER"], "saved"))
            metric = (lambda *_: dies(1)) if result.batch == dies_in and is_first else None
            seen[result.batch] = p.evaluate(given()[:2], metric).loss
            assert p.once("three", lambda: 3) == 3
            p.wait_for_save()
            if result.batch == dies_after:
                dies(1)
        return losses, seen, p.state_dict()


def keep_the_best(dies_in_a_call: bool) -> str:
    """Save what has the best loss so far, which a new process does not remember; return the error."""
    is_first = os.environ[GENERATION] == "0"
    best = 0.0 if is_first else math.inf
    set_interval(6)
    try:
        with made(SHARED) as p:
            for result in p.train(given(2 * BATCHES)[p.batches :]):
                if result.batch == 15:
                    if is_first:
                        send_copies(p)
                    if result.loss < best:
                        p.save(Path(os.environ["TEST_FOLDER"], "best"))
                    p.evaluate(given()[:2], (lambda *_: dies(1)) if dies_in_a_call else None)
                    p.world.barrier()  # the others have made the call, too
                    dies(1)
    except PipelineError as error:
        return str(error)
    return ""


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("dies_in_a_call", [False, True])
def test_a_new_process_that_does_not_remember_the_best_loss_ends_the_run(dies_in_a_call: bool) -> None:
    (first, second), count = replaced(2, function=keep_the_best, dies_in_a_call=dies_in_a_call)
    assert count == 1
    assert "calls save() after 16 results, where the others have called evaluate()" in second
    assert "rank 1" in first


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("when", ["dies_in", "dies_after"])
@pytest.mark.parametrize("batch", [3, 7, 11])
def test_who_is_killed_after_calls_is_replaced_by_one_that_gets_what_they_have_found(
    when: str, batch: int
) -> None:
    (expected, _), _ = replaced(2, function=save_and_evaluate)
    run, count = replaced(2, function=save_and_evaluate, **{when: batch})
    assert count == 1
    assert_as_undisturbed(run, expected)
    if when == "dies_in":
        assert batch in run[1][1], "the new process has the evaluation too"


def train_on_another_loader(dies_after: int | None = None) -> Any:
    """Losses by batch of a loop that is left after the twelfth, and of another one with other batches."""
    losses, data, folder = dict[int, float](), given(), Path(os.environ["TEST_FOLDER"])

    def batches_from(first: int) -> Iterator[Any]:
        for number in range(first, 20):
            if number == 14 and not int(os.environ["RANK"]):
                (folder / "the batch before has begun").touch()
            yield data[number % BATCHES]

    set_interval(6)
    with made(BY_TURNS) as p:
        if p.batches < BATCHES:
            for result in p.train(batches_from(p.batches)):
                losses[result.batch] = result.loss
                if result.batch == dies_after and os.environ["RANK"] == "1":
                    while not (folder / "the batch before has begun").exists():
                        time.sleep(0.01)
                    dies(1)
                if result.batch == BATCHES - 1:
                    break
        for result in p.train(given(40)[20 + p.batches :]):
            losses[result.batch] = result.loss
    return losses


@pytest.mark.ranks
@pytest.mark.slow
def test_a_loop_that_is_left_after_a_replacement_leaves_no_batches_to_the_next_one() -> None:
    (first, second), count = replaced(2, function=train_on_another_loader, dies_after=BATCHES - 2)
    assert count == 1
    assert second == {batch: loss for batch, loss in first.items() if batch >= min(second)}


def die_once_copied(batches: int) -> None:
    """Have this process die when it has begun to take the copy after so many batches."""
    begin = StateCopies.begin

    def begin_and_die(copies: StateCopies, model: Any, worker: Any, there: int, in_flight: int) -> None:
        begin(copies, model, worker, there, in_flight)
        if there == batches:
            dies(1)

    StateCopies.begin = begin_and_die  # type: ignore[method-assign]


def lose_over_a_slow_line() -> None:
    """Die after the copy before batch 5 is begun, as a rank whose copies leave slowly."""
    post = GroupLink._post

    def post_late(link: GroupLink, number: int, message: Any) -> None:
        if message.words == Message.COPY.words:
            time.sleep(0.1)
        post(link, number, message)

    GroupLink._post = post_late  # type: ignore[method-assign]
    die_once_copied(5)


def lose_without_room() -> None:
    """Die after the copy before batch 5 is begun, as a rank that had no room for the one before."""
    begin = Snapshot.begin

    def begin_without_room(snapshot: Snapshot, model: Any, worker: Any, batches: int, done: Any) -> None:
        begin(snapshot, model, worker, batches, done)
        snapshot._failure = MemoryError("no room") if batches == 4 else None

    Snapshot.begin = begin_without_room  # type: ignore[method-assign]
    die_once_copied(5)


def train_and_lose(lose: Any) -> dict[int, float]:
    """Losses by batch, where the second rank is prepared to die."""
    losses = dict[int, float]()
    group._ENVELOPE_BYTES = group._RECORD_BYTES + 64  # what is longer waits in line, as larger states do
    if (os.environ[GENERATION], os.environ["RANK"]) == ("0", "1"):
        lose()
    with made(link="gloo") as p:
        for result in p.train(given()[p.batches :]):
            losses[result.batch] = result.loss
    return losses


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(("lose", "begins"), [(lose_over_a_slow_line, 4), (lose_without_room, 3)])
def test_no_copy_is_dropped_before_the_next_one_is_there(lose: Any, begins: int) -> None:
    (first, second), count = replaced(2, function=train_and_lose, lose=lose)
    assert count == 1
    assert min(second) == begins
    assert second == {batch: loss for batch, loss in first.items() if batch >= begins}


def train_with_settings(dies_after: int | None = None) -> Any:
    """Losses with a layer frozen from the fifth batch on, weights, how many were skipped, whether all have stopped."""
    losses, data = dict[int, str](), given(2 * BATCHES)
    for batch in (2, 11):
        data[batch] = (torch.full((8, 8), torch.nan), data[batch][1])
    with made(skip_nonfinite=True) as p:
        for end in (4, 2 * BATCHES):
            for result in p.train(data[p.batches : end]):
                losses[result.batch] = repr(result.loss)
                if result.batch == dies_after:
                    p.preempt()
                    dies(1)
            if p.batches == 4:
                p.requires_grad_("0.linear", False)
        found = losses, p.state_dict(), p.skipped_updates
        for _ in range(100 if dies_after else 0):
            p.step(*data[0])
            time.sleep(0.02)
            if p.preempted:
                break
        return *found, p.preempted


@pytest.mark.ranks
@pytest.mark.slow
def test_frozen_layers_counts_and_notices_outlast_a_replacement() -> None:
    (expected, _), _ = replaced(2, function=train_with_settings)
    run, count = replaced(2, function=train_with_settings, dies_after=18)
    assert count == 1
    for losses, weights, skipped, has_stopped in run:
        assert losses == {batch: loss for batch, loss in expected[0].items() if batch >= min(losses)}
        assert all(torch.equal(value, weights[name]) for name, value in expected[1].items())
        assert skipped == expected[2] == 2
        assert has_stopped


def train_and_look(dies_after: int) -> list[int]:
    """How many parts of the Worker before were there when each Worker was made."""
    found, parts, connect = list[int](), list[Any](), Session.open

    def look(session: Session) -> None:
        found.append(sum(part() is not None for part in parts))
        connect(session)
        for trained in session.worker.trained.values():
            memory = trained.arena.weights[0], *trained.arena.parameters
            held = trained, trained.stage.layers, *memory, *session.worker.lanes.values()
            parts[:] = map(weakref.ref, held)

    Session.open = look  # type: ignore[method-assign]
    with made() as p:
        optimizers = p.optimizers  # which the caller may keep
        schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers]
        groups = [one.param_groups[0] for one in optimizers]
        for result in p.train(given()[p.batches :]):
            if result.batch == dies_after:
                dies(1)
        assert len(schedules) == len(groups) == len(optimizers)
    return found


@pytest.mark.ranks
@pytest.mark.slow
def test_what_was_there_is_freed_before_all_is_made_anew() -> None:
    run, count = replaced(2, function=train_and_look, dies_after=5)
    assert count == 1
    assert run == [[0, 0], [0]]


def train_and_ask(dies_after: int | None = None) -> Any:
    """Losses of two epochs by batch, and what one rank has answered after the first."""
    losses, answers = dict[int, float](), list[str]()
    Intervals.after = lambda *_: 2 * BATCHES  # type: ignore[method-assign]
    StateCopies._late = property(lambda _: 0, lambda *_: None)  # type: ignore[assignment]  # sent a batch later
    with made() as p:
        for epoch in range(p.batches // BATCHES, 2):
            for result in p.train(given()[p.batches % BATCHES :]):
                losses[result.batch] = result.loss
                if result.batch - BATCHES == dies_after:
                    dies(1)
            answers.append(p.once("who answers", lambda: f"{os.environ['RANK']} after {epoch}"))  # noqa: B023
        return losses, answers


@pytest.mark.ranks
@pytest.mark.slow
def test_who_is_killed_later_does_not_ask_again_what_all_have_asked() -> None:
    run, count = replaced(2, function=train_and_ask, dies_after=BATCHES - 2)
    assert count == 1
    assert [answers for _, answers in run] == [["0 after 0", "0 after 1"], ["0 after 1"]]
    assert all(run[0][0][batch] == loss for batch, loss in run[1][0].items())


def _train_until_a_line_is_silent(timeout_s: float) -> float:
    """How long after its last result this rank has an error, since what the second stage sends is lost."""
    os.environ[STORE_FILE] = str(Path(os.environ["TEST_FOLDER"], "store"))
    ends: list[float] = []
    with (
        Pipeline(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            Plan(stages=2, micro_batches=2),
            loss_fn=nn.MSELoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            timeout_s=timeout_s,
            extensions=[Copies(every_s=0.01)],
        ) as p,
        fail_at(kind="cut line", rank=1, batch=5),
        pytest.raises((PipelineTimeout, PeerLost)),
    ):
        ends += (time.monotonic() for _ in p.train([(torch.ones(4, 2), torch.ones(4, 2))] * 20))
    return time.monotonic() - ends[-1]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_silent_line_between_ranks_that_are_there_ends_them_in_time() -> None:
    environment = {GENERATION: "0", STORE_FILE: "", "TORCHELASTIC_RUN_ID": ""}
    ranks = Ranks(2, _train_until_a_line_is_silent, environment=environment, timeout_s=2)
    ranks.join()
    first, _ = ranks.results()  # after which a launcher would end the second
    assert 2 < first < 2 + limit(5)


@pytest.mark.ranks
def test_a_rank_that_is_killed_and_not_replaced_ends_the_others() -> None:
    ranks = Ranks(
        2,
        train,
        environment={GENERATION: "0", STORE_FILE: "", "TORCHELASTIC_RUN_ID": ""},
        options=SHAPES[2],
        deaths=[(0, 1, 0, 4)],
    )
    (code, text), _ = ranks.join()
    assert code == 1
    assert "PeerLost: rank 1 (stage 1) died" in text


def test_spares_without_copies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GENERATION, "0")
    monkeypatch.delitem(sys.modules, "avgpipe.fault.recovery")
    with pytest.raises(ValueError, match=r"--spares, and the Pipeline has no avgpipe[.]Copies"):
        Pipeline(nn.Linear(2, 2), Plan(), loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD)
    monkeypatch.undo()
    refuse_without_copies()  # a Pipeline with Copies came before this one


def test_an_iterator_is_not_evaluated_twice_however_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: Any) -> Any:
        raise PeerLost("rank 1 died")

    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv(STORE_FILE, "")
    monkeypatch.setattr("avgpipe.pipeline.run_evaluation", lose)
    for how in ("positional", "by name"):
        with made() as p:
            p._session.policy.recover = pytest.fail  # type: ignore[method-assign]
            with pytest.raises(PeerLost, match="rank 1 died"):
                p.evaluate(iter(given())) if how == "positional" else p.evaluate(loader=iter(given()))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"isolate": True, "pipelines": 2}, "pipelines in processes of their own replace each other"),
        ({"spread": True, "pipelines": 2}, "use isolate=True"),
        ({"replication": [2, 1], "stages": 2, "micro_batches": 2}, "leave it out"),
        ({"schedule": "pipedream-2bw", "stages": 2, "micro_batches": 2}, "use a schedule that flushes"),
        ({"advance": "auto", "stages": 2, "micro_batches": 2}, "give numbers"),
    ],
)
def test_what_copies_cannot_have(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Pipeline(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            Plan(**options),
            loss_fn=nn.MSELoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            extensions=[Copies(every_s=1)],
        )
    assert issubclass(PeerLost, RuntimeError)
