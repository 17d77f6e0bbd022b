"""Question: how many samples does each way of training need to a target, beside one pipeline's?

    AVGPIPE_DATA=DIR python -m benchmarks.statistics.run --out FILE [--only gpt,resnet] [--ways "one;N = 2"] [--seeds 0]

Real training of the papers' workloads at ``small``, cut short, and of a model of characters, all in one process of one
stage: what is learnt depends on a gradient's delay and on who shares what, not on where stages run. Every run of a
workload sees the same samples in the same order and is validated twenty times. A line of FILE is a run; --out adds to
those that are there and leaves out what they have, so several of these programs may work at it, each at workloads of
its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

import avgpipe
from avgpipe.files import read_lines
from avgpipe.model.layers import layers_of
from avgpipe.tasks import BuildOptions, Workload, build_workload
from avgpipe_lab.workloads.recipe import Recipe
from benchmarks.common.record import say
from benchmarks.statistics import characters
from benchmarks.statistics.samples import TIMES

VALIDATIONS, VALID_BATCHES = 20, 12
STAGES = 6  # where what is learnt depends on them; fewer where there are fewer layers
MICRO_BATCHES = 4  # of a batch, whoever shares it: batch norms see as many samples at once


class Case(NamedTuple):
    """A workload, its data, and how many batches a run has. Without a module it is that of ``characters``."""

    data: str
    batches: int
    module: str
    lr: float | None = None  # the best for one pipeline, where that is not the preset's
    muon_lr: float | None = None
    longer: float = 1.0  # factor on the length of runs of several pipelines, at a constant learning rate


CASES = {
    "gpt": Case("wikitext-2", 500, "gpt", lr=0.0028, muon_lr=0.008),
    "awd-lstm": Case("wikitext-2", 340, "awd_lstm", lr=0.014, muon_lr=0.014),
    "gnmt": Case("multi30k-en-de", 440, "gnmt", lr=0.0112, muon_lr=0.016),
    "resnet": Case("cifar10-jpeg", 1900, "images", muon_lr=0.02),
    "char": Case("multi30k-en-de", 500, "", longer=1.2),
}


@dataclass(frozen=True)
class Way:
    """A way of training.

    Attributes:
        parts: of a batch, each of which makes an update, with the rate for so small a batch.
        lr: what the rate is multiplied with.
        warmup: of the batches, at the beginning, in which the pipelines wait for each other; None: as many as the
            plan has by default.
        narrow: whether all that goes from layer to layer, and back, is rounded to bfloat16, as if each were a stage.
        plan: options of the plan.
    """

    parts: int = 1
    lr: float = 1.0
    optimizer: str | None = None
    warmup: float | None = 0.0
    narrow: bool = False
    plan: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(
        cls,
        parts: int = 1,
        lr: float = 1.0,
        optimizer: str | None = None,
        warmup: float | None = 0.0,
        narrow: bool = False,
        **plan: Any,
    ) -> Way:
        return cls(parts, lr, optimizer, warmup, narrow, tuple(plan.items()))


def _late(delay: int, correction: str | None) -> dict[str, Any]:
    """So many updates behind: forwards that run ahead of one stage's backward."""
    return {"schedule": "pipedream", "advance": delay, "correction": correction}


WARM_UP = 0.2
WAYS = {
    "one": Way.of(),
    "N = 2, default plan": Way.of(warmup=None, pipelines=2),
    "N = 4, default plan": Way.of(warmup=None, pipelines=4),
    "N = 2, 5 % warm-up": Way.of(warmup=0.05, pipelines=2),
    "N = 4, 5 % warm-up": Way.of(warmup=0.05, pipelines=4),
    "N = 2": Way.of(pipelines=2, rule="mean-gradient"),
    "N = 4": Way.of(pipelines=4, rule="mean-gradient"),
    "N = 2, warm-up": Way.of(warmup=WARM_UP, pipelines=2, rule="mean-gradient"),
    "N = 4, warm-up": Way.of(warmup=WARM_UP, pipelines=4, rule="mean-gradient"),
    **{
        f"{name}, {what}, warm-up": Way.of(parts, warmup=WARM_UP, **_late(parts - 1, correction))
        for name, parts in (("halves", 2), ("quarters", 4))
        for what, correction in (("predicted", "predicted"), ("error feedback", "error-feedback"))
    },
    "N = 2, avgpipe": Way.of(pipelines=2, rule="avgpipe", alpha=1.0),
    "N = 4, avgpipe": Way.of(pipelines=4, rule="avgpipe", alpha=1.0),
    "halves": Way.of(2),
    "quarters": Way.of(4),
    "halves, delay 1": Way.of(2, **_late(1, None)),
    "halves, predicted": Way.of(2, **_late(1, "predicted")),
    "halves, error feedback": Way.of(2, **_late(1, "error-feedback")),
    "quarters, delay 3": Way.of(4, **_late(3, None)),
    "quarters, predicted": Way.of(4, **_late(3, "predicted")),
    "quarters, error feedback": Way.of(4, **_late(3, "error-feedback")),
    "2bw": Way.of(schedule="pipedream-2bw"),
    "2bw, predicted": Way.of(schedule="pipedream-2bw", correction="predicted"),
    "2bw, error feedback": Way.of(schedule="pipedream-2bw", correction="error-feedback"),
    "2bw, nesterov": Way.of(schedule="pipedream-2bw", correction="nesterov"),
    "muon": Way.of(optimizer="muon"),
    "muon, 2bw": Way.of(optimizer="muon", schedule="pipedream-2bw"),
    "muon, 2bw, error feedback": Way.of(
        optimizer="muon", schedule="pipedream-2bw", correction="error-feedback"
    ),
    "muon, 2bw, warm-up": Way.of(optimizer="muon", warmup=WARM_UP, schedule="pipedream-2bw"),
    "muon, 2bw, error feedback, warm-up": Way.of(
        optimizer="muon", warmup=WARM_UP, schedule="pipedream-2bw", correction="error-feedback"
    ),
    "muon, N = 4": Way.of(optimizer="muon", pipelines=4, rule="mean-gradient"),
    "one, 16 bits": Way.of(narrow=True),
    "N = 2, 16 bits": Way.of(pipelines=2, rule="mean-gradient", narrow=True),
    "halves, predicted, 16 bits": Way.of(2, narrow=True, **_late(1, "predicted")),
    # Whole batches, as many in flight as there are stages.
    "pipedream": Way.of(schedule="pipedream", weights="stash", micro_batches=1, stages=STAGES),
    "ea-pipe": Way.of(rule="easgd", pipelines=STAGES, micro_batches=1, batch="per-pipeline"),
}


def way_named(name: str) -> Way:
    """Return a way of ``WAYS``, with ", lr x 1.4" after its name at 1.4 times its rate. KeyError for another."""
    base, _, times = name.partition(TIMES)
    return replace(WAYS[base], lr=WAYS[base].lr * float(times or 1))


@cache
def built(name: str, seed: int, parts: int) -> tuple[Workload, Recipe]:
    """Read and made once for all ways that have batches as large."""
    case = CASES[name]
    data = Path(os.environ["AVGPIPE_DATA"]) / case.data
    if not case.module:
        recipe = characters.RECIPE
        size = recipe.batch_size // parts
        return characters.built(data, seed, size), replace(recipe, batch_size=size)
    module: Any = importlib.import_module(f"avgpipe.tasks.{case.module}")
    recipe = module.PRESETS[name]["small"].training
    size = recipe.batch_size // parts
    workload = build_workload(name, preset="small", data=data, seed=seed, batch_size=size)
    return workload, replace(recipe, batch_size=size)


def train(name: str, way: Way, seed: int, batches: int = 0, **on_ranks: Any) -> dict[str, Any]:
    """Train, and return validation losses by samples, with the seconds of training until then.

    "busy": the share of the time after the last validation but one in which each worker computed.

    batches: of the run, whole ones, validated at the half and at the end; 0: as many as the workload has here.
    on_ranks: options of the plan, where several processes call this alike; between them bfloat16 really travels, over
        their network, even where they could share memory.
    """
    case = CASES[name]
    workload, recipe = built(name, seed, way.parts)
    muon, validations = way.optimizer == "muon", 2 if batches else VALIDATIONS
    if way.optimizer:
        recipe = replace(recipe, optimizer=way.optimizer)
    smaller = way.parts if recipe.optimizer in ("sgd", "nt-asgd") else way.parts**0.5
    base = (case.muon_lr if muon else case.lr) or recipe.lr
    recipe = replace(recipe, lr=base * way.lr / smaller, lr_scaling="none", epochs=1000)
    longer = 1.0 if batches or dict(way.plan).get("pipelines", 1) == 1 else case.longer
    batches = (batches or case.batches) * way.parts
    options = BuildOptions(max_batches=batches)
    asked = {"micro_batches": MICRO_BATCHES // way.parts, **dict(way.plan), **on_ranks}
    if way.warmup is not None:
        asked["warmup_rounds"] = round(way.warmup * batches)
    batches, validations = round(longer * batches), round(longer * validations)
    layers, rounds = layers_of(workload.layers), way.narrow and not on_ranks
    if "stages" in asked:
        asked["stages"] = min(asked["stages"], len(layers))
    plan = avgpipe.Plan(**asked)
    step = plan.batches_per_round
    places = sorted({batches * (n + 1) // validations // step * step for n in range(validations)} - {0})
    losses, seconds = [], 0.0
    with (
        narrowed(layers if rounds else ()),
        avgpipe.Pipeline(
            layers if rounds else workload.layers,
            plan,
            loss_fn=workload.loss_fn,
            extensions=[
                avgpipe.Source(loss_weight=workload.loss_weight),
                avgpipe.Precision(wire_dtype=torch.bfloat16 if way.narrow and not rounds else None),
            ],
            optimizer=recipe.optimizer_for(options, workload.layers),
            lr_scheduler=recipe.lr_scheduler_for(10**9, options),
            clip_grad_norm=recipe.clip_grad_norm,
            link="gloo" if on_ranks else "auto",
            seed=seed,
        ) as pipeline,
    ):
        source = endless(workload)
        valid = list(islice(workload.valid_batches(), VALID_BATCHES * way.parts))
        for count in (b - a for a, b in pairwise([0, *places])):
            began = time.perf_counter()
            deque(pipeline.train(islice(source, count)), maxlen=0)
            pipeline.drain()
            seconds += time.perf_counter() - began
            losses.append((pipeline.batches * recipe.batch_size, pipeline.evaluate(valid).loss, seconds))
        distances = pipeline.distances()
        last = pipeline.timeline().window(pipeline.batches - count, pipeline.batches)
    apart = [d / distances.norm for d in distances.to_reference]
    return {
        "lr": recipe.lr,
        "losses": losses,
        "seconds": seconds,
        "apart": apart,
        "busy": last.worker_busy_fraction,
        "plan": json.loads(plan.to_json()),
    }


class _Narrow(torch.autograd.Function):
    """A tensor as it is received after it has travelled as bfloat16, and its gradient likewise."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.bfloat16().to(grad.dtype)


@contextmanager
def narrowed(layers: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Round what these layers, but the last one, hand on."""

    def round_all(layer: Any, inputs: Any, outputs: Any) -> Any:
        return tree_map_only(
            torch.Tensor, lambda x: _Narrow.apply(x) if x.is_floating_point() else x, outputs
        )

    hooks = [layer.register_forward_hook(round_all) for layer in list(layers)[:-1]]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def endless(workload: Workload) -> Iterator[Any]:
    epoch = 0
    while True:
        yield from workload.train_batches(epoch)
        epoch += 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--ways", default=";".join(WAYS), help="separated by semicolons")
    parser.add_argument("--seeds", default="0,1,2")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in map(int, asked.seeds.split(",")):
        for name in asked.only.split(","):
            for way in asked.ways.split(";"):
                if (name, way, seed) in known(asked.out):
                    continue
                found = {"workload": name, "way": way, "seed": seed, **train(name, way_named(way), seed)}
                with asked.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                last = found["losses"][-1][1]
                say(f"{name}, {way}, seed {seed}: {last:.4f} after {found['seconds']:.0f} s")
            built.cache_clear()


def known(path: Path) -> set[tuple[str, str, int]]:
    if not path.is_file():
        return set()
    return {(row["workload"], row["way"], row["seed"]) for row in read_lines(path)}


if __name__ == "__main__":
    main()
