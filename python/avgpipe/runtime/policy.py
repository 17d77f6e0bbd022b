"""How a run reacts to processes that are lost, replaced, or join: by default, not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from avgpipe.errors import PeerLost, PipelineTimeout
from avgpipe.links.link import Key
from avgpipe.runtime.feed import BatchFeed, Feed

if TYPE_CHECKING:
    from avgpipe.runtime.compute import BatchState
    from avgpipe.runtime.route import Route, Step
    from avgpipe.runtime.scheduler import Scheduler
    from avgpipe.runtime.session import Session
    from avgpipe.runtime.spec import Spec
    from avgpipe.runtime.streams import LaneStream
    from avgpipe.runtime.worker import Worker

T = TypeVar("T")


class Policy:
    """Ends with the first process that is lost; ``avgpipe.fault`` has policies that continue.

    Attributes:
        pipeline: the one of this process, if each pipeline has its own processes; else None.
        join: connects this process's worker with the other pipelines, if pipelines are isolated.
    """

    pipeline: int | None = None
    join: Callable[[Worker], Others] | None = None

    def check(self, spec: Spec) -> None:
        """Raise ValueError for options that the policy does not support."""

    def opened(self, session: Session) -> None:
        """React to connected ranks with a new worker, for the first time or again."""

    def begin(self, session: Session) -> None:
        """React to the first moment at which all is ready."""

    def make_feed(self, session: Session) -> Feed:
        spec = session.spec
        return BatchFeed(session.worker, spec.running, session.loader, spec.options, session.verification)

    # ---- ranks that are lost -----------------------------------------------------------------------------------------

    def call(self, session: Session, name: str, act: Callable[[], T], given: Sequence[Any]) -> T:
        """Return what ``act()`` returns, a call of the user's of a method ``name`` with the arguments ``given``."""
        return act()

    def recover(self, session: Session, loss: PeerLost | PipelineTimeout, in_call: bool = False) -> None:
        """Return to the last result that the caller has; raise ``loss`` if that is impossible.

        ``in_call``: whether the caller has called something since that result.
        """
        raise loss

    def before_batch(self, session: Session) -> None:
        """React to a batch that is about to begin."""

    def settle(self) -> None:
        """Finish copies of the state; no batch is in flight."""

    def loaded(self, session: Session) -> None:
        """React to weights that were loaded."""

    def froze(self, names: Sequence[str], flag: bool) -> None:
        """React to parameters of these names that require gradients from now on, or do not."""

    # ---- pipelines that join and leave -------------------------------------------------------------------------------

    @property
    def is_new(self) -> bool:
        """Whether this pipeline has joined others in training, and has begun no batch yet."""
        return False

    def enter(self, session: Session) -> int:
        """Join the run; return how many results the others have had."""
        return 0

    def come_in(self, session: Session) -> None:
        """Get the run's state, before it is used, if others train already."""

    def once(self, session: Session, what: str, find: Callable[[], Any]) -> Any:
        """Return what ``find()`` returns, here or in one of the other pipelines."""
        return find()

    @property
    def launcher(self) -> Any:
        """The connection to the launcher, if pipelines have one."""
        return None


# ---- protocols of pipelines in other processes -----------------------------------------------------------------------


class Peers(Protocol):
    """The pipelines of other processes that also train a stage replica's reference."""

    def collect(self) -> None:
        """Apply what they have sent, as far as it is due."""

    def may_perform(self, step: Step) -> bool:
        """Whether a step of an update may run that publishes or uses what they have sent."""

    def missing(self, batches: int | None = None) -> list[Key]:
        """Return the messages that are awaited next, only of the first ``batches`` if given."""

    def resume(self, batches: int) -> None:
        """Continue with a batch, from a state that includes all before it."""


class IsolatedPeers(Peers, Protocol):
    """Peers of isolated pipelines, which read what each of them publishes."""

    def publish(self, state: BatchState) -> None:
        """Publish the result of a step."""

    def note_step(self) -> None:
        """Note that the next step has been made."""


class Others(Protocol):
    """The other pipelines, if each has its own processes.

    Attributes:
        publishes_early: Whether gradients are published before their step.
    """

    publishes_early: bool

    def peers(self, route: Route, stream: LaneStream | None) -> IsolatedPeers: ...

    def buffers(self, replica: int) -> Sequence[dict[str, torch.Tensor]]:
        """Return the buffers of a stage replica that are averaged, as each pipeline published them last."""

    def serve(self, scheduler: Scheduler) -> None:
        """Publish what this process is doing, and let its scheduler report pipelines that are late."""

    def close(self) -> Any: ...
