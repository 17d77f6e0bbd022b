"""A model as a chain of layers: as given, by the blocks that it calls, or by a graph of its forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from avgpipe.model.compiled import is_compiled, original, unwrapped
from avgpipe.model.context import has_hooks
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
        from avgpipe.model.recorded import recorded_layers

        return recorded_layers(model, example_inputs)
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
