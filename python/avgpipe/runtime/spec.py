"""What a Pipeline trains, and how: one value from which each of its sessions is made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from avgpipe.device import has_streams, own_device
from avgpipe.model.compiled import comes_compiled
from avgpipe.model.estimate import Estimate
from avgpipe.model.layers import layers_of
from avgpipe.model.model import Model, learning_tensors
from avgpipe.plan import Plan
from avgpipe.ranks.environment import named
from avgpipe.runtime.optimizers import groups_of_whole, warn_of_steps
from avgpipe.runtime.options import TrainingOptions, callers
from avgpipe.runtime.requirements import (
    check_carries,
    check_device,
    check_memory,
    check_model,
    check_options,
    warn_of_hooks,
)

if TYPE_CHECKING:
    from avgpipe.model.compiler import Compiler
    from avgpipe.runtime.initial import InitialWeights


@dataclass(frozen=True, eq=False)
class Spec:
    """What is trained, and how; the same on every rank.

    Attributes:
        given: the model as the caller gave it.
        layers: of the model.
        model: the names and shapes of the layers, and their cut.
        named: gives parameters and buffers their names: the model, or that of ``names_of``.
        estimate: of the cost of layers.
        traffic: with an example, bytes of a micro-batch that go from stage to stage.
        plan: for the loader's batches.
        options: all other options.
        device: of this rank.
        seed: of the random numbers that layers draw.
        timeout_s: the limit of every wait for another rank.
        initial: gives the weights their values; None: the layers have them.
    """

    given: Any
    layers: Sequence[nn.Module]
    model: Model
    named: nn.Module | Sequence[nn.Module]
    estimate: Estimate
    traffic: Mapping[tuple[int, int], int]
    plan: Plan
    options: TrainingOptions
    device: torch.device
    seed: int
    timeout_s: float
    initial: InitialWeights | None = None

    @classmethod
    def of(
        cls,
        given: nn.Module | Sequence[nn.Module],
        plan: Plan,
        options: TrainingOptions,
        *,
        device: torch.device | str | None = None,
        seed: int = 0,
        timeout_s: float = 300,
        example_inputs: Any = None,
    ) -> Spec:
        """Cut a model by a plan; ValueError or TypeError if the arguments do not fit each other."""
        check_options(options)
        weights_from, names_of = options.weights_from, options.names_of
        may_be_meta = weights_from is not None
        check_model(given, may_be_meta=may_be_meta)
        check_memory(given)
        layers = layers_of(given, example_inputs)
        if names_of is not None:
            check_model(names_of, may_be_meta=may_be_meta)
            named("avgpipe.options:check_names")(layers, names_of)
        naming = given if names_of is None else names_of
        estimate = Estimate.of(layers, example_inputs, plan.micro_batches, counts=plan.stages > 1)
        model = Model.cut(naming, layers, plan.stages, plan.partition, estimate)
        traffic: Mapping[tuple[int, int], int] = {}
        if example_inputs is not None:
            from avgpipe.model.cut import expected_traffic

            traffic = expected_traffic(model, layers, example_inputs, plan.micro_batches)
        in_layers = set(chain.from_iterable(model.trainable))
        learning = {name: p for name, p in learning_tensors(naming).items() if name in in_layers}
        warn_of_hooks(plan, learning)
        if options.check != "off":
            # Before the optimizers that train: a script may keep a reference to the last one that it made.
            groups = groups_of_whole(options.optimizer, learning)
            options = replace(options, groups=groups, callers=callers(learning))
            if plan.stages > 1 and os.environ.get("RANK", "0") == "0":
                warn_of_steps(options.optimizer, model.trainable, learning)
        initial = None
        if weights_from is not None:
            from avgpipe.runtime.initial import InitialWeights

            initial = InitialWeights.of(weights_from, naming, model)
        on = _device(device, layers)
        check_carries(options, layers)
        check_device(options, on)
        spec = cls(
            *(given, layers, model, naming, estimate, traffic, plan, options, on),
            *(seed, timeout_s, initial),
        )
        if has_streams(on) and spec.compiler is not None:
            spec.compiler.refuse_cuda_graphs(layers)
        for extension in options.extensions:
            extension.check(spec)
        return spec

    @cached_property
    def compiler(self) -> Compiler | None:
        """Compiles the layers of all stages of this process; None if nothing is compiled."""
        modules = [*nn.ModuleList(self.layers).modules()]
        whole = [self.given] if isinstance(self.given, nn.Module) else []
        if self.options.compile is None and not comes_compiled([*whole, *modules]):
            return None
        made: Compiler = named("avgpipe.model.compiler:Compiler")(self.options.compile, self.given)
        return made

    @cached_property
    def running(self) -> Plan:
        """The plan of one update's batch, with the micro-batches of all the loader's batches in it."""
        return replace(self.plan, micro_batches=self.plan.micro_batches * self.options.accumulate)


def _device(device: torch.device | str | None, layers: Sequence[nn.Module]) -> torch.device:
    if device is None:
        tensor = next((p for layer in layers for p in layer.parameters() if not p.is_meta), torch.empty(0))
        return tensor.device
    return own_device(device)
