"""The ranks of one pipeline: who is who, and what they tell each other. Here for a process that has all stages.

:class:`avgpipe.ranks.met.Met` is for several of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from avgpipe.errors import PeerLost, PipelineTimeout
from avgpipe.ranks import probe
from avgpipe.ranks.process import is_replaceable, named

T = TypeVar("T")


def meet(timeout_s: float, members: dist.ProcessGroup | None = None) -> World:
    """Meet the other ranks of a pipeline, if there are any.

    Args:
        timeout_s: limit of every wait.
        members: the group that has these ranks, by their numbers in it; None: the default group, which is made where
            the environment says who it has.
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


class World:
    """The ranks of one pipeline: this one alone.

    Attributes:
        rank, size: of this process, and of all.
        group: of all ranks, on CPU memory; None if there is one.
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
        """Return what ``make`` returns, in which all ranks connect to each other; PeerLost names who does not."""
        return make()

    def beside(self) -> World:
        """Return these ranks with a group of their own, for another thread. Every rank calls this."""
        return self

    def pass_on(self, tensor: torch.Tensor, source: int, target: int) -> None:
        """Send a tensor on the CPU from rank ``source`` to ``target``, which has one as large; the others return."""

    def describe(self, roles: Sequence[str]) -> None:
        """Name what each rank does, in rank order, for messages about it."""
        self._roles = tuple(roles)

    def role(self, rank: int) -> str:
        """Return what ``rank`` does, in words, as "stage 1"."""
        return self._roles[rank] if self._roles else "its stage is not known yet"

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.role(rank)})"

    # ---- failures ------------------------------------------------------------------------------------------------

    def report(self, failure: BaseException) -> None:
        """Tell all ranks why this one fails. The first report stays: what follows is its consequence."""
        if self._spares is not None and not isinstance(failure, PeerLost | PipelineTimeout):
            self._spares.give_up()

    def reported(self) -> PeerLost | None:
        """Return the error that names the first failure reported by another rank; None if there is none."""
        return None

    def is_first(self, what: str) -> bool:
        """Return whether no other rank has asked this of ``what``."""
        return True

    def first(self, name: str, text: str) -> str:
        """Return what the first rank has put of this name: this ``text``, unless another one came before.

        RuntimeError where the store does not answer.
        """
        return self._notes.setdefault(name, text)

    def note(self, name: str, text: str) -> None:
        """Put a text where all ranks find it; RuntimeError where the store does not answer."""
        self._notes[name] = text

    def noted(self, name: str) -> str | None:
        """Return a text that was put there; None if there is none yet."""
        return self._notes.get(name)

    def last_seen(self, rank: int) -> str:
        """Return what ``rank`` was last seen doing."""
        return f"rank {rank} has not reported yet"

    # ---- collectives on CPU memory -------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until all ranks have come here."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Return the tensor of rank ``source`` on every rank, on the device of this rank's own."""
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Return a value of every rank, in rank order, as JSON carries it."""
        return [json.loads(json.dumps(value))]

    def require_same(self, what: str, text: str) -> None:
        """Refuse, on every rank, a ``text`` that differs between ranks."""


def since(what: str, begin_s: float) -> str:
    """``what``, begun at ``begin_s`` of the monotonic clock; only seconds that matter are shown, so the text rests."""
    seconds = time.monotonic() - begin_s
    return what if seconds < 1 else f"{what}, for {seconds:.0f} s"
