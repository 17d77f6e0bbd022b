"""What the options accept."""

import pytest

from avgpipe.bench.kernels.settings import KernelSettings, parse_elements
from avgpipe.units import parse_names


def test_elements_are_whole_numbers_in_any_notation():
    assert parse_elements("25e6") == (25_000_000,)
    assert parse_elements("25e6,100000") == (25_000_000, 100_000)


@pytest.mark.parametrize("text", ["", "many", "1e5,", "2000.5", "-1e6", "1999", "inf", "nan"])
def test_other_elements_are_refused_by_name(text):
    with pytest.raises(ValueError, match="--elements"):
        parse_elements(text)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "tpu"}, "--device tpu"),
        ({"dtype": "int8"}, "--dtype int8"),
        ({"threads": 0}, "--threads 0"),
        ({"rounds": 0}, "--rounds 0"),
        ({"only": ("adamw", "adam")}, "--only adam:"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, named):
    with pytest.raises(ValueError, match=named):
        KernelSettings(**options)


def test_only_chooses_questions():
    assert KernelSettings().asks("pull")
    assert KernelSettings(only=parse_names("pull, sgd")).asks("sgd")
    assert not KernelSettings(only=parse_names("pull, sgd")).asks("adamw")


def test_the_command_spells_out_what_was_measured():
    settings = KernelSettings(elements=(2000, 4000), only=("pull",), compiles=False)
    words = " ".join(settings.command())
    assert words.startswith("avgpipe bench kernels --elements 2000,4000 --threads 2 ")
    assert words.endswith("--only pull --no-compile")
