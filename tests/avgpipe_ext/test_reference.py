"""The slow twins take the operators' arguments and follow the rules as they are written down.

That they make torch's steps, round once and take lists is what operators that equal both show.
"""

from __future__ import annotations

import inspect

import pytest
import torch

import avgpipe_ext.operators
from tests.avgpipe_ext import reference
from tests.avgpipe_ext.cases import (
    RULES,
    arguments,
    copies,
)

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
