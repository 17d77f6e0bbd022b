"""The slow twins against torch.optim in float64 and the rules as they are written down; they round once."""

from __future__ import annotations

import inspect

import pytest
import torch

import avgpipe_ext.operators
from tests.avgpipe_ext import reference
from tests.avgpipe_ext.cases import (
    CASES,
    FLOATS,
    OPTIMIZERS,
    ROUNDS,
    RULES,
    arguments,
    bounds,
    copies,
    exact,
    rule_options,
)
from tests.avgpipe_ext.rounding import assert_within
from tests.avgpipe_ext.torch_steps import torch_step

EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)
# A few roundings of float64 at the size of the operands.
NEAR = {"rtol": 1e-13, "atol": 1e-13}


def float64_arguments(case, seed=0):
    return arguments(case, (7, 3), torch.float64, seed)


def test_every_operator_has_a_twin_with_its_arguments():
    names = [
        name
        for name, value in vars(avgpipe_ext.operators).items()
        if inspect.isfunction(value)
        and value.__module__ == "avgpipe_ext.operators"
        and name in avgpipe_ext.__all__
    ]
    assert len(names) == 14
    for name in names:
        ours = inspect.signature(getattr(avgpipe_ext.operators, name))
        theirs = inspect.signature(getattr(reference, name))
        assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
            (p.name, p.kind, p.default) for p in theirs.parameters.values()
        ]


@pytest.mark.parametrize("case", RULES, ids=str)
def test_rules_are_those_of_the_papers(case):
    tensors = float64_arguments(case)
    old = dict(zip(case.tensors, copies(tensors)))
    x, z, update, alpha = old.get("x"), old["z"], old.get("update"), 0.3
    expected = {
        "elastic_pull_": lambda: {"x": x + alpha * (z - x)},
        "elastic_step_-staleness0": lambda: {
            "x": x + alpha * (z - x),
            "update": update + x - old["x_before"],
        },
        "elastic_step_-staleness1": lambda: {
            "x": x + alpha * (z - old["x_before"]),
            "update": update + x - old["x_before"],
        },
        "elastic_step_-mixed": lambda: {
            "x": x - alpha * (old["x_before"] - z),
            "update": update + 0.25 * (x - old["x_before"]) - 1.5 * alpha * (old["x_before"] - z),
        },
        "easgd_step_": lambda: {"x": x - alpha * (x - z), "update": update + alpha * (x - z)},
        "reference_apply_": lambda: {"z": z + 0.3 * update, "update": torch.zeros_like(update)},
    }[str(case)]()
    case.twin(*tensors, *case.scalars)
    for name, tensor in zip(case.tensors, tensors):
        torch.testing.assert_close(tensor, expected.get(name, old[name]), **NEAR)


@pytest.mark.parametrize("case", OPTIMIZERS, ids=str)
def test_an_optimizers_twin_is_torchs_step_and_then_the_rules_twin(case):
    tensors = float64_arguments(case)
    x, grad, *state, z, update = copies(tensors)
    before = x.clone()
    torch_step(case, x, grad, state)
    reference.elastic_step_(x, before, z, update, *case.scalars, **rule_options(case.options))
    case.twin(*tensors, *case.scalars)
    for ours, theirs in zip(tensors, (x, grad, *state, z, update)):
        torch.testing.assert_close(ours, theirs, **NEAR)


@pytest.mark.parametrize("case", ROUNDS, ids=str)
def test_a_rounds_twin_is_torchs_steps_the_mean_and_pulls(case):
    tensors = float64_arguments(case)
    *replicas, z = copies(tensors)
    xs, grads, states = replicas[:2], replicas[2:4], replicas[4:]
    befores = copies(xs)
    for i in range(2):
        torch_step(case, xs[i], grads[i], states[i::2])
    z = z + ((xs[0] - befores[0]) + (xs[1] - befores[1])) / 2
    xs = [x + case.scalars[0] * (z - x) for x in xs]
    case.twin(*tensors, *case.scalars)
    for ours, theirs in zip(tensors, (*xs, *grads, *states, z)):
        torch.testing.assert_close(ours, theirs, **NEAR)


@EVERY_CASE
def test_twins_follow_the_formulas_that_give_the_bounds(case):
    tensors = float64_arguments(case)
    for result, limit in zip(exact(case, tensors), bounds(case, tensors)):
        assert bool(limit.fits.all())
        assert_within(result, None, limit, times=2)


@pytest.mark.grid
@EVERY_CASE
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("list_form", [False, True])
def test_twins_round_once(case, dtype, list_form):
    tensors = arguments(case, (7, 3), dtype)
    expected = [value.to(dtype) for value in exact(case, tensors)]
    result = case.twin(*([[t] for t in tensors] if list_form else tensors), *case.scalars)
    assert result.shape == (0,)
    for name, ours, theirs in zip(case.tensors, tensors, expected):
        twice = case.name == "elastic_round_" and name.startswith("xs")
        torch.testing.assert_close(ours, theirs, rtol=0, atol=8 * torch.finfo(dtype).eps if twice else 0)


def test_the_twin_of_apply_adds_the_updates_of_every_replica_in_turn():
    z = [torch.zeros(2), torch.zeros(3)]
    updates = [torch.full((n,), value) for value in (1.0, 10.0) for n in (2, 3)]
    updates[2][0] = float("inf")
    assert reference.reference_apply_(z, updates, 0.5, zero=False, check_finite=True).item() == 1
    assert [t.tolist() for t in z] == [[0.5, 5.5], [5.5, 5.5, 5.5]]
    assert updates[0].tolist() == [1.0, 1.0]
    reference.reference_apply_(torch.zeros(2), updates[::2], 0.5)
    assert updates[0].tolist() == updates[2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("case", OPTIMIZERS + ROUNDS, ids=str)
def test_found_inf_leaves_out_the_twins_step(case):
    tensors = float64_arguments(case)
    old = copies(tensors)
    for tensor, name in zip(tensors, case.tensors):
        if name.startswith("grad"):
            tensor.fill_(float("inf"))
    case.twin(*tensors, *case.scalars, found_inf=torch.ones(1))
    for name, tensor, before in zip(case.tensors, tensors, old):
        if "exp" in name or "momentum" in name or "states" in name or name == "z":
            assert torch.equal(tensor, before)
        elif name == "x":
            z = old[-2]
            torch.testing.assert_close(tensor, before + case.scalars[0] * (z - before), **NEAR)


@pytest.mark.parametrize("case", OPTIMIZERS + ROUNDS, ids=str)
def test_the_twins_gradients_are_divided_by_grad_scale(case):
    plain, scaled = float64_arguments(case), float64_arguments(case)
    for name, tensor in zip(case.tensors, scaled):
        if name.startswith("grad"):
            tensor *= 1024
    case.twin(*plain, *case.scalars)
    case.twin(*scaled, *case.scalars, grad_scale=torch.tensor(1024.0))
    for name, a, b in zip(case.tensors, plain, scaled):
        assert name.startswith("grad") or torch.equal(a, b)


@EVERY_CASE
def test_twins_take_empty_lists(case):
    empty = [[] for _ in case.tensors]
    assert case.twin(*empty, *case.scalars, check_finite=True).item() == 0


def test_twins_of_pack_and_unpack():
    tensors = [torch.tensor(1.5), torch.empty(0), torch.arange(6.0).reshape(2, 3).t()]
    buffer = reference.pack(tensors, torch.bfloat16)
    assert buffer.dtype == torch.bfloat16
    assert buffer.tolist() == [1.5, 0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    back = [torch.zeros_like(t) for t in tensors]
    reference.unpack_(buffer, back)
    assert all(torch.equal(a, b) for a, b in zip(back, tensors))
    assert reference.pack([]).shape == (0,)
