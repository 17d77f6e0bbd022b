"""Question: what does it cost the others when one of three isolated pipelines is lost, and when it comes again?

    OMP_NUM_THREADS=1 python -m benchmarks.faults.lost_pipeline

A process of one of N = 3 pipelines of K = 1 and 2 stages gets SIGKILL, or SIGSTOP, at a moment that a seed draws; the
launcher starts the pipeline again. Of the others: by how much their longest interval between two updates of the first
stage, from the fault to the end of the run, is above the median before it. Of the pipeline: when it makes its first
update again. Then the run's history is emulated in one process, and all weights are compared after each epoch of
20 batches, in every bit: the reference's, and each pipeline's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from avgpipe.errors import PipelineError
from benchmarks.common.record import say, write_record
from benchmarks.faults.emulation import Emulation, terms_of
from benchmarks.faults.job import BATCH_SIZE, EPOCH
from benchmarks.faults.trial import Event, Loss, Seen, lose_pipeline

PIPELINES = 3
WHEN_S = (1.0, 4.0)
_THEN = 40  # updates of the pipeline that has come again, before the run may end
_SHOWN_S = 3.0  # before the fault


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=lambda text: [int(k) for k in text.split(",")], default=[1, 2])
    parser.add_argument("--trials", type=int, default=20, help="with a kill, for each number of stages")
    parser.add_argument("--hangs", type=int, default=5, help="with a process that stands still, likewise")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--timeout-s", type=float, default=5.0)
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    asked = {name: getattr(arguments, name) for name in ("stages", "timeout_s")} | {"pipelines": PIPELINES}
    asked |= {"batch_size": BATCH_SIZE, "batches_per_epoch": EPOCH, "when_s": WHEN_S}
    trials: list[dict[str, Any]] = []
    shown: list[dict[str, Any]] = []
    for stages in arguments.stages:
        for kind, count in (("kill", arguments.trials), ("hang", arguments.hangs)):
            for seed in range(arguments.seed, arguments.seed + count):
                loss = Loss.draw(seed, kind, PIPELINES, stages, WHEN_S)
                trials.append(_trial(loss, stages, arguments.timeout_s, shown))
                say(f"{len(trials)}: {trials[-1]}")
                question = "what losing one of three isolated pipelines costs the others"
                found = {**asked, "trials": trials, "shown": shown}
                write_record("faults-lost-pipeline", question, found, arguments.out)  # what there is, is kept


def _trial(loss: Loss, stages: int, timeout_s: float, shown: list[dict[str, Any]]) -> dict[str, Any]:
    row = {**vars(loss), "stages": stages}
    try:
        seen = lose_pipeline(loss, stages, PIPELINES, timeout_s, lambda events: _is_back(events, loss))
        row |= _lateness(seen, loss) | _compare(seen, stages)
    except PipelineError as error:
        return row | {"failure": str(error)}
    if not any((one["stages"], one["kind"]) == (stages, loss.kind) for one in shown):
        shown.append(_shown(seen, loss, stages))
    return row


def _is_back(events: Sequence[Event], loss: Loss) -> bool:
    own = [e for e in events if e["event"] == "update" and e["pipeline"] == loss.pipeline and e["life"]]
    return len([e for e in own if e["rank"] == 0]) >= _THEN


def _lateness(seen: Seen, loss: Loss) -> dict[str, Any]:
    """Say how late the others' updates were, and when the pipeline was back."""
    back_s = min(e["at_s"] for e in seen.of("update", pipeline=loss.pipeline, life=1))
    entered_s = next(
        at for at, line in seen.said if f"pipeline {loss.pipeline} trains with the others" in line
    )
    parts: dict[str, list[float]] = {"late_s": [], "late_before_s": [], "late_after_s": [], "median_s": []}
    for pipeline in set(range(PIPELINES)) - {loss.pipeline}:
        times = [e["at_s"] for e in seen.of("update", pipeline=pipeline, rank=0, life=0)]
        intervals = [(b, b - a) for a, b in pairwise(times)]
        median_s = statistics.median(length for end, length in intervals if end < seen.at_s)
        after = [(end, length - median_s) for end, length in intervals if end > seen.at_s]
        parts["median_s"].append(median_s)
        parts["late_s"].append(max(late for _, late in after))
        parts["late_before_s"].append(max(late for end, late in after if end <= entered_s))
        parts["late_after_s"].append(max(late for end, late in after if end > entered_s))
    return {name: max(values) for name, values in parts.items()} | {"back_after_s": back_s - seen.at_s}


def _compare(seen: Seen, stages: int) -> dict[str, Any]:
    """Compare all weights with the emulation's; say in how many epochs before, without and with the pipeline again."""
    emulation = Emulation(stages, PIPELINES, terms_of(seen.history, PIPELINES))
    (lost,), (joined,) = seen.history["lost"], seen.history["joined"]
    unequal, compared = [], {"before": 0, "without": 0, "again": 0}
    weights = seen.of("weights")
    for epoch in range(1 + max(e["epoch"] for e in weights)):
        emulation.train(epoch)
        expected, turn = emulation.digests(), emulation.history.next
        place = "before" if turn <= lost["step"] else "without" if turn <= joined["step"] else "again"
        for event in (e for e in weights if e["epoch"] == epoch):
            compared[place] += 1
            if event["digests"] != [expected[None], expected[event["pipeline"]]]:
                unequal.append(f"epoch {epoch}, pipeline {event['pipeline']}, rank {event['rank']}")
    results = seen.of("result", rank=0, life=0)
    survivor = next(e["pipeline"] for e in results if e["pipeline"] != lost["pipeline"])
    samples = sum(e["samples"] for e in results if e["pipeline"] == survivor)
    batches = EPOCH * (1 + max(e["epoch"] for e in weights))
    found = {"lost": lost, "joined": joined, "compared": compared, "unequal": unequal}
    return found | {"samples_missing": BATCH_SIZE * batches - samples}


def _shown(seen: Seen, loss: Loss, stages: int) -> dict[str, Any]:
    """Return what a picture shows: by pipeline, when its first stage has made updates, in seconds after the fault."""
    updates: dict[int, list[float]] = {i: [] for i in range(PIPELINES)}
    for event in seen.of("update", rank=0):
        if event["at_s"] > seen.at_s - _SHOWN_S:
            updates[event["pipeline"]].append(round(event["at_s"] - seen.at_s, 4))
    return {**vars(loss), "stages": stages, "updates_s": updates}


if __name__ == "__main__":
    main()
