"""Slips that concern ranks, in two processes that ``avgpipe run`` starts: seeds, orders, lengths, models."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import avgpipe
from benchmarks.slips.trial import EQUAL, REFUSED, SILENT, WARNED

ROOT = Path(__file__).parents[2]


class Case(NamedTuple):
    """A slip of one rank. ``seed``: of ``avgpipe run``. ``about``: what must be said of it."""

    what: str
    about: str
    seed: str = "0"


CASES = {
    "nothing": Case("Every rank does the same.", ""),
    "no seeds": Case(
        "The script does not seed its model, and avgpipe run has --seed none.", "manual_seed", "none"
    ),
    "a seed by rank": Case("Each rank seeds its model by its rank.", "manual_seed"),
    "another order": Case("Each rank shuffles its batches by a seed of its own.", "not the same"),
    "another order later": Case("Orders differ from the fifth batch on.", "not the same"),
    "a sampler for each rank": Case(
        "Each rank has half of the data, as of a DistributedSampler.", "not the same"
    ),
    "shorter on the last rank": Case("The last rank's loader ends a batch earlier.", "has ended"),
    "longer on the last rank": Case("The last rank's loader has a batch more.", "has ended"),
    "another order of targets": Case("The last rank's targets are shuffled within each batch.", "differ"),
    "augmented by rank": Case("Each rank adds noise of its own to the inputs.", "not the same"),
    "another learning rate": Case("The last rank has another learning rate.", "lr|rate"),
    "another loss": Case("The last rank alone has the loss that the script means.", "loss"),
    "another width": Case("The last rank's model is wider.", "model"),
    "another plan": Case("The last rank has another plan.", "plan"),
    "body on rank 0": Case("Only rank 0 evaluates after each batch.", "evaluation"),
    "dropout": Case("Every rank's model has dropout on the last stage.", ""),
    "eval on one rank": Case("The last rank's model is in evaluation mode.", "evaluation mode"),
}


_REFERENCES = "nothing", "dropout"  # with which those that follow are compared


def on_two_ranks(say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Try every case, and compare its losses and weights with those of the case without a slip, in every bit."""
    rows = []
    expected = None
    for name, case in CASES.items():
        found, said = _run(name, case)
        expected = found if name in _REFERENCES else expected
        if found is None:
            verdict = REFUSED if re.search(case.about, said) else "fails"
        elif found == expected:
            verdict = EQUAL
        else:
            verdict = WARNED if re.search(case.about, said) else SILENT
        say(f"{name}, two processes: {verdict}")
        rows.append({"slip": name, "what": case.what, "verdict": verdict, "said": _told(said, case.about)})
    return rows


def _run(name: str, case: Case) -> tuple[str | None, str]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "weights.json"
        environment = os.environ | {"PYTHONPATH": f"{ROOT / 'python'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "avgpipe", "run", "--stages", "2", "--seed", case.seed]
        done = subprocess.run(
            [*command, __file__, name, str(out)],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            check=False,
        )
        said = re.sub(r"avgpipe: torch, random and numpy are seeded .*", "", done.stdout + done.stderr)
        return (out.read_text() if out.exists() else None), said


def _told(said: str, about: str) -> str:
    """Return the line that is about a slip, or else names an error, without paths."""
    lines = said.splitlines()
    of_slip = [line for line in lines if about and re.search(about, line) and not line.startswith("  ")]
    errors = [line for line in lines if "Error: " in line or "Timeout: " in line]
    line = next(
        iter([*(line for line in of_slip if "Error: " in line or "Timeout: " in line), *of_slip, *errors]), ""
    )
    return re.sub(r"\s+", " ", re.sub(r"(/[\w.-]+){3,}/|^\[rank\d\]: ", "", line)).strip()[:300]


# ---- the script that each rank runs ----------------------------------------------------------------------------------


def script(name: str, out: str) -> None:
    rank = int(os.environ["RANK"])
    last = rank == 1
    if name == "a seed by rank":
        torch.manual_seed(rank)
    width = 12 if name == "another width" and last else 8
    model: Any = nn.Sequential(
        nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
    ).double()
    if name in ("dropout", "eval on one rank"):
        model[-1] = nn.Sequential(nn.Dropout(0.5), model[-1])
        model.train(name == "dropout" or not last)
    plan = avgpipe.Plan(stages=2, micro_batches=2 if name == "another plan" and last else 4)
    rate = 0.5 if name == "another learning rate" and last else 0.05
    loss_fn: Any = nn.CrossEntropyLoss()
    if name == "another loss":
        loss_fn = nn.CrossEntropyLoss(label_smoothing=0.0 if last else 0.5)
    with avgpipe.Pipeline(
        model,
        plan,
        loss_fn=loss_fn,
        optimizer=lambda params: torch.optim.SGD(params, lr=rate),
        timeout_s=20,
    ) as pipeline:
        losses = []
        for result in pipeline.train(_batches(name, rank)):
            losses.append(result.loss)
            if name == "body on rank 0" and rank == 0:
                pipeline.evaluate(_batches("nothing", 0)[:1])
        state = pipeline.state_dict()
    if rank == 0:
        Path(out).write_text(json.dumps([losses, {n: t.tolist() for n, t in state.items()}]))


def _batches(name: str, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(7)
    found = [
        (
            torch.randn(8, 6, dtype=torch.float64, generator=draw),
            torch.randint(4, (8,), generator=draw),
        )
        for _ in range(8)
    ]
    own = torch.Generator().manual_seed(rank)
    if name == "another order":
        found = [found[n] for n in torch.randperm(8, generator=own)]
    elif name == "another order later" and rank:
        found = [*found[:4], *found[:3:-1]]
    elif name == "a sampler for each rank":
        found = found[rank::2]
    elif name == "shorter on the last rank" and rank:
        found = found[:-1]
    elif name == "longer on the last rank" and rank:
        found = [*found, found[0]]
    elif name == "another order of targets" and rank:
        found = [(x, y[torch.randperm(8, generator=own)]) for x, y in found]
    elif name == "augmented by rank":
        found = [(x + torch.randn(x.shape, dtype=x.dtype, generator=own), y) for x, y in found]
    return found


if __name__ == "__main__":
    script(sys.argv[1], sys.argv[2])
