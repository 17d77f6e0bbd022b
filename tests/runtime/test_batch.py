"""Batches are cut into micro-batches, put together again, and weighed."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from avgpipe.runtime.batch import batch_size, concatenate, loss_weights, pair, split


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
    whole = concatenate(pieces)
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
