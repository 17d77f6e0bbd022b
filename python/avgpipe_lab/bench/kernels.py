"""``avgpipe bench kernels``: avgpipe's operators, the same work in plain torch, and the limit of this memory.

Bytes are those that the update must move: each operand that is read and each that is written counts once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

import avgpipe_ext as ext
from avgpipe.cli.output import arguments, show_status
from avgpipe.cli.resolve import check_device
from avgpipe_lab.bench import Way, check_memory, check_names, measuring, report, summarise
from avgpipe_lab.commands import KernelsConfig

_WHOLE = "'s step, the update for the reference and the pull (staleness 1): in one pass, or apart?"
# Values that must be moved for each element, and the question.
QUESTIONS = {
    "limit": (0, "How fast is this memory?"),
    "adamw": (10, f"adamw{_WHOLE}"),
    "sgd": (8, f"sgd{_WHOLE}"),
    "pull": (3, "x += alpha (z - x): in one pass, or in foreach functions?"),
    "step": (6, "After any optimizer's step, update and force: in one pass, or apart?"),
    "easgd": (5, "Rule easgd: in one pass, or apart?"),
    "apply": (10, "The updates of 8 replicas into the reference: together, or one after another?"),
    "trial-sgd": (
        5,
        "sgd's step from the reference, whose state stays: in one pass, or in foreach functions?",
    ),
    "trial-adamw": (
        6,
        "adamw's step from the reference, whose state stays: in one pass, or in foreach functions?",
    ),
    "predict-sgd": (3, "Weights predicted from SGD's momentum: in one pass, or in foreach functions?"),
    "predict-adam": (4, "Weights predicted from Adam's state: in one pass, or in foreach functions?"),
    "correct": (5, "A late gradient's step, corrected: in one pass, or in foreach functions?"),
    "pack": (2, "How close to the speed of a plain copy is packing of tensors for sending?"),
    "unpack": (2, "How close to the speed of a plain copy is their unpacking?"),
}
_REPLICAS = 8
_OPERANDS = 1 + _REPLICAS
_ARRAYS = 22  # arrays of all elements: operands, states of torch's optimizers, buffers of the limit
_SAMPLE_S = 5e-3  # least time of a sample, which repeats short calls
_ALPHA, _LR, _MU = 0.25, 1e-5, 0.9
_STEP = 100  # a later step, as the first ones have large bias corrections
# Learning rate of trials and predictions; their weights never become operands, so it may be a usual one.
_AHEAD, _RATE, _BETA1, _BETA2, _EPS, _DECAY = 3, 1e-3, 0.9, 0.999, 1e-8, 0.01
Run = Callable[[], object]
Tensors = list[Tensor]


def run(config: KernelsConfig) -> None:
    with arguments():
        check(config)
    sections = []
    with measuring():
        for elements in config.elements:
            for case, shapes in (("one tensor", [(elements,)]), ("61 tensors", model_shapes(elements))):
                operands = make_operands(shapes, config)
                made = ways(operands)
                for name in QUESTIONS:
                    if name in (config.only or QUESTIONS) and (name != "limit" or len(shapes) == 1):
                        show_status(f"{elements} elements: {name}, {case}")
                        values, asks = QUESTIONS[name]
                        head = {"question": name, "case": case, "asks": asks, "elements": elements}
                        runs = {way: run for question, way, run in made if question == name}
                        sections.append(measure(head, values, runs, operands[0], config))
    report("kernels", config, sections)


def check(config: KernelsConfig) -> None:
    """Refuse an unknown benchmark, and sizes that exceed the memory. ValueError."""
    check_device(config.device)
    check_names("--only", config.only, tuple(QUESTIONS))
    check_memory(
        "--elements", max(config.elements), _ARRAYS * getattr(torch, config.dtype).itemsize, config.device
    )


def model_shapes(elements: int) -> list[tuple[int, ...]]:
    """61 tensors like those of a transformer of five blocks: 12 tensors each, and an embedding of what remains."""
    w = max(4, int(math.sqrt(elements / 100)) // 16 * 16)
    attention = ((w,), (w,), (3 * w, w), (3 * w,), (w, w), (w,))
    blocks = 5 * (*attention, (w,), (w,), (4 * w, w), (4 * w,), (w, 4 * w), (w,))
    return [*blocks, (elements - sum(map(math.prod, blocks)),)]


def make_operands(shapes: Sequence[Sequence[int]], config: KernelsConfig) -> list[Tensors]:
    """Make lists of tensors of ``shapes``.

    Values lie between 0.005 and 0.015, for every dtype and however often a way runs: far from subnormal
    numbers, which processors compute slowly.
    """
    seeded = torch.Generator(config.device).manual_seed(0)
    dtype = getattr(torch, config.dtype)
    empty = [
        [torch.empty(*shape, dtype=dtype, device=config.device) for shape in shapes] for _ in range(_OPERANDS)
    ]
    return [[tensor.uniform_(0.005, 0.015, generator=seeded) for tensor in tensors] for tensors in empty]


def measure(
    head: dict[str, Any], values: float, runs: dict[str, Run], like: Tensors, config: KernelsConfig
) -> dict[str, Any]:
    """Time the ways of a section in turn, round after round, so that outside load slows all of them alike.

    Args:
        head: See ``summarise``.
        values: Values that must be moved for each element.
        runs: The operator, then its alternatives in torch.
        like: One of the operands.
        config: Rounds and threads.
    """
    moved, skipped = values * like[0].element_size(), {}
    timed = _limits(like)[: None if head["question"] == "limit" else 1]
    for name, run in runs.items():
        timed.append(Way(name, "ours" if run is next(iter(runs.values())) else "baseline", moved, run))
    with torch.no_grad():
        if head["question"] in ("adamw", "sgd"):
            compiled = torch.compile(timed[-1].run, dynamic=False)
            if reason := "--no-compile" if config.no_compile else _failure(compiled):
                skipped = {"torch.compile": reason}
            else:
                timed.append(Way("torch.compile", "baseline", moved, compiled))
        timers = [Timer("run()", globals={"run": way.run}, num_threads=config.threads) for way in timed]
        counts = [timer.blocked_autorange(min_run_time=_SAMPLE_S).number_per_run for timer in timers]
        turns = [[t.timeit(n).mean for t, n in zip(timers, counts)] for _ in range(config.rounds)]
    return summarise(head, timed, list(zip(*turns)), skipped)


def _failure(compiled: Callable[[], object]) -> str:
    """Compile by a first call; return why that failed, or "" if it did not."""
    torch.compiler.reset()  # code of earlier sections would count towards the limit of recompilations
    logging.getLogger("torch").setLevel(logging.ERROR)  # it warns of functions that it leaves uncompiled
    try:
        compiled()
    except Exception as error:  # compilers raise many types; the reason is shown
        return " ".join(str(error).split())[:200] or type(error).__name__
    return ""


# ---- ways ----------------------------------------------------------------------------------------------------------


def _limits(like: Tensors) -> list[Way]:
    """Return the way that fractions refer to, then other limits.

    On the CPU the first one multiplies an array in place, which is faster than any copy, since every cache
    line is written where it was read; on CUDA it is a copy. In float32: arithmetic in 16 bits is no measure
    of memory.
    """
    size = like[0].element_size()
    count = max(1, sum(tensor.nbytes for tensor in like) // 4)
    a, b, c = (torch.full((count,), 0.01, device=like[0].device) for _ in range(3))
    multiply = Way("mul_ in place", "limit", 2 * size, lambda: a.mul_(1.0))
    copy = Way("copy_", "limit", 2 * size, lambda: a.copy_(b))
    triad = Way("triad", "limit", 3 * size, lambda: torch.add(b, c, alpha=0.5, out=a))  # as STREAM's
    return [copy, multiply, triad] if a.is_cuda else [multiply, copy, triad]


def ways(operands: list[Tensors]) -> list[tuple[str, str, Run]]:
    """Make the timed functions, on the same memory: by question, the operator first, then its alternatives."""
    z, *updates = operands
    x, before, grad, first, second, update, last, out = updates
    buffer = torch.cat([tensor.flatten() for tensor in x])
    parts = [part.view_as(tensor) for part, tensor in zip(torch.split(buffer, [t.numel() for t in x]), x)]

    def by_torch(question: str, kind: type[torch.optim.Optimizer], form: str, **options: Any) -> Any:
        parameters = [tensor.detach().requires_grad_() for tensor in x]
        for parameter, gradient in zip(parameters, grad):
            parameter.grad = gradient
        optimizer = kind(parameters, **{**options, form: True})
        run = partial(_step_then_rule, optimizer, x, before, z, update)
        return question, f"{kind.__name__}({form}) + foreach rule", run

    sgd = partial(ext.elastic_sgd_, x, grad, first, z, update, _ALPHA, 1, lr=_LR, mu=_MU)
    together = partial(ext.reference_apply_, z, list(chain(*updates)), 1 / _REPLICAS, zero=False)
    fused_adamw = partial(
        ext.elastic_adamw_, x, grad, first, second, z, update, _ALPHA, 1, lr=_LR, step=_STEP
    )
    adam: dict[str, Any] = {
        "lr": _RATE,
        "beta1": _BETA1,
        "beta2": _BETA2,
        "eps": _EPS,
        "weight_decay": _DECAY,
    }
    try_sgd = partial(ext.trial_sgd_, out, z, grad, first, update, lr=_RATE, mu=_MU)
    try_adamw = partial(ext.trial_adam_, out, z, grad, first, second, update, step=_STEP - 1, **adam)
    ahead = partial(ext.predict_adam_, out, x, first, second, updates=_AHEAD, step=_STEP, **adam)
    return [
        ("adamw", "elastic_adamw_", fused_adamw),
        *(by_torch("adamw", torch.optim.AdamW, form, lr=_LR) for form in ("fused", "foreach")),
        ("sgd", "elastic_sgd_", sgd),
        *(by_torch("sgd", torch.optim.SGD, form, lr=_LR, momentum=_MU) for form in ("fused", "foreach")),
        ("pull", "elastic_pull_", partial(ext.elastic_pull_, x, z, _ALPHA)),
        ("pull", "_foreach_mul_ + _foreach_add_", partial(_mul_and_add, x, z)),
        ("pull", "_foreach_lerp_", partial(torch._foreach_lerp_, x, z, _ALPHA)),
        ("step", "elastic_step_", partial(ext.elastic_step_, x, before, z, update, _ALPHA, 1)),
        ("step", "4 foreach passes", partial(_rule, x, before, z, update)),
        ("easgd", "easgd_step_", partial(ext.easgd_step_, x, z, update, _ALPHA)),
        ("easgd", "3 foreach passes", partial(_easgd, x, z, update)),
        ("apply", "reference_apply_, zero=False", together),
        ("apply", f"{_REPLICAS} _foreach_add_", partial(_one_by_one, z, updates)),
        ("trial-sgd", "trial_sgd_", try_sgd),
        ("trial-sgd", "5 foreach passes", partial(_try_sgd, out, z, grad, first, update)),
        ("trial-adamw", "trial_adam_", try_adamw),
        ("trial-adamw", "11 foreach passes", partial(_try_adamw, out, z, grad, first, second, update)),
        ("predict-sgd", "predict_sgd_", partial(ext.predict_sgd_, out, x, first, _AHEAD * _RATE)),
        ("predict-sgd", "2 foreach passes", partial(_predict_sgd, out, x, first)),
        ("predict-adam", "predict_adam_", ahead),
        ("predict-adam", "7 foreach passes", partial(_predict_adam, out, x, first, second)),
        ("correct", "correct_update_", partial(ext.correct_update_, x, before, last, _MU, _MU)),
        ("correct", "7 foreach passes", partial(_correct, x, before, last, out)),
        ("pack", "pack", partial(ext.pack, x, out=buffer)),
        ("pack", "_foreach_copy_", partial(torch._foreach_copy_, parts, x)),
        ("unpack", "unpack_", partial(ext.unpack_, buffer, x)),
        ("unpack", "_foreach_copy_", partial(torch._foreach_copy_, x, parts)),
    ]


def _rule(x: Tensors, before: Tensors, z: Tensors, update: Tensors) -> None:
    """update += x - before; x += alpha (z - before): four passes, since foreach knows no sum of three."""
    torch._foreach_add_(update, x)
    torch._foreach_sub_(update, before)
    torch._foreach_add_(x, z, alpha=_ALPHA)
    torch._foreach_sub_(x, before, alpha=_ALPHA)


def _step_then_rule(
    optimizer: torch.optim.Optimizer, x: Tensors, before: Tensors, z: Tensors, update: Tensors
) -> None:
    torch._foreach_copy_(before, x)
    optimizer.step()
    _rule(x, before, z, update)


def _mul_and_add(x: Tensors, z: Tensors) -> None:
    torch._foreach_mul_(x, 1 - _ALPHA)
    torch._foreach_add_(x, z, alpha=_ALPHA)


def _easgd(x: Tensors, z: Tensors, update: Tensors) -> None:
    torch._foreach_add_(update, x, alpha=_ALPHA)
    torch._foreach_sub_(update, z, alpha=_ALPHA)
    torch._foreach_lerp_(x, z, _ALPHA)


def _try_sgd(x: Tensors, z: Tensors, grad: Tensors, momentum: Tensors, update: Tensors) -> None:
    torch._foreach_copy_(x, z)
    torch._foreach_add_(x, momentum, alpha=-_RATE * _MU)
    torch._foreach_add_(x, grad, alpha=-_RATE)
    torch._foreach_copy_(update, grad)
    torch._foreach_neg_(update)


def _try_adamw(
    x: Tensors, z: Tensors, grad: Tensors, first: Tensors, second: Tensors, update: Tensors
) -> None:
    """Use ``update`` for the new second moment's root meanwhile, as fresh memory would take longer."""
    unbias, factor = 1 / (1 - _BETA2**_STEP), -_RATE / (1 - _BETA1**_STEP)
    torch._foreach_copy_(update, second)
    torch._foreach_mul_(update, _BETA2 * unbias)
    torch._foreach_addcmul_(update, grad, grad, (1 - _BETA2) * unbias)
    torch._foreach_sqrt_(update)
    torch._foreach_add_(update, _EPS)
    torch._foreach_copy_(x, z)
    torch._foreach_mul_(x, 1 - _RATE * _DECAY)
    torch._foreach_addcdiv_(x, first, update, factor * _BETA1)
    torch._foreach_addcdiv_(x, grad, update, factor * (1 - _BETA1))
    torch._foreach_copy_(update, grad)
    torch._foreach_neg_(update)


def _predict_sgd(out: Tensors, x: Tensors, momentum: Tensors) -> None:
    torch._foreach_copy_(out, x)
    torch._foreach_add_(out, momentum, alpha=-_AHEAD * _RATE)


def _predict_adam(out: Tensors, x: Tensors, first: Tensors, second: Tensors) -> None:
    """Compute all in ``out``, as fresh memory would take longer than the passes."""
    unbias, factor = 1 / math.sqrt(1 - _BETA2**_STEP), -_AHEAD * _RATE / (1 - _BETA1**_STEP)
    torch._foreach_copy_(out, second)
    torch._foreach_sqrt_(out)
    torch._foreach_mul_(out, unbias / factor)
    torch._foreach_add_(out, _EPS / factor)
    torch._foreach_reciprocal_(out)
    torch._foreach_mul_(out, first)
    torch._foreach_add_(out, x, alpha=(1 - _RATE * _DECAY) ** _AHEAD)


def _correct(x: Tensors, before: Tensors, last: Tensors, average: Tensors) -> None:
    """Compute x = before + (1 + gain) v - gain last, with v in ``average``."""
    torch._foreach_copy_(average, x)
    torch._foreach_sub_(average, before)
    torch._foreach_lerp_(average, last, _MU)
    torch._foreach_copy_(x, before)
    torch._foreach_add_(x, average, alpha=1 + _MU)
    torch._foreach_sub_(x, last, alpha=_MU)
    torch._foreach_copy_(last, average)


def _one_by_one(z: Tensors, updates: list[Tensors]) -> None:
    for own in updates:
        torch._foreach_add_(z, own, alpha=1 / _REPLICAS)
