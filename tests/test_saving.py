"""When a training loop saves, and which of its checkpoints stay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from avgpipe import CheckpointError, Checkpoints, Pipeline, Plan
from avgpipe.checkpoint import verify_checkpoint
from avgpipe.saving import Timetable
from tests.checkpoint.test_snapshot import PLANS, batches, make
from tests.checkpoint.test_writer import slow_disk
from tests.isolated import Isolated
from tests.runner import run

PLAN = PLANS[-2]


def saved(folder: Path) -> dict[str, int]:
    """Batches of each checkpoint, by name."""
    return {path.name: verify_checkpoint(path).batches for path in sorted(folder.glob("[!.]*"))}


def train_and_save(p: Pipeline, checkpoints: Checkpoints, count: int, **options: Any) -> None:
    list(p.train(batches(count)))
    checkpoints.save(**options)


@pytest.mark.parametrize("wait", [True, False])
def test_the_newest_stay_and_the_best(wait: bool, tmp_path: Path) -> None:
    with make(PLAN) as p:
        checkpoints = Checkpoints(p, tmp_path, keep=2)
        for count in range(1, 5):
            train_and_save(p, checkpoints, count, best=count == 2, wait=wait)
        p.wait_for_save()
        assert saved(tmp_path) == {"batch-000000006": 6, "batch-000000010": 10, "best": 3, "last": 10}
        checkpoints = Checkpoints(p, tmp_path)
        train_and_save(p, checkpoints, 1)
        assert saved(tmp_path) == {"best": 3, "last": 11}


def test_files_that_several_have_are_there_once(tmp_path: Path) -> None:
    with make(PLAN) as p:
        Checkpoints(p, tmp_path, keep=2).save(best=True)
    inodes = [{f.stat().st_ino for f in path.glob("*.pt")} for path in tmp_path.iterdir()]
    assert inodes == [inodes[0]] * 3


def test_where_there_are_no_links_files_are_copied(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*paths: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    with make(PLAN) as p:
        Checkpoints(p, tmp_path).save(best=True)
    assert saved(tmp_path) == {"best": 0, "last": 0}


def test_what_fails_in_another_folder_leaves_the_last_one(tmp_path: Path) -> None:
    with make(PLAN) as p:
        p.save(tmp_path / "last")
        (tmp_path / "file").touch()
        list(p.train(batches(2)))
        with pytest.raises(
            CheckpointError, match=r"nothing was saved to .*last: is a file: name a folder: .*file"
        ):
            p.save(tmp_path / "last", also=[tmp_path / "best", tmp_path / "file"])
        (tmp_path / "file").unlink()
        assert saved(tmp_path) == {"best": 2, "last": 0}


def test_the_newest_that_is_whole_is_loaded(tmp_path: Path, caplog: Any) -> None:
    with make(PLAN) as p:
        checkpoints = Checkpoints(p, tmp_path, keep=3)
        assert not checkpoints.load()
        for count in (1, 1, 1):
            train_and_save(p, checkpoints, count)
        next((tmp_path / "last").glob("stage-1*")).write_bytes(b"")  # which batch-3 has, too
        assert checkpoints.load()
        assert p.batches == 2
        assert "stage-1" in caplog.text
        assert "batch-000000002 is loaded instead" in caplog.text
        checkpoints.save()  # of another course than batch-3
        assert saved(tmp_path) == {"batch-000000001": 1, "batch-000000002": 2, "last": 2}
        for path in tmp_path.iterdir():
            (path / "manifest.json").write_text("")
        with pytest.raises(CheckpointError, match="last"):
            checkpoints.load()


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("wait", [True, False])
def test_the_only_one_that_loads_stays_until_another_is_there(wait: bool, keep: int, tmp_path: Path) -> None:
    with make(PLAN) as p:
        checkpoints = Checkpoints(p, tmp_path, keep=3)
        for count in (1, 1, 1):
            train_and_save(p, checkpoints, count)
        next((tmp_path / "last").glob("stage-1*")).write_bytes(b"")  # which batch-3 has, too
        checkpoints = Checkpoints(p, tmp_path, keep=keep)
        assert checkpoints.load()
        list(p.train(batches(2)))

        def save() -> None:
            checkpoints.save(wait=wait)
            p.wait_for_save()

        with slow_disk(is_full=True) as disk:
            disk.goes_on.set()
            with pytest.raises(CheckpointError, match="No space left"):
                save()
        assert checkpoints.load()
        assert p.batches == 2
        for count in (2, 1):
            train_and_save(p, checkpoints, count, wait=wait)
        p.wait_for_save()
    assert saved(tmp_path) == {"last": 5} | ({"batch-000000004": 4, "batch-000000005": 5} if keep > 1 else {})


def test_a_save_tells_that_the_one_before_has_failed_and_is_made(tmp_path: Path) -> None:
    with make(PLAN) as p:
        checkpoints = Checkpoints(p, tmp_path)
        with slow_disk(is_full=True) as disk:
            checkpoints.save(wait=False)
            disk.goes_on.set()
            p._saving.finish(10)
        list(p.train(batches(2)))
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoints.save(wait=False)
        p.wait_for_save()
    assert saved(tmp_path) == {"last": 2}


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": True}, {"every_s": 0}, {"every_s": float("nan")}])
def test_wrong_options_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with make(PLAN) as p, pytest.raises(ValueError, match=next(iter(options))):
        Checkpoints(p, tmp_path, **options)


def test_a_clock_is_not_asked_where_processes_are_replaced(tmp_path: Path) -> None:
    with make(PLAN, copies_every_s=1) as p:
        checkpoints = Checkpoints(p, tmp_path)
        with pytest.raises(ValueError, match=r"isolate=True save by the number of a batch"):
            checkpoints.due()
        train_and_save(p, checkpoints, 2)
    assert saved(tmp_path) == {"last": 2}


def _ask_a_clock(folder: str) -> int:
    plan = Plan(micro_batches=2, pipelines=2, isolate=True)
    with make(plan) as p:
        checkpoints = Checkpoints(p, folder, every_s=60)
        with pytest.raises(ValueError, match="save by the number of a batch"):
            checkpoints.due()
        checkpoints.go_on(checkpoints.standing(), 0)  # as for pipelines that join
        assert not checkpoints.due()
        list(p.train(batches(2)))
        return p.batches


@pytest.mark.ranks
def test_a_clock_is_not_asked_where_pipelines_come_later(tmp_path: Path) -> None:
    run = Isolated(2, 1, _ask_a_clock, restarts=0, folder=str(tmp_path))
    assert list(run.results.values()) == [2, 2], run.failures


def _save_when_it_is_due(folder: str) -> list[int]:
    with make(PLAN) as p:
        checkpoints = Checkpoints(p, folder, every_s=1e-6)
        found = []
        for _ in p.train(batches(10)):
            if checkpoints.due():
                checkpoints.save(wait=False)
                found.append(p.batches)
        return found


@pytest.mark.ranks
def test_all_ranks_find_alike_that_a_checkpoint_is_due(tmp_path: Path) -> None:
    first, second = run(2, _save_when_it_is_due, folder=str(tmp_path))
    assert first == second
    assert len(first) > 2
    assert saved(tmp_path) == {"last": first[-1]}


# ---- when ranks agree on checkpoints, and how often -----------------------------------------------------------------


def simulate(interval_s, batch_s, batches, pipelines=2):
    """Times of the checkpoints of a run, and the number of agreements."""
    pace, now, saved, saves, agreements = Timetable(interval_s, pipelines), 0.0, 0.0, [], 0
    done = 0
    while done < batches:
        count = pace.batches()
        assert count % pipelines == 0
        done += count
        now += count * batch_s
        agreements += 1
        if pace.due(count, now - saved):
            saves.append(now)
            saved = now
    return saves, agreements


def test_a_pipeline_that_joins_goes_by_its_own_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("avgpipe.saving.time.monotonic", lambda: now_s)
    with make(PLAN) as p:
        there = Checkpoints(p, tmp_path, every_s=60)
        now_s = 1030
        standing = there.standing()
        now_s = 5  # on another host
        here = Checkpoints(p, tmp_path, every_s=60)
        here.go_on(standing, 20)
        assert not here.due(here.batches_to_agreement)
        now_s = 16
        assert here.due(here.batches_to_agreement)


def test_checkpoints_come_at_about_the_interval():
    saves, _ = simulate(interval_s=600, batch_s=0.1, batches=40_000)
    gaps = [b - a for a, b in zip([0.0, *saves], saves)]
    assert len(saves) == 6
    assert all(600 <= gap < 602 for gap in gaps)


def test_agreements_are_few():
    _, agreements = simulate(interval_s=600, batch_s=0.1, batches=40_000)
    assert agreements < 40


def test_batches_slower_than_the_interval_are_each_followed_by_a_checkpoint():
    saves, agreements = simulate(interval_s=1, batch_s=5.0, batches=100)
    assert len(saves) == agreements
    assert agreements >= 46
