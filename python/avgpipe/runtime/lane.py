"""One pipeline's walk through its schedule on one stage.

A lane is a list of steps and a place in it. ``missing`` tells what the next step still waits for, ``advance``
performs it. Steps are the schedule's F m and B m, and around the update:

    T   send the gradients of parameters that other stages hold too
    S   receive theirs and add up, in stage order, so all holders step alike
    N   add this stage's squared gradient norm to that of the stages behind it (only when clipping)
    U   scale the gradients by the norm of all stages, step the optimizer, average
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from avgpipe.errors import StageError
from avgpipe.runtime.backward import run_backward
from avgpipe.runtime.batch import LossFn, LossWeights, to_device
from avgpipe.runtime.context import Position
from avgpipe.runtime.graphs import StageGraphs
from avgpipe.runtime.links.channel import Link
from avgpipe.runtime.mailbox import Mailbox
from avgpipe.runtime.memory import SavedBytes
from avgpipe.runtime.message import Key, tensors_of
from avgpipe.runtime.replica import Replica
from avgpipe.runtime.streams import Handed, LaneStream
from avgpipe.schedule import Schedule


@dataclass(frozen=True)
class TrainingOptions:
    """What all lanes share."""

    loss_fn: LossFn
    clip_grad_norm: float | None
    autocast: torch.dtype | None
    recompute: str
    stages: int
    cuda_graphs: bool = False


@dataclass
class Work:
    """A batch that a lane trains on. ``inputs`` matter on the first stage, ``targets`` and ``weights`` on the last.

    ``copied``: inputs and targets, if they are on their way to a device.
    """

    batch: int
    schedule: Schedule
    inputs: Sequence[Any]
    targets: Sequence[Any]
    weights: LossWeights
    copied: Handed | None = None


class _Saved(NamedTuple):
    """What a forward leaves for its backward: inputs that want gradients, and where those of the outputs go in.

    Not the outputs themselves: of those, autograd keeps what it needs. ``grads``: of the outputs, where this stage
    knows them, as the last one does.
    """

    inputs: list[torch.Tensor]
    outputs: list[Any]
    grads: list[torch.Tensor] | None = None


class Step(NamedTuple):
    """What a lane does next. ``urgency``: less goes first, backwards before forwards, then the oldest batch."""

    kind: str
    micro_batch: int  # -1: none
    batch: int
    needs: tuple[Key, ...]
    begins: bool  # the first of its batch
    urgency: tuple[bool, int, int]

    def __str__(self) -> str:
        action = self.kind if self.micro_batch < 0 else f"{self.kind}{self.micro_batch}"
        return f"{action} of batch {self.batch}"


@dataclass
class _Progress:
    """State of the batch in hand."""

    work: Work
    steps: list[Step]
    cursor: int = 0
    saved: dict[int, _Saved] = field(default_factory=dict)
    # Of micro-batches, with their factors.
    losses: list[tuple[torch.Tensor, float]] = field(default_factory=list)
    loss: torch.Tensor | None = None  # of the whole batch; float64, known after the last backward
    scale: torch.Tensor | None = None


class Lane:
    """``shared``: for every other stage, which of this stage's parameters it holds too (indices into the arena,
    in an order that both agree on); ``foreign``: those whose gradient norm another, earlier stage counts.
    ``stream``: where the steps run, None for a CPU.
    """

    def __init__(
        self,
        replica: Replica,
        options: TrainingOptions,
        mailbox: Mailbox,
        links: Mapping[int, Link],
        shared: dict[int, list[int]],
        stream: LaneStream | None = None,
    ) -> None:
        self.replica, self._options, self.stream = replica, options, stream
        self._mailbox, self._messages, self._links = mailbox, mailbox.messages, links
        self.pipeline, self.stage = replica.pipeline, replica.stage.index
        self._device = replica.stage.device
        self._layers = StageGraphs(replica.stage) if options.cuda_graphs else replica.stage.forward
        self._shared = shared
        self._foreign = {p for other, mine in shared.items() if other < self.stage for p in mine}
        self._first, self._last = self.stage == 0, self.stage == options.stages - 1
        self._now: _Progress | None = None
        self.step: Step | None = None  # the next one
        self.sent_at: float | None = None  # when the last step began to send, on the clock time.perf_counter
        self.measures = False  # whether the next forward counts what is held for its backward
        self.held_bytes = 0  # what one micro-batch holds, as counted

    # ---- taking on a batch ---------------------------------------------------------------------------------------

    @property
    def batch(self) -> int | None:
        """The batch in hand."""
        return self._now.work.batch if self._now else None

    def start(self, work: Work) -> None:
        assert self._now is None, f"pipeline {self.pipeline} is still at batch {self.batch}"
        self._now = _Progress(work, self._steps(work))
        self.step = self._now.steps[0]
        self.replica.stage.train()
        if self.stream is not None:
            self.stream.begin(work.copied)

    def _steps(self, work: Work) -> list[Step]:
        steps: list[tuple[str, int]] = []
        for action in work.schedule.columns[self.stage]:
            if action.kind == "U":
                steps += [("T", -1), ("S", -1)] if self._shared else []
                steps += [("N", -1)] if self._options.clip_grad_norm is not None else []
                steps.append(("U", -1))
            else:
                steps.append((action.kind, -1 if action.micro_batch is None else action.micro_batch))
        return [
            Step(
                kind,
                m,
                work.batch,
                self._needs(kind, m, work.batch),
                n == 0,
                (kind == "F", work.batch, -self.stage),
            )
            for n, (kind, m) in enumerate(steps)
        ]

    def finish(self) -> torch.Tensor | None:
        """The batch's loss, once all its steps are done; the lane is then free for the next batch."""
        now = self._now
        if now is None or self.step is not None:
            return None
        self._now = None
        if self.stream is not None:
            self.stream.end()
        assert now.loss is not None
        return now.loss

    # ---- readiness -----------------------------------------------------------------------------------------------

    def missing(self) -> list[Key]:
        """Messages that the next step still waits for."""
        return [k for k in self.step.needs if k not in self._messages] if self.step else []

    def ready(self) -> bool:
        step = self.step
        if step is None:
            return False
        for key in step.needs:
            if key not in self._messages:
                return False
        if step.kind == "U":
            return self.replica.settled and self.replica.ready
        return not step.begins or self.replica.settled

    def _needs(self, kind: str, m: int, batch: int) -> tuple[Key, ...]:
        """Messages that a step consumes."""
        if (kind == "F" and not self._first) or (
            kind == "U" and self._options.clip_grad_norm is not None and not self._first
        ):
            sources, message = [self.stage - 1], "F" if kind == "F" else "C"
        elif kind in "BN" and not self._last:
            sources, message = [self.stage + 1], kind
        elif kind == "S":
            sources, message = sorted(self._shared), "T"
        else:
            return ()
        return tuple(Key(message, self.pipeline, source, self.stage, batch, m) for source in sources)

    def _send(self, kind: str, to: int, m: int, value: Any) -> None:
        assert self._now is not None
        if self.sent_at is None:
            self.sent_at = time.perf_counter()
        self._links[to].send(Key(kind, self.pipeline, self.stage, to, self._now.work.batch, m), value)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Perform the next step; what it needs must be there."""
        now, step = self._now, self.step
        assert now is not None
        assert step is not None
        self.sent_at = None
        if self.stream is None:
            _STEPS[step.kind](self, now, step)
        else:
            place = self.stage, self.pipeline, step.batch, step.micro_batch, step.kind
            with self.stream.step(place, step.begins):
                _STEPS[step.kind](self, now, step)
        now.cursor += 1
        self.step = now.steps[now.cursor] if now.cursor < len(now.steps) else None

    def _forward(self, now: _Progress, step: Step) -> None:
        m = step.micro_batch
        value = to_device(now.work.inputs[m], self._device) if self._first else self._take(step)
        inputs = [t for t in tensors_of(value) if t.requires_grad]
        run = self._measured_run if self.measures else self._run
        autocast = self._options.autocast
        if autocast is None:
            output = run(now, m, value)
        else:
            with torch.autocast(self._device.type, dtype=autocast):
                output = run(now, m, value)
        del value  # the message's memory is free again once nothing needs it
        edges = [get_gradient_edge(t) for t in tensors_of(output) if t.requires_grad]
        if self._last:
            now.saved[m] = _Saved(inputs, edges, [self._seed(now, m, output)] if edges else [])
        else:
            now.saved[m] = _Saved(inputs, edges)
            self._send("F", self.stage + 1, m, output)

    def _run(self, now: _Progress, m: int, value: Any) -> Any:
        place = Position(self.pipeline, now.work.batch, m)
        run = self.replica.stage.recomputed if self._recomputes(now, m) else self._layers
        output = run(value, place)
        return self._loss(now, m, output) if self._last else output

    def _measured_run(self, now: _Progress, m: int, value: Any) -> Any:
        """As _run, counting what the micro-batch holds until its backward."""
        self.measures = False
        saved = SavedBytes(w.untyped_storage().data_ptr() for w in self.replica.arena.weights)
        with saved.counting():
            output = self._run(now, m, value)
            for tensor in () if self._first else tensors_of(value):
                saved.count(tensor)  # held in any case: its gradient is wanted
        self.held_bytes = saved.bytes
        return output

    def _take(self, step: Step) -> Any:
        """The message that a step with one need waited for."""
        message = self._messages.pop(step.needs[0])
        return message.received() if isinstance(message, Handed) else message

    def _recomputes(self, now: _Progress, m: int) -> bool:
        how = self._options.recompute
        return how == "always" or (how == "except-last" and m < now.work.schedule.micro_batches - 1)

    def _loss(self, now: _Progress, m: int, output: Any) -> torch.Tensor | None:
        """This micro-batch's loss; None when nothing in it counts."""
        factor = now.work.weights.factors[m]
        if factor == 0.0:  # a mean over nothing is 0/0, and so would its gradient be
            return None
        loss = scalar_loss(self._options.loss_fn, output, to_device(now.work.targets[m], self._device))
        now.losses.append((loss.detach(), factor))
        return loss

    def _seed(self, now: _Progress, m: int, loss: torch.Tensor) -> torch.Tensor:
        """The gradient of the batch's loss by a micro-batch's."""
        return torch.full((), now.work.weights.factors[m], dtype=loss.dtype, device=loss.device)

    @staticmethod
    def _batch_loss(now: _Progress) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=now.losses[0][0].device if now.losses else None)
        for loss, factor in now.losses:
            total.add_(loss, alpha=factor)
        return total

    def _backward(self, now: _Progress, step: Step) -> None:
        m = step.micro_batch
        saved = now.saved.pop(m)
        roots, grads = saved.outputs, saved.grads
        if grads is None:
            # Gradients of the outputs that wanted one, and after the last backward the loss.
            received = self._take(step)
            if len(received) > len(saved.outputs):
                now.loss = received.pop()
            pairs = [(edge, g) for edge, g in zip(saved.outputs, received) if g is not None]
            roots, grads = [p[0] for p in pairs], [p[1] for p in pairs]
            del received, pairs
        if roots:
            run_backward(roots, grads)
        done = not now.saved and not self._forwards_left(now)
        if done and self._last:
            now.loss = self._batch_loss(now)
        if not self._first:
            # the batch's loss rides on its last gradient, so that every stage learns it without a message more
            message = [x.grad for x in saved.inputs]
            if done:
                message.append(now.loss)
            self._send("B", self.stage - 1, m, message)

    @staticmethod
    def _forwards_left(now: _Progress) -> bool:
        return any(step.kind == "F" for step in now.steps[now.cursor :])

    def _send_shared(self, now: _Progress, step: Step) -> None:
        grads = [p.grad for p in self.replica.arena.parameters]
        for other, mine in self._shared.items():
            # a copy: the sum is written over these before a neighbour in this process has read them
            self._send("T", other, -1, [_copy(grads[p]) for p in mine])

    def _sum_shared(self, now: _Progress, step: Step) -> None:
        parameters = self.replica.arena.parameters
        parts: dict[int, dict[int, torch.Tensor | None]] = {}
        for p in {p for mine in self._shared.values() for p in mine}:
            parts[p] = {self.stage: parameters[p].grad}
        for key in step.needs:
            for p, grad in zip(self._shared[key.source], self._mailbox.take(key)):
                parts[p][key.source] = grad
        for p, by_stage in parts.items():
            grads = [g for _, g in sorted(by_stage.items(), key=lambda item: item[0]) if g is not None]
            if grads:
                total = grads[0].clone()
                for g in grads[1:]:
                    total.add_(g)
                parameters[p].grad = total

    def _norm(self, now: _Progress, step: Step) -> None:
        parameters = enumerate(self.replica.arena.parameters)
        own = [p.grad for n, p in parameters if n not in self._foreign and p.grad is not None]
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if own:
            norms = torch.stack([n.double() for n in torch._foreach_norm(own)])
            total = norms.square().sum()
        if not self._last:
            total = total + self._take(step)
        if self._first:
            limit = self._options.clip_grad_norm
            assert limit is not None
            now.scale = (limit / (total.sqrt() + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        else:
            self._send("N", self.stage - 1, -1, total)

    def _update(self, now: _Progress, step: Step) -> None:
        if self._options.clip_grad_norm is not None:
            if not self._first:
                now.scale = self._take(step)
            assert now.scale is not None
            if not self._last:
                self._send("C", self.stage + 1, -1, now.scale)
            self.replica.scale_grads(now.scale)
        self.replica.step()


_STEPS = {
    "F": Lane._forward,
    "B": Lane._backward,
    "T": Lane._send_shared,
    "S": Lane._sum_shared,
    "N": Lane._norm,
    "U": Lane._update,
}


def scalar_loss(loss_fn: LossFn, output: Any, target: Any) -> torch.Tensor:
    """The loss of a micro-batch, refused unless it is a scalar tensor."""
    loss = loss_fn(output, target)
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise StageError(
            f"loss_fn returned {got}; it must return a scalar tensor, the mean or sum over the samples"
        )
    return loss


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()
