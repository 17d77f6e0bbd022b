"""DAPPLE's three ways to give a stage devices of machines that have several (Fan et al. 2021, section 4.2).

They trade where a stage's traffic goes: its all-reduce stays inside a machine if the stage does, and its activations do
if the next stage is there too.
"""

from __future__ import annotations

from collections.abc import Callable

Free = tuple[int, ...]  # by machine, devices that no stage has yet
Taken = tuple[int, ...]  # by machine, devices of one stage
Policy = Callable[[Free, int, int], Taken]


def fresh_first(free: Free, size: int, count: int) -> Taken:
    """From machines that no stage is on yet, then from the others: for stages whose all-reduce is long."""
    return _filled(free, sorted(range(len(free)), key=lambda m: free[m] < size), count)


def append_first(free: Free, size: int, count: int) -> Taken:
    """From machines that other stages are on already, then from fresh ones: leaves no machine half used."""
    return _filled(free, sorted(range(len(free)), key=lambda m: free[m] == size), count)


def scatter_first(free: Free, size: int, count: int) -> Taken:
    """Evenly from the machines with most free devices: for stages with few weights, which can do without fast links."""
    level = size
    while sum(max(0, n - level) for n in free) < count:
        level -= 1
    taken = [max(0, n - level) for n in free]
    spare = sum(taken) - count
    for m in reversed(range(len(free))):
        if spare and taken[m]:
            taken[m] -= 1
            spare -= 1
    return tuple(taken)


POLICIES: tuple[Policy, ...] = (fresh_first, append_first, scatter_first)


def placements(free: Free, size: int, count: int) -> list[Taken]:
    """What the policies make of it, each once. ``size``: devices of a machine. Needs ``count`` free ones."""
    if len(free) == 1:
        return [(count,)]
    return list(dict.fromkeys(policy(free, size, count) for policy in POLICIES))


def _filled(free: Free, order: list[int], count: int) -> Taken:
    taken = [0] * len(free)
    for m in order:
        taken[m] = min(free[m], count)
        count -= taken[m]
    return tuple(taken)


def left(free: Free, taken: Taken) -> Free:
    return tuple(a - b for a, b in zip(free, taken))
