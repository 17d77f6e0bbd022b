"""An example of one batch's inputs: the call of a model on them, and the check that its layers compute the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from avgpipe.errors import reason
from avgpipe.model.batch import batch_size, to_device
from avgpipe.model.context import CallerGenerators, in_mode, seed_generators
from avgpipe.model.proof import difference
from avgpipe.model.tracing import arguments, names_in

_PROVED = (3, 1)  # samples: several, and a single one, as a last batch may be


class Arguments(NamedTuple):
    """The arguments of a model's call on a batch; ``named``: by the names in the signature of its forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: dict[str, Any]

    @classmethod
    def on(cls, model: nn.Module, inputs: Any) -> Arguments:
        """Call ``model`` on the inputs of a batch, as the first layer of a traced model would be."""
        signature = inspect.signature(model.forward)
        args, kwargs = arguments(inputs, names_in(signature))
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"example_inputs do not fit {type(model).__name__}.forward{signature}: {error}"
            ) from error
        return cls(bound.args, bound.kwargs, dict(bound.arguments))

    @property
    def leaves(self) -> list[Any]:
        """All tensors and other values in the arguments, in the order in which an export takes them."""
        return pytree.tree_leaves((self.args, self.kwargs))


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model, from its first tensor."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def prove(layers: Sequence[nn.Module], model: nn.Module, example_inputs: Any) -> None:
    """Compare outputs and gradients in evaluation mode, on the first samples of an example; not for a model on "meta".

    Raises:
        ValueError: They differ, by how much, or the layers cannot compute them.
    """
    device = device_of(model)
    if device.type == "meta":
        return  # there are no values yet
    example = to_device(example_inputs, device)
    sizes = dict.fromkeys(min(size, batch_size(example)) for size in _PROVED)
    with ExitStack() as modes, CallerGenerators(device):
        for module in (model, *layers):
            modes.enter_context(in_mode(module, False))
        for size in sizes:
            inputs = first_samples(size, example)
            if (failure := failure_on(model, inputs, device)) is not None:
                if size < next(iter(sizes)):
                    return  # the model itself fails with fewer
                raise ValueError(
                    f"{type(model).__name__} fails on example_inputs in evaluation mode: {reason(failure)}"
                ) from failure
            whole = partial(_called, model, inputs, device)
            try:
                found = difference(model, whole, partial(_chained, layers, inputs, device))
            except Exception as error:  # of any kind, from the layers' code: the model's has run
                found = reason(error)
            if found is not None:
                raise ValueError(
                    f"the layers that {type(model).__name__} was cut into do not compute what it does, on {size} of "
                    f"the samples of example_inputs: {found}; pass a list of layers instead"
                )


def failure_on(model: nn.Module, inputs: Any, device: torch.device) -> Exception | None:
    """Return the error of a model's code, of any kind, in evaluation on a batch's inputs; None without one."""
    try:
        with in_mode(model, False), CallerGenerators(device), torch.no_grad():
            _called(model, inputs, device)
    except Exception as error:
        return error
    return None


def first_samples(size: int, inputs: Any) -> Any:
    """Return the first ``size`` samples of all tensors."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t[:size] if t.dim() else t, inputs)


def _called(model: nn.Module, inputs: Any, device: torch.device) -> Any:
    call = Arguments.on(model, _copied(inputs))
    seed_generators(device, 0)  # for layers that draw in evaluation, too
    return model(*call.args, **call.kwargs)


def _chained(layers: Sequence[Callable[[Any], Any]], inputs: Any, device: torch.device) -> Any:
    value = _copied(inputs)
    seed_generators(device, 0)
    for layer in layers:
        value = layer(value)
    return value


def _copied(inputs: Any) -> Any:
    """Copy the inputs, as the model may write to them."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, inputs)
