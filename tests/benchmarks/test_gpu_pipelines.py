"""What a trace says of copies and kernels that ran at once."""

from __future__ import annotations

from benchmarks import gpu_pipelines
from benchmarks.gpu_pipelines import actions, kernels_by_time, overlap


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


def test_rows_run_one_after_another_and_one_that_fails_does_not_stop_the_others(monkeypatch):
    alive, seen = set(), []

    class Row:
        def __init__(self, name):
            self.name = name
            assert not alive  # the one before is closed
            alive.add(name)

        def run(self, batches):
            seen.append(self.name)
            if self.name == "b":
                raise RuntimeError("out of memory")

        def close(self):
            alive.remove(self.name)

    made = {name: (lambda name=name: Row(name)) for name in ("a", "b", "c")}
    monkeypatch.setattr(gpu_pipelines, "contenders", lambda case, device: made)
    case = gpu_pipelines.cases(True, 32)[-1]
    rows = list(gpu_pipelines.measure(case, "cpu", 2, 1))
    assert [row["name"] for row in rows] == ["a", "b", "c"]
    assert rows[0]["against_plain"] == 1
    assert rows[1] == {"name": "b", "failed": "out of memory"}
    assert seen == ["a"] * 3 + ["b"] + ["c"] * 3
