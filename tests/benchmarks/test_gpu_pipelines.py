"""What a trace says of copies and kernels that ran at once."""

from __future__ import annotations

from benchmarks.gpu_pipelines import overlap


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
