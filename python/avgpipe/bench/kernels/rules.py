"""The averaging rules alone, against torch's foreach functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import avgpipe_ext
from avgpipe.bench.kernels import baselines
from avgpipe.bench.kernels.baselines import ALPHA
from avgpipe.bench.kernels.cupy_kernels import cupy_variants
from avgpipe.bench.kernels.limits import limit
from avgpipe.bench.kernels.settings import KernelSettings
from avgpipe.bench.kernels.workspace import Workspace, make_section, model_shapes, one_tensor
from avgpipe.bench.section import Section, Skipped, Variant

_PULL_VALUES = 3  # x read and written, z read
_STEP_VALUES = 6  # x and update read and written; x_before and z read
_EASGD_VALUES = 5  # x and update read and written, z read
_REPLICAS = 8  # of the question "apply"


def sections(settings: KernelSettings, elements: int) -> list[Section]:
    asked = [
        ("pull", "x += alpha (z - x): in one pass, or in foreach functions?", 3, pull),
        ("step", "After any optimizer's step, update and force: in one pass, or apart?", 4, step),
        ("easgd", "Rule easgd: in one pass, or apart?", 4, easgd),
    ]
    made = []
    for question, asks, arrays, make in asked:
        for case, shapes in (("one tensor", one_tensor(elements)), ("61 tensors", model_shapes(elements))):
            if settings.asks(question):
                made.append(make_section(settings, shapes, (question, case, asks), arrays, make))
    if settings.asks("apply"):
        asks = f"The updates of {_REPLICAS} replicas into the reference: together, or one after another?"
        names = ("apply", f"N = {_REPLICAS}", asks)
        made.append(make_section(settings, one_tensor(elements), names, 1 + _REPLICAS, apply))
    return made


def _baseline(name: str, moved: float, run: Callable[[], object]) -> Variant:
    return Variant(name, "baseline", moved, run)


def pull(space: Workspace) -> list[Variant | Skipped]:
    x, z = space.operands("x", "z")
    xs, zs = space.tensors("x"), space.tensors("z")
    moved = space.bytes_of(_PULL_VALUES)

    def multiply_and_add() -> None:
        torch._foreach_mul_(xs, 1 - ALPHA)
        torch._foreach_add_(xs, zs, alpha=ALPHA)

    def allocate() -> None:
        torch._foreach_add_(xs, torch._foreach_sub(zs, xs), alpha=ALPHA)

    return [
        limit(space),
        Variant("elastic_pull_", "ours", moved, lambda: avgpipe_ext.elastic_pull_(x, z, ALPHA)),
        _baseline("_foreach_mul_ + _foreach_add_", moved, multiply_and_add),
        _baseline("_foreach_lerp_", moved, lambda: torch._foreach_lerp_(xs, zs, ALPHA)),
        _baseline("_foreach_sub (allocates) + _foreach_add_", moved, allocate),
        *cupy_variants(space, "pull", moved),
    ]


def step(space: Workspace) -> list[Variant | Skipped]:
    x, before, z, update = space.operands("x", "before", "z", "update")
    moved = space.bytes_of(_STEP_VALUES)

    def ours(accumulate: bool) -> None:
        avgpipe_ext.elastic_step_(x, before, z, update, ALPHA, 1, accumulate=accumulate)

    return [
        limit(space),
        Variant("elastic_step_", "ours", moved, lambda: ours(accumulate=True)),
        Variant(
            "elastic_step_, accumulate=False",
            "ours",
            space.bytes_of(_STEP_VALUES - 1),
            lambda: ours(accumulate=False),
            against=(),
        ),
        _baseline("4 foreach passes", moved, baselines.step_rule(space)),
    ]


def easgd(space: Workspace) -> list[Variant | Skipped]:
    x, z, update = space.operands("x", "z", "update")
    xs, zs, updates = (space.tensors(name) for name in ("x", "z", "update"))
    moved = space.bytes_of(_EASGD_VALUES)

    def in_place() -> None:
        torch._foreach_add_(updates, xs, alpha=ALPHA)
        torch._foreach_sub_(updates, zs, alpha=ALPHA)
        torch._foreach_lerp_(xs, zs, ALPHA)

    def allocate() -> None:
        forces = torch._foreach_sub(xs, zs)
        torch._foreach_mul_(forces, ALPHA)
        torch._foreach_sub_(xs, forces)
        torch._foreach_add_(updates, forces)

    return [
        limit(space),
        Variant("easgd_step_", "ours", moved, lambda: avgpipe_ext.easgd_step_(x, z, update, ALPHA)),
        _baseline("3 foreach passes in place", moved, in_place),
        _baseline("4 foreach passes, allocating", moved, allocate),
    ]


def apply(space: Workspace) -> list[Variant | Skipped]:
    """z is read and written once and every update read once; with zero=True the updates are written too."""
    z, updates = space.flat("z"), [space.flat(f"update {i}") for i in range(_REPLICAS)]
    adds, adds_and_zero = f"{_REPLICAS} _foreach_add_", f"{_REPLICAS} (_foreach_add_ + _foreach_zero_)"
    keeps, zeroes = space.bytes_of(2 + _REPLICAS), space.bytes_of(2 + 2 * _REPLICAS)
    return [
        limit(space),
        Variant("reference_apply_", "ours", zeroes, lambda: _apply_all(z, updates, True), (adds_and_zero,)),
        Variant(
            "reference_apply_, zero=False", "ours", keeps, lambda: _apply_all(z, updates, False), (adds,)
        ),
        _baseline(adds_and_zero, zeroes, lambda: _add_all(z, updates, zero=True)),
        _baseline(adds, keeps, lambda: _add_all(z, updates, zero=False)),
    ]


def _apply_all(z: Tensor, updates: Sequence[Tensor], zero: bool) -> None:
    avgpipe_ext.reference_apply_(z, updates, 1 / _REPLICAS, zero=zero)


def _add_all(z: Tensor, updates: Sequence[Tensor], *, zero: bool) -> None:
    for update in updates:
        torch._foreach_add_([z], [update], alpha=1 / _REPLICAS)
        if zero:
            torch._foreach_zero_([update])
