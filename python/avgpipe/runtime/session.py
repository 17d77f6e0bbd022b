"""The connected part of a Pipeline, made from its spec. It is opened again after a rank was replaced."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch

from avgpipe.device import has_streams
from avgpipe.errors import PeerLost, PipelineTimeout
from avgpipe.model.context import CallerModes, evaluated_in
from avgpipe.model.layers import outside_of
from avgpipe.ranks.environment import named, warn_of_threads
from avgpipe.ranks.world import meet
from avgpipe.runtime.audit import StageAudit
from avgpipe.runtime.feed import Prefetch
from avgpipe.runtime.placement import Placement
from avgpipe.runtime.policy import Policy
from avgpipe.runtime.requirements import warn_of_waits
from avgpipe.runtime.spec import Spec
from avgpipe.runtime.worker import Worker

_log = logging.getLogger("avgpipe")
LOST = PeerLost, PipelineTimeout
_FAILED_PATIENCE_S = 0.5  # for the other workers to receive the last messages

_Call = TypeVar("_Call", bound=Callable[..., Any])


class Session:
    """The connected ranks of a pipeline, and this rank's part of it.

    Attributes:
        spec: what it is made from.
        policy: how it reacts to processes that are lost, or join.
        loader: the caller's batches, one of them fetched ahead.
        world: the ranks.
        worker: what this rank runs.
        feed: the batches in flight.
        verification: compares copies bit for bit; None if it is off.
        saving: writes and reads checkpoints; None before its first use.
        auto: chooses the advance; None if the plan gives it.
    """

    def __init__(self, spec: Spec, policy: Policy) -> None:
        self.spec, self.policy = spec, policy
        self.loader = Prefetch(lambda batches: self.worker.copy_ahead(batches), spec.options.accumulate)
        self.auto: Any = None
        self.until_done(self.open)

    def open(self) -> None:
        """Connect to the other ranks, and make this rank's part."""
        before: Worker | None = getattr(self, "worker", None)
        self._is_audited = before is not None and before.audit is None
        self.world = meet(self.spec.timeout_s, self.spec.options.members)
        try:
            self._make_part()
        except Exception as error:  # the other ranks may have no error
            self.world.report(error)
            raise

    def _make_part(self) -> None:
        spec, world = self.spec, self.world
        options, plan, model = spec.options, spec.plan, spec.model
        if options.prepare is not None:
            named("avgpipe.runtime.prepared:check_prepared")(plan, world.size)
        placement = self._agree()
        if plan.correction is not None:
            named("avgpipe.elastic.correction:check_correction")(plan, model.shared)
        if not world.rank:
            warn_of_waits(options, plan, any(model.shared))
        if world.size == 1 and not has_streams(spec.device):
            warn_of_threads(torch.get_num_threads())
        self.worker = Worker(spec, placement, world, self.policy.join)
        if options.check != "off":
            self._audit()
        if spec.initial is not None:
            self._check_shared()
        self.saving: Any = None
        self.verification: Any = None
        if options.verify_every is not None:
            # A step of isolated pipelines has as many batches as there are members at the moment.
            per_round = plan.batches_per_round if self.policy.pipeline is None else 1
            made = named("avgpipe.runtime.integrity:Verification")
            self.verification = made(self.worker, options.verify_every, per_round)
        self.policy.opened(self)
        for extension in options.extensions:
            extension.opened(self)
        self.feed = self.policy.make_feed(self)

    def _audit(self) -> None:
        """Have the stages compared with the model; not again where a first batch was compared before this opening."""
        if not self.world.rank and not self._is_audited:
            self.worker.audit = StageAudit(self.spec)
        outside = outside_of(self.spec.given, self.spec.layers)
        self.worker.outside = outside if outside.reads else None

    def _agree(self) -> Placement:
        """Refuse, on every rank, what differs between ranks; return the placement of the stages."""
        spec, world, options = self.spec, self.world, self.spec.options
        world.require_same("plan", spec.plan.to_json())
        placement = Placement.of(spec.plan, world.size, self.policy.pipeline)
        world.describe([placement.describe(rank) for rank in range(world.size)])
        world.require_same(*options.shared_text())
        world.require_same("compile", "" if spec.compiler is None else spec.compiler.description)
        world.require_same("model", json.dumps(spec.model.signature()))
        world.require_same(
            "cut of the model, which follows from the shapes of example_inputs,",
            json.dumps(spec.model.bounds),
        )
        # Stages update their copies of a tied parameter alike, so the copies must be equal from the
        # beginning.
        if spec.initial is None:
            shared = json.dumps(spec.model.shared_values(spec.layers))
            world.require_same("initial value of shared parameters", shared)
            if options.check != "off" and world.size > 1:
                named("avgpipe.runtime.alike:check_weights")(world, placement, spec.model, spec.layers)
        if options.check != "off":
            groups = json.dumps(options.groups, default=str)
            world.require_same("optimizer, by the groups of its parameters,", groups)
            world.require_same("evaluation mode of modules", json.dumps(evaluated_in(spec.layers)))
        return placement

    def _check_shared(self) -> None:
        """Refuse stages that have filled their own copies of a tied parameter differently."""
        try:
            found = [row for rows in self.world.gather(self.worker.shared_values()) for row in rows]
            known = dict(found)
            different = sorted({name for name, digest in found if known[name] != digest})
            if different:
                raise ValueError(
                    f"stages have filled their copies of {different[0]!r} with different values: the function of "
                    "WeightsFrom must give it the same on every stage"
                )
        except BaseException:
            self.worker.close(_FAILED_PATIENCE_S)
            raise

    # ---- batches -----------------------------------------------------------------------------------------------------

    def train_on(self) -> bool:
        """Train until there are results; return whether there is nothing left to train on."""
        feed = self.feed
        if self.auto is not None:
            self.auto.look(self)
        while not self.is_due and feed.takes_more():
            self.policy.before_batch(self)
            if not feed.fetch():
                break
        if feed.results:
            self.loader.fetch()  # as if the batch had ended only now: see Prefetch
            return False
        if self.is_due:
            feed.drain(prefetch=True)  # keeps the order of draws of loader and caller
            self.verify()
            return False
        if feed.is_empty:
            return True
        feed.finish_oldest(prefetch=True)
        return False

    def train_on_given(self) -> None:
        """Train on what the loader was given."""
        self.policy.before_batch(self)
        while (batch := self.loader.next()) is not None:
            self.feed.begin(*batch)
        self.feed.drain()

    def until_done(self, act: Callable[[], None], in_call: bool = False) -> None:
        """Call ``act``, and again after each rank replaced meanwhile. ``in_call``: see Policy.recover."""
        while True:
            try:
                act()
                return
            except LOST as loss:
                self.policy.recover(self, loss, in_call)

    def drain(self) -> None:
        """Finish the batches that are in flight."""
        self.until_done(lambda: self.feed.drain(), in_call=True)

    @property
    def is_due(self) -> bool:
        """Whether copies are to be compared before another batch begins."""
        return self.verification is not None and bool(self.verification.is_due(self.feed.next_batch))

    def verify(self) -> None:
        with self.worker.running():
            self.verification.verify(self.feed.next_batch)

    # ---- between batches ---------------------------------------------------------------------------------------------

    def idle(self, harmless: type[Exception] | tuple[()] = ()) -> AbstractContextManager[CallerModes]:
        """Finish the batches in flight. An exception inside ends the pipeline, unless it is ``harmless``."""
        self.feed.drain()
        return self.settling(harmless)

    @contextmanager
    def settling(self, harmless: type[Exception] | tuple[()] = ()) -> Iterator[CallerModes]:
        """Do as :meth:`idle`, but leave batches in flight; with none, finish pending copies first."""
        with self.worker.running(harmless) as modes:
            self.settle()
            yield modes

    def settle(self) -> None:
        if self.feed.is_empty:
            if self.saving is not None:
                self.saving.settle()
            self.policy.settle()

    def go_on(self) -> None:
        """Continue with weights that were loaded; no rank returns to an earlier state."""
        self.resume()
        self.policy.loaded(self)

    def resume(self) -> None:
        """Continue with the feed's next batch."""
        self.worker.alike.begin_anew()
        if self.verification is not None:
            self.verification.resume(self.feed.next_batch)
        for row in self.worker.rows:
            row.resume(self.feed.next_turn)
        self.feed.resume()


def recovering(call: _Call) -> _Call:
    """Make a method survive the replacement of a rank: it starts again, from the same state of training."""

    @wraps(call)
    def again(self: Any, *args: Any, **options: Any) -> Any:
        session = self._session
        act = partial(call, self, *args, **options)
        return session.policy.call(session, call.__name__, act, (*args, *options.values()))

    return cast(_Call, again)
