"""What a run does about processes that are lost, replaced, or join: nothing, unless it was asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from avgpipe.errors import PeerLost, PipelineTimeout
from avgpipe.runtime.feed import BatchFeed, Feed
from avgpipe.runtime.others import Others

if TYPE_CHECKING:
    from avgpipe.runtime.session import Session
    from avgpipe.runtime.spec import Spec
    from avgpipe.runtime.worker import Worker

T = TypeVar("T")


class Policy:
    """Ends with the first process that is lost; ``avgpipe.fault`` has policies that go on.

    Attributes:
        pipeline: which one this process is a part of, where each has processes of its own; else None.
        join: connects this process's worker with the other pipelines, where it is a part of one.
    """

    pipeline: int | None = None
    join: Callable[[Worker], Others] | None = None

    def check(self, spec: Spec) -> None:
        """Raise ValueError for what it cannot be had with."""

    def opened(self, session: Session) -> None:
        """The ranks have met, and a worker is made; for the first time, or once more."""

    def begin(self, session: Session) -> None:
        """All is ready for the first time."""

    def make_feed(self, session: Session) -> Feed:
        spec = session.spec
        return BatchFeed(session.worker, spec.running, session.loader, spec.options, session.verification)

    # ---- ranks that are lost -----------------------------------------------------------------------------------------

    def call(self, session: Session, act: Callable[[], T], given: Sequence[Any]) -> T:
        """Return what ``act()`` returns, a call of the user's; ``given``: its arguments."""
        return act()

    def recover(self, session: Session, loss: PeerLost | PipelineTimeout, in_call: bool = False) -> None:
        """Come to the result that the caller has last once more; raises ``loss`` where that cannot be.

        ``in_call``: whether the caller has called something after that result.
        """
        raise loss

    def before_batch(self, session: Session) -> None:
        """Another batch may begin."""

    def settle(self) -> None:
        """No batch is in flight: what is being copied is to be whole."""

    def loaded(self, session: Session) -> None:
        """Training goes on with weights that were loaded."""

    def froze(self, names: Sequence[str], flag: bool) -> None:
        """Parameters of these names want gradients, or none, from now on."""

    # ---- pipelines that come and go ----------------------------------------------------------------------------------

    @property
    def is_new(self) -> bool:
        """Whether this pipeline has come to others that train, and has begun no batch yet."""
        return False

    def enter(self, session: Session) -> int:
        """Become a part of the run; return how many results the others have had."""
        return 0

    def come_in(self, session: Session) -> None:
        """Have the run's state, before it is used, where others train already."""

    def once(self, session: Session, what: str, find: Callable[[], Any]) -> Any:
        """Return what ``find()`` returns, here or in one of the other pipelines."""
        return find()

    @property
    def launcher(self) -> Any:
        """The connection to the launcher, if pipelines have one."""
        return None
