"""Which modules train and which are in evaluation mode, as whoever gave the model wants it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def is_evaluated(modules: Iterable[Any]) -> bool:
    """Whether all modules are in evaluation mode, as a model that was loaded: then it was not put there to stay."""
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
    """Whether some layer does other things in training than in evaluation."""
    kinds = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)
    of_all = [m for whole in modules for m in whole.modules()]
    own = [m for m in of_all if type(m).__module__.split(".")[0] not in ("torch", "transformers", "avgpipe")]
    return any(isinstance(m, kinds) and getattr(m, "p", 1) > 0 for m in of_all) or any(map(reads_mode, own))


class Modes:
    """Has a module train, or not, but for what is in evaluation mode now: whoever put it there wants it so.

    ``keeps``: False where nothing is to stay there.
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
        """Have the module evaluate inside of the ``with`` block, and train after it as whoever gave it left it."""
        self.train(False)
        try:
            yield
        finally:
            self.train()


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Have a model and all that is in it train, or not, inside of the ``with`` block; as of :class:`Modes`."""
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
    """Whether somebody has registered a hook on this very module."""
    return any(vars(module)[of] for of in _HOOKS)


def reads_mode(module: nn.Module) -> bool:
    """Whether a module's own forward asks for ``self.training``, as far as its code shows."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return code is not None and "training" in code.co_names
