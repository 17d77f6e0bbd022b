"""A model whose forward calls its modules itself, as a chain of layers: of its blocks, or of a graph of its forward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from avgpipe.errors import reason
from avgpipe.model.batch import plain
from avgpipe.model.compiled import sharing_copy
from avgpipe.model.context import generators, set_generators


def recorded_layers(model: nn.Module, example_inputs: Any) -> Sequence[nn.Module]:
    """Return the chain of layers; ``example_inputs`` as of :func:`avgpipe.model.layers.layers_of`."""
    is_of_transformers = _forward_module(model) == "transformers"
    return _of_transformers(model) if is_of_transformers else _of_graph(model, example_inputs)


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
