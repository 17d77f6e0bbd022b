from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from avgpipe import ElasticAveraging, Reference
from avgpipe.tasks import BuildOptions
from avgpipe_lab.workloads.recipe import NTASGD, Recipe

PLAIN = Recipe(batch_size=8, epochs=3, optimizer="adamw", lr=0.1, weight_decay=0.01)


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1), ("sqrt", 2), ("linear", 4)])
def test_the_rate_grows_with_the_pipelines(scaling, factor):
    training = replace(PLAIN, lr_scaling=scaling)
    assert training.scaled_lr(BuildOptions()) == 0.1
    assert training.scaled_lr(BuildOptions(pipelines=4)) == pytest.approx(0.1 * factor)


@pytest.mark.parametrize(
    ("optimizer", "batch", "rule", "factor"),
    [
        ("sgd", "global", "avgpipe", 1),
        ("nt-asgd", "global", "avgpipe", 1),
        ("muon", "global", "avgpipe", 1),
        ("adam", "global", "easgd", 2),
        ("adamw", "global", "avgpipe", 2),
        ("adamw", "global", "mean-gradient", 1),
        ("sgd", "per-pipeline", "avgpipe", 2),
        ("adamw", "per-pipeline", "avgpipe", 2),
    ],
)
def test_the_rate_follows_from_what_a_batch_is(optimizer, batch, rule, factor):
    training = replace(PLAIN, optimizer=optimizer)
    rate = training.scaled_lr(BuildOptions(pipelines=4, batch=batch, rule=rule))
    assert rate == pytest.approx(0.1 * factor)


def test_options_override_the_preset():
    options = BuildOptions(batch_size=3, epochs=7, optimizer="sgd", lr=0.3, lr_scaling="linear")
    asked = PLAIN.with_options(options)
    assert (asked.batch_size, asked.epochs, asked.lr_scaling) == (3, 7, "linear")
    assert (asked.optimizer, asked.lr) == ("sgd", 0.3)
    assert PLAIN.with_options(BuildOptions()) == PLAIN


def test_linear_and_cosine_decay_follow_the_warm_up_to_zero():
    linear, cosine = (replace(PLAIN, warmup=0.2, decay=decay) for decay in ("linear", "cosine"))
    for training in (linear, cosine):
        assert [training.lr_factor(10, n) for n in (0, 1, 2)] == pytest.approx([1 / 3, 2 / 3, 1])
        assert training.lr_factor(10, 6) == pytest.approx(0.5)
        assert training.lr_factor(10, 10) == pytest.approx(0)
        assert training.lr_factor(10, 99) == pytest.approx(0)
    assert linear.lr_factor(10, 9) == pytest.approx(1 / 8)
    assert cosine.lr_factor(10, 9) == pytest.approx((1 + math.cos(math.pi * 7 / 8)) / 2)


def test_steps_are_tenths_at_the_milestones():
    training = replace(PLAIN, decay="steps", milestones=(0.5, 0.75))
    found = [training.lr_factor(8, n) for n in range(8)]
    assert found == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])


def test_the_course_ends_with_the_run():
    def rates(options, steps):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = PLAIN.lr_scheduler_for(20, options)(optimizer)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return optimizer.param_groups[0]["lr"]

    assert rates(BuildOptions(), 60) == 0  # 3 epochs of 20 batches
    assert rates(BuildOptions(), 59) > 0
    assert rates(BuildOptions(pipelines=4), 59) > 0
    assert rates(BuildOptions(pipelines=4, batch="per-pipeline"), 15) == 0
    assert rates(BuildOptions(pipelines=4, batch="per-pipeline"), 14) > 0
    assert rates(BuildOptions(max_batches=10), 10) == 0
    assert replace(PLAIN, decay="none").lr_scheduler_for(20, BuildOptions()) is None


def test_only_matrices_decay():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    groups = PLAIN.optimizer_for(BuildOptions(), model)(model.parameters()).param_groups
    assert [[tuple(p.shape) for p in g["params"]] for g in groups] == [[(2, 3)], [(2,), (2,), (2,)]]
    assert [g["weight_decay"] for g in groups] == [0.01, 0.0]


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", "muon"])
def test_a_group_may_be_empty(kind):
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = replace(PLAIN, optimizer=kind).optimizer_for(BuildOptions(pipelines=2), [])(
        [("a", p)] if kind == "muon" else [p]
    )
    elastic = ElasticAveraging(optimizer, Reference([p], replicas=1), replica=0)
    p.grad = torch.ones(2, 2)
    elastic.step()
    assert (p < 1).all()
    state = elastic.state_dict()
    elastic.load_state_dict(state)
    assert sorted(len(g["params"]) for g in optimizer.param_groups) == [0] * (1 + (kind == "muon")) + [1]


# ---- NT-ASGD -------------------------------------------------------------------------------------------------------


def published_trigger(losses, window):
    """Algorithm 1, its condition taken literally: v > min of logs[0 .. t - n - 1], with t > n."""
    logs, triggers = [], []
    for v in losses:
        t = len(logs)
        triggers.append(t > window and v > min(logs[i] for i in range(t - window)))
        logs.append(v)
    return triggers


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in ((3, 2), (4,))]


def observed(optimizer, losses):
    """After each loss, whether it was the one that triggered."""
    found = []
    for loss in losses:
        before = optimizer.triggered
        optimizer.observe(loss)
        found.append(optimizer.triggered and not before)
    return found


def give_gradients(params, step):
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def test_weights_are_those_of_sgd_and_averages_the_mean_since_the_trigger():
    params = parameters()
    weights = [p.detach().clone() for p in params]
    optimizer = NTASGD(params, lr=0.5, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    history = []
    for step in range(9):
        if step == 4:
            optimizer.trigger()
            history.append([w.clone() for w in weights])
        give_gradients(params, step)
        weights = [w - 0.5 / (step + 1) * (p.grad + 0.01 * w) for w, p in zip(weights, params)]
        optimizer.step()
        schedule.step()
        if step >= 4:
            history.append(weights)
        for p, w in zip(params, weights):
            torch.testing.assert_close(p.detach(), w, atol=1e-14, rtol=0)
    assert optimizer.param_groups[0]["averaged"] == len(history) == 6
    means = [torch.stack(column).mean(0) for column in zip(*history)]
    with optimizer.averages():
        for p, mean in zip(params, means):
            torch.testing.assert_close(p.detach(), mean, atol=1e-14, rtol=0)
    for p, w in zip(params, weights):
        torch.testing.assert_close(p.detach(), w, atol=1e-14, rtol=0)


def test_before_the_trigger_nothing_is_averaged():
    params = parameters()
    optimizer = NTASGD(params, lr=0.1)
    give_gradients(params, 0)
    optimizer.step()
    assert not optimizer.triggered
    assert all("ax" not in state for state in optimizer.state.values())


def test_the_weights_come_back_after_an_error():
    params = parameters()
    optimizer = NTASGD(params, lr=0.1)
    optimizer.trigger()
    give_gradients(params, 0)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    with pytest.raises(KeyError), optimizer.averages():
        raise KeyError
    assert all(torch.equal(p, b) for p, b in zip(params, before))


@pytest.mark.parametrize("window", [0, 1, 3, 5])
def test_the_trigger_follows_algorithm_1(window):
    generator = torch.Generator().manual_seed(window)
    for n in range(20):
        losses = torch.rand(15, generator=generator) + torch.linspace(1, 0 if n else -9, 15)
        optimizer = NTASGD(parameters(), lr=0.1, window=window)
        found = observed(optimizer, losses.tolist())
        expected = published_trigger(losses.tolist(), window)
        assert sum(found) == any(expected)
        if any(expected):
            assert found.index(True) == expected.index(True)


def test_observe_triggers_once():
    optimizer = NTASGD(parameters(), lr=0.1, window=1)
    assert observed(optimizer, (3.0, 2.0, 2.5, 4.0, 5.0)) == [False, False, False, True, False]
    assert optimizer.triggered


def test_triggering_again_changes_nothing():
    params = parameters()
    optimizer = NTASGD(params, lr=0.1)
    optimizer.trigger()
    give_gradients(params, 0)
    optimizer.step()
    mean = optimizer.state[params[0]]["ax"].clone()
    optimizer.trigger()
    assert torch.equal(optimizer.state[params[0]]["ax"], mean)


@pytest.mark.parametrize("triggered_at", [2, 5])
def test_a_loaded_state_goes_on_in_the_same_way(triggered_at):
    def run(params, optimizer, steps):
        for step in steps:
            if step == triggered_at:
                optimizer.trigger()
            give_gradients(params, step)
            optimizer.step()
            optimizer.observe(1.0 + step)

    whole_params, params = parameters(), parameters()
    whole, first = NTASGD(whole_params, lr=0.1, window=9), NTASGD(params, lr=0.1, window=9)
    run(whole_params, whole, range(8))
    run(params, first, range(4))
    second = NTASGD(params, lr=9.0, window=1)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(params, second, range(4, 8))
    assert all(torch.equal(a, b) for a, b in zip(whole_params, params))
    assert second.param_groups[0]["validation_losses"] == [1.0 + step for step in range(8)]
    for a, b in zip(whole_params, params):
        assert torch.equal(whole.state[a]["ax"], second.state[b]["ax"])


def test_frozen_parameters_and_several_groups():
    a, b = parameters()
    b.requires_grad_(False)
    optimizer = NTASGD([{"params": [a]}, {"params": [b], "lr": 0.3}], lr=0.1)
    optimizer.trigger()
    a.grad = torch.ones_like(a)
    before = b.clone()
    optimizer.step()
    with optimizer.averages():
        assert torch.equal(b, before)
    assert "ax" not in optimizer.state.get(b, {})
