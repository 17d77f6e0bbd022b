from __future__ import annotations

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from avgpipe.ranks.environment import keep_freed_memory, launch_environment
from tests.patience import limit

NAMES = ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"]
needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")

# What a batch does: large tensors are made, filled and freed, 160 MiB in all, which are 40960 pages of 4 KiB or 80 of
# 2 MiB. In the first few the heap grows in any case; now and then it does so once more later, by as much as a batch.
BATCHES = """
import resource, sys
import torch
from avgpipe.ranks.environment import keep_freed_memory

def batch():
    tensors = [torch.empty(size * 2**20, dtype=torch.uint8).fill_(1) for size in (40, 72, 48)]

kept = keep_freed_memory() if sys.argv[1] == "keep" else None
for _ in range(4):
    batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    batch()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: bool, **environment: str) -> tuple[str, int]:
    """What ``keep_freed_memory`` returned, and the page faults of five batches, in a process of its own."""
    others = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", BATCHES, "keep" if keep else "plain"],
        env={**others, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=limit(120),
    )
    kept, count = done.stdout.split()
    return kept, int(count)


@pytest.mark.ranks
@pytest.mark.slow
@needs_glibc
def test_large_tensors_freed_and_taken_again_hardly_fault() -> None:
    _, without = faults(False)
    kept, found = faults(True)
    assert kept == "True"
    assert without >= 5 * 80
    assert found <= 1.5 * without / 5


@pytest.mark.ranks
@pytest.mark.slow
@needs_glibc
def test_what_the_environment_chooses_stays() -> None:
    kept, found = faults(True, MALLOC_MMAP_THRESHOLD_="1048576")
    assert kept == "False"
    assert found >= 5 * 80


@pytest.mark.parametrize("name", NAMES)
def test_each_of_the_variables_is_a_choice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: pytest.fail("settings were changed"))
    monkeypatch.setenv(name, "131072")
    assert keep_freed_memory.__wrapped__() is False


def without_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its confstr does not know the name, and its mallopt, where it has one, may mean something else."""

    def unknown(name: str) -> str:
        raise ValueError(f"unrecognized configuration name {name}")

    without_choice(monkeypatch)
    monkeypatch.setattr(os, "confstr", unknown)
    monkeypatch.setattr("ctypes.CDLL", lambda name: pytest.fail("settings were changed"))
    assert keep_freed_memory.__wrapped__() is False


@pytest.mark.parametrize(("taken", "kept"), [((1, 1), True), ((0, 1), False), ((1, 0), False)])
def test_what_is_refused_is_said(taken: tuple[int, int], kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(taken)

    without_choice(monkeypatch)
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.36")
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(mallopt=lambda *_: next(answers)))
    assert keep_freed_memory.__wrapped__() is kept


@pytest.mark.ranks
@needs_glibc
def test_freed_memory_can_be_returned() -> None:
    """In a process of its own, which keeps 200 MiB until then."""
    code = """
import torch
from avgpipe.ranks.environment import keep_freed_memory, return_freed_memory, status_bytes

assert keep_freed_memory()
before = status_bytes("VmRSS")
blocks = [torch.ones(2**18) for _ in range(200)]
last = torch.ones(2**18)  # above them: the heap cannot shrink
del blocks
kept = status_bytes("VmRSS")
return_freed_memory()
print((kept - before) >> 20, (status_bytes("VmRSS") - before) >> 20)
"""
    others = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=others,
        capture_output=True,
        text=True,
        check=True,
        timeout=limit(120),
    )
    kept, left = map(int, done.stdout.split())
    assert kept >= 190
    assert left <= 20


def test_launched_processes_do_without_the_cache_per_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    without_choice(monkeypatch)
    found = launch_environment()
    assert found == {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1"}
    monkeypatch.setenv("GLIBC_TUNABLES", found["GLIBC_TUNABLES"])
    assert launch_environment() == found  # theirs do so too


@pytest.mark.ranks
@pytest.mark.slow
@needs_glibc
def test_launched_processes_keep_freed_memory_all_the_same() -> None:
    kept, _ = faults(True, GLIBC_TUNABLES="glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1")
    assert kept == "True"


@pytest.mark.parametrize("name", NAMES)
def test_what_a_user_chose_is_what_is_launched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_choice(monkeypatch)
    monkeypatch.setenv(name, "131072")
    assert launch_environment() == {}
