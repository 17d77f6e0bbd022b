"""``avgpipe bench schedules``: times avgpipe's schedules and torch's, with stages that wait instead of computing."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import product, repeat
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.torch_version import TorchVersion

from avgpipe.cli.output import arguments, show_status
from avgpipe.measure.tune import seconds_per_batch
from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan
from avgpipe.planning import Costs, steady_batch_s
from avgpipe.ranks.launch import run_on_ranks
from avgpipe.ranks.process import progress
from avgpipe.ranks.rendezvous import join
from avgpipe.units import format_bytes
from avgpipe_lab.bench import Role, Way, check_names, measuring, report, summarise
from avgpipe_lab.commands import SchedulesConfig

SCHEDULES = (
    *("1f1b", "all-forward-all-backward", "advance-forward"),
    *("interleaved-1f1b", "looped-bfs", "zero-bubble-h1", "interleaved-zero-bubble"),
    *("zero-bubble-v", "dualpipe-v"),
)
SYSTEMS = ("pipedream", "pipedream-2bw", "ea-pipe", "data-parallel", "model-parallel")
TORCH = {
    "torch-1f1b": pipelining.Schedule1F1B,
    "torch-gpipe": pipelining.ScheduleGPipe,
    "torch-advance-forward": None,  # avgpipe's schedule on torch's runtime
    "torch-interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
    "torch-zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    "torch-looped-bfs": pipelining.ScheduleLoopedBFS,
    "torch-zero-bubble-v": pipelining.ScheduleZBVZeroBubble,
    "torch-dualpipe-v": pipelining.ScheduleDualPipeV,
}
SEVERAL = {  # stages of a worker: two have half the bubble and twice the transfers; either may be faster
    "interleaved-1f1b": (2,),
    "looped-bfs": (2,),
    "interleaved-zero-bubble": (2,),
    "zero-bubble-v": (2,),
    "dualpipe-v": (2,),
    "torch-interleaved-1f1b": (1, 2),
    "torch-zero-bubble": (1, 2),
    "torch-looped-bfs": (2,),
    "torch-zero-bubble-v": (2,),
    "torch-dualpipe-v": (2,),
}
_IN_A_V = ("torch-zero-bubble-v", "torch-dualpipe-v")
ROWS = (*SCHEDULES, *SYSTEMS, *TORCH)
ALL = "all"  # instead of names of rows
# Schedules of both sides; each further row takes time.
DEFAULT = (*SCHEDULES[:3], "torch-1f1b", "torch-gpipe", "torch-interleaved-1f1b", "torch-zero-bubble")
_WHOLE_BATCHES = ("pipedream-2bw", "data-parallel")  # the other systems' batches are one micro-batch
_LEAST_ACTIVATION_BYTES = 64
_NOTES = """\
Stages wait and compute nothing; runtime, tensors and links are real. Times are of one pipeline in the steady state, the
medians of rounds. Simulated: transfers, updates and the host take no time."""


# ---- emulated stages -------------------------------------------------------------------------------------------------

_LATE_S = 1e-4  # a sleep may end this much too late, unlike a device: the rest is a busy wait
_PR_SET_TIMERSLACK = 29


def precise_sleeps() -> None:
    """Make the kernel wake this thread on time: by default it may be 50 microseconds late."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


@contextmanager
def occupied(seconds: float) -> Iterator[None]:
    """Occupy the device for ``seconds`` in all; the work done inside takes part of them."""
    end = time.perf_counter() + seconds
    yield
    time.sleep(max(0.0, end - time.perf_counter() - _LATE_S))
    while time.perf_counter() < end:
        pass


class EmulatedStage(nn.Module):
    """Map (samples, values) to the same shape in ``forward_s``; backward in ``backward_s``, half of it per gradient.

    Its one weight is added to every value. A schedule that splits the backward can run the halves apart: they
    are different nodes of the graph, which meet in an addition. The first stage, whose input needs no
    gradient, spends all of it on its weight.
    """

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with occupied(self.forward_s):
            half = self.backward_s / 2
            offset = takes(self.weight, x.shape, half if x.requires_grad else self.backward_s)
            # Torch's own addition, no Function: a schedule that splits the graph can run it for one of its
            # gradients alone.
            return takes(x, x.shape, half) + offset


class _Takes(torch.autograd.Function):
    """Expand x without writing it; its gradient occupies the device and is in its own memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: Sequence[int], seconds: float) -> torch.Tensor:
        ctx.shape, ctx.seconds = x.shape, seconds
        return x.expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with occupied(ctx.seconds):
            return grad.sum_to_size(ctx.shape).clone(memory_format=torch.contiguous_format), None, None


def takes(x: torch.Tensor, shape: Sequence[int], seconds: float) -> torch.Tensor:
    """Return x expanded to ``shape``; the backward occupies the device for ``seconds``."""
    made: torch.Tensor = _Takes.apply(x, shape, seconds)  # type: ignore[no-untyped-call]
    return made


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean of the output; its gradient is expanded without writing it."""
    return output.sum() / output.numel()


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


# ---- rows ------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A way of training: a schedule or system of avgpipe, or of torch, with ``chunks`` stages on each worker."""

    name: str
    what: str
    pipelines: int
    chunks: int


def rows(config: SchedulesConfig) -> Iterator[Row]:
    """Make the requested rows, in the order of the table."""
    chosen = ROWS if ALL in config.rows else config.rows or DEFAULT
    for what in (name for name in ROWS if name in chosen):
        name = what.replace("-", " ", 1) if what in TORCH else f"avgpipe {what}"
        for pipelines, chunks in product(
            config.pipelines if what == "advance-forward" else (1,), SEVERAL.get(what, (1,))
        ):
            which = f", N = {pipelines}" if what == "advance-forward" else ""
            which += f", {chunks} a rank" if what in SEVERAL else ""
            yield Row(name + which, what, pipelines, chunks)


def stage_s(config: SchedulesConfig, stages: int) -> tuple[float, float]:
    """Return the seconds of a stage's forward and backward, such that all rows do the same work."""
    share = config.stages / stages / 1e3
    return config.forward_ms * share, config.backward_ms * share


def run(config: SchedulesConfig) -> None:
    with arguments():
        _check(config)
    with measuring():
        asked = {"config": config.to_json()}  # includes the timeout of waits
        section, *_ = run_on_ranks(f"{__name__}:worker", config.stages, asked, say=show_status)
    report("schedules", config, [section], _NOTES)


def _check(config: SchedulesConfig) -> None:
    size = config.activation_bytes
    if size < _LEAST_ACTIVATION_BYTES or size % 4:
        least = f"must be a multiple of 4 bytes and at least {_LEAST_ACTIVATION_BYTES}"
        raise ValueError(f"--activation {size}: {least}")
    check_names("--rows", config.rows, (*ROWS, ALL))


# ---- on every rank ---------------------------------------------------------------------------------------------------


def worker(config: str) -> dict[str, Any]:
    """Measure as a rank; the result of rank 0 is used, where batches end last."""
    asked = SchedulesConfig.from_json(config)
    torch.set_num_threads(1)
    precise_sleeps()
    join(asked.timeout_s, "gloo")  # a timeout for waits in all rows, torch's too
    micro_batch_s = (asked.forward_ms + asked.backward_ms) / 1e3
    ways = [Way("no bubble: M (t_f + t_b)", "limit"), Way("flush: (M+K-1) (t_f + t_b)", "limit")]
    samples = [[(asked.micro_batches + n) * micro_batch_s] for n in (0, asked.stages - 1)]
    refused: dict[str, str] = {}
    for row in rows(asked):
        dist.barrier()
        progress(row.name)
        try:
            simulated_s, seconds = (_torch_row if row.what in TORCH else _our_row)(row, asked)
        except (ValueError, ImportError) as error:
            # Some schedules need M to be a multiple of something, or at least K; ours on torch needs a torch
            # version that it knows.
            refused[row.name] = " ".join(str(error).split())
        else:
            role: Role = "baseline" if row.what in TORCH else "ours"
            ways.append(Way(row.name, role, simulated_s=simulated_s))
            samples.append(seconds)
    dist.barrier()
    sizes = f"stages {asked.stages}, micro-batches {asked.micro_batches}"
    times = f"forward {asked.forward_ms:g} ms, backward {asked.backward_ms:g} ms"
    case = f"emulated: {sizes}, {times}, activations {format_bytes(asked.activation_bytes)}"
    head = {"question": "batch", "case": case, "asks": "How long does a batch take?"}
    return summarise(head, ways, samples, refused)


def _our_row(row: Row, config: SchedulesConfig) -> tuple[float, list[float]]:
    """Return simulated seconds of a batch, and rounds; the pipeline is closed after, as idle ones poll."""
    if row.pipelines > config.micro_batches:
        raise ValueError(f"{row.pipelines} pipelines cannot share {config.micro_batches} micro-batches")
    if row.what in SYSTEMS:
        given = {"micro_batches": config.micro_batches} if row.what in _WHOLE_BATCHES else {}
        plan = Plan.for_system(row.what, stages=config.stages, **given)
    else:
        plan = Plan(config.stages * row.chunks, row.pipelines, config.micro_batches, schedule=row.what)
    # A stage for each module; the steady state is timed, which is most of a training.
    plan = replace(plan, partition=tuple(range(1, plan.stages)), warmup_rounds=0)
    forward_s, backward_s = stage_s(config, plan.stages)
    # Batches of the plan that make one batch of the comparison.
    per_batch = config.micro_batches // plan.micro_batches
    in_flight = plan.batches_in_flight
    # The first stage spends its backward on the weights alone.
    costs = Costs(forward_s, backward_s, input_backward_s=[0.0, *[backward_s / 2] * (plan.stages - 1)])
    shares = per_batch * plan.shares  # shares of pipelines
    simulated_s = shares * steady_batch_s(plan.build_schedule(), costs, pipelines=plan.pipelines)
    stages = [EmulatedStage(forward_s, backward_s) for _ in range(plan.stages)]
    inputs, targets = (x[: plan.micro_batches] for x in _batch(config))
    with Pipeline(
        stages, plan, loss_fn=mean_loss, optimizer=_sgd, timeout_s=config.timeout_s, link=config.link
    ) as pipeline:

        def losses(count: int) -> Iterator[float]:
            return (result.loss for result in pipeline.train(repeat((inputs, targets), count)))

        # The first batches allocate the buffers, and measure the speed of connections.
        counts = [in_flight, *[per_batch * config.batches] * config.rounds]
        return simulated_s, [per_batch * seconds_per_batch(losses, in_flight, n) for n in counts][1:]


def torch_stages(what: str, rank: int, ranks: int, stages: int) -> Sequence[int]:
    """Return the stages that a rank has in a row of torch's."""
    if what not in _IN_A_V:
        return range(rank, stages, ranks)
    if TorchVersion(torch.__version__) < "2.13":  # a rank sends to itself there before the first batch
        raise ValueError(
            f"torch {torch.__version__} cannot run schedules in a V over gloo: install torch 2.13"
        )
    return rank, stages - 1 - rank


def _torch_row(row: Row, config: SchedulesConfig) -> tuple[None, list[float]]:
    count, cpu = config.stages * row.chunks, torch.device("cpu")
    placed = torch_stages(row.what, dist.get_rank(), config.stages, count)
    own = [EmulatedStage(*stage_s(config, count)).train() for _ in placed]
    stages = [pipelining.PipelineStage(m, k, count, cpu) for m, k in zip(own, placed)]
    kind: Any = TORCH[row.what] or import_module("avgpipe.interop.torch_pipelining").ScheduleAdvanceForward
    one = row.what not in SEVERAL
    schedule = kind(stages[0] if one else stages, config.micro_batches, loss_fn=mean_loss)
    optimizer, (inputs, targets) = _sgd(nn.ModuleList(own).parameters()), _batch(config)

    def losses(batches: int) -> Iterator[None]:
        for _ in range(batches):
            last = {"target": targets, "losses": []} if count - 1 in placed else {}
            schedule.step(*((inputs,) if 0 in placed else ()), **last, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
            yield None

    return None, [seconds_per_batch(losses, 1, count) for count in (1, *[config.batches] * config.rounds)][1:]


def _batch(config: SchedulesConfig) -> tuple[torch.Tensor, torch.Tensor]:
    count = config.micro_batches
    return torch.ones(count, config.activation_bytes // 4), torch.zeros(count, 1)
