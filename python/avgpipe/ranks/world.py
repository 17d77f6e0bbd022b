"""The ranks of one pipeline: their roles, reports and collectives. Here for a process that has all stages.

:class:`avgpipe.ranks.met.Met` is for several ranks.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from avgpipe.errors import PeerLost, PipelineTimeout
from avgpipe.ranks import environment as probe
from avgpipe.ranks.environment import is_replaceable, named

T = TypeVar("T")


def meet(timeout_s: float, members: dist.ProcessGroup | None = None) -> World:
    """Meet the other ranks of a pipeline, if there are any.

    Args:
        timeout_s: limit of every wait.
        members: the group that has these ranks, by their numbers in it; None: the default group, which is
            made where the environment describes it.
    """
    probe.at("start")
    makes = {"RANK", "WORLD_SIZE"} <= os.environ.keys() and not dist.is_initialized()
    if makes:
        backend = None if torch.accelerator.is_available() else "gloo"
        named("avgpipe.ranks.rendezvous:join")(timeout_s, backend)
    is_alone = not dist.is_initialized() or dist.get_world_size(members) == 1
    world: World = World(timeout_s) if is_alone else named("avgpipe.ranks.met:Met")(timeout_s, members)
    world.made_group = makes
    return world


class Notice:
    """Whether a process will be ended soon, and with it a pipeline that has no other rank.

    Attributes:
        is_noticed: Whether it is known.
    """

    def __init__(self) -> None:
        self.is_noticed = False

    def notice(self) -> None:
        """Note that this process will be ended; in any thread, and in a signal handler."""
        self.is_noticed = True

    @property
    def is_known(self) -> bool:
        """Whether this process will be ended, or knows that another one will."""
        return self.is_noticed

    def is_due(self, place: int) -> bool:
        """Whether to stop at ``place``, a number that grows."""
        return self.is_noticed

    def look(self) -> None:
        """Publish where this rank is, and read where the others are."""


class World:
    """The ranks of one pipeline: this one alone.

    Attributes:
        rank, size: the number of this process, and the number of all.
        group: of all ranks, on CPU memory; None for a single rank.
        timeout_s: limit of every wait.
        made_group: whether the default process group was made for this pipeline.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.made_group = timeout_s, False
        self.rank, self.size = 0, 1
        self.group: dist.ProcessGroup | None = None
        self._roles: tuple[str, ...] = ()
        self._notes: dict[str, str] = {}
        self._spares = named("avgpipe.fault.generation:Spares")() if is_replaceable() else None

    def connect(self, make: Callable[[], T]) -> T:
        """Return the result of ``make``, which connects all ranks; PeerLost names those that fail to."""
        return make()

    def beside(self) -> World:
        """Return a world of the same ranks with another group, for another thread. Every rank calls this."""
        return self

    def pass_on(self, tensor: torch.Tensor, source: int, target: int) -> None:
        """Send a CPU tensor from rank ``source`` into that of ``target``, of the same size; others return."""

    def disconnect(self) -> None:
        """End this rank's part in collectives: ranks that wait for it in one get an error at once."""

    def describe(self, roles: Sequence[str]) -> None:
        """Name what each rank does, in rank order, for messages about it."""
        self._roles = tuple(roles)

    def role(self, rank: int) -> str:
        """Return the role of ``rank`` in words, such as "stage 1"."""
        return self._roles[rank] if self._roles else "its stage is not known yet"

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.role(rank)})"

    # ---- failures ------------------------------------------------------------------------------------------------

    def report(self, failure: BaseException) -> None:
        """Report this rank's failure to all ranks. Only the first is kept: later ones follow from it."""
        if self._spares is not None and not isinstance(failure, PeerLost | PipelineTimeout):
            self._spares.give_up()

    def reported(self) -> PeerLost | None:
        """Return the error that names the first failure reported by another rank; None if there is none."""
        return None

    def is_first(self, what: str) -> bool:
        """Return whether this rank is the first to call this with ``what``."""
        return True

    def first(self, name: str, text: str) -> str:
        """Return the text of this name: ``text``, unless another rank has put one before.

        RuntimeError where the store does not answer.
        """
        return self._notes.setdefault(name, text)

    def note(self, name: str, text: str) -> None:
        """Put a text where all ranks can read it; RuntimeError where the store does not answer."""
        self._notes[name] = text

    def noted(self, name: str) -> str | None:
        """Return the text of this name; None if there is none yet."""
        return self._notes.get(name)

    def last_seen(self, rank: int) -> str:
        """Return what ``rank`` was last seen doing."""
        return f"rank {rank} has not reported yet"

    # ---- collectives on CPU memory -------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until all ranks have called this."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Return the tensor of rank ``source`` on every rank, on the device of this rank's own tensor."""
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Return a value of every rank, in rank order, as JSON returns it."""
        return [json.loads(json.dumps(value))]

    def require_same(self, what: str, text: str) -> None:
        """Refuse, on every rank, a ``text`` that differs between ranks."""


def since(what: str, begin_s: float) -> str:
    """Return ``what``, begun at ``begin_s`` of the monotonic clock, with its seconds from 1 s on.

    Below 1 s the text is constant, so it is not published again.
    """
    seconds = time.monotonic() - begin_s
    return what if seconds < 1 else f"{what}, for {seconds:.0f} s"


@dataclass
class LoopCall:
    """Batches of one loader.

    Attributes:
        session: distinguishes batches of equal numbers, which are repeated after a load.
        seen: how many were looked at, counting those of earlier calls that are one loop with this.
        due: batches before this number are not compared.
        begun: the number after the newest batch here; 0 before the first one.
        has_ended: whether the loader has ended, on this rank.
    """

    session: int = 0
    name: str = "train"
    seen: int = 0
    due: float = math.inf
    begun: int = 0
    has_ended: bool = False

    @property
    def end(self) -> str:
        return f"{self.session}/{self.name}/end"


class Loops:
    """The numbers of batches in each loop. Several ranks compare them: :class:`avgpipe.runtime.alike.Alike`.

    Args:
        is_on: whether anything is compared.
        generation: how often lost ranks were replaced.

    Attributes:
        here: the loop that runs; replaced as a whole, as a thread reads it.
    """

    def __init__(self, is_on: bool = False, generation: int = 0) -> None:
        self._is_on, self._generation = is_on, generation
        self.here = self._loop_call()

    def _loop_call(self, session: int = 0, name: str = "train", seen: int = 0) -> LoopCall:
        return LoopCall(session, name, seen, 0 if self._is_on else math.inf)

    def begin_anew(self) -> None:
        """Prepare for another loader, or for batch numbers that are repeated; every rank calls this."""
        session = self.here.session + bool(self.here.begun or self.here.has_ended)
        self._is_on &= not self._generation or not session
        self.here = self._loop_call(session)

    @contextmanager
    def loop(self, name: str, seen: int = 0) -> Iterator[None]:
        """Number the batches inside separately from others of this session, after ``seen`` of their kind."""
        before, was_on = self.here, self._is_on
        self._is_on &= not self._generation
        self.here = self._loop_call(before.session, name, seen)
        try:
            yield
        finally:
            self.here, self._is_on = before, was_on

    def batch(self, number: int, inputs: Any, targets: Any) -> None:
        """Compare a batch that begins here, if it is due."""

    def end(self, number: int) -> None:
        """Publish that the loader here has ended before a batch of this number."""

    def look(self) -> None:
        """Check whether this rank has begun a batch that another one lacks; called regularly by a thread."""
