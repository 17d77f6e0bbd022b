"""Residual networks as lists of layers (He, Zhang, Ren, Sun, CVPR 2016, arXiv 1512.03385).

A residual block is one layer, so one tensor [b, channels, H, W] passes from layer to layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from avgpipe.workloads.convolution import convolution, initialise, seeded

_EXPANSION = 4  # of a bottleneck's width in its last convolution


@dataclass(frozen=True)
class ResNetConfig:
    """Sizes; the defaults are those of the networks for small images (section 4.2), see :meth:`of_depth`.

    Attributes:
        image: channels, height and width.
        classes: how many.
        blocks: residual blocks at each resolution.
        widths: channels of each resolution's 3x3 convolutions.
        bottleneck: blocks of three convolutions, 1x1, 3x3 and 1x1, instead of two 3x3.
        stem: "small" is one 3x3 convolution, "large" a 7x7 one of stride 2 and pooling by two.
        shortcut: where a block changes the size, "pad" takes every second pixel and adds channels of zeros (the
            paper's option A), "project" is a 1x1 convolution (option B).
        batch_norm: after each convolution; else the convolutions have biases.
    """

    image: tuple[int, int, int]
    classes: int
    blocks: tuple[int, ...]
    widths: tuple[int, ...] = (16, 32, 64)
    bottleneck: bool = False
    stem: Literal["small", "large"] = "small"
    shortcut: Literal["pad", "project"] = "pad"
    batch_norm: bool = True

    def __post_init__(self) -> None:
        if len(self.blocks) != len(self.widths) or not self.blocks:
            raise ValueError(f"blocks {self.blocks} and widths {self.widths} must name the same resolutions")
        for name in ("image", "blocks", "widths"):
            if min(getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1 each, got {getattr(self, name)}")
        if self.classes < 1:
            raise ValueError(f"classes must be at least 1, got {self.classes}")

    @classmethod
    def of_depth(cls, depth: int, image: tuple[int, int, int], classes: int) -> ResNetConfig:
        """The network of 6n + 2 weight layers for small images: 20, 32, 44, 56 and 110 are in table 6."""
        n = (depth - 2) // 6
        if n < 1 or depth != 6 * n + 2:
            raise ValueError(f"depth must be 6 n + 2 with n at least 1 (8, 14, 20, ...), got {depth}")
        return cls(image, classes, (n, n, n))

    @classmethod
    def resnet50(cls, image: tuple[int, int, int] = (3, 224, 224), classes: int = 1000) -> ResNetConfig:
        """The 50-layer network for ImageNet (table 1)."""
        small = cls(image, classes, (3, 4, 6, 3), (64, 128, 256, 512))
        return replace(small, bottleneck=True, stem="large", shortcut="project")


def resnet_layers(config: ResNetConfig, *, seed: int = 0) -> list[nn.Module]:
    """[stem, block, ..., block, classifier]: images [b, C, H, W] to logits [b, classes].

    Initial weights depend on the seed alone; the caller's random state stays as it is.
    """
    with seeded(seed):
        channels = config.widths[0]
        layers: list[nn.Module] = [_stem(config, channels)]
        for level, (blocks, width) in enumerate(zip(config.blocks, config.widths)):
            outputs = width * (_EXPANSION if config.bottleneck else 1)
            for block in range(blocks):
                stride = 2 if level > 0 and block == 0 else 1
                layers.append(ResidualBlock(config, channels, width, outputs, stride))
                channels = outputs
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, config.classes))
        layers.append(head)
        initialise(layers)
    return layers


class ResidualBlock(nn.Module):
    """relu(body(x) + shortcut(x)), [b, inputs, H, W] to [b, outputs, H / stride, W / stride]."""

    def __init__(self, config: ResNetConfig, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        norm = config.batch_norm
        if config.bottleneck:
            self.body = nn.Sequential(
                convolution(inputs, width, 1, stride=stride, norm=norm),
                convolution(width, width, norm=norm),
                convolution(width, outputs, 1, norm=norm, relu=False),
            )
        else:
            self.body = nn.Sequential(
                convolution(inputs, width, stride=stride, norm=norm),
                convolution(width, outputs, norm=norm, relu=False),
            )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = (
                PaddedShortcut(outputs - inputs, stride)
                if config.shortcut == "pad"
                else convolution(inputs, outputs, 1, stride=stride, norm=norm, relu=False)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class PaddedShortcut(nn.Module):
    """Every ``stride``-th pixel, with ``extra`` channels of zeros after the others."""

    def __init__(self, extra: int, stride: int) -> None:
        super().__init__()
        if extra < 0:
            raise ValueError(f"a padded shortcut cannot drop {-extra} channels: use shortcut='project'")
        self.extra = extra
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))


def _stem(config: ResNetConfig, width: int) -> nn.Module:
    if config.stem == "small":
        return convolution(config.image[0], width, norm=config.batch_norm)
    large = convolution(config.image[0], width, 7, stride=2, norm=config.batch_norm)
    return large.append(nn.MaxPool2d(3, stride=2, padding=1))
