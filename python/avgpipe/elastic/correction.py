"""Corrections of gradients of weights that are some updates old: see :class:`avgpipe.rules.Correction`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

import avgpipe_ext
from avgpipe.elastic.flat import Arena
from avgpipe.elastic.versions import Versions, refuse_hidden_weights
from avgpipe.plan import Plan
from avgpipe.rules import CORRECTIONS, Correction

Flats: TypeAlias = list[torch.Tensor]

# The key of a step in an optimizer's state, so that checkpoints keep it with the parameter.
LAST_UPDATE = "last_update"


class WeightPrediction:
    """Predicts the weights of ``arena`` from the state of their optimizer.

    With lr and the state as they are now, for s more updates:

        w - s lr u                                                   SGD with momentum buffer u
        (1 - lr weight_decay)^s w - s lr m / (sqrt(v) + eps)         AdamW, m and v without bias; Adam without the decay

    Parameters without a step yet stay unchanged.

    Raises:
        ValueError: for an optimizer whose state does not allow a prediction.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, arena: Arena) -> None:
        self._optimizer, self._arena = optimizer, arena
        self._numbers = {p: n for n, p in enumerate(arena.parameters)}
        self._views: dict[int, list[torch.Tensor]] = {}  # of buffers, which are few and reused
        kind, groups = type(optimizer), optimizer.param_groups
        if kind not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
            raise ValueError(_refusal(kind.__name__))
        if kind is torch.optim.SGD and not all(group["momentum"] for group in groups):
            raise ValueError(_refusal("SGD without momentum"))
        if any(group.get("amsgrad") for group in groups):
            raise ValueError(_refusal(f"{kind.__name__} with amsgrad"))

    @torch.no_grad()
    def __call__(self, out: Flats, updates: int) -> None:
        """Write the weights predicted after ``updates`` more updates."""
        to, now = self._of(out), self._of(self._arena.weights)
        rest = set(range(len(now)))
        for group in self._optimizer.param_groups:
            calls: dict[float, list[int]] = {}  # parameters, by their number of steps
            for p in group["params"]:
                if state := self._optimizer.state.get(p):
                    calls.setdefault(float(state.get("step", 1)), []).append(self._numbers[p])
            for step, numbers in calls.items():
                self._predict(
                    group, step, [to[n] for n in numbers], [now[n] for n in numbers], numbers, updates
                )
                rest -= set(numbers)
        if rest:
            torch._foreach_copy_([to[n] for n in rest], [now[n] for n in rest])

    def _predict(
        self, group: dict[str, Any], step: float, to: Flats, now: Flats, numbers: list[int], updates: int
    ) -> None:
        states = [self._optimizer.state[self._arena.parameters[n]] for n in numbers]
        lr = float(group["lr"]) * (-1 if group["maximize"] else 1)
        if "momentum" in group:
            momenta = [state["momentum_buffer"] for state in states]
            avgpipe_ext.predict_sgd_(to, now, momenta, updates * lr)
            return
        avgpipe_ext.predict_adam_(
            to,
            now,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            updates=updates,
            step=step,
            lr=lr,
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]) if group["decoupled_weight_decay"] else 0.0,
        )

    def _of(self, flats: Flats) -> list[torch.Tensor]:
        if not flats:
            return []
        key = flats[0].data_ptr()
        if key not in self._views:
            self._views[key] = self._arena.layout.tensors(flats)
        return self._views[key]


def _refusal(what: str) -> str:
    return (
        f"weights cannot be predicted from the state of {what}: use SGD with momentum, Adam or AdamW, or the "
        "correction 'error-feedback', which works with any optimizer"
    )


class CorrectedSteps:
    """Corrects each step of an optimizer by the one before; both in memory laid out like the weights.

    Args:
        correction: the rule.
        delay: how many updates the gradients are late.
    """

    def __init__(
        self, correction: Correction, delay: int, optimizer: torch.optim.Optimizer, arena: Arena
    ) -> None:
        self._momentum = correction.momentum
        self._gain = correction.gain * (delay if correction.per_update else 1)
        self._optimizer, self._arena = optimizer, arena
        self._last = arena.layout.zeros()
        self._views = self._last.tensors()
        self._before: Flats = []
        self._has_last = False

    @contextmanager
    def correcting(self, before: Flats | None) -> Iterator[None]:
        """Correct the optimizer's step inside. ``before``: the weights before the step, if they are kept."""
        stepped = [p.grad is not None for p in self._arena.parameters]
        self._adopt()
        if before is None:
            if not self._before:
                self._before = [torch.empty_like(flat) for flat in self._arena.weights]
            before = self._before
            torch._foreach_copy_(before, self._arena.weights)
        yield
        with torch.no_grad():
            for x, old, last in zip(self._arena.weights, before, self._last.flats):
                avgpipe_ext.correct_update_(x, old, last, self._momentum, self._gain, not self._has_last)
        self._has_last = True
        for p, view, has_stepped in zip(self._arena.parameters, self._views, stepped):
            if has_stepped:  # otherwise its optimizer would take this for the state of a first step
                self._optimizer.state[p][LAST_UPDATE] = view

    @torch.no_grad()
    def _adopt(self) -> None:
        """Copy a last step that a checkpoint has loaded into the optimizer's state."""
        for p, view in zip(self._arena.parameters, self._views):
            known = self._optimizer.state[p].get(LAST_UPDATE) if p in self._optimizer.state else None
            if known is not None and known is not view:
                view.copy_(known)
                self._has_last = True


def check_correction(plan: Plan, shared: Sequence[Mapping[int, Any]]) -> None:
    """Refuse a correction that makes copies of a parameter differ. ``shared``: by stage, its sharers."""
    if plan.correction in (None, "predicted"):
        return
    delays = plan.delays
    for stage, others in enumerate(shared):
        for other in others:
            if delays[other] != delays[stage]:
                raise ValueError(
                    f"correction {plan.correction!r} with weights {plan.weights!r} and parameters that stages {stage} "
                    f"and {other} share, whose gradients are {delays[stage]} and {delays[other]} updates late: use "
                    "weights 'vertical-sync', the schedule 'pipedream-2bw', or the correction 'predicted'"
                )


def kept_versions(
    optimizer: torch.optim.Optimizer, arena: Arena, plan: Plan, stage: int
) -> tuple[Versions, CorrectedSteps | None]:
    """Return a stage's versions of its weights, and what corrects its late gradients."""
    refuse_hidden_weights(optimizer, arena)
    correction = None if plan.correction is None else CORRECTIONS[plan.correction]
    predicts, delay = correction is not None and correction.predicts, plan.delays[stage]
    versions = Versions(arena, WeightPrediction(optimizer, arena) if predicts else None)
    if correction is not None and not predicts and delay:
        return versions, CorrectedSteps(correction, delay, optimizer, arena)
    return versions, None
