"""Question: which variants of elastic averaging learn most from the same samples?

    AVGPIPE_DATA=DIR python -m benchmarks.statistics.variants --out FILE [--variants "one;elastic, a = 1"]
        [--optimizers adamw,sgd] [--lrs 0.003] [--seeds 0,1,2]

A small transformer that predicts bytes of WikiText-2, and a loop of a few lines for what the library has as rules, and
for what it tried and did not keep: four pipelines share each batch and learn of the others' updates one round late. A
line of FILE is a run: the last validation loss of the reference, and that of the mean of its last tenth.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from avgpipe_lab.workloads.data import read_text
from benchmarks.common.record import say

PIPELINES, BATCHES, BATCH_SIZE, LENGTH, WIDTH = 4, 800, 16, 64, 128
VALID_BATCHES, VALID_SIZE = 24, 64
WARMUP, FLOOR, TAIL = 100, 0.05, 0.1
DECAY, MOMENTUM = 0.01, 0.9
BETAS, EPS = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class Variant:
    """What pipelines do.

    Attributes:
        alpha: elasticity, of the part of the run that is done.
        pipelines: how many there are, of the part that is done.
        shared: "": an optimizer for each pipeline; "second moments": with those of the mean gradient; "all": one
            optimizer, from whose next step with its own gradient alone a pipeline goes on.
        others: of the others' last step, what a pipeline takes in place of as much of its own.
    """

    alpha: Callable[[float], float] = lambda done: 1.0
    pipelines: Callable[[float], int] = lambda done: PIPELINES
    shared: str = ""
    others: float = 0.0


VARIANTS = {
    "one": Variant(pipelines=lambda done: 1),
    "elastic, a = 1/4": Variant(alpha=lambda done: 0.25),
    "elastic, a = 1/2": Variant(alpha=lambda done: 0.5),
    "elastic, a = 1": Variant(),
    "elastic, a from 1/2 to 1": Variant(alpha=lambda done: 0.5 + 0.5 * done),
    "elastic, a = 1/2, at last 1": Variant(alpha=lambda done: 0.5 if done < 0.75 else 1.0),
    "elastic, a = 1, first N = 1, then 2": Variant(
        pipelines=lambda done: min(PIPELINES, 2 ** int(done / 0.2))
    ),
    "elastic, a = 1, the others' last step": Variant(others=1 - 1 / PIPELINES),
    "second moments of the mean gradient": Variant(shared="second moments"),
    "mean gradient": Variant(shared="all"),
}


class Bytes(nn.Module):
    """Two layers of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.out(self.layers(self.embedding(x) + self.places, mask, is_causal=True))


class Loss:
    """The loss of the model as a function of all its weights in one vector."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._shapes = {name: p.shape for name, p in model.named_parameters()}

    def __call__(self, weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        parts = weights.split([shape.numel() for shape in self._shapes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts)}
        return cross_entropy(functional_call(self._model, named, (inputs,)).flatten(0, 1), targets.flatten())

    def gradient(self, weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        weights = weights.detach().requires_grad_()
        return torch.autograd.grad(self(weights, inputs, targets), weights)[0]


class AdamW:
    """Its step, and those of a state that is not changed by it."""

    def __init__(self, like: Tensor) -> None:
        self.count, self.first, self.second = 0, torch.zeros_like(like), torch.zeros_like(like)

    def moments(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        first = self.first.lerp(gradient, 1 - BETAS[0])
        return first, self.second.lerp(gradient.square(), 1 - BETAS[1])

    def keep(self, first: Tensor, second: Tensor) -> None:
        self.count, self.first, self.second = self.count + 1, first, second

    def step(self, weights: Tensor, first: Tensor, second: Tensor, lr: float) -> Tensor:
        """The change of weights after the step that has these moments."""
        size = (second / (1 - BETAS[1] ** (self.count + 1))).sqrt_().add_(EPS)
        return -lr * (first / (1 - BETAS[0] ** (self.count + 1)) / size + DECAY * weights)


class SGD(AdamW):
    """With momentum."""

    def moments(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return self.first * MOMENTUM + gradient, self.second

    def step(self, weights: Tensor, first: Tensor, second: Tensor, lr: float) -> Tensor:
        return -lr * first


OPTIMIZERS = {"adamw": AdamW, "sgd": SGD}


def factor(done: int) -> float:
    """Return what the rate is multiplied with: a warm-up and a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * done / BATCHES))
    return min(1.0, (done + 1) / WARMUP) * (FLOOR + (1 - FLOOR) * cosine)


def train(
    variant: Variant, kind: type[AdamW], lr: float, seed: int, texts: dict[str, Tensor]
) -> dict[str, float]:
    """Return the losses of the reference at the end, and of its mean over the last tenth."""
    torch.manual_seed(seed)
    model = Bytes()
    loss = Loss(model)
    z = parameters_to_vector(model.parameters()).detach()
    replicas, own, common = [z], [kind(z)], kind(z)
    last, tail, tails = torch.zeros_like(z), torch.zeros_like(z), 0
    draw = torch.Generator().manual_seed(seed)
    for done in range(BATCHES):
        part, rate = done / BATCHES, lr * factor(done)
        n, alpha = variant.pipelines(part), variant.alpha(part)
        while len(replicas) < n:  # a new one begins as the first is
            own.append(kind(z))
            own[-1].count, own[-1].first, own[-1].second = own[0].count, own[0].first, own[0].second
            replicas.append(replicas[0])
        inputs, targets = drawn(texts["train"], BATCH_SIZE, draw)
        gradients = [loss.gradient(*given) for given in zip(replicas, inputs.chunk(n), targets.chunk(n))]
        mean_gradient = torch.stack(gradients).mean(0)
        if variant.shared == "all":
            ahead = [common.step(z, *common.moments(gradient), rate) for gradient in gradients]
            first, second = common.moments(mean_gradient)
            step = common.step(z, first, second, rate)
            common.keep(first, second)
            replicas = [z + own_step for own_step in ahead] if n > 1 else [z + step]
        else:
            steps = []
            for x, optimizer, gradient in zip(replicas, own, gradients):
                first, second = optimizer.moments(gradient)
                if variant.shared:  # of the mean gradients that are here, and the newest of its own
                    second = common.moments(gradient)[1]
                steps.append(optimizer.step(x, first, second, rate))
                optimizer.keep(first, second)
            common.keep(*common.moments(mean_gradient))
            step = torch.stack(steps).mean(0)
            if n == 1:
                replicas = [z + step]
            else:
                replicas = [
                    x + own_step.lerp(last, variant.others) + alpha * (z - x)
                    for x, own_step in zip(replicas, steps)
                ]
            last = step
        z = z + step
        if part >= 1 - TAIL:
            tail, tails = tail + z, tails + 1
    return {"loss": validated(loss, z, texts["valid"]), "tail": validated(loss, tail / tails, texts["valid"])}


def drawn(text: Tensor, size: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(0, len(text) - LENGTH, (size, 1), generator=draw)
    samples = text[starts + torch.arange(LENGTH + 1)].long()
    return samples[:, :-1], samples[:, 1:]


@torch.no_grad()
def validated(loss: Loss, weights: Tensor, text: Tensor) -> float:
    draw = torch.Generator().manual_seed(0)
    losses = [loss(weights, *drawn(text, VALID_SIZE, draw)).item() for _ in range(VALID_BATCHES)]
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", default=";".join(VARIANTS), help="separated by semicolons")
    parser.add_argument("--optimizers", default="adamw")
    parser.add_argument("--lrs", default="0.003")
    parser.add_argument("--seeds", default="0,1,2")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(os.environ["AVGPIPE_DATA"]) / "wikitext-2"
    texts = {
        split: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        for split, text in read_text(folder).items()
    }
    choices = (
        asked.seeds.split(","),
        asked.optimizers.split(","),
        asked.lrs.split(","),
        asked.variants.split(";"),
    )
    for seed, optimizer, lr, name in product(*choices):
        found = train(VARIANTS[name], OPTIMIZERS[optimizer], float(lr), int(seed), texts)
        row = {"variant": name, "optimizer": optimizer, "lr": float(lr), "seed": int(seed), **found}
        with asked.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        say(json.dumps(row))


if __name__ == "__main__":
    main()
