"""A session: what a spec becomes once the ranks have met. It can be opened anew, as where a rank was replaced."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from avgpipe.device import ReadyOnEvent, has_streams
from avgpipe.errors import PeerLost, PipelineTimeout
from avgpipe.model.context import CallerModes
from avgpipe.model.modes import evaluated_in
from avgpipe.ranks.process import named, warn_of_threads
from avgpipe.ranks.world import meet
from avgpipe.runtime.alike import check_weights
from avgpipe.runtime.feed import Prefetch
from avgpipe.runtime.placement import Placement
from avgpipe.runtime.policy import Policy
from avgpipe.runtime.requirements import check_correction, check_prepared, warn_of_waits
from avgpipe.runtime.spec import Spec
from avgpipe.runtime.worker import Worker

_log = logging.getLogger("avgpipe")
LOST = PeerLost, PipelineTimeout
_FAILED_PATIENCE_S = 0.5  # for which the other workers may need what was sent last


class Session:
    """The ranks of a pipeline that have met, and this one's part of it.

    Attributes:
        spec: what it is made of.
        policy: what is done about processes that are lost, or join.
        loader: the caller's batches, one of them fetched ahead.
        world: the ranks.
        worker: what this one runs.
        feed: the batches in flight.
        verification: compares copies bit for bit; None: nothing does.
        saving: writes and reads checkpoints; None until it is asked for the first time.
        auto: chooses the advance; None where the plan says it.
    """

    def __init__(self, spec: Spec, policy: Policy) -> None:
        self.spec, self.policy = spec, policy
        self.loader = Prefetch(self._copy_ahead, spec.options.accumulate)
        self.auto: Any = None
        self.open()

    def open(self) -> None:
        """Meet the other ranks, and make this one's part."""
        self.world = meet(self.spec.timeout_s, self.spec.members)
        try:
            self._make_part()
        except Exception as error:  # the other ranks may have nothing to refuse
            self.world.report(error)
            raise

    def _make_part(self) -> None:
        spec, world = self.spec, self.world
        options, plan, model = spec.options, spec.plan, spec.model
        if options.prepare is not None:
            check_prepared(options, plan, world.size)
        placement = self._agree()
        check_correction(plan, model.shared)
        if not world.rank:
            warn_of_waits(options, plan, any(model.shared))
        if world.size == 1 and not has_streams(spec.device):
            warn_of_threads(torch.get_num_threads())
        self.worker = Worker(spec, placement, world, self.policy.join)
        if spec.initial is not None:
            self._check_shared()
        self.saving: Any = None
        self.verification: Any = None
        if options.verify_every is not None:
            # A turn of isolated pipelines has as many batches as there are just now.
            per_round = plan.batches_per_round if self.policy.pipeline is None else 1
            made = named("avgpipe.runtime.integrity:Verification")
            self.verification = made(self.worker, options.verify_every, per_round)
        self.policy.opened(self)
        self.feed = self.policy.make_feed(self)

    def _agree(self) -> Placement:
        """Refuse, on every rank, what differs between ranks; return who has which stages."""
        spec, world, options = self.spec, self.world, self.spec.options
        world.require_same("plan", spec.plan.to_json())
        placement = Placement.of(spec.plan, world.size, self.policy.pipeline)
        world.describe([placement.describe(rank) for rank in range(world.size)])
        world.require_same(*options.shared_text())
        world.require_same("compile", options.compiler.description)
        world.require_same("model", json.dumps(spec.model.signature()))
        world.require_same(
            "cut of the model, which follows from the shapes of example_inputs,",
            json.dumps(spec.model.bounds),
        )
        # Stages step their copies of a tied parameter alike, so the copies must be equal from the beginning.
        if spec.initial is None:
            shared = json.dumps(spec.model.shared_values(spec.layers))
            world.require_same("initial value of shared parameters", shared)
            if options.check != "off":
                check_weights(world, placement, spec.model, spec.layers)
        if options.check != "off":
            groups = json.dumps(options.groups, default=str)
            world.require_same("optimizer, by the groups of its parameters,", groups)
            world.require_same("evaluation mode of modules", json.dumps(evaluated_in(spec.layers)))
        return placement

    def _check_shared(self) -> None:
        """Refuse stages that each have filled their own copy of a tied parameter, and not alike."""
        try:
            found = [row for rows in self.world.gather(self.worker.shared_values()) for row in rows]
            known = dict(found)
            different = sorted({name for name, digest in found if known[name] != digest})
            if different:
                raise ValueError(
                    f"stages have filled their copies of {different[0]!r} with different values: the function of "
                    "weights_from must give it the same on every stage"
                )
        except BaseException:
            self.worker.close(_FAILED_PATIENCE_S)
            raise

    def _copy_ahead(self, batches: Sequence[tuple[Any, Any]]) -> ReadyOnEvent | None:
        return self.worker.copy_ahead(batches)

    # ---- batches -----------------------------------------------------------------------------------------------------

    def train_on(self) -> bool:
        """Train until there are results; whether there is nothing more to train on."""
        feed = self.feed
        if self.auto is not None:
            self.auto.look(self)
        while not self.is_due and feed.takes_more():
            self.policy.before_batch(self)
            if not feed.fetch():
                break
        if feed.results:
            self.loader.fetch()  # as where the batch ends only now: see Prefetch
            return False
        if self.is_due:
            feed.drain(prefetch=True)  # so that the loader and the caller draw in turn as ever
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
        """Do it, once more after each rank that was replaced meanwhile. ``in_call``: see :meth:`Policy.recover`."""
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
        """Finish the batches that are in flight. What fails inside ends the pipeline, but for what is ``harmless``."""
        self.feed.drain()
        return self.settling(harmless)

    @contextmanager
    def settling(self, harmless: type[Exception] | tuple[()] = ()) -> Iterator[CallerModes]:
        """As :meth:`idle`, where batches may be in flight. Without any, what is being copied is whole before."""
        with self.worker.running(harmless) as modes:
            self.settle()
            yield modes

    def settle(self) -> None:
        if self.feed.is_empty:
            if self.saving is not None:
                self.saving.settle()
            self.policy.settle()

    def go_on(self) -> None:
        """Go on with weights that were loaded; nobody is to go back to what there was before."""
        self.resume()
        self.policy.loaded(self)

    def resume(self) -> None:
        """Go on with the feed's next batch."""
        self.worker.alike.begin_anew()
        if self.verification is not None:
            self.verification.resume(self.feed.next_batch)
        for row in self.worker.rows:
            row.resume(self.feed.next_turn)
        self.feed.resume()
