"""Wrong arguments: ValueError with the values that clashed and the way out; nothing is written."""

from __future__ import annotations

import pytest
import torch

from tests.avgpipe_ext.cases import CASES, arguments

NAN = float("nan")
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)


def refuses(case, tensors, match, scalars=None):
    """The call raises and leaves every tensor, also the right ones of a list, as it was."""
    flat = [t for argument in tensors for t in (argument if isinstance(argument, list) else [argument])]
    before = [t.clone() for t in flat]
    versions = [t._version for t in flat]
    with pytest.raises(ValueError, match=match) as raised:
        case.operator(*tensors, *(scalars or case.scalars))
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"avgpipe::{case.name}: ")
    assert all(torch.equal(a, b) for a, b in zip(flat, before))
    assert versions == [t._version for t in flat]


@EVERY_CASE
def test_shapes(case):
    for position, name in enumerate(case.tensors[1:], 1):
        tensors = arguments(case, (3, 4), torch.float32)
        tensors[position] = torch.zeros(4, 3)
        first = case.tensors[0]
        message = rf"{name} has shape \(4, 3\) but {first} has \(3, 4\); pass tensors of one shape"
        refuses(case, tensors, message)
        tensors[position] = torch.zeros(12)
        refuses(case, tensors, rf"{name} has shape \(12,\) but {first} has \(3, 4\)")


@EVERY_CASE
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_dtypes_that_are_no_float(case, dtype):
    tensors = [t.to(dtype) for t in arguments(case, (3,), torch.float32)]
    name = str(dtype).removeprefix("torch.")
    refuses(case, tensors, f"{case.tensors[0]} has dtype {name}; pass float32, float64, bfloat16 or float16")


@EVERY_CASE
@pytest.mark.parametrize(
    ("first", "other"),
    [
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float64),
    ],
    ids=str,
)
def test_dtypes_that_do_not_pair(case, first, other):
    for position, name in enumerate(case.tensors[1:], 1):
        dtypes = [first] * len(case.tensors)
        dtypes[position] = other
        names = [str(dtype).removeprefix("torch.") for dtype in (other, first)]
        message = (
            f"{name} has dtype {names[0]} but {case.tensors[0]} has {names[1]}; pass one dtype, or float32"
        )
        refuses(case, arguments(case, (3,), dtypes), message)


@pytest.mark.parametrize("case", CASES[:-1], ids=str)
def test_a_float32_replica_takes_no_16_bit_companion(case):
    dtypes = [torch.float32] + [torch.bfloat16] * (len(case.tensors) - 1)
    refuses(case, arguments(case, (3,), dtypes), "has dtype bfloat16 but x has float32")


@EVERY_CASE
def test_gaps(case):
    for position, name in enumerate(case.tensors):
        tensors = arguments(case, (3, 4), torch.float32)
        tensors[position] = torch.zeros(3, 8)[:, ::2]
        message = (
            rf"{name} of shape \(3, 4\) has strides \(8, 2\), which leave gaps or overlap; pass .contiguous"
        )
        refuses(case, tensors, message)


@EVERY_CASE
def test_expanded_tensors(case):
    tensors = arguments(case, (3, 4), torch.float32)
    tensors[1] = torch.zeros(4).expand(3, 4)
    refuses(case, tensors, r"has strides \(0, 1\), which leave gaps or overlap")


@EVERY_CASE
def test_orders_of_strides(case):
    tensors = arguments(case, (3, 4), torch.float32)
    tensors[-1] = torch.zeros(4, 3).t()
    first, last = case.tensors[0], case.tensors[-1]
    message = rf"{last} has strides \(1, 3\) but {first} has \(4, 1\); give all tensors one memory format"
    refuses(case, tensors, message)


@EVERY_CASE
def test_shared_memory(case):
    for position, name in enumerate(case.tensors[1:], 1):
        tensors = arguments(case, (10,), torch.float32)
        buffer = torch.arange(15.0)
        tensors[0], tensors[position] = buffer[:10], buffer[5:]
        message = f"{name} shares 20 bytes of memory with {case.tensors[0]}; pass a .clone"
        refuses(case, tensors, message)


@EVERY_CASE
def test_shared_memory_among_the_tensors_of_lists(case):
    rows = [arguments(case, (10,), torch.float32, seed) for seed in range(4)]
    rows[3] = [torch.empty(0) for _ in case.tensors]
    rows[2][-1] = rows[0][0]
    tensors = [list(column) for column in zip(*rows)]
    refuses(case, tensors, rf"{case.tensors[-1]}\[2\] shares 40 bytes of memory with {case.tensors[0]}\[0\]")


def test_what_is_only_read_may_be_shared():
    case = CASES[1]
    x, z, update = torch.ones(3), torch.zeros(3), torch.zeros(3)
    case.operator([x, torch.ones(3)], [z, z], [z, z], [update, torch.zeros(3)], 0.5, 0)
    assert x.tolist() == [0.5] * 3
    assert update.tolist() == [1.0] * 3


@EVERY_CASE
def test_neighbours_in_one_buffer_share_nothing(case):
    buffer = torch.ones(len(case.tensors), 5)
    case.operator(*buffer.unbind(), *case.scalars)


@EVERY_CASE
def test_lists_of_different_lengths(case):
    tensors = [[torch.zeros(2)] for _ in case.tensors]
    tensors[-1] = []
    refuses(
        case,
        tensors,
        f"{case.tensors[-1]} has 0 tensors but {case.tensors[0]} has 1; pass lists of one length",
    )


@EVERY_CASE
def test_the_last_of_a_list_is_checked_before_the_first_is_written(case):
    rows = [arguments(case, (4,), torch.float32, seed) for seed in range(3)]
    rows[2][-1] = torch.zeros(5)
    message = rf"{case.tensors[-1]}\[2\] has shape \(5,\) but {case.tensors[0]}\[2\] has \(4,\)"
    refuses(case, [list(column) for column in zip(*rows)], message)


@EVERY_CASE
@pytest.mark.parametrize("factor", [NAN, float("inf"), -float("inf")], ids=str)
def test_factors_that_are_not_finite(case, factor):
    name = "scale" if case.name == "reference_apply_" else "alpha"
    scalars = (factor, *case.scalars[1:])
    refuses(case, arguments(case, (3,), torch.float32), f"{name} is {factor}; pass a finite number", scalars)


@pytest.mark.parametrize("staleness", [-1, 2])
def test_staleness(staleness):
    tensors = arguments(CASES[1], (3,), torch.float32)
    refuses(CASES[1], tensors, f"staleness is {staleness}; pass 0 or 1", (0.5, staleness))


@EVERY_CASE
def test_devices(case):
    """Sent to the CPU kernel by hand: a meta tensor among the arguments would choose the fake one."""
    tensors = arguments(case, (3,), torch.float32)
    tensors[-1] = tensors[-1].to("meta")
    message = f"{case.tensors[-1]} is on meta but {case.tensors[0]} is on cpu; move all tensors to one device"
    with pytest.raises(ValueError, match=message):
        case.packet.default.redispatch(
            torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *tensors, *case.scalars
        )


@EVERY_CASE
def test_sparse_tensors(case):
    tensors = [t.to_sparse() for t in arguments(case, (3,), torch.float32)]
    with pytest.raises(ValueError, match=f"{case.tensors[0]} is not strided; pass dense tensors"):
        case.operator(*tensors, *case.scalars)
