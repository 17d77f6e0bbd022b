"""The layers of one stage, run under keyed random generators."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from avgpipe.errors import StageError
from avgpipe.links.link import tensors_of
from avgpipe.model.compiled import compiler_error, copied
from avgpipe.model.context import (
    Carry,
    Modes,
    Position,
    key_layers,
    mix,
    seed_layer,
    set_position,
)
from avgpipe.model.parts import PartLayer
from avgpipe.ranks.environment import named

if TYPE_CHECKING:
    from avgpipe.model.compiler import Compiler
    from avgpipe.runtime.batch_norm import BatchStatistics
    from avgpipe.runtime.repeated import Repeated


class Stage(nn.Module):
    """Layers ``first``, ``first + 1``, ... of the model; each gets what the one before returned.

    The layers are copied, and compiled by ``compiler``. ``materialise``: allocates copies on the meta device
    on ``device``, and fills them. ``keeps_modes``: whether modules in evaluation mode stay in it in training.
    ``statistics``: what their BatchNorms have noted of batches in flight, to be committed at the end.
    ``sends``: whether another stage follows.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first: int,
        index: int,
        seed: int,
        device: torch.device,
        compiler: Compiler | None = None,
        materialise: Callable[[nn.Module], None] | None = None,
        keeps_modes: bool = False,
        sends: bool = False,
    ):
        super().__init__()
        self.layers = copied(nn.ModuleList(layers), {}) if compiler is None else compiler.copied(layers)
        self._modes = Modes(self.layers, keeps_modes)
        if materialise is not None:
            materialise(self.layers)
        self.layers.to(device)
        self.statistics: BatchStatistics | None = None
        if any(isinstance(m, _BatchNorm) and m.track_running_stats for m in self.layers.modules()):
            from avgpipe.runtime.batch_norm import defer_batch_norms

            self.statistics = defer_batch_norms(self.layers)
        self.first, self.index, self.seed, self.device = first, index, seed, device
        self._folds = folds(layers)
        self._sends = sends and self._folds
        self.train()
        self.inputs = Inputs(index)
        self.carries = [m for m in self.layers.modules() if isinstance(m, Carry)]
        self._see: Callable[[int, Any], None] | None = None
        self._chain = list(enumerate(self.layers, first))  # faster to iterate than a ModuleList
        self._repeated: Repeated | None = None  # made when a forward first runs twice

    def train(self, mode: bool = True) -> Stage:
        self.training = mode
        self._modes.train(mode)
        return self

    def forward(self, value: Any, place: Position, again: bool = False) -> Any:
        """Run the layers. ``again``: whether another forward will use the same value."""
        before = set_position(place)
        try:
            return self.inputs.run(self._run, value, place, self.training, again)
        finally:
            if self.statistics is not None:
                self.statistics.end_forward()
            set_position(before)

    def _run(self, value: Any, place: Position) -> Any:
        if self.statistics is not None:
            self.statistics.begin_forward()
        training = self.training
        key = mix(self.seed, *place) if training else 0
        key_layers(self.device, key if training else None)
        if self._folds and self.index and not isinstance(value, torch.Tensor):
            value = unfolded(value)
        for number, layer in self._chain:
            if training:
                seed_layer(self.device, key, number)
            value = self._call(number, layer, value)
            if self._see is not None:
                self._see(number, value)
        return folded(value) if self._sends and not isinstance(value, torch.Tensor) else value

    @contextmanager
    def observed(self, see: Callable[[int, Any], None]) -> Iterator[None]:
        """Call ``see`` inside with the number and the output of each layer that has run."""
        self._see = see
        try:
            yield
        finally:
            self._see = None

    @contextmanager
    def undisturbed(self, place: Position) -> Iterator[None]:
        """Allow forwards at a ``place`` inside, between batches, that change no buffers or other state."""
        held = [(m, name, t) for m in self.modules() for name, t in m._buffers.items() if t is not None]
        before = [t.clone() for _, _, t in held]
        try:
            with ExitStack() as carried:
                for carry in self.carries:
                    carried.enter_context(carry.unchanged())
                yield
        finally:
            if self.statistics is not None:
                self.statistics.drop(place.batch)
            with torch.no_grad():
                for (module, name, t), value in zip(held, before):
                    t.copy_(value)
                    module._buffers[name] = t

    def recomputed(self, value: Any, place: Position) -> Any:
        """Run the layers, keep only ``value``, and run them again in the backward."""
        # Torch's generators are keyed, so the second forward draws the same numbers without saving their
        # state.
        if self._repeated is None:
            from avgpipe.runtime.repeated import Repeated

            self._repeated = Repeated(self.layers)
        twice = self._repeated.forward(self)
        return checkpoint(twice, value, place, True, use_reentrant=False, preserve_rng_state=False)

    def _call(self, number: int, layer: nn.Module, value: Any) -> Any:
        try:
            return layer(value)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, compiler_error()) as error:
            got = shown_shapes(value)
            explained = named("avgpipe.model.compiler:reason_of")
            source = f"; it came from stage {self.index - 1}" if number == self.first and self.index else ""
            raise StageError(
                f"stage {self.index}, layer {number} ({type(layer).__name__}) failed on its input "
                f"({got}{source}): {explained(error)}"
            ) from error


def folds(layers: Sequence[nn.Module]) -> bool:
    """Whether views may be rebuilt behind a cut; not for recorded layers: their values may skip stages."""
    return not any(isinstance(layer, PartLayer) for layer in layers)


_Layers = Callable[[Any, Position], Any]


class Inputs:
    """Tracks the inputs that the layers of stage ``index`` write to.

    Attributes:
        output: of the first forward, on the meta device; None before it.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self.output: Any = None
        # Leaves of the input, by whether the layers train: in evaluation they may write to others.
        self._written: dict[bool, set[int]] = {}

    @property
    def known(self) -> bool:
        """Whether a forward in training has run, so that the next one copies only what it must."""
        return True in self._written

    def run(self, layers: _Layers, value: Any, place: Position, training: bool, again: bool) -> Any:
        """Return ``layers(value, place)`` without changing ``value``. ``again``: another forward needs it."""
        written = self._written.get(training)
        if written is None or written or again:
            return self._checked(layers, value, place, training, again)
        try:
            # the common case, without a check: torch itself refuses to change a leaf
            return layers(value, place)
        except StageError as error:
            if not writes_to_a_leaf(error):
                raise
        self._written[training] = set(range(len(pytree.tree_leaves(value))))  # torch does not name the leaf
        return self._checked(layers, value, place, training, again)

    def _checked(self, layers: _Layers, value: Any, place: Position, training: bool, again: bool) -> Any:
        leaves, structure = pytree.tree_flatten(value)
        tensors = {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        written = self._written.get(training)
        copied = tensors.keys() if written is None else written & tensors.keys()
        for n in copied:
            leaves[n] = tensors[n].clone()
        versions = {n: leaves[n]._version for n in tensors}
        try:
            output = layers(pytree.tree_unflatten(leaves, structure) if copied else value, place)
        except StageError as error:
            # A layer that writes for the first time, such as one that is skipped at random: torch does not
            # name the leaf, and has changed none.
            if written is None or copied == tensors.keys() or not writes_to_a_leaf(error):
                raise
            self._written[training] = set(tensors)
            return self._checked(layers, value, place, training, again)
        found = {n for n in tensors if leaves[n]._version != versions[n]}
        if written is None:
            self._written[training] = found
            self.output = pytree.tree_map_only(torch.Tensor, partial(torch.empty_like, device="meta"), output)
        elif late := found - written:
            written |= late
            if again:
                raise StageError(
                    f"stage {self._index} changed in place a tensor that it received, which no forward before this "
                    "one did, and recomputation needs it as it was: change a clone() of it in the layer"
                )
        return output


def shown_shapes(value: Any) -> str:
    """Describe a value in messages: shapes and dtypes of its tensors, or its repr if it has none."""
    return ", ".join(f"{list(t.shape)} {str(t.dtype)[6:]}" for t in tensors_of(value)) or repr(value)


def writes_to_a_leaf(error: StageError) -> bool:
    """Whether torch has refused to change a tensor that requires a gradient."""
    text = str(error.__cause__)
    return "leaf Variable that requires grad" in text and "in-place" in text


# ---- values that share memory over a cut -----------------------------------------------------------------------------


_MARK = "\0view of "  # replaces a view; its base's number, shape, strides and offset follow


def folded(value: Any) -> Any:
    """Return a value in which marks replace tensors that are views of others of it."""
    leaves, structure = pytree.tree_flatten(value)
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and _may_be_folded(leaf)]
    if len(places) < 2:
        return value
    made = list(leaves)
    by_memory: dict[int, list[int]] = {}
    for n in places:
        by_memory.setdefault(leaves[n].untyped_storage().data_ptr(), []).append(n)
    for group in by_memory.values():
        bases = [n for n in group if leaves[n].is_contiguous()]
        for n in group:
            base = next(
                (b for b in bases if b != n and made[b] is leaves[b] and _holds(leaves[b], leaves[n])), None
            )
            if base is not None:
                view = leaves[n]
                offset = view.storage_offset() - leaves[base].storage_offset()
                made[n] = _MARK + json.dumps([base, list(view.shape), list(view.stride()), offset])
    is_same = all(a is b for a, b in zip(made, leaves))
    return value if is_same else pytree.tree_unflatten(made, structure)


def _may_be_folded(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel() > 0


def _holds(base: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether ``view`` lies within ``base``, and both are views of one tensor or one of the other."""
    is_view = view is base or view._base is base or (view._base is not None and view._base is base._base)
    if not is_view or view.requires_grad != base.requires_grad or view.dtype != base.dtype:
        return False
    first = view.storage_offset() - base.storage_offset()
    last = first + sum((n - 1) * s for n, s in zip(view.shape, view.stride()))
    return first >= 0 and last < base.numel()


def unfolded(value: Any) -> Any:
    """Return a value in which views replace marks."""
    leaves, structure = pytree.tree_flatten(value)
    marks = [n for n, leaf in enumerate(leaves) if isinstance(leaf, str) and leaf.startswith(_MARK)]
    if not marks:
        return value
    for n in marks:
        base, shape, strides, offset = json.loads(leaves[n].removeprefix(_MARK))
        whole = leaves[base]
        leaves[n] = whole.as_strided(shape, strides, whole.storage_offset() + offset)
    return pytree.tree_unflatten(leaves, structure)
