"""The states that pipelines begin with that join others in training: one of these gives it to each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from avgpipe.errors import PipelineError
from avgpipe.fault.exchange import TurnExchange
from avgpipe.fault.hosts import HostGroup
from avgpipe.fault.roster import Term
from avgpipe.ranks.rendezvous import in_thread

_LOOK_S = 0.05
_LOOPBACK = "127.0.0.1"


class States:
    """One process's end of handing over states, each by a group of the two processes.

    Args:
        give: ``give(replica, turn)`` returns the bytes of its state before a step.
    """

    def __init__(self, exchange: TurnExchange, give: Callable[[int, int], bytes]) -> None:
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
                state = torch.frombuffer(bytearray(self._give(place, turn)), dtype=torch.uint8)
                in_thread(lambda term=term, state=state: self._send(term, place, state))  # type: ignore[misc]

    def _send(self, term: Term, place: int, state: torch.Tensor) -> None:
        with suppress(RuntimeError, PipelineError):  # it has ended, or gets its state from another one
            group = self._group(term, self._membership.group, place, 0)
            group.send(torch.tensor([len(state)]), 1).wait()
            group.send(state, 1).wait()

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

    def received(self, place: int) -> bytes:
        """Wait for the state that this pipeline begins with, and return it."""
        roster = self._exchange.known.roster
        own = next(term for term in roster.present if term.number == self._membership.group)
        while True:
            if self._membership.failure is not None:
                raise self._membership.failure
            donor = self._donor_of(own)
            if donor is None:
                self._membership.pause(_LOOK_S)
                continue
            task = in_thread(lambda donor=donor: self._receive(own, donor, place))  # type: ignore[misc]
            while not task.done() and self._donor_of(own) == donor and self._membership.failure is None:
                self._membership.pause(_LOOK_S)
            if task.done() and task.exception() is None:
                return bytes(task.result().numpy())
            self._membership.pause(_LOOK_S)

    def _receive(self, own: Term, donor: int, place: int) -> torch.Tensor:
        group = self._group(own, donor, place, 1)
        length = torch.zeros(1, dtype=torch.int64)
        group.receive(length, 0).wait()
        state = torch.empty(int(length), dtype=torch.uint8)
        group.receive(state, 0).wait()
        return state
