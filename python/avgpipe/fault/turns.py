"""A stage's part in the steps of isolated pipelines: it publishes its update, and applies all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any
from zlib import crc32

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

# Steps after which options that counted are compared: a step may be published before the last one is applied.
_OPTIONS_AGE = 2


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
        self._options: dict[int, int] = {}  # digests of the optimizer's, by step that they counted in
        self._averaging: Callable[[], AbstractContextManager[None]] = (
            nullcontext if stream is None else stream.issuing
        )

    @staticmethod
    def like(trained: TrainedStage, reference: Reference | None) -> Like:
        """Return the shapes of what is published."""
        return Like([] if reference is None else reference.z.flats, [*_averaged(trained).values()])

    def resume(self, turn: int) -> None:
        """Continue with a step after the state was replaced; all earlier steps have ended."""
        self._last, self._options = None, {}
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
        values["options"] = self._options.pop(turn - _OPTIONS_AGE, None)
        if reference is not None and self._verify_every is not None and turn % self._verify_every == 0:
            values["reference"] = reduce(lambda so_far, flat: digest(flat, so_far), reference.z.flats, 0)
        assert turn == state.work.batch, "steps are published in order"
        self._published = turn + 1
        buffers = [*_averaged(self._trained).values()]
        self._exchange.publish(self._route.replica, turn, values, updates, buffers)

    def apply(self) -> None:
        """Apply what all have published in the next step, which is there; this stage has made its own.

        The feed asks for it, before the caller gets the result: what the loop then sets in optimizers must count from
        one step on in all processes, and in the state of a pipeline that joins with that step.
        """
        assert self._next.batch < self._made, "a step is applied after it is made"
        with self._averaging():
            self._take_in(self._mailbox.take(self._next))
        self._next = self._next._replace(batch=self._next.batch + 1)
        self._exchange.note_applied(self._route.replica, self._next.batch)

    def collect(self) -> None:
        """Give this stage's state to pipelines that join with the next step."""
        with self._averaging():
            self._states.hand_over(self._route.replica, self._next.batch)

    def _compare(self, published: Published) -> None:
        """Fail where the reference here is not that of most pipelines, or would not be.

        Of two pipelines both fail, unless the other one joined later, with other options: then that one fails.
        """
        if unlike := self._unlike("reference", published):
            raise PipelineError(
                f"the reference of pipeline {self._route.pipeline} has other bits than that of pipeline "
                f"{self._named(unlike, self._next.batch)}: memory or a device has changed bits"
            )
        unlike = self._unlike("options", published)
        terms = self._exchange.membership.known.roster.counting(self._next.batch) if unlike else {}
        if unlike and not all(terms[i].first > terms[self._route.pipeline].first for i in unlike):
            raise PipelineError(
                f"the optimizer of pipeline {self._route.pipeline} has other options, such as the learning rate, than "
                f"that of pipeline {self._named(unlike, self._next.batch - _OPTIONS_AGE)}. They make one reference "
                "with them: the loop of each pipeline, also of one that joins, must set the same ones after the same "
                "result"
            )

    def _named(self, pipelines: list[int], turn: int) -> str:
        where = self._route.placement.name(self._route.replica)
        return f"{' and '.join(map(str, pipelines))} on {where}, at step {turn}"

    def _unlike(self, what: str, published: Published) -> list[int]:
        """Return the pipelines in which something is not as here; none where most have what is here."""
        found = {
            i: of[what] for i, of in zip(published.pipelines, published.values) if of.get(what) is not None
        }
        own = found.get(self._route.pipeline)
        if own is None or 2 * Counter(found.values())[own] > len(found):
            return []
        return [i for i, theirs in found.items() if theirs != own]

    def _take_in(self, published: Published) -> None:
        self._compare(published)
        self._last, reference = published, self._reference
        rows = [(i, v) for i, v in zip(published.pipelines, published.values) if v["has_update"]]
        if reference is not None and rows:
            if reference.elasticity.coefficients.tries:  # they step the reference
                self._options[self._next.batch] = _digest_of_options(self._trained)
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


def _digest_of_options(trained: TrainedStage) -> int:
    """Return a digest of the numbers among an optimizer's options; a tensor's value would have to be waited for."""
    groups = trained.optimizer.param_groups if trained.optimizer is not None else []
    numbers = [[(key, _plain(value)) for key, value in sorted(group.items())] for group in groups]
    return crc32(repr(numbers).encode())


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [] if any(isinstance(v, torch.Tensor) for v in value) else [*map(_plain, value)]
    return float(value) if isinstance(value, int | float) else None
