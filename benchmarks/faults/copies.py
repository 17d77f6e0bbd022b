"""Question: what do copies in memory cost, by which a lost process is replaced, and how much memory do they take?

    OMP_NUM_THREADS=1 python -m benchmarks.faults.copies

Ways in turn, A B A B, in the same processes: without copies, and with ``copies_every_s`` of so many seconds. The
transformer of ``benchmarks.overlap`` on two processes of one thread, N = 1 and 2; and the emulated cluster, six stages
on lines of 1 Gbit/s, N = 2, each with ``--state-mib`` MiB of weights beside what it computes (as root: it makes network
namespaces). A way's turn lasts long enough for several copies. Memory is measured in processes of its own: what they
have resident after some copies, above what they have without; of memory that processes share, each has its part.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import avgpipe

BATCH, RANKS, PARTS, TIMEOUT_S = 16, 2, 4, 120
STAGES, MICRO_BATCHES, FORWARD_S, BACKWARD_S = 6, 12, 10e-3, 20e-3
ACTIVATION_BYTES, RATE_BITS_PER_S = 2**20, 1e9
MIB = 2**20
_HERE = "benchmarks.faults.copies"  # also where it is run as __main__


# ---- on each rank ----------------------------------------------------------------------------------------------------


def kept(every_s: float | None) -> list[avgpipe.Copies]:
    return [] if every_s is None else [avgpipe.Copies(every_s)]


def transformer(pipelines: int, every_s: list[float], rounds: int, seconds: float) -> dict[str, Any]:
    """Measure the transformer's ways."""
    task, modules, plan = _transformer(pipelines)
    return _measure(task, modules, plan, every_s, rounds, seconds)


def emulated(
    pipelines: int, every_s: list[float], rounds: int, seconds: float, state_mib: int
) -> dict[str, Any]:
    """Measure the emulated cluster's ways."""
    from avgpipe_lab.bench.schedules import EmulatedStage, mean_loss, precise_sleeps
    from benchmarks.common.rows import Task, our_plan

    precise_sleeps()
    inputs = torch.ones(MICRO_BATCHES, ACTIVATION_BYTES // 4)
    task = Task(
        inputs, torch.zeros(MICRO_BATCHES, 1), mean_loss, lambda params: torch.optim.SGD(params, lr=1e-3)
    )
    modules: list[nn.Module] = []
    for _ in range(STAGES):
        stage = EmulatedStage(FORWARD_S, BACKWARD_S)
        # No gradient reaches it: an update passes it by, as it takes no time that is not emulated.
        stage.register_parameter("state", nn.Parameter(torch.zeros(state_mib * MIB // 4)))
        modules.append(stage)
    return _measure(
        task, modules, our_plan(STAGES, MICRO_BATCHES, pipelines=pipelines), every_s, rounds, seconds
    )


def memory(pipelines: int, every_s: float | None, batches: int) -> dict[str, int]:
    """Return what this process has resident after so many batches of the transformer."""
    from benchmarks.common.rows import OurRow

    _join()
    task, modules, plan = _transformer(pipelines)
    row = OurRow("", task, modules, plan, timeout_s=TIMEOUT_S, extensions=kept(every_s))
    counted = _Counted()
    for _ in row.losses(batches):
        pass
    gc.collect()
    found = {"used_bytes": _used_bytes(), "copies": counted.copies, "copy_bytes": counted.bytes}
    dist.barrier()
    row.close()
    return found


def _join() -> None:
    from avgpipe.ranks.rendezvous import join

    torch.set_num_threads(1)
    join(TIMEOUT_S, "gloo")


def _transformer(pipelines: int) -> tuple[Any, list[nn.Module], Any]:
    from avgpipe.plan import Plan
    from benchmarks.common.rows import Task
    from benchmarks.overlap.models import MODELS, VOCABULARY, loss

    shape = MODELS["transformer"]
    tokens = torch.randint(VOCABULARY, (BATCH, shape.length + 1), generator=torch.Generator().manual_seed(0))
    task = Task(
        tokens[:, :-1].contiguous(),
        tokens[:, 1:].contiguous(),
        loss,
        lambda params: torch.optim.AdamW(params, lr=3e-4, fused=True),
    )
    layers = shape.layers()
    plan = Plan(RANKS, pipelines, PARTS, partition=[_CUT], warmup_rounds=0)
    return task, layers, plan


_CUT = 12  # of the transformer's 18 layers: near balance, as benchmarks.overlap.real finds


class _Counted:
    """Counts the copies that this process takes from now on, and for how long each holds it up."""

    def __init__(self) -> None:
        from avgpipe.checkpoint.snapshot import Snapshot

        self.copies = self.bytes = 0
        self.seconds: list[float] = []
        begin, copy, spent_s = Snapshot.begin, Snapshot._copy, [0.0]

        def beginning(snapshot: Snapshot, model: Any, worker: Any, batches: int, done: Any) -> None:
            def counting() -> None:
                self.copies += 1
                if self.copies < 4:  # the first ones lack states that the optimizer has not made yet
                    text, *parts = snapshot.packed()
                    self.bytes = len(text) + sum(part.nbytes for part in parts)
                done()

            begin(snapshot, model, worker, batches, counting)

        def copying(snapshot: Snapshot, *part: Any) -> None:
            start, before = time.perf_counter(), self.copies
            copy(snapshot, *part)
            spent_s[0] += time.perf_counter() - start
            if self.copies > before:
                self.seconds.append(spent_s.pop())
                spent_s.append(0.0)

        Snapshot.begin, Snapshot._copy = beginning, copying  # type: ignore[method-assign, assignment]


def _measure(
    task: Any, modules: list[nn.Module], plan: Any, every_s: list[float], rounds: int, seconds: float
) -> dict[str, Any]:
    from avgpipe.measure.tune import seconds_per_batch
    from avgpipe.ranks.process import progress
    from benchmarks.common.rows import OurRow

    _join()
    ways: list[float | None] = [None, *every_s]
    names = ["without" if s is None else f"copies_every_s={s:g}" for s in ways]
    rows = [
        OurRow(name, task, modules, plan, timeout_s=TIMEOUT_S, extensions=kept(s))
        for name, s in zip(names, ways)
    ]
    counted = _Counted()
    found: list[dict[str, Any]] = [
        {"name": row.name, "every_s": s, "seconds": [], "copies": []} for row, s in zip(rows, ways)
    ]
    progress("warming up")
    for row in rows:
        warm_s = seconds_per_batch(row.losses, row.pipelines, 4)
    batches = torch.tensor([max(4, math.ceil(seconds / warm_s))])
    dist.broadcast(batches, 0)  # all must train alike
    for number in range(rounds):
        for row, samples in zip(rows, found):
            dist.barrier()
            progress(f"round {number + 1} of {rounds}: {row.name}")
            before = counted.copies
            samples["seconds"].append(seconds_per_batch(row.losses, row.pipelines, int(batches)))
            samples["copies"].append(counted.copies - before)
    dist.barrier()
    for row in rows:
        row.close()
    return {
        "rows": found,
        "batches": int(batches),
        "copy_bytes": counted.bytes,
        "take_s": statistics.median(counted.seconds) if counted.seconds else None,
    }


def _used_bytes() -> int:
    """Return what this process has resident; of memory that several share, as where copies arrive, its part."""
    status = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Pss:"))


# ---- all together ----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--every-s", type=lambda text: [float(s) for s in text.split(",")], default=[10.0, 30.0]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a way's turn, at least")
    parser.add_argument("--pipelines", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2])
    parser.add_argument("--state-mib", type=int, default=16, help="weights of an emulated stage")
    parser.add_argument(
        "--only", choices=("transformer", "emulated", "memory"), help="one of the three; default: all"
    )
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    asked = {name: getattr(arguments, name) for name in ("every_s", "rounds", "seconds")}
    wanted = [arguments.only] if arguments.only else ["transformer", "emulated", "memory"]
    if "emulated" in wanted:
        from avgpipe_lab.bench.namespaces import check_namespaces

        check_namespaces("a limited line")
    record: dict[str, Any] = {**asked, "state_mib": arguments.state_mib, "cases": [], "memory": []}
    from benchmarks.common.record import write_record

    def keep() -> None:  # after every case
        write_record("faults-copies", "what copies in memory cost", record, arguments.out)

    for name in wanted:
        for pipelines in arguments.pipelines if name != "emulated" else [2]:
            if name == "memory":
                record["memory"].append(_memory(pipelines, arguments.every_s[0]))
            else:
                record["cases"].append(_case(name, pipelines, asked, arguments.state_mib))
            keep()


def _case(name: str, pipelines: int, asked: dict[str, Any], state_mib: int) -> dict[str, Any]:
    from avgpipe.ranks.launch import run_on_ranks
    from avgpipe_lab.bench.namespaces import Network, network
    from benchmarks.common.record import say
    from benchmarks.common.schedules import summary

    turns = (asked["rounds"] + 1) * (1 + len(asked["every_s"]))
    given = {**asked, "pipelines": pipelines}
    ranks = RANKS
    hosts: AbstractContextManager[Network | None] = nullcontext()
    if name == "emulated":
        given["state_mib"], ranks, hosts = state_mib, STAGES, network(STAGES, RATE_BITS_PER_S)
    with hosts as net:
        options: dict[str, Any] = net.launching() if net is not None else {}
        limit_s = 120 + 6 * turns * asked["seconds"]
        found = run_on_ranks(f"{_HERE}:{name}", ranks, given, timeout_s=limit_s, say=say, **options)
    rows = [{**summary(row), **row} for row in found[0]["rows"]]
    pairs = [[b / a - 1 for a, b in zip(rows[0]["seconds"], row["seconds"])] for row in rows]
    for row, costs in zip(rows, pairs):
        row["cost"] = row["median_s"] / rows[0]["median_s"] - 1
        row["cost_of_pairs"] = statistics.median(costs)
        say(
            f"{name}, N = {pipelines}, {row['name']}: {row['median_s']:.4f} s, {100 * row['cost']:+.2f} %, "
            f"copies {row['copies']}"
        )
    each = {
        "copy_bytes": [rank["copy_bytes"] for rank in found],
        "take_s": [rank["take_s"] for rank in found],
    }
    return {"name": name, "pipelines": pipelines, "batches": found[0]["batches"], **each, "rows": rows}


def _memory(pipelines: int, every_s: float, batches: int = 32) -> dict[str, Any]:
    """Compare what processes have resident, without and with copies."""
    from avgpipe.ranks.launch import run_on_ranks

    def measured(every_s: float | None) -> list[dict[str, int]]:
        given = {"pipelines": pipelines, "every_s": every_s, "batches": batches}
        return run_on_ranks(f"{_HERE}:memory", RANKS, given, timeout_s=600)

    without, with_copies = measured(None), measured(every_s)
    own = [rank["copy_bytes"] for rank in with_copies]
    rows = [
        {
            "rank": rank,
            "without_bytes": without[rank]["used_bytes"],
            "with_bytes": with_copies[rank]["used_bytes"],
            "copy_bytes": own[rank],
            # Two copies of its own, two of the process before.
            "computed_bytes": 2 * own[rank] + 2 * own[rank - 1],
            "copies": with_copies[rank]["copies"],
        }
        for rank in range(RANKS)
    ]
    return {"pipelines": pipelines, "every_s": every_s, "batches": batches, "ranks": rows}


if __name__ == "__main__":
    main()
