"""The emulated cluster as a whole, on two workers and for as short as can be."""

import pytest

from avgpipe.bench.schedules import benchmark
from avgpipe.bench.schedules.settings import SCHEDULES, SYSTEMS, ScheduleSettings
from avgpipe.errors import PipelineError

NEW = (*SCHEDULES[3:], *SYSTEMS, "torch-advance-forward")


def short(*rows):
    return ScheduleSettings(
        stages=2,
        micro_batches=2,
        forward_s=1e-3,
        backward_s=2e-3,
        activation_bytes=4096,
        batches=1,
        rounds=1,
        only=rows,
    )


def test_every_schedule_and_system_is_a_row_beside_its_simulated_time():
    result = benchmark.run(short(*NEW))
    assert result.unavailable == ()
    assert [row.name for row in result.rows] == [
        "avgpipe interleaved-1f1b, 2 a rank",
        "avgpipe zero-bubble-h1",
        "avgpipe zero-bubble-v, 2 a rank",
        "avgpipe pipedream",
        "avgpipe pipedream-2bw",
        "avgpipe ea-pipe",
        "avgpipe data-parallel",
        "avgpipe model-parallel",
        "torch advance-forward (ours)",
    ]
    assert [row.simulated_s is not None for row in result.rows] == [True] * 8 + [False]


def test_a_row_that_fails_is_told_and_the_others_are_measured(monkeypatch):
    monkeypatch.setattr(benchmark, "_WORKER", "tests.bench.schedules.targets:one_row_fails")
    said = []
    result = benchmark.run(short("1f1b", "pipedream", "model-parallel"), said.append)
    assert [row.name for row in result.rows] == ["avgpipe 1f1b", "avgpipe model-parallel"]
    (left_out,) = result.unavailable
    assert left_out.name == "avgpipe pipedream"
    assert left_out.reason == "worker 1 of 2 failed with exit code 1: ValueError: rank 1 had enough"
    assert any(line.startswith("avgpipe pipedream failed, the others begin anew") for line in said)


def refusing(rows, said):
    """In place of the workers: fails at what ``said`` tells next, then measures nothing or one row."""

    def run_on_ranks(target, workers, arguments, *, say, **_):
        if said:
            say(said.pop(0))
            raise PipelineError("a worker failed")
        assert arguments["without"] == rows
        return [{"line_bytes_per_s": None, "rows": [], "unavailable": []}]

    return run_on_ranks


def test_a_failure_between_rows_ends_the_run(monkeypatch):
    monkeypatch.setattr(benchmark, "run_on_ranks", refusing([], ["measuring the line"]))
    with pytest.raises(PipelineError, match="a worker failed"):
        benchmark.run(short())


def test_where_every_row_fails_the_run_does(monkeypatch):
    rows = ["avgpipe 1f1b", "torch gpipe"]
    said = ["building: avgpipe 1f1b", "round 0 of 1: torch gpipe"]
    monkeypatch.setattr(benchmark, "run_on_ranks", refusing(rows, said))
    with pytest.raises(PipelineError, match="no row is left; torch gpipe: a worker failed"):
        benchmark.run(short("1f1b", "torch-gpipe"))


def test_after_some_rows_have_failed_something_else_is_wrong(monkeypatch):
    said = [f"building: row {n}" for n in range(20)]
    monkeypatch.setattr(benchmark, "run_on_ranks", refusing([], said))
    with pytest.raises(PipelineError, match="a worker failed"):
        benchmark.run(short())
    assert said[0] == "building: row 6"
