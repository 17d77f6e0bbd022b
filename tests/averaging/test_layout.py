from __future__ import annotations

import pytest
import torch
from torch import nn

from avgpipe.averaging.layout import Layout, is_dense


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


def test_frozen_parameters_and_integers_take_no_part():
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    assert Layout(
        [frozen, torch.ones(2), torch.ones(2, dtype=torch.int64), nn.Parameter(torch.ones(1))]
    ).indices == [
        1,
        3,
    ]


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
    ("t", "dense"),
    [
        (torch.ones(2, 3), True),
        (torch.ones(2, 3).t(), True),
        (torch.ones(()), True),
        (torch.ones(0, 3), True),
        (torch.ones(4)[::2], False),
        (torch.ones(1).expand(3), False),
        (torch.ones(2, 1, 3).transpose(0, 1), True),
        (torch.ones(2).to_sparse(), False),
    ],
)
def test_is_dense(t, dense):
    assert is_dense(t) is dense


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_cannot_be_averaged_is_refused():
    with pytest.raises(ValueError, match=r"parameters\[1\] has layout torch.sparse_csr"):
        Layout([torch.ones(1), torch.eye(2).to_sparse_csr()])
    with pytest.raises(TypeError, match=r"dtype torch.float8_e4m3fn; cast it"):
        Layout([torch.ones(1).to(torch.float8_e4m3fn)])
