"""What a graph would keep the first value of, wherever code has it: batches are captured again, or it is refused."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.errors import StageError
from avgpipe.runtime.remembered import Remembered, first_changed
from tests.options import grouped
from tests.runtime.capture_rules import capture_rules
from tests.runtime.cases import language_model, momentum, token_batches

LOSS = nn.CrossEntropyLoss()
FACTOR = 1.0


@pytest.fixture
def captures():
    with capture_rules() as backend:
        yield backend.graphs


@pytest.fixture(autouse=True)
def factor_of_each_test(monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 1.0)


# ---- losses whose factor the caller changes: each returns the loss function, and what changes the factor -----------


def by_global():
    def loss_fn(output, target):
        return LOSS(output, target) * FACTOR

    return loss_fn, lambda value: globals().update(FACTOR=value)


def by_closure():
    factor = 1.0

    def change(value):
        nonlocal factor
        factor = value

    return lambda output, target: LOSS(output, target) * factor, change


def by_helper():
    helper = by_global()[0]
    return lambda output, target: helper(output, target), lambda value: globals().update(FACTOR=value)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def forward(self, output, target):
        return LOSS(output, target) * self.factor


def by_module_in_a_function():
    criterion = Weighted()
    return lambda output, target: criterion(output, target), lambda value: setattr(criterion, "factor", value)


class Owner:
    def __init__(self):
        self.factor, self.settings = 1.0, SimpleNamespace(factor=1.0)

    def loss(self, output, target):
        return LOSS(output, target) * self.factor

    def loss_by_settings(self, output, target):
        return LOSS(output, target) * self.settings.factor

    def __call__(self, output, target):
        return self.loss(output, target)


def by_method():
    owner = Owner()
    return owner.loss, lambda value: setattr(owner, "factor", value)


def by_object():
    owner = Owner()
    return owner, lambda value: setattr(owner, "factor", value)


def by_settings():
    owner = Owner()
    return owner.loss_by_settings, lambda value: setattr(owner.settings, "factor", value)


def by_bound_argument():
    settings = {"factor": [1.0]}

    def loss_fn(output, target, settings):
        return LOSS(output, target) * settings["factor"][0]

    return partial(loss_fn, settings=settings), lambda value: settings.update(factor=[value])


LOSSES = [
    by_global,
    by_closure,
    by_helper,
    by_module_in_a_function,
    by_method,
    by_object,
    by_settings,
    by_bound_argument,
]


@pytest.mark.parametrize("made", LOSSES, ids=lambda made: made.__name__)
def test_a_loss_whose_factor_the_caller_changes_is_captured_again(captures, made):
    batches = token_batches(12, 8)

    def train(graphs):
        loss_fn, change = made()
        change(1.0)
        options = {"loss_fn": loss_fn, "optimizer": momentum, "cuda_graphs": graphs}
        with Pipeline(language_model(), Plan(stages=2, micro_batches=2), **grouped(**options)) as p:
            found = [r.loss for r in p.train(batches[:6])]
            change(0.5)
            return found + [r.loss for r in p.train(batches[6:])]

    assert train(True) == train(False)
    assert [graph.replays for graph in captures] == [4, 4]


class Scaled(nn.Module):
    def forward(self, x):
        return x * FACTOR


def in_place_of_one(layer):
    layers = language_model()
    return nn.Sequential(*layers[:3], layer, *layers[5:])


def test_layers_that_read_a_variable_which_the_caller_changes_are_captured_again(captures):
    def train(graphs):
        options = {"loss_fn": LOSS, "optimizer": momentum, "cuda_graphs": graphs}
        globals()["FACTOR"], found = 1.0, []
        with Pipeline(in_place_of_one(Scaled()), Plan(stages=2), **grouped(**options)) as p:
            for n, batch in enumerate(token_batches(12, 8)):
                globals()["FACTOR"] = 1.0 if n < 6 else 0.5
                found.append(p.step(*batch))
        return found

    assert train(True) == train(False)
    assert [graph.replays for graph in captures] == [4, 4]


@dataclass
class Schedule:
    calls: int = 0
    generator: object = None
    past: list = field(default_factory=list)

    def next(self):
        self.calls += 1
        return 1 / self.calls


class Scheduled(nn.Module):
    def __init__(self):
        super().__init__()
        self.schedule = Schedule()

    def forward(self, x):
        return x * self.schedule.next()


class SkippedAtRandom(nn.Module):
    """By a generator of its own."""

    def __init__(self, generator):
        super().__init__()
        self.draw = {"own": generator}

    def forward(self, x):
        return x if self.draw["own"].random() < 0.5 else -x


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (Scheduled, r"schedule\.calls"),
        (lambda: SkippedAtRandom(random.Random(0)), r"draw\['own'\]"),
        (lambda: SkippedAtRandom(np.random.default_rng(0)), r"draw\['own'\]"),
        (lambda: SkippedAtRandom(np.random.RandomState(0)), r"draw\['own'\]"),
    ],
)
def test_layers_that_change_what_objects_keep_are_refused(captures, layer, what):
    options = {"loss_fn": LOSS, "optimizer": momentum, "cuda_graphs": True, "check": "off"}
    with (
        Pipeline(in_place_of_one(layer()), Plan(stages=2), **grouped(**options)) as p,
        pytest.raises(StageError, match=f"{what}.* is assigned in each batch"),
    ):
        list(p.train(token_batches(5, 8)))


# ---- what is found -------------------------------------------------------------------------------------------------


def remembered(**values):
    module = nn.Module()
    vars(module).update(values)
    return Remembered([("layer", module)], {})


def test_a_value_is_named_by_its_place():
    found = remembered(of={"a": [1, (2.5, "x")]}, settings=SimpleNamespace(on=True)).all()
    assert found == {
        "layer.of['a'][0]": 1,
        "layer.of['a'][1][0]": 2.5,
        "layer.of['a'][1][1]": "x",
        "layer.settings.on": True,
    }


def test_objects_that_refer_to_each_other_are_looked_at_once():
    one, other = SimpleNamespace(value=1), SimpleNamespace(value=2)
    one.other, other.one = other, one
    assert remembered(one=one).all() == {"layer.one.value": 1, "layer.one.other.value": 2}


def test_long_collections_and_graphs_of_autograd_are_left_alone():
    learnt = torch.ones(2, requires_grad=True) * 2
    assert remembered(words=list(range(10**6)), learnt=learnt).all() == {}


def test_a_tensor_that_is_another_one_has_changed_and_its_elements_have_not():
    tensor = torch.ones(2)
    before = remembered(tensor=tensor).all()
    assert first_changed(remembered(tensor=tensor.add_(1)).all(), before) is None
    assert first_changed(remembered(tensor=tensor.clone()).all(), before) == "layer.tensor"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.ones(2), 0),
        (0, torch.ones(2)),
        (None, torch.ones(2)),
        (np.float32(1), np.float32(2)),
        (np.array([1.0, 2.0]), np.array([1.0, 3.0])),
        ({1, 2}, {1}),
        (torch.float32, torch.bfloat16),
        ([1], [1, 2]),
    ],
    ids=str,
)
def test_values_of_any_kind_are_compared(before, after):
    first = remembered(value=before).all()
    assert first_changed(remembered(value=before).all(), first) is None
    assert first_changed(remembered(value=after).all(), first).startswith("layer.value")


def test_what_is_no_number_is_as_it_was():
    before = remembered(value=float("nan")).all()
    assert first_changed(dict(before), before) is None
    assert first_changed({**before, "layer.more": None}, before) == "layer.more"


def test_variables_of_one_name_are_kept_apart():
    def reads(value):
        factor = value
        return lambda: factor

    found = Remembered([], {"one": reads(1), "other": reads(2)}).outside()
    assert [value for name, value in found.items() if name.startswith("factor")] == [1, 2]
