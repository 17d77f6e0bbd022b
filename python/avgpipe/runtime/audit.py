"""Compares the stages of a model with the model itself, on some samples of the first batch.

The model runs as it was given, and then as its stages run: each stage gets a copy of the previous stage's output, and
returns gradients for it. Both runs start from the same weights, buffers and random numbers, on copies of the modules.
So a difference that a cut causes is found before the first batch is trained on. The model also runs on
samples in micro-batches, and on all of them at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from avgpipe.device import free_bytes, generators_of
from avgpipe.errors import reason
from avgpipe.links.link import tensors_of, wanting_gradients
from avgpipe.model.batch import batch_size, sizes_of, split, to_device
from avgpipe.model.compiled import copied, is_compiled, original, sharing_copy
from avgpipe.model.context import (
    Modes,
    Position,
    callers_generators,
    generators,
    key_layers,
    moved,
    position,
    seed_generators,
    set_generators,
    set_position,
)
from avgpipe.model.layers import is_chain, without_adapters
from avgpipe.model.model import stage_layers
from avgpipe.model.outside import Outside, leaves_of
from avgpipe.model.parts import Whole
from avgpipe.model.proof import OTHER_SUMS, TO_16_BITS, Outcome, Rounding, compared, number_of, some
from avgpipe.runtime.spec import Spec
from avgpipe.runtime.stage import Inputs, folded, folds, unfolded

_log = logging.getLogger("avgpipe")

_SAMPLES = 3  # at most, and no more than a quarter of the batch if that is at least two
_CUT = 8  # likewise, but no more than half of it, to compare micro-batches of two samples or three
_EVERY = 100  # batches between two comparisons of check="every"
_OTHERWISE = {
    True: "the stages do not compute what the model does",
    False: "in evaluation, the stages do not compute what the model does",
}
_ELSEWHERE = "cut it elsewhere by Plan(partition=...), or pass a list of layers"
_RECORDED = (
    "the layers were recorded from its forward, which leaves out hooks, torch.no_grad() blocks, and branches that this "
    "recording did not take. Pass a list of layers, in whose forwards all that stays as it is"
)
_AGAIN = "recomputation changes what the model learns"
_NO_RECOMPUTE = (
    "a layer does something else when it runs a second time. Let it depend on nothing but its input, parameters, "
    'buffers, and the generators of torch, random and numpy, or use recompute="never"'
)
_USABLE = 0.5  # of the free memory


class StageAudit:
    """Compares a model with its stages, on the first rank. ``spec``: what is trained, and how."""

    def __init__(self, spec: Spec) -> None:
        options, plan, layers = spec.options, spec.plan, spec.layers
        self._options, self._device = options, spec.device
        self._inputs_dim = options.batch_dims.inputs
        # Whether stages run again in the backward, batches are split, and a stage's weights have several copies.
        self._recomputes, self._cuts = options.recompute != "never", plan.micro_batches > 1
        self._copies = plan.pipelines > 1 or bool(plan.replication) or (plan.weights or "flush") != "flush"
        self._model, self._call = whole_of(spec.given, layers)
        self._is_of_blocks = isinstance(layers, Whole)
        self._is_recorded = not self._is_of_blocks and not is_chain(self._model)
        self._stages: list[nn.Module] = [
            nn.ModuleList(stage_layers(layers, a, b)) for a, b in pairwise(spec.model.bounds)
        ]
        self._looked = 0
        self.is_over = False  # whether no later batch is compared
        self._parameters: dict[int, nn.Parameter] = {}  # of the copies, by those of the model
        self._originals: dict[int, nn.Parameter] = {}
        self._written: set[str] = set()  # names of parameters that a forward has changed; "" for inputs
        self._foreign: list[torch.Tensor] = []  # leaves that a forward uses and no module holds
        self._left_out = self._reason()
        if self._left_out is None:  # the caller may change the model later
            self._model, *self._stages = map(sharing_copy, (self._model, *self._stages))

    def look(self, batch: int, inputs: Any) -> None:
        """Compare on the inputs of a batch, if it is due; ValueError if the stages compute something else."""
        check = self._options.check
        if self._looked and check != "full" and (check != "every" or batch % _EVERY):
            return
        self._looked += 1
        if self._left_out is not None:
            _log.info("stages are not compared with the model: %s", self._left_out)
        else:
            samples = inputs if check == "full" else _few(inputs, self._inputs_dim)
            around = Outside(self._model.modules())
            with self._putting_back():
                self._compare(batch, to_device(samples, self._device))
                if self._cuts and self._left_out is None and self._looked == 1:
                    few = _few(inputs, self._inputs_dim, _CUT, 2)
                    self._cut_into_micro_batches(to_device(few, self._device))
            if self._looked == 1 and (name := around.changed()) is not None:
                _log.warning(
                    "a forward changes the variable %r outside of the model, as a count of calls: it runs once for "
                    "each micro-batch, and a few times more before training, so that this is not what it is on one "
                    "device. Keep such things in buffers of the model",
                    name,
                )
            if self._left_out is not None and self._looked == 1:
                _log.warning("stages are not compared with the model: %s", self._left_out)
        if self._left_out is not None or check == "first-batch":
            self._model, self._stages = nn.Module(), []  # frees copies of modules
            self.is_over = True

    def _reason(self) -> str | None:
        """Return why there is no comparison; None if there is one."""
        modules = [module for part in (self._model, *self._stages) for module in part.modules()]
        tensors = {id(t): t for m in modules for t in _tensors_in(m)}.values()
        if any(t.is_meta for t in tensors):
            return "the model has no values yet"
        if any(map(is_compiled, modules)):
            return "it is compiled"
        needed = sum(2 * t.nbytes for t in tensors)  # a copy, and gradients
        if needed > (free := _USABLE * free_bytes(self._device)):
            return f"that takes {needed >> 20} MiB on {self._device}, of which {int(free) >> 20} MiB may be used for it"
        return None

    def _compare(self, batch: int, inputs: Any) -> None:
        try:
            training, expected = True, self._run_model(inputs)
            if same := self._touched - self._written:
                self._written |= self._written_of_others(inputs, same)
            if leaves := self._foreign:  # a tensor that a forward makes is a new one in the next forward
                self._run_model(inputs)
                self._foreign = [t for t in leaves if any(t is other for other in self._foreign)]
            # Stages of such a model run parts of its forward again, to make masks and the like, which may
            # draw numbers.
            if self._is_of_blocks and self._draws:
                training, expected = False, self._run_model(inputs, training=False)
            ways = [(expected, training, True, again) for again in [False, True][: 1 + self._recomputes]]
            if training:
                ways.append((self._run_model(inputs, training=False, learns=False), False, False, False))
        except Exception as error:  # of any kind: the stages raise in training what the model cannot do
            self._left_out = (
                f"it does not run on some of the samples of a batch ({reason(error)}). If a tensor of the batch "
                "does not have its samples along dimension 0, say so by Source(batch_dim)"
            )
            return
        self._refuse_writing()
        rounding = self._rounding
        for expected, training, learns, again in ways:
            try:
                found = compared(expected, self._run_stages(inputs, training, learns, again), rounding)
            except Exception as error:  # of any kind, from the layers' code: the model's has run
                found = reason(error)
            if found is None:
                continue
            if (
                unstable := compared(expected, self._run_model(inputs, training, learns), rounding)
            ) is not None:
                self._left_out = (
                    f"it does not do the same twice on the same samples, weights, buffers and random numbers: "
                    f"{unstable}. So it depends on something else, which each forward changes, also those of this "
                    "comparison"
                )
                return
            advice = _NO_RECOMPUTE if again else _RECORDED if self._is_recorded else _ELSEWHERE
            raise ValueError(
                f"{_AGAIN if again else _OTHERWISE[learns]}, on samples of batch {batch}: {found}; "
                f'{advice}. Audit("off") leaves this comparison out'
            )

    def _refuse_writing(self) -> None:
        parameters = sorted(name for name in self._written if name)
        if parameters and self._copies:
            raise ValueError(
                f"the forward writes to the parameter {parameters[0]!r}, as an embedding with max_norm does, and each "
                "pipeline, or version of the weights, has a copy of its own: what is written would not reach the "
                "others. Train with one pipeline and a schedule with a flush, or do it in the optimizer's step. "
                'Audit("off") leaves this out'
            )
        limited = {
            f"{name}.weight" for name, m in self._model.named_modules() if getattr(m, "max_norm", None)
        }
        if others := [name for name in parameters if name not in limited]:
            raise ValueError(
                f"the forward writes to the parameter {others[0]!r}, once for each micro-batch, and a few times more "
                "before training. State that a forward changes belongs in buffers (register_buffer): then it is "
                'compared with whole batches. Audit("off") leaves this out'
            )
        if self._foreign:
            raise ValueError(
                "the forward uses a tensor that requires a gradient and that no module of the model holds, as a "
                "parameter in a closure, a list or a global variable: a Pipeline trains a copy of the model, and that "
                "tensor stays the script's. Make it an attribute of the module that uses it. "
                'Audit("off") leaves this out'
            )
        if "" in self._written and self._looked == 1:
            _log.warning(
                "the forward writes to its inputs: the loader's own tensors may stay as they are, or be changed, "
                "depending on their device. If batches are used again, as in another epoch, let the first layer begin "
                "with x = x.clone()"
            )

    def _cut_into_micro_batches(self, inputs: Any) -> None:
        """Warn of a model that computes something else of samples in micro-batches than of all at once."""
        samples = batch_size(inputs, self._inputs_dim)
        if samples < 2:
            return
        parts = max(2, samples // 2)
        pieces, sizes = split(inputs, parts, samples, self._inputs_dim), sizes_of(samples, parts)
        coins = self._coins
        training = not (self._draws or coins)  # each micro-batch draws its own random numbers
        try:
            expected, draws = self._run_pieces([inputs], [samples], training)
            got, _ = self._run_pieces(pieces, sizes, training)
            found = None if draws else compared(expected, got, self._rounding)
            if found and compared(expected, got, max(self._rounding, OTHER_SUMS)) is None:
                narrow = _Narrow()
                with suppress(Exception), narrow:  # a failure under this mode is no finding
                    self._run_pieces([inputs], [samples], training)
                found = None if narrow.seen else found
        except Exception as error:  # of any kind, from the layers' code, which has run on as many samples
            found = f"it does not run on {sizes[-1]} of them ({reason(error)})"
        if coins:
            _log.warning(
                "a layer draws from the generator of %s, so it draws other numbers for each micro-batch, in the order "
                "in which they happen to run: no run can be repeated. Draw with torch, whose generators are seeded for "
                "each micro-batch and layer",
                " and ".join(coins),
            )
        elif found is not None:
            _log.warning(
                "the model computes something else of %d samples in %d micro-batches than of all of them at once: %s. "
                "A layer mixes samples of a batch, or changes what it keeps in each forward, so training differs from "
                "that on whole batches. If that matters, train with micro_batches=1 and one pipeline",
                *(samples, parts, found),
            )

    def _run_pieces(
        self, pieces: Sequence[Any], sizes: Sequence[int], training: bool
    ) -> tuple[Outcome, bool]:
        """Run the model on pieces of a batch in turn; BatchNorms, which differ by design, as in evaluation.

        Returns:
            The outcome for the samples, and whether random numbers were drawn.
        """
        model, dim = self._copy(self._model, training), self._options.batch_dims.outputs
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._begin()
        outputs, gradients = list[list[torch.Tensor]](), dict[str, torch.Tensor]()
        for m, (piece, size) in enumerate(zip(pieces, sizes)):
            set_position(Position(batch=0, micro_batch=m))
            with self._running(learns=True):
                output = tensors_of(self._call(model, _cloned(piece)))
            output = [t for t in output if t.dim() > dim and t.shape[dim] == size]
            outputs.append(output)
            learnt = [t for t in output if t.requires_grad]
            seeds = [_seed(t, dim, sum(sizes[:m]), sum(sizes)) for t in learnt]
            found = (
                torch.autograd.grad(learnt, list(learning.values()), seeds, allow_unused=True)
                if learnt
                else ()
            )
            for name, grad in zip(learning, found):
                if grad is not None:
                    gradients[name] = gradients[name] + grad if name in gradients else grad
        set_position(Position(batch=0))
        joined = [torch.cat(column, dim).detach() for column in zip(*outputs)]
        outcome = Outcome(joined, {n: some(g) for n, g in gradients.items()}, dict(model.named_buffers()))
        return outcome, bool(self._drawn())

    @contextmanager
    def _putting_back(self) -> Iterator[None]:
        """Make the parameters of the copies, and restore the random generators afterwards."""
        self._begun, self._written, self._foreign = generators(self._device), set(), []
        self._touched: set[str] = set()  # names of parameters that a forward has written to, changed or not
        modules = (self._model, *self._stages)
        self._originals = {id(p): p for m in modules for p in m.parameters()}
        self._parameters = {of: _leaf(p, self._device) for of, p in self._originals.items()}
        before, kept = set_position(Position(batch=0)), self._begun
        try:
            yield
        finally:
            set_position(before)
            set_generators(kept)
            self._parameters, self._originals, self._foreign = {}, {}, []

    def _copy(self, module: nn.Module, training: bool) -> nn.Module:
        """Copy a module. All copies share their parameters, which a run begins with their first values."""
        buffers = {id(t): t.detach().clone().to(self._device) for t in module.buffers()}
        made = copied(module, self._parameters | buffers)
        Modes(made, self._options.keeps_modes).train(training)
        return made

    def _begin(self) -> None:
        """Seed all generators alike for each run, and undo what the last run wrote."""
        with torch.no_grad():
            for of, original in self._originals.items():
                if not _is_as(self._parameters[of], original):
                    self._parameters[of].copy_(original)
        key_layers(self._device, None)
        set_generators(self._begun)
        seed_generators(self._device, 0)
        self._begun = generators(self._device)

    def _drawn(self) -> list[str]:
        """Name the generators that were used since the last :meth:`_begin`."""
        return moved(self._begun, generators(self._device))

    @contextmanager
    def _running(self, learns: bool) -> Iterator[None]:
        dtype = self._options.autocast if learns else None
        with (
            torch.set_grad_enabled(learns),
            nullcontext() if dtype is None else torch.autocast(self._device.type, dtype),
        ):
            yield

    def _run_model(self, inputs: Any, training: bool = True, learns: bool = True) -> Outcome:
        model = self._copy(self._model, training)
        learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._begin()
        given = _cloned(inputs)
        versions = {name: p._version for name, p in model.named_parameters()}
        begun = [t._version for t in tensors_of(given) if not t.is_inference()]
        with self._running(learns):
            output = tensors_of(self._call(model, given))
        if training and learns:
            kept = dict(self._model.named_parameters())
            self._written |= {n for n, p in model.named_parameters() if not _is_as(p, kept.get(n, p))}
            self._touched = {n for n, p in model.named_parameters() if p._version != versions[n]}
            if begun != [t._version for t in tensors_of(given) if not t.is_inference()]:
                self._written.add("")
            into = tensors_of(given)
            known = {id(t) for t in (*model.parameters(), *into, *leaves_of(into))}
            self._foreign = [t for t in leaves_of(output) if id(t) not in known]
        if training:
            drawn = self._drawn()
            self._coins = [name for name in drawn if name in callers_generators()]
            self._draws = len(drawn) > len(self._coins)
        found = _gradients(output, list(learning.values()), None)
        gradients = {name: some(grad) for name, grad in zip(learning, found) if grad is not None}
        return Outcome([t.detach() for t in output], gradients, dict(model.named_buffers()))

    def _written_of_others(self, inputs: Any, names: Collection[str]) -> set[str]:
        """Return which of the parameters ``names`` a forward changes, though not with their present values.

        A weight that copies another one has the same values at first, so this runs with other weights. A
        weight that is multiplied by 1 stays the same with any.
        """
        model = self._copy(self._model, training=True)
        self._begin()
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for n, p in enumerate(parameters.values(), 1):
                if p.is_floating_point() or p.is_complex():
                    p.mul_(1 + 0.1 * n / len(parameters)).add_(0.01 * n / len(parameters))
        before = {name: parameters[name].detach().clone() for name in names}
        with suppress(Exception), self._running(learns=True):  # it may not run with other weights
            self._call(model, _cloned(inputs))
        return {name for name in names if not _is_as(parameters[name], before[name])}

    @property
    def _rounding(self) -> Rounding:
        """The least tolerance for rounding: larger if layers compute in 16 bits, by option or the caller."""
        is_cast = self._options.autocast is not None or torch.is_autocast_enabled(self._device.type)
        return TO_16_BITS if is_cast else (0.0, 0.0)

    def _run_stages(self, inputs: Any, training: bool, learns: bool, again: bool) -> Outcome:
        """``again``: stages run once more in their backward."""
        stages = [self._copy(stage, training) for stage in self._stages]
        self._begin()
        value, passed = inputs, list[tuple[list[torch.Tensor], list[torch.Tensor]]]()
        with self._running(learns):
            for k, stage in enumerate(stages):
                given = pytree.tree_map_only(torch.Tensor, _received, value)
                is_last = k + 1 == len(stages)
                value = _run(stage, Inputs(k), given, self._device, again, is_last)
                passed.append((wanting_gradients(given), tensors_of(value)))
        output, grads = passed[-1][1], None
        total: dict[int, torch.Tensor] = {}
        for stage, (given, made) in zip(reversed(stages), reversed(passed)):
            learning = [p for p in stage.parameters() if p.requires_grad]
            found = _gradients(made, [*given, *learning], grads)
            grads = found[: len(given)]
            for p, grad in zip(learning, found[len(given) :]):
                if grad is not None:
                    total[id(p)] = total[id(p)] + grad if id(p) in total else grad
        names = {id(self._parameters[id(p)]): name for name, p in self._model.named_parameters()}
        gradients = {names[of]: some(grad) for of, grad in total.items() if of in names}
        return Outcome([t.detach() for t in output], gradients, self._buffers_of(stages))

    def _buffers_of(self, stages: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
        names = {id(t): name for name, t in self._model.named_buffers()}
        found = {name: t.detach() for name, t in self._model.named_buffers()}  # buffers of no stage stay
        for given, stage in zip(self._stages, stages):
            here = dict(stage.named_buffers())
            found |= {names[id(t)]: here[local] for local, t in given.named_buffers() if id(t) in names}
        return found


class _Narrow(TorchDispatchMode):
    """Notes whether something is computed in less than float64, as parts of a model may be in any case.

    Attributes:
        seen: whether something was.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        dtypes = {t.dtype for t in tensors_of(made)}
        self.seen |= any(
            (d.is_floating_point and d.itemsize < 8) or (d.is_complex and d.itemsize < 16) for d in dtypes
        )
        return made


_Call = Callable[[Any, Any], Any]  # of a copy of the model, on the inputs of a batch


def whole_of(model: Any, layers: Sequence[nn.Module]) -> tuple[nn.Module, _Call]:
    """Return the module that layers were made from, and the function that calls it, or a copy of it."""
    if isinstance(layers, Whole):
        return layers.model, layers.called
    module = without_adapters(original(model))
    if isinstance(module, nn.Module) and not is_chain(module):
        return module, _called
    return nn.ModuleList(module), lambda of, inputs: reduce(lambda value, layer: layer(value), of, inputs)


def _called(model: nn.Module, inputs: Any) -> Any:
    from avgpipe.model.example import Arguments

    call = Arguments.on(model, inputs)
    return model(*call.args, **call.kwargs)


def _run(stage: Any, inputs: Inputs, value: Any, device: torch.device, again: bool, is_last: bool) -> Any:
    def layers(value: Any, place: Any) -> Any:
        value = unfolded(value) if folds(stage) else value
        for layer in stage:
            value = layer(value)
        return folded(value) if folds(stage) and not is_last else value

    def run(value: Any) -> Any:
        return inputs.run(layers, value, position(), stage.training, again)

    if not again:
        return run(value)
    drawn = [(generator, generator.get_state()) for generator in generators_of(device)]

    def run_as_before(value: Any) -> Any:
        for generator, state in drawn:
            generator.set_state(state)
        return run(value)

    # Torch would keep the random states of the device types alone that it knows.
    from avgpipe.runtime.repeated import Repeated

    twice = Repeated(stage).forward(run_as_before)
    return checkpoint(twice, value, use_reentrant=False, preserve_rng_state=False)


def _gradients(
    made: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None] | None
) -> Sequence[torch.Tensor | None]:
    """Return gradients from ``grads``; without these, from a number computed from all tensors of ``made``."""
    learnt = [t for t in made if t.requires_grad]
    if not learnt or not wanted:
        return [None] * len(wanted)
    if grads is None:
        return torch.autograd.grad(number_of(learnt), wanted, allow_unused=True)
    pairs = [(t, grad) for t, grad in zip(learnt, grads) if grad is not None]
    if not pairs:
        return [None] * len(wanted)
    made, into = zip(*pairs)
    return torch.autograd.grad(made, wanted, into, allow_unused=True)


def _received(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a message delivers it, in memory of its own."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _leaf(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a parameter with the same values in memory of its own, with a gradient of its own."""
    leaf = nn.Parameter(parameter.detach().to(device, copy=True), parameter.requires_grad)
    vars(leaf).update(vars(parameter))
    return leaf


def _is_as(copy: torch.Tensor, original: torch.Tensor) -> bool:
    """Whether the values still equal the original's. Tensors that cannot be compared count as equal."""
    with suppress(NotImplementedError, RuntimeError, TypeError):
        a, b = copy.detach(), original.detach().to(copy.device)
        return torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())  # NaN equals nothing
    return True


def _tensors_in(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from (t for of in (module._parameters, module._buffers) for t in of.values() if t is not None)


def _few(inputs: Any, dims: Any, most: int = _SAMPLES, part: int = 4) -> Any:
    """Return some samples of a batch; all of it if the dimension of samples is unknown."""
    try:
        samples = batch_size(inputs, dims)
    except ValueError:
        return inputs
    few = max(2, min(most, samples // part))
    return split(inputs, max(1, samples // few), samples, dims)[0]


def _seed(output: torch.Tensor, dim: int, first: int, samples: int) -> torch.Tensor:
    """Return a gradient of an output from sample ``first`` on, different for each sample and element."""
    shape = list(output.shape)
    shape[dim] = samples
    numbers = torch.linspace(0.5, 1.5, math.prod(shape), device=output.device, dtype=output.dtype)
    return numbers.reshape(shape).narrow(dim, first, output.shape[dim])


def _cloned(inputs: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, inputs)
