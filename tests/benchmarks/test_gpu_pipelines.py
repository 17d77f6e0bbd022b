"""What a trace says of copies and kernels that ran at once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar

import pytest

from benchmarks import gpu_pipelines
from benchmarks.common import gpu_trace
from benchmarks.common.gpu_trace import actions, kernels_by_time, overlap
from benchmarks.gpu_pipelines import PLAIN, SHARING, Group


def event(category: str, name: str, begin: float, length: float, stream: int) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length, "args": {"stream": stream}}


def test_overlap_counts_copies_during_kernels_and_kernels_of_two_streams():
    events = [
        event("kernel", "a", 0, 10, 7),
        event("kernel", "b", 5, 10, 8),  # begins during a, on another stream
        event("kernel", "c", 14, 2, 8),  # begins during b, on its own
        event("kernel", "d", 30, 5, 7),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 12, 2, 9),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 20, 2, 9),  # nothing runs
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 31, 1, 9),  # not of a batch
        {"ph": "M", "name": "process_name"},
    ]
    assert overlap(events) == {
        "copies_to_the_device": 2,
        "copies_during_a_kernel": 1,
        "kernels": 4,
        "kernels_that_begin_during_one_of_another_stream": 1,
        "streams_with_kernels": 2,
    }


def span(category: str, name: str, begin: float, length: float, **arguments: int) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length, "args": arguments}


def test_kernels_belong_to_the_action_during_which_they_were_launched():
    events = [
        span("user_annotation", "action F", 0, 10),
        span("user_annotation", "action B", 12, 20),
        span("user_annotation", "ProfilerStep", 0, 100),
        span("cuda_runtime", "cudaLaunchKernel", 2, 1, correlation=1),
        span("cuda_driver", "cuLaunchKernel", 4, 1, correlation=2),
        span("cuda_runtime", "cudaLaunchKernel", 11, 1, correlation=3),  # between
        span("cuda_runtime", "cudaLaunchKernel", 15, 1, correlation=4),
        span("cuda_runtime", "cudaEventRecord", 16, 1, correlation=5),
        *(span("kernel", "gemm", 50 + n, 7, correlation=n) for n in (1, 2, 3, 4)),
    ]
    assert actions(events) == [
        {"action": "B", "count": 1, "host_us": 20, "kernels": 1, "device_us": 7},
        {"action": "F", "count": 1, "host_us": 10, "kernels": 2, "device_us": 14},
        {"action": "between", "count": 1, "host_us": 2},
    ]
    assert kernels_by_time(events) == [{"kernel": "gemm", "count": 4, "total_us": 28, "mean_us": 7}]


def test_occupancy_weighs_kernels_by_time_and_leaves_delays_out():
    half = {"blocks per SM": 0.5, "est. achieved occupancy %": 25}
    full = {"blocks per SM": 6.0, "est. achieved occupancy %": 75}
    events = [
        span("kernel", "gemm", 0, 10, **half),
        span("kernel", "gemm", 5, 10, **half),  # five of its ten beside the first
        span("kernel", "add", 30, 20, **full),
        span("kernel", "at::cuda::(anonymous namespace)::spin_kernel(long)", 0, 500, **half),
        span("gpu_memcpy", "Memcpy HtoD", 0, 500),
    ]
    assert gpu_trace.occupancy(events) == {
        "kernels": 3,
        "mean_us": 13.33,
        "blocks_fill": 0.75,
        "warps_fill": 0.5,
        "busy_us": 35,
        "at_once": round(40 / 35, 3),
    }
    assert gpu_trace.occupancy([]) == {"kernels": 0}


class Row:
    """Trains nothing. alive: which rows are not closed; seen: which have run."""

    alive: ClassVar[set[str]] = set()
    seen: ClassVar[list[str]] = []

    def __init__(self, name):
        self.name = name
        assert not self.alive  # the one before is closed
        self.alive.add(name)

    def run(self, batches):
        self.seen.append(self.name)
        if self.name == "b":
            raise RuntimeError("out of memory")

    def close(self):
        self.alive.remove(self.name)


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setattr(Row, "alive", set())
    monkeypatch.setattr(Row, "seen", [])
    made = {name: partial(Row, name) for name in ("a", "b", "c")}
    monkeypatch.setattr(gpu_pipelines, "contenders", lambda group, device: made)
    return Group("own batches", gpu_pipelines.cases(True, 32)["transformer"], "fp32")


def test_rows_run_one_after_another_and_one_that_fails_does_not_stop_the_others(group):
    rows = list(gpu_pipelines.measure(group, "cpu", 2, 1, lambda: False))
    assert [row["name"] for row in rows] == ["a", "b", "c"]
    assert rows[0]["against_plain"] == 1
    assert rows[1] == {"name": "b", "group": "own batches", "failed": "out of memory"}
    assert Row.seen == ["a"] * 3 + ["b"] + ["c"] * 3


def test_rows_for_which_no_time_is_left_are_named(group):
    late = iter([False, True, True])
    rows = list(gpu_pipelines.measure(group, "cpu", 1, 1, lambda: next(late)))
    assert [row.get("left_out") for row in rows] == [None, "no time", "no time"]
    assert gpu_pipelines.verdict({"m": rows}).endswith("2 rows left out")


def test_groups_ask_in_sixteen_bits_with_own_batches_and_keep_the_old_question():
    found = gpu_pipelines.groups(True, 32, 1, "cpu")
    assert found[0].name == "one stage of four, bf16"
    own, shared = (next(g for g in found if g.name == name) for name in ("own batches, bf16", SHARING))
    plan = gpu_pipelines.plan_of(own, 2)
    assert (plan.batch, plan.micro_batches, plan.warmup_rounds) == ("per-pipeline", 4, 0)
    plan = gpu_pipelines.plan_of(shared, 2)
    assert (plan.batch, plan.micro_batches, plan.warmup_rounds) == ("global", 8, 0)
    on_gpu = list(gpu_pipelines.contenders(own, "cuda"))
    assert on_gpu[0] == PLAIN
    assert on_gpu[-1] == f"{PLAIN}, again"
    assert {"avgpipe, N = 2", "avgpipe, N = 2, graphs", "avgpipe, N = 2, compiled"} <= set(on_gpu)


def test_one_stage_among_delays_trains_in_our_runtime():
    (group,) = (g for g in gpu_pipelines.groups(True, 32, 2, "cpu") if g.case.name == "stage 2 of bert")
    rows = list(gpu_pipelines.measure(replace(group, counts=(2,)), "cpu", 1, 2, lambda: False))
    assert [row["name"] for row in rows] == ["avgpipe, N = 2"]
    assert rows[0]["samples_per_s"] > 0
