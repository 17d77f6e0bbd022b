"""Batches are cut into micro-batches, put together again, and weighed."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from avgpipe.model.batch import batch_size, loss_weights, pair, split
from avgpipe.runtime.outputs import concatenate


@given(st.integers(1, 40), st.integers(1, 40))
def test_splitting_is_even_and_loses_nothing(samples: int, parts: int) -> None:
    parts = min(samples, parts)
    value = {
        "x": torch.arange(samples),
        "y": [torch.arange(2 * samples).view(samples, 2), torch.tensor(3.0), "tag", None],
    }
    pieces = split(value, parts)
    sizes = [batch_size(p) for p in pieces]
    assert max(sizes) - min(sizes) <= 1
    whole = concatenate(pieces, sizes)
    assert torch.equal(whole["x"], value["x"])
    assert torch.equal(whole["y"][0], value["y"][0])
    assert whole["y"][2:] == ["tag", None]


def test_a_batch_needs_one_number_of_samples() -> None:
    with pytest.raises(ValueError, match=r"sizes \[2, 3\]"):
        batch_size([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(ValueError, match="no tensor with a batch dimension"):
        batch_size([torch.tensor(1.0), "text"])


def test_a_tokenizers_output_counts_as_a_dict() -> None:
    encoding = UserDict(input_ids=torch.zeros(3, 2), attention_mask=None)
    inputs, targets = pair((encoding, torch.zeros(3)))
    assert type(inputs) is dict
    assert inputs.keys() == {"input_ids", "attention_mask"}
    assert batch_size(inputs) == batch_size(targets) == 3
    with pytest.raises(TypeError, match="must yield pairs"):
        pair(encoding)


def test_micro_batches_weigh_what_their_loss_counts() -> None:
    targets = [torch.tensor([0, 1, 1]), torch.tensor([1, -100])]
    assert loss_weights(nn.CrossEntropyLoss(), targets, [3, 2], None).factors == [0.75, 0.25]
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
    assert loss_weights(weighted, targets, [3, 2], None).factors == [5 / 7, 2 / 7]
    assert loss_weights(nn.MSELoss(), targets, [3, 2], None).factors == [0.6, 0.4]
    assert loss_weights(nn.MSELoss(reduction="sum"), targets, [3, 2], None).factors == [1.0, 1.0]
    assert loss_weights(nn.MSELoss(), targets, [3, 2], lambda t: (t == 1).sum()).factors == [2 / 3, 1 / 3]


# ---- what loaders yield --------------------------------------------------------------------------------------------


def test_a_mapping_with_labels_is_inputs_and_targets() -> None:
    batch = {"input_ids": torch.ones(2, 3), "labels": torch.zeros(2), "attention_mask": torch.ones(2, 3)}
    for kind in (dict, UserDict):
        inputs, targets = pair(kind(batch))
        assert list(inputs) == ["input_ids", "attention_mask"]
        assert inputs["input_ids"] is batch["input_ids"]
        assert targets is batch["labels"]
    assert "labels" in batch
    inputs, targets = pair((batch, batch["labels"]))
    assert list(inputs) == list(batch)  # whoever gives a pair says what the inputs are


@pytest.mark.parametrize(
    ("batch", "got"),
    [
        (torch.zeros(2), "Tensor"),
        ((1, 2, 3), "tuple of 3"),
        ({"x": 1, "y": 2}, "dict with the keys 'x', 'y'"),
        ({"labels": 1}, "dict with the keys 'labels'"),
        ({}, "dict without keys"),
    ],
    ids=str,
)
def test_anything_else_is_refused(batch: Any, got: str) -> None:
    with pytest.raises(
        TypeError, match=f"pairs .*, or mappings of inputs with the targets as 'labels', not {got}$"
    ):
        pair(batch)


def test_a_list_of_tensors_without_a_dimension_is_a_column() -> None:
    labels = [torch.tensor(n) for n in range(5)]
    pieces = split((torch.zeros(5, 2), labels), 2, 5)
    assert [[int(t) for t in piece[1]] for piece in pieces] == [[0, 1, 2], [3, 4]]
    whole = (torch.tensor(3), torch.tensor(4))
    assert [piece[1] for piece in split((torch.zeros(2, 2), whole), 2, 2)] == [whole, whole]
    rows = [torch.zeros(4, 1), torch.zeros(4, 2)]
    assert [[len(t) for t in piece] for piece in split(rows, 2, 4)] == [[2, 2], [2, 2]]
