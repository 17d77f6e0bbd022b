"""The profiler: times and bytes of a model's layers on a device."""

from __future__ import annotations

import copy
import math
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from avgpipe.device import own_device
from avgpipe.measure.memory import Sizes, measure_sizes, measure_working
from avgpipe.measure.sweep import Example, Sweep, examples, lane_gain, repeat, typical, undisturbed
from avgpipe.measure.updates import UpdateCosts, Updates
from avgpipe.measure.workers import WorkerCosts, measure_workers
from avgpipe.planning.profile import MOST_JITTER, LayerProfile, LinkProfile, Profile, Skip, Tie
from avgpipe.ranks.machine import keep_freed_memory
from avgpipe.runtime.batch import LossFn
from avgpipe.runtime.context import CallerGenerators
from avgpipe.runtime.model import Model, Skips, layers_of
from avgpipe.runtime.options import OptimizerFn
from avgpipe.runtime.stage import Stage

_SWEEPS_SHARE, _UPDATES_SHARE, _LANES_SHARE = 0.6, 0.3, 0.1  # of the time


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
    name: str | None = None,
    worker_loads: tuple[str, dict[str, Any]] | None = None,
) -> Profile:
    """Measure a model that a ``Pipeline`` takes, layer by layer; it stays as it is, and so do random generators.

    Every layer runs as a stage would run it, on inputs that are cut from the layers before, micro-batches of all sizes
    in turn; a time is the mean of 3 to 25 sweeps over all layers, without the tenths that are shortest and longest. The
    optimizer's steps, and those with elastic averaging (rule avgpipe, staleness 1, two pipelines), are measured with
    cold caches, as at the end of a batch. What the runtime adds, a worker's memory and the link are measured in one or
    two short processes.

    On the CPU a worker runs one action at a time, so ``second_lane`` is 1 by construction; on CUDA it is measured with
    two streams, and ``process_bytes`` is 0, as torch counts a device's memory.

    Args:
        model: What a ``Pipeline`` takes.
        example_inputs: A batch, tensors with the samples as dimension 0; micro-batches are cut from it, or repeat it
            where it is too small.
        loss_fn: Of output and target, a scalar, counted with the last layer; None: a mean of the output.
        target: The targets of ``example_inputs``.
        device: Where to measure.
        micro_batch_sizes: Samples of the micro-batches that are timed.
        optimizer: Of parameters, as of the ``Pipeline``; None: no optimizer's time and state.
        link: Between two workers; None: that of two processes of this host, on CUDA none.
        clip_grad_norm: As of the ``Pipeline``; what finding and applying the norm takes is counted with the optimizer's
            steps.
        autocast: Dtype for ``torch.autocast``, as of the ``Pipeline``.
        threads: Threads of torch on the CPU; workers have the one that OMP_NUM_THREADS gives them, unless told
            otherwise.
        budget_s: About how many seconds measuring may take, beside the processes; more where three sweeps take longer.
        name: The model's name in the profile; None: its class.
        worker_loads: A function, as "module:name", and its arguments: called in the process whose memory is taken for
            that of a worker without its share of the model, and what it returns is kept, such as the data and the
            whole model.

    Raises:
        ValueError, TypeError: An argument is wrong.
        StageError: A layer, which it names, cannot be timed.
        PipelineError: A process failed.
    """
    layers = layers_of(model)
    on_host = own_device(device).type == "cpu"
    found = layer_profile(
        model,
        example_inputs,
        loss_fn=loss_fn,
        target=target,
        device=device,
        micro_batch_sizes=micro_batch_sizes,
        optimizer=optimizer,
        clip_grad_norm=clip_grad_norm,
        autocast=autocast,
        threads=threads,
        budget_s=budget_s,
        name=name,
    )
    return with_workers(found, measure_workers(layers, threads, on_host and link is None, worker_loads), link)


def with_workers(found: Profile, workers: WorkerCosts, link: LinkProfile | None) -> Profile:
    """A profile of layers with what is around them; ``link``: in place of the one that was measured."""
    return replace(
        found,
        action_s=workers.action_s,
        step_s=found.step_s + workers.batch_s,
        # Of a device torch counts what tensors take, on a host it is the process.
        process_bytes=workers.process_bytes if found.device.startswith("cpu") else 0.0,
        link=link or workers.link,
        reduction=workers.reduction,
    )


def layer_profile(
    model: nn.Module | Sequence[nn.Module],
    example_inputs: Any,
    *,
    loss_fn: LossFn | None = None,
    target: Any = None,
    device: torch.device | str = "cpu",
    micro_batch_sizes: Sequence[int] = (1, 2, 4, 8),
    optimizer: OptimizerFn | None = None,
    clip_grad_norm: float | None = None,
    autocast: torch.dtype | None = None,
    threads: int = 1,
    budget_s: float = 30.0,
    name: str | None = None,
) -> Profile:
    """Profile the layers in this process alone, without the runtime, a worker's memory and links.

    Workers may do so at the same time: what they find then includes that they slow each other down.
    """
    where = own_device(device)
    if where.type == "cpu":
        keep_freed_memory()  # as the pipelines do
    sizes = _checked_sizes(micro_batch_sizes)
    limits = (("clip_grad_norm", clip_grad_norm),) if clip_grad_norm is not None else ()
    for what, value in (("threads", threads), ("budget_s", budget_s), *limits):
        if not value > 0:
            raise ValueError(f"{what} must be above 0, got {value}")
    layers = layers_of(model)
    asked = examples(example_inputs, target, sizes, where)
    with CallerGenerators(where), undisturbed(threads):
        measured = _LayerMeasurements(layers, asked, copy.deepcopy(loss_fn), where, autocast)
        measured.sweep(Model.split(model, len(layers), None).skips, budget_s)
        measured.update(Updates(optimizer, where, clip_grad_norm), budget_s)
    on_host = where.type == "cpu"
    return Profile(
        model=name or _model_name(model, len(layers)),
        device=f"cpu: {cpu_model()}, threads: {threads}" if on_host else torch.cuda.get_device_name(where),
        micro_batch_sizes=sizes,
        layers=measured.rows(),
        skips=measured.skips(),
        ties=_ties(layers),
        second_lane=tuple(measured.gains) or (1.0,) * len(sizes),
        step_s=measured.step_s,
        jitter=measured.jitter(),
    )


@dataclass
class _Samples:
    """Seconds of one layer at one size."""

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    input_s: list[float] = field(default_factory=list)
    rest_s: list[float] = field(default_factory=list)

    def backwards(self) -> tuple[float, float]:
        """The whole, and of it the input's part: in proportion to what the two parts take one after the other."""
        whole_s = typical(self.backward_s)
        input_s, rest_s = typical(self.input_s), typical(self.rest_s)
        return whole_s, min(whole_s, whole_s * input_s / max(input_s + rest_s, 1e-12))


class _LayerMeasurements:
    """A copy of the model, and what its layers were found to take."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        asked: Sequence[Example],
        loss_fn: LossFn | None,
        device: torch.device,
        autocast: torch.dtype | None,
    ) -> None:
        if isinstance(loss_fn, nn.Module):
            loss_fn.to(device)
        self._layers, self._asked = layers, asked
        self.names = layer_names(layers)
        self._device = device
        self._loss_fn, self._autocast = loss_fn, autocast
        self._samples = [[_Samples() for _ in asked] for _ in layers]
        self._sizes: list[Sizes] = []
        self._working: list[list[int]] = []
        self._updates: list[UpdateCosts] = []
        self.gains: list[float] = []
        self.step_s = 0.0

    def sweep(self, skips: Sequence[Skips], budget_s: float) -> None:
        """Time the layers on a copy of the whole model, or two, which are freed afterwards."""
        begin = time.perf_counter()
        sweep = self._new_sweep()
        for example in self._asked:  # the first of a kind is slow; it makes the gradients to which others add
            sweep.whole(example)
            sweep.split(example)
        self._sizes = [measure_sizes(sweep, example, skips) for example in self._asked]
        self._working = [
            measure_working(sweep, example, sizes.output) for example, sizes in zip(self._asked, self._sizes)
        ]
        left_s = _SWEEPS_SHARE * budget_s - (time.perf_counter() - begin)
        repeat(lambda number: self._round(sweep, number), left_s)
        if self._device.type == "cuda":
            share_s = _LANES_SHARE * budget_s / len(self._asked)
            pair = [sweep, self._new_sweep()]
            self.gains = [lane_gain(pair, example, share_s) for example in self._asked]

    def update(self, updates: Updates, budget_s: float) -> None:
        """Steps, with copies of one layer at a time."""
        self.step_s = updates.step_s
        share_s = _UPDATES_SHARE * budget_s / len(self._layers)
        self._updates = [updates.measure(layer, share_s) for layer in self._layers]

    def _new_sweep(self) -> Sweep:
        stage = _stage(self._layers, self._device)
        return Sweep(stage, self.names, self._loss_fn, self._autocast)

    def _round(self, sweep: Sweep, number: int) -> None:
        for example in self._asked:
            samples = [of_layer[example.number] for of_layer in self._samples]
            for s, forward_s, backward_s, _ in _rows_of(sweep.whole(example), samples):
                s.forward_s.append(forward_s)
                s.backward_s.append(backward_s)
            if number % 2:
                continue  # the parts are a ratio, which is found sooner
            for s, _, input_s, rest_s in _rows_of(sweep.split(example), samples):
                s.input_s.append(input_s)
                s.rest_s.append(rest_s)

    def jitter(self) -> float:
        """Relative spread of all layers' times from one sweep to the next, so that a slow drift does not count."""
        steps: list[float] = []
        for number in range(len(self._asked)):
            samples = [of_layer[number] for of_layer in self._samples]
            for kind in ("forward_s", "backward_s"):
                sums = [math.fsum(times) for times in zip(*(getattr(s, kind) for s in samples))]
                mean_s = statistics.fmean(sums)
                steps += [abs(b - a) / mean_s for a, b in pairwise(sums)]
        # Some are outliers. Of normal samples the median is 0.6745 times the square root of 2 standard deviations.
        return min(MOST_JITTER, statistics.median(steps) / (0.6745 * math.sqrt(2)))

    def rows(self) -> tuple[LayerProfile, ...]:
        return tuple(self._row(n) for n in range(len(self._layers)))

    def _row(self, n: int) -> LayerProfile:
        layer, update = self._layers[n], self._updates[n]
        backwards = [s.backwards() for s in self._samples[n]]
        return LayerProfile(
            name=self.names[n],
            forward_s=tuple(typical(s.forward_s) for s in self._samples[n]),
            backward_s=tuple(whole for whole, _ in backwards),
            input_backward_s=tuple(part for _, part in backwards),
            held_bytes=tuple(sizes.held[n] for sizes in self._sizes),
            output_bytes=tuple(sizes.output[n] for sizes in self._sizes),
            handed_bytes=tuple(sizes.handed[n] for sizes in self._sizes),
            working_bytes=tuple(working[n] for working in self._working),
            parameter_bytes=sum(p.nbytes for p in layer.parameters() if p.requires_grad),
            frozen_bytes=sum(t.nbytes for t in _frozen(layer)),
            optimizer_bytes=update.optimizer_bytes,
            update_s=update.update_s,
            elastic_s=update.elastic_s,
            accumulate_s=update.accumulate_s,
        )

    def skips(self) -> tuple[Skip, ...]:
        ends = sorted(self._sizes[0].skips)
        return tuple(Skip(*end, tuple(sizes.skips[end] for sizes in self._sizes)) for end in ends)


def _rows_of(times: Any, samples: Sequence[_Samples]) -> list[tuple[_Samples, float, float, float]]:
    rest_s = times.rest_s or [0.0] * len(samples)
    return list(zip(samples, times.forward_s, times.backward_s, rest_s))


def _stage(layers: Sequence[nn.Module], device: torch.device) -> Stage:
    """A copy of all layers, in training."""
    stage = Stage(layers, 0, 0, 0, device)
    stage.train()
    for p in stage.parameters():
        p.grad = None
    return stage


def _frozen(layer: nn.Module) -> list[torch.Tensor]:
    return [*(p for p in layer.parameters() if not p.requires_grad), *layer.buffers()]


def _ties(layers: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """Find parameters that several layers share, by those layers."""
    holders: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for n, layer in enumerate(layers):
        for p in layer.parameters():
            if p.requires_grad:
                holders.setdefault(id(p), []).append(n)
                sizes[id(p)] = p.nbytes
    shared: dict[tuple[int, ...], int] = {}
    for key, found in holders.items():
        if len(found) > 1:
            shared[tuple(found)] = shared.get(tuple(found), 0) + sizes[key]
    return tuple(Tie(found, size) for found, size in sorted(shared.items()))


def layer_names(layers: Sequence[nn.Module]) -> list[str]:
    """Name each layer: of a traced model by the module with which it begins, else by index and class."""
    names = []
    for n, layer in enumerate(layers):
        calls = getattr(layer, "calls", None)
        names.append(calls if isinstance(calls, str) and calls else f"{n} {type(layer).__name__}")
    return names


def _model_name(model: nn.Module | Sequence[nn.Module], layers: int) -> str:
    return type(model).__name__ if isinstance(model, nn.Module) else f"list of {layers} layers"


def _checked_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    if not sizes or any(type(b) is not int or b < 1 for b in sizes):
        raise ValueError(f"micro_batch_sizes must be whole numbers of at least 1, got {list(sizes)}")
    return tuple(sorted(set(sizes)))


def cpu_model() -> str:
    """Name of the processor."""
    for line in lines_of("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def lines_of(path: str) -> list[str]:
    """Lines of a system's file; none where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
