"""A small float32 model with any of the options of the guide "What composes": in a pipeline, and on one device.

One device does the same by hand: the same micro-batches in their order, the same autocast, scaler, compiler, conversion
and optimizer, and the same age of the weights that a stage's gradients are of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from avgpipe import ElasticAveraging, Pipeline, Plan, Reference
from avgpipe import device as devices
from tests.options import grouped
from tests.runtime.capture_rules import capture_rules

LOSS = nn.CrossEntropyLoss()
WIDTH, SAMPLES, CUT = 64, 16, 2  # matrices of 64 x 64 are just large enough for states of 8 bits
DECAY = 0.7


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.lin(self.norm(x)))


def blocks(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(3)), nn.Linear(width, width))


def labelled(width: int = WIDTH, count: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(SAMPLES, width, generator=generator),
            torch.randint(width, (SAMPLES,), generator=generator),
        )
        for _ in range(count)
    ]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Setup:
    """What is trained, and how, whatever the plan is.

    Attributes:
        output: makes of what the whole model returns what a pipeline does.
        convert: changes the model before it is given away.
        backend: of torch.compile, for every layer; None: nothing is compiled.
    """

    model: Callable[[], nn.Module] = blocks
    batches: Callable[[], list[Any]] = labelled
    loss_fn: Any = LOSS
    output: Callable[[Any], Any] = lambda output: output
    dtype: torch.dtype = torch.float32
    convert: Callable[[nn.Module], nn.Module] = lambda model: model
    optimizer: Callable[[Any], Any] = adamw
    autocast: torch.dtype | None = None
    backend: str | None = None
    comes_compiled: bool = False
    graphs: bool = False
    ema: bool = False

    def made(self) -> nn.Module:
        model = self.convert(self.model().to(self.dtype))
        if self.comes_compiled:
            for layer in model.children():
                layer.compile(backend=self.backend)
        return model

    def data(self) -> list[Any]:
        batches = self.batches() * (2 if self.graphs else 1)  # the first two of a pipeline run without
        return [(x.to(self.dtype) if x.is_floating_point() else x, y) for x, y in batches]

    def pipeline(self, plan: Plan, **more: Any) -> Pipeline:
        compiles = self.backend is not None and not self.comes_compiled
        settings = {
            "loss_fn": self.loss_fn,
            "optimizer": self.optimizer,
            "autocast": self.autocast,
            "compile": {"backend": self.backend} if compiles else False,
            "cuda_graphs": self.graphs,
            "ema_decay": DECAY if self.ema else None,
            **more,
        }
        return Pipeline(self.made(), plan, **grouped(**settings))

    def device(self) -> AbstractContextManager[Any]:
        """Where pipelines of it run: the CPU, with a stand-in for CUDA graphs where these are asked for."""
        return capture_rules() if self.graphs else nullcontext()


class Result(NamedTuple):
    losses: list[float]
    state: dict[str, torch.Tensor]
    averaged: dict[str, torch.Tensor] | None = None  # over time
    evaluated: float = 0.0
    predicted: torch.Tensor | None = None


def in_a_pipeline(setup: Setup, plan: Plan, **more: Any) -> Result:
    batches = setup.data()
    with setup.pipeline(plan, **more) as p:
        found = result_of(p, setup, [r.loss for r in p.train(batches)], batches)
    if setup.graphs:
        assert any(graph.replays for graph in devices.backend.graphs), "no batch was launched as a graph"
    return found


def result_of(p: Pipeline, setup: Setup, losses: list[float], batches: list[Any]) -> Result:
    averaged = p.state_dict("ema") if setup.ema else None
    return Result(losses, p.state_dict(), averaged, p.evaluate(batches).loss, p.predict(batches[0][0]))


def assert_equal(ours: Result, theirs: Result) -> None:
    """In every bit."""
    assert ours.losses == theirs.losses
    for mine, other in ((ours.state, theirs.state), (ours.averaged or {}, theirs.averaged or {})):
        assert list(mine) == list(other)
        assert [name for name in mine if not torch.equal(mine[name], other[name])] == []
    assert ours.evaluated == theirs.evaluated
    assert ours.predicted is not None
    assert torch.equal(ours.predicted, theirs.predicted)


# ---- one device ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ways:
    """What a plan makes of training, but for the stages.

    Attributes:
        micro_batches: of a batch.
        shares: parts of each batch whose gradients are summed, each by itself, before they are put together.
        dealt: whether micro-batches are dealt to the shares in turn, as to the replicas of a stage.
        elastic: whether each share has a replica and an optimizer of its own.
        delays: by how many updates the gradients of the two stages are late.
        predicts: whether stages compute with weights that SGD's momentum predicts for the time of the update.
    """

    micro_batches: int = 2
    shares: int = 1
    dealt: bool = False
    elastic: bool = False
    delays: tuple[int, int] = (0, 0)
    predicts: bool = False


class _Replica:
    """A whole model with its optimizer."""

    def __init__(self, setup: Setup, reference: Reference | None, number: int, like: nn.Module) -> None:
        self.setup, self.model = setup, copy.deepcopy(like)
        if setup.backend is not None:
            for layer in self.model.children():
                layer.compile(backend=setup.backend)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        made = setup.optimizer(self.parameters)
        self.optimizer = made if reference is None else ElasticAveraging(made, reference, number)
        self.scaler = torch.amp.GradScaler("cpu", enabled=setup.autocast is torch.float16)

    def forward(self, x: Any, y: Any) -> torch.Tensor:
        autocast = self.setup.autocast
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            loss: torch.Tensor = self.setup.loss_fn(self.output(x), y)
        return loss

    def output(self, x: Any) -> Any:
        return self.setup.output(self.model(x))

    def add_gradients(self, parts: Sequence[Any], samples: int) -> float:
        total = 0.0
        for part, answer in parts:
            loss, factor = self.forward(part, answer), len(answer) / samples
            self.scaler.scale(loss * factor).backward()
            total += float(loss.detach()) * factor
        return total

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def on_one_device(setup: Setup, ways: Ways) -> Result:
    torch.compiler.reset()
    batches, like = setup.data(), setup.made()
    trainable = [p for p in like.parameters() if p.requires_grad]
    reference = Reference(trainable, replicas=ways.shares, staleness=1) if ways.elastic else None
    replicas = [_Replica(setup, reference, i, like) for i in range(ways.shares if ways.elastic else 1)]
    first = replicas[0]
    ema = AveragedModel(_in_float32(first), multi_avg_fn=get_ema_multi_avg_fn(DECAY)) if setup.ema else None
    history: list[list[torch.Tensor]] = []
    losses = []
    for x, y in batches:
        total = 0.0
        parts, each = _micro_batches(x, y, ways), ways.micro_batches // ways.shares
        shares = [
            parts[i :: ways.shares] if ways.dealt else parts[i * each : (i + 1) * each]
            for i in range(ways.shares)
        ]
        if reference is not None:
            for replica, share in zip(replicas, shares):
                total += replica.add_gradients(share, len(y) // len(shares)) / len(shares)
                replica.step()
        else:
            newest = _show_older(first, history, ways) if any(ways.delays) else None
            sums: list[list[Any]] = []
            for share in shares:
                total += first.add_gradients(share, len(y))
                sums.append([p.grad for p in first.parameters])
                first.optimizer.zero_grad()
            for p, *grads in zip(first.parameters, *sums):
                p.grad = sum(grads[1:], grads[0])
            if newest is not None:
                _fill(first.parameters, newest)
            first.step()
        if ema is not None:
            with reference.applied_to(first.model) if reference is not None else nullcontext():
                ema.update_parameters(_in_float32(first))
        losses.append(total)
    with reference.applied_to(first.model) if reference is not None else nullcontext(), torch.no_grad():
        first.model.eval()
        state = copy.deepcopy(first.model.state_dict())
        values = [_evaluated(first, _micro_batches(x, y, ways)) for x, y in batches]
        predicted = torch.cat([first.output(part) for part, _ in _micro_batches(*batches[0], ways)])
    averaged = None if ema is None else ema.module.to(setup.dtype).state_dict()
    return Result(losses, state, averaged, sum(values) / len(values), predicted)


def _micro_batches(x: Any, y: Any, ways: Ways) -> list[Any]:
    return list(zip(x.tensor_split(ways.micro_batches), y.tensor_split(ways.micro_batches)))


def _evaluated(replica: _Replica, parts: Sequence[Any]) -> float:
    """In full precision, without autocast, as a pipeline evaluates."""
    samples = sum(len(answer) for _, answer in parts)
    losses = [replica.setup.loss_fn(replica.output(part), answer) for part, answer in parts]
    return sum(float(loss) * len(answer) for loss, (_, answer) in zip(losses, parts)) / samples


def _in_float32(replica: _Replica) -> nn.Module:
    """What is averaged: a pipeline averages weights of 16 bits in 32."""
    return copy.deepcopy(replica.model).float()


def _fill(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for p, value in zip(parameters, values):
            p.copy_(value)


def _show_older(replica: _Replica, history: list[list[torch.Tensor]], ways: Ways) -> list[torch.Tensor]:
    """Give each stage the weights that its gradients are of, and return the newest."""
    newest = [p.detach().clone() for p in replica.parameters]
    seen = [list(newest)]
    if ways.predicts:  # those of each version, predicted from the momenta that were there with it
        group, state = replica.optimizer.param_groups[0], replica.optimizer.state
        momenta = [state[p]["momentum_buffer"] if p in state else None for p in replica.parameters]
        seen += [
            [_ahead(w, u, delay * group["lr"]) for w, u in zip(newest, momenta)]
            for delay in range(1, max(ways.delays) + 1)
        ]
    history.append(seen)  # type: ignore[arg-type]
    stages = [int(int(name.split(".")[0]) >= CUT) for name, _ in replica.model.named_parameters()]
    now = len(history) - 1
    chosen = []
    for n, stage in enumerate(stages):
        delay = min(ways.delays[stage], now)
        versions = history[now - delay]
        chosen.append(versions[delay if ways.predicts else 0][n])
    _fill(replica.parameters, chosen)
    return newest


def _ahead(weight: torch.Tensor, momentum: torch.Tensor | None, rate: float) -> torch.Tensor:
    if momentum is None:
        return weight
    return (weight.float() - rate * momentum.float()).to(weight.dtype)
