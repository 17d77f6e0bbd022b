"""The try that ``avgpipe doctor`` makes."""

import sys

import pytest

from avgpipe.cli.shared_memory import try_shared_memory
from avgpipe_ext import ring

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")


def test_it_works_where_the_ring_does():
    assert try_shared_memory() is None


def test_a_system_without_rings_is_told(monkeypatch):
    monkeypatch.setattr(ring, "supported", lambda: False)
    assert "needs Linux" in try_shared_memory()


def test_no_memory_is_told(monkeypatch):
    def fails(size):
        raise MemoryError(f"no {size} bytes of shared memory")

    monkeypatch.setattr(ring.Memory, "create", fails)
    assert try_shared_memory() == "no 4096 bytes of shared memory"


def test_a_process_that_may_not_open_it_is_told(monkeypatch):
    monkeypatch.setattr("avgpipe.cli.shared_memory._PEER", "raise PermissionError('hidden')")
    assert try_shared_memory() == "another process cannot open it: PermissionError: hidden"
