"""VGG networks as lists of layers (Simonyan and Zisserman, ICLR 2015, arXiv 1409.1556), with batch norm.

A layer is a convolution with what follows it, or a fully connected layer: VGG-16 has 16.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from avgpipe.workloads.convolution import Upscale, classifier, convolution, initialise, seeded


@dataclass(frozen=True)
class VGGConfig:
    """Sizes; the defaults are those of VGG-16 (table 1, configuration D).

    Attributes:
        image: channels, height and width.
        classes: how many.
        convolutions: 3x3 convolutions before each pooling.
        widths: their channels.
        hidden: features of the fully connected layers before the last.
        dropout: after each of these.
        batch_norm: after each convolution. The paper has none, and begins its deep networks with the weights of a
            shallower one that was trained before; the norm makes that unnecessary.
        side: to which images are scaled first, the paper's 224; None: they are taken as they are.
    """

    image: tuple[int, int, int]
    classes: int
    convolutions: tuple[int, ...] = (2, 2, 3, 3, 3)
    widths: tuple[int, ...] = (64, 128, 256, 512, 512)
    hidden: tuple[int, ...] = (4096, 4096)
    dropout: float = 0.5
    batch_norm: bool = True
    side: int | None = None

    def __post_init__(self) -> None:
        if len(self.convolutions) != len(self.widths) or not self.widths:
            raise ValueError(
                f"convolutions {self.convolutions} and widths {self.widths} must name the same resolutions"
            )
        for name in ("image", "convolutions", "widths", "hidden"):
            if min(getattr(self, name), default=1) < 1:
                raise ValueError(f"{name} must be at least 1 each, got {getattr(self, name)}")
        for name in ("classes", "side"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")


def vgg_layers(config: VGGConfig, *, seed: int = 0) -> list[nn.Module]:
    """[convolution, ..., fully connected, ...]: images [b, C, H, W] to logits [b, classes].

    Initial weights depend on the seed alone; the caller's random state stays as it is.
    """
    channels, *sides = config.image
    if config.side is not None:
        sides = [config.side, config.side]
    layers: list[nn.Module] = []
    with seeded(seed):
        for count, width in zip(config.convolutions, config.widths):
            for _ in range(count):
                layers.append(convolution(channels, width, norm=config.batch_norm))
                channels = width
            # ceil_mode: an odd last row is pooled alone, so 28 x 28 images have a pixel left after five poolings
            layers[-1] = nn.Sequential(*layers[-1].children(), nn.MaxPool2d(2, ceil_mode=True))
            sides = [-(-side // 2) for side in sides]
        if config.side is not None:
            layers[0] = nn.Sequential(Upscale(config.side), *layers[0].children())
        features = channels * sides[0] * sides[1]
        layers += classifier(features, config.hidden, config.classes, config.dropout)
        initialise(layers)
    return layers
