"""The workloads ``resnet``, ``vgg`` and ``alexnet``: classes of images, in three sizes each.

The images are CIFAR-10's, as an archive of JPEG files, or MNIST's, as idx files. The networks are lists of
layers from images [b, C, H, W] to logits [b, classes]. A layer is a convolution with the operations that
follow it, a residual block, or a fully connected layer, so one tensor passes from layer to layer.
"""

from __future__ import annotations

import io
import math
import re
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from avgpipe.tasks import BuildOptions, DataNotFound
from avgpipe_lab.workloads import library
from avgpipe_lab.workloads.batches import generator, shuffled
from avgpipe_lab.workloads.data import find_files, read_bytes
from avgpipe_lab.workloads.recipe import Built, Recipe, Samples

Image = tuple[int, ...]  # channels, height and width


# ---- the networks ----------------------------------------------------------------------------------------------------


def network_layers(network: ConvNet, image: Image, classes: int, *, seed: int = 0) -> list[nn.Module]:
    """Make a network's layers with initial weights that depend on the seed only.

    The caller's random state is unchanged.

    Weights are normal with variance 2 over the fan-in (He et al. 2015, section 2.2), biases zero. Those of
    the last layer have a deviation of 0.01, so that at first every class is about equally likely. A layer's
    ``compute_cost`` is the number of multiply-adds of its forward for one image.
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
    with torch.device("meta"), torch.no_grad():  # for counting only
        value = torch.empty(1, *image)
        for layer, counted in zip(layers, network.layers(image, classes)):
            with FlopCounterMode(display=False) as counter:
                value = counted.eval()(value)  # one image may be too few for batch norm in training mode
            layer.compute_cost = max(1.0, counter.get_total_flops() / 2)
    return layers


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
        widths = [16, *(width for width in (16, 32, 64) for _ in range(self.depth // 6))]
        blocks = [ResidualBlock(*pair) for pair in pairwise(widths)]
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
        return [_convolution(image[0], 16), *blocks, head]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with the input added: [b, inputs, H, W] to [b, outputs, H, W].

    If there are more outputs than inputs, they have half the size, and the shortcut takes every second pixel
    and adds channels of zeros (the paper's option A).
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

    The paper has no norm, and initialises its deep networks with the weights of a trained shallower one; the
    norm makes that unnecessary.

    Attributes:
        convolutions: 3x3 convolutions before each pooling.
        widths: channels of these convolutions.
        hidden: features of the fully connected layers before the last.
        dropout: after each of these.
        side: size that images are scaled to first, the paper's 224; None: they are not scaled.
    """

    convolutions: tuple[int, ...] = (2, 2, 3, 3, 3)
    widths: tuple[int, ...] = (64, 128, 256, 512, 512)
    hidden: tuple[int, ...] = (4096, 4096)
    dropout: float = 0.5
    side: int | None = None

    def layers(self, image: Image, classes: int) -> list[nn.Module]:
        channels = image[0]
        layers: list[nn.Module] = []
        for count, width in zip(self.convolutions, self.widths, strict=True):
            for n in range(count):
                # ceil_mode: an odd last row is pooled alone, so 28 x 28 images have a pixel left after five poolings
                pool = [nn.MaxPool2d(2, ceil_mode=True)] if n == count - 1 else []
                scale = [] if layers else upscale(self.side)
                layers.append(nn.Sequential(*scale, *_convolution(channels, width), *pool))
                channels = width
        left = [-(-(self.side or side) // 2 ** len(self.widths)) for side in image[1:]]
        return layers + _classifier(channels * math.prod(left), self.hidden, classes, self.dropout)


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
        side: size that images are scaled to first, the paper's 224; None: they are not scaled.
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
        strided = [((self.side or side) + 2 * padding - kernel) // stride + 1 for side in image[1:]]
        left = [(side - 7) // 8 for side in strided]  # after three poolings, each to (side - 1) // 2
        if min(left) < 1:
            size = f"{image[1]} x {image[2]}"
            raise ValueError(f"images of {size} are too small for stem {self.stem}: give side")

        def after() -> list[nn.Module]:
            # The paper adds alpha = 1e-4 times the sum over 5 channels; torch multiplies alpha with their mean.
            norm = [nn.LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0)] if self.response_norm else []
            return [nn.ReLU(inplace=True), *norm, nn.MaxPool2d(3, 2)]

        layers: list[nn.Module] = [
            nn.Sequential(*upscale(self.side), nn.Conv2d(image[0], a, *self.stem), *after()),
            nn.Sequential(nn.Conv2d(a, b, 5, padding=2, groups=2), *after()),
            nn.Sequential(nn.Conv2d(b, c, 3, padding=1), nn.ReLU(inplace=True)),
            nn.Sequential(nn.Conv2d(c, d, 3, padding=1, groups=2), nn.ReLU(inplace=True)),
            nn.Sequential(nn.Conv2d(d, e, 3, padding=1, groups=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
        ]
        return layers + _classifier(e * math.prod(left), self.hidden, classes, self.dropout)


ConvNet = ResNet | VGG | AlexNet  # each makes the layers for a size of images and a number of classes


def upscale(side: int | None) -> list[nn.Module]:
    """Return layers that scale images [b, C, H, W] to [b, C, side, side], bilinearly; none if ``side`` is None.

    They are part of a model's first layer: so the batches that are loaded, and sent, stay as small as the
    data's images.
    """
    return [] if side is None else [nn.Upsample((side, side), mode="bilinear")]


def _convolution(inputs: int, outputs: int, stride: int = 1, *, relu: bool = True) -> nn.Sequential:
    """Make a 3x3 convolution, its batch norm, and ReLU."""
    layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)]
    return nn.Sequential(*layers, *([nn.ReLU(inplace=True)] if relu else []))


def _classifier(features: int, hidden: Sequence[int], classes: int, dropout: float) -> list[nn.Module]:
    """Make fully connected layers, all but the last with ReLU and dropout: [b, ...] to logits [b, classes]."""
    *inner, last = (nn.Linear(*pair) for pair in pairwise([features, *hidden, classes]))
    before = [nn.Sequential(nn.Flatten(), linear, nn.ReLU(), nn.Dropout(dropout)) for linear in inner]
    return [*before, nn.Sequential(nn.Flatten(), last)]


# ---- the images ------------------------------------------------------------------------------------------------------

IMAGE_FOLDER = (
    "a folder with CIFAR-10's train.tar.gz (members train/<class>/<n>.jpg), or with MNIST's "
    "train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz"
)

_IDX = {"train-images-idx3-ubyte": 2051, "train-labels-idx1-ubyte": 2049}  # the magic number of each file
_MEMBER = re.compile(r"(?:\./)?train/([\w-]+)/[\w-]+\.jpe?g")

_HELD_OUT = 10  # one image of this many is kept for validation
_SPLIT_KEY = 20090408  # fixed: the validation images are the same for every training seed


class ImageSet(NamedTuple):
    """Images with their labels.

    Attributes:
        images: uint8 [n, C, H, W].
        labels: int64 [n].
    """

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class ImageData:
    """Labelled images.

    Attributes:
        train, valid: the splits.
        classes: the name of each label.
        mean, std: of train's pixels by channel, float32 [C], pixels being 0 to 1.
        mirrored: whether a mirrored image is one of the same class.
    """

    train: ImageSet
    valid: ImageSet
    classes: tuple[str, ...]
    mean: Tensor
    std: Tensor
    mirrored: bool

    @property
    def shape(self) -> Image:
        return tuple(self.train.images.shape[1:])


# The label of each image, the names of the classes, and a decoder of the images at indices [n] to [n, C, H,
# W].
_Encoded = tuple[Tensor, list[str], Callable[[Tensor], Tensor]]


def find_images(folder: str | Path) -> tuple[Path, ...]:
    """Find the archive, or the idx files of images and labels, without reading them.

    Raises:
        DataNotFound: the folder, or one of the files, does not exist.
        LibraryNotFound: an archive needs Pillow.
    """
    names = _IDX if any(Path(folder).glob("train-*-idx?-ubyte*")) else ("train.tar",)
    wanted = {name: (f"{name}.gz", name) for name in names}
    files = tuple(find_files(folder, wanted, IMAGE_FOLDER).values())
    if len(files) == 1:
        library("PIL.Image", "reading JPEG images")
    return files


def read_images(folder: str | Path, limit: int | None = None, held_out_limit: int | None = None) -> ImageData:
    """Read a folder's images into memory; nothing is unpacked to disk.

    A tenth of them, the same for any limits, is for validation: the end of a fixed permutation, which begins
    with the others.

    Args:
        folder: a folder for :func:`find_images`.
        limit: train on this many first images of the permutation; the others are not decoded. None: all.
        held_out_limit: the most images for validation.

    Raises:
        DataNotFound: the folder, or one of its files, does not exist.
        ValueError: a file is damaged or of another format, or has less than two images.
        LibraryNotFound: an archive needs Pillow.
    """
    files = find_images(folder)
    labels, classes, decode = _archive(*files) if len(files) == 1 else _idx(*files)
    if len(labels) < 2:
        raise ValueError(f"{files[0]} has {len(labels)} images: give two or more, a part is for validation")
    order = torch.randperm(len(labels), generator=generator(_SPLIT_KEY))
    held_out = max(1, len(order) // _HELD_OUT)
    train, valid = order[:-held_out][:limit], order[-held_out:][:held_out_limit]
    images = decode(torch.cat((train, valid)))
    parts = torch.split(images, [len(train), len(valid)])
    train_set, valid_set = map(ImageSet, parts, (labels[train], labels[valid]))
    mirrored = len(files) == 1  # a mirrored digit is not a digit
    return ImageData(train_set, valid_set, tuple(classes), *_mean_and_std(train_set.images), mirrored)


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Makes a normalised batch ``(images, labels)`` of the samples at some indices.

    images float32 [n, C, H, W], each channel minus ``mean`` and divided by ``std``; labels int64 [n]. Each
    image is shifted by up to ``padding`` pixels in both directions, filled with the mean at the edges, and
    with ``mirrored`` mirrored with probability 1/2: the augmentation of He et al. (2016, section 4.2) for
    CIFAR-10. The generator draws equally much for every image, so that the batch follows from it and the
    indices.
    """

    samples: ImageSet
    mean: Tensor
    std: Tensor
    padding: int = 0
    mirrored: bool = False

    def __call__(self, indices: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        mean, std = (255 * value[:, None, None] for value in (self.mean, self.std))
        images = (self.samples.images[indices].float() - mean) / std
        if self.padding or self.mirrored:
            images = shifted(images, self.padding, self.mirrored, draw)
        return images, self.samples.labels[indices]


def shifted(images: Tensor, padding: int, mirrored: bool, draw: torch.Generator) -> Tensor:
    """Crop each image [n, C, H, W] at random with ``padding`` zeros around, mirrored or not at random."""
    n, channels, height, width = images.shape
    top, left = torch.randint(2 * padding + 1, (2, n, 1), generator=draw)
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    if mirrored:
        turned = torch.rand(n, 1, generator=draw) < 0.5
        columns = torch.where(turned, columns.flip(1), columns)
    images = F.pad(images, (padding,) * 4)
    sample = torch.arange(n)[:, None, None, None]
    channel = torch.arange(channels)[:, None, None]
    return images[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


def _archive(file: Path) -> _Encoded:
    raw = memoryview(read_bytes(file))
    try:
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
            members = [member for member in archive.getmembers() if not member.isdir()]
    except tarfile.TarError as error:
        raise ValueError(f"{file} is not a whole tar archive: {error}") from None
    names = []
    for member in members:
        match = _MEMBER.fullmatch(member.name)
        if match is None or not member.isfile():
            raise ValueError(f"{file}: member {member.name!r} is not train/<class>/<n>.jpg")
        names.append(match[1])
    classes = sorted(set(names))
    labels = torch.tensor([classes.index(name) for name in names], dtype=torch.int64)
    return labels, classes, lambda indices: _decode(file, raw, [members[n] for n in indices.tolist()])


def _decode(file: Path, raw: memoryview, members: list[tarfile.TarInfo]) -> Tensor:
    """Decode RGB images to uint8 [n, 3, H, W]."""
    image_module = library("PIL.Image", "reading JPEG images")
    images = []
    for member in members:
        jpeg = io.BytesIO(raw[member.offset_data :][: member.size])
        try:
            with image_module.open(jpeg, formats=("JPEG",)) as image:
                images.append(np.asarray(image.convert("RGB")))
        except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError):
            raise ValueError(f"{file}: member {member.name!r} is not a whole JPEG image") from None
    sizes = {" x ".join(map(str, image.shape[:2])) for image in images}
    if len(sizes) > 1:
        raise ValueError(f"{file} has images of different sizes: {', '.join(sorted(sizes))}")
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


def _idx(images_file: Path, labels_file: Path) -> _Encoded:
    images, labels = (_idx_array(f, magic) for f, magic in zip((images_file, labels_file), _IDX.values()))
    if len(images) != len(labels):
        raise ValueError(f"{images_file} has {len(images)} images, but {labels_file} {len(labels)} labels")
    classes = [str(label) for label in range(int(labels.max()) + 1)] if len(labels) else []
    return labels.long(), classes, lambda indices: images[indices].unsqueeze(1)


def _idx_array(file: Path, magic: int) -> Tensor:
    """Read a uint8 array, with as many dimensions as the magic number's last byte."""
    raw = read_bytes(file)
    begin = 4 * (1 + magic % 256)
    found, *shape = np.frombuffer(raw[:begin].ljust(begin, b"\0"), ">i4").tolist()
    if found != magic or len(raw) - begin != math.prod(shape):
        header = f"its header has type {found} and sizes {shape}, and {len(raw) - begin} bytes follow"
        raise ValueError(f"{file} is not a whole idx file of type {magic}: {header}")
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=begin).reshape(shape).copy())


def _mean_and_std(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each channel of images uint8 [n, C, H, W], float32 [C], for pixels 0 to 1."""
    sums = torch.zeros(2, images.shape[1], dtype=torch.float64)
    for some in torch.split(images, 500):  # all images as floats would take four times the memory
        pixels = some.float() / 255
        sums += torch.stack((pixels.mean((0, 2, 3)), pixels.square().mean((0, 2, 3)))).double() * len(some)
    mean, square = sums / len(images)
    # a channel with one single value is not amplified
    return mean.float(), (square - mean.square()).clamp_min((1 / 255) ** 2).sqrt().float()


# ---- the workloads ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImagePreset:
    """A size of model and its training.

    Attributes:
        model: the network, for any images and number of classes.
        training: how it is trained.
        limit: number of images to train on; None: all.
        held_out_limit: number of images to validate on; None: all.
        padding: the most pixels that images are shifted by.
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


# On a CPU the response normalisation takes longer than everything else.
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
        # Simonyan and Zisserman 2015, section 3.1: the network for ImageNet. The times of lower rates are not
        # published.
        "paper": ImagePreset(VGG(side=224), _PAPER(256, 74, lr=0.01, milestones=_LOWERED)),
    },
    "alexnet": {
        "tiny": _tiny(_SMALL_ALEXNET((32, 64, 96, 96, 64), hidden=(256,), dropout=0.1), lr=0.02),
        "small": _small(_SMALL_ALEXNET((48, 96, 144, 144, 96), hidden=(384, 384), dropout=0.2), lr=0.02),
        # Krizhevsky et al. 2012, section 5: the network for ImageNet, some 90 epochs.
        "paper": ImagePreset(AlexNet(side=224), _PAPER(128, 90, lr=0.01, milestones=_LOWERED)),
    },
}


def check(name: str, preset: ImagePreset, options: BuildOptions) -> tuple[int, Recipe]:
    if options.data is None:
        raise DataNotFound(f"{name} needs images, which the package does not contain; give {IMAGE_FOLDER}")
    find_images(options.data)
    with torch.device("meta"):
        layers = preset.model.layers((3, 32, 32), 10)
    return len(layers), preset.training


def build(name: str, preset: ImagePreset, options: BuildOptions) -> Built:
    assert options.data is not None
    data = read_images(options.data, preset.limit, preset.held_out_limit)
    classes, samples = len(data.classes), len(data.train.labels)
    blind = data.valid.labels == data.train.labels.bincount().argmax()
    train = ImageBatch(data.train, data.mean, data.std, preset.padding, data.mirrored)
    valid, valid_order = ImageBatch(data.valid, data.mean, data.std), torch.arange(len(data.valid.labels))
    # A small last batch would be normalised by the statistics of few images; the next epoch has different
    # ones in it.
    order = partial(shuffled, samples, drop_last=True)
    return Samples(order, train, valid, valid_order), {
        "layers": network_layers(preset.model, data.shape, classes, seed=options.seed),
        "loss_fn": nn.CrossEntropyLoss(),
        "metrics": lambda _, means: {"accuracy": 100 * means["accuracy"]},
        "metric_name": "accuracy",
        "metric_fn": accuracy,
        "title": f"{classes} classes of {' x '.join(map(str, data.shape))} images, {samples:,} to train on",
        "trivial": ("the most frequent class", 100 * float(blind.double().mean())),
    }


def accuracy(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the share of correct answers, 0 to 1, of logits [b, classes] and labels [b]."""
    return {"accuracy": (logits.argmax(1) == labels).double().mean()}
