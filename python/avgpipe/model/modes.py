"""The training and evaluation modes of modules, as the caller set them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def is_evaluated(modules: Iterable[Any]) -> bool:
    """Return whether all modules are in evaluation mode, as in a loaded model: then the mode is not deliberate."""
    of_all = (m for whole in modules if isinstance(whole, nn.Module) for m in whole.modules())
    return not any(module.training for module in of_all)


def evaluated_in(layers: Iterable[nn.Module]) -> list[str]:
    """Name the modules of a chain that are in evaluation mode."""
    return [
        f"layer {n}, {name}" if name else f"layer {n}"
        for n, layer in enumerate(layers)
        for name, module in layer.named_modules()
        if not module.training
    ]


def tells_modes_apart(modules: Iterable[nn.Module]) -> bool:
    """Return whether some layer behaves differently in training and in evaluation."""
    kinds = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)
    of_all = [m for whole in modules for m in whole.modules()]
    own = [m for m in of_all if type(m).__module__.split(".")[0] not in ("torch", "transformers", "avgpipe")]
    return any(isinstance(m, kinds) and getattr(m, "p", 1) > 0 for m in of_all) or any(map(reads_mode, own))


class Modes:
    """Sets a module to training or evaluation, except for modules that are in evaluation mode now, on purpose.

    ``keeps``: False if no module is to stay in evaluation mode.
    """

    def __init__(self, module: nn.Module, keeps: bool = True) -> None:
        self._module = module
        self._kept = [m for m in module.modules() if keeps and not m.training]

    def train(self, training: bool = True) -> None:
        self._module.train(training)
        for module in self._kept:
            module.training = False

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate inside of the ``with`` block, and restore the caller's modes after it."""
        self.train(False)
        try:
            yield
        finally:
            self.train()


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Set a model and all its modules to training or evaluation inside of the ``with`` block; see :class:`Modes`."""
    before = [(module, module.training) for module in model.modules()]
    keeps = training and not is_evaluated([model])
    for module, was in before:
        module.training = training and (was or not keeps)
    try:
        yield
    finally:
        for module, was in before:
            module.training = was


_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def has_hooks(module: nn.Module) -> bool:
    """Return whether a hook is registered on this module itself."""
    return any(vars(module)[of] for of in _HOOKS)


def reads_mode(module: nn.Module) -> bool:
    """Return whether a module's own forward reads ``self.training``, as far as its code shows."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return code is not None and "training" in code.co_names
