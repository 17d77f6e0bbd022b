"""Four small GPUs in one: what is measured first, ranks that meet, torch's schedules over the group, and the model."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from avgpipe import device
from avgpipe.runtime.streams import Streams
from benchmarks.one_card import fill, meeting, phases, quarters, shared_worker, systems
from benchmarks.one_card.meeting import Meeting
from benchmarks.one_card.systems import Quarter
from tests.cli.command import ROOT, environment


def test_rows_are_in_order_of_worth_and_each_is_there_once():
    found = list(quarters.rows())
    assert len(set(found)) == len(found)
    assert [row.name for row in found[:4]] == [
        "avgpipe 1f1b, N = 1, M = 4 each, own",
        "avgpipe advance-forward, N = 2, M = 4 each, own",
        "avgpipe advance-forward, N = 4, M = 4 each, own",
        "data parallel",
    ]
    assert {(row.model, row.precision, row.wire) for row in found[:4]} == {("bert", "fp32", 0.0)}
    assert not any(row.system == "torch" and row.wire for row in found)
    assert {row.precision for row in found} == {"fp32", "bf16"}


def test_every_row_of_ours_is_a_plan_and_its_layers_can_be_cut():
    quarter = Quarter(0, 4, torch.device("cpu"), True)
    for row in quarters.rows():
        cuts = [0, *quarter.cuts(row.model), len(quarter.layers(row.model))]
        assert len({after - before for before, after in pairwise(cuts)}) == 1  # equal stages
        assert quarter.samples % row.M == 0


@pytest.mark.parametrize(("pipelines", "priorities"), [(1, [0]), (2, [-1, 0]), (4, [-3, -2, -1, 0])])
def test_ranked_pipelines_have_streams_of_falling_priority(pipelines, priorities, monkeypatch):
    made, kept = [], device.backend.idle
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "Stream", lambda at, priority: made.append(priority))
    monkeypatch.setattr(device.backend, "Event", lambda at: None)
    monkeypatch.setattr("avgpipe.runtime.streams.DeviceClock", lambda at: None)
    with systems._ranked(pipelines):
        streams = Streams(torch.device("cpu"))  # with one for copies
        for _ in range(pipelines):
            streams.lane(0, False)
        assert device.backend.idle is not kept
    assert made[1:] == priorities
    assert device.backend.idle is kept


@pytest.mark.ranks
@pytest.mark.parametrize("code", [0, 3])
def test_ranks_are_waited_for_and_one_that_fails_ends_all(code, monkeypatch):
    programs = [f"raise SystemExit({code})", "import time; time.sleep(60)" if code else ""]
    ranks = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        quarters._wait(ranks, 60)
        assert ranks[0].returncode == code
        assert (ranks[1].poll() is None) == bool(code)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_a_rank_that_failed_does_not_shift_later_meetings(monkeypatch):
    store = dist.HashStore()
    first, second = (Meeting(rank, 2, store) for rank in range(2))
    monkeypatch.setattr(meeting, "LIMIT", timedelta(milliseconds=1))
    with pytest.raises(RuntimeError):
        first.wait("row 1, round 0")  # alone there: the other has failed before
    monkeypatch.undo()
    other = threading.Thread(target=second.wait, args=("row 2, round 0",))
    other.start()
    first.wait("row 2, round 0")
    other.join()
    store.set("peak/1", "7")
    assert first.gathered("peak", 3) == [3, 7]
    assert first.decided("late", True) is second.decided("late", False) is True


@pytest.mark.ranks
def test_the_program_measures_every_system_on_the_cpu(tmp_path):
    out = tmp_path / "record.json"
    words = ["--device", "cpu", "--small", "--parts", "2", "--rows", "10"]
    command = [sys.executable, "-m", "benchmarks.one_card.quarters", *words, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads(out.read_text())
    assert [row.get("failed") for row in record["rows"]] == [None] * 11
    systems = [row.get("system") for row in record["rows"]]
    assert systems == [None, *["avgpipe"] * 3, "data parallel", *["avgpipe"] * 5, "torch"]
    assert record["rows"][0]["holds"] in (True, False)
    assert record["left_out"][0]["row"] == "avgpipe 1f1b, N = 1, M = 8 each, own"


def test_the_parent_needs_a_gpu_or_says_how_to_do_without(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quarters"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        quarters.main()
    assert "use --device cpu --small" in capsys.readouterr().err


# ---- the models ------------------------------------------------------------------------------------------


def test_a_kernel_that_fills_half_lets_two_lanes_run_at_once():
    half, full = fill.Kernel(1.0, 0.5), fill.Kernel(3.0, 1.0)
    assert fill.gain(2, half) == fill.gain(4, half) == 2.0
    assert fill.total([half, full]) == fill.Kernel(4.0, 0.875)
    assert fill.gain(2, fill.total([half, full])) == pytest.approx(1 / 0.875)
    assert fill.gain(2, half, host_s=1.0) == 1.0  # the host is as slow as one lane
    assert fill.gain(2, half, host_s=0.8) == pytest.approx(1.25)


def test_products_fill_by_tiles_and_waves():
    gpu = fill.Gpu("ten", 10, 1e12, 1e12, 1e15, 4)
    one_wave = gpu.matrices(1280, 256, 4096)  # ten tiles of 128 x 256
    two_waves = gpu.matrices(1408, 256, 4096)
    assert one_wave.fill == pytest.approx(1.0)
    assert two_waves.fill < 0.99
    assert fill.h100("bf16").matrices(1, 1, 128).seconds == 2e-6  # no kernel takes less


def test_the_table_has_a_row_for_each_stage_and_micro_batch():
    text = fill.fill_table()
    assert (
        "| BERT-large | 8 | 1.61 | 0.86 | 1.16 | 1.00 / 1.16 / 1.16 | 1.12 | 1.05 | 1.00 | 1.03 | 1.03 |"
        in text
    )
    assert (
        "| GNMT-8 | 16 | 0.55 | 0.51 | 1.96 | 1.00 / 1.53 / 1.96 | 1.40 | 1.25 | 1.02 | 1.14 | 1.23 |" in text
    )
    assert (
        "| AWD-LSTM | 10 | 0.73 | 0.52 | 1.94 | 1.00 / 1.94 / 1.94 | 1.39 | 1.38 | 1.05 | 1.16 | 1.12 |"
        in text
    )
    assert len(text.splitlines()) == 8


@pytest.mark.parametrize("micro_batches", [4, 8])
def test_pipelines_that_share_a_device_in_phase_gain_nothing_by_bubbles(micro_batches):
    assert phases.gain(2, micro_batches, "sharing") == pytest.approx(1.0)
    assert phases.makespan_s(1, micro_batches, "sharing") == pytest.approx(60 * 3 * (micro_batches + 3))


def test_actions_in_turn_fill_the_bubbles():
    assert phases.gain(2, 4, "in turn") == pytest.approx(1.75, abs=0.03)
    assert phases.gain(4, 8, "in turn") == pytest.approx(11 / 8, abs=0.03)
    assert phases.gain(1, 4, "in turn") == 1.0


def test_priorities_put_one_pipeline_ahead_and_the_other_fills_some_of_its_bubbles():
    assert phases.gain(1, 4, "ranked") == 1.0
    assert 1.2 < phases.gain(2, 4, "ranked") < phases.gain(4, 4, "ranked") < phases.gain(4, 4, "in turn")


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_lanes_that_begin_apart_fill_the_bubbles_of_a_shared_worker(stage):
    assert shared_worker.makespan_s(1, stage, 4, False) == pytest.approx(40 * 7 * 3.0)
    assert shared_worker.gain(2, stage, 4, True) == pytest.approx(1.75, abs=0.03)


def test_lanes_that_begin_together_wait_together_on_the_last_stage():
    # Two batches take the bubble of one and the work of two: 3 + 8 of F + B, where two alone take 14.
    assert shared_worker.gain(2, 3, 4, False) == pytest.approx(14 / 11)
