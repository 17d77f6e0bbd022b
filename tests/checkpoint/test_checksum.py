"""The checksum of a checkpoint's file."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path

import pytest

from avgpipe.checkpoint.manifest import checksum_of


def checksum_in(path: Path) -> int:
    with path.open("rb") as file:
        return checksum_of(file)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 1 << 20, (1 << 20) + 5, 5 << 20])
def test_a_checksum_is_the_crc_of_the_sums_of_each_4_kib(size: int, tmp_path: Path) -> None:
    data = random.Random(size).randbytes(size)
    (tmp_path / "f").write_bytes(data)
    expected, whole = 0, data + bytes(-size % 4096)
    for first in range(0, len(whole), 4096):
        numbers = struct.unpack("<512Q", whole[first : first + 4096])
        expected = zlib.crc32(struct.pack("<Q", sum(numbers) % 2**64), expected)
    assert checksum_in(tmp_path / "f") == expected


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
