"""Models that torch.fx cannot trace, exported by torch.export on an example of their inputs.

The export records operators for general sizes. It is made in training and in evaluation, and both become one
graph (:mod:`avgpipe.model.context`), which is cut between the blocks of the model's lists of blocks, and
otherwise between the modules that its forward calls. BatchNorms stay modules, as their statistics are of the
whole batch.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import PurePath
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim
from torch.nn.modules import transformer
from torch.utils import _pytree as pytree

from avgpipe.errors import reason
from avgpipe.model.batch import batch_size, to_device
from avgpipe.model.choice import Differs, merged
from avgpipe.model.compiled import is_compiled
from avgpipe.model.context import CallerGenerators, Carry, in_mode, without_logs
from avgpipe.model.example import Arguments, device_of, failure_on, first_samples, prove
from avgpipe.model.plain_graph import Guards, place_anew, plain_graph
from avgpipe.model.tracing import TracedLayer, layers_of_graph, with_choice
from avgpipe.model.units import pieces_of, take_sizes_from_near, units_of

_TORCH = {PurePath(torch.__file__).parent}
_LEAST_SAMPLES = 2  # of an example: torch.export treats a size of 1 as constant
_LEAST_LENGTH = 3
_MOST_SAMPLES = 128  # most sizes of micro-batches that are checked


def exported(model: nn.Module, example_inputs: Any) -> list[TracedLayer]:
    """Export ``model`` and cut it into layers; ValueError with the reason if that is not possible.

    torch.export treats a sequence of the model's greatest length as one of constant length. So integer inputs
    are first tried a step shorter; that the layers are right for the example itself is checked in any case.

    Args:
        model: It is unchanged, and so are random generators.
        example_inputs: One batch's inputs, as a loader yields them.
    """
    _refuse(model)
    device = device_of(model)
    example = _at_least_two(to_device(example_inputs, device))
    shorter = _shorter(example)
    attempts = [(example, Dim.AUTO), (example, Dim.STATIC)]
    if _sizes_of(shorter) != _sizes_of(example) and failure_on(model, shorter, device) is None:
        attempts.insert(0, (shorter, Dim.AUTO))
    *first, last = (partial(_exported_on, model, *attempt, example, device) for attempt in attempts)
    for export in first:
        try:
            return export()
        except ValueError:
            continue
    return last()


def _exported_on(
    model: nn.Module, inputs: Any, sizes: Any, example: Any, device: torch.device
) -> list[TracedLayer]:
    """Export on ``inputs``, for any number of samples and other ``sizes`` of torch.export.Dim; check the layers."""
    call = Arguments.on(model, inputs)
    with CallerGenerators(device), torch.enable_grad():
        graph, root = _in_both_modes(model, call, sizes, Arguments.on(model, example))
    _refuse_few_samples(root["_guards"], model, example)
    place_anew(graph, root, device)
    whole = fx.GraphModule(with_choice(root, graph), graph, type(model).__name__)
    units = units_of(graph, model)
    pieces = pieces_of(graph, units)
    take_sizes_from_near(graph, pieces)
    layers = layers_of_graph(whole, pieces, units)
    prove(layers, model, example)
    return layers


def _refuse_few_samples(guards: Guards, model: nn.Module, example: Any) -> None:
    """Refuse, with ValueError, a graph that some micro-batches of an example could not run."""
    most = batch_size(example)
    for training in (True, False):
        guards.train(training)
        # BatchNorm refuses to train on a single sample.
        for size in range(1 + training, min(most, _MOST_SAMPLES) + 1):
            guards(*Arguments.on(model, first_samples(size, example)).leaves)


def _refuse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, Carry):
            raise ValueError(
                f"{name!r} of {type(model).__name__} is a Carry, whose values torch.export would take for constants: "
                "pass a list of layers"
            )
        if is_compiled(module):
            raise ValueError(
                f"{name or 'the model'!r} is compiled, which torch.export cannot keep: pass it uncompiled, with "
                "extensions=[avgpipe.Compile()]"
            )


def _at_least_two(inputs: Any) -> Any:
    """Repeat the samples of an example of one."""
    if batch_size(inputs) >= _LEAST_SAMPLES:
        return inputs
    return pytree.tree_map_only(
        torch.Tensor, lambda t: torch.cat([t] * _LEAST_SAMPLES) if t.dim() else t, inputs
    )


def _shorter(example: Any) -> Any:
    """Make integer and mask inputs one step shorter in every dimension but that of the samples, if possible."""

    def of(value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point() or value.is_complex():
            return value
        for n in range(1, value.dim()):
            if value.shape[n] >= _LEAST_LENGTH:
                value = value.narrow(n, 0, value.shape[n] - 1)
        return value.contiguous()

    return pytree.tree_map_only(torch.Tensor, of, example)


def _sizes_of(inputs: Any) -> list[torch.Size]:
    return [t.shape for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)]


# ---- torch.export --------------------------------------------------------------------------------------------------


def _in_both_modes(
    model: nn.Module, call: Arguments, sizes: Any, example: Arguments
) -> tuple[fx.Graph, dict[str, Any]]:
    """Return the graph, and the objects that it names."""
    graphs: list[tuple[fx.Graph, dict[str, Any]]] = []
    for training in (True, False):
        with in_mode(model, training):
            program = _export(model, call, sizes)
        graphs.append(plain_graph(model, program, call))
    (graph, root), (other, root_of_other) = graphs

    try:
        merged(graph, other, root.__getitem__, root_of_other.__getitem__)
    except Differs as error:
        raise ValueError(
            f"{type(model).__name__} differs between training and evaluation ({error}), and a cut model does "
            "the same in both: pass a list of layers instead"
        ) from error
    root["_guards"] = Guards(call.leaves, example.leaves, root["_guards"], root_of_other["_guards"])
    return graph, root


def _export(model: nn.Module, call: Arguments, sizes: Any) -> Any:
    """Export by running the Python code of the model, or else by compiling it; ValueError if both fail.

    When compiled, an assert about values becomes an operator.
    """
    failures: list[Exception] = []
    for strict in (False, True):
        try:
            with _masks_as_they_are(), _quietly():
                return torch.export.export(
                    model, call.args, call.kwargs, dynamic_shapes=_sizes(call, sizes), strict=strict
                )
        except Exception as error:  # of any kind: this runs the model's code
            failures.append(error)
    raise ValueError(
        f"torch.export cannot export {type(model).__name__} for batches of any size ({reason(failures[0])}; "
        f"{_place(failures[0], model)}): pass nn.Sequential or a list of layers instead"
    ) from None


@contextmanager
def _masks_as_they_are() -> Iterator[None]:
    """Make torch's encoders and decoders apply the masks that they get, whatever their values.

    They compare each mask with the causal one, which has faster kernels. A graph that depends on values
    cannot be recorded; the masked positions are the same in both ways.
    """

    def is_said_to_be_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    before = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = is_said_to_be_causal
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = before


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress all output but the error: torch would print a graph of thousands of lines, and warnings.

    If torch's logs were requested, they stay on. What the model's own code prints is printed after a
    successful export.
    """
    if "TORCH_LOGS" in os.environ:
        yield
        return
    printed = io.StringIO()
    with without_logs(), redirect_stderr(printed):
        yield
    sys.stderr.write(printed.getvalue())


def _place(error: BaseException, model: nn.Module) -> str:
    """Return the place in the model where an export failed: the module, and the line of code outside torch."""
    names = {id(module): name for name, module in model.named_modules()}
    place = f"in {type(model).__name__}"
    for frame, line in traceback.walk_tb(error.__traceback__):
        module, path = frame.f_locals.get("self"), PurePath(frame.f_code.co_filename)
        if id(module) in names:
            name, kind = names[id(module)], type(module).__name__
            place = f"in {name!r} ({kind})" if name else f"in {kind}"
        if id(module) in names and not _TORCH.intersection(path.parents):
            place += f", {frame.f_code.co_name}, {path.name}, line {line}"
    return place


def _sizes(call: Arguments, rest: Any) -> dict[str, Any]:
    """Return dynamic sizes: of the samples in any case, of the other dimensions by ``rest``."""

    def of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        return {n: rest if n else Dim.DYNAMIC for n in range(value.dim())}

    return {name: pytree.tree_map(of, value) for name, value in call.named.items()}
