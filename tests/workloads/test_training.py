from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from avgpipe import ElasticAveraging, Reference
from avgpipe.workloads.options import BuildOptions
from avgpipe.workloads.training import Training, lr_factor, lr_scheduler_of, optimizer_of, scaled_lr

PLAIN = Training(batch_size=8, epochs=3, optimizer="adamw", lr=0.1, weight_decay=0.01)


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1), ("sqrt", 2), ("linear", 4)])
def test_the_rate_grows_with_the_pipelines(scaling, factor):
    assert scaled_lr(0.1, scaling, 1) == 0.1
    assert scaled_lr(0.1, scaling, 4) == pytest.approx(0.1 * factor)


def test_an_unknown_scaling_is_refused():
    with pytest.raises(ValueError, match="one of none, sqrt, linear, got 'log'"):
        scaled_lr(0.1, "log", 2)
    with pytest.raises(ValueError, match="one of none, sqrt, linear, got 'log'"):
        BuildOptions(lr_scaling="log")


def test_options_override_the_preset():
    asked = PLAIN.asked(BuildOptions(batch_size=3, epochs=7, lr_scaling="linear"))
    assert (asked.batch_size, asked.epochs, asked.lr_scaling) == (3, 7, "linear")
    assert PLAIN.asked(BuildOptions()) == PLAIN


def test_linear_and_cosine_decay_follow_the_warm_up_to_zero():
    linear, cosine = (replace(PLAIN, warmup=0.2, decay=decay) for decay in ("linear", "cosine"))
    for training in (linear, cosine):
        assert [lr_factor(training, 10, n) for n in (0, 1, 2)] == pytest.approx([1 / 3, 2 / 3, 1])
        assert lr_factor(training, 10, 6) == pytest.approx(0.5)
        assert lr_factor(training, 10, 10) == pytest.approx(0)
        assert lr_factor(training, 10, 99) == pytest.approx(0)
    assert lr_factor(linear, 10, 9) == pytest.approx(1 / 8)
    assert lr_factor(cosine, 10, 9) == pytest.approx((1 + math.cos(math.pi * 7 / 8)) / 2)


def test_steps_are_tenths_at_the_milestones():
    training = replace(PLAIN, decay="steps", milestones=(0.5, 0.75))
    found = [lr_factor(training, 8, n) for n in range(8)]
    assert found == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])


def test_the_course_ends_with_the_run():
    def rates(options, steps):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = lr_scheduler_of(PLAIN, 20, options)(optimizer)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return optimizer.param_groups[0]["lr"]

    assert rates(BuildOptions(), 60) == 0  # 3 epochs of 20 batches
    assert rates(BuildOptions(), 59) > 0
    assert rates(BuildOptions(pipelines=4), 15) == 0
    assert rates(BuildOptions(pipelines=4), 14) > 0
    assert rates(BuildOptions(max_batches=10), 10) == 0
    assert lr_scheduler_of(replace(PLAIN, decay="none"), 20, BuildOptions()) is None


def test_only_matrices_decay():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    groups = optimizer_of(PLAIN, 1)(model.parameters()).param_groups
    assert [[tuple(p.shape) for p in g["params"]] for g in groups] == [[(2, 3)], [(2,), (2,), (2,)]]
    assert [g["weight_decay"] for g in groups] == [0.01, 0.0]


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_a_group_may_be_empty(kind):
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = optimizer_of(replace(PLAIN, optimizer=kind), 2)([p])
    elastic = ElasticAveraging(optimizer, Reference([p], replicas=1), replica=0)
    p.grad = torch.ones(2, 2)
    elastic.step()
    assert (p < 1).all()
    state = elastic.state_dict()
    elastic.load_state_dict(state)
    assert [len(g["params"]) for g in optimizer.param_groups] == [1, 0]
