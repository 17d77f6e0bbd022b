"""The GPU suite: its stages for a pretended GPU, how a step is judged, one record of many stages, and its page."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import gpu_counters, gpu_questions, gpu_suite, pages
from benchmarks.gpu_suite import Gpu, Step, chosen, merge, run, steps
from tests.cli.command import ROOT
from tests.patience import wait_until

GPU = Gpu("A GPU", "9.0", 2**37)
ONE_CARD = "one_card-2026-11-27.json"  # the page has it beside the suite's
LEASE_S, ALL_S = 590, 2460  # of a machine that is lent: one command, and all


def options(**given):
    return Namespace(**{"stage": None, "only": None, "no_build": False, **given})


def names(found):
    return [step.name for step in found]


# ---- what runs -------------------------------------------------------------------------------------------------


def test_each_stage_fits_one_command_and_all_fit_the_lease():
    every = steps(GPU)
    build = sum(step.limit_s for step in every if step.name in ("configure", "build"))
    for stage in gpu_suite.STAGES:
        own = sum(step.limit_s for step in every if step.stage == stage)
        assert own + (build if stage > 1 else 0) <= LEASE_S
    assert sum(step.limit_s for step in every) <= ALL_S


@pytest.mark.parametrize("gpu", [GPU, None])
def test_every_command_names_what_is_there(gpu):
    for step in steps(gpu):
        files = [part for part in step.command if part.startswith(("tests/", "benchmarks/"))]
        assert [file for file in files if not (ROOT / file).exists()] == []
        assert len(" ".join(step.command)) < 2000
    assert len(set(names(steps(gpu)))) == len(steps(gpu))


def test_the_build_is_for_the_gpu_that_is_there_and_warns_only():
    configure = steps(Gpu("Another", "10.0", 0))[0].command
    assert {"-DTORCH_CUDA_ARCH_LIST=10.0", "-DAVGPIPE_WERROR=0", "-DAVGPIPE_CUDA=1"} <= set(configure)


def test_a_skip_fails_where_there_is_a_gpu():
    tests = [step for step in steps(GPU) if "pytest" in step.command]
    assert len(tests) == 7
    assert all(step.environment["AVGPIPE_REQUIRE_CUDA"] == "1" for step in tests)
    assert not any(step.environment for step in steps(None) if "compute-sanitizer" not in step.command)


def test_a_stage_builds_only_what_is_missing(monkeypatch):
    monkeypatch.setattr(gpu_suite, "built", lambda: True)
    assert names(chosen(options(), GPU))[:3] == ["configure", "build", "agree"]
    assert names(chosen(options(stage=1), GPU)) == ["configure", "build", "agree", "kernels"]
    assert names(chosen(options(stage=2), GPU)) == ["runtime", "order"]
    assert names(chosen(options(only=["ranks, MPS"]), GPU)) == ["ranks, MPS"]
    assert names(chosen(options(stage=1, no_build=True), GPU)) == ["agree", "kernels"]
    monkeypatch.setattr(gpu_suite, "built", lambda: False)
    assert names(chosen(options(stage=2), GPU)) == ["configure", "build", "runtime", "order"]


# ---- how a step is judged --------------------------------------------------------------------------------------


def program(text, **given):
    return Step(2, "step", [sys.executable, "-c", text], given.pop("limit_s", 30), **given)


@pytest.mark.ranks
def test_a_step_without_its_report_has_failed():
    found = run(program("print('no JSON')", report="stdout", says=str), GPU)
    assert (found["state"], found["says"]) == ("failed", "it left no report")
    assert "no JSON" in found["output_tail"]


def test_a_step_without_its_program_or_its_gpu_is_left_out():
    assert run(program("", needs=("GPU",)), None)["says"] == "no GPU here"
    found = run(program("", needs=("no-such-program",)), GPU)
    assert (found["state"], found["says"]) == ("left out", "no no-such-program here")


@pytest.mark.ranks
def test_the_verdict_of_tests_counts_them_and_what_was_checked():
    text = "print('happens-before: 9 tests, 8 operators'); print('3 passed, 1 skipped in 2.00s')"
    found = run(program(text), GPU)
    assert found["says"] == "3 passed, 1 skipped; happens-before: 9 tests, 8 operators"
    assert (found["state"], found["tests"]) == ("ok", {"passed": 3, "skipped": 1})


@pytest.mark.ranks
def test_a_failure_keeps_the_end_of_its_output():
    found = run(program("raise SystemExit('no device')"), GPU)
    assert (found["state"], found["exit_code"]) == ("failed", 1)
    assert "no device" in found["output_tail"]


@pytest.mark.ranks
def test_a_step_at_its_limit_keeps_its_report_and_leaves_no_process(tmp_path):
    report = tmp_path / "report.json"
    text = f"""
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path({str(report)!r}).write_text('{{"verdict": "half", "child": %d}}' % child.pid)
time.sleep(60)
"""
    found = run(program(text, limit_s=2, report=report, says=gpu_suite.says_verdict), GPU)
    assert (found["state"], found["exit_code"], found["says"]) == ("failed", 124, "stopped after 2 s. half")
    wait_until(lambda: not _runs(found["report"]["child"]))


def _runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # whoever inherits it may not look at once


@pytest.mark.ranks
def test_a_refusal_is_neither_well_nor_failed():
    text = """print('{"verdict": "may not", "refused": "ERR_NVGPUCTRPERM"}')"""
    assert run(program(text, report="stdout", says=gpu_suite.says_verdict), GPU)["state"] == "refused"


@pytest.fixture
def control(tmp_path, monkeypatch):
    """A stand-in for the control program of MPS, which notes how it is called."""
    log, control = tmp_path / "log", tmp_path / gpu_suite._MPS
    control.write_text(f'#!/bin/sh\nif [ "$1" ]; then echo "$1" >> {log}; else cat >> {log}; fi\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return control, log


@pytest.mark.ranks
def test_mps_is_stopped_whatever_happens(control):
    text = "import os, sys; sys.exit(0 if 'CUDA_MPS_PIPE_DIRECTORY' in os.environ else 3)"
    assert run(program(text, mps=True), GPU)["state"] == "ok"
    assert run(program("raise SystemExit(1)", mps=True), GPU)["state"] == "failed"
    assert run(program("import time; time.sleep(9)", mps=True, limit_s=1), GPU)["exit_code"] == 124
    assert control[1].read_text().split("\n") == 3 * ["-d", "quit -t 5"] + [""]


def test_an_mps_that_does_not_start_is_left_out(control):
    control[0].write_text("#!/bin/sh\necho not allowed >&2; exit 1\n")
    found = run(program("", mps=True), GPU)
    assert (found["state"], "not allowed" in found["says"]) == ("left out", True)


# ---- the record, and its page ----------------------------------------------------------------------------------


def step(stage, says, at, **more):
    head = {"stage": stage, "state": "ok", "says": says, "seconds": 1.0, "time": at, "gpu": "A GPU"}
    return {**head, "limit_s": 9, "command": "x", **more}


def record(**found):
    versions = {"python": "3.12", "torch": "2.11", "cuda": "13.0"}
    return {"date": "2026-01-31", "gpu": vars(GPU), "versions": versions, "steps": found}


def test_stages_are_one_record_in_which_the_later_run_of_a_step_counts(tmp_path):
    path = tmp_path / "new" / "record.json"
    merge(path, [record(order=step(2, "first", "2026-01-31 10:00"))])
    merge(path, [record(build=step(1, "built", "2026-01-31 10:05"))])
    merge(path, [record(order=step(2, "older", "2026-01-31 09:00"))])
    merge(
        path,
        [record(order=step(2, "again", "2026-01-31 11:00")), record(late=step(6, "x", "2026-01-31 11:00"))],
    )
    found = json.loads(path.read_text())["steps"]
    assert [(name, made["says"]) for name, made in found.items()] == [
        ("build", "built"),
        ("order", "again"),
        ("late", "x"),
    ]
    assert list(path.parent.iterdir()) == [path]


PAGE = (ROOT / "docs" / "gpu.md").read_text()


def test_without_a_record_the_page_says_that_nothing_has_run(tmp_path, monkeypatch):
    shutil.copy(pages.RECORDS / ONE_CARD, tmp_path)
    monkeypatch.setattr(pages, "RECORDS", tmp_path)
    page = pages.fill(PAGE)
    assert "**Nothing has run on a GPU yet.**" in page
    assert page.count("*No record yet.*") == 7
    assert "| 3 | processes that share the device, without and with MPS | `ranks`, `ranks, MPS` |" in page


def test_the_page_shows_what_a_record_has(tmp_path, monkeypatch):
    rows = [
        {"name": "copy_", "role": "limit", "median_ms": 1.0, "gb_per_s": 3000.0, "fraction_of_limit": 1.0},
        {
            "name": "elastic_adamw_",
            "role": "ours",
            "median_ms": 2.5,
            "gb_per_s": 2700.0,
            "fraction_of_limit": 0.9,
        }
        | {"ratios": {"AdamW(fused)": 2.2}},
    ]
    head = {"case": "one tensor", "elements": 100_000_000, "limit": "copy_"}
    kernels = {
        "sections": [
            {"question": "limit", "rows": rows[:1], **head},
            {"question": "adamw", "rows": rows[1:], **head},
        ]
    }
    kernel = {"dram_percent": 91.0, "occupancy_percent": 37.5, "registers": 74.0, "time_ns": 1.5e6}
    counters = {
        "verdict": "",
        "refused": "",
        "elements": 100,
        "kernels": {"avgpipe_adam": {**kernel, "read_bytes": 2400.0, "written_bytes": 1600.0}},
    }
    row = {"name": "avgpipe, N = 2", "samples_per_s": 10.0, "least": 9.0, "most": 11.0, "against_plain": 0.97}
    row |= {"group": "own batches, bf16", "peak_mib": 512}
    trace = {
        "actions": [{"action": "F", "count": 8, "host_us": 120.5, "kernels": 14.0, "device_us": 99.0}],
        "kernels_by_time": [{"kernel": "gemm", "count": 4, "total_us": 80.0, "mean_us": 20.0}],
        "copies_to_the_device": 4,
        "copies_during_a_kernel": 3,
        "kernels": 90,
        "kernels_that_begin_during_one_of_another_stream": 40,
    }
    failed = {"name": "avgpipe, N = 4", "failed": "out of memory"}
    pipelines = {"stages": 4, "width": 1024, "rows": {"transformer": [row, failed]}, "trace": trace}
    answers = [{"name": "ipc", "question": "Is it there?", "answer": "it is | there"}]
    at = "2026-01-31 10:00"
    made = record(
        kernels=step(1, gpu_suite.says_kernels(kernels), at, report=kernels),
        order=step(2, "9 failed", at, state="failed"),
        counters=step(4, "", at, report=counters),
        questions=step(4, "", at, report={"answers": answers}),
        pipelines=step(5, "", at, report=pipelines),
    )
    (tmp_path / "gpu_suite-2026-01-30.json").write_text("{}")  # an older one
    (tmp_path / "gpu_suite-2026-01-31.json").write_text(json.dumps(made))
    shutil.copy(pages.RECORDS / ONE_CARD, tmp_path)
    monkeypatch.setattr(pages, "RECORDS", tmp_path)
    page = pages.fill(PAGE)
    assert "Nothing has run" not in page
    assert "Run on A GPU (compute capability 9.0, 128 GiB), 2026-01-31, torch 2.11" in page
    assert "**Failed: order.** Not run: stage 3, 6, 7, 8." in page
    assert "| 1 | `kernels` | ok | copy_ 3000 GB/s; of it: adamw 0.90 | 1 | A GPU |" in page
    assert "| 2 | `order` | **failed** | 9 failed |" in page
    assert "| 100 M | adamw | one tensor | `elastic_adamw_` | 2.500 | 2700 | 0.90 | 2.20 |" in page
    assert "| `avgpipe_adam` | 91 % | 38 % | 74 | 1.500 | 40.0 |" in page
    assert "| transformer | own batches, bf16 | avgpipe, N = 2 | 10 | 9 to 11 | 0.97 | 512 |" in page
    assert (
        "| transformer | sharing a batch on one full GPU, fp32 | avgpipe, N = 4 | failed: out of memory |"
        in page
    )
    assert "| F | 8 | 120.5 | 14.0 | 99.0 |" in page
    assert "3 of 4 copies to the device ran while a kernel did" in page
    assert "| Is it there? | it is / there |" in page


# ---- counters and questions ------------------------------------------------------------------------------------

DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
LONG = f"""==PROF== Connected to process 7
==PROF== Profiling "avgpipe_adam": 0%....50%....100% - 2 passes
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","avgpipe_adam(LaunchBlock)","{DRAM}","%","91.50"
"0","avgpipe_adam(LaunchBlock)","launch__registers_per_thread","register/thread","74"
"0","avgpipe_adam(LaunchBlock)","dram__bytes_read.sum","byte","2,400,000,000"
"""
WIDE = f""""ID","Kernel Name","dram__bytes_read.sum","{DRAM}","launch__registers_per_thread"
"","","byte","%","register/thread"
"0","avgpipe_adam(LaunchBlock)","2,400,000,000","91.50","74"
"""


@pytest.mark.parametrize("text", [LONG, WIDE])
def test_counters_are_read_from_either_form_of_csv(text):
    found = gpu_counters.judge(0, text, "")
    assert found["kernels"] == {
        "avgpipe_adam": {"dram_percent": 91.5, "registers": 74.0, "read_bytes": 2.4e9}
    }
    assert found["verdict"] == "adam 92 % of DRAM"


def test_a_driver_that_permits_no_profile_is_an_answer():
    found = gpu_counters.judge(1, "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "")
    assert found["refused"] == "ERR_NVGPUCTRPERM"
    found = gpu_counters.judge(1, "", "Traceback\nValueError: no")
    assert (found["refused"], found["verdict"]) == ("", "ncu ended with 1: ValueError: no")


def test_what_is_profiled_runs():
    gpu_counters.launch(1000, "cpu")


def test_ncu_profiles_the_program_and_leaves_the_clocks_alone():
    command = gpu_counters.command(1e8)
    assert command[0] == "ncu"
    assert command[command.index("--clock-control") + 1] == "none"
    assert command[command.index("--elements") + 1] == "1e+08"


@pytest.mark.ranks
def test_a_question_that_fails_is_reported_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the questions are processes of their own
    assert gpu_questions.ask("pinned").startswith("failed (1)")
    out = tmp_path / "answers.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_questions.py"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {a["answer"] for a in json.loads(out.read_text())["answers"]} == {"no GPU here"}
    assert all(
        question.__doc__.endswith("?") or "?" in question.__doc__
        for question, _ in gpu_questions.QUESTIONS.values()
    )


# ---- several pipelines on one GPU ------------------------------------------------------------------------------


def test_the_suites_rows_replace_those_of_the_earlier_record(tmp_path, monkeypatch):
    lane = {"model": "gnmt", "dtype": "bf16", "M": 4, "how": "row", "k": 0, "wire": 0.0}
    lanes = [
        {**lane, "N": 1, "samples_per_s": 100.0, "peak_mib": 1500},
        {**lane, "N": 2, "samples_per_s": 125.0},
        {**lane, "N": 2, "apart": True, "samples_per_s": 171.0},
        {
            "row": "update",
            "model": "gnmt",
            "fused_adamw_ms": 0.2,
            "elastic_adamw_ms": 0.3,
            "times": 1.5,
            "weights": 4e7,
        },
        {
            "row": "hidden update",
            "model": "gnmt",
            "compute_ms": 4.0,
            "updates_ms": 1.0,
            "both_ms": 4.2,
            "hidden": 0.8,
        },
        {"row": "occupancy", "model": "gnmt", "N": 2, "kernels": 900, "mean_us": 5.0, "at_once": 1.4}
        | {"blocks_fill": 0.6, "warps_fill": 0.3, "busy_us": 99.0},
        {"row": "occupancy", "model": "bert", "N": 2, "failed": "no CUPTI"},
    ]
    row = {"model": "bert", "precision": "fp32", "wire": 0.0, "least": 1.0, "most": 9.0}
    quarters = [
        {"row": "partitions", "sms": 33, "alone": [12.0, 700.0], "together_to_alone": 0.97, "holds": True},
        {**row, "row": "avgpipe 1f1b, N = 1, M = 4 each, own", "samples_per_s": 200.0},
        {**row, "row": "avgpipe advance-forward, N = 2, M = 4 each, own", "samples_per_s": 260.0},
        {**row, "row": "data parallel", "failed": "RuntimeError: out of memory"},
    ]
    at = "2026-01-31 10:00"
    made = {
        "one worker": step(7, "", at, report={"device": "A GPU", "rows": lanes}),
        "quarters": step(8, "", at, report={"device": "A GPU", "rows": quarters}),
    }
    (tmp_path / "gpu_suite-2026-01-31.json").write_text(json.dumps(record(**made)))
    shutil.copy(pages.RECORDS / ONE_CARD, tmp_path)
    monkeypatch.setattr(pages, "RECORDS", tmp_path)
    page = pages.fill(PAGE)
    assert "| gnmt | 4 | 0 | a graph for the batch | 100 | 1.25 | 1.71 | | | 1,500 | |" in page
    assert "two updates 1.00 ms, both at once 4.20 ms: 80 % of the updates hidden |" in page
    assert (
        "60 % of multiprocessors have a block, 30 % of warps; 900 kernels of 5.0 µs, 1.40 at once |" in page
    )
    assert "| bert | occupancy | failed: no CUPTI |" in page
    assert "at 0.97 of the rate of one alone (12.0 Tflop/s, 33 multiprocessors), so they do not slow" in page
    assert "| advance-forward, N = 2, M = 4 | 1.30 |" in page
    assert "| N = 2, a batch for each pipeline | 1.55 to 1.70 | 1.30 |" in page
    assert "neighbours were too slow" not in page


def test_rows_that_ran_without_a_gpu_replace_nothing(tmp_path, monkeypatch):
    lane = {"model": "gnmt", "M": 4, "how": "eager", "k": 0, "wire": 0.0, "N": 1, "samples_per_s": 1.0}
    made = {"one worker": step(7, "", "2026-01-31 10:00", report={"device": "cpu", "rows": [lane]})}
    (tmp_path / "gpu_suite-2026-01-31.json").write_text(json.dumps(record(**made)))
    shutil.copy(pages.RECORDS / ONE_CARD, tmp_path)
    monkeypatch.setattr(pages, "RECORDS", tmp_path)
    assert "| bert | 4 | 0 | a graph for the batch | 781 | 1.90 | | 3.32 | | | |" in pages.fill(PAGE)
