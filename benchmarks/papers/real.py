"""Question: on two real processes with a limited line between them, which system is the first at a target?

    AVGPIPE_DATA=DIR python -m benchmarks.papers.real [--only gnmt] [--ways "gpipe;dapple"] [--seeds 0] [--batches 3]

As root. All is real: the workloads of ``benchmarks.statistics.run`` train in two processes of one thread, each in a
network namespace of its own; nothing sleeps. Two cores are far slower than the devices of the papers' cluster, so the
line is slowed down as much: it carries what a cut hands on in that share of the time which a sample's forward and
backward take on one device as 1 Gbit/s does beside a V100 (``share_of``).

Every system gets the plan that the library's forecast finds best for it, from one profile of the workload: the cut, the
number of micro-batches, and how far forwards run ahead where that is open.

The record has the validation losses of each run by samples and by seconds of training, and is written after each:
``--out`` goes on where it ended. ``--batches``: for what would take hours, whose time to the target is then reckoned
from that of a batch in the second half of so many, with the samples of a system whose gradients are not late.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch

import avgpipe
from avgpipe import Plan
from avgpipe.files import read_json
from avgpipe.links.link import tensors_of
from avgpipe.measure.forecast import Forecast, OnCluster
from avgpipe.model.batch import sample_count
from avgpipe.model.layers import layers_of
from avgpipe.model.model import Model
from avgpipe.planning import LinkProfile, Profile
from avgpipe.planning.cluster import Cluster
from avgpipe.planning.cuts import CutSearch
from avgpipe.ranks.launch import run_on_ranks
from avgpipe.ranks.process import progress
from avgpipe.ranks.rendezvous import join
from avgpipe.tasks import BuildOptions
from avgpipe_lab.bench.namespaces import check_namespaces, network
from benchmarks.common.record import say, write_record
from benchmarks.papers.cluster import BETWEEN_BYTES_PER_S, V100
from benchmarks.papers.models import MODELS
from benchmarks.statistics.run import WARM_UP, Way, built, train

STAGES, TRIES = 2, 5
_TIMEOUT_S = 3600
LATENCY_S = 1e-4  # of a message between two processes
PROFILING_S = 20.0
MICRO_BATCHES = (4, 8, 16)  # that are tried
OWN_MICRO_BATCHES = {"resnet": (4,)}  # as its batch norms learn otherwise from smaller ones
ADVANCES = (0, 1, 2, 4)
LEAST = 0.15  # of the work, on each side of a cut
# Of each workload the paper's model whose ratio of computing to communication it gets; BERT's where it has none.
LIKE = {"gnmt": "gnmt", "awd-lstm": "awd-lstm", "gpt": "bert", "resnet": "bert"}

WAYS = {
    "data-parallel": Way.of(system="data-parallel", schedule="1f1b", stages=1, replication=(STAGES,)),
    "gpipe": Way.of(schedule="all-forward-all-backward"),
    "dapple": Way.of(schedule="1f1b"),
    "zero-bubble-h1": Way.of(schedule="zero-bubble-h1"),
    "zero-bubble-v": Way.of(schedule="zero-bubble-v", stages=2 * STAGES),
    "zero-bubble-h1, 16 bits": Way.of(narrow=True, schedule="zero-bubble-h1"),
    "zero-bubble-v, 16 bits": Way.of(narrow=True, schedule="zero-bubble-v", stages=2 * STAGES),
    "pipedream": Way.of(schedule="pipedream", micro_batches=1, weights="stash"),
    "pipedream-2bw": Way.of(schedule="pipedream-2bw"),
    "avgpipe, N = 1, 16 bits": Way.of(narrow=True),
    "avgpipe, N = 2": Way.of(warmup=WARM_UP, pipelines=2),
    "avgpipe, N = 2, 16 bits": Way.of(warmup=WARM_UP, narrow=True, pipelines=2),
    "avgpipe, N = 2, v, 16 bits": Way.of(
        warmup=WARM_UP, narrow=True, pipelines=2, schedule="zero-bubble-v", stages=2 * STAGES
    ),
    "avgpipe, 2bw predicted, 16 bits": Way.of(
        warmup=WARM_UP, narrow=True, schedule="pipedream-2bw", correction="predicted"
    ),
}


def share_of(workload: str) -> float:
    """How long a line takes for a sample's activation at a cut, over its forward and backward on a device.

    Of the cuts with some work on both sides, the one that hands on least.
    """
    layers = MODELS[LIKE[workload]].layers
    flops = [sum(product.flops for product in layer.products) for layer in layers]
    before = list(accumulate(flops))
    inner = [
        layer.cut_bytes for layer, done in zip(layers, before) if LEAST <= done / before[-1] <= 1 - LEAST
    ]
    return (min(inner) / BETWEEN_BYTES_PER_S) / V100.seconds(3 * before[-1])


def sizes_of(workload: str) -> tuple[float, float]:
    """Seconds of a sample's forward and backward in one process, and bytes that the cut hands on of it."""
    made, _ = built(workload, 0, 1)
    inputs, targets = next(iter(made.train_batches(0)))
    options: dict[str, Any] = {
        "loss_fn": made.loss_fn,
        "optimizer": _still,
        "extensions": [avgpipe.Source(loss_weight=made.loss_weight)],
    }
    seconds = []
    with avgpipe.Pipeline(made.layers, avgpipe.Plan(micro_batches=4), **options) as pipeline:
        for _ in range(TRIES):
            began = time.perf_counter()
            pipeline.step(inputs, targets)
            seconds.append(time.perf_counter() - began)
    layers = layers_of(made.layers)
    value = inputs
    with torch.no_grad():
        for layer in layers[: Model.cut(made.layers, layers, STAGES, None).bounds[1]]:
            value = layer(value)
    samples = sample_count(inputs)
    return min(seconds[1:]) / samples, sum(t.nbytes for t in tensors_of(value)) / samples


def _still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def rate_of(workload: str) -> dict[str, float]:
    """Return the rate of the line, and what it was reckoned from."""
    sample_s, cut_bytes = sizes_of(workload)
    share = share_of(workload)
    rate = 8 * cut_bytes / (share * sample_s)
    return {"sample_s": sample_s, "cut_bytes": cut_bytes, "share": share, "bits_per_s": rate}


def plans_of(workload: str, bits_per_s: float) -> dict[str, dict[str, Any]]:
    """Return for each way what is forecast to be the fastest of what it leaves open, and the seconds of its batches."""
    made, recipe = built(workload, 0, 1)
    inputs, targets = next(iter(made.train_batches(0)))
    count = sample_count(inputs)
    tried = OWN_MICRO_BATCHES.get(workload, MICRO_BATCHES)
    line = LinkProfile(LATENCY_S, bits_per_s / 8)
    profile = avgpipe.profile(
        made.layers,
        inputs,
        target=targets,
        loss_fn=made.loss_fn,
        optimizer=recipe.optimizer_for(BuildOptions(), made.layers),
        clip_grad_norm=recipe.clip_grad_norm,
        micro_batch_sizes=sorted({max(1, count // m) for m in (1, *tried, 2 * max(tried))}),
        link=line,
        budget_s=PROFILING_S,
    )
    profile = replace(profile, reduction=line)
    narrow = replace(profile, link=LinkProfile(LATENCY_S, bits_per_s / 4))
    plans = {}
    for name, way in WAYS.items():
        of_way = narrow if way.narrow else profile
        found = [_best(of_way, plan, count) for plan in _open_to(way, tried)]
        best = min(found, key=lambda forecast: forecast.batch_s)
        chosen = best.plan
        plans[name] = {
            "stages": chosen.stages,
            "micro_batches": chosen.micro_batches,
            "partition": chosen.partition,
            "advance": chosen.advance,
            "forecast_s": best.batch_s,
        }
    return plans


def _open_to(way: Way, micro_batches: tuple[int, ...]) -> Iterator[Plan]:
    """The plans of a way, but for the cut."""
    asked = dict(way.plan)
    counts = (asked["micro_batches"],) if "micro_batches" in asked else micro_batches
    ahead = () if "schedule" in asked else ADVANCES
    for count, advance in product(counts, ahead or (None,)):
        yield Plan(**{"stages": STAGES, **asked, "micro_batches": count, "advance": advance})


def _best(profile: Profile, plan: Plan, batch_size: int) -> Forecast:
    on = OnCluster(profile, plan, batch_size, Cluster.like(profile, STAGES))
    return on.forecast(CutSearch(on, None).best()[0])


def worker(workload: str, way: str, seed: int, batches: int, options: dict[str, Any]) -> dict[str, Any]:
    """A rank. options: of the plan."""
    torch.set_num_threads(1)
    join(120, "gloo")
    progress(f"{workload}, {way}, seed {seed}")
    return train(workload, WAYS[way], seed, batches, **options)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(LIKE))
    parser.add_argument("--ways", default=";".join(WAYS), help="separated by semicolons")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument(
        "--batches", type=int, default=0, help="of a run; default: as many as the workload has"
    )
    parser.add_argument("--out", help="file of the record, which is gone on with if it is there")
    asked = parser.parse_args()
    check_namespaces("a limited line")
    path = Path(asked.out) if asked.out else None
    before = read_json(path) if path is not None and path.is_file() else {}
    lines, runs = before.get("lines", {}), before.get("runs", [])
    known = {(run["workload"], run["way"], run["seed"]) for run in runs}
    for workload in asked.only.split(","):
        if workload not in lines:
            line = rate_of(workload)
            lines[workload] = {**line, "plans": plans_of(workload, line["bits_per_s"])}
        line = lines[workload]
        say(f"{workload}: {line}")
        for seed, way in product(map(int, asked.seeds.split(",")), asked.ways.split(";")):
            if (workload, way, seed) in known:
                continue
            asked_of = {"workload": workload, "way": way, "seed": seed, "batches": asked.batches}
            plan = dict(line["plans"][way])
            batch_s = plan.pop("forecast_s")
            with network(STAGES, line["bits_per_s"]) as net:
                found = run_on_ranks(
                    "benchmarks.papers.real:worker",
                    STAGES,
                    {**asked_of, "options": plan},
                    timeout_s=_TIMEOUT_S,
                    **net.launching(),
                )
            whole = not asked.batches
            runs.append({**asked_of, "whole": whole, **found[0]})
            say(f"{workload}, {way}, seed {seed}, forecast {batch_s:.3f} s: {found[0]}")
            question = "time to a target on two real processes with a limited line"
            write_record("papers-real", question, {"lines": lines, "runs": runs}, asked.out)


if __name__ == "__main__":
    main()
