"""FusedGradients: the gradients of linear layers are those of autograd, with fewer passes over memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from avgpipe import BitChecks, Compile, FusedGradients, Pipeline, Plan, Precision
from avgpipe.runtime.fused_gradients import FusedLinear, Products
from tests.options import grouped
from tests.runner import run
from tests.runtime.cases import adamw, assert_same_state, momentum, train_on_one_device, unequal

LOSS = nn.CrossEntropyLoss()


class Scaled(nn.Linear):
    """No plain linear layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(input)


class Block(nn.Module):
    """Linear layers in most of the ways in which models have them; inputs have three dimensions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.twice, self.scaled, self.frozen = (
            nn.Linear(width, width),
            Scaled(width, width),
            nn.Linear(width, width),
        )
        self.unseen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.half_frozen = nn.Linear(width, width)
        self.half_frozen.bias.requires_grad_(False)
        self.parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        x = self.twice(torch.tanh(self.twice(x.transpose(0, 1)))).transpose(0, 1)
        x = x + self.frozen(x) + self.scaled(x) + self.half_frozen(x) + self.parametrized(x)
        return x + nn.functional.linear(x, self.up.weight[: x.shape[-1]])  # by its weight, without the layer


class Head(nn.Module):
    """A linear layer whose weight is the embedding's."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.linear = nn.Linear(embedding.embedding_dim, embedding.num_embeddings)
        self.linear.weight = embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(x).transpose(1, 2)
        return logits


def model(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    embedding = nn.Embedding(11, width)
    return nn.Sequential(embedding, Block(width), Block(width), Head(embedding)).double()


def batches(count: int = 5, samples: int = 8) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    sizes = [samples] * (count - 1) + [samples // 2 + 1]
    return [tuple(torch.randint(11, (2, n, 3), generator=generator)) for n in sizes]


PLANS: dict[str, dict[str, Any]] = {
    "one stage": {"stages": 1, "micro_batches": 3},
    "two stages": {"stages": 2, "micro_batches": 4},
    "whole batches": {"stages": 2, "micro_batches": 1},
    "shared batches": {"stages": 2, "pipelines": 2, "micro_batches": 4, "staleness": 0},
    "replicas": {"stages": 2, "micro_batches": 4, "replication": (1, 2), "schedule": "1f1b"},
}


def train(
    plan: dict[str, Any], fuses: bool = True, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    chosen = {"loss_fn": LOSS, "optimizer": adamw, "fuses_gradients": fuses, **options}
    with Pipeline(model(), Plan(**plan), **grouped(timeout_s=60, **chosen)) as p:
        losses = [r.loss for r in p.train(batches())]
        p.evaluate(batches(2))
        return losses, p.state_dict()


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.1}], ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_it_trains_as_one_device(name: str, options: dict[str, Any]) -> None:
    losses, state = train(PLANS[name], **options)
    clip = options.get("clip_grad_norm")
    expected_losses, expected = train_on_one_device(model(), batches(), LOSS, adamw, clip)
    assert unequal(losses, expected_losses) < 1e-10
    assert_same_state(state, expected, 1e-10)


@pytest.mark.parametrize(
    "plan", [{"schedule": "pipedream-2bw"}, {"schedule": "pipedream", "micro_batches": 1}], ids=str
)
def test_so_it_does_on_older_weights(plan: dict[str, Any]) -> None:
    whole = {"stages": 2, "micro_batches": 2, **plan}
    (losses, state), (expected_losses, expected) = (
        train(whole, fuses, optimizer=momentum) for fuses in (True, False)
    )
    assert unequal(losses, expected_losses) < 1e-10
    assert_same_state(state, expected, 1e-10)


def on_ranks(plan: dict[str, Any]) -> Any:
    return train(plan)


@pytest.mark.ranks
def test_replicas_on_ranks_sum_what_their_products_have_added_up() -> None:
    expected_losses, expected = train_on_one_device(model(), batches(), LOSS, adamw)
    for losses, state in run(3, on_ranks, plan=PLANS["replicas"]):
        assert unequal(losses, expected_losses) < 1e-10
        assert_same_state(state, expected, 1e-10)


def test_which_layers_it_has() -> None:
    with Pipeline(model(), Plan(stages=1), loss_fn=LOSS, optimizer=adamw, extensions=[FusedGradients()]) as p:
        (trained,) = p._session.worker.trained.values()
        names = {n for n, m in trained.stage.layers.named_modules() if isinstance(m, FusedLinear)}
    of_a_block = {"up", "down", "twice", "unseen", "half_frozen"}
    assert names == {f"{n}.{name}" for n in (1, 2) for name in of_a_block} | {"3.linear"}


class Names(TorchDispatchMode):
    """Counts operators, and of what sizes their first results are."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.seen[func._schema.name.removeprefix("aten::"), tuple(result.shape)] += 1
        return result


def counted(fuses: bool, **options: Any) -> Counter[tuple[str, tuple[int, ...]]]:
    layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    data = [(torch.randn(8, 5), torch.randint(3, (8,))) for _ in range(3)]
    chosen = {"loss_fn": LOSS, "optimizer": momentum, "fuses_gradients": fuses, "check": "off", **options}
    with Pipeline(layers, Plan(stages=1, micro_batches=4), **grouped(**chosen)) as p:
        p.step(*data[0])
        with Names() as names:
            p.step(*data[1])
    return names.seen


def test_nothing_is_added_beside_the_products() -> None:
    fused, plain = counted(True), counted(False)
    of_the_step = 2
    for shape in ((7, 5), (3, 7)):
        assert (plain["mm", shape], plain["add_", shape]) == (4, 3 + of_the_step)
        assert (fused["mm", shape], fused["addmm_", shape], fused["add_", shape]) == (1, 3, of_the_step)


def test_autocast_casts_a_weight_once_for_a_batch() -> None:
    fused, plain = (counted(fuses, autocast=torch.bfloat16) for fuses in (True, False))
    for shape in ((7, 5), (3, 7), (7,), (3,)):
        assert plain["_to_copy", shape] == 8, "forwards, and gradients of backwards"
        gradients = 1 if len(shape) == 2 else 0  # this device's products of 16 bits are of 16 bits
        assert fused["_to_copy", shape] == 1 + gradients, shape


def test_autocast_trains_as_without_it() -> None:
    data = [(torch.randn(8, 5), torch.randint(3, (8,))) for _ in range(6)]
    ends = []
    for fuses in (True, False):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        options = {
            "loss_fn": LOSS,
            "optimizer": momentum,
            "autocast": torch.bfloat16,
            "fuses_gradients": fuses,
        }
        with Pipeline(layers, Plan(stages=2, micro_batches=4), **grouped(**options)) as p:
            ends.append(([r.loss for r in p.train(data)], p.state_dict()))
    (losses, state), (expected_losses, expected) = ends
    assert unequal(losses, expected_losses) < 1e-2
    assert_same_state(state, expected, 1e-2)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_weights_that_were_replaced_are_cast_again(micro_batches: int, tmp_path: Path) -> None:
    """Also for a batch of the same number as the last one before."""
    data = [(torch.randn(4, 5), torch.randint(3, (4,))) for _ in range(3)]
    layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    options = {"loss_fn": LOSS, "optimizer": momentum, "autocast": torch.bfloat16, "fuses_gradients": True}
    with Pipeline(layers, Plan(stages=2, micro_batches=micro_batches), **grouped(**options)) as p:
        p.save(tmp_path)
        first = p.step(*data[0])
        state = p.state_dict()
        p.load(tmp_path)
        assert p.step(*data[0]) == first
        assert_same_state(p.state_dict(), state, 0.0)


def test_a_product_of_the_same_matrices_is_added_to_any_gradient() -> None:
    products = Products(torch.device("cpu"), None)
    p = nn.Parameter(torch.zeros(3, 2))
    left, right = torch.randn(3, 4), torch.randn(4, 2)
    products.add(p, left, right)
    assert torch.equal(p.grad, left @ right)
    products.add(p, left, right)
    torch.testing.assert_close(p.grad, 2 * (left @ right))
    p.grad = torch.eye(3, 2).to_sparse()
    products.add(p, left, right)
    torch.testing.assert_close(p.grad, left @ right + torch.eye(3, 2))


@pytest.mark.parametrize(
    ("plan", "other", "why"),
    [
        ({"recompute": "always"}, [], r"FusedGradients\(\) cannot have recompute='always'"),
        ({}, [BitChecks(every=2)], r"FusedGradients\(\) cannot have BitChecks\(every=2\)"),
        ({}, [Compile()], r"FusedGradients\(\) cannot have Compile\(\)"),
        ({"schedule": "zero-bubble-h1"}, [], r"FusedGradients\(\) cannot have schedule='zero-bubble-h1'"),
    ],
)
def test_what_it_cannot_be_combined_with(plan: dict[str, Any], other: list[Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Pipeline(
            model(),
            Plan(stages=2, micro_batches=2, **plan),
            loss_fn=LOSS,
            optimizer=adamw,
            extensions=[FusedGradients(), *other],
        )


def test_a_scale_of_losses_is_that_of_the_gradients() -> None:
    ends = []
    for fuses in (True, False):
        layers = model().float()
        options = [Precision(autocast=torch.float16, loss_scale=64.0), *([FusedGradients()] if fuses else [])]
        with Pipeline(
            layers, Plan(stages=2, micro_batches=2), loss_fn=LOSS, optimizer=adamw, extensions=options
        ) as p:
            ends.append([r.loss for r in p.train(batches())])
    assert unequal(*ends) < 1e-2
