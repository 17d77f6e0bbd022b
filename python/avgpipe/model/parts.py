"""Layers that are parts of a model's own forward, and the values passed between them.

Values of a traced model may skip stages that do not need them, where they are None. Such a value is sent in a
separate message from the stage that made it, or used it last, to the next one that uses it, and its gradient
goes back the same way; so a stage that uses it adds its part of the gradient, and the maker receives the
sum::

    stage      0         1         2         3
    v          made      -         used      used
                 └── skips stage 1 ──┘ └── F ──┘      from 2 to 3 with all else that a stage gives the next
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import fx, nn


class Values(NamedTuple):
    """The values of a piece of a model, by name.

    The first piece takes the model's input, which has no names, and the last gives the model's output, so
    neither is listed.

    Attributes:
        takes: Input values, in the order of its tuple.
        gives: Output values, in the order of its tuple.
        uses: The input values that it computes with.
    """

    takes: tuple[str, ...]
    gives: tuple[str, ...]
    uses: frozenset[str]


class PartLayer(nn.Module):
    """A layer that is a part of a model's forward: it takes a tuple of values, and returns one.

    Attributes:
        values: Its input and output values, by name.
        calls: Name of its first module.
    """

    values: Values
    calls: str

    @property
    def recorded(self) -> fx.GraphModule | None:
        """The recorded graph that it runs; None where it runs the model's own forwards."""
        return None


class Whole(list[nn.Module]):
    """Layers of a model that is called as a whole, with other parts left out; see ``avgpipe.model.pieces``.

    Attributes:
        model: The whole model, which shares its modules with the layers.
        trial: Some inputs that it accepts.
        called: Returns the output of a copy of the whole model for a batch's inputs, in the form of the last layer's.
        stage: Returns one layer that runs those from the first number on, before the second.
        prove: Refuses, with ValueError, a cut whose stages compute anything else than the whole model.
    """

    model: nn.Module
    trial: dict[str, Any]
    called: Callable[[nn.Module, Any], Any]
    stage: Callable[[int, int], list[nn.Module]]
    prove: Callable[[Sequence[int]], None]


class SkipRoute(NamedTuple):
    """One end of a skip over other stages. ``stage``: the other end. ``places``: places of the values in the tuple."""

    stage: int
    places: tuple[int, ...]


class Skips(NamedTuple):
    """The sources of skipping values of a stage's input, and the targets of those of its output, in stage order."""

    arrivals: tuple[SkipRoute, ...] = ()
    departures: tuple[SkipRoute, ...] = ()


NO_SKIPS = Skips()


def skips_of(pieces: Sequence[Values], bounds: Sequence[int]) -> list[Skips]:
    """Find the skips of every stage. ``bounds``: first piece of each stage, then the number of pieces."""
    stages = [pieces[a:b] for a, b in pairwise(bounds)]
    ways: dict[tuple[int, int], list[str]] = {}  # by both ends, the values
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
            tuple(SkipRoute(a, _places(stage[0].takes, ways[a, b])) for a, b in sorted(ways) if b == k),
            tuple(SkipRoute(b, _places(stage[-1].gives, ways[a, b])) for a, b in sorted(ways) if a == k),
        )
        for k, stage in enumerate(stages)
    ]


def _places(names: tuple[str, ...], found: Iterable[str]) -> tuple[int, ...]:
    return tuple(names.index(name) for name in found)


def extract_skips(
    output: tuple[Any, ...], departures: Sequence[SkipRoute]
) -> tuple[tuple[Any, ...], list[list[Any]]]:
    """Return a stage's output as the next stage gets it, and for each departure the values sent there."""
    parts = [[output[n] for n in route.places] for route in departures]
    gone = {n for route in departures for n in route.places}
    return tuple(None if n in gone else value for n, value in enumerate(output)), parts


def insert_skips(
    given: tuple[Any, ...], arrivals: Sequence[SkipRoute], parts: Sequence[Sequence[Any]]
) -> tuple[Any, ...]:
    """Return a stage's input, from what the stage before gave and for each arrival what came from there."""
    whole = list(given)
    for route, values in zip(arrivals, parts):
        for n, value in zip(route.places, values):
            whole[n] = value
    return tuple(whole)
