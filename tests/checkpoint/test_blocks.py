"""Files of checkpoints: what is written comes back, and the checksum notices what does not."""

from __future__ import annotations

import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from avgpipe.checkpoint.manifest import BlockFile, checksum_of


def checksum_in(path: Path) -> int:
    with path.open("rb") as file:
        return checksum_of(file)


def written(path: Path, pieces: list[bytes]) -> BlockFile:
    with path.open("wb", buffering=0) as file:
        blocks = BlockFile(file)
        for piece in pieces:
            assert blocks.write(piece) == len(piece)
        blocks.finish()
    return blocks


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 1 << 20, (1 << 20) + 5, 5 << 20])
@pytest.mark.parametrize("folder", ["disk", "/dev/shm"])
def test_what_is_written_in_pieces_comes_back(size: int, folder: str, tmp_path: Path) -> None:
    dice = random.Random(size)
    data = dice.randbytes(size)
    cuts = [0, *sorted(dice.randrange(size + 1) for _ in range(7)), size]
    path = (Path(folder) if folder.startswith("/") else tmp_path) / f"avgpipe-blocks-{os.getpid()}"
    try:
        blocks = written(path, [data[a:b] for a, b in pairwise(cuts)])
        assert path.read_bytes() == data
        assert (blocks.size, blocks.checksum) == (size, checksum_in(path))
    finally:
        path.unlink()


def test_where_files_cannot_be_written_past_the_cache_they_are_written_as_ever(
    tmp_path: Path, monkeypatch: Any
) -> None:
    def refuse(blocks: BlockFile, flag: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(BlockFile, "_set_direct", refuse)
    data = random.Random(1).randbytes(3_000_000)
    assert written(tmp_path / "f", [data]).checksum == checksum_in(tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == data


def test_a_checksum_notices_flipped_bits_and_pages_in_another_order(tmp_path: Path) -> None:
    dice, path = random.Random(5), tmp_path / "f"
    data = bytes(3 * 4096) + dice.randbytes(20_000)

    def of(changed: bytes) -> int:
        path.write_bytes(changed)
        return checksum_in(path)

    whole = of(data)
    for _ in range(500):
        at, bit = dice.randrange(len(data)), 1 << dice.randrange(8)
        assert of(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]) != whole
    assert of(data[4096:] + data[:4096]) != whole
    assert of(data[4096:]) != whole
