"""What the convolutional networks share: their pieces, initial weights and costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode


def convolution(
    inputs: int,
    outputs: int,
    kernel: int = 3,
    *,
    stride: int = 1,
    groups: int = 1,
    norm: bool,
    relu: bool = True,
) -> nn.Sequential:
    """A convolution that keeps the image's size (but for its stride), its batch norm, and ReLU.

    Without the norm it has a bias.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=not norm)
    ]
    if norm:
        layers.append(nn.BatchNorm2d(outputs))
    if relu:
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


def classifier(features: int, hidden: Sequence[int], classes: int, dropout: float) -> list[nn.Module]:
    """Fully connected layers with ReLU and dropout after each but the last: [b, ...] to logits [b, classes]."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers.append(nn.Sequential(nn.Flatten(), nn.Linear(features, width), nn.ReLU(), nn.Dropout(dropout)))
        features = width
    return [*layers, nn.Sequential(nn.Flatten(), nn.Linear(features, classes))]


class Upscale(nn.Module):
    """Images [b, C, H, W] to [b, C, side, side], bilinearly.

    Part of a model's first layer: so the batches that are loaded, and sent, stay as small as the data's images.
    """

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, images: Tensor) -> Tensor:
        return F.interpolate(images, (self.side, self.side), mode="bilinear", align_corners=False)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers that depend on the seed alone; the caller's random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def initialise(layers: Iterable[nn.Module]) -> None:
    """Normal weights of variance 2 over the fan-in (He et al. 2015, section 2.2), biases zero.

    The last layer of all has a deviation of 0.01, so that at first every class is about as likely.
    """
    modules = [m for layer in layers for m in layer.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    for module in modules:
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    nn.init.normal_(modules[-1].weight, std=0.01)


def multiply_adds(layers: Sequence[nn.Module], image: tuple[int, int, int]) -> list[float]:
    """Multiply-adds of each layer's forward for one image [C, H, W], counted without computing."""
    value = torch.empty(1, *image, device="meta")
    costs = []
    with torch.no_grad():
        for layer in layers:
            state = {name: torch.empty_like(t, device="meta") for name, t in layer.state_dict().items()}
            training = layer.training
            layer.eval()  # one image may be too few for a batch norm in training
            with FlopCounterMode(display=False) as counter:
                value = functional_call(layer, state, (value,))
            layer.train(training)
            costs.append(max(1.0, counter.get_total_flops() / 2))
    return costs
