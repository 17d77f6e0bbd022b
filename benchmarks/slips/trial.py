"""Tries a slip in a script, and says what became of it."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import random
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import avgpipe
from avgpipe.errors import PipelineError
from benchmarks.slips import train
from benchmarks.slips.models import build
from benchmarks.slips.script import Script
from benchmarks.slips.slip import Slip
from benchmarks.slips.train import Results

EQUAL, REFUSED, WARNED, PLAIN = "equal", "refused", "warned", "plain refuses too"
SILENT, DESIGN, FAILED, TRAINS = "SILENT", "by design", "fails", "trains, plain refuses"
VERDICTS = EQUAL, REFUSED, WARNED, DESIGN, PLAIN, TRAINS, FAILED, SILENT

PLANS: dict[str, dict[str, Any]] = {
    "two stages": {"stages": 2, "micro_batches": 4},
    "recomputed": {"stages": 3, "micro_batches": 4, "recompute": "always"},
    "two pipelines": {"stages": 2, "pipelines": 2, "micro_batches": 4, "staleness": 0},
    "zero bubble": {"stages": 2, "micro_batches": 4, "schedule": "zero-bubble-h1"},
    "whole batches": {"stages": 2},
}
# Of the largest number in a tensor. Weights in float32 add up micro-batches in another order; 16 bits round more.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4}
_AUTOCAST = 3e-2
_FLOOR = 1e-6  # of the largest number in all tensors: rounding in those that are nearly zero


@dataclass
class Trial:
    """What became of a slip in a script under a plan.

    Attributes:
        slip: its name.
        model: name of the model.
        plan: name of the plan.
        verdict: one of VERDICTS.
        apart: the largest relative difference from the plain loop.
        where: the tensor, or loss, that has it.
        as_micro_batches: the difference from a plain loop over the same micro-batches, where that was asked.
        said: the message of a refusal, or warnings.
        details: what was drawn.
    """

    slip: str
    model: str
    plan: str
    verdict: str
    apart: float | None = None
    where: str = ""
    as_micro_batches: float | None = None
    said: str = ""
    details: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return what is worth keeping: of what is equal, how much so."""
        found = {name: value for name, value in asdict(self).items() if value not in (None, "")}
        if self.verdict == EQUAL:
            found = {name: value for name, value in found.items() if name not in ("where", "said")}
        if self.apart is not None and self.apart < 1e300:
            found["apart"] = float(f"{self.apart:.3g}")
        return found | ({"said": self.said[:300]} if "said" in found else {})


class Bench:
    """Tries one slip in one model under all plans. ``seed``: of weights, batches and what the slip draws."""

    def __init__(self, slip: Slip, model: str, seed: int) -> None:
        self._slip, self._name, self._seed = slip, model, seed
        self._details = ""
        self._plain: Results | None = None
        self._refusal = ""

    def applies(self) -> bool:
        return self._slip.applies(build(self._name, self._seed, self._slip.dtype))

    def script(self) -> Script:
        """Make the script once more, with the same slip; all generators begin alike."""
        script = build(self._name, self._seed, self._slip.dtype)
        if self._slip.mixes:
            _without_batch_norms(script.model)
        draw = random.Random(f"{self._seed} {self._slip.name} {self._name}")
        self._details = self._slip.make(script, draw) or ""
        _seed_all(self._seed)
        return script

    def run(self, plans: dict[str, dict[str, Any]]) -> list[Trial]:
        with _quiet():
            try:
                self._plain = train.plainly(self.script())
            except Exception as error:
                self._refusal = _line(error)
        return [self._try(name, avgpipe.Plan(**options)) for name, options in plans.items()]

    def _try(self, name: str, plan: avgpipe.Plan) -> Trial:
        gc.collect()
        trial = Trial(self._slip.name, self._name, name, EQUAL)
        with _told() as told:
            try:
                script = self.script()
                found = train.by_plan(script, plan)
            except Exception as error:
                trial.said = _line(error)
                trial.verdict = PLAIN if self._plain is None else REFUSED if _is_ours(error) else FAILED
                trial.details = self._details
                return trial
        trial.details = self._details
        trial.said = " | ".join(dict.fromkeys(told))
        if self._plain is None:
            trial.verdict, trial.where = TRAINS, f"plain: {self._refusal}"
            return trial
        tolerance = _AUTOCAST if self._slip.rounds else TOLERANCES[self._slip.dtype]
        trial.apart, trial.where = apart(self._plain, found)
        if trial.apart <= tolerance:
            return trial
        with _quiet():
            trial.verdict = self._judge(trial, plan, found, told, tolerance)
        return trial

    def _judge(
        self, trial: Trial, plan: avgpipe.Plan, found: Results, told: list[str], tolerance: float
    ) -> str:
        if self._slip.about and any(re.search(self._slip.about, one) for one in told):
            return WARNED
        script = self.script()
        if script.draws or self._slip.draws:
            one = train.by_plan(script, avgpipe.Plan(micro_batches=plan.micro_batches))
            trial.as_micro_batches, trial.where = apart(one, found, buffers=plan.pipelines == 1)
            if trial.as_micro_batches <= tolerance:
                return DESIGN
            return SILENT
        try:
            micro = train.in_micro_batches(self.script(), plan.micro_batches, plan.pipelines)
        except Exception:
            micro = None
        if micro is not None:
            trial.as_micro_batches, _ = apart(micro, found)
            normalises = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in script.model.modules())
            is_same = trial.as_micro_batches <= tolerance
            # What is documented: BatchNorm normalises micro-batches, and pipelines' buffers are averaged.
            if is_same and normalises:
                return DESIGN
            assert self._plain is not None
            if is_same and plan.pipelines > 1 and self._buffers_add_up(plan, tolerance):
                return DESIGN
        return DESIGN if self._slip.design else SILENT

    def _buffers_add_up(self, plan: avgpipe.Plan, tolerance: float) -> bool:
        """Whether micro-batches alone change nothing, so that the mean over pipelines is what differs."""
        assert self._plain is not None
        alone = train.in_micro_batches(self.script(), plan.micro_batches)
        return apart(self._plain, alone)[0] <= tolerance


def _without_batch_norms(model: nn.Module) -> None:
    """Put GroupNorms in the place of BatchNorms, whose own differences would hide those of a slip."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(2, child.num_features, dtype=child.weight.dtype))


def apart(expected: Results, found: Results, buffers: bool = True) -> tuple[float, str]:
    """Return the largest relative difference, and what has it. ``buffers``: whether the state is all compared."""
    if len(expected.losses) != len(found.losses):
        return float("inf"), f"{len(expected.losses)} and {len(found.losses)} losses"
    sides = []
    for of in (expected, found):
        losses = {f"loss {n}": torch.tensor(value, dtype=torch.float64) for n, value in enumerate(of.losses)}
        evaluated = {"loss in evaluation": torch.tensor(of.evaluated, dtype=torch.float64)} if buffers else {}
        sides.append(losses | evaluated | of.state | of.extras)
    mine, theirs = sides
    if mine.keys() != theirs.keys():
        return float("inf"), f"{sorted(mine.keys() ^ theirs.keys())[0]} on one side only"
    kept = [name for name in mine if buffers or not _is_buffer(name)]
    largest = max((_size(mine[name]) for name in kept), default=0.0)
    found_apart = {name: _difference(mine[name], theirs[name], largest) for name in kept}
    where = max(found_apart, key=lambda name: found_apart[name])
    return found_apart[where], where


def _is_buffer(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last in ("seen", "total", "mean", "count", "steps", "num_batches_tracked") or "running" in last


def _size(t: torch.Tensor) -> float:
    return float(t.detach().to_dense().double().abs().nan_to_num(0.0).max()) if t.numel() else 0.0


def _difference(a: torch.Tensor, b: torch.Tensor, largest: float) -> float:
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    a, b = a.detach().to_dense().double(), b.detach().to_dense().double()
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    by = float((a - b).abs().nan_to_num(0.0).max())
    return by / max(_size(a), _FLOOR * largest, 1e-30)


# ---- what is said ----------------------------------------------------------------------------------------------------


def _seed_all(seed: int) -> None:
    import numpy

    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


class _Keeper(logging.Handler):
    def __init__(self, told: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._told = told

    def emit(self, record: logging.LogRecord) -> None:
        self._told.append(record.getMessage())


@contextmanager
def _told() -> Iterator[list[str]]:
    """Gather warnings, and what the log of avgpipe says at the level of warnings."""
    told: list[str] = []
    log = logging.getLogger("avgpipe")
    keeper, propagates = _Keeper(told), log.propagate
    log.addHandler(keeper)
    log.propagate = False
    try:
        # torch.fx prints where a graph fails, whoever catches it.
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("always")
            yield told
        told += [str(one.message) for one in caught if not issubclass(one.category, ResourceWarning)]
    finally:
        log.removeHandler(keeper)
        log.propagate = propagates


@contextmanager
def _quiet() -> Iterator[None]:
    with _told():
        yield


def _is_ours(error: BaseException) -> bool:
    """Whether avgpipe says it in its own words: its errors, and what is raised in a line of its code."""
    if isinstance(error, PipelineError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(avgpipe.__file__).parent)
    return bool(frames) and frames[-1].filename.startswith(package) and "raise" in (frames[-1].line or "")


def _line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return re.sub(r"\s+", " ", re.sub(r"(/[\w.-]+){3,}/", "", text)).strip()[:600]
