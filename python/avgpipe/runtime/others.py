"""What a worker has to do with pipelines in other processes; those who are asked for bring their code."""

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
    """The pipelines of other processes that train a stage replica's reference, too."""

    def collect(self) -> None:
        """Take in what they have sent, as far as it is due."""

    def may_step(self, batch: int) -> bool:
        """Whether the step of a batch may be made."""

    def missing(self, batches: int | None = None) -> list[Key]:
        """Return the messages that are awaited next, of the first ``batches`` alone if they are given."""

    def resume(self, batches: int) -> None:
        """Go on with a batch, and a state to which all before have come."""


class IsolatedPeers(Peers, Protocol):
    """Those of isolated pipelines, which read what each of them publishes."""

    def tell(self, state: BatchState) -> None:
        """Publish what a step has come to."""


class Others(Protocol):
    """The other pipelines, where each has processes of its own."""

    def peers(self, route: Route, stream: LaneStream | None) -> IsolatedPeers: ...

    def buffers(self, replica: int) -> Sequence[dict[str, torch.Tensor]]:
        """Return the buffers of a stage replica that are averaged, as each pipeline has published them last."""

    def serve(self, scheduler: Scheduler) -> None:
        """Say to others what this process is doing, and have it complain of those that are late."""

    def close(self) -> Any: ...
