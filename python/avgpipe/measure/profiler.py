"""The profiler: times and bytes of a model's layers on a device.

Every layer runs as a stage would run it, on inputs that are detached from the layers before,
micro-batches of all sizes in turn; a time is the mean of 3 to 25 sweeps over all layers, without the
shortest and the longest tenth. The optimizer's steps, and those with elastic averaging (rule avgpipe,
staleness 1, two pipelines), are measured with cold caches, as at the end of a batch. The runtime's costs,
a worker's memory and the link are measured in one or two short processes.

On the CPU a worker runs one action at a time, so ``second_lane`` is 1 by construction; on CUDA it is measured with
two streams, and ``process_bytes`` is 0, as torch counts a device's memory.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from avgpipe.device import device_name, has_streams, own_device
from avgpipe.measure.memory import measure_bytes
from avgpipe.measure.sweep import Example, Sweep, Times, examples, lane_gain, repeat, typical, undisturbed
from avgpipe.measure.updates import Updates
from avgpipe.measure.workers import WorkerCosts, measure_workers
from avgpipe.model.batch import LossFn
from avgpipe.model.context import CallerGenerators
from avgpipe.model.cut import names_of_layers
from avgpipe.model.layers import layers_of
from avgpipe.model.model import Model
from avgpipe.model.parts import Skips
from avgpipe.planning.costs import MOST_JITTER
from avgpipe.planning.profile import LayerProfile, LinkProfile, Profile, Skip, Tie
from avgpipe.ranks.environment import cpu_model, keep_freed_memory
from avgpipe.runtime.options import OptimizerFn
from avgpipe.runtime.stage import Stage

_SWEEPS_SHARE, _UPDATES_SHARE, _LANES_SHARE = 0.6, 0.3, 0.1  # shares of the time


def profile(
    model: nn.Module | Sequence[nn.Module],
    example_inputs: Any,
    *,
    loss_fn: LossFn | None = None,
    target: Any = None,
    device: torch.device | str = "cpu",
    micro_batch_sizes: Sequence[int] = (1, 2, 4, 8),
    optimizer: OptimizerFn | None = None,
    link: LinkProfile | None = None,
    clip_grad_norm: float | None = None,
    autocast: torch.dtype | None = None,
    threads: int = 1,
    budget_s: float = 30.0,
    layers_only: bool = False,
) -> Profile:
    """Measure a model that a ``Pipeline`` takes, layer by layer; the model and random generators stay unchanged.

    Args:
        model, optimizer, clip_grad_norm: See ``Pipeline``; without an optimizer, none is measured.
        example_inputs: A batch with the samples as dimension 0; micro-batches are cut from it, or repeat it.
        loss_fn: Maps output and target to a scalar; counted with the last layer. None: a mean of the output.
        target: The targets of ``example_inputs``.
        device: Where to measure.
        micro_batch_sizes: Sizes of the micro-batches to time, in samples.
        link: Link between two workers; None: that of two processes of this host, on CUDA none.
        autocast: Dtype for ``torch.autocast``, see ``avgpipe.Precision``.
        threads: Threads of torch on the CPU.
        budget_s: Approximate seconds for measuring the layers; more if three sweeps take longer.
        layers_only: Leave out what other processes measure: the runtime, a worker's memory and the link.

    Raises:
        ValueError, TypeError: An argument is wrong.
        StageError: A layer, which the error names, cannot be timed.
        PipelineError: A process failed.
    """
    numbers = {"threads": threads, "budget_s": budget_s, "clip_grad_norm": clip_grad_norm}
    _check_numbers(micro_batch_sizes, numbers)
    where, layers = own_device(device), layers_of(model, example_inputs)
    on_host = not has_streams(where)
    if on_host:
        keep_freed_memory()  # as pipelines do
    sizes = sorted(set(micro_batch_sizes))
    batches = examples(example_inputs, target, sizes, where)
    with CallerGenerators(where), undisturbed(threads):
        loss = copy.deepcopy(loss_fn)
        if isinstance(loss, nn.Module):
            loss.to(where)
        updates = Updates(optimizer, where, clip_grad_norm)
        names = names_of_layers(model, layers)
        new_sweep = lambda: Sweep(_stage(layers, where), names, loss, autocast)  # noqa: E731
        rows, facts = _rows(model, layers, names, batches, new_sweep, updates, budget_s)
    name = type(model).__name__ if isinstance(model, nn.Module) else f"list of {len(layers)} layers"
    on = f"cpu: {cpu_model()}, threads: {threads}" if on_host else device_name(where)
    found = Profile(name, on, tuple(sizes), rows, ties=_ties(layers), step_s=updates.step_s, **facts)
    if layers_only:
        return found
    return with_workers(found, measure_workers(layers, threads, on_host and link is None), link)


def _check_numbers(micro_batch_sizes: Sequence[int], numbers: Mapping[str, float | None]) -> None:
    if not micro_batch_sizes or any(type(b) is not int or b < 1 for b in micro_batch_sizes):
        raise ValueError(
            f"micro_batch_sizes must be whole numbers of at least 1, got {list(micro_batch_sizes)}"
        )
    for what, value in numbers.items():
        if value is not None and not value > 0:
            raise ValueError(f"{what} must be above 0, got {value}")


def _rows(
    model: nn.Module | Sequence[nn.Module],
    layers: Sequence[nn.Module],
    names: Sequence[str],
    batches: Any,
    new_sweep: Callable[[], Sweep],
    updates: Updates,
    budget_s: float,
) -> tuple[tuple[LayerProfile, ...], dict[str, Any]]:
    """Measure the layers; return their costs, and what belongs to all of them."""
    whole = Model.cut(model, layers, len(layers), None)
    by_layer, facts = _swept(new_sweep, whole.skips, batches, budget_s)
    share_s = _UPDATES_SHARE * budget_s / len(layers)
    rows = tuple(
        _row(name, layer, {**measured, **updates.measure(layer, own, share_s)._asdict()})
        for name, layer, own, measured in zip(names, layers, whole.trainable, by_layer)
    )
    return rows, facts


def _row(name: str, layer: nn.Module, measured: dict[str, Any]) -> LayerProfile:
    trained = sum(p.nbytes for p in layer.parameters() if p.requires_grad)
    frozen = sum(t.nbytes for t in (*layer.parameters(), *layer.buffers())) - trained
    return LayerProfile(name, parameter_bytes=trained, frozen_bytes=frozen, **measured)


def with_workers(found: Profile, workers: WorkerCosts, link: LinkProfile | None) -> Profile:
    """Add the costs of workers to a profile of layers; ``link``: replaces the measured one."""
    return replace(
        found,
        action_s=workers.action_s,
        step_s=found.step_s + workers.batch_s,
        # On a device torch counts the bytes of tensors; on a host memory is that of the process.
        process_bytes=workers.process_bytes if found.device.startswith("cpu") else 0.0,
        link=link or workers.link,
        reduction=workers.reduction,
    )


def _swept(
    new_sweep: Callable[[], Sweep], routes: Sequence[Skips], batches: Sequence[Example], budget_s: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measure on a copy of the whole model, or two, which are freed afterwards.

    Returns fields of each layer's profile, and fields of the model's.
    """
    begin = time.perf_counter()
    sweep = new_sweep()
    device, layers = sweep.stage.device, len(sweep.stage.layers)
    for batch in batches:  # the first of each size is slow; it makes the gradients that others add to
        sweep.times(batch)
        sweep.times(batch, split=True)
    sizes = [measure_bytes(sweep, batch, routes) for batch in batches]
    whole: list[list[Times]] = [[] for _ in batches]
    split: list[list[Times]] = [[] for _ in batches]

    def once(number: int) -> None:
        for batch in batches:
            whole[batch.number].append(sweep.times(batch))
            if number % 2 == 0:  # the parts are a ratio, which needs fewer samples
                split[batch.number].append(sweep.times(batch, split=True))

    repeat(once, _SWEEPS_SHARE * budget_s - (time.perf_counter() - begin))
    gains = [1.0] * len(batches)
    if has_streams(device):
        pair = [sweep, new_sweep()]
        gains = [lane_gain(pair, batch, _LANES_SHARE * budget_s / len(batches)) for batch in batches]
    by_size = [
        {**_typical_times(*times), **layer_bytes._asdict()}
        for *times, (layer_bytes, _) in zip(whole, split, sizes)
    ]
    by_layer = [{key: tuple(at[key][n] for at in by_size) for key in by_size[0]} for n in range(layers)]
    skips = tuple(Skip(*ends, tuple(found[ends] for _, found in sizes)) for ends in sorted(sizes[0][1]))
    return by_layer, {"skips": skips, "second_lane": tuple(gains), "jitter": _jitter(whole)}


def _typical_times(whole: Sequence[Times], split: Sequence[Times]) -> dict[str, Any]:
    """Return the seconds of each layer; a backward's input part is in proportion to the split measurement."""
    forward_s, backward_s, _ = (typical(times) for times in zip(*whole))
    _, inputs_s, rests_s = (typical(times) for times in zip(*split))
    parts = [
        min(whole_s, whole_s * input_s / max(input_s + rest_s, 1e-12))
        for whole_s, input_s, rest_s in zip(backward_s, inputs_s, rests_s)
    ]
    return {"forward_s": forward_s, "backward_s": backward_s, "input_backward_s": parts}


def _jitter(sweeps: Sequence[Sequence[Times]]) -> float:
    """Return the relative spread of all layers' times between consecutive sweeps, so that slow drift is left out."""
    sums = np.array([[(sum(t.forward_s), sum(t.backward_s)) for t in times] for times in sweeps])
    steps = np.abs(np.diff(sums, axis=1)) / sums.mean(axis=1, keepdims=True)
    # Robust to outliers: for normal samples the median is 0.6745 times the square root of 2 standard
    # deviations.
    return min(MOST_JITTER, float(np.median(steps)) / (0.6745 * math.sqrt(2)))


def _stage(layers: Sequence[nn.Module], device: torch.device) -> Stage:
    """Return a copy of all layers, in training mode."""
    stage = Stage(layers, 0, 0, 0, device)
    stage.train()
    for p in stage.parameters():
        p.grad = None
    return stage


def _ties(layers: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """Return the parameters that several layers share, by those layers."""
    holders: dict[nn.Parameter, list[int]] = defaultdict(list)
    for n, layer in enumerate(layers):
        for p in filter(lambda p: p.requires_grad, layer.parameters()):
            holders[p].append(n)
    shared: Counter[tuple[int, ...]] = Counter()
    for p, found in holders.items():
        if len(found) > 1:
            shared[tuple(found)] += p.nbytes
    return tuple(Tie(found, size) for found, size in sorted(shared.items()))
