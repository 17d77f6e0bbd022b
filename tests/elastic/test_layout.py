from __future__ import annotations

import copy

import pytest
import torch

from avgpipe.elastic import Layout


def test_one_aligned_buffer_per_dtype():
    given = [torch.ones(3), torch.ones(5, dtype=torch.float64), torch.ones(()), torch.ones(2, 2)]
    layout = Layout(given)
    buffers = layout.zeros()
    assert [flat.dtype for flat in buffers.flats] == [torch.float32, torch.float64]
    for flat, views in zip(buffers.flats, buffers.views):
        for view in views:
            assert view.data_ptr() % 64 == 0
            assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    assert [t.shape for t in buffers.tensors()] == [p.shape for p in given]
    for t in buffers.tensors():
        t.fill_(1)
    assert [float(flat.sum()) for flat in buffers.flats] == [3 + 1 + 4, 5]  # the gaps stay zero


def test_strides_are_kept_where_the_memory_is_dense():
    transposed = torch.ones(3, 4).t()
    channels_last = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    gaps = torch.ones(4, 6)[:, ::2]
    kept = Layout([transposed, channels_last, gaps]).zeros().tensors()
    assert kept[0].stride() == transposed.stride()
    assert kept[1].stride() == channels_last.stride()
    assert kept[2].stride() == (3, 1)


def test_complex_is_kept_as_real():
    layout = Layout([torch.ones(2, 3, dtype=torch.complex64).t()])
    buffers = layout.zeros()
    assert buffers.flats[0].dtype == torch.float32
    (z,) = buffers.tensors()
    assert z.dtype == torch.complex64
    assert z.stride() == (1, 3)
    z.fill_(1 + 2j)
    assert float(buffers.flats[0].sum()) == 6 * 3


@pytest.mark.parametrize(
    ("t", "strides"),
    [
        (torch.ones(2, 3), (3, 1)),
        (torch.ones(2, 3).t(), (1, 3)),
        (torch.ones(()), ()),
        (torch.ones(4)[::2], (1,)),
        (torch.ones(4, 6)[:, ::2].t(), (1, 3)),
        (torch.ones(1).expand(3), (1,)),
        (torch.ones(2, 1, 3).transpose(0, 1), (3, 3, 1)),
        (torch.ones(2, 3).to_sparse(), (3, 1)),
    ],
)
def test_copies_have_the_same_places_as_the_tensor(t, strides):
    assert Layout([t]).entries[0].strides == strides
    assert Layout([copy.deepcopy(t)]).entries == Layout([t]).entries


def test_buffers_may_be_on_another_device_than_the_parameters():
    given = [torch.ones(3), torch.ones(5, device="meta")]
    assert [flat.device.type for flat in Layout(given).zeros().flats] == ["cpu", "meta"]
    (flat,) = Layout(given, torch.device("meta")).zeros().flats
    assert (flat.device.type, flat.shape) == ("meta", (32,))


def test_items_are_listed_by_buffer():
    layout = Layout([torch.ones(1), torch.ones(1).double(), torch.ones(1)])
    assert layout.by_buffer("abc") == [["a", "c"], ["b"]]
