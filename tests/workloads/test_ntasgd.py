import copy

import pytest
import torch
from torch import nn

from avgpipe.workloads.ntasgd import NTASGD, NonMonotonicTrigger


def published_trigger(losses, window):
    """Algorithm 1, its condition taken literally: v > min of logs[0 .. t - n - 1], with t > n."""
    logs, triggers = [], []
    for v in losses:
        t = len(logs)
        triggers.append(t > window and v > min(logs[i] for i in range(t - window)))
        logs.append(v)
    return triggers


@pytest.mark.parametrize("window", [0, 1, 3, 5])
def test_trigger_follows_algorithm_1(window):
    generator = torch.Generator().manual_seed(window)
    for _ in range(20):
        losses = (torch.rand(15, generator=generator) + torch.linspace(1, 0, 15)).tolist()
        trigger = NonMonotonicTrigger(window)
        assert [trigger.observe(v) for v in losses] == published_trigger(losses, window)


def test_falling_losses_never_trigger():
    trigger = NonMonotonicTrigger(2)
    assert not any(trigger.observe(1 / (n + 1)) for n in range(20))


def test_trigger_goes_on_from_its_losses():
    losses = [5, 4, 3, 3.5, 3.6, 3.7]
    first = NonMonotonicTrigger(2)
    for v in losses[:3]:
        first.observe(v)
    second = NonMonotonicTrigger(2, first.losses)
    assert [second.observe(v) for v in losses[3:]] == published_trigger(losses, 2)[3:]


def test_negative_windows_are_refused():
    with pytest.raises(ValueError, match="window must not be negative, got -1"):
        NonMonotonicTrigger(-1)
    with pytest.raises(ValueError, match="window must not be negative, got -2"):
        NTASGD([nn.Parameter(torch.zeros(1))], lr=1.0, window=-2)


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in ((3, 2), (4,))]


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
    with optimizer.averaged():
        for p, mean in zip(params, means):
            torch.testing.assert_close(p.detach(), mean, atol=1e-14, rtol=0)
    for p, w in zip(params, weights):
        torch.testing.assert_close(p.detach(), w, atol=1e-14, rtol=0)


def test_before_the_trigger_nothing_is_averaged():
    params = parameters()
    optimizer = NTASGD(params, lr=0.1)
    give_gradients(params, 0)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    assert not optimizer.triggered
    assert all("ax" not in state for state in optimizer.state.values())
    with optimizer.averaged():
        assert all(torch.equal(p, b) for p, b in zip(params, before))


def test_the_weights_come_back_after_an_error():
    params = parameters()
    optimizer = NTASGD(params, lr=0.1)
    optimizer.trigger()
    give_gradients(params, 0)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    with pytest.raises(KeyError), optimizer.averaged():
        raise KeyError
    assert all(torch.equal(p, b) for p, b in zip(params, before))


def test_observe_triggers_once():
    optimizer = NTASGD(parameters(), lr=0.1, window=1)
    assert [optimizer.observe(v) for v in (3.0, 2.0, 2.5, 4.0, 5.0)] == [False, False, False, True, False]
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


def test_a_copied_optimizer_averages_too():
    optimizer = NTASGD(parameters(), lr=0.1)
    optimizer.trigger()
    twin = copy.deepcopy(optimizer)
    params = twin.param_groups[0]["params"]
    give_gradients(params, 0)
    twin.step()
    assert twin.param_groups[0]["averaged"] == 2


def test_frozen_parameters_and_several_groups():
    a, b = parameters()
    b.requires_grad_(False)
    optimizer = NTASGD([{"params": [a]}, {"params": [b], "lr": 0.3}], lr=0.1)
    optimizer.trigger()
    a.grad = torch.ones_like(a)
    before = b.clone()
    optimizer.step()
    with optimizer.averaged():
        assert torch.equal(b, before)
    assert "ax" not in optimizer.state.get(b, {})
