"""AlexNet as a list of layers (Krizhevsky, Sutskever, Hinton, NIPS 2012): 5 convolutions, 3 fully connected.

The two halves that the paper keeps on two GPUs are the two groups of its grouped convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from avgpipe.workloads.convolution import Upscale, classifier, initialise, seeded


@dataclass(frozen=True)
class AlexNetConfig:
    """Sizes; the defaults are the paper's (section 3.5).

    Attributes:
        image: channels, height and width.
        classes: how many.
        widths: channels of the five convolutions.
        stem: kernel, stride and padding of the first; the second has kernels of 5x5, the others of 3x3.
        hidden: features of the fully connected layers before the last.
        dropout: after each of these.
        response_norm: local response normalisation after the first two convolutions (section 3.3).
        side: to which images are scaled first, the paper's 224; None: they are taken as they are.
    """

    image: tuple[int, int, int]
    classes: int
    widths: tuple[int, int, int, int, int] = (96, 256, 384, 384, 256)
    stem: tuple[int, int, int] = (11, 4, 2)
    hidden: tuple[int, ...] = (4096, 4096)
    dropout: float = 0.5
    response_norm: bool = True
    side: int | None = None

    def __post_init__(self) -> None:
        for name in ("image", "widths", "hidden"):
            if min(getattr(self, name), default=1) < 1:
                raise ValueError(f"{name} must be at least 1 each, got {getattr(self, name)}")
        if any(width % 2 for width in self.widths):
            raise ValueError(f"widths must be even, as half the channels are a group, got {self.widths}")
        for name in ("classes", "side"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if min(self.left()) < 1:
            _, *sides = self.image
            raise ValueError(
                f"images of {sides[0]} x {sides[1]} are too small for stem {self.stem}: give side"
            )

    def left(self) -> list[int]:
        """Height and width after the last pooling."""
        sides = list(self.image[1:]) if self.side is None else [self.side, self.side]
        kernel, stride, padding = self.stem
        sides = [(side + 2 * padding - kernel) // stride + 1 for side in sides]
        for _ in range(3):
            sides = [(side - 3) // 2 + 1 for side in sides]
        return sides


def alexnet_layers(config: AlexNetConfig, *, seed: int = 0) -> list[nn.Module]:
    """[5 convolutions, then fully connected ones]: images [b, C, H, W] to logits [b, classes].

    Initial weights depend on the seed alone; the caller's random state stays as it is.
    """
    kernel, stride, padding = config.stem
    with seeded(seed):
        a, b, c, d, e = config.widths
        first: list[nn.Module] = [nn.Conv2d(config.image[0], a, kernel, stride, padding), *_after(config)]
        if config.side is not None:
            first.insert(0, Upscale(config.side))
        layers: list[nn.Module] = [
            nn.Sequential(*first),
            nn.Sequential(nn.Conv2d(a, b, 5, padding=2, groups=2), *_after(config)),
            nn.Sequential(nn.Conv2d(b, c, 3, padding=1), nn.ReLU(inplace=True)),
            nn.Sequential(nn.Conv2d(c, d, 3, padding=1, groups=2), nn.ReLU(inplace=True)),
            nn.Sequential(nn.Conv2d(d, e, 3, padding=1, groups=2), nn.ReLU(inplace=True), _pool()),
        ]
        height, width = config.left()
        layers += classifier(e * height * width, config.hidden, config.classes, config.dropout)
        initialise(layers)
    return layers


def _after(config: AlexNetConfig) -> list[nn.Module]:
    """What follows the first two convolutions."""
    # The paper adds alpha = 1e-4 times the sum over 5 channels; torch multiplies alpha with their mean.
    norm = [nn.LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0)] if config.response_norm else []
    return [nn.ReLU(inplace=True), *norm, _pool()]


def _pool() -> nn.Module:
    return nn.MaxPool2d(3, stride=2)
