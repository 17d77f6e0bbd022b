"""Operators of other libraries' arrays: NumPy's here, CuPy's in test_cuda.py."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

import avgpipe_ext
from avgpipe_ext import arrays
from tests.avgpipe_ext.cases import CASES, adam, arguments, same, sgd

EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)
PULL = avgpipe_ext.elastic_pull_


def arrays_of(value):
    return [arrays_of(t) for t in value] if isinstance(value, list) else value.numpy().copy()


def equal(value, tensor):
    if isinstance(tensor, list):
        return all(map(equal, value, tensor))
    return same(torch.from_numpy(value), tensor)


@EVERY_CASE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("listed", [False, True])
def test_arrays_are_updated_in_place_as_tensors_are(case, dtype, listed):
    tensors = arguments(case, (37, 3), dtype)
    if listed:
        tensors = [list(pair) for pair in zip(tensors, arguments(case, (5,), dtype, 1))]
    numpy = arrays_of(tensors)
    expected = case.operator(*tensors, *case.scalars, check_finite=True)
    assert torch.equal(case.operator(*numpy, *case.scalars, check_finite=True), expected)
    assert equal(numpy, tensors)


def test_tensors_and_arrays_may_be_mixed():
    for make in (lambda a: a, lambda a: [a], lambda a: (a,)):
        x, z = torch.zeros(4), np.ones(4, np.float32)
        PULL(make(x), make(z), 0.25)
        PULL(make(z), make(x), 1.0)
        assert x.tolist() == z.tolist() == [0.25] * 4


@pytest.mark.parametrize("case", [sgd("momentum", lr=0.1, mu=0.9), adam("step3", lr=0.01)], ids=str)
def test_values_in_memory_may_be_arrays(case):
    options = {"grad_scale": np.full((1,), 2, np.float32), "found_inf": np.zeros((), np.float32)}
    if "adam" in case.name:
        options["step"] = np.full((), 3, np.float64)
    tensors = arguments(case, (7,), torch.float32)
    numpy = arrays_of(tensors)
    case.operator(*tensors, *case.scalars, **{k: torch.from_numpy(v) for k, v in options.items()})
    case.operator(*numpy, *case.scalars, **options)
    assert equal(numpy, tensors)


def test_arrays_are_packed_and_unpacked():
    given = [np.arange(6, dtype=np.float32).reshape(2, 3).T, np.ones(2, np.float32)]
    buffer = np.zeros(8, np.float64)
    packed = avgpipe_ext.pack(given, out=buffer)
    assert packed.data_ptr() == buffer.ctypes.data
    assert buffer.tolist() == [0, 3, 1, 4, 2, 5, 1, 1]
    assert torch.equal(avgpipe_ext.pack(given, torch.float64), packed)
    buffer += 1
    avgpipe_ext.unpack_(buffer, given)
    assert given[0].tolist() == [[1, 4], [2, 5], [3, 6]]
    assert given[1].tolist() == [2, 2]


def readonly():
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (
            readonly(),
            r"x, of type ndarray, cannot be shared \(.*readonly.*\); pass a writable array of float32",
        ),
        (np.zeros(4, ">f4"), r"x, of type ndarray, cannot be shared \(.*byte order"),
        (np.zeros(4, object), r"x, of type ndarray, cannot be shared"),
        (np.zeros(4, np.float32)[::-1], "x has negative strides; pass a copy"),
        (np.zeros(4, np.int32), "x has dtype int32; pass float32"),
        (np.zeros(3, np.float32), "shape"),
    ],
    ids=["read-only", "byte order", "objects", "backwards", "integers", "another shape"],
)
def test_what_cannot_be_updated_is_refused_before_anything_is_written(array, message):
    before = array.tolist()
    with pytest.raises(ValueError, match=f"^avgpipe::elastic_pull_: .*{message}"):
        PULL(array, np.ones(4, np.float32), 0.5)
    assert array.tolist() == before


def test_a_list_names_the_array():
    with pytest.raises(ValueError, match=r"elastic_pull_: z\[1\] has negative strides"):
        PULL([np.zeros(2, np.float32)] * 2, [np.ones(2, np.float32), np.ones(2, np.float32)[::-1]], 0.5)


def test_an_error_that_is_not_about_arrays_stays():
    with pytest.raises(TypeError, match=r"x\[0\] is of type str; pass a list of tensors"):
        PULL(["a"], ["b"], 0.5)
    with pytest.raises(TypeError, match=r"missing.*argument: 'alpha'"):
        PULL(np.zeros(2, np.float32), z=np.ones(2, np.float32))
    with pytest.raises(TypeError, match="alpha is of type str; pass a float"):
        PULL(np.zeros(2, np.float32), np.ones(2, np.float32), "half")


class OnGpu:
    """An array on a device of CUDA, as far as its exchange goes; its memory is NumPy's."""

    def __init__(self):
        self.memory, self.stream = np.zeros(4, np.float32), None

    def __dlpack_device__(self):
        return 2, 1

    def __dlpack__(self, *, stream):
        self.stream = stream
        return self.memory.__dlpack__()


@pytest.mark.parametrize(("current", "passed"), [(0, 1), (0xABC, 0xABC)])
def test_torchs_current_stream_waits_for_what_the_arrays_library_has_enqueued(monkeypatch, current, passed):
    streams = {1: types.SimpleNamespace(cuda_stream=current)}
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    array = OnGpu()
    (tensor,), _ = arrays.shared(lambda x: None, (array,), {}, TypeError())
    assert tensor.data_ptr() == array.memory.ctypes.data
    assert array.stream == passed


def test_tensors_are_not_asked_for_an_exchange(monkeypatch):
    monkeypatch.setattr(arrays, "shared", lambda *arguments: pytest.fail("an exchange of a tensor"))
    x = torch.zeros(4)
    PULL(x, torch.ones(4), 0.5)
    PULL([x], [torch.ones(4)], 0.5)
    assert x.tolist() == [0.75] * 4
