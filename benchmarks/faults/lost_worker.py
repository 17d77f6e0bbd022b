"""Question: how soon does training go on when a process is lost that all pipelines share, and what is lost with it?

    OMP_NUM_THREADS=1 python -m benchmarks.faults.lost_worker

Of K = 3 processes with N = 2 pipelines one gets SIGKILL at a moment that a seed draws, each rank in turn; a spare takes
its place, with the copy that its neighbour has. Training goes on with the first stage's next update, of a batch that is
trained on once more. Lost is what was done after the update to which all go back. The weights at the end
must be those, in every bit, of a run that was saved and loaded at that batch.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from avgpipe.errors import PipelineError
from avgpipe.ranks.launch import run_on_ranks
from benchmarks.common.record import say, write_record
from benchmarks.faults.job import BATCH_SIZE, EPOCH
from benchmarks.faults.trial import Loss, Seen, lose_worker

STAGES, PIPELINES, SPARES = 3, 2, 1
TIMEOUT_S = 30.0
_SHOWN_S = (-4.0, 6.0)  # after the loss


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=12, help="ranks take turns")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--copies-every-s", type=float, default=2.0)
    parser.add_argument("--epochs", type=int, default=20, help=f"of {EPOCH} batches, of a run")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    every_s, epochs = arguments.copies_every_s, arguments.epochs
    when_s = (every_s, 4 * every_s)
    asked = {"stages": STAGES, "pipelines": PIPELINES, "spares": SPARES, "copies_every_s": every_s}
    asked |= {"epochs": epochs, "batch_size": BATCH_SIZE, "batches_per_epoch": EPOCH, "when_s": when_s}
    trials: list[dict[str, Any]] = []
    shown: list[dict[str, Any]] = []
    for number in range(arguments.trials):
        seed = arguments.seed + number
        loss = Loss.draw(seed, "kill", 1, STAGES, when_s, rank=seed % STAGES)
        trials.append(_trial(loss, every_s, epochs, shown))
        say(f"{len(trials)}: {trials[-1]}")
        question = "how soon a spare process goes on for one that all pipelines share"
        write_record(
            "faults-lost-worker", question, {**asked, "trials": trials, "shown": shown}, arguments.out
        )


def _trial(loss: Loss, every_s: float, epochs: int, shown: list[dict[str, Any]]) -> dict[str, Any]:
    row = vars(loss)
    try:
        seen = lose_worker(loss, STAGES, PIPELINES, TIMEOUT_S, every_s, SPARES, epochs)
        row = row | _seen_of(seen, loss)
    except PipelineError as error:
        return row | {"failure": str(error)}
    row |= _compare(seen, row["batch"], epochs)
    if not shown or row["batches_lost"] > shown[0]["batches_lost"]:
        updates = [(round(e["at_s"] - seen.at_s, 4), e["number"]) for e in seen.of("update", rank=0)]
        near = [point for point in updates if _SHOWN_S[0] < point[0] < _SHOWN_S[1]]
        known = {name: row[name] for name in ("seed", "rank", "back_after_s", "batches_lost")}
        shown[:] = [{**known, "updates": near}]
    return row


def _seen_of(seen: Seen, loss: Loss) -> dict[str, Any]:
    """Say when training went on, at which batch, and what was done for nothing."""
    batch = seen.of("begin", rank=loss.rank, life=1)[0]["batch"]
    updates = seen.of("update", rank=0)
    before = [e for e in updates if e["generation"] == 0]
    again = [e for e in updates if e["generation"] == 1]
    # A stage has made update n once both pipelines have.
    done = {n: max(e["at_s"] for e in before if e["number"] == n) for n in {e["number"] for e in before}}
    other = (loss.rank + 1) % STAGES
    results = [e["batch"] for e in seen.of("result", rank=other)]
    return {
        "batch": batch,
        "back_after_s": again[0]["at_s"] - seen.at_s,
        "lost_s": max(0.0, seen.at_s - done[batch]) if batch else seen.at_s - before[0]["at_s"],
        "batches_lost": max(done) - batch,
        "said": [line for _, line in seen.said],
        "results_missing_or_twice": len(results)
        - len(set(results))
        + len(set(range(max(results))) - set(results)),
    }


def _compare(seen: Seen, batch: int, epochs: int) -> dict[str, Any]:
    """Compare the weights with those of a run that is saved and loaded at a batch."""
    with tempfile.TemporaryDirectory(prefix="avgpipe-") as name:
        arguments: dict[str, Any] = {"stages": STAGES, "pipelines": PIPELINES, "batch": batch}
        arguments |= {"epochs": epochs, "folder": str(Path(name, "checkpoint"))}
        expected = run_on_ranks("benchmarks.faults.job:saved_and_loaded", STAGES, arguments, timeout_s=600)[0]
    found = [(e["rank"], e["digests"]) for e in seen.of("weights")]
    return {"compared": len(found), "unequal": [rank for rank, digests in found if digests != [expected]]}


if __name__ == "__main__":
    main()
