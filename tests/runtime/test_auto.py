"""advance="auto", and what it measures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import MemoryLimit, Pipeline, Plan
from avgpipe.measure.memory import SavedBytes
from tests.runner import run
from tests.runtime.cases import language_model, momentum, token_batches


def test_saved_bytes_counts_memory_once_and_no_weights() -> None:
    layer = nn.Linear(8, 16)
    x = torch.randn(4, 8, requires_grad=True)
    saved = SavedBytes([layer.weight.untyped_storage().data_ptr()])
    with saved.counting():
        y = layer(x)  # saves x
        z = y.exp()  # saves its result
        (z * z.view(16, 4).view(4, 16)).sum()  # saves z twice
    assert saved.bytes == x.nbytes + z.nbytes
    saved.count(x)
    assert saved.bytes == x.nbytes + z.nbytes


def test_counting_changes_no_gradient() -> None:
    x = torch.randn(3, requires_grad=True)
    with SavedBytes([]).counting():
        y = (x.sin() * x.exp()).sum()
    (counted,) = torch.autograd.grad(y, x)
    (plain,) = torch.autograd.grad((x.sin() * x.exp()).sum(), x)
    assert torch.equal(counted, plain)


def train(K: int, N: int, advance: Any, link: str = "auto", limit: int | None = None) -> Any:
    plan = Plan(stages=K, pipelines=N, micro_batches=4, advance=advance)
    with Pipeline(
        language_model(dropout=0.3),
        plan,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=momentum,
        link=link,
        extensions=[] if limit is None else [MemoryLimit(limit)],
    ) as p:
        losses = [r.loss for r in p.train(token_batches(6 * N, 8))]
        return losses, p.advance and p.advance.advance, p.advance and p.advance.peak_in_flight


@pytest.mark.parametrize("N", [1, 2])
def test_auto_chooses_once_and_changes_no_loss(N: int) -> None:
    losses, advance, _ = train(2, N, "auto")
    assert len(advance) == 2
    assert (losses, None, None) == train(2, N, None)


@pytest.mark.ranks
@pytest.mark.parametrize("link", ["shm", "gloo"])
def test_ranks_choose_alike(link: str) -> None:
    results = run(3, train, K=3, N=2, advance="auto", link=link)
    assert results[0][1] is not None
    assert all(r == results[0] for r in results)


def test_a_limit_that_nothing_fits_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="memory_limit_bytes=10: stage 0 needs"):
        train(2, 1, "auto", limit=10)


@pytest.mark.parametrize(("advance", "limit"), [("auto", 0), ("auto", -5), (None, 1 << 30)])
def test_a_limit_is_positive_and_for_auto(advance: Any, limit: int) -> None:
    with pytest.raises(
        ValueError, match=rf"MemoryLimit\({limit}\) must be bytes above 0, for Plan\(advance=.auto.\)"
    ):
        train(2, 1, advance, limit=limit)
