"""An operator's call leaves nothing behind on the C++ heap."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

import avgpipe_ext
from tests.avgpipe_ext.cases import CASES, arguments

CALLS = 500
_libc = ctypes.CDLL(None)
needs_mallinfo2 = pytest.mark.skipif(
    not hasattr(_libc, "mallinfo2"), reason="glibc 2.33 counts what is in use"
)


class Mallinfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = (
        ("_before", ctypes.c_size_t * 7),
        ("uordblks", ctypes.c_size_t),  # bytes in use
        ("_after", ctypes.c_size_t * 2),
    )


def bytes_in_use():
    gc.collect()
    _libc.mallinfo2.restype = Mallinfo2
    return _libc.mallinfo2().uordblks


def left_per_call(call):
    """Bytes. Of three tries the least: what others leave meanwhile is not in all of them."""
    tries = []
    for _ in range(3):
        before = bytes_in_use()
        for _ in range(CALLS):
            call()
        tries.append((bytes_in_use() - before) / CALLS)
    return min(tries)


@pytest.mark.slow
@needs_mallinfo2
@pytest.mark.parametrize("is_list", [False, True], ids=["single", "list"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_leaves_nothing_behind(case, is_list):
    tensors = arguments(case, (3, 5), torch.float32)
    passed = [[t, t.clone()] for t in tensors] if is_list else tensors
    # the smallest block is 32 bytes
    assert left_per_call(lambda: case.operator(*passed, *case.scalars, check_finite=True)) < 8


@pytest.mark.slow
@needs_mallinfo2
def test_packing_leaves_nothing_behind():
    tensors = [torch.randn(3, 5), torch.randn(7)]
    assert left_per_call(lambda: avgpipe_ext.unpack_(avgpipe_ext.pack(tensors), tensors)) < 8


@pytest.mark.slow
@needs_mallinfo2
@pytest.mark.parametrize(
    "wrong", [{"from_force": float("inf")}, {"staleness": 2}, {"alpha": float("nan")}], ids=str
)
def test_a_refused_call_leaves_nothing_behind(wrong):
    x, grad, z, update = (torch.randn(3) for _ in range(4))
    given = {"alpha": 0.5, "staleness": 0, "lr": 0.1, **wrong}

    def call():
        with pytest.raises(ValueError, match="pass"):
            avgpipe_ext.elastic_sgd_(x, grad, None, z, update, **given)

    assert left_per_call(call) < 8
