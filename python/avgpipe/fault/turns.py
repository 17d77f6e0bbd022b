"""A stage's part in the steps of isolated pipelines: it publishes its update, and applies all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch

from avgpipe.elastic.reference import Reference
from avgpipe.errors import PipelineError
from avgpipe.fault.exchange import Published, TurnExchange
from avgpipe.fault.slots import Like
from avgpipe.fault.states import States
from avgpipe.links.link import Key
from avgpipe.runtime.compute import BatchState
from avgpipe.runtime.integrity import digest
from avgpipe.runtime.loss import BatchEnd
from avgpipe.runtime.route import Route, Step, StepKind
from avgpipe.runtime.streams import LaneStream
from avgpipe.runtime.trained_stage import TrainedStage
from avgpipe.runtime.worker import Worker


class Turns:
    """Publishes and applies the updates of one stage replica.

    Args:
        worker: that holds it.
        stream: of its lane; None on a CPU.
    """

    def __init__(
        self,
        worker: Worker,
        route: Route,
        exchange: TurnExchange,
        states: States,
        stream: LaneStream | None = None,
    ) -> None:
        self._trained, self._route = worker.trained[route.replica, route.pipeline], route
        self._reference: Reference | None = worker.references[route.replica]
        self._mailbox, self._exchange, self._states = worker.mailbox, exchange, states
        every = worker.spec.options.verify_every
        # Steps after which pipelines compare their references; None: never.
        self._verify_every = every and max(1, every // worker.spec.running.batches_per_round)
        self._next = exchange.key(route.pipeline, route.replica, 0)
        self._published = self._made = 0  # steps; the next has this number
        self._last: Published | None = None  # what counts in the last step that was applied to this state
        self._averaging: Callable[[], AbstractContextManager[None]] = (
            nullcontext if stream is None else stream.issuing
        )

    @staticmethod
    def like(trained: TrainedStage, reference: Reference | None) -> Like:
        """Return the shapes of what is published."""
        return Like([] if reference is None else reference.z.flats, [*_averaged(trained).values()])

    def resume(self, turn: int) -> None:
        """Continue with a step after the state was replaced; all earlier steps have ended."""
        self._last = None
        self._next = self._next._replace(batch=turn)
        self._published = self._made = turn
        self._exchange.note_applied(self._route.replica, turn)

    def note_step(self) -> None:
        self._made += 1

    def publish(self, state: BatchState) -> None:
        """Publish the result of a step; once for each step."""
        work, reference, elastic = state.work, self._reference, self._trained.elastic
        is_early = self._route.publishes
        if is_early and not work.idles and elastic is not None:
            elastic.publish(state.skips)
        values: dict[str, Any] = {**work.names, "has_update": False, "without": []}
        if not work.idles:
            weight = 0.0 if work.weights is None else work.weights.total
            values["end"] = BatchEnd.of(state.outcome, state.metrics, state.norm, state.lr, weight)
        updates: list[torch.Tensor] = []
        if reference is not None:
            has_none = not work.is_step or (is_early and work.idles)
            update = None if has_none else self._trained.reference_update
            values["has_update"] = update is not None
            updates = [] if update is None else update
            values["without"] = reference.without_gradient(self._route.pipeline)
        turn = self._published
        if reference is not None and self._verify_every is not None and turn % self._verify_every == 0:
            values["reference"] = reduce(lambda so_far, flat: digest(flat, so_far), reference.z.flats, 0)
        assert turn == state.work.batch, "steps are published in order"
        self._published = turn + 1
        buffers = [*_averaged(self._trained).values()]
        self._exchange.publish(self._route.replica, turn, values, updates, buffers)

    def collect(self) -> None:
        """Apply what all have published, once it is there and this stage has made its own step."""
        if self._next.batch < self._made and self._next in self._mailbox:
            with self._averaging():
                self._take_in(self._mailbox.take(self._next))
            self._next = self._next._replace(batch=self._next.batch + 1)
            self._exchange.note_applied(self._route.replica, self._next.batch)
        with self._averaging():
            self._states.hand_over(self._route.replica, self._next.batch)

    def _compare(self, published: Published) -> None:
        """Fail where the reference here is not that of most pipelines; of two pipelines both fail."""
        own = self._route.pipeline
        sums = {i: v["reference"] for i, v in zip(published.pipelines, published.values) if "reference" in v}
        if own in sums and 2 * Counter(sums.values())[sums[own]] <= len(sums):
            unlike = [str(i) for i, found in sums.items() if found != sums[own]]
            raise PipelineError(
                f"the reference of pipeline {own} has other bits than that of pipeline {' and '.join(unlike)} on "
                f"{self._route.placement.name(self._route.replica)}, at step {self._next.batch}: memory or a "
                "device has changed bits"
            )

    def _take_in(self, published: Published) -> None:
        self._compare(published)
        self._last, reference = published, self._reference
        rows = [(i, v) for i, v in zip(published.pipelines, published.values) if v["has_update"]]
        if reference is not None and rows:
            device = reference.z.flats[0].device  # what was published lies in main memory
            updates = [[flat.to(device) for flat in update] for update in published.updates]
            without = {i: values["without"] for i, values in rows}
            reference.complete(updates, without, rows[0][1]["divisor"])  # the same for all

    def may_perform(self, step: Step) -> bool:
        """Whether a step may be published, whose memory is that of an earlier one; or made, after that is applied."""
        if step.kind is StepKind.PUBLISH:
            return self._exchange.may_publish(step.batch)
        return step.batch == self._next.batch

    def missing(self, turns: int | None = None) -> list[Key]:
        """Return the message that is awaited next; only of the first ``turns`` steps, if that is given."""
        is_due = turns is None or self._next.batch < turns
        return [self._next] if is_due and self._next not in self._mailbox else []

    def buffers(self) -> list[dict[str, torch.Tensor]]:
        """Return each pipeline's last published averaged buffers, by name; no step may be in flight."""
        own = _averaged(self._trained)
        return [own] if self._last is None else [dict(zip(own, of)) for of in self._last.mean_buffers()]


def _averaged(trained: TrainedStage) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in trained.buffers().items() if buffer.is_floating_point()}
