"""Which values of a traced model go past stages that do not need them, and between which stages.

A traced model's pieces take and give tuples of all values that they or later pieces need. A value that is not needed
at a stage stands there as None. It goes by a message of its own from the stage that made it, or used it last, to the
next one that uses it, and its gradient goes back the same way; so a stage that uses it adds its part of the gradient,
and the maker receives the sum::

    stage      0         1         2         3
    v          made      -         used      used
                 └─────── X ───────┘ └── F ──┘      from 2 to 3 with all else that a stage gives the next
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple


class Values(NamedTuple):
    """The values of a piece of a model, by name.

    takes, gives: in the order of its tuples. uses: what it computes with of the former; the first piece takes the
    model's input, which has no names, and the last gives the model's output, so neither is listed.
    """

    takes: tuple[str, ...]
    gives: tuple[str, ...]
    uses: frozenset[str]


class Route(NamedTuple):
    """One end of a way past other stages. ``stage``: the other end. ``places``: of the values, in this end's tuple."""

    stage: int
    places: tuple[int, ...]


class Skips(NamedTuple):
    """Of a stage: where values of its input come from, and where values of its output go, each in stage order."""

    arrivals: tuple[Route, ...] = ()
    departures: tuple[Route, ...] = ()


NO_SKIPS = Skips()


def skips(pieces: Sequence[Values], bounds: Sequence[int]) -> list[Skips]:
    """Of every stage. ``bounds``: first piece of each stage, then the number of pieces."""
    stages = [pieces[a:b] for a, b in pairwise(bounds)]
    ways: dict[tuple[int, int], list[str]] = {}  # by both ends, what goes there
    holders = dict.fromkeys(stages[0][-1].gives, 0)  # by value, the stage that made it or used it last
    for k, stage in enumerate(stages[1:], 1):
        used = frozenset[str]().union(*(piece.uses for piece in stage))
        for name in stage[0].takes:
            if name in used:
                if holders[name] < k - 1:
                    ways.setdefault((holders[name], k), []).append(name)
                holders[name] = k
        for name in stage[-1].gives:
            holders.setdefault(name, k)
    return [
        Skips(
            tuple(Route(a, _places(stage[0].takes, ways[a, b])) for a, b in sorted(ways) if b == k),
            tuple(Route(b, _places(stage[-1].gives, ways[a, b])) for a, b in sorted(ways) if a == k),
        )
        for k, stage in enumerate(stages)
    ]


def _places(names: tuple[str, ...], found: Iterable[str]) -> tuple[int, ...]:
    return tuple(names.index(name) for name in found)


def part(output: tuple[Any, ...], departures: Sequence[Route]) -> tuple[tuple[Any, ...], list[list[Any]]]:
    """A stage's output as the next stage gets it, and for each departure the values that go there."""
    parts = [[output[n] for n in route.places] for route in departures]
    gone = {n for route in departures for n in route.places}
    return tuple(None if n in gone else value for n, value in enumerate(output)), parts


def join(
    given: tuple[Any, ...], arrivals: Sequence[Route], parts: Sequence[Sequence[Any]]
) -> tuple[Any, ...]:
    """A stage's input, from what the stage before gave and for each arrival what came from there."""
    whole = list(given)
    for route, values in zip(arrivals, parts):
        for n, value in zip(route.places, values):
            whole[n] = value
    return tuple(whole)
