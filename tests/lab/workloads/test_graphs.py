"""The models of the paper as CUDA graphs, with dropout and carried state: as without graphs, in every bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe_lab.workloads.awd_lstm import AWDLSTMConfig, AWDLSTMLoss, awd_lstm_layers
from avgpipe_lab.workloads.gnmt import GNMTConfig, gnmt_layers
from avgpipe_lab.workloads.tokens import TokenLoss
from tests.options import grouped
from tests.runtime.capture_rules import capture_rules
from tests.runtime.cases import adamw

V, SAMPLES, LENGTH = 13, 8, 6  # vocabulary, rows of a batch, and their tokens


def awd_lstm() -> tuple[nn.Module, Any]:
    """Five kinds of dropout, and a hidden state that goes from batch to batch."""
    return nn.Sequential(*awd_lstm_layers(AWDLSTMConfig(V, 6, 8, 2))).double(), AWDLSTMLoss()


def gnmt() -> tuple[nn.Module, Any]:
    return nn.Sequential(*gnmt_layers(GNMTConfig(V, 8, 2, 2))).double(), TokenLoss()


def bert() -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(
        vocab_size=V, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.1, **sizes
    )
    return transformers.BertForSequenceClassification(config).double(), nn.CrossEntropyLoss()


def batches(model: Any, count: int) -> list[Any]:
    draw = torch.Generator().manual_seed(3)

    def tokens(length: int = LENGTH) -> torch.Tensor:
        return torch.randint(V, (SAMPLES, length), generator=draw)

    lengths = lambda: torch.randint(1, LENGTH, (SAMPLES, 1), generator=draw)  # noqa: E731
    if model is awd_lstm:
        return [(tokens(), tokens()) for _ in range(count)]
    if model is gnmt:
        return [
            ({"source": tokens(), "lengths": lengths()[:, 0], "target": tokens(4)}, tokens(4))
            for _ in range(count)
        ]
    masks = [(torch.arange(LENGTH) <= lengths()).long() for _ in range(count)]
    return [
        ({"input_ids": tokens(), "attention_mask": mask}, torch.randint(2, (SAMPLES,), generator=draw))
        for mask in masks
    ]


def train(model: Any, plan: Plan, graphs: bool) -> Any:
    made, loss_fn = model()
    given = batches(model, 4 * plan.pipelines)
    options = grouped(loss_fn=loss_fn, optimizer=adamw, clip_grad_norm=1.0, cuda_graphs=graphs)
    with Pipeline(made, plan, **options) as p:
        return [r.loss for r in p.train(given)], p.evaluate(given[:2]).loss, p.state_dict()


@pytest.mark.grid(6)
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("pipelines", [1, 2, 4])
@pytest.mark.parametrize("model", [awd_lstm, gnmt, bert])
def test_training_is_the_same_in_every_bit(model, pipelines, staleness):
    own = {"pipelines": pipelines, "staleness": staleness, "batch": "per-pipeline"} if pipelines > 1 else {}
    plan = Plan(stages=3, micro_batches=2, **own)
    plain = train(model, plan, False)
    with capture_rules() as device:
        found = train(model, plan, True)
    assert found[:2] == plain[:2]
    assert all(torch.equal(value, found[2][name]) for name, value in plain[2].items())
    # One launch for a pipeline's batch, once two of its form have run without; with carried state it is another form.
    launched = sum(graph.replays for graph in device.graphs)
    assert launched == pipelines * (1 if model is awd_lstm else 2)
