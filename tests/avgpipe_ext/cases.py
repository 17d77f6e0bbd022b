"""The operators with arguments to try them on, and how far their results may be from their twins'."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import avgpipe_ext
from tests.avgpipe_ext import formulas, reference
from tests.avgpipe_ext.rounding import Rounded, assert_within, zero_of

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIXTEEN_BIT = (torch.bfloat16, torch.float16)
REPLICAS = 2  # of a round's case


def _flat(lists):
    """One list of the tensors in the lists; a tensor beside them counts as a list of one."""
    return [t for item in lists for t in (item if isinstance(item, list | tuple) else [item])]


@dataclass(frozen=True)
class Case:
    """An operator with its scalar arguments, called with one flat list of tensors, or of lists of tensors."""

    name: str
    tensors: tuple[str, ...]  # names of its tensor arguments
    scalars: tuple[float, ...]
    formula: Callable[..., tuple[Any, ...]]  # of tensors or numbers: what becomes of each
    written: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    label: str = ""

    def arrange(self, tensors, nothing=None):
        """The flat list as the operator's leading arguments."""
        if self.name == "elastic_sgd_" and len(tensors) == 4:
            return (*tensors[:2], nothing, *tensors[2:])
        if self.name == "trial_sgd_" and len(tensors) == 4:
            return (*tensors[:3], nothing, *tensors[3:])
        if self.name != "elastic_round_":
            return tuple(tensors)
        *replicas, z = tensors
        kinds = [replicas[i : i + REPLICAS] for i in range(0, len(replicas), REPLICAS)]
        xs, grads, *states = [_flat(kind) for kind in kinds]
        return xs, grads, _flat(states), z

    def _bind(self, function):
        def call(*arguments, **options):
            count = len(self.tensors)
            scalars = arguments[count:]
            return function(*self.arrange(arguments[:count]), *scalars, **{**self.options, **options})

        return call

    @property
    def operator(self):
        return self._bind(getattr(avgpipe_ext, self.name))

    @property
    def twin(self):
        return self._bind(getattr(reference, self.name))

    @property
    def packet(self):
        return getattr(torch.ops.avgpipe, self.name)

    @property
    def raw_options(self):
        """Options as the operator itself takes them."""
        options = dict(self.options)
        if "step" in options or self.name == "elastic_round_":
            options["step"] = torch.tensor(float(options.get("step", 1)))
        return options

    def raw(self, tensors):
        """The overload and its positional arguments, as the wrapper passes them."""
        is_list = not isinstance(tensors[-1], torch.Tensor)
        overload = self.packet.list if is_list else self.packet.default
        return overload, (*self.arrange(tensors, [] if is_list else None), *self.scalars)

    @property
    def squares(self):
        """The arguments that hold means of squares, never negative."""
        if "exp_avg_sq" in self.tensors:
            return {"exp_avg_sq"}
        return {f"states[{i}]" for i in range(REPLICAS, 2 * REPLICAS)}

    def __str__(self) -> str:
        return f"{self.name}{self.label}"


RULE = ("z", "update")
EMPTY: dict[str, Any] = {}
EASGD_RULE = {"from_step": 0.0, "from_force": 1.0}
MIXED_RULE = {"from_step": 0.25, "from_force": -1.5}


def _pull(x, z, alpha, **stores):
    return formulas.pull(x, z, alpha), z


def _step(x, x_before, z, update, alpha, staleness, rule=EMPTY, **stores):
    new, grown = formulas.step(x, x_before, z, update, alpha, staleness, **rule)
    return new, x_before, z, grown


def _easgd(x, z, update, alpha, **stores):
    new, grown = formulas.easgd(x, z, update, alpha)
    return new, z, grown


def _apply(z, update, scale, **stores):
    return formulas.apply(z, [update], scale), zero_of(update)


def _optimized(x, grad, *rest, optimizer, rule=EMPTY, **stores):
    *state, z, update, alpha, staleness = rest
    new, new_state = optimizer(x, grad, state)
    new, grown = formulas.step(new, x, z, update, alpha, staleness, **rule)
    return new, grad, *new_state, z, grown


def _rounds(*rest, optimizer, **stores):
    *tensors, z, alpha = rest
    xs, grads, states = tensors[:REPLICAS], tensors[REPLICAS : 2 * REPLICAS], tensors[2 * REPLICAS :]
    xs, states, z = formulas.round_(optimizer, xs, grads, states, z, alpha, **stores)
    return *xs, *grads, *states, z


def rule_options(options):
    """Those of the averaging rule."""
    return {k: v for k, v in options.items() if k in ("from_step", "from_force", "accumulate")}


def _optimizer_options(options):
    return {k: v for k, v in options.items() if k not in rule_options(options)}


def sgd(label="", staleness=0, alpha=0.3, **options):
    """A case of `elastic_sgd_`."""
    state = ("momentum",) if options.get("mu") else ()
    optimizer = partial(formulas.sgd, **_optimizer_options(options))
    formula = partial(_optimized, optimizer=optimizer, rule=rule_options(options))
    names = ("x", "grad", *state, *RULE)
    return Case(
        "elastic_sgd_", names, (alpha, staleness), formula, ("x", *state, "update"), options, "-" + label
    )


def adam(label="", staleness=0, alpha=0.3, **options):
    """A case of `elastic_adamw_`."""
    optimizer = partial(formulas.adam, **_optimizer_options(options))
    formula = partial(_optimized, optimizer=optimizer, rule=rule_options(options))
    state = ("exp_avg", "exp_avg_sq")
    names = ("x", "grad", *state, *RULE)
    return Case(
        "elastic_adamw_", names, (alpha, staleness), formula, ("x", *state, "update"), options, "-" + label
    )


def round_case(label="", alpha=0.3, **options):
    """A case of `elastic_round_` with two replicas."""
    name, steps = options["optimizer"], {k: v for k, v in options.items() if k != "optimizer"}
    if name == "sgd":
        kinds, optimizer = int(bool(options.get("mu"))), partial(formulas.sgd, **steps)
    else:
        kinds, optimizer = (
            2,
            partial(formulas.adam, **{"decoupled": name == "adamw", "weight_decay": 0.0, **steps}),
        )
    xs, grads = ([f"{kind}[{i}]" for i in range(REPLICAS)] for kind in ("xs", "grads"))
    states = [f"states[{i}]" for i in range(kinds * REPLICAS)]
    formula = partial(_rounds, optimizer=optimizer)
    written = (*xs, *states, "z")
    return Case(
        "elastic_round_", (*xs, *grads, *states, "z"), (alpha,), formula, written, options, "-" + label
    )


PULL = Case("elastic_pull_", ("x", "z"), (0.3,), _pull, ("x",))
STEP = Case("elastic_step_", ("x", "x_before", *RULE), (0.3, 0), _step, ("x", "update"), label="-staleness0")
STALE_STEP = Case("elastic_step_", STEP.tensors, (0.3, 1), _step, STEP.written, label="-staleness1")
EASGD = Case("easgd_step_", ("x", *RULE), (0.3,), _easgd, ("x", "update"))
MIXED = Case(
    "elastic_step_",
    STEP.tensors,
    (0.3, 1),
    partial(_step, rule=MIXED_RULE),
    STEP.written,
    MIXED_RULE,
    "-mixed",
)
APPLY = Case("reference_apply_", RULE, (0.3,), _apply, RULE)
RULES = (PULL, STEP, STALE_STEP, MIXED, EASGD, APPLY)
NESTEROV = {"mu": 0.9, "nesterov": True, "weight_decay": 0.01}
OPTIMIZERS = (
    sgd("plain", lr=0.1, weight_decay=0.01),
    sgd("nesterov-staleness1", staleness=1, lr=0.1, **NESTEROV),
    sgd("easgd", lr=0.1, mu=0.9, dampening=0.1, maximize=True, accumulate=False, **EASGD_RULE),
    adam("decoupled", step=3, lr=0.01),
    adam("coupled-staleness1", staleness=1, step=7, lr=0.01, decoupled=False, weight_decay=0.1),
)
ROUNDS = (
    round_case("plain", optimizer="sgd", lr=0.1),
    round_case("nesterov", optimizer="sgd", lr=0.1, **NESTEROV),
    round_case("adamw", optimizer="adamw", lr=0.01, step=3, weight_decay=0.01),
)


def trial(case):
    """The trial of the step of an `elastic_sgd_` or `elastic_adamw_` case, from the same state."""
    options = _optimizer_options(case.options)
    is_adam = case.name == "elastic_adamw_"
    optimizer = partial(formulas.adam if is_adam else formulas.sgd, **options)
    if is_adam:
        options = {"weight_decay": 1e-2, **options, "step": options["step"] - 1}

    def formula(x, z, grad, *rest, **stores):
        state = rest[:-1]
        return optimizer(z, grad, state)[0], z, grad, *state, -grad

    name = "trial_adam_" if is_adam else "trial_sgd_"
    names = ("x", "z", "grad", *case.tensors[2:-2], "update")
    return Case(name, names, (), formula, ("x", "update"), options, case.label)


TRIAL_SGD = trial(sgd("nesterov", lr=0.1, **NESTEROV))
TRIAL_ADAM = trial(adam("decoupled", step=6, lr=0.01))
TRIALS = (
    trial(sgd("plain", lr=0.1, weight_decay=0.01)),
    TRIAL_SGD,
    trial(sgd("first", lr=0.1, mu=0.9, dampening=0.1, maximize=True, first_step=True)),
    TRIAL_ADAM,
    trial(adam("coupled-first", step=1, lr=0.01, decoupled=False, weight_decay=0.1)),
)


def predict_adam(label="", **options):
    """A case of `predict_adam_`."""

    def formula(out, x, first, second, **stores):
        return formulas.predict_adam(x, first, second, **options), x, first, second

    names = ("out", "x", "exp_avg", "exp_avg_sq")
    return Case("predict_adam_", names, (), formula, ("out",), options, "-" + label)


def correct(label="", momentum=0.0, gain=0.0, **options):
    """A case of `correct_update_`."""

    def formula(x, before, last, momentum, gain, **stores):
        new, v = formulas.correct(x, before, last, momentum, gain, **options)
        return new, before, v

    names, written = ("x", "before", "last"), ("x", "last")
    return Case("correct_update_", names, (momentum, gain), formula, written, options, "-" + label)


def _predict_sgd(out, x, momentum, scale, **stores):
    return formulas.predict_sgd(x, momentum, scale), x, momentum


PREDICT_SGD = Case("predict_sgd_", ("out", "x", "momentum"), (0.3,), _predict_sgd, ("out",))
PREDICT_ADAM = predict_adam("decayed", updates=3, step=5, lr=0.01, weight_decay=0.1)
CORRECT = correct("nesterov", 0.9, 0.9)
PREDICTIONS = (PREDICT_SGD, PREDICT_ADAM, predict_adam("coupled", updates=1, step=1, lr=0.01, beta1=0.5))
CORRECTIONS = (
    CORRECT,
    correct("error-feedback", 0.0, 1.0),
    correct("first", 0.9, 0.9, first=True),
    correct("first-error-feedback", 0.0, 1.0, first=True),
)
LATE = PREDICTIONS + CORRECTIONS
CASES = RULES + OPTIMIZERS + ROUNDS + TRIALS + LATE


def arguments(case, shape, dtypes, seed=0, device="cpu"):
    """One tensor per argument of the case; dtypes is one dtype or one per argument."""
    if isinstance(dtypes, torch.dtype):
        dtypes = (dtypes,) * len(case.tensors)
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator).to(dtype).to(device) for dtype in dtypes]
    return [t.abs() if name in case.squares else t for name, t in zip(case.tensors, tensors)]


def mixes(case, dtype):
    """All choices of float32 instead of a 16-bit dtype for the arguments beside x (the same for all replicas)."""
    kinds = [name.split("[")[0] if "states" not in name else name for name in case.tensors]
    kinds = [f"states{int(k[7]) // REPLICAS}" if k.startswith("states[") else k for k in kinds]
    others = list(dict.fromkeys(kinds[1:]))
    others = [kind for kind in others if kind != kinds[0]]
    for choice in itertools.product((dtype, torch.float32), repeat=len(others)):
        chosen = {kinds[0]: dtype, **dict(zip(others, choice))}
        yield [chosen[kind] for kind in kinds]


def same(a, b):
    """Equal, with NaN where the other has NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))


def copies(tensors):
    """Of tensors, or of lists of them; strides are kept."""
    return [t.clone() if isinstance(t, torch.Tensor) else [s.clone() for s in t] for t in tensors]


def exact(case, tensors, **options):
    """What the case's twin makes of its arguments when nothing is rounded to less than float64."""
    results = [t.double() if t.dtype != torch.float64 else t.clone() for t in tensors]
    case.twin(*results, *case.scalars, **options)
    return results


def bounds(case, tensors, scalars=None, arithmetic=None):
    """The formula's values for the case's arguments, with bounds of a chain's errors, one per tensor.

    The arithmetic is float32, or float64 for float64 tensors, unless given; what is stored in 16 bits is rounded
    once more.
    """
    if arithmetic is None:
        arithmetic = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    numbers = [Rounded(t.double(), arithmetic) for t in tensors]
    stores = {}
    if case.name == "elastic_round_":
        stores = {
            "store_x": lambda x: x.stored(tensors[0].dtype),
            "store_z": lambda z: z.stored(tensors[-1].dtype),
        }
    results = case.formula(*numbers, *(scalars or case.scalars), **stores)
    return [number.stored(t.dtype) for number, t in zip(results, tensors)]


def assert_near(case, results, before, scalars=None):
    """The results are within the chain's bound of the twin's, and what is only read is as before.

    The twin's own float64 roundings are a chain of the same length: twice the bound where they matter.
    """
    limits = bounds(case, before, scalars)
    expected = [t.double() if t.dtype != torch.float64 else t.clone() for t in before]
    case.twin(*expected, *(scalars or case.scalars))
    for name, result, value, old, limit in zip(case.tensors, results, expected, before, limits):
        if name in case.written:
            assert_within(result, value, limit, times=2 if result.dtype == torch.float64 else 1)
        else:
            assert same(result, old)
