"""The elastic update of a stage: what it takes beside torch's AdamW, and how much of it is hidden beside compute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import avgpipe
from benchmarks.one_card.issue import WAYS
from benchmarks.one_card.neighbours import Worker

if TYPE_CHECKING:
    from benchmarks.one_card.one_worker import Card

_REPLICAS, _STEPS, _ROUNDS = 2, 10, 5
_MICRO_BATCHES = 4
Rows = list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]


def rows(card: Card, dtype: str) -> Rows:
    """Rows of the two models whose stages differ most: many weights for their compute, and few."""
    made: Rows = []
    for name in ("bert", "gnmt"):
        if card.has(name):
            head = {"model": name, "dtype": dtype}
            made.append(({"row": "update", **head}, partial(beside_adamw, card, name)))
            if card.on_cuda:
                made.append(({"row": "hidden update", **head}, partial(hidden, card, name, dtype)))
    return made


def beside_adamw(card: Card, name: str) -> dict[str, Any]:
    """Milliseconds of a step: ``AdamW(fused=True)`` alone, and with elastic averaging in the same pass."""
    card.clear()
    plain = torch.optim.AdamW(_weights(card, name), lr=1e-5, fused=True)
    plain_ms = _step_ms(card, plain.step)
    del plain
    elastic = _elastic(card, name)
    elastic_ms = _step_ms(card, lambda: _round(elastic)) / _REPLICAS
    return {
        "weights": sum(p.numel() for p in elastic[0].reference.parameters),
        "fused_adamw_ms": round(plain_ms, 4),
        "elastic_adamw_ms": round(elastic_ms, 4),
        "times": round(elastic_ms / plain_ms, 3),
    }


def hidden(card: Card, name: str, dtype: str) -> dict[str, Any]:
    """How much of an elastic update takes no time when it runs beside a batch's forwards and backwards.

    One lane without waits computes a batch, as one graph; another replica's step is issued beside it.
    """
    from benchmarks.one_card.one_worker import Case

    card.clear()
    (lane,) = card.lanes(Case(name, dtype, _MICRO_BATCHES, 1, "row", 0), 1)
    alone = Worker(1, 0, _MICRO_BATCHES)  # the only stage: nothing to wait for
    compute = WAYS["row"](alone, [lane], [card.waits(alone, lane)])
    elastic = _elastic(card, name)
    side = torch.cuda.Stream()

    def update() -> None:
        with torch.cuda.stream(side):
            elastic[0].step()
            elastic[1].step()

    def both() -> None:
        compute()
        update()
        side.wait_stream(lane.stream)  # the next pair begins together
        lane.stream.wait_stream(side)

    compute_ms, update_ms, both_ms = (_step_ms(card, run) for run in (compute, update, both))
    return {
        "compute_ms": round(compute_ms, 3),
        "updates_ms": round(update_ms, 3),
        "both_ms": round(both_ms, 3),
        "hidden": round((compute_ms + update_ms - both_ms) / update_ms, 3),
    }


def _weights(card: Card, name: str) -> list[torch.nn.Parameter]:
    with card.device:
        made = list(card.model(name).module().parameters())
    for p in made:
        p.grad = torch.full_like(p, 0.01)
    return made


def _elastic(card: Card, name: str) -> list[avgpipe.ElasticAveraging]:
    replicas = [_weights(card, name) for _ in range(_REPLICAS)]
    reference = avgpipe.Reference(replicas[0], _REPLICAS, staleness=1)
    return [
        avgpipe.ElasticAveraging(torch.optim.AdamW(own, lr=1e-5), reference, number)
        for number, own in enumerate(replicas)
    ]


def _round(elastic: list[avgpipe.ElasticAveraging]) -> None:
    for optimizer in elastic:
        optimizer.step()


def _step_ms(card: Card, step: Callable[[], Any]) -> float:
    def taken() -> Iterator[float]:
        for _ in range(_ROUNDS):
            card.wait()
            begin = time.perf_counter()
            for _ in range(_STEPS):
                step()
            card.wait()
            yield 1e3 * (time.perf_counter() - begin) / _STEPS

    step()
    return statistics.median(list(taken()))
