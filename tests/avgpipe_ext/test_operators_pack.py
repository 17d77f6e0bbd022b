"""Tensors into one buffer and back."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import avgpipe_ext
from tests.avgpipe_ext import reference
from tests.avgpipe_ext.cases import FLOATS, SIXTEEN_BIT, same


def some_tensors(dtype, seed=0):
    """Contiguous, transposed, channels_last, with gaps, expanded, 0-dim, empty."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    return [
        randn(1003),
        randn(4, 5).t(),
        randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        randn(6, 8)[:, ::2],
        randn(3, 1).expand(3, 4),
        randn(()),
        randn(2, 0),
        randn(100)[1:],
    ]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_round_trip_changes_nothing(dtype):
    tensors = some_tensors(dtype)
    buffer = avgpipe_ext.pack(tensors)
    assert buffer.dtype == dtype
    assert buffer.shape == (sum(t.numel() for t in tensors),)
    assert torch.equal(buffer, torch.cat([t.reshape(-1) for t in tensors]))
    back = [torch.zeros_like(t) for t in tensors]
    assert avgpipe_ext.unpack_(buffer, back) is None
    assert all(torch.equal(a, b) for a, b in zip(back, tensors))


@pytest.mark.parametrize(("dtype", "to"), list(itertools.product(FLOATS, FLOATS)), ids=str)
def test_casts_are_torchs_own(dtype, to):
    tensors = some_tensors(dtype)
    expected = torch.cat([t.reshape(-1).to(to) for t in tensors])
    buffer = avgpipe_ext.pack(tensors, to)
    assert buffer.dtype == to
    assert torch.equal(buffer, expected)
    assert torch.equal(buffer, reference.pack(tensors, to))
    back, twins = [[torch.zeros(t.shape, dtype=dtype) for t in tensors] for _ in range(2)]
    avgpipe_ext.unpack_(buffer, back)
    reference.unpack_(buffer, twins)
    assert all(torch.equal(a, b.to(to).to(dtype)) for a, b in zip(back, tensors))
    assert all(torch.equal(a, b) for a, b in zip(back, twins))


@pytest.mark.parametrize("to", FLOATS, ids=str)
@settings(max_examples=50)
@given(values=st.lists(st.floats(), max_size=50), dtype=st.sampled_from(FLOATS))
def test_any_values_are_cast_as_torch_casts_them(to, values, dtype):
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    assert same(avgpipe_ext.pack([tensor], to), tensor.to(to))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_every_16_bit_pattern_passes_bit_for_bit(dtype):
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype)
    assert torch.equal(avgpipe_ext.pack([x[:1000], x[1000:]])[x.isfinite()], x[x.isfinite()])
    back = torch.empty_like(x)
    avgpipe_ext.unpack_(avgpipe_ext.pack([x], torch.float32), [back])
    assert same(back.float(), x.float())


def test_dtypes_may_mix_where_the_buffers_is_given():
    tensors = [torch.ones(2, dtype=dtype) for dtype in FLOATS]
    with pytest.raises(ValueError, match=r"avgpipe::pack: .*dtypes; pass dtype="):
        avgpipe_ext.pack(tensors)
    assert avgpipe_ext.pack(tensors, torch.float16).tolist() == [1.0] * 8
    avgpipe_ext.unpack_(torch.arange(8.0), tensors)
    assert [t.tolist() for t in tensors] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_results_do_not_depend_on_the_number_of_threads(dtype):
    tensors = [torch.randn(200003).to(dtype), torch.randn(7).to(dtype)]
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            buffer = avgpipe_ext.pack(tensors, torch.bfloat16)
            back = [torch.empty_like(t) for t in tensors]
            avgpipe_ext.unpack_(buffer, back)
            results.append((buffer, *back))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_a_packed_buffer_is_a_copy_without_gradients():
    x = torch.ones(3, requires_grad=True)
    buffer = avgpipe_ext.pack([x])
    assert not buffer.requires_grad
    buffer.zero_()
    assert x.tolist() == [1.0] * 3
    avgpipe_ext.unpack_(torch.zeros(3), [x])
    assert x.requires_grad
    assert x.tolist() == [0.0] * 3


@pytest.mark.parametrize("to", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_kept_buffer_is_written(dtype, to):
    tensors = [torch.randn(3, 5).to(dtype).t(), torch.randn(700).to(dtype)]
    out = torch.full((715,), float("nan"), dtype=to)
    version = out._version
    assert avgpipe_ext.pack(tensors, out=out) is out
    assert torch.equal(out, avgpipe_ext.pack(tensors, to))
    assert torch.equal(out, reference.pack(tensors, out=torch.empty_like(out)))
    assert out._version > version


def test_a_large_kept_buffer_at_an_odd_address_is_written_to_its_end():
    """Large ones are written past the caches, in whole lines."""
    tensors = [torch.randn(3_000_000), torch.randn(17)]
    out = torch.zeros(3_000_020)[1:3_000_018]
    avgpipe_ext.pack(tensors, out=out)
    assert torch.equal(out, torch.cat(tensors))


def test_kept_buffers_that_do_not_fit_are_refused():
    x = torch.ones(3)
    for out, what in (
        (torch.zeros(4), "out has 1 dimensions and 4 elements, the tensors together 3"),
        (torch.zeros(1, 3), "out has 2 dimensions"),
        (torch.zeros(6)[::2], "out has 1 dimensions"),
        (x, "shares 12 bytes"),
        (torch.zeros(3, dtype=torch.int64), "dtype int64"),
        (torch.zeros(3, device="meta"), "meta"),
    ):
        with pytest.raises(ValueError, match=what):
            avgpipe_ext.pack([x], out=out)
    with pytest.raises(ValueError, match="leave dtype out"):
        avgpipe_ext.pack([x], torch.bfloat16, out=torch.zeros(3))
    assert x.tolist() == [1.0] * 3


def test_nothing_to_unpack():
    avgpipe_ext.unpack_(torch.empty(0), [])
    avgpipe_ext.unpack_(torch.empty(0), [torch.empty(0, 3)])
    assert avgpipe_ext.pack([torch.empty(0, 3)]).shape == (0,)
