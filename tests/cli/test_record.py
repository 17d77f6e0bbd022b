"""The record of a run that several pipelines tell alike, at times of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from avgpipe.cli.config import TrainConfig
from avgpipe.cli.output import CommandFailed
from avgpipe.cli.record import SharedRecord
from avgpipe.plan import Plan
from avgpipe.report.course import Totals
from tests.cli.command import rows, strict

TOTALS = vars(Totals(lower_is_better=True, target=2.0))


class Clock:
    """What the launcher's clock says."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("avgpipe.cli.record.time", made)
    return made


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[SharedRecord]:
    made = SharedRecord(TrainConfig(workload="awd-lstm", out=str(tmp_path / "run")), tmp_path)
    made.hear("begin", dict(TOTALS), 8)
    made.hear("open", Plan(pipelines=2).to_json())
    yield made
    made.close({})


def row(batch: int, samples: int, **more: Any) -> dict[str, Any]:
    return {
        "batch": batch,
        "pipeline": None,
        "epoch": 0,
        "samples": samples,
        "loss": 3.0,
        "seconds": math.nan,
        **more,
    }


def validation(batch: int, loss: float) -> dict[str, Any]:
    facts = {
        "metrics": {"loss": loss},
        "metric": loss,
        "loss": loss,
        "skipped_updates": 0,
        "seconds": math.nan,
    }
    return {"epoch": 0, "batch": batch, "samples": 4 * batch, **facts}


def segment(first: int, count: int) -> dict[str, Any]:
    return {"epoch": 0, "start": first, "first": first, "count": count}


def test_what_all_pipelines_tell_is_written_once(
    recorded: SharedRecord, clock: Clock, tmp_path: Path
) -> None:
    for pipeline in range(2):
        recorded.hear("begin", dict(TOTALS), 8)
        recorded.hear("open", Plan(pipelines=2).to_json())
        recorded.hear("validation", validation(0, 4.0))
        clock.now_s = 100.0 + 2.5 * pipeline
        recorded.hear("segment", segment(0, 2))
        for batch in range(2):
            clock.now_s += 1
            recorded.hear("batch", batch, row(batch, 4 * batch + 4), 4)
        recorded.hear("validation", validation(2, 2.5))
    recorded.hear("segment", segment(2, 6))
    clock.now_s += 0.5
    recorded.hear("batch", 2, row(2, 12), 4)
    written = [(r["kind"], r["batch"], r["seconds"]) for r in rows(tmp_path / "run")]
    before = [("valid", 0, 0.0), ("train", 0, 1.0), ("train", 1, 2.0), ("valid", 2, 2.0)]
    assert written == [*before, ("train", 2, 2.5)]  # without the pause between the segments


def test_what_was_left_of_a_batch_is_marked(recorded: SharedRecord, tmp_path: Path) -> None:
    recorded.hear("segment", segment(0, 4))
    for number, (batch, samples) in enumerate([(0, 4), (1, 6), (2, 10), (1, 12), (2, 14)]):
        recorded.hear("batch", number, row(batch, samples), 2)
    marked = [(r["batch"], r["samples"]) for r in rows(tmp_path / "run") if r.get("taken_over")]
    assert marked == [(1, 12), (2, 14)]


def test_a_result_after_one_that_was_never_reported_makes_no_sense(recorded: SharedRecord) -> None:
    with pytest.raises(ValueError, match="result 1 arrived after result -1"):
        recorded.hear("batch", 1, row(1, 8), 4)
    with pytest.raises(ValueError, match="unknown question"):
        recorded.answer(lambda _: None, True, "what")


def test_a_pipeline_that_joins_gets_the_totals_once_all_before_it_was_reported(
    recorded: SharedRecord, clock: Clock
) -> None:
    heard: list[Any] = []
    recorded.hear("segment", segment(0, 2))
    recorded.hear("batch", 0, row(0, 4), 4)
    recorded.answer(heard.append, True, "standing", 2, 3)
    recorded.hear("batch", 1, row(1, 8), 4)
    assert not heard  # it comes with batch 3, of the next segment
    recorded.hear("validation", validation(2, 2.5))
    recorded.hear("segment", segment(2, 5))
    (standing,) = heard
    assert standing["segment"] == segment(2, 5)
    done = Totals(**standing["done"])
    assert (done.samples, done.epoch_samples, done.loss, done.best, done.target) == (8, 8, 2.5, 2.5, 2.0)
    assert not done.reached
    clock.now_s += 60
    recorded.answer(heard.append, True, "standing", 2, 3)
    assert [standing["segment_s"] for standing in heard] == [0, 60]


def test_the_first_summary_stays_and_lists_what_joined_and_left(
    recorded: SharedRecord, clock: Clock, tmp_path: Path
) -> None:
    recorded.hear("segment", segment(0, 1))
    clock.now_s += 2
    recorded.hear("batch", 0, row(0, 4), 4)
    answers: list[Any] = []
    summary = {
        "system": "avgpipe",
        "metric_name": "loss",
        "trivial_metric": None,
        "target": None,
        "train_seconds": 9,
    }
    for batches, writes in enumerate([False, True, True], 1):  # the first one is on another host
        recorded.answer(answers.append, writes, "finish", {**summary, "batches": batches}, "a run")
    assert answers == [False, True, False]
    link = tmp_path / "run" / "join.json"
    assert link.is_symlink()
    recorded.close({"lost": [], "joined": [{"pipeline": 1, "step": 7}]})
    found = strict((tmp_path / "run" / "summary.json").read_text())
    assert (found["batches"], found["train_seconds"], found["samples_per_second"]) == (1, 2.0, 2.0)
    assert found["joined"] == [{"pipeline": 1, "step": 7}]
    assert (tmp_path / "run" / "curves.png").is_file()
    assert not link.is_symlink()


def test_what_no_pipeline_could_go_on_with_ends_the_command(recorded: SharedRecord) -> None:
    with pytest.raises(CommandFailed, match="infinities") as failure:
        recorded.answer(lambda _: None, True, "fail", "weights with infinities")
    assert failure.value.exit_code == 1
