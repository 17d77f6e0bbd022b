from __future__ import annotations

import pytest
import torch
from torch import nn

from avgpipe.elastic import Arena, Layout


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2).double(), nn.Linear(2, 2))


def test_parameters_keep_their_values_and_live_in_one_buffer_per_dtype() -> None:
    net, same = model(), model()
    arena = Arena(net.parameters())
    assert [w.dtype for w in arena.weights] == [torch.float32, torch.float64]
    for p, expected in zip(net.parameters(), same.parameters(), strict=True):
        assert torch.equal(p, expected)
        flat = arena.weights[int(p.dtype == torch.float64)]
        assert p.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert p.data_ptr() % 64 == flat.data_ptr() % 64
    arena.weights[0].mul_(2)
    assert torch.equal(net[0].weight, 2 * same[0].weight)


def test_strides_and_complex_numbers_are_kept() -> None:
    net = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    net.phase = nn.Parameter(torch.tensor([1 + 2j]))
    strides = [p.stride() for p in net.parameters()]
    arena = Arena(net.parameters())
    assert [p.stride() for p in net.parameters()] == strides
    assert [w.dtype for w in arena.weights] == [torch.float32]
    assert net.phase.item() == 1 + 2j
    (net(torch.ones(1, 2, 2, 2)).sum() + net.phase.abs().sum() ** 2).backward()
    # of each filter 8 weights and a bias, and 2 x of |x|^2
    sums = [torch.view_as_real(g).sum() if g.is_complex() else g.sum() for g in arena.grads]
    assert float(sum(sums)) == pytest.approx(3 * (8 + 1) + 2 * (1 + 2))


def test_gradients_are_those_there_are() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    arena = Arena(net.parameters())
    for _ in range(2):
        net[0](torch.ones(1, 3)).sum().backward()
    assert [g is p.grad for g, p in zip(arena.grads, net[0].parameters(), strict=True)] == [True, True]
    assert torch.equal(net[0].bias.grad, torch.full((3,), 2.0))
    arena.drop_grads()
    assert arena.grads == []


def test_reading_other_buffers_moves_no_bytes_and_is_undone() -> None:
    net = model()
    arena = Arena(net.parameters())
    other = [torch.zeros_like(w) for w in arena.weights]
    own = net[0].weight.data_ptr()
    with arena.reading(other):
        assert not net[0].weight.any()
        assert net[0].weight.untyped_storage().data_ptr() == other[0].untyped_storage().data_ptr()
    assert net[0].weight.data_ptr() == own


def test_a_stage_without_parameters_has_an_empty_arena() -> None:
    arena = Arena([])
    assert arena.weights == []
    assert arena.grads == []
    assert Layout([]).sizes == []
