"""Question: how far are predicted from measured times per batch on an emulated cluster with limited lines?

    OMP_NUM_THREADS=1 python -m benchmarks.tuning.emulated            (as root: it makes network namespaces)

Emulated: K workers on the cores of this machine, each in a network namespace whose line out is limited; stages compute
nothing and occupy their worker for given times, each for another. One plan, 1F1B with M = 8, is run first: how long its
actions occupied the workers, and how much that varied, is the profile, from which the tuner's forecast predicts all the
other plans. Then these run, in turn, round after round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from typing import Any

FORWARD_S = (10e-3, 8e-3, 12e-3, 9e-3, 11e-3, 10e-3)  # of the stages; backwards take twice as long
ACTIVATION_BYTES = 2**20
SETTINGS = ((1, 1), (1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (3, 4), (3, 8))  # N, M
BASE_MICRO_BATCHES = 8
_LIMIT_S = 900.0


def main() -> None:
    from avgpipe.ranks.launch import run_on_ranks
    from avgpipe_lab.bench.namespaces import check_namespaces, network
    from benchmarks.common.record import write_record

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=lambda text: [int(k) for k in text.split(",")], default=[2, 4, 6])
    parser.add_argument("--rate", type=float, default=1e9, help="bits a second of each worker's line")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    check_namespaces("this benchmark")
    settings: list[dict[str, Any]] = []
    print("| K | N | M | predicted ms | measured ms | error |\n|---|---|---|---|---|---|")
    for workers in arguments.workers:
        asked = {"workers": workers, "rounds": arguments.rounds}
        with network(workers, arguments.rate) as net:
            found = run_on_ranks(
                "benchmarks.tuning.emulated:worker", workers, asked, timeout_s=_LIMIT_S, **net.launching()
            )[0]
        for row in compared(workers, found):
            settings.append(row)
            print(
                f"| {workers} | {row['pipelines']} | {row['micro_batches']} | {1e3 * row['predicted_s']:.1f} | "
                f"{1e3 * row['measured_s']:.1f} | {100 * row['error']:+.1f} % |",
                flush=True,
            )
    errors = [abs(row["error"]) for row in settings]
    print(
        f"median error {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %, {len(errors)}"
    )
    record = {"emulated": True, "rate_bits_per_s": arguments.rate, "settings": settings}
    question = "predicted against measured time per batch on an emulated cluster"
    write_record("tuning-emulated", question, record, arguments.out)


def compared(workers: int, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Each setting with its forecast."""
    from avgpipe.measure.forecast import OnCluster
    from avgpipe.plan import Plan
    from avgpipe.planning.cluster import Cluster

    profile = profile_of(found)
    cluster = Cluster.like(profile, workers)
    rows = []
    for (pipelines, micro_batches), samples in zip(SETTINGS, found["seconds"]):
        plan = Plan(
            stages=workers,
            pipelines=pipelines,
            micro_batches=micro_batches,
        )
        cut = tuple(range(1, workers))
        predicted_s = OnCluster(profile, plan, micro_batches, cluster).forecast(cut).batch_s
        measured_s = statistics.median(samples)
        rows.append(
            {
                "workers": workers,
                "pipelines": pipelines,
                "micro_batches": micro_batches,
                "predicted_s": predicted_s,
                "measured_s": measured_s,
                "samples_s": samples,
                "error": predicted_s / measured_s - 1,
                "profile": json.loads(profile.to_json()),
            }
        )
    return rows


def profile_of(found: dict[str, Any]) -> Any:
    """A layer for each stage, a micro-batch of one sample."""
    from avgpipe.planning.profile import LayerProfile, LinkProfile, Profile

    layers = tuple(
        LayerProfile(
            name=f"stage {k}",
            forward_s=(forward_s,),
            backward_s=(backward_s,),
            input_backward_s=(backward_s / 2,),
            held_bytes=(ACTIVATION_BYTES,),
            output_bytes=(ACTIVATION_BYTES,),
            parameter_bytes=64,
            update_s=update_s,
        )
        for k, (forward_s, backward_s, update_s) in enumerate(
            zip(*(found["actions"][kind] for kind in "FBU"))
        )
    )
    link = LinkProfile(found["latency_s"], found["line_bytes_per_s"])
    return Profile("emulated", "emulated", (1,), layers, link=link, jitter=found["jitter"])


def worker(workers: int, rounds: int) -> dict[str, Any]:
    """A rank: the line, the plan that is the profile, and all settings in turn."""

    import torch
    import torch.distributed as dist

    from avgpipe.measure.tune import seconds_per_batch
    from avgpipe.ranks.rendezvous import join
    from avgpipe_lab.bench.schedules import precise_sleeps
    from benchmarks.common.emulated import action_costs, plain_bytes_per_s
    from benchmarks.common.rows import PassingRow, measure_rows

    torch.set_num_threads(1)
    precise_sleeps()
    join(_LIMIT_S, "gloo")
    line = plain_bytes_per_s()
    latency_s = _latency_s()
    base = _row("base", workers, BASE_MICRO_BATCHES, schedule="1f1b")
    seconds_per_batch(base.losses, base.pipelines, 12)
    timeline = base.pipeline.timeline()
    actions = action_costs(timeline, first_batch=2)
    jitter = _jitter(timeline)
    dist.barrier()
    base.close()
    rows = [PassingRow(partial(_row, f"N = {n}, M = {m}", workers, m, pipelines=n)) for n, m in SETTINGS]
    measured = measure_rows(rows, rounds, 4)
    return {
        "line_bytes_per_s": line,
        "latency_s": latency_s,
        "actions": actions,
        "jitter": jitter,
        "seconds": [row.seconds for row in measured],
    }


def _row(name: str, workers: int, micro_batches: int, **plan: Any) -> Any:
    """Over the network: "auto" would take the memory that the emulated hosts share."""
    from benchmarks.common.rows import OurRow, our_plan

    made = our_plan(workers, micro_batches, **plan)
    return OurRow(name, _task(micro_batches), _stages(workers), made, link="gloo")


def _stages(workers: int) -> list[Any]:
    from avgpipe_lab.bench.schedules import EmulatedStage

    return [EmulatedStage(s, 2 * s) for s in FORWARD_S[:workers]]


def _task(micro_batches: int) -> Any:
    import torch

    from avgpipe_lab.bench.schedules import mean_loss
    from benchmarks.common.rows import Task

    return Task(
        inputs=torch.ones(micro_batches, ACTIVATION_BYTES // 4),
        targets=torch.zeros(micro_batches, 1),
        loss_fn=mean_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    )


def _latency_s() -> float:
    """Half of a small message's way to a neighbour and back."""
    import torch
    import torch.distributed as dist

    rank, value, samples = dist.get_rank(), torch.zeros(1), []
    for _ in range(30):
        dist.barrier()
        begin = time.perf_counter()
        if rank == 0:
            dist.send(value, 1)
            dist.recv(value, 1)
        elif rank == 1:
            dist.recv(value, 0)
            dist.send(value, 0)
        samples.append((time.perf_counter() - begin) / 2)
    return statistics.median(samples)


def _jitter(timeline: Any) -> float:
    """Of an action's time, standard deviation over mean, over all stages."""
    from avgpipe.timeline.timeline import occupations

    samples: dict[tuple[str, int], list[float]] = {}
    for action in occupations(timeline.events, ("send", "host", "average")):
        if action.batch >= 2 and action.kind in "FB":
            samples.setdefault((action.kind, action.stage), []).append(action.seconds)
    spreads = [statistics.pstdev(s) / statistics.fmean(s) for s in samples.values() if len(s) > 1]
    return min(0.25, statistics.median(spreads))


if __name__ == "__main__":
    main()
