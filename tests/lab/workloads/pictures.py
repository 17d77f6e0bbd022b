"""Small data folders of images in which the brightness of each quarter tells the class."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

CLASSES = ("cat", "dog", "frog", "ship")


def picture(label: int, draw: np.random.Generator, side: int = 32) -> np.ndarray:
    """uint8 [side, side]: quarter ``label`` is bright."""
    pixels = draw.integers(0, 100, (side, side))
    row, column = divmod(label % 4, 2)
    half = side // 2
    pixels[row * half : (row + 1) * half, column * half : (column + 1) * half] += 120
    return pixels.astype(np.uint8)


def jpeg(pixels: np.ndarray) -> bytes:
    image = pytest.importorskip("PIL.Image", reason="makes JPEG images with Pillow")
    out = io.BytesIO()
    image.fromarray(pixels).convert("RGB").save(out, "JPEG", quality=95)
    return out.getvalue()


def write_tar(file: Path, members: list[tuple[str, bytes | None]]) -> None:
    """A compressed archive of files, and of folders where there are no bytes."""
    with tarfile.open(file, "w:gz", compresslevel=1) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


def jpeg_members(per_class: int) -> list[tuple[str, bytes | None]]:
    draw = np.random.default_rng(1)
    return [
        (f"train/{name}/{n:04d}.jpg", jpeg(picture(label, draw)))
        for label, name in enumerate(CLASSES)
        for n in range(per_class)
    ]


def jpeg_folder(folder: Path, per_class: int = 15) -> Path:
    """So many images of each class."""
    write_tar(folder / "train.tar.gz", jpeg_members(per_class))
    return folder


def idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(f">{1 + array.ndim}I", 2048 + array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def idx_folder(folder: Path, count: int = 60, *, suffix: str = ".gz") -> Path:
    """So many images of four classes, 28 x 28."""
    draw = np.random.default_rng(3)
    labels = np.arange(count) % 4
    images = np.stack([picture(label, draw, 28) for label in labels])
    for name, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
        raw = idx_bytes(array)
        (folder / f"train-{name}{suffix}").write_bytes(gzip.compress(raw, 1) if suffix else raw)
    return folder
