"""The model itself with outlines instead of the modules that a stage does not hold."""

from __future__ import annotations

import copy

import torch
from torch import nn

from avgpipe.model.blocks import Anatomy
from avgpipe.model.outline import (
    Exchange,
    OtherBlock,
    Outline,
    OwnBlock,
    made_up,
    without_weights,
)


def shell_of(anatomy: Anatomy, begin: int, end: int, exchange: Exchange) -> nn.Module:
    """Return the model for the units from ``begin`` on, before ``end``; held modules are the model's own."""
    return _Shell(anatomy, range(begin, end), exchange).of(anatomy.model, "")


class _Shell:
    def __init__(self, anatomy: Anatomy, units: range, exchange: Exchange) -> None:
        self._anatomy, self._units, self._exchange = anatomy, units, exchange
        self._numbers = {name: number for number, name in enumerate(anatomy.blocks)}

    def of(self, module: nn.Module, name: str) -> nn.Module:
        """Return the replacement of a module in this shell."""
        if name in self._numbers:
            return self._block(module, self._numbers[name])
        inside = f"{name}." if name else ""
        if not any(block.startswith(inside) for block in self._numbers):
            tensors = [
                n for kind in (module.named_parameters, module.named_buffers) for n, _ in kind(inside[:-1])
            ]
            if not tensors or any(self._anatomy.needs(tensor, self._units) for tensor in tensors):
                return module
            if not any(True for _ in module.parameters()) and not module.state_dict():
                # non-persistent buffers are small, and masks and positions may depend on them
                return module
            if name in self._anatomy.observed.called:
                return Outline(self._shape(module), self._exchange)
        return self._opened(module, inside)

    def _opened(self, module: nn.Module, inside: str) -> nn.Module:
        """Return a copy of a module that shares its tensors, with its children replaced."""
        mine = copy.copy(module)
        for kind in ("_modules", "_parameters", "_buffers"):
            setattr(mine, kind, dict(getattr(module, kind)))
        mine._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        for name, child in module._modules.items():
            if child is not None:
                mine._modules[name] = self.of(child, inside + name)
        for name, parameter in module._parameters.items():
            if parameter is not None and not self._anatomy.needs(inside + name, self._units):
                device = torch.device("cpu") if parameter.is_meta else parameter.device
                made = made_up(tuple(parameter.shape), parameter.dtype, device, self._exchange)
                if self._units:
                    del mine._parameters[name]
                    mine.register_buffer(name, made, persistent=False)
                else:  # a forward may read the dtype of its parameters, and has no others here
                    mine._parameters[name] = nn.Parameter(made, requires_grad=False)
        return mine

    def _block(self, block: nn.Module, number: int) -> nn.Module:
        anatomy, unit = self._anatomy, number + 1
        is_last = number == len(anatomy.blocks) - 1
        if unit in self._units:
            ends = is_last and self._units.stop == unit + 1
            return OwnBlock(
                block,
                self._exchange,
                unit,
                unit + 1 if is_last and not ends else None,
                anatomy.takes[unit],
                anatomy.returns if ends else None,
                anatomy.collected.get(number, ()),
            )
        shape, call = self._shape(block), anatomy.observed.calls[anatomy.blocks[number]]
        if unit < self._units.start:
            arriving = anatomy.returns if is_last else {}
            found = anatomy.collected.get(number, ())
            return OtherBlock(shape, self._exchange, number, call, arriving, found)
        until = max(self._units.stop, anatomy.early_until()) if self._units.start == 0 else self._units.stop
        takes = anatomy.takes[unit]
        if unit > self._units.stop:
            takes = {slot: value for slot, value in takes.items() if value in anatomy.early}
        return OtherBlock(shape, self._exchange, number, call, takes=takes, ends=unit >= until)

    def _shape(self, module: nn.Module) -> nn.Module:
        shapes = self._anatomy.shapes
        if id(module) not in shapes:
            shapes[id(module)] = without_weights(module)
        return shapes[id(module)]
