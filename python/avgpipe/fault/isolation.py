"""Pipelines in processes of their own: when one is lost the others continue, and it may join again."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import torch

from avgpipe.checkpoint.content import content_of
from avgpipe.checkpoint.load import SavedStages, restore_stages
from avgpipe.checkpoint.snapshot import packed, unpacked
from avgpipe.errors import CheckpointError, PipelineTimeout
from avgpipe.fault.exchange import TurnExchange
from avgpipe.fault.group import WEIGHTS
from avgpipe.fault.membership import Membership
from avgpipe.fault.paces import SharesByPace
from avgpipe.fault.states import States
from avgpipe.fault.turn_feed import Counts, TurnFeed
from avgpipe.fault.turns import Turns
from avgpipe.model.context import evaluated_in
from avgpipe.plan import Plan
from avgpipe.ranks import environment as probe
from avgpipe.ranks.environment import SHARES, pipeline_here
from avgpipe.rules import RULES
from avgpipe.runtime.policy import Policy
from avgpipe.runtime.route import Route
from avgpipe.runtime.scheduler import Scheduler
from avgpipe.runtime.session import Session
from avgpipe.runtime.streams import LaneStream
from avgpipe.runtime.worker import Worker


def isolated(plan: Plan) -> int:
    """Return the pipeline of this process; ValueError where the process or the plan is not isolated."""
    here = pipeline_here()
    if here is None:
        raise ValueError(
            "the plan has isolate=True, and this process was not started as one of such a pipeline: start it with "
            "avgpipe run --isolate, or avgpipe train --isolate, or leave isolate out"
        )
    if not plan.isolate:
        raise ValueError(
            f"this process was started as one of pipeline {here} of several isolated ones, and the plan has "
            "isolate=False: give it isolate=True"
        )
    return here


def give_state(worker: Worker, number: int, counts: Counts) -> list[torch.Tensor]:
    """Return, packed, the state of a stage replica between two steps, at the position ``counts`` of the run.

    The reference's, and of the donor's own the states of optimizer, learning-rate schedule and loss scale;
    neither its weights nor what its layers carry from batch to batch.
    """
    try:
        content = content_of(worker.model, worker, number, whole=True)
        content["replicas"][0] |= {"weights": {}, "older": {}, "carry": {}}
    except CheckpointError as error:  # the joining pipeline ends, not this one
        return packed({"why": str(error)})
    return packed({"counts": astuple(counts), "content": content})


def take_state(given: Sequence[torch.Tensor], worker: Worker, number: int) -> Counts:
    """Begin with a given state; return the run's position."""
    (pipeline,) = worker.placement.pipelines
    state = unpacked(given)
    if "why" in state:
        raise CheckpointError(state["why"])
    content = state["content"]
    content["replicas"] = {pipeline: content["replicas"][0]}
    restore_stages({number: SavedStages([content], exactly=True)}, worker.model, worker)
    worker.trained[number, pipeline].replaced()
    return Counts(*state["counts"])


class Isolation(Policy):
    """The policy of isolated pipelines, and the end of a process towards the others.

    They take over what a lost one has not finished.

    Attributes:
        feed: of the open session, as the next ones.
        exchange: what all publish.
        states: what pipelines that join begin with.
        publishes_early: whether gradients are published before their step: where sums take long, between hosts.
    """

    feed: TurnFeed

    def __init__(self, plan: Plan) -> None:
        self.pipeline = isolated(plan)
        self.join = self._join
        self._turns: dict[int, Turns] = {}  # by replica

    def _join(self, worker: Worker) -> Isolation:
        """Connect to the others."""
        self._worker = worker
        world, plan, options = worker.world, worker.spec.running, worker.spec.options
        (pipeline,) = worker.placement.pipelines
        name = world.name(world.rank)
        membership = Membership(world.rank, world.size, name, plan.period, world.timeout_s)
        like = {n: Turns.like(worker.trained[n, pipeline], worker.references[n]) for n in worker.held}
        wire = options.wire_dtype
        self.exchange = TurnExchange(membership, worker.mailbox, like, worker.bell_place(), wire)
        self.states = States(self.exchange, lambda n, turn: give_state(worker, n, self.feed.before(turn)))
        waits = plan.staleness == 1 and options.verify_every is None
        self.publishes_early = membership.spans_hosts and waits and RULES[plan.rule or ""].tries
        return self

    # ---- for the worker ----------------------------------------------------------------------------------------------

    def peers(self, route: Route, stream: LaneStream | None) -> Turns:
        turns = self._turns[route.replica] = Turns(self._worker, route, self.exchange, self.states, stream)
        return turns

    def buffers(self, replica: int) -> list[dict[str, torch.Tensor]]:
        return self._turns[replica].buffers()

    def serve(self, scheduler: Scheduler) -> None:
        self.launcher.doing = scheduler.doing
        scheduler.complains = self.exchange.report_late

    def close(self) -> None:
        error = sys.exc_info()[1] or self._worker.failure
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None
        if isinstance(error, PipelineTimeout):  # its exit code would not name the missing process
            self.launcher.give_up(str(error))
        self.exchange.close(leaves=error is None)

    # ---- for the session ---------------------------------------------------------------------------------------------

    @property
    def launcher(self) -> Membership:
        return self.exchange.membership

    def make_feed(self, session: Session) -> TurnFeed:
        plan, paces = session.spec.running, None
        if plan.shares > 1 and os.environ.get(SHARES) != "equal":  # as the launcher may ask for
            paces = SharesByPace(session.worker.scheduler, self.exchange, plan.micro_batches)
        self.feed = TurnFeed(session, self.exchange, lambda: self._take_part(session), paces)
        return self.feed

    @property
    def is_new(self) -> bool:
        return self.feed.is_new

    def enter(self, session: Session) -> int:
        self.feed.enter()
        self.feed.resume()
        return self.feed.ended

    def come_in(self, session: Session) -> None:
        if self.feed.is_new:
            self.feed.enter()

    def once(self, session: Session, what: str, find: Callable[[], Any]) -> Any:
        """Return what ``find()`` returns in one of the pipelines, between two steps.

        A pipeline that joins later repeats what the others have done long ago, and gets the results from
        then; where its script knows the run's position, it gets the newest ones.
        """
        feed, launcher = self.feed, self.launcher
        if feed.is_new and feed.is_placed and not feed.has_loader:
            feed.enter()
            if found := launcher.found_before(what, feed.place, is_here=True):
                return found[0]
        elif feed.is_behind:
            if found := launcher.found_before(what, feed.place):
                return found[0]
            feed.enter()
            what += ", of one that joined"  # the others request something else before this step
        return launcher.once(what, feed.next_batch, find)

    def _take_part(self, session: Session) -> Counts | None:
        """Become a member of the run; return the run's position if others train already."""
        worker, exchange = session.worker, self.exchange
        with worker.running():
            digests = self._digests(session, exchange.membership.has_begun)
            turn, counts = exchange.enter(digests), None
            if not exchange.membership.is_late:
                for number in worker.held:  # refuse state that no joining pipeline could read
                    content_of(worker.model, worker, number, whole=True)
            else:
                probe.at("join", **worker.place)
                for number in worker.held:
                    counts = take_state(self.states.received(number), worker, number)
                exchange.membership.report_state()
                if counts is not None and session.verification is not None:
                    session.verification.resume(counts.batches)
            for row in worker.rows:
                row.resume(turn)
        return counts

    def _digests(self, session: Session, has_begun: bool) -> dict[str, str]:
        """Return digests of what must be the same in all pipelines, by its names."""
        spec, worker = session.spec, session.worker
        made: dict[str, Any] = {
            "plan": spec.plan.to_json(),
            "options": spec.options.shared_text(),
            "model": [spec.model.bounds, spec.model.signature()],
        }
        if spec.options.check != "off":
            made |= {"optimizer": spec.options.groups, "evaluation modes": evaluated_in(spec.layers)}
        texts = {name: json.dumps(value, default=str).encode() for name, value in made.items()}
        digest = hashlib.sha256(f"{self.feed.next_batch}".encode())
        for number in () if has_begun else worker.held:
            for flat in worker.weights(number, "reference"):
                digest.update(flat.detach().cpu().view(torch.uint8).numpy().data)
        return {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()} | {
            WEIGHTS: digest.hexdigest()
        }
