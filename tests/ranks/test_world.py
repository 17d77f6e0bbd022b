"""What the ranks of a pipeline tell each other."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from avgpipe.errors import PeerLost, PipelineError
from avgpipe.fault.generation import given_up
from avgpipe.ranks import met, rendezvous
from avgpipe.ranks.environment import GENERATION
from avgpipe.ranks.met import gather
from avgpipe.ranks.world import meet
from tests.patience import limit
from tests.runner import Ranks, run

VALUES = [
    *(0, "", "a", "Übung 日本", "x" * 10_000, "\udc80 as a file's name may be"),
    *(None, 0.1 + 0.2, -math.inf, [1, {"a": []}]),
]


def _gathered() -> Any:
    ours = meet(20)
    rank = ours.rank
    mine = VALUES[rank:] + VALUES[:rank]  # of unequal lengths
    return [ours.gather(value) for value in mine], gather(rank), ours.gather(VALUES[: 3 * rank])


@pytest.mark.ranks
def test_values_of_unequal_length_come_back_whole() -> None:
    first, *others = run(3, _gathered)
    for n, found in enumerate(first[0]):
        assert found == [VALUES[(n + rank) % len(VALUES)] for rank in range(3)]
    assert first[1] == [0, 1, 2]
    assert first[2] == [VALUES[: 3 * rank] for rank in range(3)]
    assert others == [first, first]


def test_alone_a_value_comes_back_as_json_carries_it() -> None:
    assert meet(1).gather((1, {2: "a"})) == [[1, {"2": "a"}]]


@pytest.mark.parametrize(("failure", "ends"), [(ValueError("of its own"), True), (PeerLost("rank 1"), False)])
def test_a_rank_that_fails_of_itself_is_not_replaced_and_no_other_waits_for_that(
    failure: Exception, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    monkeypatch.setattr(rendezvous, "private_store", lambda: store)
    monkeypatch.setenv(GENERATION, "0")
    ours = meet(1)
    ours.report(failure)
    assert store.check([given_up(1)]) == ends


class Textless(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("failure", "known"), [(Textless(), "Textless: "), (OSError("half \ud800"), "OSError: half \\ud800")]
)
def test_a_failure_that_no_store_can_hold_is_reported(failure: Exception, known: str) -> None:
    store = HashStore()
    ours = SimpleNamespace(_board=rendezvous.Board(store, 1, 2), rank=1, _spares=None)
    met.Met.report(ours, failure)  # type: ignore[arg-type]
    assert ours._board.get("failure") == f"rank 1: {known}"
    assert not met.is_of_transport(failure)


def _too_large() -> str:
    ours = meet(20)
    met._MOST_BYTES = 100
    with pytest.raises(PipelineError) as error:
        ours.gather("x" * 1000 * ours.rank)
    return str(error.value)


@pytest.mark.ranks
def test_what_is_too_large_is_refused_on_all_ranks() -> None:
    for text in run(2, _too_large):
        assert "ranks would gather [2, 1002] bytes" in text


def _several() -> list[Any]:
    """Every pipeline has its own reports."""
    first, second = meet(20), meet(20)
    if first.rank == 0:
        first.report(ValueError("broken"))
        second.note_doing("F0")
    second.barrier()
    first.describe(["the head", "the tail"])
    seen = second.last_seen(0), first.last_seen(0), first.last_seen(1)
    names = first.name(1), second.name(1)
    return [str(first.reported()), str(second.reported()), *seen, *names, second.is_first("notice")]


@pytest.mark.ranks
def test_pipelines_of_one_process_are_kept_apart() -> None:
    ranks = run(2, _several)
    assert [found[0] for found in ranks] == ["None", "rank 1 stops because of rank 0: ValueError: broken"]
    for found in ranks:
        assert found[1] == "None"
        assert found[2].startswith("rank 0 was last seen ")
        assert found[2].endswith(" s ago: F0")
        assert found[3:5] == ["rank 0 has not reported yet", "rank 1 has not reported yet"]
        assert found[5:7] == ["rank 1 (the tail)", "rank 1 (its stage is not known yet)"]
    assert sorted(found[7] for found in ranks) == [False, True]


def _differing() -> str:
    ours = meet(20)
    ours.require_same("shape", "the same")
    with pytest.raises(ValueError, match="differs") as error:
        ours.require_same("shape", f"that of {min(ours.rank, 1)}")
    return str(error.value)


@pytest.mark.ranks
def test_what_differs_is_refused_on_all_ranks() -> None:
    for text in run(3, _differing):
        assert text.startswith("the shape differs between ranks: ranks [1, 2] disagree with rank 0: ")
        assert "rank 0 has that of 0 and rank 1 has that of 1;" in text


def _dies() -> None:
    ours = meet(20)
    ours.describe(["stage 0", "stage 1"])
    if ours.rank == 1:
        os._exit(0)
    for _ in range(100):
        ours.broadcast(torch.ones(1), 1)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_collective_names_the_rank_that_died() -> None:
    (code, output), _ = Ranks(2, _dies).join(60)
    assert code == 1
    assert "PeerLost: rank 1 (stage 1) died or closed its connection; seen by rank 0: " in output


def test_nothing_of_the_package_unpickles() -> None:
    package = Path(__file__).parents[2] / "python" / "avgpipe"
    words = (
        "import pickle",
        "all_gather_object",
        "broadcast_object_list",
        "weights_only=False",
        "treespec_loads(",
    )
    found = {
        (path.name, word)
        for path in package.rglob("*.py")
        for word in words
        if word in path.read_text(encoding="utf-8")
    }
    assert found == {("codec.py", "treespec_loads(")}  # behind check_structure


def test_who_breaks_off_ends_a_collective_though_something_refers_to_the_group() -> None:
    store, lost = HashStore(), 2
    gloo: Any = torch.distributed.ProcessGroupGloo  # type: ignore[attr-defined]
    kept = []  # as by a traceback

    def act(rank: int) -> str:
        group = gloo(store, rank, 4, timedelta(seconds=limit(20)))
        kept.append(group)
        if rank == lost:
            return "silent"
        gathered = [torch.zeros(1) for _ in range(4)]
        waiting = group.allgather([gathered], [torch.ones(1)])
        if rank % 2:  # neighbours of the lost rank, which its end reaches
            met.break_off(group, (rank + 1) % 4)
        try:
            waiting.wait()
        except RuntimeError as error:
            return str(error)
        return "gathered"

    with ThreadPoolExecutor(4) as pool:
        opposite, *_ = pool.map(act, range(4))
    assert "Connection" in opposite, "closed or reset; not timed out"
