"""Labelled images, and batches of them: CIFAR-10 as an archive of JPEG files, and MNIST's idx files."""

from __future__ import annotations

import io
import math
import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from avgpipe.workloads.batches import generator
from avgpipe.workloads.data import find_files, read_bytes
from avgpipe.workloads.workload import library

IMAGE_FOLDER = (
    "a folder with CIFAR-10's train.tar.gz (members train/<class>/<n>.jpg), or with MNIST's "
    "train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz"
)

_IDX = {"train-images-idx3-ubyte": 2051, "train-labels-idx1-ubyte": 2049}  # the magic number of each file
_MEMBER = re.compile(r"(?:\./)?train/([\w-]+)/[\w-]+\.jpe?g")

_HELD_OUT = 10  # one image of so many is kept for validation
_SPLIT_KEY = 20090408  # fixed: every seed of training keeps the same images for validation


class ImageSet(NamedTuple):
    """images: uint8 [n, C, H, W]; labels: int64 [n]."""

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
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width


# The label of each image, the names of the classes, and what decodes the images at indices [n] to [n, C, H, W].
_Encoded = tuple[Tensor, list[str], Callable[[Tensor], Tensor]]


def find_images(folder: str | Path) -> tuple[Path, ...]:
    """Find the archive, or the idx files of images and labels, without reading them.

    Raises:
        DataNotFound: the folder, or one of the files, is not there.
        LibraryNotFound: an archive needs Pillow.
    """
    wanted = {name: (f"{name}.gz", name) for name in _IDX}
    if not any((Path(folder) / name).is_file() for names in wanted.values() for name in names):
        wanted = {"train.tar": ("train.tar.gz", "train.tar")}
    files = tuple(find_files(folder, wanted, IMAGE_FOLDER).values())
    if len(files) == 1:
        library("PIL.Image", "reading JPEG images")
    return files


def read_images(folder: str | Path, limit: int | None = None, held_out_limit: int | None = None) -> ImageData:
    """Read a folder's images into memory; nothing is unpacked to disk.

    A tenth of them, the same whatever the limits, is for validation: the end of a fixed permutation, in which the
    others come first.

    Args:
        folder: what :func:`find_images` finds files in.
        limit: train on the first so many of the permutation; the others are not decoded. None: all.
        held_out_limit: at most so many images for validation.

    Raises:
        DataNotFound: the folder, or one of its files, is not there.
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
    mean, std = _mean_and_std(images[: len(train)])
    return ImageData(
        ImageSet(images[: len(train)], labels[train]),
        ImageSet(images[len(train) :], labels[valid]),
        tuple(classes),
        mean,
        std,
        mirrored=len(files) == 1,  # a mirrored digit is none
    )


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Makes a normalised batch ``(images, labels)`` of the samples at some indices.

    images float32 [n, C, H, W], each channel less ``mean`` and over ``std``; labels int64 [n]. Each image is
    shifted by up to ``padding`` pixels in both directions, the mean coming in at the edges, and with ``mirrored``
    one of two is mirrored: what He et al. (2016, section 4.2) train with on CIFAR-10. The generator draws alike for
    every image, so that the batch follows from it and the indices.
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
    found = []
    for member in members:
        match = _MEMBER.fullmatch(member.name)
        if match is None or not member.isfile():
            raise ValueError(f"{file}: member {member.name!r} is not train/<class>/<n>.jpg")
        found.append((match[1], member.name, raw[member.offset_data :][: member.size]))
    classes = sorted({name for name, _, _ in found})
    number = {name: label for label, name in enumerate(classes)}
    labels = torch.tensor([number[name] for name, _, _ in found], dtype=torch.int64)
    return labels, classes, lambda indices: _decode(file, [found[n][1:] for n in indices.tolist()])


def _decode(file: Path, jpegs: list[tuple[str, memoryview]]) -> Tensor:
    """RGB images uint8 [n, 3, H, W]."""
    image_module = library("PIL.Image", "reading JPEG images")
    images = []
    for name, jpeg in jpegs:
        try:
            with image_module.open(io.BytesIO(jpeg), formats=("JPEG",)) as image:
                images.append(np.asarray(image.convert("RGB")))
        except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError):
            raise ValueError(f"{file}: member {name!r} is not a whole JPEG image") from None
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
    """uint8, with as many dimensions as the magic number's last byte says."""
    raw = read_bytes(file)
    begin = 4 * (1 + magic % 256)
    found, *shape = np.frombuffer(raw[:begin].ljust(begin, b"\0"), ">i4").tolist()
    if found != magic or len(raw) - begin != math.prod(shape):
        raise ValueError(
            f"{file} is not a whole idx file of type {magic}: its header has type {found} and sizes {shape}, and "
            f"{len(raw) - begin} bytes follow"
        )
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=begin).reshape(shape).copy())


def _mean_and_std(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel of images uint8 [n, C, H, W], float32 [C], the pixels being 0 to 1."""
    sums = torch.zeros(2, images.shape[1], dtype=torch.float64)
    for some in torch.split(images, 500):  # as floats the whole would take four times its room
        pixels = some.float() / 255
        sums += torch.stack((pixels.mean((0, 2, 3)), pixels.square().mean((0, 2, 3)))).double() * len(some)
    mean, square = sums / len(images)
    # a channel of one value alone is not blown up
    return mean.float(), (square - mean.square()).clamp_min((1 / 255) ** 2).sqrt().float()
