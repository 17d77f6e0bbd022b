from __future__ import annotations

import math

import pytest
import torch

from avgpipe import ElasticAveraging, Reference
from tests.elastic.cases import Crew, assert_bitwise, set_gradients, weights
from tests.elastic.emulation import Nesterov


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("staleness", [0, 1, "asynchronous"])
def test_an_update_that_is_not_finite_counts_as_none(staleness, bad):
    crew, without = (Crew(3, staleness=staleness) for _ in range(2))
    crew.step()
    without.step()
    for c in (crew, without):
        for i in range(3):
            set_gradients(c.x[i], i, 1)
            if i == 1 and c is crew:
                c.x[i][0].grad[0, 0] = bad
            elif i == 1:
                c.opts[i].zero_grad()
            c.opts[i].step()
    assert crew.reference.dropped_updates == 1
    assert crew.reference.round == 2
    assert_bitwise([crew.reference.parameters], [without.reference.parameters])
    assert_bitwise([crew.x[0], crew.x[2]], [without.x[0], without.x[2]])


@pytest.mark.parametrize("staleness", [0, "asynchronous"])
def test_an_easgd_exchange_that_is_not_finite_is_left_out(staleness):
    crew = Crew(3, rule="easgd", staleness=staleness)
    crew.step()
    z = crew.state()[0]
    for i in range(3):
        set_gradients(crew.x[i], i, 1)
        if i == 1:
            crew.x[i][0].grad[0, 0] = math.nan
        crew.opts[i].step()
    a, old = 0.3, z
    for i in (0, 2):  # x' - z = (1 - a) (x - z), and e = a (x - z)
        seen = z if staleness == "asynchronous" else old
        z = [v + a / (1 - a) * (x.detach() - s) for v, x, s in zip(z, crew.x[i], seen)]
    for mine, expected in zip(crew.reference.parameters, z):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


class Plain:
    torch = staticmethod(lambda p: torch.optim.SGD(p, lr=0.1))


def test_elements_of_a_lone_replica_that_are_not_finite_stay_out_of_the_reference():
    crew = Crew(1, Plain)
    crew.step()
    good = crew.state()[0][1][0]
    with torch.no_grad():
        crew.x[0][1][0] = math.nan
    crew.step()
    assert crew.reference.parameters[1][0] == good
    assert_bitwise([[crew.x[0][0]]], [[crew.reference.parameters[0]]])
    assert crew.reference.dropped_updates == 1
    with torch.no_grad():
        crew.x[0][1][0] = 0.0
    crew.step()
    assert_bitwise([crew.x[0]], [crew.reference.parameters])


def test_the_outer_optimizer_is_there_to_be_scheduled():
    crew = Crew(2, outer=Nesterov.torch)
    assert isinstance(crew.reference.outer, torch.optim.SGD)
    crew.reference.outer.param_groups[0]["lr"] = 0.0
    before = crew.state()[0]
    crew.step()
    assert_bitwise([before], [crew.reference.parameters])
    assert all(z.grad is None for z in crew.reference.parameters)


def test_an_outer_sgd_with_learning_rate_one_is_plain_averaging():
    crew, plain = Crew(3, outer=lambda p: torch.optim.SGD(p, lr=1.0)), Crew(3)
    for _ in range(5):
        crew.step()
        plain.step()
    for z, y in zip(crew.reference.parameters, plain.reference.parameters):
        torch.testing.assert_close(z, y, rtol=1e-13, atol=1e-13)


def test_wrong_outer_optimizers_are_refused():
    x = weights()
    with pytest.raises(TypeError, match=r"function from parameters to an optimizer.*not SGD"):
        Reference(x, 2, outer=torch.optim.SGD(x, lr=0.1))
    with pytest.raises(TypeError, match=r"must return a torch.optim.Optimizer, not list"):
        Reference(x, 2, outer=lambda p: p)
    with pytest.raises(ValueError, match="over the tensors it is called with"):
        Reference(x, 2, outer=lambda p: torch.optim.SGD(x, lr=0.1))


def test_frozen_parameters_are_held_and_left_alone():
    params = [torch.nn.Parameter(torch.ones(2), requires_grad=i != 1) for i in range(3)]
    reference = Reference(params, 1)
    opt = ElasticAveraging(torch.optim.SGD(params, lr=1.0), reference)
    for p in (params[0], params[2]):
        p.grad = torch.ones(2)
    opt.step()
    assert [float(z[0]) for z in reference.parameters] == [0.0, 1.0, 0.0]
    assert reference.parameters[1].data_ptr() != params[1].data_ptr()


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("replicas", [1, 2])
def test_where_waiting_is_dear_only_the_bad_elements_are_left_out(replicas, staleness):
    """The way of an accelerator, taken here with tensors on the CPU."""
    crew, good = (Crew(replicas, Plain, staleness=staleness, alpha=0.0) for _ in range(2))
    for c in (crew, good):
        c.reference._on_cpu = False
        for i in range(replicas):
            set_gradients(c.x[i], i, 0)
            if c is crew and i == 0:
                c.x[i][0].grad[0, 1] = math.inf
            c.opts[i].step()
    z, expected, start = crew.reference.parameters, good.reference.parameters, weights()
    assert_bitwise([z[1:]], [expected[1:]])
    assert torch.equal(z[0][1:], expected[0][1:])
    assert torch.equal(z[0][0, 2:], expected[0][0, 2:])
    others = [x[0][0, 1] - start[0][0, 1] for x in crew.x[1:]]
    assert torch.allclose(z[0][0, 1], start[0][0, 1] + sum(others) / replicas)
    assert crew.reference.dropped_updates == 1
    assert good.reference.dropped_updates == 0
