from __future__ import annotations

import pytest
import torch
from torch import nn

from avgpipe import ElasticAveraging, Reference
from tests.elastic.cases import assert_bitwise


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def attach(groups, reference, **options):
    return ElasticAveraging(torch.optim.SGD(groups, lr=0.1), reference, **options)


WAY_OUT = r"pass parameters=replica.parameters\(\)"


def test_groups_that_keep_the_order_need_no_help():
    m = model()
    a, b, c, d = m.parameters()
    attach([{"params": [a, b]}, {"params": [c, d], "lr": 1.0}], Reference(m.parameters(), 1))


def test_groups_that_change_the_order_of_shapes_are_refused():
    m = model()
    a, b, c, d = m.parameters()
    reference = Reference(m.parameters(), 1)
    with pytest.raises(
        ValueError, match=rf"parameters\[1\] has shape \(3, 3\) .* reference's \(3,\).*{WAY_OUT}"
    ):
        attach([{"params": [a, c]}, {"params": [b, d], "weight_decay": 0.0}], reference)


def test_groups_that_change_the_order_alone_are_refused():
    m = model()
    a, b, c, d = m.parameters()
    with pytest.raises(
        ValueError, match=rf"another order than the reference: its parameter 0 .* 2; {WAY_OUT}"
    ):
        attach([{"params": [c, b]}, {"params": [a, d]}], Reference(m.parameters(), 1))


def test_weights_that_differ_from_the_reference_are_no_permutation():
    """As when a run is resumed: the replica has gone its own way."""
    reference = Reference(model().parameters(), 2)
    torch.manual_seed(1)
    attach(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).parameters(), reference)


def test_parameters_give_the_order():
    def train(groups):
        replicas = [model(), model()]
        reference = Reference(model().parameters(), 2, staleness=1)
        opts = [
            ElasticAveraging(torch.optim.SGD(groups(r), lr=0.1), reference, i, parameters=r.parameters())
            for i, r in enumerate(replicas)
        ]
        for t in range(3):
            for i, (r, opt) in enumerate(zip(replicas, opts)):
                r(torch.full((2, 3), 1.0 + i + t)).square().sum().backward()
                opt.step()
                opt.zero_grad()
        return [reference.parameters, *(list(r.parameters()) for r in replicas)]

    def by_decay(r):
        return [{"params": [p for p in r.parameters() if p.dim() == d]} for d in (1, 2)]

    assert_bitwise(train(lambda r: r.parameters()), train(by_decay))


def test_an_optimizer_of_some_parameters():
    m = model()
    reference = Reference(m.parameters(), 1)
    with pytest.raises(
        ValueError, match=rf"the optimizer's parameters are 2 tensors, the reference has 4.*{WAY_OUT}"
    ):
        attach(m[0].parameters(), reference)
    attach(m[0].parameters(), reference, parameters=m.parameters())


def test_frozen_parameters_may_be_in_the_optimizer_or_not():
    def frozen():
        m = model()
        m[0].requires_grad_(False)
        return m

    replicas = [frozen() for _ in range(3)]
    reference = Reference(frozen().parameters(), 3)
    opts = [
        attach(replicas[0].parameters(), reference, replica=0),
        attach(replicas[1][1].parameters(), reference, replica=1),
        attach(replicas[2][1].parameters(), reference, replica=2, parameters=replicas[2].parameters()),
    ]
    for r, opt in zip(replicas, opts):
        r(torch.ones(1, 3)).sum().backward()
        opt.step()
    for r in replicas:
        assert_bitwise([list(r[0].parameters())], [reference.parameters[:2]])
        for p, z in zip(r[1].parameters(), reference.parameters[2:]):
            torch.testing.assert_close(p.detach(), z)


def test_parameters_without_gradient_stay():
    m = model()
    reference = Reference(m.parameters(), 1)
    opt = attach(m.parameters(), reference)
    m[1](torch.ones(1, 3)).sum().backward()
    opt.step()
    assert_bitwise([reference.parameters], [list(m.parameters())])
    assert torch.equal(m[0].weight, model()[0].weight)


def test_wrong_parameters_are_refused():
    m, other = model(), model()
    reference = Reference(m.parameters(), 2)
    with pytest.raises(
        ValueError, match=r"shape \(3, 3\) that is not among parameters, so it would not be averaged"
    ):
        attach(m.parameters(), reference, parameters=other.parameters())
    with pytest.raises(TypeError, match=r"parameters\[0\] must be a tensor, not tuple"):
        attach(m.parameters(), reference, parameters=m.named_parameters())
    with pytest.raises(ValueError, match="parameters are 5 tensors"):
        attach(m.parameters(), reference, parameters=[*m.parameters(), torch.ones(1)])


def flatten(m):
    """One buffer with all weights; the parameters become views of it."""
    buffer = torch.cat([p.detach().flatten() for p in m.parameters()])
    for p, view in zip(m.parameters(), unflatten(buffer, m)):
        p.data = view
    return [buffer]


def unflatten(buffer, m):
    pieces = buffer.split([p.numel() for p in m.parameters()])
    return [piece.view(p.shape) for piece, p in zip(pieces, m.parameters())]


@pytest.mark.parametrize("rule", ["avgpipe", "easgd"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_flat_buffers_give_what_single_tensors_give(rule, staleness):
    """The optimizer's parameters are views of the buffers that are averaged."""

    def train(flat):
        replicas = [model() for _ in range(3)]
        buffers = [flatten(r) if flat else None for r in replicas]
        reference = Reference(buffers[0] or model().parameters(), 3, rule=rule, staleness=staleness, period=2)
        opts = [
            attach(r.parameters(), reference, replica=i, parameters=buffers[i])
            for i, r in enumerate(replicas)
        ]
        for t in range(4):
            for i, (r, opt) in enumerate(zip(replicas, opts)):
                r(torch.full((2, 3), 1.0 + i + t)).square().sum().backward()
                opt.step()
                opt.zero_grad()
        zs = unflatten(reference.parameters[0], replicas[0]) if flat else reference.parameters
        return [zs, *(list(r.parameters()) for r in replicas)]

    assert_bitwise(train(True), train(False))
