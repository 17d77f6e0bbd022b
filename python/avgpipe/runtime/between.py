"""What pipelines that share a batch exchange, so that the batch is computed as on one device.

Each pipeline has the gradient of its share, and the batch's is their mean. Two values do not follow from one
share alone. A loss returned as (sum, count) is divided by the count of the whole batch. And the norm of the
batch's gradient is that of the mean: a share's has more noise, and a limit would clip more the more pipelines
there are. So if an option needs one of the two, the lanes of a stage, one for each pipeline, wait here for
each other before they use their gradients of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from avgpipe.elastic.reference import Reference
from avgpipe.links.link import Key, Mailbox, Message
from avgpipe.runtime.compute import BatchState
from avgpipe.runtime.route import Route, Step

if TYPE_CHECKING:
    from avgpipe.runtime.lane import Lane
    from avgpipe.runtime.streams import LaneStream


class SharedBatches:
    """Combines the lanes' values of each batch, for one stage replica."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self._norms: dict[int, torch.Tensor] = {}  # squared, by batch
        self._left: dict[int, int] = {}  # by batch, how many lanes have not taken the norm

    @contextmanager
    def _reading(self, here: Lane) -> Iterator[None]:
        """Order a device's reads inside after the other lanes' work, and their next work after the reads."""
        others = [lane for lane in self.lanes if lane is not here]
        for lane in others:
            here.wait_for(lane)
        yield
        for lane in others:
            lane.wait_for(here)

    # ---- losses that are a sum and a count ---------------------------------------------------------------------------

    def knows_counts(self, batch: int) -> bool:
        """Whether the losses of all shares are known."""
        states = (lane.state_of(batch) for lane in self.lanes)
        return all(state is not None and state.outcome is not None for state in states)

    def factor(self, here: Lane, state: BatchState) -> torch.Tensor | None:
        """Return the factor on a share's gradient that divides it by the batch's count; None without one."""
        weights, own = state.work.weights, state.outcome
        if own is None or not own.dim() or weights is None or not weights.scale:
            return None
        states = [lane.state_of(state.work.batch) for lane in self.lanes]
        outcomes = [one.outcome for one in states if one is not None and one.outcome is not None]
        with self._reading(here):
            count = torch.stack([outcome[2].to(own.device) for outcome in outcomes if outcome.dim()]).sum()
        factor = own[1] * own[2] * len(self.lanes) / (weights.scale * count)
        return torch.where(own[2] > 0, factor, 0.0)  # a share that counts nothing has no gradient

    # ---- the norm ----------------------------------------------------------------------------------------------------

    def has_gradients(self, batch: int) -> bool:
        """Whether the gradients of all shares are complete, or their norm is known."""
        return batch in self._norms or all(lane.has_gradient(batch) for lane in self.lanes)

    def squared_norm(self, here: Lane, batch: int, without: Collection[int]) -> torch.Tensor:
        """Return the squared norm, float64 []. ``without``: parameters that another stage counts."""
        if batch not in self._norms:
            with self._reading(here):  # before the others change their gradients
                self._norms[batch], self._left[batch] = self._norm(batch, without), len(self.lanes)
        self._left[batch] -= 1
        return self._norms[batch] if self._left[batch] else self._norms.pop(batch)

    def _norm(self, batch: int, without: Collection[int]) -> torch.Tensor:
        arenas = [lane.finish_gradient(batch) for lane in self.lanes]
        means = []
        for n, parameters in enumerate(zip(*(arena.parameters for arena in arenas))):
            grads = [p.grad for p in parameters if p.grad is not None]
            if grads and n not in without:
                total = grads[0] + grads[1] if len(grads) > 1 else grads[0]
                for grad in grads[2:]:
                    total += grad
                means.append(total)
        if means:
            return arenas[0].squared_norm(means) / len(arenas) ** 2
        device = self.lanes[0].trained.stage.device
        return torch.zeros((), dtype=torch.float64, device=device)


# ---- updates of other processes --------------------------------------------------------------------------------------


class RemoteUpdates:
    """Receives reference updates of dedicated pipelines of other processes: a message for each batch.

    So every worker has the whole of each round, and averaging works as for pipelines that share a worker:
    sums in the order of pipelines, rounds of any staleness, and a last round that is left unfinished.

    Args:
        route: of this process's replica.
        turns: batches in a cycle of the pipelines; batch j is pipeline j % ``turns``'s, or all's if it is 1.
        stream: of its lane; None on a CPU.
    """

    def __init__(
        self,
        reference: Reference,
        mailbox: Mailbox,
        route: Route,
        turns: int,
        stream: LaneStream | None = None,
    ) -> None:
        self._reference, self._mailbox, self._turns = reference, mailbox, turns
        self._next = {
            i: Key(Message.REFERENCE_UPDATE, i, replica, route.replica, i % turns, -1)
            for i, replica in route.remote
        }
        self._averaging: Callable[[], AbstractContextManager[None]] = (
            nullcontext if stream is None else stream.issuing
        )

    def resume(self, batches: int) -> None:
        """Continue after ``batches`` in all, whose updates are in the reference."""
        n = self._turns
        self._next = {i: key._replace(batch=batches + (i - batches) % n) for i, key in self._next.items()}

    def collect(self) -> None:
        """Apply the updates that have arrived and are due."""
        for i, key in self._next.items():
            while key in self._mailbox and self._reference.ready(i):
                # The scheduler calls this between steps, when the current stream is the caller's, which is
                # ordered neither after the updates of the round nor before the steps that read their result.
                with self._averaging():
                    update = self._mailbox.take(key)
                    if update is not None:  # else it was not the last batch of a period
                        self._reference.accept(i, update)
                key = self._next[i] = key._replace(batch=key.batch + self._turns)

    def may_perform(self, step: Step) -> bool:
        """Whether a step may run, as far as messages go: the reference has further conditions."""
        return True

    def missing(self, batches: int | None = None) -> list[Key]:
        """Return the next awaited message of each pipeline, only of the first ``batches`` if given."""
        keys = [key for key in self._next.values() if key not in self._mailbox]
        return [key for key in keys if batches is None or key.batch < batches]
