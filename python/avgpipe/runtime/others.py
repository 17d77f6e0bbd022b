"""Protocols for pipelines in other processes; the modules that implement them are imported on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from avgpipe.links.message import Key

if TYPE_CHECKING:
    from avgpipe.runtime.compute import BatchState
    from avgpipe.runtime.route import Route
    from avgpipe.runtime.scheduler import Scheduler
    from avgpipe.runtime.streams import LaneStream


class Peers(Protocol):
    """The pipelines of other processes that also train a stage replica's reference."""

    def collect(self) -> None:
        """Apply what they have sent, as far as it is due."""

    def may_step(self, batch: int) -> bool:
        """Whether the step of a batch may run."""

    def missing(self, batches: int | None = None) -> list[Key]:
        """Return the messages that are awaited next, only of the first ``batches`` if given."""

    def resume(self, batches: int) -> None:
        """Continue with a batch, from a state that includes all before it."""


class IsolatedPeers(Peers, Protocol):
    """Peers of isolated pipelines, which read what each of them publishes."""

    def tell(self, state: BatchState) -> None:
        """Publish the result of a step."""


class Others(Protocol):
    """The other pipelines, if each has its own processes."""

    def peers(self, route: Route, stream: LaneStream | None) -> IsolatedPeers: ...

    def buffers(self, replica: int) -> Sequence[dict[str, torch.Tensor]]:
        """Return the buffers of a stage replica that are averaged, as each pipeline published them last."""

    def serve(self, scheduler: Scheduler) -> None:
        """Publish what this process is doing, and let its scheduler report pipelines that are late."""

    def close(self) -> Any: ...
