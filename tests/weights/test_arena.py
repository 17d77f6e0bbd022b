from __future__ import annotations

import pytest
import torch
from torch import nn

from avgpipe.weights import Arena, Layout


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
    assert arena.collect_grads() == [True] * 3
    # of each filter 8 weights and a bias, and 2 x of |x|^2
    assert float(arena.grads[0].sum()) == pytest.approx(3 * (8 + 1) + 2 * (1 + 2))


def test_gradients_accumulate_in_the_arena_and_the_touched_ones_are_known() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    arena = Arena(net.parameters())
    for _ in range(2):
        net[0](torch.ones(1, 3)).sum().backward()
    assert arena.collect_grads() == [True, True, False, False]
    assert torch.equal(net[0].bias.grad, torch.full((3,), 2.0))
    assert sum(float(g.abs().sum()) for g in arena.grads) == float(net[0].weight.grad.abs().sum()) + 6.0
    with arena.step_grads([True, True, False, False]):
        assert net[1].weight.grad is None
    assert net[1].weight.grad is not None
    arena.zero_grads()
    assert arena.collect_grads() == [False] * 4
    assert float(net[0].bias.grad.abs().sum()) == 0


def test_a_gradient_that_autograd_replaced_is_brought_back() -> None:
    net = nn.Linear(2, 2)
    arena = Arena(net.parameters())
    net.weight.grad = torch.ones(2, 2)
    assert arena.collect_grads() == [True, False]
    assert float(arena.grads[0].sum()) == 4.0


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
    assert arena.collect_grads() == []
    assert Layout([]).sizes == []
