"""Finds a model's anatomy: the arguments of its blocks that earlier units must give."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from avgpipe.model.blocks import Anatomy, BlockSlot, Call, Collected, Observed, Slots, is_same, observe
from avgpipe.model.context import in_mode
from avgpipe.model.outline import Exchange, Seen
from avgpipe.model.shell import shell_of


def anatomy_of(model: nn.Module, call: Call) -> Anatomy:
    """Run ``model`` several times on the first of the trials, without gradients.

    Raises:
        ValueError: Its forward is no chain of blocks.
    """
    anatomy = Anatomy(model, call, observe(model, call))
    with in_mode(model, False), torch.no_grad():
        try:
            seen = _made_up(anatomy, call.trials[0])
        except RuntimeError:  # torch's, for a tensor whose elements share memory
            anatomy = replace(anatomy, writes=True)
            seen = _made_up(anatomy, call.trials[0])
        anatomy = _with_values(anatomy, seen)
        anatomy = replace(anatomy, early=_early(anatomy))
        anatomy = replace(anatomy, returns=_needed_returns(anatomy))
        return replace(anatomy, looks_at=_looked_at(anatomy, seen))


def _made_up(anatomy: Anatomy, inputs: Mapping[str, Any]) -> Seen:
    """Run a shell in which nothing has weights; results that depend on weights become NaN."""
    seen = Seen()
    exchange = Exchange(anatomy.writes, math.nan, seen)
    shell = shell_of(anatomy, anatomy.units, anatomy.units, exchange)
    try:
        shell(**inputs, **anatomy.call.fixed)
    except Exception:
        if len(seen.blocks) < len(anatomy.blocks):
            raise
        # The model's end may need values that are not there; everything requested here has been recorded.
    return seen


def _with_values(anatomy: Anatomy, seen: Seen) -> Anatomy:
    """Name the values that ``seen`` got wrong, of each block's arguments and of the last block's output."""
    observed, names = anatomy.observed, dict[int, str]()
    # Stages hold the parameters that are passed to their blocks.
    own = {id(t) for t in chain(anatomy.model.parameters(), anatomy.model.buffers())}
    takes: list[dict[BlockSlot, str]] = [{}]
    for number, call in enumerate(observed.calls.values()):
        made = seen.blocks.get(number, {})
        takes.append(
            {
                slot: names.setdefault(id(tensor), f"{number + 1}.{slot}")
                for slot, tensor in call.slots.items()
                if id(tensor) not in own and not (slot in made and is_same(tensor, made[slot]))
            }
        )
    takes.append({})
    last = tree_leaves(list(observed.calls.values())[-1].returned)
    unit = len(takes) - 1
    returns = {
        n: names.setdefault(id(t), f"{unit}.returned.{n}")
        for n, t in enumerate(last)
        if isinstance(t, torch.Tensor)
    }
    return replace(anatomy, takes=takes, returns=returns, collected=_collected(anatomy.model, observed))


def _early(anatomy: Anatomy) -> frozenset[str]:
    """Find the values that are lost if unit 0 makes nothing, though all arguments of earlier blocks are right."""
    calls, blocks = list(anatomy.observed.calls.values()), dict[int, Slots]()
    places = [
        (number, slot, value)
        for number, taken in enumerate(anatomy.takes[1:-1])
        for slot, value in taken.items()
    ]
    arrived = {value: calls[number].slots[slot] for number, slot, value in places}
    exchange = Exchange(anatomy.writes, math.nan, Seen(blocks), arrived)
    shell = shell_of(anatomy, 1, anatomy.units, exchange)
    # A failure of the head does not matter here: the blocks have been called.
    with suppress(Exception):
        shell(**anatomy.call.trials[0], **anatomy.call.fixed)
    lost = {
        value
        for number, slot, value in places
        if slot in blocks.get(number, {})
        and blocks[number][slot].isnan().any()
        and not calls[number].slots[slot].isnan().any()
    }
    return frozenset(lost.difference(anatomy.takes[1].values()))


def _collected(model: nn.Module, observed: Observed) -> dict[int, list[Collected]]:
    """Find the tensors inside blocks that the model returns, by hooks, as they are not in any block's output."""
    returned = {id(leaf) for call in observed.calls.values() for leaf in tree_leaves(call.returned)}
    wanted = {id(leaf) for leaf in tree_leaves(observed.output) if isinstance(leaf, torch.Tensor)} - returned
    found: dict[int, list[Collected]] = {}
    for name, output in observed.inside:
        leaves = tree_leaves(output)
        for n, leaf in enumerate(leaves):
            if id(leaf) in wanted and model.get_submodule(name)._forward_hooks:
                wanted.remove(id(leaf))
                number, block = next(
                    (number, block)
                    for number, block in enumerate(observed.calls)
                    if name.startswith(block + ".")
                )
                one = Collected(f"{name}.{n}", name.removeprefix(block + "."), n, len(leaves))
                found.setdefault(number, []).append(one)
    return found


def _needed_returns(anatomy: Anatomy) -> dict[int, str]:
    """Return the leaves of the last block's output that change the model's output."""
    returns = dict(anatomy.returns)
    if len(returns) == 1:
        return returns
    right = _head(anatomy, anatomy.call.trials[0])
    for n in list(returns):
        fewer = {m: value for m, value in returns.items() if m != n}
        if is_same(right, _head(replace(anatomy, returns=fewer), anatomy.call.trials[0])):
            returns = fewer
    return returns


def _head(anatomy: Anatomy, inputs: Mapping[str, Any]) -> Any:
    """Return the model's output, by a shell with the last unit only."""
    exchange = Exchange(anatomy.writes, math.nan)
    shell = shell_of(anatomy, anatomy.units - 1, anatomy.units, exchange)
    calls = list(anatomy.observed.calls.values())
    leaves = tree_leaves(calls[-1].returned)
    exchange.arrived = {value: leaves[n] for n, value in anatomy.returns.items()}
    inside = dict(anatomy.observed.inside)
    for number, found in anatomy.collected.items():
        for one in found:
            output = inside[f"{anatomy.blocks[number]}.{one.module}"]
            exchange.arrived[one.value] = tree_leaves(output)[one.leaf]
    return anatomy.call.output(shell(**inputs, **anatomy.call.fixed))


def _looked_at(anatomy: Anatomy, seen: Seen) -> list[frozenset[str]]:
    """Find the inputs whose values a unit uses: another value changes something there."""
    inputs = anatomy.call.trials[0]
    found = [set(inputs), *(set[str]() for _ in range(anatomy.units - 1))]
    right = _head(anatomy, inputs)
    for name, given in inputs.items():
        if not isinstance(given, torch.Tensor):
            continue
        other = {**inputs, name: torch.full_like(given, anatomy.call.fill.get(name, 0))}
        changed = _made_up(anatomy, other)
        for number, slots in seen.blocks.items():
            made = {slot: t for slot, t in slots.items() if slot not in anatomy.takes[number + 1]}
            now = changed.blocks.get(number, {})
            if not all(slot in now and is_same(t, now[slot]) for slot, t in made.items()):
                found[number + 1].add(name)
        for (unit, before), (_, after) in zip(seen.others, changed.others):
            if not is_same(before, after):
                found[unit].add(name)
        if not is_same(right, _head(anatomy, other)):
            found[-1].add(name)
    return [frozenset(names) for names in found]
