"""Operands and their shapes."""

import math

import pytest
import torch

from avgpipe.bench.kernels.settings import DTYPES, MIN_ELEMENTS, KernelSettings
from avgpipe.bench.kernels.workspace import Workspace, equal_shapes, model_shapes, one_tensor


def workspace(shapes, dtype="float32"):
    return Workspace(sum(map(math.prod, shapes)), shapes, KernelSettings(dtype=dtype))


@pytest.mark.parametrize("elements", [MIN_ELEMENTS, 100_000, 25_000_000, 100_000_000])
def test_a_model_has_61_tensors_and_all_elements(elements):
    shapes = model_shapes(elements)
    assert len(shapes) == 61
    assert sum(map(math.prod, shapes)) == elements
    assert all(math.prod(shape) > 0 for shape in shapes)


def test_one_tensor_is_the_array_itself():
    space = workspace(one_tensor(5000))
    assert space.tensors("x")[0] is space.flat("x")
    assert space.operands("x")[0] is space.flat("x")


def test_lists_are_allocations_of_their_own_and_the_same_objects_each_time():
    space = workspace(equal_shapes(4, 300))
    first, again = space.tensors("x"), space.tensors("x")
    assert all(a is b for a, b in zip(first, again))
    assert len({tensor.untyped_storage().data_ptr() for tensor in first}) == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_normal_numbers(dtype):
    values = workspace(one_tensor(3_000_000), dtype).flat("x")
    assert values.dtype == getattr(torch, dtype)
    assert 0.004 < values.min().item() < values.max().item() < 0.016


def test_held_bytes_counts_arrays_and_lists():
    space = workspace(equal_shapes(4, 300))
    space.flat("x")
    space.tensors("x")
    assert space.held_bytes == 2 * 4 * 300 * 4
