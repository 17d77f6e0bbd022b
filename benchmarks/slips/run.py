"""Question: what does an ordinary user do wrong or unusual, and does avgpipe then train something else in silence?

    OMP_NUM_THREADS=1 python -m benchmarks.slips.run [--all] [--count 60] [--seed 0] [--slips REGEX] [--models REGEX]

A slip changes a training script of one of eight small models. Each script trains in a plain loop on one device and by
five plans; losses, weights, buffers and the loss in evaluation are compared. A seed draws which slips are tried in
which models, and what a slip leaves open: places, sizes and values. ``--all`` tries every slip in every model that can
have it. ``--ranks`` tries what ranks may have differently, in two processes that ``avgpipe run`` starts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from avgpipe.files import read_lines
from benchmarks.common.record import say, write_record
from benchmarks.slips.catalogue import PLACES, SLIPS
from benchmarks.slips.models import MODELS
from benchmarks.slips.ranks import on_two_ranks
from benchmarks.slips.trial import FAILED, PLANS, SILENT, TOLERANCES, VERDICTS, Bench, Trial
from benchmarks.tables.slips import slips_plans, slips_silent


def main() -> None:
    arguments = _arguments()
    log = Log(arguments.log)
    pairs = list(chosen(arguments))
    left = [pair for pair in pairs if pair not in log.trials]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        tried = pool.map(_tried, *zip(*left), repeat(arguments.seed)) if left else ()
        for (slip, model), found in zip(left, tried):
            log.add((slip, model), [trial.to_json() for trial in found])
            say(f"{slip}, {model}: {', '.join(dict.fromkeys(trial.verdict for trial in found))}")
    record: dict[str, Any] = {
        "seed": arguments.seed,
        "plans": PLANS,
        "tolerances": {str(dtype)[6:]: value for dtype, value in TOLERANCES.items()},
        "verdicts": VERDICTS,
        "slips": described(),
        **kept([trial for pair in pairs for trial in log.trials[pair]]),
    }
    if arguments.ranks:
        record["ranks"] = on_two_ranks(say)
    question = "does a slip of an ordinary script train something else in silence?"
    write_record("slips", question, record, arguments.out)
    print(slips_plans(record))
    print(slips_silent(record))


class Log:
    """Trials by slip and model, in lines of a file if there is one: a run that was stopped goes on from it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.trials: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for found in read_lines(path) if path is not None and path.exists() else ():
            self.trials[found[0]["slip"], found[0]["model"]] = found

    def add(self, pair: tuple[str, str], found: list[dict[str, Any]]) -> None:
        self.trials[pair] = found
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(found) + "\n")


def _tried(slip: str, model: str, seed: int) -> list[Trial]:
    torch.set_num_threads(1)
    return Bench(SLIPS[slip], model, seed).run(PLANS)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="every slip in every model that can have it")
    parser.add_argument("--count", type=int, default=60, help="how many pairs of slip and model are drawn")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slips", default="", metavar="REGEX", help="slips by name; default: all")
    parser.add_argument("--models", default="", metavar="REGEX", help="models by name; default: all")
    parser.add_argument("--ranks", action="store_true", help="also what ranks may have differently")
    parser.add_argument(
        "--log", type=Path, help="JSON lines that trials are added to; those that it has are not tried"
    )
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    return parser.parse_args()


def chosen(arguments: argparse.Namespace) -> Iterable[tuple[str, str]]:
    """Return pairs of a slip and a model that can have it: all of them, or as many as asked, drawn by the seed."""
    pairs = [
        (slip, model)
        for slip in SLIPS
        for model in MODELS
        if re.search(arguments.slips, slip)
        and re.search(arguments.models, model)
        and Bench(SLIPS[slip], model, arguments.seed).applies()
    ]
    if arguments.all or arguments.count >= len(pairs):
        return pairs
    return sorted(random.Random(arguments.seed).sample(pairs, arguments.count), key=pairs.index)


def kept(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the verdicts of each slip and plan, and return the trials that are silent or fail."""
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for trial in trials:
        of_plan = counts.setdefault(trial["slip"], {}).setdefault(trial["plan"], {})
        of_plan[trial["verdict"]] = of_plan.get(trial["verdict"], 0) + 1
    return {"counts": counts, "trials": [trial for trial in trials if trial["verdict"] in (SILENT, FAILED)]}


def described() -> dict[str, dict[str, str]]:
    """Say of each slip where it is, what it is, and where the documentation says that training differs."""
    places = {name: place for place, module in PLACES.items() for name in _names_in(module)}
    return {
        name: {"place": places[name], "what": slip.what, "design": slip.design}
        for name, slip in SLIPS.items()
    }


def _names_in(module: Any) -> list[str]:
    return [name for name, slip in SLIPS.items() if slip.make.__module__ == module.__name__]


if __name__ == "__main__":
    main()
