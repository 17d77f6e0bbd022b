"""Losing pipelines and processes on purpose: what is compared is told apart, and tables say what misses its bar."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from avgpipe.fault.roster import Term
from avgpipe_lab.bench.chaos.draw import Scenario
from avgpipe_lab.bench.chaos.episode import SeenRun
from benchmarks.faults import job
from benchmarks.faults.draw import draw
from benchmarks.faults.emulation import Emulation, History, terms_of
from benchmarks.faults.pauses import _pauses, _scenarios
from benchmarks.faults.trial import Loss
from benchmarks.pages import make
from benchmarks.tables.faults import (
    faults_copies,
    faults_copies_memory,
    faults_lost_pipeline,
    faults_lost_worker,
    faults_pauses,
)
from benchmarks.tables.injected import injected

HISTORY: dict[str, Any] = {
    "lost": [{"pipeline": 1, "step": 2, "steps_lost": 2, "why": "it was killed"}],
    "joined": [{"pipeline": 1, "step": 6}],
}


def test_a_history_is_the_members_at_each_time() -> None:
    assert terms_of(HISTORY, 3) == [Term(0, 0, 0), Term(1, 1, 0, None, 2, 4), Term(2, 2, 0), Term(1, 3, 6)]


def test_what_was_lost_comes_before_the_next_batch_and_every_micro_batch_counts_once() -> None:
    history = History(terms_of(HISTORY, 3))
    batches = job.batches(0)[:6]
    numbers = {id(batch): n for n, batch in enumerate(batches)}
    counted = []
    order = []
    for turn in history.turns(batches):
        order.append(numbers[id(next(iter(turn.parts.values()))[0])])
        for i in turn.counting:
            batch, slices = turn.parts[i]
            counted += [(numbers[id(batch)], of.start) for of in slices]
    assert order == [0, 1, 2, 3, 2, 3, 4, 5]
    assert sorted(counted) == [(n, m) for n in range(6) for m in range(0, 12, 2)]


@pytest.mark.slow
def test_another_history_comes_to_other_weights() -> None:
    def train(step: int) -> dict[int | None, str]:
        lost = [{**HISTORY["lost"][0], "step": step, "steps_lost": 4 - step}]
        emulation = Emulation(2, 3, terms_of({**HISTORY, "lost": lost}, 3))
        emulation.train(0)
        return emulation.digests()

    two = train(2)
    assert train(2) == two
    other = train(3)
    assert [other[i] == two[i] for i in (None, 0, 1, 2)] == [False] * 4


def test_losses_are_drawn_from_the_seed() -> None:
    assert Loss.draw(3, "kill", 3, 2, (1, 4)) == Loss.draw(3, "kill", 3, 2, (1, 4))
    ranks = {Loss.draw(seed, "kill", 3, 2, (1, 4)).rank for seed in range(20)}
    assert ranks == {0, 1}
    assert Loss.draw(3, "kill", 1, 3, (1, 4), rank=2).rank == 2


def pipeline_record() -> dict[str, Any]:
    trial = {"stages": 2, "kind": "kill", "late_s": 0.2, "late_after_s": 0.1, "back_after_s": 9.0}
    trial |= {"compared": {"before": 6, "without": 4, "again": 6}, "unequal": [], "samples_missing": 0}
    trials = [trial, {**trial, "late_s": 2.5, "unequal": ["epoch 3, pipeline 0, rank 1"]}]
    trials.append({"stages": 2, "kind": "kill", "failure": "the run has ended"})
    shown = {
        "stages": 2,
        "kind": "kill",
        "pipeline": 1,
        "rank": 0,
        "updates_s": {"0": [0.0, 0.1], "1": [0.0]},
    }
    return {"stages": [1, 2], "timeout_s": 5.0, "trials": trials, "shown": [shown]}


def worker_record() -> dict[str, Any]:
    trial = {"rank": 1, "back_after_s": 6.0, "lost_s": 1.5, "batches_lost": 20, "compared": 3, "unequal": []}
    trial |= {"said": ["rank 1 was killed; a spare process takes its place"], "results_missing_or_twice": 0}
    shown = {"rank": 1, "back_after_s": 6.0, "updates": [[-1.0, 30], [6.0, 21]]}
    return {"stages": 3, "copies_every_s": 2.0, "trials": [trial], "shown": [shown]}


def test_tables_show_in_bold_what_misses_its_bar() -> None:
    line = faults_lost_pipeline(pipeline_record()).splitlines()[-1]
    assert line.startswith("| K = 2, kill | 3 | **1** | 2 s | 1.35 s | **2.50** s | 0.10 s | 9.00 s |")
    assert line.endswith("| 12 + 8 + 12 | **1** | 0 |")
    line = faults_lost_worker(worker_record()).splitlines()[-1]
    assert line == "| rank 1 | 1 | 0 | 1 | **6.00** s | **6.00** s | 1.50 s | 1.50 s | 20 | 3 | 0 | 0 |"
    quartiles = {"quartile1_s": 0.5, "quartile3_s": 0.6}
    rows = [
        {"name": "without", "every_s": None, "median_s": 0.5, "copies": [0, 0], **quartiles},
        {"name": "with", "every_s": 2.0, "median_s": 0.52, "copies": [4, 5], **quartiles}
        | {"cost": 0.04, "cost_of_pairs": 0.01},
    ]
    rank = {
        "rank": 0,
        "copy_bytes": 2**20,
        "computed_bytes": 2**22,
        "with_bytes": 9 * 2**20,
        "without_bytes": 2**22,
    }
    record = {
        "cases": [{"name": "transformer", "pipelines": 2, "batches": 20, "rows": rows}],
        "memory": [{"pipelines": 2, "ranks": [rank]}],
    }
    assert faults_copies(record).splitlines()[-1].endswith("| 4.5 | 10 s | **4.00** % | 1.00 % |")
    assert faults_copies_memory(record).splitlines()[-1] == "| N = 2, rank 0 | 1 | 4 | 5 | 4 |"


def test_pauses_are_beside_their_bar_and_broken_promises_are_counted() -> None:
    good: dict[str, Any] = {
        "case": "3 hosts",
        "kind": "kill",
        "pause_s": 0.2,
        "back_after_s": 6.0,
        "wrong": [],
    }
    good["pause_later_s"] = 0.1
    bad = {**good, "pause_s": 0.7, "back_after_s": None, "wrong": ["samples: a", "samples: b", "hangs: c"]}
    late = {**good, "kind": "stop", "pause_s": 6.5}
    found = faults_pauses({"timeout_s": 5.0, "trials": [good, good, bad, late]}).splitlines()
    ours = "| 3 hosts, kill | 3 | 0.5 s | 0.20 s | **0.70** s | 0.10 s | 6.00 s | 6.00 s | **1** | 0 | 0 | **1** |"
    assert found[-2] == ours
    assert (
        found[-1]
        == "| 3 hosts, stop | 1 | 6 s | **6.50** s | **6.50** s | 0.10 s | 6.00 s | 6.00 s | 0 | 0 | 0 | 0 |"
    )


def test_the_pause_is_that_of_the_others_before_and_after_the_lost_pipeline_joins_again() -> None:
    def event(kind: str, at_s: float, pipeline: int, life: int = 0) -> dict[str, Any]:
        return {"event": kind, "at_s": at_s, "pipeline": pipeline, "life": life}

    seen = SeenRun(
        Scenario("a run", "isolate"), [event("result", at, 0) for at in (0.8, 1.0, 2.5, 3.0, 3.7, 4.0)]
    )
    seen.events += [event("result", 0.9, 1), event("fault", 1.2, 1), event("result", 3.8, 1, life=1)]
    seen.said = [(0.1, "pipeline 1 trains with the others from step 3"), (1.3, "pipeline 1 is lost")]
    seen.said.append((3.1, "pipeline 1 trains with the others from step 9"))
    found = _pauses(seen)
    assert found == pytest.approx({"pause_s": 1.3, "pause_later_s": 0.7, "back_after_s": 2.6})
    seen.said.pop()
    assert _pauses(seen)["pause_later_s"] is None
    seen.events = seen.events[:1]
    assert set(_pauses(seen).values()) == {None}


def test_every_case_and_kind_is_drawn_in_turn() -> None:
    asked = Namespace(trials=2, seed=7, ways="isolate,hosts", kinds="kill,stop,cut line")
    drawn = [(case, scenario.kind, pipelines) for case, scenario, pipelines in _scenarios(asked)]
    assert drawn[:7] == drawn[7:]
    assert [kind for case, kind, _ in drawn[:7] if case == "3 hosts"] == ["kill", "stop", "cut line"]
    assert {pipelines for _, _, pipelines in drawn} == {2, 3}


def test_exit_codes_are_shown_where_runs_over_several_hosts_have_some() -> None:
    ways = {"hosts": {"runs": 2, "went_on": 1, "trained_again": 3, "wrong": {"exit codes": 1}}}
    command = {"ways": ways, "pauses_s": [{"way": "hosts", "kind": "kill", "each": [0.1, None]}]}
    shown = injected({"commands": [command]}).splitlines()
    assert shown[-1] == "| hosts | 2 | 2 | 1 | 3 | 0 | 0 | **1** | 0 | 0 | 0 | 0 |"
    command["ways"] = {"plain": ways["hosts"]}
    assert "exit codes" not in injected({"commands": [command]})


def test_without_a_record_tables_say_so() -> None:
    tables = (
        "faults-lost-pipeline",
        "faults-lost-worker",
        "faults-copies",
        "faults-pauses",
        "faults-copies-memory",
        "injected",
        "injected-kinds",
    )
    assert {make(f"{table} nothing-*") for table in tables} == {"*No record yet.*"}


@pytest.mark.parametrize("record", [pipeline_record(), worker_record()], ids=["pipeline", "worker"])
def test_pictures_are_drawn(record: dict[str, Any], tmp_path: Path) -> None:
    draw(record, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
