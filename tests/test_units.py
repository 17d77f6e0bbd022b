"""Quantities as people write and read them."""

import pytest

from avgpipe.units import (
    duration,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_names,
    parse_numbers,
    parse_rate,
    parse_seconds,
    time_unit,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1KiB", 1024), ("2 MiB", 2**21), ("1e3", 1000), ("3kB", 3000), ("0.5MiB", 2**19), ("0", 0)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes("--size", text) == size


@pytest.mark.parametrize("text", ["", "MiB", "1.5", "-1", "1 mib", "1e999", "nan", "1.5.2MiB", "0.3B", "inf"])
def test_what_is_no_size_is_refused_with_the_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--size .*: write a size as"):
        parse_bytes("--size", text)


def test_a_size_may_have_to_have_a_unit_and_be_above_0() -> None:
    with pytest.raises(ValueError, match=r"^memory 80: write a size as"):
        parse_bytes("memory", "80", bare=False)
    with pytest.raises(ValueError, match=r"^memory 0B: must be more than 0$"):
        parse_bytes("memory", "0B", positive=True)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("10Gbit", 1.25e9), ("250Mbit", 31.25e6), ("1e9bit", 125e6), ("1.6 Tbit", 200e9), ("8kbit", 1e3)],
)
def test_rates(text: str, bytes_per_s: float) -> None:
    assert parse_rate("link", text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("text", ["10", "10GB", "10gbit", "0Gbit", "-1Gbit", "", "fast", 10, 1e9, None, True])
def test_wrong_rates(text: object) -> None:
    with pytest.raises(ValueError, match=r"^link .*: write a rate as 10Gbit, 250Mbit or 1e9bit$"):
        parse_rate("link", text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("50us", 50e-6), ("0.2ms", 2e-4), ("0s", 0.0), ("700 ns", 7e-7), ("1s", 1.0)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds("latency", text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["50", "50µs", "50US", "-1us", "", "soon", 50, 0, None, False])
def test_wrong_times(text: object) -> None:
    with pytest.raises(ValueError, match=r"^latency .*: write a time as 50us, 0.2ms or 0s$"):
        parse_seconds("latency", text)


def test_numbers() -> None:
    assert parse_numbers("--sizes", "1, 2,4", int, "1,2,4", least=1) == (1, 2, 4)
    assert parse_numbers("--ms", "0.5", float, "1,2") == (0.5,)


@pytest.mark.parametrize("text", ["", "a", "1;2", "1,,2", "1.5", "0,1"])
def test_what_are_no_such_numbers_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"^--sizes .*: write whole numbers of at least 1 with commas between, as 1,2,4$"
    ):
        parse_numbers("--sizes", text, int, "1,2,4", least=1)


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "x"])
def test_numbers_are_finite_where_there_is_a_least(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"^--ms .*: write numbers of at least 0 with commas between, as 1,2$"
    ):
        parse_numbers("--ms", text, float, "1,2", least=0)


def test_names() -> None:
    assert parse_names("a, b,,c ") == ("a", "b", "c")
    assert parse_names(None) == ()


def test_sizes_are_written_in_three_digits() -> None:
    sizes = (0, 8, 1024, 2**18, 3 * 2**20, 12.345 * 2**20, 1010 * 2**20, 2**30, 2.5 * 2**40)
    assert [format_bytes(size) for size in sizes] == [
        *("0 B", "8 B", "1 KiB", "256 KiB", "3 MiB", "12.3 MiB", "1010 MiB", "1 GiB", "2.5 TiB")
    ]


def test_times_are_written_in_three_digits() -> None:
    assert [format_seconds(s) for s in (0, 12.3e-6, 1.5e-3, 2e-3, 0.0123, 0.123, 2, 61.2, 123)] == [
        *("0.00 µs", "12.3 µs", "1500 µs", "2.00 ms", "12.3 ms", "123 ms", "2.00 s", "61.2 s", "123 s")
    ]
    assert time_unit(0.1) == ("ms", 1e3)


def test_a_duration_that_is_not_finite_has_no_words() -> None:
    times = 42.4, 185, 7620, float("nan"), float("inf")
    assert [duration(seconds) for seconds in times] == ["42 s", "3:05 min", "2:07 h", "-", "-"]
