"""What stands in a stage for the parts of a model that other stages hold.

A stage is the model itself: its own forward runs, from the beginning on, but modules of other stages are outlines,
which have no weights and do not compute. So masks and positions are made by the model's own code. Where the stage's
first block is called, what has come from the stage before takes the place of what the outlines have made up; where a
block of the next stage is called, or the last own block has returned, the forward has done its work and is left.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from avgpipe.model.anatomy import Collected
from avgpipe.model.blocks import BlockCall, BlockSlot, Slots, replace_slots, slots_of
from avgpipe.model.context import begin_layer


class Reached(BaseException):  # not an Exception, which a model's forward may catch
    """The forward has come to the end of the stage."""


@dataclass
class Seen:
    """What a forward has called: the slots of each block, and by unit the arguments of outlines of all else."""

    blocks: dict[int, Slots] = field(default_factory=dict)
    others: list[tuple[int, Any]] = field(default_factory=list)


@dataclass
class Exchange:
    """What a stage has been given for the forward that runs, and what the next one gets. By the names of values.

    Attributes:
        whole: whether made-up tensors get memory of their own, for a forward that writes to them.
        filling: the number that made-up tensors are filled with.
        seen: where it is asked for, what blocks and outlines were called with.
    """

    whole: bool = False
    filling: float = 0.0
    seen: Seen | None = None
    arrived: dict[str, torch.Tensor] = field(default_factory=dict)
    taken: dict[str, torch.Tensor] = field(default_factory=dict)


def without_weights(module: nn.Module) -> nn.Module:
    """Copy a module to the meta device, without a copy of its weights."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        memo[id(tensor)] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, memo)


class Outline(nn.Module):
    """Stands for a module: returns made-up tensors of the shapes that it would return. Attributes are the module's."""

    def __init__(self, shape: nn.Module, exchange: Exchange) -> None:
        """``shape``: the module without weights."""
        super().__init__()
        self._exchange = exchange
        self._shape = (shape,)  # so that it is no part of this module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_shape" not in self.__dict__:  # as while it is copied
                raise
            return getattr(self.__dict__["_shape"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        exchange, shape = self._exchange, self._shape[0]
        if exchange.seen is not None:
            exchange.seen.others.append((len(exchange.seen.blocks), (args, kwargs)))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if isinstance(shape, nn.Embedding) and len(given) == 1:  # the commonest by far
            weight = shape.weight
            return made_up((*given[0].shape, weight.shape[1]), weight.dtype, given[0].device, exchange)
        args, kwargs = tree_map_only(torch.Tensor, partial(torch.empty_like, device="meta"), (args, kwargs))
        with torch.no_grad():
            returned = shape(*args, **kwargs)
        device = given[0].device if given else torch.device("cpu")
        return tree_map_only(torch.Tensor, lambda t: made_up(t.shape, t.dtype, device, exchange), returned)


def made_up(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, exchange: Exchange
) -> torch.Tensor:
    """Return a tensor that has one element's memory, whatever its shape, where the model's forward allows that."""
    number = exchange.filling if dtype.is_floating_point else 0
    if exchange.whole:
        return torch.full(shape, number, dtype=dtype, device=device)
    return torch.full((), number, dtype=dtype, device=device).expand(shape)


class OtherBlock(Outline):
    """Stands for a block of another stage: returns what it was given, in the structure that the block returns.

    One of a later stage takes what it is called with, and ends the forward; where the first stage makes something for
    one that comes later, the forward goes on as far as that.

    Args:
        number: of the block.
        call: an earlier one of the block itself.
        arriving: of the model's last block, the values that the head is given instead, by the leaf that they are.
        collected: what the model collects of the block's inside, by hooks, which are called with what has arrived.
        takes: what the next stage is given of what it is called with.
        ends: whether the forward has nothing else to give.
    """

    def __init__(
        self,
        shape: nn.Module,
        exchange: Exchange,
        number: int,
        call: BlockCall,
        arriving: Mapping[int, str] | None = None,
        collected: Sequence[Collected] = (),
        takes: Mapping[BlockSlot, str] | None = None,
        ends: bool = False,
    ) -> None:
        super().__init__(shape, exchange)
        self._number, self._collected, self._takes, self._ends = number, collected, takes or {}, ends
        leaves, structure = tree_flatten(call.returned)
        made = [_Made(_like(leaf, call.slots), (arriving or {}).get(n)) for n, leaf in enumerate(leaves)]
        self._returned = tree_unflatten(made, structure)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        exchange, slots = self._exchange, slots_of(args, kwargs)
        exchange.taken |= {value: slots[slot] for slot, value in self._takes.items()}
        if self._ends:
            raise Reached
        if exchange.seen is not None:
            exchange.seen.blocks[self._number] = slots
        for one in self._collected:
            if one.value in exchange.arrived:
                self._show(one, exchange.arrived[one.value])
        return tree_map(lambda leaf: self._leaf(leaf, slots), self._returned)

    def _show(self, one: Collected, tensor: torch.Tensor) -> None:
        """Call the hooks of a module inside of the block, as if it had returned ``tensor``."""
        module = self._shape[0].get_submodule(one.module)
        leaves = [tensor if n == one.leaf else None for n in range(one.leaves)]
        for hook in module._forward_hooks.values():
            hook(module, (), tensor if one.leaves == 1 else tuple(leaves))

    def _leaf(self, made: _Made, slots: Slots) -> Any:
        exchange, like = self._exchange, made.like
        if made.value in exchange.arrived:
            return exchange.arrived[made.value]
        if isinstance(like, BlockSlot):
            return slots[like]
        if isinstance(like, torch.Tensor):
            device = next(iter(slots.values())).device
            return made_up(tuple(like.shape), like.dtype, device, exchange)
        return like


@dataclass(frozen=True)
class _Made:
    """A leaf of what an outline of a block returns: what is like it, and the value that it is where this has come."""

    like: Any
    value: str | None


def _like(leaf: Any, slots: Slots) -> Any:
    """Return the slot that has a leaf's shape and dtype, else the leaf without its values."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    for slot, tensor in slots.items():
        if tensor.shape == leaf.shape and tensor.dtype == leaf.dtype and tensor.is_floating_point():
            return slot
    return torch.empty_like(leaf, device="meta")


class OwnBlock(nn.Module):
    """A block of this stage: called with what has arrived from the stage before, where that is something.

    Args:
        unit: its number among the model's units, by which it draws random numbers.
        then: the unit that begins when it returns, in the same stage; None if none does.
        takes: what it needs of earlier units.
        gives: of the model's last block, if the stage ends with it, what the head needs of what it returns, by leaf.
        collected: what the model's end needs of its inside.
    """

    def __init__(
        self,
        block: nn.Module,
        exchange: Exchange,
        unit: int,
        then: int | None,
        takes: Mapping[BlockSlot, str],
        gives: Mapping[int, str] | None,
        collected: Sequence[Collected],
    ) -> None:
        super().__init__()
        self.block, self._exchange, self._unit, self._then = block, exchange, unit, then
        self._takes, self._gives, self._collected = takes, gives, collected

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        exchange = self._exchange
        if exchange.seen is not None:
            exchange.seen.blocks[self._unit - 1] = slots_of(args, kwargs)
        given = {
            slot: exchange.arrived[value] for slot, value in self._takes.items() if value in exchange.arrived
        }
        positional, named = replace_slots(args, kwargs, given)
        begin_layer(self._unit)
        with self._collecting() if self._collected else nullcontext():
            returned = self.block(*positional, **named)
        if self._then is not None:
            begin_layer(self._then)
        if self._gives is None:
            return returned
        leaves = tree_leaves(returned)
        exchange.taken |= {value: leaves[n] for n, value in self._gives.items()}
        raise Reached

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        def collect(one: Collected, module: nn.Module, args: Any, output: Any) -> None:
            self._exchange.taken[one.value] = tree_leaves(output)[one.leaf]

        with ExitStack() as hooks:
            for one in self._collected:
                module = self.block.get_submodule(one.module)
                hooks.enter_context(module.register_forward_hook(partial(collect, one)))
            yield
