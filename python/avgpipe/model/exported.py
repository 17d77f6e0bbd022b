"""Models that torch.fx cannot trace, exported by torch.export on an example of their inputs.

The export records operators for sizes in general. It is made in training and in evaluation, and the two become one
graph (:mod:`avgpipe.model.modes`), which is cut between the blocks of the model's lists of blocks, and otherwise
between the modules that its forward calls. BatchNorms stay modules, as their statistics are of the whole batch.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
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
from avgpipe.model.context import CallerGenerators, Carry
from avgpipe.model.example import Arguments, device_of, first_samples, prove
from avgpipe.model.modes import in_mode
from avgpipe.model.plain_graph import Guards, place_anew, plain_graph
from avgpipe.model.tracing import TracedLayer, layers_of_graph, with_choice
from avgpipe.model.units import pieces_of, take_sizes_from_near, units_of

_TORCH = {PurePath(torch.__file__).parent}
_LEAST_SAMPLES = 2  # of an example: a size of 1 would be taken for one that never changes
_LEAST_LENGTH = 3
_MOST_SAMPLES = 128  # as many sizes of micro-batches are looked at


def exported(model: nn.Module, example_inputs: Any) -> list[TracedLayer]:
    """Export ``model`` and cut it into layers; ValueError where that cannot be, with the reason.

    A sequence as long as the model can take is, to torch.export, one of that length and no other. So inputs that are
    numbers are tried a step shorter first; that the layers are right for the example itself is proved in any case.

    Args:
        model: Stays as it is, and so do random generators.
        example_inputs: One batch's inputs, as a loader yields them.
    """
    _refuse(model)
    device = device_of(model)
    example = _at_least_two(to_device(example_inputs, device))
    shorter = _shorter(example)
    attempts = [(example, Dim.AUTO), (example, Dim.STATIC)]
    if _sizes_of(shorter) != _sizes_of(example) and _runs_on(model, shorter, device):
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
    """Export on ``inputs``, for any number of samples and other ``sizes`` of torch.export.Dim; prove the layers."""
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
        # One sample alone, BatchNorm refuses to train on.
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
                f"{name or 'the model'!r} is compiled, which torch.export cannot keep: pass it as it was before, with "
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
    """Make whole numbers and masks a step shorter in every dimension but that of the samples, where they have some."""

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


def _runs_on(model: nn.Module, inputs: Any, device: torch.device) -> bool:
    call = Arguments.on(model, inputs)
    try:
        with in_mode(model, False), CallerGenerators(device), torch.no_grad():
            model(*call.args, **call.kwargs)
    except Exception:  # of any kind: it may need the very length
        return False
    return True


# ---- torch.export --------------------------------------------------------------------------------------------------


def _in_both_modes(
    model: nn.Module, call: Arguments, sizes: Any, example: Arguments
) -> tuple[fx.Graph, dict[str, Any]]:
    """Return the graph, and what it names."""
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
            f"{type(model).__name__} does other things in training than in evaluation ({error}), and a cut model does "
            "the same in both: pass a list of layers instead"
        ) from error
    root["_guards"] = Guards(call.leaves, example.leaves, root["_guards"], root_of_other["_guards"])
    return graph, root


def _export(model: nn.Module, call: Arguments, sizes: Any) -> Any:
    """Export by running the Python code of the model, or else by compiling it; ValueError where neither can be.

    Compiled, an assert about values is an operator.
    """
    failures: list[Exception] = []
    for strict in (False, True):
        try:
            with _masks_as_they_are(), _quietly():
                return torch.export.export(
                    model, call.args, call.kwargs, dynamic_shapes=_sizes(call, sizes), strict=strict
                )
        except Exception as error:  # of any kind: it runs the model
            failures.append(error)
    raise ValueError(
        f"torch.export cannot export {type(model).__name__} for batches of any size ({reason(failures[0])}; "
        f"{_place(failures[0], model)}): pass nn.Sequential or a list of layers instead"
    ) from None


@contextmanager
def _masks_as_they_are() -> Iterator[None]:
    """Have torch's encoders and decoders apply the masks that they are given, whatever is in these.

    They compare each mask with the causal one, whose kernels are quicker. A graph that goes by values cannot be
    recorded; and what a mask leaves out is the same in both ways.
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
    """Keep to what the error says: torch would print the graph so far, of thousands of lines, and log warnings.

    Whoever has asked for torch's logs gets all of it. What else is printed, by the model's own code, is printed after
    an export that has gone well.
    """
    if "TORCH_LOGS" in os.environ:
        yield
        return
    handlers, printed = logging.getLogger("torch").handlers, io.StringIO()
    with ExitStack() as filters:
        for handler in handlers:
            handler.addFilter(_nothing)
            filters.callback(handler.removeFilter, _nothing)
        with redirect_stderr(printed):
            yield
    sys.stderr.write(printed.getvalue())


def _nothing(_: logging.LogRecord) -> bool:
    return False


def _place(error: BaseException, model: nn.Module) -> str:
    """Say where in the model an export has failed: the module, and the line of code that is not torch's."""
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
    """Leave sizes open: of the samples in any case, ``rest`` says of the other dimensions."""

    def of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        return {n: rest if n else Dim.DYNAMIC for n in range(value.dim())}

    return {name: pytree.tree_map(of, value) for name, value in call.named.items()}
