"""A list of many small tensors, against the same bytes in one arena."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import avgpipe_ext
from avgpipe.bench.kernels.baselines import ALPHA, STEP
from avgpipe.bench.kernels.limits import limit
from avgpipe.bench.kernels.optimizers import ADAMW_VALUES, adamw_options
from avgpipe.bench.kernels.settings import KernelSettings
from avgpipe.bench.kernels.workspace import Workspace, equal_shapes, make_section
from avgpipe.bench.section import Section, Variant

_TENSORS, _SMALL = 400, 4096
_ASKS = (
    "What does a list of 400 tensors cost beside one arena of the same bytes? (A ratio of 0.91 is 1.1 times.)"
)
# By operator: its operands and the values it moves for each element.
_OPERANDS = {"elastic_adamw_": ("x", "grad", "first", "second", "z", "update"), "elastic_pull_": ("x", "z")}
_VALUES = {"elastic_adamw_": ADAMW_VALUES, "elastic_pull_": 3}


def sections(settings: KernelSettings, elements: int) -> list[Section]:
    each = max(1, elements // _TENSORS)
    made = []
    for size in dict.fromkeys((each, min(each, _SMALL))):
        for operator, operands in _OPERANDS.items():
            names = ("lists", f"{operator}, {_TENSORS} x {size}", _ASKS)
            arrays = 2 * len(operands)
            made.append(
                make_section(settings, equal_shapes(_TENSORS, size), names, arrays, list_or_arena(operator))
            )
    return made if settings.asks("lists") else []


def list_or_arena(operator: str) -> Callable[[Workspace], list[Variant]]:
    names, values = _OPERANDS[operator], _VALUES[operator]

    def make(space: Workspace) -> list[Variant]:
        moved = space.bytes_of(values)
        pieces, arena = [space.tensors(name) for name in names], [space.flat(name) for name in names]
        return [
            limit(space),
            Variant("list", "ours", moved, lambda: _call(operator, pieces)),
            Variant("one arena", "baseline", moved, lambda: _call(operator, arena)),
        ]

    return make


def _call(operator: str, operands: list[Any]) -> None:
    if operator == "elastic_pull_":
        x, z = operands
        avgpipe_ext.elastic_pull_(x, z, ALPHA)
    else:
        x, grad, first, second, z, update = operands
        avgpipe_ext.elastic_adamw_(x, grad, first, second, z, update, ALPHA, 1, step=STEP, **adamw_options())
