"""Emulated stages: right gradients, and time where it belongs."""

import time
from contextlib import nullcontext

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from avgpipe.runtime.split_backward import input_backward
from avgpipe_lab.bench import schedules
from avgpipe_lab.bench.schedules import EmulatedStage, mean_loss, occupied


def double_stage():
    stage = EmulatedStage(0.0, 0.0).double()
    with torch.no_grad():
        stage.weight.fill_(7.5)
    return stage


def test_the_weight_is_added_to_every_value():
    stage = double_stage()
    x = torch.randn(2, 20, dtype=torch.float64)
    torch.testing.assert_close(stage(x), x + 7.5, rtol=0, atol=0)


def test_gradients_are_those_of_finite_differences():
    stage = double_stage()
    x = torch.randn(2, 20, dtype=torch.float64, requires_grad=True)

    def of(x, weight):
        return torch.func.functional_call(stage, {"weight": weight}, (x,)).square().sum()

    weight = torch.randn(1, dtype=torch.float64)
    got = torch.autograd.grad(stage(x).square().sum(), [x, stage.weight])
    step = 1e-6
    slope = (of(x, stage.weight + step) - of(x, stage.weight - step)) / (2 * step)
    assert got[1].item() == pytest.approx(slope.item(), rel=1e-5)
    torch.testing.assert_close(got[0], 2 * stage(x).detach(), rtol=1e-12, atol=0)
    assert of(x, weight).isfinite()


def test_the_loss_is_the_mean_and_so_is_its_gradient():
    output = torch.randn(3, 20, dtype=torch.float64, requires_grad=True)
    loss = mean_loss(output, torch.zeros(3, 1))
    (grad,) = torch.autograd.grad(loss, output)
    assert loss.item() == pytest.approx(output.mean().item())
    torch.testing.assert_close(grad, torch.full((3, 20), 1 / 60, dtype=torch.float64))


def spans(monkeypatch):
    """Seconds for which the device is asked for, in order."""
    asked = []
    monkeypatch.setattr(schedules, "occupied", lambda seconds: nullcontext(asked.append(seconds)))
    return asked


def test_each_gradient_takes_half_of_the_backward(monkeypatch):
    asked = spans(monkeypatch)
    stage = EmulatedStage(0.25, 0.5)
    stage(torch.ones(1, 16, requires_grad=True)).sum().backward()
    assert asked == [0.25, 0.25, 0.25]


def test_the_first_stage_spends_all_of_it_on_its_weights(monkeypatch):
    asked = spans(monkeypatch)
    EmulatedStage(0.25, 0.5)(torch.ones(1, 16)).sum().backward()
    assert asked == [0.25, 0.5]


def test_the_halves_can_run_apart(monkeypatch):
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    asked = spans(monkeypatch)
    stage = EmulatedStage(0.25, 0.5)
    x = torch.ones(1, 16, requires_grad=True)
    y = stage(x)
    grads, groups = stage_backward_input([y], [torch.ones(1, 16)], [x], stage.parameters())
    assert asked == [0.25, 0.25]
    assert stage.weight.grad is None
    torch.testing.assert_close(grads[0], torch.ones(1, 16))
    stage_backward_weight(stage.parameters(), groups)
    assert asked == [0.25, 0.25, 0.25]
    torch.testing.assert_close(stage.weight.grad, torch.full((1,), 16.0))


def split(stage, x, loss=None):
    """I of our runtime; its W."""
    output = stage(x) if loss is None else loss(stage(x), None)
    edges = [get_gradient_edge(output)]
    return input_backward(edges, [torch.ones_like(output)], [x] if x.requires_grad else [])


@pytest.mark.parametrize("loss", [None, mean_loss])
def test_our_runtime_runs_the_half_of_the_weights_later(monkeypatch, loss):
    asked = spans(monkeypatch)
    stage, x = EmulatedStage(0.25, 0.5), torch.ones(1, 16, requires_grad=True)
    weights_part = split(stage, x, loss)
    share = 1.0 if loss is None else 1 / 16
    torch.testing.assert_close(x.grad, torch.full((1, 16), share))
    assert asked == [0.25, 0.25]
    assert stage.weight.grad is None
    weights_part.run()
    assert asked == [0.25, 0.25, 0.25]
    torch.testing.assert_close(stage.weight.grad, torch.full((1,), 16 * share))


def test_our_runtime_runs_all_of_the_first_stage_later(monkeypatch):
    asked = spans(monkeypatch)
    stage = EmulatedStage(0.25, 0.5)
    weights_part = split(stage, torch.ones(1, 16))
    assert asked == [0.25]
    weights_part.run()
    assert asked == [0.25, 0.5]
    torch.testing.assert_close(stage.weight.grad, torch.full((1,), 16.0))


def test_work_inside_is_part_of_the_time():
    begin = time.perf_counter()
    with occupied(0.02):
        time.sleep(0.015)
    assert time.perf_counter() - begin >= 0.02


def test_torchs_ranks_have_stages_at_equal_distances_or_two_in_a_v(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    looped = [list(schedules.torch_stages("torch-looped-bfs", rank, 3, 6)) for rank in range(3)]
    assert looped == [[0, 3], [1, 4], [2, 5]]
    v = [list(schedules.torch_stages("torch-dualpipe-v", rank, 3, 6)) for rank in range(3)]
    assert v == [[0, 5], [1, 4], [2, 3]]


def test_older_versions_of_torch_have_no_v_over_gloo(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    with pytest.raises(ValueError, match=r"torch 2\.11\.0 cannot run schedules in a V over gloo: install"):
        schedules.torch_stages("torch-zero-bubble-v", 0, 2, 4)
