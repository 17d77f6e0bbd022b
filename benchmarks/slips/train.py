"""Runs a script: in a plain loop on one device, in a plain loop over micro-batches, and by a Pipeline."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import avgpipe
from benchmarks.slips.script import Script, User, pair_of


@dataclass
class Results:
    """What a training gives.

    Attributes:
        losses: of the batches.
        state: weights and buffers at the end.
        extras: what the script keeps beside.
        evaluated: the loss of the first batch in evaluation mode, at the end.
    """

    losses: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    evaluated: float = math.nan


def plainly(script: Script) -> Results:
    """Train as one does without a pipeline."""
    return _loop(script, lambda model, inputs, targets: _whole(script, model, inputs, targets))


def in_micro_batches(script: Script, parts: int, shares: int = 1) -> Results:
    """Train in a plain loop that accumulates gradients over micro-batches, each weighed by its samples.

    Running statistics of BatchNorms move once for a batch. With several ``shares``, as many copies of the buffers see
    a share of the micro-batches each, and the mean of them is the result, of whole numbers the first.
    """
    model = script.model
    copies = [{name: t.clone() for name, t in model.named_buffers()} for _ in range(shares)]
    largest = [0]  # batch so far
    normalises = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())

    def parts_of(samples: int) -> int:
        """As of a Pipeline: a short batch makes no micro-batch of one sample for BatchNorms."""
        full = largest[0] or samples
        largest[0] = max(full, samples)
        short = samples < full and full // parts > 1
        return max(1, min(parts, samples // 2)) if short else parts

    def learn(model: nn.Module, inputs: Any, targets: Any) -> float:
        samples = _samples(inputs)
        wanted = min(parts_of(samples) if normalises else parts, samples)
        given = list(zip(_cut(inputs, wanted, samples), _cut(targets, wanted, samples)))
        weights = [_weight(script.loss_fn, x, y) for x, y in given]
        whole = 1.0 if getattr(script.loss_fn, "reduction", "mean") == "sum" else sum(weights)
        weighed, total, first = list(zip(given, weights)), 0.0, 0
        for n in range(shares):
            count = len(given) // shares + (n < len(given) % shares)
            _set_buffers(model, copies[n])
            with _statistics_moving_once(model):
                for (x, y), weight in weighed[first : first + count]:
                    output = script.call(model, x)
                    if not weight:  # all of its targets are ignored
                        continue
                    loss = script.value(script.loss_fn(output, y)) * (weight / whole)
                    loss.backward()
                    total += float(loss.detach())
            copies[n] = {name: t.clone() for name, t in model.named_buffers()}
            first += count
        _set_buffers(model, _mean(copies))
        return total

    return _loop(script, learn)


def by_plan(script: Script, plan: avgpipe.Plan, seed: int = 0) -> Results:
    """Train by a Pipeline, in the loop of the tutorial."""
    results = Results()
    with ExitStack() as stack:
        for enter in script.around:
            stack.enter_context(enter())
        pipeline = stack.enter_context(
            avgpipe.Pipeline(
                script.model,
                plan,
                loss_fn=script.loss_fn,
                optimizer=script.optimizer,
                lr_scheduler=script.lr_scheduler,
                clip_grad_norm=script.clip,
                seed=seed,
                timeout_s=30,
                **script.prepared,
            )
        )
        user = User(script.model, pipeline.optimizers)
        for _ in range(script.epochs):
            for result in pipeline.train(script.source):
                results.losses.append(result.loss)
                if _goes_on(script, user, result.loss):
                    break
        results.state = {name: t.detach().clone() for name, t in pipeline.state_dict().items()}
        results.extras = script.extras() if script.extras else {}
        results.evaluated = pipeline.evaluate(script.batches[:1]).loss
    return results


# ---- the plain loops -------------------------------------------------------------------------------------------------


def _loop(script: Script, learn: Callable[[nn.Module, Any, Any], float]) -> Results:
    model, results = script.model, Results()
    with ExitStack() as stack:
        for enter in script.around:
            stack.enter_context(enter())
        optimizers = _optimizers(script)
        schedules = [script.lr_scheduler(one) for one in optimizers] if script.lr_scheduler else []
        user = User(model, optimizers)
        for _ in range(script.epochs):
            for batch in script.source:
                inputs, targets = pair_of(batch)
                for one in optimizers:
                    one.zero_grad()
                results.losses.append(learn(model, inputs, targets))
                if script.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), script.clip)
                for one in optimizers:
                    _step(one, lambda inputs=inputs, targets=targets: learn(model, inputs, targets))
                for schedule in schedules:
                    schedule.step()
                if _goes_on(script, user, results.losses[-1]):
                    break
        results.state = {name: t.detach().clone() for name, t in model.state_dict().items()}
        results.extras = script.extras() if script.extras else {}
        results.evaluated = _evaluate(script, model)
    return results


def _step(optimizer: torch.optim.Optimizer, again: Callable[[], float]) -> None:
    """Step an optimizer, with a closure if it wants one."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step()
        return

    def closure() -> float:
        optimizer.zero_grad()
        return again()

    optimizer.step(closure)


def _goes_on(script: Script, user: User, loss: float) -> bool:
    """Run the body of the loop; whether it leaves it."""
    user.step, user.loss = user.step + 1, loss
    for act in script.body:
        act(user)
    return script.stop is not None and user.step >= script.stop


def _whole(script: Script, model: nn.Module, inputs: Any, targets: Any) -> float:
    loss = script.value(script.loss_fn(script.call(model, inputs), targets))
    loss.backward()
    return float(loss.detach())


def _evaluate(script: Script, model: nn.Module) -> float:
    model.eval()
    if isinstance(script.loss_fn, nn.Module):
        script.loss_fn.eval()
    inputs, targets = pair_of(script.batches[0])
    with torch.no_grad():
        return float(script.value(script.loss_fn(script.call(model, inputs), targets)))


def _optimizers(script: Script) -> Sequence[torch.optim.Optimizer]:
    model, name = script.model, next(iter(inspect.signature(script.optimizer).parameters))
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    made = script.optimizer(named if name.startswith("named_param") else [p for _, p in named])
    return made if isinstance(made, list) else [made]


# ---- micro-batches ---------------------------------------------------------------------------------------------------


def _samples(value: Any) -> int:
    return next(t.shape[0] for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.dim())


def _weight(loss_fn: Any, inputs: Any, target: Any) -> float:
    """Return what a micro-batch weighs: its samples, or what torch's losses of classes count."""
    if getattr(loss_fn, "reduction", "mean") == "sum":
        return 1.0
    if type(loss_fn) is nn.CrossEntropyLoss and isinstance(target, torch.Tensor):
        kept = target[target != loss_fn.ignore_index]
        return float(len(kept) if loss_fn.weight is None else loss_fn.weight[kept].sum())
    return float(_samples(inputs))


def _cut(value: Any, parts: int, samples: int) -> list[Any]:
    bounds = torch.arange(samples).tensor_split(parts)

    def of(part: torch.Tensor) -> Any:
        def take(leaf: Any) -> Any:
            is_cut = isinstance(leaf, list) or (isinstance(leaf, torch.Tensor) and leaf.dim())
            return leaf[int(part[0]) : int(part[-1]) + 1] if is_cut else leaf

        return pytree.tree_map(take, value, is_leaf=lambda leaf: _is_column(leaf, samples))

    return [of(part) for part in bounds if len(part)]


def _is_column(value: Any, samples: int) -> bool:
    """Whether a list has a plain value, or a tensor without a dimension, for each sample."""
    if not isinstance(value, list) or len(value) != samples:
        return False
    return isinstance(value[0], int | float) or (isinstance(value[0], torch.Tensor) and not value[0].dim())


def _set_buffers(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, t in model.named_buffers():
            if t.shape == values[name].shape:
                t.copy_(values[name])


def _mean(copies: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    first, *_ = copies
    return {
        name: torch.stack([of[name] for of in copies]).mean(0) if t.is_floating_point() else t
        for name, t in first.items()
    }


@contextmanager
def _statistics_moving_once(model: nn.Module) -> Iterator[None]:
    """Move running statistics by all that BatchNorms see inside, as if it came at once."""
    norms = [
        m
        for m in model.modules()
        if type(m) in (nn.BatchNorm1d, nn.BatchNorm2d) and m.training and m.track_running_stats
    ]
    before = copy.deepcopy([dict(m.named_buffers()) for m in norms])
    seen: list[list[torch.Tensor]] = [[] for _ in norms]
    hooks = [
        m.register_forward_pre_hook(lambda _, given, kept=kept: kept.append(given[0].detach()))
        for m, kept in zip(norms, seen)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for m, buffers, kept in zip(norms, before, seen):
            _set_buffers(m, buffers)
            if kept:
                with torch.no_grad():
                    m.num_batches_tracked += 1
                    momentum = 1 / float(m.num_batches_tracked) if m.momentum is None else m.momentum
                    nn.functional.batch_norm(
                        torch.cat(kept), m.running_mean, m.running_var, training=True, momentum=momentum
                    )
