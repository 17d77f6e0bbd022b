"""Models on the meta device: each process allocates and fills its own stages, and no more."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from avgpipe.elastic.flat import Layout
from avgpipe.errors import reason
from avgpipe.files import json_object, reading
from avgpipe.model.model import Entry, Model, named_tensors, trainable_parameters

Fill: TypeAlias = Callable[[nn.Module], Any]

_INDEX = "model.safetensors.index.json"


class InitialWeights:
    """The source of the values of a model on the meta device.

    Args:
        source: a folder or file of safetensors; a mapping from names to tensors; or a function that fills the tensors
            of a stage's modules.
        prefix: what names may have or lack in front, if a head was saved with the body or without.
        fill_buffers: gives a module the values of its non-persistent buffers.

    Raises:
        ValueError, TypeError: if the source is none of these, or cannot be read.
    """

    def __init__(self, source: Any, prefix: str = "", fill_buffers: Fill | None = None) -> None:
        self._prefix, self._fill_buffers = prefix, fill_buffers
        self._files: Mapping[str, Path] = {}
        self._values: Mapping[str, torch.Tensor] | None = None
        self._fill: Fill | None = None
        if isinstance(source, str | Path):
            self._files = _files_of(Path(source))
        elif isinstance(source, Mapping):
            self._values = source
        elif callable(source):
            self._fill = source
        else:
            raise TypeError(
                f"WeightsFrom: source={source!r}: it is a folder or file of safetensors, a mapping from names to "
                "tensors, or a function that fills the modules of a stage"
            )

    def check(self, wanted: Sequence[Sequence[str]]) -> None:
        """Raise ValueError if the source lacks a tensor; ``wanted``: the possible names of each tensor."""
        if self._fill is not None:
            return
        lost = [names[0] for names in wanted if self._name_of(names) is None]
        if lost:
            close = get_close_matches(lost[0], list(self._there), n=1)
            raise ValueError(
                f"WeightsFrom has nothing for {len(lost)} of the model's tensors, such as {lost[0]!r}"
                + (f"; the closest that it has is {close[0]!r}" if close else "")
            )

    def materialise(self, layers: nn.Module, entries: Sequence[Entry], device: torch.device) -> None:
        """Allocate every tensor of a stage on ``device``, in its final place, and fill it."""
        lacking = {name for name, tensor in layers.state_dict(keep_vars=True).items() if tensor.is_meta}
        _allocate(layers, device)
        with torch.no_grad():
            if self._fill is not None:
                self._fill(layers)
                _refuse_unknown(layers)
                return
            self._make_buffers(layers)
            state = layers.state_dict(keep_vars=True)
            for entry in entries:
                if entry.local in lacking:
                    _copy(entry, state[entry.local], self._read(entry.names))

    @classmethod
    def of(cls, source: Any, whole: Any, model: Model) -> InitialWeights:
        """Return what fills ``whole``, or its layers, cut as ``model`` is; read now what no stage holds."""
        # Attributes of models of transformers.
        initial = cls(source, getattr(whole, "base_model_prefix", ""), getattr(whole, "_init_weights", None))
        lacking = {name for name, tensor in named_tensors(whole).items() if tensor.is_meta}
        held = [entry.names for of in model.entries for entry in of if entry.names[0] in lacking]
        unused = [name for name in model.unused if name in lacking]
        initial.check([*held, *([name] for name in unused)])
        model.unused.update(initial.read(unused))
        return initial

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the values of tensors that no stage holds, by name."""
        if names and self._fill is not None:
            raise ValueError(
                f"the model's forward does not use {names[0]!r}, so no stage has a module of it to fill: take it out "
                "of the model"
            )
        return {name: self._read([name]).clone() for name in names}

    @property
    def _there(self) -> Collection[str]:
        return self._files.keys() if self._values is None else self._values.keys()

    def _name_of(self, names: Sequence[str]) -> str | None:
        there = self._there
        for name in names:
            for known in (name, f"{self._prefix}.{name}", name.removeprefix(f"{self._prefix}.")):
                if known in there:
                    return known
        return None

    def _read(self, names: Sequence[str]) -> torch.Tensor:
        name = str(self._name_of(names))
        if self._values is not None:
            return self._values[name]
        from safetensors import safe_open

        # One by one: pages read of an open file may count as this process's memory.
        with safe_open(self._files[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def _make_buffers(self, layers: nn.Module) -> None:
        """Fill the non-persistent buffers."""
        for name, module in layers.named_modules():
            mine = [b for b in module._non_persistent_buffers_set if _is_unknown(module._buffers[b])]
            if mine and self._fill_buffers is not None:
                self._fill_buffers(module)
            if any(_is_unknown(module._buffers[b]) for b in mine):
                raise ValueError(
                    f"the buffer {mine[0]!r} of {type(module).__name__} {name!r} is on the meta device and is not "
                    "saved: make it on the CPU, as by torch.arange(..., device='cpu')"
                )


def _refuse_unknown(layers: nn.Module) -> None:
    for module in layers.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if _is_unknown(tensor):
                raise ValueError(
                    f"WeightsFrom has left {name!r} of a {type(module).__name__} without a value"
                )


def _unknown(dtype: torch.dtype) -> float | int:
    """Return the marker for a value that is not known yet."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return 0 if dtype is torch.bool else torch.iinfo(dtype).max


def _is_unknown(tensor: torch.Tensor | None) -> bool:
    if tensor is None or tensor.dtype is torch.bool:  # bool has no third value
        return False
    stands = _unknown(tensor.dtype)
    return bool((tensor != tensor if math.isnan(stands) else tensor == stands).any())


def _copy(entry: Entry, target: torch.Tensor, value: torch.Tensor) -> None:
    if value.shape != target.shape:
        raise ValueError(
            f"WeightsFrom has {list(value.shape)} for {entry.names[0]!r}, and the model {list(target.shape)}"
        )
    target.copy_(value)


def _allocate(layers: nn.Module, device: torch.device) -> None:
    """Allocate tensors of the meta device: trainable parameters in flat buffers, their final place.

    Others move to ``device`` as they are.
    """
    trainable = trainable_parameters(layers)
    views = Layout(trainable, device).zeros().tensors()
    made: dict[int, torch.Tensor] = {}
    for parameter, view in zip(trainable, views):
        if not parameter.is_meta:
            view.copy_(parameter.detach())
        else:
            view.fill_(math.nan)
        made[id(parameter)] = nn.Parameter(view)
    for module in layers.modules():
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for of in held:
            for name, tensor in of.items():
                if tensor is not None and id(tensor) not in made:
                    made[id(tensor)] = _made(tensor, device)
                if tensor is not None:
                    of[name] = made[id(tensor)]
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()


def _made(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not tensor.is_meta:
        value = tensor.detach().to(device)
    else:
        value = torch.full_like(tensor, _unknown(tensor.dtype), device=device, requires_grad=False)
    return nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value


def _index_of(path: Path) -> dict[str, str]:
    """Return the names of the files by name of a tensor, as an index of sharded weights has them."""
    with reading(path) as text:
        found = json_object("an index of weights", text).get("weight_map")
        if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
            raise ValueError(
                "an index of weights must have weight_map, an object with a file by name of each tensor"
            )
    return found


def _files_of(path: Path) -> dict[str, Path]:
    """Return the file of each tensor, by its name, from headers alone."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ValueError(
            f"WeightsFrom: source={str(path)!r} needs safetensors: pip install safetensors"
        ) from None
    try:
        if (path / _INDEX).is_file():
            return {name: path / file for name, file in _index_of(path / _INDEX).items()}
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"WeightsFrom: source={str(path)!r}: no file in it ends in .safetensors")
        names: dict[str, Path] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                names |= dict.fromkeys(opened.keys(), file)
        return names
    except (OSError, SafetensorError, LookupError, TypeError) as error:
        raise ValueError(f"WeightsFrom: source={str(path)!r} cannot be read: {reason(error)}") from None
