"""What may become a CUDA graph, and a run whose capture is a stand-in that calls the layers."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.runtime.context import Carry, Position
from avgpipe.runtime.graphs import StageGraphs
from avgpipe.runtime.options import TrainingOptions
from avgpipe.runtime.stage import Stage
from tests.runtime.cases import adamw, language_model, token_batches

CPU = torch.device("cpu")


def stage_of(*layers: nn.Module) -> Stage:
    return Stage(layers, 0, 0, 0, CPU).train()


@pytest.fixture
def captures(monkeypatch):
    """Capturing, as many times as there are entries; a capture is the layers themselves."""
    done: list[nn.Module] = []

    def capture(layers, samples, **_):
        layers(*samples)  # as the passes that warm up do
        done.append(layers)
        return layers

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    return done


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Carrying(nn.Module):
    def __init__(self):
        super().__init__()
        self.carry = Carry()

    def forward(self, x):
        return x


def test_stages_that_differ_from_pass_to_pass_are_refused(captures):
    for layers, reason in [
        (
            (nn.Linear(4, 4), nn.Dropout(0.1)),
            r"Dropout \('1' of stage 0\) draws random numbers.*probability to 0",
        ),
        ((nn.LSTM(4, 4, 2, dropout=0.5),), "LSTM .* draws random numbers"),
        ((Carrying(),), "carries state.*leave cuda_graphs out"),
    ]:
        with pytest.raises(ValueError, match=reason):
            StageGraphs(stage_of(*layers))
    graphs = StageGraphs(stage_of(nn.Linear(4, 4), Noise()))
    with pytest.raises(ValueError, match="a layer of stage 0 draws random numbers"):
        graphs(torch.ones(2, 4), Position(0, 0, 0))
    StageGraphs(stage_of(nn.Linear(4, 4), nn.Dropout(0.0)))


@pytest.mark.host
def test_the_cpu_has_no_graphs():
    options = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": adamw, "cuda_graphs": True}
    with pytest.raises(ValueError, match="needs CUDA, not device 'cpu': leave it out"):
        Pipeline(language_model(), Plan(), **options)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(stages=2, micro_batches=2, schedule="pipedream", weights=weights)
        for weights in ("stash", "vertical-sync", "double-buffer")
    ],
    ids=lambda plan: plan.weights,
)
def test_versions_of_the_weights_are_refused(plan):
    """A graph reads the addresses that its capture saw, and a version is other memory that the parameters point to: it
    would train on stale weights without a word. The plan alone tells, on whatever device.
    """
    options = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": adamw, "cuda_graphs": True}
    with pytest.raises(ValueError, match=f"cuda_graphs=True .* weights='{plan.weights}'.*flushes.*leave"):
        Pipeline(language_model(), plan, **options)


def train(batches, graphs, monkeypatch):
    if graphs:

        def with_graphs(**arguments):
            return TrainingOptions(**{**arguments, "cuda_graphs": True})

        monkeypatch.setattr("avgpipe.pipeline.TrainingOptions", with_graphs)
        monkeypatch.setattr("avgpipe.pipeline.check_device", lambda *arguments: None)
    plan = Plan(stages=3, pipelines=2, batch="per-pipeline", micro_batches=3)
    with Pipeline(language_model(), plan, loss_fn=nn.CrossEntropyLoss(), optimizer=adamw) as p:
        return [r.loss for r in p.train(batches)], p.evaluate(batches).loss, p.state_dict()


def test_a_captured_run_is_the_run_without(captures, monkeypatch, caplog):
    batches = token_batches(6, 9, last=7)
    plain = train(batches, False, monkeypatch)
    with caplog.at_level(logging.INFO, logger="avgpipe"):
        captured = train(batches, True, monkeypatch)
    assert captured[:2] == plain[:2]
    assert all(torch.equal(value, captured[2][name]) for name, value in plain[2].items())
    assert len(captures) == 3 * 2 * 3  # stages, pipelines, micro-batches
    # The last batch's micro-batches have 3, 2 and 2 samples: each lane of pipeline 1 says once that it runs without.
    assert sum("without CUDA graphs" in record.message for record in caplog.records) == 3


def test_capturing_leaves_buffers_and_gradients_as_they_were(captures):
    stage = stage_of(nn.Linear(4, 4), nn.BatchNorm1d(4))
    graphs = StageGraphs(stage)
    x = torch.randn(6, 4)
    expected = nn.functional.batch_norm(stage.layers[0](x), None, None, training=True)
    output = graphs(x, Position(0, 0, 0))
    torch.testing.assert_close(output, expected)
    assert int(stage.layers[1].num_batches_tracked) == 0
    stage.statistics.commit(0)
    assert int(stage.layers[1].num_batches_tracked) == 1
    assert all(p.grad is None for p in stage.parameters())


def test_what_is_sent_back_is_not_the_graph_s_memory(captures):
    class Fixed(torch.autograd.Function):
        memory = torch.zeros(2, 4)

        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return Fixed.memory.copy_(2 * grad)

    class Layer(nn.Module):
        def forward(self, x):
            return Fixed.apply(x)

    x = torch.ones(2, 4, requires_grad=True)
    StageGraphs(stage_of(Layer()))(x, Position(0, 0, 0)).sum().backward()
    assert float(x.grad.sum()) == 16.0
    Fixed.memory.zero_()
    assert float(x.grad.sum()) == 16.0


def test_values_keep_their_structure(captures):
    class Fork(nn.Module):
        def forward(self, value):
            return {"x": value[0] * value[1], "mask": value[0] > 0, "text": "plain", "scale": value[1]}

    graphs = StageGraphs(stage_of(Fork()))
    for n in range(3):
        result = graphs((torch.full((2,), float(n)), 0.5), Position(0, n, 0))
        assert (result["text"], result["scale"]) == ("plain", 0.5)
        assert torch.equal(result["x"], torch.full((2,), n * 0.5))
        assert result["mask"].dtype == torch.bool
