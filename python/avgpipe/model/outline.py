"""Replacements, in a stage, of the parts of a model that other stages hold.

A stage is the model itself: its own forward runs, from the beginning on, but modules of other stages are
outlines, which have no weights and do not compute. So the model's own code makes masks and positions. Where
the stage's first block is called, the values from the stage before replace those that the outlines made up;
where a block of the next stage is called, or the last own block has returned, the forward is complete and is
left.
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

from avgpipe.model.blocks import BlockCall, BlockSlot, Collected, Slots, replace_slots, slots_of
from avgpipe.model.context import begin_layer


class Reached(BaseException):  # not an Exception, which a model's forward may catch
    """The forward has reached the end of the stage."""


@dataclass
class Seen:
    """The calls of a forward: the slots of each block, and by unit the arguments of all other outlines."""

    blocks: dict[int, Slots] = field(default_factory=dict)
    others: list[tuple[int, Any]] = field(default_factory=list)


@dataclass
class Exchange:
    """The values that a stage has received for the running forward, and those for the next stage, by name.

    Attributes:
        whole: Whether made-up tensors get their own memory, for a forward that writes to them.
        filling: Number that made-up tensors are filled with.
        seen: If requested, the arguments of blocks and outlines.
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
    """Replaces a module: returns made-up tensors of the shapes that it would return. Attributes are the module's."""

    def __init__(self, shape: nn.Module, exchange: Exchange) -> None:
        """Make an outline of ``shape``, the module without weights."""
        super().__init__()
        self._exchange = exchange
        self._shape = (shape,)  # in a tuple, so that it is not registered as a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_shape" not in self.__dict__:  # while it is being copied
                raise
            return getattr(self.__dict__["_shape"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        exchange, shape = self._exchange, self._shape[0]
        if exchange.seen is not None:
            exchange.seen.others.append((len(exchange.seen.blocks), (args, kwargs)))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if isinstance(shape, nn.Embedding) and len(given) == 1:  # the most common case
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
    """Return a tensor with the memory of one element, whatever its shape, if the model's forward allows that."""
    number = exchange.filling if dtype.is_floating_point else 0
    if exchange.whole:
        return torch.full(shape, number, dtype=dtype, device=device)
    return torch.full((), number, dtype=dtype, device=device).expand(shape)


class OtherBlock(Outline):
    """Replaces a block of another stage: returns its inputs, in the structure of the block's output.

    A block of a later stage takes its arguments, and ends the forward; if the first stage makes something for
    a later block, the forward continues up to that block.

    Args:
        number: Number of the block.
        call: An earlier call of the block itself.
        arriving: For the model's last block, the values that the head gets instead, by leaf.
        collected: Tensors inside the block that the model collects by hooks, which are called with the
            arrived values.
        takes: The arguments that are passed to the next stage.
        ends: Whether the forward has nothing else to pass on.
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
    """A leaf of an outline's output: its likeness, and the name of the value that replaces it if it has arrived."""

    like: Any
    value: str | None


def _like(leaf: Any, slots: Slots) -> Any:
    """Return the slot with a leaf's shape and dtype, else the leaf without its values."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    for slot, tensor in slots.items():
        if tensor.shape == leaf.shape and tensor.dtype == leaf.dtype and tensor.is_floating_point():
            return slot
    return torch.empty_like(leaf, device="meta")


class OwnBlock(nn.Module):
    """A block of this stage: called with the values from the stage before, if there are any.

    Args:
        unit: Its number among the model's units, which keys its random numbers.
        then: The unit that begins when it returns, in the same stage; None if none does.
        takes: Values that it needs from earlier units.
        gives: For the model's last block, if the stage ends with it, the values of its output that the head
            needs, by leaf.
        collected: Tensors inside it that the model's end needs.
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
