"""``avgpipe bench kernels``: our operators, what one writes in torch instead, and the limit of this memory.

Bytes are counted by what the update must move: each operand that is read and each that is written, once.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

import avgpipe_ext
from avgpipe.cli.bench.commands import KernelsConfig
from avgpipe.cli.bench.machine import memory_available_bytes
from avgpipe.cli.bench.sections import Skipped, Variant, measuring, plot, report, say, summarise, table
from avgpipe.cli.errors import arguments
from avgpipe.cli.resolve import check_device
from avgpipe.errors import nearest
from avgpipe.timeline.plot import check_picture
from avgpipe.units import format_bytes

_USABLE = 0.9  # of the free memory; the rest is for allocators, compilers and everybody else
_SAMPLE_S = 5e-3  # at least, of several calls where one is short
_TENSORS, _REPLICAS = 400, 8  # of the questions "lists" and "apply"

_ALPHA, _LR, _MU = 0.25, 1e-5, 0.9
_STEP = 100  # beyond the first steps, whose bias corrections are large
_BETA1, _BETA2, _EPS, _DECAY = 0.9, 0.999, 1e-8, 0.01
_ADAMW: dict[str, Any] = {"lr": _LR, "beta1": _BETA1, "beta2": _BETA2, "eps": _EPS, "weight_decay": _DECAY}
_ADAMW["step"] = _STEP


class Operands:
    """The operands of a section by name, shared by its variants so that all touch the same memory.

    Each is a list of tensors of ``shapes``. Values lie between 0.005 and 0.015: far from subnormal numbers, which
    processors compute slowly, for every dtype and however often a variant runs.
    """

    def __init__(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: str, compiles: bool
    ) -> None:
        self.shapes, self.dtype, self.device, self.compiles = shapes, dtype, device, compiles
        self.elements = sum(map(math.prod, shapes))
        self._made: dict[str, list[Tensor]] = {}

    def lists(self, *names: str) -> list[list[Tensor]]:
        for name in names:
            if name not in self._made:
                self._made[name] = [self._filled(shape) for shape in self.shapes]
        return [self._made[name] for name in names]

    def ours(self, *names: str) -> list[Any]:
        """Return what an operator takes for each name: the list, or its one tensor."""
        return [found if len(found) > 1 else found[0] for found in self.lists(*names)]

    def _filled(self, shape: Sequence[int]) -> Tensor:
        made = torch.empty(tuple(shape), dtype=self.dtype, device=self.device)
        return made.uniform_(0.005, 0.015, generator=torch.Generator(self.device).manual_seed(0))


class KernelCase(NamedTuple):
    """A section to be measured: ``arrays`` counts the operands of all elements that it needs at once."""

    question: str
    case: str
    asks: str
    shapes: Sequence[Sequence[int]]
    arrays: int
    variants: Callable[[Operands], Iterable[Variant | Skipped]]

    @property
    def elements(self) -> int:
        return sum(map(math.prod, self.shapes))


def cases(elements: int, dtype: str) -> list[KernelCase]:
    """All sections with operands of so many elements, in the order of the tables."""
    one, model = [(elements,)], _model_shapes(elements)
    update = "'s step, the update for the reference and the pull (staleness 1): in one pass, or apart?"
    questions: tuple[tuple[str, str, int, Callable[[Operands], Iterable[Variant | Skipped]]], ...] = (
        ("adamw", f"adamw{update}", 15, _adamw),
        ("sgd", f"sgd{update}", 12, _sgd),
        ("pull", "x += alpha (z - x): in one pass, or in foreach functions?", 3, _pull),
        ("step", "After any optimizer's step, update and force: in one pass, or apart?", 4, _step),
        ("easgd", "Rule easgd: in one pass, or apart?", 4, _easgd),
    )
    found = [
        KernelCase("limit", "one tensor", "How fast does this memory move?", one, 1, lambda o: _limits(o)[1:])
    ]
    for question, asks, arrays, make in questions:
        found.append(KernelCase(question, "one tensor", asks, one, arrays, make))
        found.append(KernelCase(question, f"{len(model)} tensors", asks, model, arrays, make))
    asks = f"The updates of {_REPLICAS} replicas into the reference: together, or one after another?"
    found.append(KernelCase("apply", f"N = {_REPLICAS}", asks, one, 1 + _REPLICAS, _apply))
    asks = "AdamW steps of N replicas, their mean into the reference, pulls (staleness 0): in one pass, or apart?"
    found += [KernelCase("round", f"N = {n}", asks, one, 5 * n + 1, partial(_round, n=n)) for n in (2, 4, 8)]
    asks = f"What does a list of {_TENSORS} tensors cost beside one arena of the same bytes? (0.91 is 1.1 times.)"
    each = max(1, elements // _TENSORS)
    for size in dict.fromkeys((each, min(each, 4096))):
        for name, arrays, one_pass in (("elastic_adamw_", 12, _adamw_pass), ("elastic_pull_", 4, _pull_pass)):
            shapes, compare = [(size,)] * _TENSORS, partial(_list_or_arena, make=one_pass)
            found.append(KernelCase("lists", f"{name}, {_TENSORS} x {size}", asks, shapes, arrays, compare))
    asks = "How near to a plain copy are tensors packed for sending, and unpacked?"
    for question, variants in (("pack", _pack), ("unpack", _unpack)):
        for wire in dict.fromkeys((dtype, "bfloat16")):
            case = f"{len(model)} tensors of {dtype}, buffer of {wire}"
            found.append(
                KernelCase(question, case, asks, model, 5, partial(variants, wire=getattr(torch, wire)))
            )
    return found


def run(config: KernelsConfig) -> None:
    with arguments():
        check_device(config.device)
        if config.plot is not None:
            check_picture(config.plot)
        chosen = choose(config)
    sections = []
    with measuring():
        for number, case in enumerate(chosen):
            say(f"{number + 1} of {len(chosen)}: {case.question}, {case.case}")
            sections.append(measure(case, config))
        if config.plot is not None:
            plot(sections, f"{config.dtype}, medians of {config.rounds} rounds", config.plot)
    report("kernels", config, {"sections": sections}, [table(section) for section in sections], config.device)


def choose(config: KernelsConfig) -> list[KernelCase]:
    """Choose the sections. Raises ValueError for an unknown question, and for what memory does not hold."""
    found = [case for size in config.elements for case in cases(size, config.dtype)]
    questions = tuple(dict.fromkeys(case.question for case in found))
    for name in config.only:
        if name not in questions:
            raise ValueError(f"--only {name}: no such question, {nearest(name, questions)}")
    found = [case for case in found if not config.only or case.question in config.only]
    free = memory_available_bytes(config.device)
    largest = max(found, key=lambda case: memory_bytes(case, config.dtype))
    needed = memory_bytes(largest, config.dtype)
    if free is not None and needed > _USABLE * free:
        raise ValueError(
            f"{largest.question}, {largest.case}: needs {format_bytes(needed)} and {format_bytes(free)} are free, of "
            f"which {_USABLE:.0%} may be used; use --elements {largest.elements * _USABLE * free / needed:.1e} or "
            "fewer, or leave it out by naming others with --only"
        )
    return found


def memory_bytes(case: KernelCase, dtype: str) -> int:
    """Bytes of a section's operands and of the three arrays of its limits."""
    itemsize: int = getattr(torch, dtype).itemsize
    return (case.arrays + 3) * case.elements * itemsize


def measure(case: KernelCase, config: KernelsConfig) -> dict[str, Any]:
    """Time the variants of a section in turn, round after round: what slows the machine down slows all alike."""
    operands = Operands(case.shapes, getattr(torch, config.dtype), config.device, not config.no_compile)
    prepared = [_limits(operands)[0], *case.variants(operands)]
    variants = [item for item in prepared if isinstance(item, Variant)]
    timers = [Timer("run()", globals={"run": v.run}, num_threads=config.threads) for v in variants]
    with torch.no_grad():
        counts = [timer.blocked_autorange(min_run_time=_SAMPLE_S).number_per_run for timer in timers]
        samples: list[list[float]] = [[] for _ in variants]
        for _ in range(config.rounds):
            for timer, count, seconds in zip(timers, counts, samples):
                seconds.append(timer.timeit(count).mean)
    torch.compiler.reset()
    gc.collect()  # operands go before the next section's come
    head = {name: getattr(case, name) for name in ("question", "case", "asks", "elements")}
    skipped = [item for item in prepared if isinstance(item, Skipped)]
    return summarise({**head, "memory_bytes": memory_bytes(case, config.dtype)}, variants, samples, skipped)


def _model_shapes(elements: int) -> list[tuple[int, ...]]:
    """61 tensors like those of a transformer of five blocks: 12 tensors each, and an embedding of what remains."""
    w = max(4, int(math.sqrt(elements / 100)) // 16 * 16)
    attention = ((w,), (w,), (3 * w, w), (3 * w,), (w, w), (w,))
    blocks = 5 * (*attention, (w,), (w,), (4 * w, w), (4 * w,), (w, 4 * w), (w,))
    return [*blocks, (elements - sum(map(math.prod, blocks)),)]


# ---- variants ------------------------------------------------------------------------------------------------------


def _limits(o: Operands) -> list[Variant]:
    """The one that fractions are of, then others.

    On the CPU that is multiplying an array in place, which no copy comes near, since every line of memory is written
    where it was read; on CUDA a copy. In float32: arithmetic in 16 bits is no measure of memory.
    """
    count, size = max(1, o.elements * o.dtype.itemsize // 4), o.dtype.itemsize
    a, b, c = (torch.full((count,), 0.01, device=o.device) for _ in range(3))
    multiply = Variant("mul_ in place", "limit", 2 * size, lambda: a.mul_(1.0))
    copy = Variant("copy_", "limit", 2 * size, lambda: a.copy_(b))
    triad = Variant("triad", "limit", 3 * size, lambda: torch.add(b, c, alpha=0.5, out=a))  # as STREAM's
    return [copy, multiply, triad] if o.device == "cuda" else [multiply, copy, triad]


def _ours(o: Operands, name: str, values: float, run: Callable[[], object], *against: str) -> Variant:
    return Variant(name, "ours", values * o.dtype.itemsize, run, against or None)


def _other(o: Operands, name: str, values: float, run: Callable[[], object]) -> Variant:
    return Variant(name, "baseline", values * o.dtype.itemsize, run)


def _compiled(o: Operands, values: float, update: Callable[[], None]) -> Variant | Skipped:
    """``update`` compiled by its first call here, or why that did not work."""
    name = "torch.compile"
    if not o.compiles:
        return Skipped(name, "--no-compile")
    torch.compiler.reset()  # an earlier section's code must not count against this one's limit of recompilations
    run: Callable[[], None] = torch.no_grad()(torch.compile(update, dynamic=False, fullgraph=True))
    begin = time.perf_counter()
    try:
        run()
    except Exception as error:  # what compilers raise is beyond counting; the reason is shown
        return Skipped(name, " ".join(str(error).split())[:200] or type(error).__name__)
    return _other(o, name, values, run)._replace(compile_s=time.perf_counter() - begin)


def _adamw(o: Operands) -> Iterator[Variant | Skipped]:
    def step(x: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> None:
        first.lerp_(grad, 1 - _BETA1)
        second.mul_(_BETA2).addcmul_(grad, grad, value=1 - _BETA2)
        root = (second / (1 - _BETA2**_STEP)).sqrt().add_(_EPS)
        x.mul_(1 - _LR * _DECAY).addcdiv_(first, root, value=-_LR / (1 - _BETA1**_STEP))

    options = {"lr": _LR, "betas": (_BETA1, _BETA2), "eps": _EPS, "weight_decay": _DECAY}
    yield _adamw_pass(o)
    yield from _by_torch(o, 10, torch.optim.AdamW, options, step, o.lists("x", "grad", "first", "second"))


def _adamw_pass(o: Operands) -> Variant:
    """x, both moments and update read and written; grad and z read."""
    x, grad, first, second, z, update = o.ours("x", "grad", "first", "second", "z", "update")

    def run() -> None:
        avgpipe_ext.elastic_adamw_(x, grad, first, second, z, update, _ALPHA, 1, **_ADAMW)

    return _ours(o, "elastic_adamw_", 10, run)


def _sgd(o: Operands) -> Iterator[Variant | Skipped]:
    """x, momentum and update read and written; grad and z read."""
    x, grad, first, z, update = o.ours("x", "grad", "first", "z", "update")

    def run() -> None:
        avgpipe_ext.elastic_sgd_(x, grad, first, z, update, _ALPHA, 1, lr=_LR, mu=_MU)

    def step(x: Tensor, grad: Tensor, first: Tensor) -> None:
        x.add_(first.mul_(_MU).add_(grad), alpha=-_LR)

    yield _ours(o, "elastic_sgd_", 8, run)
    options = {"lr": _LR, "momentum": _MU}
    yield from _by_torch(o, 8, torch.optim.SGD, options, step, o.lists("x", "grad", "first"))


def _by_torch(
    o: Operands,
    values: float,
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    step: Callable[..., None],
    operands: list[list[Tensor]],
) -> Iterator[Variant | Skipped]:
    """torch's optimizer and the rule after it, in the forms that torch has; ``step`` is the one for a compiler."""
    zs, updates = o.lists("z", "update")
    for form in ("fused", "foreach"):
        parameters = [x.detach().requires_grad_() for x in operands[0]]
        for parameter, grad in zip(parameters, operands[1]):
            parameter.grad = grad
        optimizer = kind(parameters, **{**options, form: True})
        yield _other(o, f"{kind.__name__}({form}) + foreach rule", values, _then_rule(o, optimizer))

    def whole() -> None:
        for z, update, *own in zip(zs, updates, *operands):
            before = own[0].clone()
            step(*own)
            update.add_(own[0] - before)
            own[0].add_(z - before, alpha=_ALPHA)

    yield _compiled(o, values, whole)


def _then_rule(o: Operands, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """x_before is kept, the optimizer steps, and rule avgpipe (staleness 1) follows; nothing is allocated here."""
    xs, befores = o.lists("x", "before")
    rule = _foreach_rule(o)

    def run() -> None:
        torch._foreach_copy_(befores, xs)
        optimizer.step()
        rule()

    return run


def _foreach_rule(o: Operands) -> Callable[[], None]:
    """update += x - x_before; x += alpha (z - x_before): four passes, since foreach knows no sum of three."""
    xs, befores, zs, updates = o.lists("x", "before", "z", "update")

    def run() -> None:
        torch._foreach_add_(updates, xs)
        torch._foreach_sub_(updates, befores)
        torch._foreach_add_(xs, zs, alpha=_ALPHA)
        torch._foreach_sub_(xs, befores, alpha=_ALPHA)

    return run


def _pull(o: Operands) -> list[Variant]:
    xs, zs = o.lists("x", "z")

    def multiply_and_add() -> None:
        torch._foreach_mul_(xs, 1 - _ALPHA)
        torch._foreach_add_(xs, zs, alpha=_ALPHA)

    return [
        _pull_pass(o),
        _other(o, "_foreach_mul_ + _foreach_add_", 3, multiply_and_add),
        _other(o, "_foreach_lerp_", 3, lambda: torch._foreach_lerp_(xs, zs, _ALPHA)),
    ]


def _pull_pass(o: Operands) -> Variant:
    """x read and written, z read."""
    x, z = o.ours("x", "z")
    return _ours(o, "elastic_pull_", 3, lambda: avgpipe_ext.elastic_pull_(x, z, _ALPHA))


def _step(o: Operands) -> list[Variant]:
    """x and update read and written; x_before and z read."""
    x, before, z, update = o.ours("x", "before", "z", "update")
    return [
        _ours(o, "elastic_step_", 6, lambda: avgpipe_ext.elastic_step_(x, before, z, update, _ALPHA, 1)),
        _other(o, "4 foreach passes", 6, _foreach_rule(o)),
    ]


def _easgd(o: Operands) -> list[Variant]:
    """x and update read and written, z read."""
    (x, z, update), (xs, zs, updates) = o.ours("x", "z", "update"), o.lists("x", "z", "update")

    def in_place() -> None:
        torch._foreach_add_(updates, xs, alpha=_ALPHA)
        torch._foreach_sub_(updates, zs, alpha=_ALPHA)
        torch._foreach_lerp_(xs, zs, _ALPHA)

    return [
        _ours(o, "easgd_step_", 5, lambda: avgpipe_ext.easgd_step_(x, z, update, _ALPHA)),
        _other(o, "3 foreach passes", 5, in_place),
    ]


def _apply(o: Operands) -> list[Variant]:
    """z is read and written once, every update read once."""
    z, *updates = o.ours("z", *(f"update {i}" for i in range(_REPLICAS)))

    def one_by_one() -> None:
        for update in updates:
            torch._foreach_add_([z], [update], alpha=1 / _REPLICAS)

    ours = lambda: avgpipe_ext.reference_apply_(z, updates, 1 / _REPLICAS, zero=False)  # noqa: E731
    return [
        _ours(o, "reference_apply_, zero=False", 2 + _REPLICAS, ours),
        _other(o, f"{_REPLICAS} _foreach_add_", 2 + _REPLICAS, one_by_one),
    ]


def _round(o: Operands, n: int) -> list[Variant]:
    """Each replica's x and moments read and written and its grad read; z once."""
    (z,) = o.ours("z")
    xs, grads, firsts, seconds, updates = (
        o.ours(*(f"{name} {i}" for i in range(n))) for name in ("x", "grad", "first", "second", "update")
    )

    def whole() -> None:
        avgpipe_ext.elastic_round_(xs, grads, [*firsts, *seconds], z, _ALPHA, optimizer="adamw", **_ADAMW)

    def apart() -> None:
        for x, grad, first, second, update in zip(xs, grads, firsts, seconds, updates):
            # alpha 0: the pull comes later, to the reference after the round.
            avgpipe_ext.elastic_adamw_(x, grad, first, second, z, update, 0.0, 0, accumulate=False, **_ADAMW)
        avgpipe_ext.reference_apply_(z, updates, 1 / n, zero=False)
        for x in xs:
            avgpipe_ext.elastic_pull_(x, z, _ALPHA)

    values = 7 * n + 2
    return [
        _ours(o, "elastic_round_", values, whole),
        _other(o, f"{n} adamw, 1 apply, {n} pull", values, apart),
    ]


def _list_or_arena(o: Operands, make: Callable[[Operands], Variant]) -> list[Variant]:
    arena = make(Operands([(o.elements,)], o.dtype, o.device, False))
    return [make(o)._replace(name="list"), arena._replace(name="one arena", role="baseline")]


def _pack(o: Operands, wire: torch.dtype) -> list[Variant]:
    (tensors,), buffer, parts, flats = o.lists("x"), *_buffer(o, wire)
    moved = (o.dtype.itemsize + wire.itemsize) / o.dtype.itemsize
    kept, new = "_foreach_copy_ into a kept buffer", "torch.cat" if wire == o.dtype else "torch.cat + to"
    return [
        _ours(o, "pack", moved, lambda: avgpipe_ext.pack(tensors, wire), new),
        _other(o, new, moved, lambda: torch.cat(flats).to(wire)),
        _ours(o, "pack, a kept buffer", moved, lambda: avgpipe_ext.pack(tensors, out=buffer), kept),
        _other(o, kept, moved, lambda: torch._foreach_copy_(parts, flats)),
    ]


def _unpack(o: Operands, wire: torch.dtype) -> list[Variant]:
    (tensors,), buffer, parts, flats = o.lists("x"), *_buffer(o, wire)
    moved = (o.dtype.itemsize + wire.itemsize) / o.dtype.itemsize
    return [
        _ours(o, "unpack_", moved, lambda: avgpipe_ext.unpack_(buffer, tensors)),
        _other(o, "_foreach_copy_", moved, lambda: torch._foreach_copy_(flats, parts)),
    ]


def _buffer(o: Operands, wire: torch.dtype) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A buffer for the wire, its parts, and the flat tensors that they are for."""
    buffer = torch.full((o.elements,), 0.01, dtype=wire, device=o.device)
    flats = [tensor.view(-1) for tensor in o.lists("x")[0]]
    return buffer, list(torch.split(buffer, [flat.numel() for flat in flats])), flats
