"""Sizes as people write them."""

import pytest

from avgpipe.bench.units import parse_bytes, spell_bytes


@pytest.mark.parametrize(("text", "size"), [("1KiB", 1024), ("2 MiB", 2**21), ("1e3", 1000), ("3kB", 3000)])
def test_sizes(text, size):
    assert parse_bytes("--size", text) == size


@pytest.mark.parametrize("text", ["", "MiB", "1.5", "-1", "1 mib", "1e999", "nan"])
def test_what_is_no_size_is_refused_with_the_option(text):
    with pytest.raises(ValueError, match="--size "):
        parse_bytes("--size", text)


def test_sizes_are_spelled_in_the_largest_unit_that_divides_them():
    assert [spell_bytes(n) for n in (0, 8, 1024, 2**18, 3 * 2**20, 2**30)] == [
        *("0 B", "8 B", "1 KiB", "256 KiB", "3 MiB", "1 GiB")
    ]
