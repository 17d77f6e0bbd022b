"""Ranks that are told to end stop after the same batch, whoever was told, and when."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from avgpipe.checkpoint import verify_checkpoint
from avgpipe.ranks.met import Preemption
from tests.checkpoint.test_snapshot import PLANS, batches, make
from tests.runner import run

PLAN = PLANS[-2]


class Store:
    """Stands for the World of each of several ranks, which share their notes."""

    timeout_s = 1.0

    def __init__(self, rank: int, size: int, notes: dict[str, str]) -> None:
        self.rank, self.size, self._notes = rank, size, notes

    def note(self, name: str, text: str) -> None:
        self._notes[name] = text

    def noted(self, name: str) -> str | None:
        return self._notes.get(name)


class Waits(Exception):
    pass


class Asked(Preemption):
    def _await(self) -> None:
        if not self._agreed.is_set():
            raise Waits


def stops(seed: int, size: int = 3) -> list[int]:
    """Where ranks stop that are asked, look and are told in an order that is drawn."""
    dice, notes, places, ends = random.Random(seed), dict[str, str](), [0] * size, dict[int, int]()
    ranks: list[Any] = [Asked(Store(rank, size, notes)) for rank in range(size)]  # type: ignore[arg-type]
    told_at = dice.randrange(40)
    for step in range(2000):
        if step >= told_at and dice.random() < 0.1:
            ranks[dice.randrange(size)].notice()
        rank = dice.randrange(size)
        if dice.random() < 0.3:
            ranks[rank].look()
        elif rank not in ends:
            try:
                if ranks[rank].is_due(places[rank]):
                    ends[rank] = places[rank]
                places[rank] += 1
            except Waits:
                pass
    return [ends[rank] for rank in range(size)]


@pytest.mark.parametrize("seed", range(50))
def test_all_stop_at_the_same_place(seed: int) -> None:
    found = stops(seed)
    assert found == found[:1] * 3


def _train_until_preempted(folder: str) -> list[float]:
    losses = []
    with make(PLAN) as p:
        signal.signal(signal.SIGUSR2, lambda *_: p.preempt())
        loader = batches(400)
        for result in p.train(loader):
            losses.append(result.loss)
            if p.world.rank == 1 and result.batch == 3:
                signal.raise_signal(signal.SIGUSR2)
            if p.preempted:
                break
        p.save(folder)
        stopped = p.batches
        losses[stopped:] = []
    with make(PLAN) as p:
        p.load(folder)
        losses += [result.loss for result in p.train(loader[len(losses) :])]
    return losses


@pytest.mark.promise
def test_a_preempted_loop_goes_on_from_what_it_has_saved(tmp_path: Path) -> None:
    first, second = run(2, _train_until_preempted, folder=str(tmp_path))
    assert first == second
    assert 3 < verify_checkpoint(tmp_path).batches < 400


def test_one_process_stops_at_once() -> None:
    with make(PLANS[0]) as p:
        assert [p.batches for _ in p.train(batches(2)) if p.preempted] == []
        p.preempt()
        assert [p.preempted for _ in p.train(batches(2))] == [True, True]
