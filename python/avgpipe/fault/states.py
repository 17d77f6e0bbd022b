"""The states that pipelines begin with that join others in training: one of these gives it to each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from avgpipe.errors import PipelineError
from avgpipe.fault.exchange import TurnExchange
from avgpipe.fault.hosts import HostGroup
from avgpipe.fault.roster import Term
from avgpipe.ranks.limits import LIMITS
from avgpipe.ranks.rendezvous import in_thread

_LOOPBACK = "127.0.0.1"


class States:
    """One process's end of handing over states, each by a group of the two processes.

    Args:
        give: ``give(replica, turn)`` returns its state before a step, packed.
    """

    def __init__(self, exchange: TurnExchange, give: Callable[[int, int], list[torch.Tensor]]) -> None:
        self._exchange, self._membership, self._give = exchange, exchange.membership, give
        self._given: set[tuple[int, int]] = set()  # terms and stage replicas

    def hand_over(self, place: int, turn: int) -> None:
        """Send the state of a stage replica before a step to the pipelines that join with it.

        Only to those with this donor. The step must have begun: until then a load may change the state.
        """
        if turn >= self._membership.begun:
            return
        for term in self._exchange.known.roster.joining(turn):
            if term.donor == self._membership.pipeline and (term.number, place) not in self._given:
                self._given.add((term.number, place))
                parts = self._give(place, turn)
                in_thread(lambda term=term, parts=parts: self._send(term, place, parts))  # type: ignore[misc]

    def _send(self, term: Term, place: int, parts: list[torch.Tensor]) -> None:
        with suppress(RuntimeError, PipelineError):  # it has ended, or gets its state from another one
            group = self._group(term, self._membership.group, place, 0)
            sizes = [len(part) for part in parts]
            for message in (torch.tensor([len(sizes)]), torch.tensor(sizes), *filter(len, parts)):
                group.send(message, 1).wait()

    def _group(self, term: Term, donor: int, place: int, index: int) -> HostGroup:
        terms = self._exchange.known.roster.terms
        hosts = {known.host for known in terms if known.number in (term.number, donor)}
        address = self._exchange.address if len(hosts) > 1 else _LOOPBACK
        name = f"state {term.number} {donor} {place}"
        return HostGroup(self._membership, name, index, 2, lambda: self._donor_of(term) == donor, address)

    def _donor_of(self, term: Term) -> int | None:
        """Return the number of the term that gives a joining one its state."""
        terms = self._exchange.known.roster.present
        wanted = next((known.donor for known in terms if known.number == term.number), None)
        return next((t.number for t in terms if t.pipeline == wanted and t.first < term.first), None)

    def received(self, place: int) -> list[torch.Tensor]:
        """Wait for the state that this pipeline begins with, and return it, packed."""
        roster = self._exchange.known.roster
        own = next(term for term in roster.present if term.number == self._membership.group)
        while True:
            if self._membership.failure is not None:
                raise self._membership.failure
            donor = self._donor_of(own)
            if donor is None:
                self._membership.pause(LIMITS.donor_look_s)
                continue
            task = in_thread(lambda donor=donor: self._receive(own, donor, place))  # type: ignore[misc]
            while not task.done() and self._donor_of(own) == donor and self._membership.failure is None:
                self._membership.pause(LIMITS.donor_look_s)
            if task.done() and task.exception() is None:
                return task.result()
            self._membership.pause(LIMITS.donor_look_s)

    def _receive(self, own: Term, donor: int, place: int) -> list[torch.Tensor]:
        group = self._group(own, donor, place, 1)

        def received(size: int, dtype: torch.dtype) -> torch.Tensor:
            found = torch.empty(size, dtype=dtype)
            if size:
                group.receive(found, 0).wait()
            return found

        sizes = received(int(received(1, torch.int64)), torch.int64)
        return [received(size, torch.uint8) for size in sizes.tolist()]
