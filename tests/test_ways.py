"""The design names the files that a micro-batch and an update pass: those that run, and no others."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.links.link import Mailbox
from avgpipe.runtime.feed import BatchFeed
from avgpipe.runtime.lane import Lane
from avgpipe.runtime.route import StepKind
from tests.runner import ROOT, run

BEGINS = BatchFeed.begin.__qualname__, Mailbox.collect.__qualname__  # functions on the way of a micro-batch


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


def way_of(frame: FrameType) -> tuple[str, int] | None:
    """Which way a call is on, and how many of its callers are on it too."""
    for depth, caller in enumerate(callers(frame)):
        name = caller.f_code.co_qualname
        if name in BEGINS:
            return "A micro-batch", 99
        if name == Lane.advance.__qualname__:
            kind = caller.f_locals["step"].kind
            if kind is StepKind.FORWARD:
                return "A micro-batch", 99
            return None if kind in (StepKind.BACKWARD, StepKind.RECEIVE_LOSS) else ("An update", depth)
    return None


def files_on_the_way() -> dict[str, list[str]]:
    """The files of ours that run on the first stage, as it trains by several batches."""
    found: dict[str, set[str]] = {"A micro-batch": set(), "An update": set()}

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and name_of(frame.f_code.co_filename) and (way := way_of(frame)):
            names = [name_of(caller.f_code.co_filename) for caller in islice(callers(frame), way[1] + 1)]
            found[way[0]] |= {name for name in names if name}

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    data = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(20)]
    plan = Plan(stages=2, pipelines=2, micro_batches=2)
    with Pipeline(model, plan, loss_fn=nn.MSELoss(), optimizer=torch.optim.AdamW) as p:
        for n, _ in enumerate(p.train(data)):
            if n in (9, 13):  # between batches that ranks compare
                sys.setprofile(see if n == 9 else None)
    return {way: sorted(names) for way, names in found.items()}


@pytest.mark.promise
def test_the_design_names_the_files_of_both_ways() -> None:
    design = (ROOT / "docs" / "design" / "architecture.md").read_text()
    for way, found in run(2, files_on_the_way)[0].items():
        section = design.partition(f"**{way}**")[2].partition("**")[0]
        rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
        assert sorted(name for row in rows for name in re.findall(r"`(.*?)`", row)) == found
        assert f"{len(found)} files" in section
