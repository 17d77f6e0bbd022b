"""The workloads ``resnet``, ``vgg`` and ``alexnet``: classes of images, in three sizes each.

The networks are lists of layers from images [b, C, H, W] to logits [b, classes]. A layer is a convolution with what
follows it, a residual block, or a fully connected layer, so one tensor passes from layer to layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from avgpipe.workloads.batches import shuffled
from avgpipe.workloads.images import IMAGE_FOLDER, ImageBatch, find_images, read_images
from avgpipe.workloads.training import Recipe, sample_workload
from avgpipe.workloads.workload import BuildOptions, DataNotFound, Workload

Image = tuple[int, int, int]  # channels, height and width


class ConvNet(Protocol):
    def layers(self, image: Image, classes: int) -> list[nn.Module]:
        """Make the layers for images of some size and a number of classes."""


def network_layers(network: ConvNet, image: Image, classes: int, *, seed: int = 0) -> list[nn.Module]:
    """Make a network's layers with initial weights that depend on the seed alone.

    The caller's random state stays as it is.

    Weights are normal with variance 2 over the fan-in (He et al. 2015, section 2.2), biases zero. Those of the last
    layer have a deviation of 0.01, so that at first every class is about as likely.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = network.layers(image, classes)
        modules = [m for layer in layers for m in layer.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        for module in modules:
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        nn.init.normal_(modules[-1].weight, std=0.01)
    return layers


def multiply_adds(network: ConvNet, image: Image, classes: int) -> list[float]:
    """Count the multiply-adds of each layer's forward for one image, without computing it."""
    costs = []
    with torch.device("meta"), torch.no_grad():
        value = torch.empty(1, *image)
        for layer in network.layers(image, classes):
            with FlopCounterMode(display=False) as counter:
                value = layer.eval()(value)  # one image may be too few for a batch norm in training
            costs.append(max(1.0, counter.get_total_flops() / 2))
    return costs


@dataclass(frozen=True)
class ResNet:
    """The residual network of 6n + 2 weight layers for small images (He, Zhang, Ren, Sun, CVPR 2016, section 4.2).

    Attributes:
        depth: 6n + 2: 20, 32, 44, 56 and 110 are in table 6. There are n residual blocks at each of three
            resolutions, of 16, 32 and 64 channels.
    """

    depth: int

    def layers(self, image: Image, classes: int) -> list[nn.Module]:
        if self.depth < 8 or self.depth % 6 != 2:
            raise ValueError(f"depth must be 6 n + 2 with n at least 1 (8, 14, 20, ...), got {self.depth}")
        channels = 16
        layers: list[nn.Module] = [_convolution(image[0], channels)]
        for width in (16, 32, 64):
            for _ in range(self.depth // 6):
                layers.append(ResidualBlock(channels, width))
                channels = width
        return [*layers, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with the input added: [b, inputs, H, W] to [b, outputs, H, W].

    Where there are more outputs than inputs these have half the size, and the shortcut takes every second pixel and
    adds channels of zeros (the paper's option A).
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = 1 if inputs == outputs else 2
        self.extra = outputs - inputs
        first, second = _convolution(inputs, outputs, self.stride), _convolution(outputs, outputs, relu=False)
        self.body = nn.Sequential(first, second)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
        return F.relu(self.body(x) + shortcut)


@dataclass(frozen=True)
class VGG:
    """VGG-16 (Simonyan and Zisserman, ICLR 2015, arXiv 1409.1556, table 1, configuration D), with batch norm.

    The paper has no norm, and begins its deep networks with the weights of a shallower one that was trained before; the
    norm makes that unnecessary.

    Attributes:
        convolutions: 3x3 convolutions before each pooling.
        widths: their channels.
        hidden: features of the fully connected layers before the last.
        dropout: after each of these.
        side: to which images are scaled first, the paper's 224; None: they are taken as they are.
    """

    convolutions: tuple[int, ...] = (2, 2, 3, 3, 3)
    widths: tuple[int, ...] = (64, 128, 256, 512, 512)
    hidden: tuple[int, ...] = (4096, 4096)
    dropout: float = 0.5
    side: int | None = None

    def layers(self, image: Image, classes: int) -> list[nn.Module]:
        channels, *sides = image
        if self.side is not None:
            sides = [self.side, self.side]
        layers: list[nn.Module] = []
        for count, width in zip(self.convolutions, self.widths, strict=True):
            for n in range(count):
                # ceil_mode: an odd last row is pooled alone, so 28 x 28 images have a pixel left after five poolings
                pool = [nn.MaxPool2d(2, ceil_mode=True)] if n == count - 1 else []
                scale = [Upscale(self.side)] if self.side is not None and not layers else []
                layers.append(nn.Sequential(*scale, *_convolution(channels, width), *pool))
                channels = width
            sides = [-(-side // 2) for side in sides]
        return layers + _classifier(channels * sides[0] * sides[1], self.hidden, classes, self.dropout)


@dataclass(frozen=True)
class AlexNet:
    """AlexNet (Krizhevsky, Sutskever, Hinton, NIPS 2012): 5 convolutions, 3 fully connected.

    The defaults are the paper's (section 3.5).

    The two halves that the paper keeps on two GPUs are the two groups of its grouped convolutions.

    Attributes:
        widths: channels of the five convolutions.
        stem: kernel, stride and padding of the first; the second has kernels of 5x5, the others of 3x3.
        hidden: features of the fully connected layers before the last.
        dropout: after each of these.
        response_norm: local response normalisation after the first two convolutions (section 3.3).
        side: to which images are scaled first, the paper's 224; None: they are taken as they are.
    """

    widths: tuple[int, int, int, int, int] = (96, 256, 384, 384, 256)
    stem: tuple[int, int, int] = (11, 4, 2)
    hidden: tuple[int, ...] = (4096, 4096)
    dropout: float = 0.5
    response_norm: bool = True
    side: int | None = None

    def layers(self, image: Image, classes: int) -> list[nn.Module]:
        a, b, c, d, e = self.widths
        kernel, stride, padding = self.stem
        height, width = self._left(image)
        scale = [] if self.side is None else [Upscale(self.side)]
        layers: list[nn.Module] = [
            nn.Sequential(*scale, nn.Conv2d(image[0], a, kernel, stride, padding), *self._after()),
            nn.Sequential(nn.Conv2d(a, b, 5, padding=2, groups=2), *self._after()),
            nn.Sequential(nn.Conv2d(b, c, 3, padding=1), nn.ReLU(inplace=True)),
            nn.Sequential(nn.Conv2d(c, d, 3, padding=1, groups=2), nn.ReLU(inplace=True)),
            nn.Sequential(nn.Conv2d(d, e, 3, padding=1, groups=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
        ]
        return layers + _classifier(e * height * width, self.hidden, classes, self.dropout)

    def _after(self) -> list[nn.Module]:
        """What follows the first two convolutions."""
        # The paper adds alpha = 1e-4 times the sum over 5 channels; torch multiplies alpha with their mean.
        norm = [nn.LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0)] if self.response_norm else []
        return [nn.ReLU(inplace=True), *norm, nn.MaxPool2d(3, 2)]

    def _left(self, image: Image) -> list[int]:
        """Height and width after the last pooling."""
        kernel, stride, padding = self.stem
        sides = image[1:] if self.side is None else (self.side, self.side)
        left = [(side + 2 * padding - kernel) // stride + 1 for side in sides]
        for _ in range(3):
            left = [(side - 3) // 2 + 1 for side in left]
        if min(left) < 1:
            size = f"{image[1]} x {image[2]}"
            raise ValueError(f"images of {size} are too small for stem {self.stem}: give side")
        return left


class Upscale(nn.Module):
    """Images [b, C, H, W] to [b, C, side, side], bilinearly.

    Part of a model's first layer: so the batches that are loaded, and sent, stay as small as the data's images.
    """

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, images: Tensor) -> Tensor:
        return F.interpolate(images, (self.side, self.side), mode="bilinear", align_corners=False)


def _convolution(inputs: int, outputs: int, stride: int = 1, *, relu: bool = True) -> nn.Sequential:
    """A 3x3 convolution, its batch norm, and ReLU."""
    layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)]
    return nn.Sequential(*layers, *([nn.ReLU(inplace=True)] if relu else []))


def _classifier(features: int, hidden: Sequence[int], classes: int, dropout: float) -> list[nn.Module]:
    """Fully connected layers with ReLU and dropout after each but the last: [b, ...] to logits [b, classes]."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers.append(nn.Sequential(nn.Flatten(), nn.Linear(features, width), nn.ReLU(), nn.Dropout(dropout)))
        features = width
    return [*layers, nn.Sequential(nn.Flatten(), nn.Linear(features, classes))]


# ---- the workloads -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImagePreset:
    """A size of model and how it is trained.

    Attributes:
        model: for images and classes of any number.
        training: how it is trained.
        limit: train on so many images; None: all.
        held_out_limit: validate on so many; None: all.
        padding: shift images by up to so many pixels.
    """

    model: ConvNet
    training: Recipe
    limit: int | None = None
    held_out_limit: int | None = None
    padding: int = 4


_SHORT = Recipe(batch_size=32, epochs=4, optimizer="sgd", lr=0.1, weight_decay=5e-4, warmup=0.1)
_PAPER = partial(Recipe, optimizer="sgd", decay="steps", weight_decay=5e-4)
_LOWERED = (0.5, 0.75, 0.9)  # the papers lower the rate three times, when validation stops improving


def _tiny(model: ConvNet, lr: float) -> ImagePreset:
    return ImagePreset(model, replace(_SHORT, lr=lr), limit=5000, held_out_limit=1000)


def _small(model: ConvNet, lr: float) -> ImagePreset:
    return ImagePreset(model, replace(_SHORT, lr=lr, batch_size=64, epochs=6))


# On a CPU the norm takes longer than all the rest.
_SMALL_ALEXNET = partial(AlexNet, stem=(5, 1, 2), response_norm=False)

PRESETS = {
    "resnet": {
        "tiny": _tiny(ResNet(8), lr=0.1),
        "small": _small(ResNet(14), lr=0.1),
        # He et al. 2016, section 4.2: ResNet-110 for CIFAR-10, 64,000 steps, of which 400 with a lower rate.
        "paper": ImagePreset(ResNet(110), _PAPER(128, 182, lr=0.1, weight_decay=1e-4, warmup=400 / 64_000)),
    },
    "vgg": {
        "tiny": _tiny(VGG((1, 1, 2, 2, 2), (16, 32, 64, 64, 64), (64,), dropout=0.0), lr=0.05),
        "small": _small(VGG(widths=(16, 32, 64, 128, 128), hidden=(128,), dropout=0.1), lr=0.05),
        # Simonyan and Zisserman 2015, section 3.1: the network for ImageNet. When they lower the rate is not published.
        "paper": ImagePreset(VGG(side=224), _PAPER(256, 74, lr=0.01, milestones=_LOWERED)),
    },
    "alexnet": {
        "tiny": _tiny(_SMALL_ALEXNET((32, 64, 96, 96, 64), hidden=(256,), dropout=0.1), lr=0.02),
        "small": _small(_SMALL_ALEXNET((48, 96, 144, 144, 96), hidden=(384, 384), dropout=0.2), lr=0.02),
        # Krizhevsky et al. 2012, section 5: the network for ImageNet, some 90 epochs.
        "paper": ImagePreset(AlexNet(side=224), _PAPER(128, 90, lr=0.01, milestones=_LOWERED)),
    },
}


def check(name: str, options: BuildOptions) -> tuple[int, Recipe]:
    if options.data is None:
        raise DataNotFound(f"{name} needs images, and there are none in the package; give {IMAGE_FOLDER}")
    find_images(options.data)
    chosen = PRESETS[name][options.preset]
    with torch.device("meta"):
        layers = chosen.model.layers((3, 32, 32), 10)
    return len(layers), chosen.training


def build(name: str, options: BuildOptions) -> Workload:
    chosen = PRESETS[name][options.preset]
    assert options.data is not None
    data = read_images(options.data, chosen.limit, chosen.held_out_limit)
    classes, samples = len(data.classes), len(data.train.labels)
    blind = data.valid.labels == data.train.labels.bincount().argmax()

    def order(batch_size: int, seed: int, epoch: int) -> Tensor:
        # A last batch of a few images would be normalised by their statistics; the next epoch has other ones in it.
        return shuffled(samples, seed, epoch)[: max(1, samples // batch_size) * batch_size]

    return sample_workload(
        name,
        options,
        chosen.training,
        order=order,
        train=ImageBatch(data.train, data.mean, data.std, chosen.padding, data.mirrored),
        valid=ImageBatch(data.valid, data.mean, data.std),
        valid_order=torch.arange(len(data.valid.labels)),
        layers=network_layers(chosen.model, data.shape, classes, seed=options.seed),
        loss_fn=nn.CrossEntropyLoss(),
        metrics=lambda _, means: {"accuracy": 100 * means["accuracy"]},
        metric_name="accuracy",
        layer_costs=multiply_adds(chosen.model, data.shape, classes),
        metric_fn=accuracy,
        title=f"{classes} classes of {' x '.join(map(str, data.shape))} images, {samples:,} to train on",
        trivial=("the most frequent class", 100 * float(blind.double().mean())),
    )


def accuracy(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the share of right answers, 0 to 1, of logits [b, classes] and labels [b]."""
    return {"accuracy": (logits.argmax(1) == labels).double().mean()}
