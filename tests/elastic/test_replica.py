"""Replicas whose tensors are not as the operators want them give what plain ones give."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from avgpipe import ElasticAveraging, Reference
from tests.elastic.cases import assert_bitwise, set_gradients, weights


def gaps(p):
    return nn.Parameter(torch.stack([p.detach(), p.detach()], -1)[..., 0])


def other_strides(p):
    order = tuple(reversed(range(p.dim())))
    return nn.Parameter(p.detach().permute(order).contiguous().permute(order))


@pytest.mark.parametrize("change", [gaps, other_strides])
@pytest.mark.parametrize("rule", ["avgpipe", "easgd"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_strides_do_not_matter(change, rule, staleness):
    def train(replicas):
        reference = Reference(weights(), 2, rule=rule, staleness=staleness)
        # fused steps, of which only plain ones are capable, round otherwise
        opts = [
            ElasticAveraging(torch.optim.SGD(x, lr=0.1), reference, i, fused=False)
            for i, x in enumerate(replicas)
        ]
        for t in range(4):
            for i, (x, opt) in enumerate(zip(replicas, opts)):
                set_gradients(x, i, t)
                opt.step()
        return [reference.parameters, *replicas]

    changed = [[change(p) for p in weights()], weights()]
    assert changed[0][0].stride() != weights()[0].stride()
    assert_bitwise(train([weights(), weights()]), train(changed))


def test_complex_weights_move_as_their_real_and_imaginary_parts():
    torch.manual_seed(0)
    start = torch.randn(3, 2, dtype=torch.complex128)
    grads = [[torch.randn_like(start) for _ in range(2)] for _ in range(3)]

    def train(make, view):
        xs = [make() for _ in range(2)]
        reference = Reference([make()], 2, staleness=1)
        opts = [ElasticAveraging(torch.optim.SGD([x], lr=0.1), reference, i) for i, x in enumerate(xs)]
        for row in grads:
            for x, opt, g in zip(xs, opts, row):
                x.grad = view(g).clone()
                opt.step()
        return [reference.parameters[0], *xs]

    complex_run = train(lambda: nn.Parameter(start.clone()), lambda g: g)
    real_run = train(lambda: nn.Parameter(torch.view_as_real(start).clone()), torch.view_as_real)
    for c, r in zip(complex_run, real_run):
        assert c.dtype == torch.complex128
        # not bitwise: torch's own complex SGD rounds otherwise than its real one
        torch.testing.assert_close(torch.view_as_real(c.detach()), r.detach(), rtol=1e-14, atol=1e-14)


def test_bfloat16_replicas_of_a_float32_reference():
    """Steps that bfloat16 weights of this size would round away add up in the reference."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    replicas = [copy.deepcopy(model).bfloat16() for _ in range(2)]
    reference = Reference(model.parameters(), 2)
    opts = [
        ElasticAveraging(torch.optim.SGD(r.parameters(), lr=1.0), reference, i)
        for i, r in enumerate(replicas)
    ]
    for replica, opt, step in zip(replicas, opts, [2**-7, 0.0]):
        replica.weight.grad = torch.full_like(replica.weight, -step)
        opt.step()
    assert reference.parameters[0].dtype == torch.float32
    assert torch.equal(reference.parameters[0], torch.full((1, 4), 1 + 2**-8))
    assert replicas[0].weight.dtype == torch.bfloat16


def test_empty_and_scalar_tensors():
    params = [nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.tensor(1.0))]
    reference = Reference(params, 1)
    opt = ElasticAveraging(torch.optim.SGD(params, lr=0.5), reference)
    params[1].grad = torch.tensor(1.0)
    opt.step()
    assert float(reference.parameters[1]) == 0.5
