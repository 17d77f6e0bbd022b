"""The use of a model's blocks in its own forward, observed in one run.

Many models that cannot be traced call a list of blocks one after another, as transformers do. Their forward is then a
chain of units, for L blocks numbered from 0 to L + 1::

    unit      0             1               2                    L                L + 1
              embeddings    block 0, and    block 1, and   ...   block L - 1      norm, head
                            what follows    what follows         alone

A unit begins where its block is called, the last one where the last block returns. A second run, in which
nothing has weights, finds the values that must cross such a boundary: arguments of a block that this run
reproduces, such as masks and rotary embeddings, depend on the model's inputs only. The rest, such as hidden
states, must come from the unit before.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from avgpipe.model.context import in_mode


@dataclass(frozen=True)
class Call:
    """How to call a model that keeps its own forward.

    Attributes:
        trials: Small inputs to test it with, each by argument; the first has all inputs that the model is
            likely to get.
        main: The argument that a single tensor is passed as.
        accepts: Names of arguments.
        is_block: Returns whether a module of the model is one of the blocks that it calls one after another.
        fixed: Further arguments, the same in every call.
        fill: By argument, an integer without special meaning, such as a word that ends nothing; by default 0.
        output: Makes the pipeline's output from the model's.
    """

    trials: Sequence[Mapping[str, Any]]
    main: str
    accepts: frozenset[str]
    is_block: Callable[[nn.Module], bool]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    fill: Mapping[str, int] = field(default_factory=dict)
    output: Callable[[Any], Any] = lambda returned: returned

    def arguments(self, value: Any) -> dict[str, Any]:
        """Return the arguments for a batch's inputs."""
        if isinstance(value, torch.Tensor):
            return {self.main: value}
        if not isinstance(value, dict):
            raise TypeError(
                f"the model takes a tensor of {self.main} or a plain dict, not {type(value).__name__}"
            )
        given = {name: x for name, x in value.items() if x is not None}
        unknown = sorted(map(repr, given.keys() - self.accepts))
        if unknown or not given:
            wrong = f"unknown {', '.join(unknown)}" if unknown else "nothing"
            raise ValueError(f"the model takes {', '.join(sorted(self.accepts))}; the inputs have {wrong}")
        return given


class BlockSlot(NamedTuple):
    """The place of a tensor among a block's arguments: ``leaf`` of the pytree with name or number ``key``.

    For a mapping, which blocks may fill for later ones: in its ``entry``, a tuple of ``parts``, or 0 for a
    single tensor.
    """

    key: int | str
    leaf: int
    entry: str | None = None
    parts: int = 0

    def __str__(self) -> str:
        return ".".join(str(part) for part in (self.key, self.entry, self.leaf) if part is not None)


Slots = dict[BlockSlot, torch.Tensor]


def slots_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Slots:
    """Return the tensors among the arguments of a call."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    found: Slots = {}
    for key, value in arguments:
        if isinstance(value, torch.Tensor):  # the usual case, in every forward
            found[BlockSlot(key, 0)] = value
        elif isinstance(value, dict | UserDict) and _is_filled(value):
            for entry, part in value.items():
                parts, count = (part, len(part)) if isinstance(part, tuple) else ((part,), 0)
                found |= {BlockSlot(key, n, entry, count): t for n, t in enumerate(parts)}
        elif not isinstance(value, bool | None):
            for n, leaf in enumerate(tree_leaves(value)):
                if isinstance(leaf, torch.Tensor):
                    found[BlockSlot(key, n)] = leaf
    return found


def _is_filled(mapping: Mapping[Any, Any]) -> bool:
    """Return whether a mapping is one from strings to tensors and tuples of them."""
    parts = [each for part in mapping.values() for each in (part if isinstance(part, tuple) else (part,))]
    return all(isinstance(word, str) for word in mapping) and all(isinstance(t, torch.Tensor) for t in parts)


def replace_slots(
    args: Sequence[Any], kwargs: Mapping[str, Any], given: Slots
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call with its tensors replaced by ``given``. Mappings themselves are filled."""
    positional, named = list(args), dict(kwargs)
    for (key, n, entry, count), tensor in given.items():
        arguments: Any = positional if isinstance(key, int) else named
        if entry is None:
            leaves, structure = tree_flatten(arguments[key])
            leaves[n] = tensor
            arguments[key] = tree_unflatten(leaves, structure)
        elif count == 0:
            arguments[key][entry] = tensor
        else:
            before = arguments[key].get(entry, (None,) * count)
            arguments[key][entry] = (*before[:n], tensor, *before[n + 1 :])
    return positional, named


def is_same(a: Any, b: Any) -> bool:
    """Return whether two values have equal tensors, with NaN equal to NaN; plain values are not compared."""
    mine, other = tree_leaves(a), tree_leaves(b)
    return len(mine) == len(other) and all(map(_is_same_leaf, mine, other))


def _is_same_leaf(a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return isinstance(a, torch.Tensor) == isinstance(b, torch.Tensor)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())


# ---- the run -------------------------------------------------------------------------------------------------------


@dataclass
class BlockCall:
    """The arguments of a block's call, and its output."""

    slots: Slots
    returned: Any = None


@dataclass(frozen=True)
class Observed:
    """The observations of one run of the whole model.

    Attributes:
        calls: Calls in order, by the name of a block.
        units_of: By the name of a parameter or buffer, the units that compute with it.
        called: Names of the modules that were called.
        output: Output of the model.
        inside: Outputs of the modules inside of blocks, the innermost first.
    """

    calls: Mapping[str, BlockCall]
    units_of: Mapping[str, frozenset[int]]
    called: frozenset[str]
    output: Any
    inside: Sequence[tuple[str, Any]]


def observe(model: nn.Module, call: Call) -> Observed:
    """Run ``model`` in evaluation mode and observe it.

    Raises:
        ValueError: Its blocks are not called one after another, each once.
    """
    blocks = _outermost(model, call.is_block)
    if not blocks:
        raise ValueError("it has no list of blocks")
    watch = _Watch(model, blocks)
    with in_mode(model, False), watch.watching(), torch.no_grad():
        output = model(**call.trials[0], **call.fixed)
    if watch.never or watch.again:
        name, count = (watch.never[0], "never") if watch.never else (watch.again[0], "more than once")
        raise ValueError(f"its forward calls the block {name} {count}")
    return Observed(watch.calls, watch.units_of(), frozenset(watch.entered), output, watch.inside)


def _outermost(
    model: nn.Module, is_block: Callable[[nn.Module], bool], prefix: str = ""
) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        if is_block(child):
            found[prefix + name] = child
        else:
            found |= _outermost(child, is_block, f"{prefix}{name}.")
    return found


class _Watch:
    """Observes a run: the calls of blocks in order, and the units that use each tensor."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        self._model, self._blocks = model, blocks
        self.calls: dict[str, BlockCall] = {}
        self.entered: dict[str, set[int]] = {}  # by module, the units that call it
        self.again: list[str] = []
        self.inside: list[tuple[str, Any]] = []
        self._modules: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._modules.setdefault(id(module), []).append(name)
        self._names: dict[int, list[str]] = {}
        for kind in (model.named_parameters, model.named_buffers):
            for name, tensor in kind(remove_duplicate=False):
                self._names.setdefault(id(tensor), []).append(name)
        self.uses = _Uses(self._names.keys())

    @property
    def never(self) -> list[str]:
        return [name for name in self._blocks if name not in self.calls]

    def units_of(self) -> dict[str, frozenset[int]]:
        """Return the units that use each parameter, by name; a tied one by its name in the module that ran."""
        found: dict[str, set[int]] = {}
        for tensor, units in self.uses.found.items():
            for unit in units:
                names = self._names[tensor]
                ran = [n for n in names if unit in self.entered.get(n.rpartition(".")[0], ())]
                for name in ran or names:
                    found.setdefault(name, set()).add(unit)
        return {name: frozenset(units) for name, units in found.items()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for name, block in self._blocks.items():
                hooks.enter_context(block.register_forward_pre_hook(self._enters(name), with_kwargs=True))
            for name, module in self._model.named_modules():
                hooks.enter_context(module.register_forward_hook(self._leaves(name)))
            hooks.enter_context(self.uses)
            yield

    def _enters(self, name: str) -> Callable[..., None]:
        def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
            if name in self.calls:
                self.again.append(name)
            slots = slots_of(args, kwargs)
            self.uses.unit = len(self.calls) + 1
            for tensor in slots.values():  # a parameter passed to a block is used there
                self.uses.note(tensor)
            self.calls[name] = BlockCall(slots)

        return enter

    def _leaves(self, name: str) -> Callable[..., None]:
        inside = next((block for block in self._blocks if name.startswith(block + ".")), None)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            for known in self._modules[id(module)]:
                self.entered.setdefault(known, set()).add(self.uses.unit)
            if inside is not None:
                self.inside.append((name, output))
            elif name in self._blocks:
                self.calls[name].returned = output
                if len(self.calls) == len(self._blocks):
                    self.uses.unit = len(self.calls) + 1

        return leave


_PARTS = ("T", "mT", "H", "mH", "data", "real", "imag")  # others, such as the dtype, do not use the values


class _Uses(TorchFunctionMode):
    """Records the parameters and buffers passed to torch's functions, and the unit of each."""

    def __init__(self, tensors: Collection[int]) -> None:
        """``tensors``: their ids."""
        super().__init__()
        self._tensors, self.unit = tensors, 0
        self.found: dict[int, set[int]] = {}

    def note(self, value: Any) -> None:
        if id(value) in self._tensors:
            self.found.setdefault(id(value), set()).add(self.unit)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = getattr(getattr(func, "__self__", None), "__name__", "")  # the name of an attribute
        if getattr(func, "__name__", "") != "__get__" or asked in _PARTS:
            for leaf in tree_leaves((args, kwargs or {})):
                self.note(leaf)
        return func(*args, **(kwargs or {}))


# ---- anatomy ---------------------------------------------------------------------------------------------------------


class Collected(NamedTuple):
    """A tensor inside a block that the model also returns, such as router logits: a leaf of a module's output."""

    value: str
    module: str  # its name in the block
    leaf: int
    leaves: int


@dataclass(frozen=True)
class Anatomy:
    """A model as a chain of units; see ``avgpipe.model.blocks``.

    Attributes:
        model: The whole model.
        call: How it is called.
        observed: Observations of one run of it.
        takes: By unit, the arguments of its block that earlier units must give, each with the name of its
            value. A value that existed before keeps its first name.
        early: Those of them that unit 0 makes, although they are not passed to the first block.
        returns: By leaf of the last block's output, the values that the last unit needs.
        collected: By the number of a block, the tensors inside it that the last unit needs.
        writes: Whether its forward writes to outputs of modules outside of blocks.
        looks_at: By unit, the inputs whose values it needs; of other inputs it only needs shape and dtype.
        shapes: Modules of it without weights, each made once, by the identity of the module.
    """

    model: nn.Module
    call: Call
    observed: Observed
    takes: Sequence[Mapping[BlockSlot, str]] = ()
    early: frozenset[str] = frozenset()
    returns: Mapping[int, str] = field(default_factory=dict)
    collected: Mapping[int, Sequence[Collected]] = field(default_factory=dict)
    writes: bool = False
    looks_at: Sequence[frozenset[str]] = ()
    shapes: dict[int, nn.Module] = field(default_factory=dict, compare=False)

    @cached_property
    def blocks(self) -> list[str]:
        return list(self.observed.calls)

    @property
    def units(self) -> int:
        return len(self.blocks) + 2

    @cached_property
    def _lives(self) -> dict[str, tuple[int, int]]:
        """Return for each value the first and the last unit at whose beginning it exists."""
        lives: dict[str, tuple[int, int]] = {}

        def add(value: str, first: int, last: int) -> None:
            lives[value] = (lives[value][0] if value in lives else first, last)

        for number, found in self.collected.items():
            for one in found:
                add(one.value, number + 2, self.units - 1)
        for unit, taken in enumerate(self.takes):
            for value in taken.values():
                add(value, 1 if value in self.early else unit, unit)
        for value in self.returns.values():
            add(value, self.units - 1, self.units - 1)
        return lives

    def alive(self, unit: int) -> tuple[str, ...]:
        """Return the values that cross the boundary before a unit."""
        return tuple(value for value, (first, last) in self._lives.items() if first <= unit <= last)

    def early_until(self) -> int:
        """Return the last unit that is passed an early value; 0 if there is none."""
        return max(
            (n for n, taken in enumerate(self.takes) if not self.early.isdisjoint(taken.values())), default=0
        )

    def used(self, begin: int, end: int) -> set[str]:
        """Return the values that the units from ``begin`` on, before ``end``, compute with."""
        found = {value for taken in self.takes[begin:end] for value in taken.values()}
        if end == self.units:
            found |= {*self.returns.values(), *(one.value for of in self.collected.values() for one in of)}
        return found

    def needs(self, name: str, units: range) -> bool:
        """Return whether any of ``units`` computes with the parameter or buffer of that name."""
        return not self.observed.units_of.get(name, frozenset()).isdisjoint(units)
