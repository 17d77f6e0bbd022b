"""Optimizer's step, pull and update in one pass, against torch's optimizer with the rules after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import avgpipe_ext
from avgpipe.bench.kernels import baselines
from avgpipe.bench.kernels.baselines import ADAMW, ALPHA, LR, MU, STEP
from avgpipe.bench.kernels.compiled import compiled
from avgpipe.bench.kernels.cupy_kernels import cupy_variants
from avgpipe.bench.kernels.limits import limit
from avgpipe.bench.kernels.settings import KernelSettings
from avgpipe.bench.kernels.workspace import Workspace, make_section, model_shapes, one_tensor
from avgpipe.bench.section import Section, Skipped, Variant

# Values that the update reads and writes for each element, with update += ... ; one fewer with update = ...
ADAMW_VALUES = 10  # x, exp_avg, exp_avg_sq and update read and written; grad and z read
SGD_VALUES = 8  # x, momentum and update read and written; grad and z read
# x, x_before, grad, z, update and the state; what the foreach optimizers keep for a moment.
_ARRAYS = {"adamw": 7 + 3, "sgd": 6 + 1}


def sections(settings: KernelSettings, elements: int) -> list[Section]:
    made = []
    for question, make in (("adamw", adamw), ("sgd", sgd)):
        asks = f"{question}'s step, the update for the reference and the pull (staleness 1): in one pass, or apart?"
        for case, shapes in (("one tensor", one_tensor(elements)), ("61 tensors", model_shapes(elements))):
            if settings.asks(question):
                made.append(make_section(settings, shapes, (question, case, asks), _ARRAYS[question], make))
    return made


def elastic_adamw(space: Workspace, *, accumulate: bool = True, step: Any = STEP) -> Callable[[], object]:
    """Our fused pass over the workspace's one tensor or list."""
    x, grad, first, second, z, update = space.operands("x", "grad", "first", "second", "z", "update")
    options = adamw_options()
    return lambda: avgpipe_ext.elastic_adamw_(
        *(x, grad, first, second, z, update, ALPHA, 1), step=step, accumulate=accumulate, **options
    )


def adamw_options() -> dict[str, Any]:
    """ADAMW in the operators' words."""
    beta1, beta2 = ADAMW["betas"]
    return {**{k: ADAMW[k] for k in ("lr", "eps", "weight_decay")}, "beta1": beta1, "beta2": beta2}


def _elastic_sgd(space: Workspace, accumulate: bool = True) -> Callable[[], object]:
    x, grad, first, z, update = space.operands("x", "grad", "first", "z", "update")
    return lambda: avgpipe_ext.elastic_sgd_(
        *(x, grad, first, z, update, ALPHA, 1), lr=LR, mu=MU, accumulate=accumulate
    )


def adamw(space: Workspace) -> list[Variant | Skipped]:
    moved, less = space.bytes_of(ADAMW_VALUES), space.bytes_of(ADAMW_VALUES - 1)
    ours = elastic_adamw(space)
    found: list[Variant | Skipped] = [
        limit(space),
        Variant("elastic_adamw_", "ours", moved, ours),
        *_graph("elastic_adamw_", space, moved),
        Variant(
            "elastic_adamw_, accumulate=False",
            "ours",
            less,
            elastic_adamw(space, accumulate=False),
            against=(),
        ),
    ]
    found += _separate(space, "AdamW", baselines.adamw, baselines.adamw_function(space), moved)
    return [*found, *cupy_variants(space, "adamw", moved)]


def sgd(space: Workspace) -> list[Variant | Skipped]:
    moved, less = space.bytes_of(SGD_VALUES), space.bytes_of(SGD_VALUES - 1)
    found: list[Variant | Skipped] = [
        limit(space),
        Variant("elastic_sgd_", "ours", moved, _elastic_sgd(space)),
        Variant(
            "elastic_sgd_, accumulate=False", "ours", less, _elastic_sgd(space, accumulate=False), against=()
        ),
    ]
    found += _separate(space, "SGD", baselines.sgd, baselines.sgd_function(space), moved)
    return [*found, *cupy_variants(space, "sgd", moved)]


def _separate(
    space: Workspace,
    name: str,
    optimizer: Callable[..., torch.optim.Optimizer],
    step: Callable[[], None],
    moved: float,
) -> list[Variant | Skipped]:
    """torch's optimizer and the rules after it, in the forms that torch has; `step` is the one for a compiler."""
    found: list[Variant | Skipped] = []
    for kind in ("fused", "foreach"):
        run = baselines.step_then_rule(space, optimizer(space, **{kind: True}))
        found.append(Variant(f"{name}({kind}) + foreach rule", "baseline", moved, run))
    return [*found, compiled(space, moved, baselines.whole_update(space, step))]


def _graph(name: str, space: Workspace, moved: float) -> list[Variant]:
    """Our pass replayed from a CUDA graph, the counter of steps on the device; nothing on the CPU."""
    if space.device != "cuda":
        return []
    run = elastic_adamw(space, step=torch.full((), float(STEP), device="cuda"))
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what the first call sets up must not be captured
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return [Variant(f"{name} in a CUDA graph", "ours", moved, graph.replay)]
