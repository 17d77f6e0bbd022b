"""The table of hand-made results."""

import io

from rich.console import Console

from avgpipe.bench.result import summarise
from avgpipe.bench.section import Skipped
from avgpipe.bench.table import table
from tests.bench.test_result import SAMPLES, VARIANTS, section


def text(width=120):
    result = summarise(section(), VARIANTS, SAMPLES, [Skipped("absent", "no [such] library")])
    file = io.StringIO()
    Console(file=file, width=width).print(table(result))
    return file.getvalue()


def line(name):
    return next(found for found in text().splitlines() if found.strip().startswith(name + " "))


def test_a_row_has_times_bandwidth_and_fraction():
    assert line("ours").split()[1:] == ["4.000", "4.000-4.000", "16", "4.0", "1.50"]


def test_a_baseline_says_how_many_times_longer_it_took():
    assert line("slow").split()[-1] == "1.50x"
    assert line("slower").split()[-1] == "3.00x"


def test_below_stand_compile_times_and_what_was_left_out():
    assert "slower: compiled in 3.0 s" in text()
    assert "left out: absent: no [such] library" in text()
