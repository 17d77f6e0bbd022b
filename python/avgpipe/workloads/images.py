"""Labelled images: CIFAR-10 as JPEG archives and MNIST's idx files, and batches of them."""

from __future__ import annotations

import gzip
import io
import re
import struct
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from avgpipe.workloads.libraries import library
from avgpipe.workloads.samples import generator
from avgpipe.workloads.text import DataNotFound

WHAT_WORKS = (
    "a folder with CIFAR-10's train.tar.gz and test.tar.gz (members train/<class>/<n>.jpg), or with MNIST's "
    "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the same of t10k"
)

# Each format's files; every one may be there without its .gz too.
_TARS = ("train.tar", "test.tar")
_IDX = tuple(
    f"{split}-{what}" for split in ("train", "t10k") for what in ("images-idx3-ubyte", "labels-idx1-ubyte")
)
_IDX_IMAGES, _IDX_LABELS = 2051, 2049  # unsigned bytes of three dimensions and of one

_HELD_OUT = 10  # one image of so many of train is kept for validation
_SPLIT_KEY = 20090408  # fixed: every seed of training keeps the same images for validation
_MEMBER = re.compile(r"(?:\./)?([\w-]+)/([\w-]+)(?:/([\w-]+\.jpe?g))?/?")


class ImageSet(NamedTuple):
    """images: uint8 [n, C, H, W]; labels: int64 [n]."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class ImageData:
    """Labelled images.

    Attributes:
        train, valid, test: the splits; valid is a part of the official training images that train lacks.
        classes: the name of each label.
        mean, std: of train's pixels by channel, float32 [C], pixels being 0 to 1.
        mirrored: whether a mirrored image is one of the same class.
    """

    train: ImageSet
    valid: ImageSet
    test: ImageSet
    classes: tuple[str, ...]
    mean: Tensor
    std: Tensor
    mirrored: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width


class ImageFiles(NamedTuple):
    """The files of a data folder: two archives, or images and labels of train and of test."""

    kind: str  # "jpeg" or "idx"
    files: tuple[Path, ...]


class _Split(NamedTuple):
    """An official split before its images are decoded."""

    file: Path
    labels: Tensor
    classes: list[str]
    decode: Callable[[Tensor], Tensor]  # indices [n] to images [n, C, H, W]


def find_images(folder: str | Path) -> ImageFiles:
    """The files of images in a folder, without reading them. Raises DataNotFound."""
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise DataNotFound(f"data folder {folder} {what}; give {WHAT_WORKS}")
    for kind, names in (("jpeg", _TARS), ("idx", _IDX)):
        candidates = [(folder / f"{name}.gz", folder / name) for name in names]
        found = [next((file for file in pair if file.is_file()), None) for pair in candidates]
        missing = [f"{name}.gz" for name, file in zip(names, found) if file is None]
        if not missing:
            return ImageFiles(kind, tuple(file for file in found if file is not None))
        if len(missing) < len(names):
            raise DataNotFound(f"data folder {folder} lacks {', '.join(missing)}")
    raise DataNotFound(f"data folder {folder} has no images that are known here; give {WHAT_WORKS}")


def read_images(
    folder: str | Path, *, limit: int | None = None, held_out_limit: int | None = None
) -> ImageData:
    """Read a folder's images into memory; nothing is unpacked to disk.

    A tenth of the official training images, the same whatever the limits, is for validation: the end of a fixed
    permutation, in which the others come first.

    Args:
        limit: train on the first so many of the permutation; the others are not decoded. None: all.
        held_out_limit: at most so many images for validation, and for the test, drawn in the same way.

    Raises:
        DataNotFound: the folder, or one of its files, is not there.
        ValueError: a file is damaged or of another format, a split is empty, or a class has no images.
        avgpipe.workloads.libraries.LibraryNotFound: JPEG archives need Pillow.
    """
    for name, value in (("limit", limit), ("held_out_limit", held_out_limit)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    kind, files = find_images(folder)
    if kind == "jpeg":
        train, test = (_archive(file, split) for file, split in zip(files, ("train", "test")))
    else:
        train, test = _idx(*files[:2]), _idx(*files[2:])
    _check_classes(train, test)
    order, test_order = _order(train), _order(test)
    held_out = max(1, order.numel() // _HELD_OUT)
    kept = order[:-held_out][:limit]
    train_images = train.decode(kept)
    mean, std = _mean_and_std(train_images)
    data = ImageData(
        ImageSet(train_images, train.labels[kept]),
        _decoded(train, order[-held_out:][:held_out_limit]),
        _decoded(test, test_order[:held_out_limit]),
        tuple(train.classes),
        mean,
        std,
        mirrored=kind == "jpeg",  # a mirrored digit is none
    )
    _check_shapes(data, train.file, test.file)
    return data


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
    """A random crop of each image [n, C, H, W] with ``padding`` zeros around, mirrored or not at random."""
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


# ---- archives of JPEG images ---------------------------------------------------------------------------------------


def _archive(file: Path, split: str) -> _Split:
    raw = _bytes(file)
    try:
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
            members = archive.getmembers()
    except tarfile.TarError as error:
        raise ValueError(f"{file} is not a whole tar archive: {error}") from None
    found: list[tuple[str, str, memoryview]] = []  # class, name, JPEG file
    classes: set[str] = set()
    for member in members:
        name = _member_class(file, split, member)
        if name is None:
            continue
        classes.add(name)
        if member.isfile():
            found.append((name, member.name, memoryview(raw)[member.offset_data :][: member.size]))
    names = sorted(classes)
    number = {name: label for label, name in enumerate(names)}
    labels = torch.tensor([number[name] for name, _, _ in found], dtype=torch.int64)

    def decode(indices: Tensor) -> Tensor:
        return _decode_jpegs(file, [found[n][1:] for n in indices.tolist()])

    return _Split(file, labels, names, decode)


def _member_class(file: Path, split: str, member: tarfile.TarInfo) -> str | None:
    """The class of an image or of a folder of images; None: the folder of all."""
    if member.isdir() and member.name in (".", split, f"./{split}"):
        return None
    match = _MEMBER.fullmatch(member.name)
    if match is None or match[1] != split or not (member.isfile() if match[3] else member.isdir()):
        raise ValueError(f"{file}: member {member.name!r} is not {split}/<class>/<n>.jpg")
    return match[2]


def _decode_jpegs(file: Path, jpegs: list[tuple[str, memoryview]]) -> Tensor:
    """RGB images uint8 [n, 3, H, W], all of the first one's size."""
    image_module = library("PIL.Image", "reading JPEG images")
    images: np.ndarray | None = None
    for n, (name, jpeg) in enumerate(jpegs):
        try:
            with image_module.open(io.BytesIO(jpeg), formats=("JPEG",)) as image:
                pixels = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
        except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError):
            raise ValueError(f"{file}: member {name!r} is not a whole JPEG image") from None
        if images is None:
            images = np.empty((len(jpegs), *pixels.shape), dtype=np.uint8)
        if pixels.shape != images.shape[1:]:
            raise ValueError(
                f"{file}: member {name!r} has {_pixels(pixels.shape)} pixels, others have {_pixels(images.shape[1:])}"
            )
        images[n] = pixels
    assert images is not None  # no split is empty
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def _pixels(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} x {shape[1]}"


# ---- idx files -----------------------------------------------------------------------------------------------------


def _idx(images_file: Path, labels_file: Path) -> _Split:
    images = _idx_array(images_file, _IDX_IMAGES, "images")
    labels = _idx_array(labels_file, _IDX_LABELS, "labels").long()
    if len(images) != len(labels):
        raise ValueError(f"{images_file} has {len(images)} images, but {labels_file} {len(labels)} labels")
    classes = [str(label) for label in range(int(labels.max()) + 1)] if len(labels) else []
    return _Split(images_file, labels, classes, lambda indices: images[indices].unsqueeze(1))


def _idx_array(file: Path, magic: int, what: str) -> Tensor:
    """uint8, with as many dimensions as the magic number's last byte says."""
    raw = _bytes(file)
    header = struct.Struct(f">{1 + magic % 256}I")
    if len(raw) < header.size or struct.unpack_from(">I", raw)[0] != magic:
        raise ValueError(
            f"{file} is no idx file of {what}: it begins with {raw[:4].hex() or 'nothing'}, not with {magic:08x}"
        )
    shape = header.unpack_from(raw)[1:]
    if len(raw) - header.size != int(np.prod(shape, dtype=np.float64)):
        sizes = " x ".join(map(str, shape))
        raise ValueError(
            f"{file} has {len(raw) - header.size} bytes after its header, which promises {sizes} {what}"
        )
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=header.size).reshape(shape).copy())


# ---- of both -------------------------------------------------------------------------------------------------------


def _bytes(file: Path) -> bytes:
    try:
        raw = file.read_bytes()
        return gzip.decompress(raw) if file.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None


def _check_classes(train: _Split, test: _Split) -> None:
    for split in (train, test):
        if split.labels.numel() == 0:
            raise ValueError(f"{split.file} has no images")
    unknown = sorted(set(test.classes) - set(train.classes))
    if unknown:
        raise ValueError(f"{train.file} has no images of {', '.join(unknown)}, which {test.file} has")
    for split in (train, test):
        present = {split.classes[label] for label in set(split.labels.tolist())}
        missing = [name for name in train.classes if name not in present]
        if missing:
            raise ValueError(f"{split.file} has no images of {', '.join(missing)}")
    if train.labels.numel() < 2:
        raise ValueError(f"{train.file} has one image only: nothing is left for validation")


def _check_shapes(data: ImageData, train: Path, test: Path) -> None:
    for images in (data.valid.images, data.test.images):
        if images.shape[1:] != data.train.images.shape[1:]:
            file = test if images is data.test.images else train
            raise ValueError(
                f"{file} has images of {_pixels(images.shape[2:])} pixels, the training images have "
                f"{_pixels(data.train.images.shape[2:])}"
            )


def _order(split: _Split) -> Tensor:
    return torch.randperm(split.labels.numel(), generator=generator(_SPLIT_KEY))


def _decoded(split: _Split, indices: Tensor) -> ImageSet:
    return ImageSet(split.decode(indices), split.labels[indices])


def _mean_and_std(images: Tensor) -> tuple[Tensor, Tensor]:
    """Of each channel of images uint8 [n, C, H, W], float32 [C], the pixels being 0 to 1."""
    sums = torch.zeros(2, images.shape[1], dtype=torch.float64)
    for some in torch.split(images, 500):  # as floats the whole would take four times its room
        pixels = some.float() / 255
        sums += torch.stack((pixels.mean((0, 2, 3)), pixels.square().mean((0, 2, 3)))).double() * len(some)
    mean, square = sums / len(images)
    # a channel of one value alone is not blown up
    return mean.float(), (square - mean.square()).clamp_min((1 / 255) ** 2).sqrt().float()
