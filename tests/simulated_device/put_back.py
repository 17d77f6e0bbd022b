"""What would not be right on several GPUs, put back one at a time.

Each is right where every stream has a queue of its own, or it is an order that every device shows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

from avgpipe.runtime import group_sum
from tests.simulated_device import Hardware, ranks
from tests.simulated_device.several import CASES, on_one, wrong

POLICIES = ("random", "late", "starved")


class Bug(NamedTuple):
    """A bug of ``case`` that ``hardware`` shows. ``patch``: puts it back."""

    patch: Callable[[], Any]
    case: str
    hardware: Hardware
    shown_everywhere: bool = False


def first_seen(bug: Bug, within: int) -> str:
    """What the first of so many seeds shows; "" if none does."""
    expected = on_one(CASES[bug.case])
    for seed in range(within):
        with bug.patch():
            found = wrong(CASES[bug.case], POLICIES[seed % len(POLICIES)], seed, bug.hardware, expected)
        if found:
            return found
    return ""


# ---- sums of replicas' gradients -------------------------------------------------------------------------------------


class _AsTheyAreReady(group_sum.SumGroup):
    """Starts what any lane has filled."""

    def start_due(self) -> None:
        while ready := [lane for lane in self._due if lane.start_filled()]:
            for lane in ready:
                self._due.remove(lane)


class _OfItsOwn(group_sum.GroupSum):
    """With a communicator of its own, in no order with those of other pipelines."""

    def __init__(self, parameters: Any, group: Any, key: Any, stream: Any) -> None:
        own = group_sum.SumGroup(group.group.like(f"pipeline {key.pipeline}"), group._mailbox, group.device)
        super().__init__(parameters, own, key, stream)


# ---- communicators ---------------------------------------------------------------------------------------------------


def _both_ways() -> Any:
    """Messages from and to a peer on one stream, as of one communicator."""
    streams: dict[Any, Any] = {}
    init = ranks.Pair.__init__

    def joined(self: Any, name: str, end: int, size: int, options: Any) -> None:
        init(self, name, end, size, options)
        ends = frozenset(name.partition(",")[0].removeprefix("from ").split(" to "))
        self.stream = streams.setdefault((self.device, ends), self.stream)

    return mock.patch.object(ranks.Pair, "__init__", joined)


def of_normal_priority() -> Any:
    """Communicators with streams out of the lanes' own pool."""
    init = ranks.Options.__init__
    return mock.patch.object(ranks.Options, "__init__", lambda self, **_: init(self))


BUGS: dict[str, Bug] = {
    "a communicator for each pipeline's sums": Bug(
        lambda: mock.patch.object(group_sum, "GroupSum", _OfItsOwn),
        "replicas and a stage",
        Hardware(queues=8),
    ),
    "sums in each rank's own order": Bug(
        lambda: mock.patch.object(group_sum, "SumGroup", _AsTheyAreReady), "replicas", Hardware(), True
    ),
    "a communicator for both directions": Bug(_both_ways, "a chain", Hardware(), True),
    "the 8 queues that there are by default": Bug(nullcontext, "a stage and replicas", Hardware(queues=8)),
}
