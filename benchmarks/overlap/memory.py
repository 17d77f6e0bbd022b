"""Question: how much memory does a worker need, and does it stay so over a thousand batches?

    OMP_NUM_THREADS=1 python -m benchmarks.overlap.memory

Four emulated stages that take no time, activations of 4 MiB, M = 8; every row in processes of its own. Of each worker:
how far the peak of its resident memory between batches 20 and the last lies above what it had before the row was
built, and how much the median of the last tenth of the batches lies above that of the second tenth. Expected at the
peak: the batch on every rank; of every pipeline the micro-batches in flight, each with its input and output (the first
stage's inputs are the batch's own); and the working set of one backward: the gradient that came, its copy, the one that
goes. Memory of the links is shared by two workers, each of which counts half of it. The record of events is part of
what is measured. The C library gives large blocks back when they are freed: what a process keeps for later is another
question, which --keep-freed asks. Exits with 1 if memory grows by more than two activations.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STAGES, MICRO_BATCHES, ACTIVATION_BYTES = 4, 8, 4 * 2**20
WORKING_SET = 3  # activations
_RETURNS_FREED = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}  # a choice, so that a Pipeline makes none
WARM_UP = 20  # batches before the peak is watched
TORCH_ROWS = ("1f1b", "gpipe", "zero-bubble")


def worker(kind: str, link: str, pipelines: int, batches: int) -> dict[str, Any]:
    """A rank of one row. kind: "avgpipe", or the name of one of torch's schedules."""
    from avgpipe.ranks.rendezvous import join
    from avgpipe_lab.bench.schedules import EmulatedStage, mean_loss
    from benchmarks.common.rows import OurRow, Task, TrainingRow, Unavailable, our_plan, torch_row

    def built(activation_bytes: int) -> TrainingRow:
        inputs = torch.ones(MICRO_BATCHES, activation_bytes // 4)
        task = Task(inputs, torch.zeros(MICRO_BATCHES, 1), mean_loss, lambda p: torch.optim.SGD(p, lr=1e-3))
        modules = [EmulatedStage(0.0, 0.0) for _ in range(STAGES)]
        row: TrainingRow | Unavailable
        if kind == "avgpipe":
            row = OurRow(kind, task, modules, our_plan(STAGES, MICRO_BATCHES, pipelines=pipelines), link=link)
        else:
            row = torch_row(kind, task, modules, kind, MICRO_BATCHES)
        if isinstance(row, Unavailable):
            raise ValueError(row.reason)
        return row

    torch.set_num_threads(1)
    join(60, "gloo")
    # Small activations first: they load the code, whose pages are not the question.
    small = built(4096)
    for _ in small.losses(2 * pipelines):
        pass
    dist.barrier()
    small.close()
    before = _status_bytes("VmRSS")
    row = built(ACTIVATION_BYTES)
    resident = []
    for n, _ in enumerate(row.losses(batches)):
        if n == WARM_UP:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        resident.append(_status_bytes("VmRSS"))
        # Here, not after the loop, at whose end some rows gather a timeline from all ranks.
        peak, shared = _status_bytes("VmHWM"), _status_bytes("RssShmem")
    dist.barrier()
    row.close()
    tenth = max(1, batches // 10)
    growth = statistics.median(resident[-tenth:]) - statistics.median(resident[tenth : 2 * tenth])
    return {
        "before_bytes": before,
        "peak_bytes": peak - before,
        "growth_bytes": growth,
        "shared_bytes": shared,
    }


def main() -> None:
    from avgpipe.ranks.launch import run_on_ranks
    from benchmarks.common.record import write_record

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--links", type=lambda text: text.split(","), default=["shm", "gloo"])
    parser.add_argument(
        "--keep-freed", action="store_true", help="let Pipelines keep what they free, as they do"
    )
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    if arguments.batches < 2 * WARM_UP:
        parser.error(f"--batches {arguments.batches}: must be at least {2 * WARM_UP}")
    cases = [("avgpipe", link, n) for link in arguments.links for n in (1, 2)]
    cases += [(name, "gloo", 1) for name in TORCH_ROWS]
    rows = []
    print("| | stage | resident MiB | of it shared | peak MiB | expected MiB | growth MiB |")
    print("|---|---|---|---|---|---|---|")
    for kind, link, n in cases:
        asked = {"kind": kind, "link": link, "pipelines": n, "batches": arguments.batches}
        allocation = {} if arguments.keep_freed else _RETURNS_FREED
        target = "benchmarks.overlap.memory:worker"
        ranks = run_on_ranks(target, STAGES, asked, timeout_s=1800, environment=allocation)
        for k, rank in enumerate(ranks):
            row = {**asked, "stage": k, **rank, "expected_bytes": expected_bytes(kind, n, k)}
            row["own_bytes"] = row["peak_bytes"] - row["shared_bytes"] / 2
            rows.append(row)
            print(
                f"| {kind}, N = {n}, {link} | {k} | {_mib(row['peak_bytes'])} | {_mib(row['shared_bytes'])} | "
                f"{_mib(row['own_bytes'])} | "
                f"{_mib(row['expected_bytes'])} | {_mib(row['growth_bytes'])} |",
                flush=True,
            )
    write_record(
        "overlap-memory", "resident memory of each worker, over many batches", {"rows": rows}, arguments.out
    )
    grown = [row for row in rows if row["kind"] == "avgpipe" and row["growth_bytes"] > 2 * ACTIVATION_BYTES]
    if grown:
        print(f"memory grows: {grown}", file=sys.stderr)
        sys.exit(1)


def expected_bytes(kind: str, pipelines: int, stage: int) -> int | None:
    """The batch, inputs and outputs of the micro-batches in flight, one backward; weights are a few numbers here."""
    from avgpipe.schedule import build_schedule

    names = {"avgpipe": "advance-forward", "1f1b": "1f1b", "gpipe": "all-forward-all-backward"}
    if kind not in names:
        return None
    in_flight = build_schedule(names[kind], STAGES, MICRO_BATCHES).peak_in_flight[stage]
    held = pipelines * in_flight * (1 if stage == 0 else 2)
    return (MICRO_BATCHES + held + WORKING_SET) * ACTIVATION_BYTES


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def _mib(size: float | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f}"


if __name__ == "__main__":
    main()
