"""How options are written on a command line: kinds of values that several commands take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from avgpipe.cli.options import Value, parse_count, parse_positive
from avgpipe.report.course import parse_target
from avgpipe.schedule import schedule_names
from avgpipe.tasks import is_script, workload_names
from avgpipe.units import parse_bytes, parse_names, parse_numbers

Parse = Callable[[str, str], Any]


def parse_advance(name: str, text: str) -> int | tuple[int, ...] | str:
    if text == "auto":
        return text
    numbers = parse_numbers(name, text, int, "2, as 3,2,1,0 for each stage, or auto")
    return numbers if len(numbers) > 1 else numbers[0]


def parse_staleness(name: str, text: str) -> int | str:
    return int(text) if text.isdigit() else text


def numbers(kind: type[int] | type[float], example: str, least: float | None = None) -> Parse:
    """Make the parser of numbers with commas between them."""
    return lambda name, text: parse_numbers(name, text, kind, example, least=least)


def parse_counts(name: str, text: str) -> tuple[int, ...]:
    return tuple(sorted(set(parse_numbers(name, text, int, "1,2,4", least=1))))


def parse_count_or_none(name: str, text: str) -> int:
    return 0 if text.strip() == "0" else parse_count(name, text)


def parse_seed(name: str, text: str) -> int:
    if text.strip() == "none":
        return -1
    if not (text.strip().isdigit() and int(text) < 2**32):
        raise ValueError(f"{name} {text}: must be a whole number from 0 to {2**32 - 1}, or none")
    return int(text)


def parse_target_option(name: str, text: str) -> float | str:
    try:
        value, of_loss = parse_target(text)
    except ValueError as error:
        raise ValueError(f"{name} {text}: {str(error).partition(': ')[2]}") from None
    return text if of_loss else value


def parse_picture(name: str, text: str) -> str:
    from avgpipe.timeline.plot import check_picture  # loads numpy, which help pages do without

    check_picture(text)
    return text


Folder = Annotated[str, Value("DIR")]
File = Annotated[str, Value("FILE")]
Picture = Annotated[str, Value("FILE", parse_picture)]
Methods = Annotated[tuple[str, ...], Value("NAME,...", lambda _, text: parse_names(text))]
Names = Annotated[tuple[str, ...], Value("NAMES", lambda _, text: parse_names(text))]
Count = Annotated[int, Value("NUMBER", parse_count)]
Counts = Annotated[tuple[int, ...], Value("NUMBER,...", parse_counts)]
CountOrNone = Annotated[int, Value("NUMBER", parse_count_or_none)]
Positive = Annotated[float, Value("NUMBER", parse_positive)]
Amounts = Annotated[tuple[float, ...], Value("NUMBER,...", numbers(float, "10 or 10,12,9", 0))]
Size = Annotated[int, Value("SIZE", partial(parse_bytes, positive=True))]
Milliseconds = Annotated[float, Value("NUMBER", lambda name, text: numbers(float, "10", 0)(name, text)[0])]
Schedule = Annotated[str, Value("NAME", choices=tuple(schedule_names()))]
ScheduleOrFile = Annotated[
    str, Value("NAME|FILE.csv", choices=tuple(schedule_names()), besides=lambda text: text.endswith(".csv"))
]
Advance = Annotated[int | tuple[int, ...] | str | None, Value("NUMBER,...|auto", parse_advance)]
Workload = Annotated[str, Value("WORKLOAD", choices=workload_names(), besides=is_script, positional=True)]
