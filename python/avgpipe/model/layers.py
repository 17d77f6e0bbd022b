"""A model as a chain of layers: as given, by the blocks that it calls, or by a graph of its forward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from avgpipe.errors import reason
from avgpipe.model.batch import plain
from avgpipe.model.compiled import is_compiled, original, sharing_copy, unwrapped
from avgpipe.model.context import generators, has_hooks, set_generators
from avgpipe.model.outside import Outside, recorded_modules
from avgpipe.model.parts import PartLayer


def layers_of(model: nn.Module | Sequence[nn.Module], example_inputs: Any = None) -> Sequence[nn.Module]:
    """Return the chain of layers that computes ``model``.

    They are its children if it is sequential, its blocks if its forward is one of the transformers library,
    else pieces of its traced graph. ``example_inputs``: one batch's, with which torch.export traces models
    that torch.fx cannot.
    """
    model = without_adapters(original(model))
    if isinstance(model, nn.Module):
        _refuse_hooks(model)
    if isinstance(model, nn.Module) and not (
        isinstance(model, nn.Sequential | nn.ModuleList) and is_chain(model)
    ):
        is_of_transformers = _forward_module(model) == "transformers"
        return _of_transformers(model) if is_of_transformers else _of_graph(model, example_inputs)
    layers = [part for layer in model for part in _parts(layer)]
    for n, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layer {n} of the model is a {type(layer).__name__}, not a torch.nn.Module")
    if not layers:
        raise ValueError("the model has no layers")
    memo: dict[int, nn.Module] = {}
    return [unwrapped(layer, memo) for layer in layers]


def outside_of(model: nn.Module | Sequence[nn.Module], layers: Sequence[nn.Module]) -> Outside:
    """Return the outside values that a recorded forward treats as constants; nothing if it was not recorded."""
    parts = [layer for layer in layers if isinstance(layer, PartLayer)]
    graphs = [part.recorded for part in parts if part.recorded is not None]
    whole = without_adapters(original(model))
    return Outside(recorded_modules(whole, graphs) if graphs and isinstance(whole, nn.Module) else ())


def is_chain(model: nn.Module) -> bool:
    """Return whether a container calls its modules one after another: it has no forward of its own."""
    return type(model).forward in (nn.Sequential.forward, nn.Module.forward)


def _refuse_hooks(model: nn.Module) -> None:
    """Refuse hooks of the model as a whole, which no stage would call."""
    if has_hooks(model):
        raise ValueError(
            f"the model, a {type(model).__name__}, has a hook of its own, which no stage would call: register it on a "
            "module inside of it, or put the hook's code into its forward"
        )


def _of_graph(model: nn.Module, example_inputs: Any) -> list[nn.Module]:
    from avgpipe.model.recording import buffers_kept

    example_inputs = plain(example_inputs)
    model = sharing_copy(model)  # the caller's model is unchanged
    before = generators()
    try:
        with buffers_kept(model):
            return _recorded(model, example_inputs)
    finally:
        set_generators(before)


def _recorded(model: nn.Module, example_inputs: Any) -> list[nn.Module]:
    from avgpipe.model.example import Arguments, prove
    from avgpipe.model.tracing import CannotTrace, traced

    try:
        layers = traced(model, None if example_inputs is None else Arguments.on(model, example_inputs).named)
    except CannotTrace as error:
        if example_inputs is None:
            raise ValueError(
                f"{error}: give example_inputs=, one batch's inputs as the loader yields them, so that torch.export "
                "can try, or pass nn.Sequential or a list of layers instead"
            ) from None
        from avgpipe.model.exported import exported  # imported here, as torch.export takes seconds

        return list(exported(model, example_inputs))
    if example_inputs is None:
        return list(layers)
    if len(layers) == 1:
        from avgpipe.model.exported import exported

        with suppress(ValueError):
            more = exported(model, example_inputs)
            layers = more if len(more) > 1 else layers
    prove(layers, model, example_inputs)
    return list(layers)


def _parts(layer: Any) -> list[Any]:
    """Return the blocks of an encoder of torch's, which it calls one after another; anything else unchanged."""
    if type(layer) is not nn.TransformerEncoder or is_compiled(layer) or has_hooks(layer):
        return [layer]
    return [*layer.layers, *([] if layer.norm is None else [layer.norm])]


def without_adapters(model: Any) -> Any:
    """Return the model inside a PeftModel, whose layers contain the adapters, or ``model`` if it is none.

    Raises:
        ValueError: For adapters that are not part of the layers.
    """
    kinds = {kind.__name__ for kind in type(model).__mro__ if kind.__module__.split(".")[0] == "peft"}
    if "PeftModel" not in kinds:
        return model
    config = model.active_peft_config
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            f"the adapters of {config.peft_type} put a prompt before the model's input, which stages do not: use "
            "adapters that change layers, such as LoRA"
        )
    return model.get_base_model()


def _forward_module(model: nn.Module) -> str:
    """Return the package that contains the code of ``model.forward``."""
    owner = next(c for c in type(model).__mro__ if "forward" in vars(c))
    return owner.__module__.split(".")[0]


def _of_transformers(model: nn.Module) -> Sequence[nn.Module]:
    from avgpipe.model.pieces import BlockChain
    from avgpipe.model.transformers import call_of, twin_of  # imported here, as the library takes seconds

    try:
        # Independent of the caller's default, as while a model is built on the meta device.
        with torch.device("cpu"):
            sample = twin_of(model) if any(p.is_meta for p in model.parameters()) else model
            return BlockChain(sample, call_of(sample), model)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} of transformers cannot be split into stages: {reason(error)}; "
            "pass it as a list of layers, with Source(names_of=model)"
        ) from error
