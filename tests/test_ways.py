"""The design names the files that a micro-batch and an update pass: those that run, and no others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from avgpipe import Pipeline, Plan
from tests.runner import ROOT, run

PACKAGES = (f"{ROOT}/python/avgpipe/", f"{ROOT}/")


def name_of(path: str) -> str | None:
    """The name in the design of a file of ours, None for others'."""
    if path.startswith(f"{ROOT}/avgpipe_ext/"):
        return path.removeprefix(f"{ROOT}/")
    package = f"{ROOT}/python/avgpipe/"
    return path.removeprefix(package) if path.startswith(package) else None


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def way_of(frame: FrameType) -> str | None:
    """Whether a call serves a micro-batch on its way to the wire, or an update."""
    for caller in callers(frame):
        name = caller.f_code.co_qualname
        if name == "Update.perform":
            return "update"
        if name == "Lane.advance":
            kind = caller.f_locals["step"].kind.name
            return "micro-batch" if kind == "FORWARD" else None if kind.startswith("BACKWARD") else "update"
        if name == "Feed.begin":
            return "micro-batch"
    return None


def files_on_the_way() -> dict[str, list[str]]:
    found: dict[str, set[str]] = {"micro-batch": set(), "update": set()}

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and name_of(frame.f_code.co_filename) and (way := way_of(frame)):
            names = (name_of(caller.f_code.co_filename) for caller in callers(frame))
            found[way] |= {name for name in names if name}

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    data = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(12)]
    plan = Plan(stages=2, pipelines=2, micro_batches=2)
    with Pipeline(model, plan, loss_fn=nn.MSELoss(), optimizer=torch.optim.AdamW) as p:
        for n, _ in enumerate(p.train(data)):
            if n in (5, 9):
                sys.setprofile(see if n == 5 else None)
    return {way: sorted(names) for way, names in found.items()}


if __name__ == "__main__":
    for w, names in run(2, files_on_the_way)[0].items():
        print(w, len(names), *names)
