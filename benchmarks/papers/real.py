"""Question: on two real processes with a limited line between them, which system is the first at a target?

    AVGPIPE_DATA=DIR python -m benchmarks.papers.real --out FILE [--only gnmt] [--ways gpipe,avgpipe N=2] [--seeds 0]

As root. All is real: the workloads of ``benchmarks.statistics.run`` train in two processes of one thread, each in a
network namespace of its own; nothing sleeps. Two cores are far slower than the devices of the papers' cluster, so the
line is slowed down as much: it carries what a cut hands on in that share of the time which a sample's forward and
backward take on one device as 1 Gbit/s does beside a V100 (``share_of``). A line of FILE is a run, with its validation
losses by samples and by seconds of training.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch

import avgpipe
from avgpipe.links.message import tensors_of
from avgpipe.ranks.launch import run_on_ranks
from avgpipe.ranks.process import progress
from avgpipe.ranks.rendezvous import join
from avgpipe.runtime.batch import sample_count
from avgpipe.runtime.model import Model, layers_of
from benchmarks.common.namespaces import check_namespaces, network
from benchmarks.common.record import say
from benchmarks.papers.cluster import BETWEEN_BYTES_PER_S, V100
from benchmarks.papers.models import MODELS
from benchmarks.statistics.run import CASES, WARM_UP, Way, built, known, train

STAGES, TRIES = 2, 5
LEAST = 0.15  # of the work, on each side of a cut
# Of each workload the paper's model whose ratio of computing to communication it gets; BERT's where it has none.
LIKE = {"gnmt": "gnmt", "awd-lstm": "awd-lstm", "gpt": "bert", "resnet": "bert"}

WAYS = {
    "data-parallel": Way.of(system="data-parallel", schedule="1f1b", stages=1, replication=(STAGES,)),
    "gpipe": Way.of(schedule="all-forward-all-backward"),
    "dapple": Way.of(schedule="1f1b"),
    "zero-bubble-h1": Way.of(schedule="zero-bubble-h1"),
    "pipedream": Way.of(schedule="pipedream", micro_batches=1, weights="stash"),
    "pipedream-2bw": Way.of(schedule="pipedream-2bw"),
    "avgpipe, N = 1": Way.of(),
    "avgpipe, N = 2": Way.of(warmup=WARM_UP, pipelines=2),
    "avgpipe, N = 2, 16 bits": Way.of(warmup=WARM_UP, narrow=True, pipelines=2),
    "avgpipe, N = 4, 16 bits": Way.of(warmup=WARM_UP, narrow=True, pipelines=4),
    "avgpipe, 2bw predicted, 16 bits": Way.of(
        warmup=WARM_UP, narrow=True, schedule="pipedream-2bw", correction="predicted"
    ),
    "avgpipe, 2bw error feedback, 16 bits": Way.of(
        warmup=WARM_UP, narrow=True, schedule="pipedream-2bw", correction="error-feedback"
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
    options: dict[str, Any] = {"loss_fn": made.loss_fn, "loss_weight": made.loss_weight, "optimizer": _still}
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


def worker(workload: str, way: str, seed: int, batches: int) -> dict[str, Any]:
    """A rank."""
    torch.set_num_threads(1)
    join(120, "gloo")
    progress(f"{workload}, {way}, seed {seed}")
    options: dict[str, Any] = {} if "stages" in dict(WAYS[way].plan) else {"stages": STAGES}
    return train(workload, WAYS[way], seed, batches, **options)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--ways", default=";".join(WAYS), help="separated by semicolons")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--batches", type=int, default=0, help="of a run, to try it")
    asked = parser.parse_args()
    check_namespaces("a limited line")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for workload in asked.only.split(","):
        line = rate_of(workload)
        say(f"{workload}: {line}")
        for seed, way in product(map(int, asked.seeds.split(",")), asked.ways.split(";")):
            if (workload, way, seed) in known(asked.out):
                continue
            with network(STAGES, line["bits_per_s"]) as net:
                asked_of = {"workload": workload, "way": way, "seed": seed, "batches": asked.batches}
                found = run_on_ranks(
                    "benchmarks.papers.real:worker", STAGES, asked_of, timeout_s=3600, **net.launching()
                )
            with asked.out.open("a") as file:
                file.write(json.dumps({**asked_of, "line": line, **found[0]}) + "\n")
            say(f"{workload}, {way}, seed {seed}: {found[0]['losses'][-1]}")


if __name__ == "__main__":
    main()
