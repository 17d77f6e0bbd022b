"""Saves that training does not wait for: the same bits, no error is lost, and there is always a whole checkpoint."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from avgpipe import CheckpointError, PeerLost, PipelineTimeout, Plan
from avgpipe.checkpoint import verify_checkpoint
from avgpipe.checkpoint.folder import agreed
from tests.checkpoint.test_checkpoint import same
from tests.checkpoint.test_snapshot import PLANS, batches, make, trained
from tests.patience import limit
from tests.runner import Ranks, run, touch

PLAN = PLANS[-2]
FULL = "nothing was saved to .*: No space left on device: .*stage-0"


class Disk:
    """Stands for ``os.fsync``, which is ``asked``, waits until ``goes_on``, and then fails if it ``is_full``."""

    def __init__(self, is_full: bool) -> None:
        self._is_full, self._fsync = is_full, os.fsync
        self.asked, self.goes_on = threading.Event(), threading.Event()

    def __call__(self, descriptor: int) -> None:
        self.asked.set()
        self.priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        assert self.goes_on.wait(limit(60))
        if self._is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._fsync(descriptor)


@contextmanager
def slow_disk(is_full: bool = False) -> Iterator[Disk]:
    disk = Disk(is_full)
    os.fsync, fsync = disk, os.fsync
    try:
        yield disk
    finally:
        disk.goes_on.set()
        os.fsync = fsync


def save_and_train_on(plan: Plan, folder: str) -> bool:
    """What is trained while the checkpoint is being written is not in it, and is the same as without one."""
    with make(plan) as p:
        list(p.train(batches(10)[:5]))
        expected = trained(p, batches(10)[5:])
    with slow_disk() as disk, make(plan) as p:
        list(p.train(batches(10)[:5]))
        p.save(folder, wait=False)
        found = trained(p, batches(10)[5:])
        assert not os.path.exists(f"{folder}/manifest.json")
        disk.goes_on.set()
        p.wait_for_save()
        assert verify_checkpoint(folder).batches == 5
        with make(plan) as other:
            other.load(folder)
            resumed = trained(other, batches(10)[5:])
    for losses, reference, replica in (found, resumed):
        assert losses == expected[0]
        assert same(reference, expected[1])
        assert same(replica, expected[2])
    return True


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"K{p.stages}N{p.pipelines}{p.rule}")
def test_what_was_saved_meanwhile_goes_on_bit_for_bit(plan: Plan, tmp_path: Path) -> None:
    save_and_train_on(plan, str(tmp_path / "c"))


def _on_ranks(folder: str) -> bool:
    return all(save_and_train_on(plan, f"{folder}/{n}") for n, plan in enumerate(PLANS) if plan.stages == 2)


@pytest.mark.ranks
@pytest.mark.slow
def test_what_was_saved_meanwhile_goes_on_bit_for_bit_on_ranks(tmp_path: Path) -> None:
    assert run(2, _on_ranks, folder=str(tmp_path)) == [True, True]


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    with slow_disk() as disk, make(PLAN) as p:
        p.save(tmp_path / "c", wait=False)
        list(p.train(batches(2)))
        threading.Timer(0.1, disk.goes_on.set).start()
        p.save(tmp_path / "c", wait=False)
        assert disk.goes_on.is_set()
        list(p.train(batches(2)))
    assert verify_checkpoint(tmp_path / "c").batches == 2
    assert sorted(f.name[:7] for f in (tmp_path / "c").iterdir()) == [
        ".lock",
        "manifes",
        "stage-0",
        "stage-1",
    ]


def test_a_writer_gives_way_to_training(tmp_path: Path) -> None:
    with slow_disk() as disk, make(PLANS[0]) as p:
        disk.goes_on.set()
        own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        p.save(tmp_path / "c")
        assert disk.priority == own
        p.save(tmp_path / "c", wait=False)
        p.wait_for_save()
        assert disk.priority == min(19, own + 10)
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def test_a_load_finds_what_was_saved_before(tmp_path: Path) -> None:
    with make(PLAN) as p:
        for count in (2, 1):
            list(p.train(batches(count)))
            p.save(tmp_path / "c", wait=False)
        p.load(tmp_path / "c")
        assert p.batches == 3


@pytest.mark.parametrize("reports", ["wait_for_save", "save", "close"])
def test_a_full_disk_is_reported_once_and_costs_the_save_alone(reports: str, tmp_path: Path) -> None:
    p = make(PLAN)
    p.save(tmp_path / "c")
    before = sorted(f.name for f in (tmp_path / "c").iterdir())
    list(p.train(batches(2)))
    with slow_disk(is_full=True) as disk:
        p.save(tmp_path / "c", wait=False)
        list(p.train(batches(2)))
        disk.goes_on.set()
        arguments = [tmp_path / "c"] if reports == "save" else []
        with pytest.raises(CheckpointError, match=FULL):
            getattr(p, reports)(*arguments)
    assert sorted(f.name for f in (tmp_path / "c").iterdir()) == before
    assert verify_checkpoint(tmp_path / "c").batches == 0
    if reports != "close":
        list(p.train(batches(2)))
        p.save(tmp_path / "c", wait=False)
        p.wait_for_save()
        assert verify_checkpoint(tmp_path / "c").batches == 6
    p.close()


def test_an_error_of_training_is_not_hidden_by_one_of_a_save(tmp_path: Path, caplog: Any) -> None:
    def fail() -> None:
        with slow_disk(is_full=True) as disk, make(PLAN) as p:
            p.save(tmp_path / "c", wait=False)
            disk.goes_on.set()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert "No space left on device" in caplog.text


def test_weights_that_are_not_finite_are_reported_by_the_wait(tmp_path: Path) -> None:
    with make(PLANS[0]) as p:
        p._session.worker.trained[0, 0].arena.weights[0][0] = torch.inf
        p.save(tmp_path / "c", wait=False)
        with pytest.raises(CheckpointError, match="has infinities or NaN"):
            p.wait_for_save()
        p.wait_for_save()
    assert not (tmp_path / "c").exists()


def test_without_room_for_a_copy_the_save_alone_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise MemoryError("no room")

    with make(PLAN) as p:
        with monkeypatch.context() as memory:
            memory.setattr("avgpipe.checkpoint.snapshot._Copied.of", full)
            p.save(tmp_path / "c", wait=False)
        with pytest.raises(CheckpointError, match="no room"):
            p.wait_for_save()
        list(p.train(batches(2)))
        p.save(tmp_path / "c", wait=False)
    assert verify_checkpoint(tmp_path / "c").batches == 2


def save_in_a_loop(plan: Plan, folder: str, every: int) -> bool:
    """Each checkpoint of a loop that goes on is what training on its batches comes to, whatever is in flight."""
    given, in_flight = batches(12), []
    with make(plan) as p:
        for number, _ in enumerate(p.train(given)):
            if number % every == 0:
                in_flight.append(p.batches - number - 1)
                p.save(f"{folder}/{number}", wait=False)
    for number, ahead in zip(range(0, 12, every), in_flight):
        with make(plan) as p, make(plan) as other:
            list(p.train(given[: number + 1 + ahead]))
            other.load(f"{folder}/{number}")
            assert other.batches == p.batches
            assert same(other.state_dict(), p.state_dict())
            assert same(
                other.state_dict(weights=plan.pipelines - 1), p.state_dict(weights=plan.pipelines - 1)
            )
    return plan.pipelines == 1 or any(in_flight)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("batch", ["global", "per-pipeline"])
def test_a_loop_saves_while_batches_are_in_flight(batch: str, every: int, tmp_path: Path) -> None:
    plan = Plan(stages=2, pipelines=2, micro_batches=4, batch=batch)
    assert save_in_a_loop(plan, str(tmp_path), every) or batch == "global"


def test_an_evaluation_right_after_leaves_what_is_saved_as_it_was(tmp_path: Path) -> None:
    plan, given = Plan(stages=2, pipelines=2, micro_batches=4, batch="per-pipeline"), batches(12)
    with make(plan) as p:
        expected = [result.loss for result in p.train(given)]
    with make(plan) as p:
        p.save(tmp_path / "first", wait=False)
        p.wait_for_save()
        for result in p.train(given):
            if result.batch == 4:
                p.save(tmp_path / "c", wait=False)
                assert p._saving.is_under_way
                p.evaluate(given)
    with make(plan) as p:
        p.load(tmp_path / "c")
        first = p.batches
        assert [result.loss for result in p.train(given[first:])] == expected[first:]


def _loop_on_ranks(folder: str) -> bool:
    plan = Plan(stages=2, pipelines=3, micro_batches=3, batch="per-pipeline")
    return all(save_in_a_loop(plan, f"{folder}/{every}", every) for every in (1, 3))


@pytest.mark.ranks
@pytest.mark.slow
def test_a_loop_on_ranks_saves_while_batches_are_in_flight(tmp_path: Path) -> None:
    assert run(2, _loop_on_ranks, folder=str(tmp_path)) == [True, True]


def _one_rank_has_no_room(folder: str) -> None:
    with make(PLAN) as p:
        p.save(folder)
        with slow_disk(is_full=p.world.rank == 1) as disk:
            p.save(folder, wait=False)
            list(p.train(batches(2)))
            disk.goes_on.set()
            with pytest.raises(CheckpointError, match=r"\(rank 1\): No space left on device"):
                p.wait_for_save()
        list(p.train(batches(2)))
        p.save(folder, wait=False)


@pytest.mark.ranks
def test_all_ranks_raise_where_one_has_no_room(tmp_path: Path) -> None:
    run(2, _one_rank_has_no_room, folder=str(tmp_path / "c"))
    assert verify_checkpoint(tmp_path / "c").batches == 4
    assert len(list((tmp_path / "c").glob("*.pt"))) == 2


def _train_while_the_disk_is_slow(folder: str) -> None:
    with make(PLAN) as p:
        list(p.train(batches(2)))
        p.save(folder, wait=False)
        p.wait_for_save()
        with slow_disk() as disk:
            p.save(folder, wait=False)
            list(p.train(batches(2)))
            assert disk.asked.wait(limit(60))
            touch("writing")
            p.wait_for_save()  # until it is killed


@pytest.mark.ranks
def test_killed_while_they_write_ranks_leave_the_checkpoint_before(tmp_path: Path) -> None:
    workers = Ranks(2, _train_while_the_disk_is_slow, folder=str(tmp_path / "c"))
    workers.wait_for(2, "writing")
    workers.kill(0, 1)
    workers.join(10)
    assert len(list((tmp_path / "c").glob("*.pt"))) == 4
    with make(PLAN) as p:
        p.load(tmp_path / "c")
        assert p.batches == 2
        p.save(tmp_path / "c")
    assert len(list((tmp_path / "c").glob("*.pt"))) == 2


def _abandon_a_write(folder: str) -> None:
    with make(PLAN) as p:
        with slow_disk() as disk:
            p.save(folder, wait=False)
            list(p.train(batches(2)))
            if p.world.rank == 0:
                disk.goes_on.set()
                with pytest.raises(PipelineTimeout, match=r"waited 0\.1 s for its checkpoint"):
                    p._saving.close(0.1)
                p._saving.finish(limit(30))
            else:
                assert disk.asked.wait(limit(60))
            dist.barrier()
        with pytest.raises(PeerLost):
            p.wait_for_save()


@pytest.mark.ranks
@pytest.mark.slow
def test_a_thread_that_waits_for_the_disk_of_another_rank_ends_with_the_wait(tmp_path: Path) -> None:
    """If it stayed inside gloo, it would abort its process at the end."""
    run(2, _abandon_a_write, folder=str(tmp_path / "c"))


class _Two:
    """A world of two ranks, of which the other one has come to ``theirs``."""

    size = 2

    def __init__(self, theirs: list[Any]) -> None:
        self._theirs = theirs

    def gather(self, mine: list[Any]) -> list[Any]:
        return [mine, self._theirs]


@pytest.mark.parametrize(
    ("theirs", "match"),
    [
        ([None, False, None], r"^not saved \(rank 0\): the disk is gone$"),
        (["no memory", False, None], r"^not saved \(rank 0\): the disk is gone; \(rank 1\): no memory$"),
    ],
)
def test_ranks_that_fail_in_one_save_are_all_named(theirs: list[Any], match: str) -> None:
    def fail() -> None:
        raise CheckpointError("the disk is gone")

    world: Any = _Two(theirs)
    with pytest.raises(CheckpointError, match=match):
        agreed(world, "not saved", fail)
