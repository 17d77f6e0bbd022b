"""Speaks for its host: sums what the pipelines here have published with what those of other hosts have.

One process of each rank does it on each host, in a thread of its own, for one epoch: from the moment at which the
members of the sums change by a loss until the next one. Where pipelines of another host join, their host has a
part in the sums from their first step on, in another group.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch

from avgpipe.errors import PipelineError, reason
from avgpipe.fault.hosts import HostGroup
from avgpipe.fault.membership import Known
from avgpipe.fault.roster import Term
from avgpipe.fault.slots import TEXT_BYTES, ProcessMemory

if TYPE_CHECKING:
    from avgpipe.fault.exchange import TurnExchange

_log = logging.getLogger("avgpipe")
_LOOK_S = 1.0  # between checks whether it is to end
_END_S = 5.0  # for its threads to end, as one inside gloo would abort the process at its end


class Speaker:
    """The end of one process in the sums of one epoch."""

    def __init__(self, exchange: TurnExchange, known: Known) -> None:
        self._exchange, self._membership = exchange, exchange.membership
        self._known, self._epoch = known, known.epoch
        self._is_halted = False
        self._lock = threading.Lock()
        self._groups: dict[str, HostGroup] = {}
        self._scratch: dict[tuple[int, int], torch.Tensor] = {}
        self._threads: list[threading.Thread] = []
        self._under_way: tuple[HostGroup | None, list[str]] = None, []  # the group of a sum, and its hosts
        self._start(self._run)

    @property
    def waits_for(self) -> str:
        """The host that the sum under way waits for, or that it has failed with; "" for none."""
        group, order = self._under_way
        return "" if group is None or group.awaited is None else order[group.awaited]

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name="avgpipe-speaker", daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        """Wait until all its threads have ended; once it is halted."""
        deadline = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def halt(self) -> None:
        """Abandon what is under way; no sum becomes whole from now on."""
        with self._lock:
            self._is_halted = True
            groups = [*self._groups.values()]
        self._exchange.own.speaker_bell.ring()
        for group in groups:
            self._start(group.abort)

    def _goes_on(self) -> bool:
        return not self._is_halted and self._membership.failure is None

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            turn = self._give_owed()
            while self._goes_on():
                if self._await(turn):
                    self._sum(turn)
                    turn += 1
        except (RuntimeError, PipelineError) as error:
            # Of a group: another process has ended, or this is halted.
            if self._goes_on():
                _log.debug("the sum over hosts has failed: %s", reason(error))
                self._membership.report_broken(self._epoch, self.waits_for)
        except Exception as error:
            self._exchange.failed(PipelineError(f"the sum over hosts has failed: {reason(error)}"))

    def _await(self, turn: int) -> bool:
        """Wait until all pipelines here have published a step; False if the epoch has ended."""
        bell = self._exchange.own.speaker_bell
        while self._goes_on():
            seen = bell.count()
            if self._has_begun(turn) and self._exchange.may_sum(turn):
                return True
            bell.wait(seen, _LOOK_S)
        return False

    def _has_begun(self, turn: int) -> bool:
        """Whether this process has published a step, so that its members are decided."""
        own = self._exchange.known.roster.of(self._membership.group)
        return own is not None and turn < own.first + self._exchange.own.published()

    def _speakers(self, turn: int) -> dict[str, Term] | None:
        """Return who speaks in a step, if this process does, for several hosts."""
        speakers = self._exchange.known.roster.speakers(turn)
        own = speakers.get(self._membership.host)
        is_one = own is not None and own.number == self._membership.group
        return speakers if is_one and len(speakers) > 1 else None

    def _group(self, speakers: dict[str, Term]) -> HostGroup:
        """Return the group of the speakers; its first call connects them."""
        numbers = " ".join(str(term.number) for term in speakers.values())
        name = f"sums {self._epoch} {numbers} {self._membership.rank}"
        if name not in self._groups:
            index = [*speakers].index(self._membership.host)
            made = HostGroup(
                self._membership, name, index, len(speakers), self._goes_on, self._exchange.address
            )
            with self._lock:
                self._groups[name] = made
                if self._is_halted:
                    raise PipelineError("the epoch has ended")
        return self._groups[name]

    # ---- sums --------------------------------------------------------------------------------------------------------

    def _sum(self, turn: int) -> None:
        exchange = self._exchange
        speakers = self._speakers(turn)
        if speakers is None:
            return
        group, near = self._group(speakers), exchange.near(turn)
        counting = exchange.known.roster.counting(turn)
        texts = {
            place: [[i, exchange.of(term).slot(place, turn).read()] for i, term in near.items()]
            for place in exchange.like
        }
        self._under_way = group, [*speakers]
        each = TEXT_BYTES * len(exchange.like)
        sizes = [each * sum(term.host == host for term in counting.values()) for host in speakers]
        posted = group.texts(json.dumps(texts).encode(), sizes)
        theirs = cache(lambda: [json.loads(text) for text in posted()])
        for place in exchange.like:
            out = exchange.own.sums(place, turn)
            slots = {i: exchange.of(term).slot(place, turn) for i, term in near.items()}
            have = {i for i, value in texts[place] if value["has_update"]}
            # A host with an update knows that there is a sum before the texts of others are there.
            if have or any(value["has_update"] for of in theirs() for _, value in of[str(place)]):
                for n, region in enumerate(out.update_regions):
                    own = self._near_sum(
                        n, region, [s.update_regions[n] for i, s in slots.items() if i in have]
                    )
                    group.sum(own, region, exchange.wire)
            for n, region in enumerate(out.buffer_regions):
                group.sum(self._near_sum(~n, region, [s.buffer_regions[n] for s in slots.values()]), region)
            rows = sorted(row for of in theirs() for row in of[str(place)])
            out.write([[i for i, _ in rows], [value for _, value in rows]])
        self._mark(exchange.own, turn)

    def _near_sum(self, n: int, like: torch.Tensor, regions: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum of this host's regions; a single one itself."""
        if len(regions) == 1:
            return regions[0]
        key = n, like.numel()
        if key not in self._scratch:
            self._scratch[key] = torch.empty_like(like)
        total = self._scratch[key].zero_() if not regions else self._scratch[key].copy_(regions[0])
        for region in regions[1:]:
            total += region
        return total

    def _mark(self, memory: ProcessMemory, turn: int) -> None:
        with self._lock:
            if self._is_halted:
                return
            memory.mark_whole(turn, self._epoch)
        self._exchange.ring()

    # ---- the step before ---------------------------------------------------------------------------------------------

    def _give_owed(self) -> int:
        """Give the sums of the step before this epoch to hosts that lack it, or get them; return the first step."""
        owed, turn, host = self._known.owed, self._known.resume, self._membership.host
        own = self._known.roster.of(self._membership.group)
        first = max(turn, 0 if own is None else own.first, self._exchange.next_turn)
        speakers = self._speakers(turn)
        if owed is None or speakers is None or host not in (owed[0], *owed[1]):
            return first
        group, order = self._group(speakers), [*speakers]
        mine = self._exchange.own
        if host == owed[0]:
            theirs = self._exchange.whole_sums(turn - 1, self._membership.rank)
            assert theirs is not None
            works = [
                group.send(part, order.index(lacking), n)
                for lacking in owed[1]
                if lacking in speakers
                for n, part in enumerate(self._parts(theirs, turn - 1))
            ]
        else:
            parts = self._parts(mine, turn - 1)
            works = [group.receive(part, order.index(owed[0]), n) for n, part in enumerate(parts)]
        for work in works:
            work.wait()
        if host in owed[1]:
            self._mark(mine, turn - 1)
        return turn

    def _parts(self, memory: ProcessMemory, turn: int) -> list[torch.Tensor]:
        sums = [memory.sums(place, turn) for place in self._exchange.like]
        return [part for slot in sums for part in (slot.text, *slot.update_regions, *slot.buffer_regions)]
