"""The unsplit model as the runtime sees it: a chain of layers, its cut into stages, and the names of all in it.

Each layer receives what the one before returned. The chain does not depend on the number of stages, so random numbers
keyed by layer do not either.

Values of a traced model may skip stages that do not need them. Such a value stands there as None. It goes by a message
of its own from the stage that made it, or used it last, to the next one that uses it, and its gradient goes back the
same way; so a stage that uses it adds its part of the gradient, and the maker receives the sum::

    stage      0         1         2         3
    v          made      -         used      used
                 └── skips stage 1 ──┘ └── F ──┘      from 2 to 3 with all else that a stage gives the next
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from avgpipe.errors import reason
from avgpipe.model.balance import balance
from avgpipe.model.batch import plain
from avgpipe.model.compiled import is_compiled, original, unwrapped
from avgpipe.model.estimate import Estimate
from avgpipe.model.example import Arguments, prove
from avgpipe.model.modes import has_hooks
from avgpipe.model.outside import Outside, recorded_modules
from avgpipe.model.pieces import BlockChain, Piece
from avgpipe.model.recording import buffers_kept, generators, set_generators, sharing_copy
from avgpipe.model.tracing import CannotTrace, TracedLayer, Values, traced


class SkipRoute(NamedTuple):
    """One end of a skip over other stages. ``stage``: the other end. ``places``: the values' in this end's tuple."""

    stage: int
    places: tuple[int, ...]


class Skips(NamedTuple):
    """Where skipping values of a stage's input come from, and those of its output go, each in stage order."""

    arrivals: tuple[SkipRoute, ...] = ()
    departures: tuple[SkipRoute, ...] = ()


NO_SKIPS = Skips()


def skips_of(pieces: Sequence[Values], bounds: Sequence[int]) -> list[Skips]:
    """Find the skips of every stage. ``bounds``: first piece of each stage, then the number of pieces."""
    stages = [pieces[a:b] for a, b in pairwise(bounds)]
    ways: dict[tuple[int, int], list[str]] = {}  # by both ends, what goes there
    holders = dict.fromkeys(stages[0][-1].gives, 0)  # by value, the stage that made it or used it last
    for k, stage in enumerate(stages[1:], 1):
        used = frozenset[str]().union(*(piece.uses for piece in stage))
        for name in stage[0].takes:
            if name in used:
                if holders[name] < k - 1:
                    ways.setdefault((holders[name], k), []).append(name)
                holders[name] = k
        for name in stage[-1].gives:
            holders.setdefault(name, k)
    return [
        Skips(
            tuple(SkipRoute(a, _places(stage[0].takes, ways[a, b])) for a, b in sorted(ways) if b == k),
            tuple(SkipRoute(b, _places(stage[-1].gives, ways[a, b])) for a, b in sorted(ways) if a == k),
        )
        for k, stage in enumerate(stages)
    ]


def _places(names: tuple[str, ...], found: Iterable[str]) -> tuple[int, ...]:
    return tuple(names.index(name) for name in found)


def extract_skips(
    output: tuple[Any, ...], departures: Sequence[SkipRoute]
) -> tuple[tuple[Any, ...], list[list[Any]]]:
    """Return a stage's output as the next stage gets it, and for each departure the values that go there."""
    parts = [[output[n] for n in route.places] for route in departures]
    gone = {n for route in departures for n in route.places}
    return tuple(None if n in gone else value for n, value in enumerate(output)), parts


def insert_skips(
    given: tuple[Any, ...], arrivals: Sequence[SkipRoute], parts: Sequence[Sequence[Any]]
) -> tuple[Any, ...]:
    """Return a stage's input, from what the stage before gave and for each arrival what came from there."""
    whole = list(given)
    for route, values in zip(arrivals, parts):
        for n, value in zip(route.places, values):
            whole[n] = value
    return tuple(whole)


# ---- the chain of layers and its cut -----------------------------------------------------------


def layers_of(model: nn.Module | Sequence[nn.Module], example_inputs: Any = None) -> Sequence[nn.Module]:
    """Return the chain of layers that computes ``model``.

    Its children if it is sequential, its blocks if its forward is one of the transformers library, else pieces of its
    traced graph. ``example_inputs``: one batch's, with which torch.export traces what torch.fx cannot.
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
    """Return what the layers of a model take for constants, as its forward was recorded; nothing where it was not."""
    graphs = [layer.graph for layer in layers if isinstance(layer, TracedLayer)]
    whole = without_adapters(original(model))
    return Outside(recorded_modules(whole, graphs) if graphs and isinstance(whole, nn.Module) else ())


def is_chain(model: nn.Module) -> bool:
    """Whether a container of modules is these one after another: it has no forward of its own."""
    return type(model).forward in (nn.Sequential.forward, nn.Module.forward)


def _refuse_hooks(model: nn.Module) -> None:
    """Refuse hooks of the model as a whole, which no stage is."""
    if has_hooks(model):
        raise ValueError(
            f"the model, a {type(model).__name__}, has a hook of its own, which no stage would call: register it on a "
            "module inside of it, or do in its forward what the hook does"
        )


def stage_layers(layers: Sequence[nn.Module], begin: int, end: int) -> Sequence[nn.Module]:
    """Return what computes the layers from ``begin`` on, before ``end``: as many modules, or fewer."""
    return layers.stage(begin, end) if isinstance(layers, BlockChain) else layers[begin:end]


def _of_graph(model: nn.Module, example_inputs: Any) -> list[nn.Module]:
    example_inputs = plain(example_inputs)
    model = sharing_copy(model)  # the caller's stays as it is
    before = generators()
    try:
        with buffers_kept(model):
            return _recorded(model, example_inputs)
    finally:
        set_generators(before)


def _recorded(model: nn.Module, example_inputs: Any) -> list[nn.Module]:
    try:
        layers = traced(model, None if example_inputs is None else Arguments.on(model, example_inputs).named)
    except CannotTrace as error:
        if example_inputs is None:
            raise ValueError(
                f"{error}: give example_inputs=, one batch's inputs as the loader yields them, so that torch.export "
                "can try, or pass nn.Sequential or a list of layers instead"
            ) from None
        from avgpipe.model.exported import exported  # only now: torch.export takes seconds to import

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
    """Return an encoder of torch's as its blocks, which is what it calls one after another; anything else as it is."""
    if type(layer) is not nn.TransformerEncoder or is_compiled(layer) or has_hooks(layer):
        return [layer]
    return [*layer.layers, *([] if layer.norm is None else [layer.norm])]


def stage_bounds(
    layers: Sequence[nn.Module],
    stages: int,
    partition: Sequence[Any] | None,
    estimate: Estimate | None = None,
) -> list[int]:
    """Return the first layer of every stage, then the number of layers.

    Args:
        layers: Of the whole model.
        stages: How many.
        partition: As in ``Plan``.
        estimate: Of the layers' costs, for the cut where there is no partition; by default what is known without an
            example.
    """
    count = len(layers)
    if stages > count:
        raise ValueError(
            f"{stages} stages need at least as many layers, and the model has {count}: {_more_layers(layers)}"
        )
    if partition is None:
        if stages in (1, count):
            return [*range(stages), count]
        found = estimate or Estimate.of(layers)
        return [0, *balance(found.costs, stages, found.sent), count]
    first = [p if isinstance(p, int) else _named(layers, p) for p in partition]
    bounds = [0, *first, count]
    if any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(
            f"partition {list(partition)} leaves a stage without layers: the first layers {first} "
            "of stages 1.. must rise "
            f"and stay below {count}"
        )
    return bounds


def _more_layers(layers: Sequence[nn.Module]) -> str:
    """Say what to do where a model has too few layers, and how it was taken apart."""
    if not all(isinstance(layer, TracedLayer) for layer in layers):
        return "use fewer stages, or a list of what larger layers are made of, with names_of=model"
    return (
        "torch.fx begins a layer where the forward enters one of torch's modules, or one of your modules that hold "
        "parameters themselves; where it finds one layer, and example_inputs= is given, torch.export looks for blocks, "
        "too. Use fewer stages, move parts of the forward into modules of their own, or pass a list of layers, with "
        "names_of=model"
    )


def _named(layers: Sequence[nn.Module], name: str) -> int:
    """Find the first layer that calls the module ``name`` or one inside of it; its ``calls`` says which it calls."""
    stated = [getattr(layer, "calls", None) for layer in layers]
    called = [calls if isinstance(calls, str) else str(n) for n, calls in enumerate(stated)]
    for n, target in enumerate(called):
        if (target + ".").startswith(name + "."):
            return n
    raise ValueError(f"split point {name!r} is no module that the model calls; it calls {', '.join(called)}")


def without_adapters(model: Any) -> Any:
    """Return the model inside a PeftModel, whose layers have the adapters in them, or ``model`` if it is none.

    Raises:
        ValueError: for adapters that are no part of the layers.
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
    """Return the package whose code ``model.forward`` is."""
    owner = next(c for c in type(model).__mro__ if "forward" in vars(c))
    return owner.__module__.split(".")[0]


def _of_transformers(model: nn.Module) -> Sequence[nn.Module]:
    from avgpipe.model.transformers import call_of, twin_of  # only now: the library takes seconds to import

    try:
        # Whatever the caller's default is, as while a model is built on the meta device.
        with torch.device("cpu"):
            sample = twin_of(model) if any(p.is_meta for p in model.parameters()) else model
            return BlockChain(sample, call_of(sample), model)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} of transformers cannot be split into stages: {reason(error)}; "
            "pass it as a list of layers, with names_of=model"
        ) from error


def named_tensors(model: nn.Module | Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the ``state_dict`` of the unsplit model, with the very tensors (tied ones under each name)."""
    whole = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    state = whole.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def learning_tensors(model: nn.Module | Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the parameters that want gradients, by their first names, in the order of ``model.parameters()``."""
    first = {id(p): (name, p) for name, p in reversed(named_tensors(model).items()) if p.requires_grad}
    return dict(reversed(first.values()))


def _versions(model: nn.Module | Sequence[nn.Module]) -> dict[str, dict[str, Any]]:
    whole = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    state: Any = whole.state_dict(keep_vars=True)
    return dict(getattr(state, "_metadata", {}))


# ---- everything in the model, by name -----------------------------------------------------------


class Entry(NamedTuple):
    """A tensor of a stage's ``state_dict``.

    Attributes:
        names: in the unsplit model.
        local: its name in the stage.
        arena: its number among the parameters in flat buffers; None for a frozen parameter or a buffer.
    """

    names: list[str]
    local: str
    arena: int | None
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Model:
    """What is known of the model that was given: nothing here changes with it afterwards.

    Attributes:
        bounds: first layer of each stage, then the number of layers.
        names: of the unsplit model's ``state_dict``, in its order.
        entries: everything that is saved, per stage; a tensor that is tied inside a stage stands there once.
        trainable: the first names of each stage's trainable parameters, each once, in the order of its flat buffers.
        shapes: a tensor without values for each of these.
        shared: of each stage, for every other one that holds trainable parameters of it too, their places in
            ``trainable``, in an order that both agree on.
        skips: of each stage, the values that skip the stages beside it.
        unused: copies of what no stage holds, as no forward uses it.
        versions: of the modules' state, by their names, as in the ``_metadata`` of the unsplit model's ``state_dict``.
        normalises: whether some layer normalises what it trains on by the statistics of all its samples.
    """

    bounds: list[int]
    names: list[str]
    entries: list[list[Entry]]
    trainable: list[list[str]]
    shapes: list[list[torch.Tensor]]
    shared: list[dict[int, list[int]]]
    skips: list[Skips]
    unused: dict[str, torch.Tensor]
    versions: dict[str, dict[str, Any]]
    normalises: bool

    @classmethod
    def cut(
        cls,
        model: nn.Module | Sequence[nn.Module],
        layers: Sequence[nn.Module],
        stages: int,
        partition: Sequence[Any] | None,
        estimate: Estimate | None = None,
    ) -> Model:
        """Cut ``model``, which ``layers`` compute, into ``stages``; the rest is as of :func:`stage_bounds`."""
        bounds = stage_bounds(layers, stages, partition, estimate)
        if isinstance(layers, BlockChain):
            layers.prove(bounds)
        tensors = named_tensors(model)
        names: dict[int, list[str]] = {}  # all names of a tensor
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        held = [nn.ModuleList(stage_layers(layers, a, b)) for a, b in pairwise(bounds)]
        trainable = [trainable_parameters(stage) for stage in held]
        shared = [_shared(trainable, k) for k in range(len(held))]
        for of, others in zip(trainable, shared):
            for n in (n for places in others.values() for n in places if of[n]._backward_hooks):
                raise ValueError(
                    f"parameter {names[id(of[n])][0]!r} has a hook and is held by several stages, none of which sees "
                    "its whole gradient: remove the hook, or use a partition that keeps its layers together"
                )
        entries = [_entries(stage, names, of) for stage, of in zip(held, trainable)]
        saved = {name for stage in entries for e in stage for name in e.names}
        return cls(
            bounds=bounds,
            names=list(tensors),
            entries=entries,
            trainable=[[names[id(p)][0] for p in of] for of in trainable],
            shapes=[[torch.empty_like(p, device="meta") for p in of] for of in trainable],
            shared=shared,
            skips=_skips(layers, bounds),
            unused={name: t.detach().clone() for name, t in tensors.items() if name not in saved},
            versions=_versions(model),
            normalises=any(isinstance(m, _BatchNorm) for stage in held for m in stage.modules()),
        )

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    def signature(self) -> dict[str, list[Any]]:
        """Shape and dtype of every saved tensor by name: what a checkpoint must agree with."""
        return {
            name: [list(e.shape), str(e.dtype)[6:]]
            for stage in self.entries
            for e in stage
            for name in e.names
        }

    def shared_values(self, layers: Sequence[nn.Module]) -> dict[str, str]:
        """Return the SHA-256 of each parameter that several stages hold: their copies must begin alike."""
        found: dict[str, str] = {}
        for k in range(self.stages):
            parameters = trainable_parameters(nn.ModuleList(stage_layers(layers, *self.bounds[k : k + 2])))
            found |= self.shared_digests(k, parameters)
        return found

    def shared_digests(self, stage: int, parameters: Sequence[torch.Tensor]) -> dict[str, str]:
        """Return the SHA-256 of those of a stage's trainable parameters that others hold too, by name."""
        return {
            self.trainable[stage][n]: _digest(parameters[n])
            for n in {n for places in self.shared[stage].values() for n in places}
        }


def _digest(tensor: torch.Tensor) -> str:
    return sha256(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def trainable_parameters(layers: nn.Module) -> list[nn.Parameter]:
    """Return a stage's trainable parameters, each once, in the order of its flat buffers."""
    return [p for p in layers.parameters() if p.requires_grad]


def _entries(stage: nn.Module, names: dict[int, list[str]], trainable: Sequence[nn.Parameter]) -> list[Entry]:
    places = {id(p): n for n, p in enumerate(trainable)}
    seen: dict[int, Entry] = {}
    for local, t in stage.state_dict(keep_vars=True).items():
        if id(t) in names and id(t) not in seen:
            seen[id(t)] = Entry(names[id(t)], local, places.get(id(t)), t.shape, t.dtype)
    return list(seen.values())


def _shared(trainable: Sequence[Sequence[nn.Parameter]], k: int) -> dict[int, list[int]]:
    mine = {id(p): n for n, p in enumerate(trainable[k])}
    result = {}
    for other, of in enumerate(trainable):
        theirs = {id(p) for p in of}
        # both stages list them in the order of the earlier one
        places = [mine[id(p)] for p in trainable[min(k, other)] if id(p) in mine and id(p) in theirs]
        if other != k and places:
            result[other] = places
    return result


def _skips(layers: Sequence[nn.Module], bounds: Sequence[int]) -> list[Skips]:
    pieces = [layer.values for layer in layers if isinstance(layer, TracedLayer | Piece)]
    return skips_of(pieces, bounds) if len(pieces) == len(layers) else [NO_SKIPS] * (len(bounds) - 1)
