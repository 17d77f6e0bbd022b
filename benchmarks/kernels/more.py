"""Question: what do whole rounds, lists of tensors and packing to another dtype gain or cost?

    OMP_NUM_THREADS=2 python -m benchmarks.kernels.more --elements 25e6 --threads 2 --rounds 15 --json > more.json

The options are those of `avgpipe bench kernels`, whose questions these are beside: `round`, `lists`, `pack` and
`unpack`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import typer
from torch import Tensor

import avgpipe_ext as ext
from avgpipe.cli.options import Command, callback
from avgpipe_lab.bench import measuring, report
from avgpipe_lab.bench.kernels import Run, check, make_operands, measure, model_shapes
from avgpipe_lab.commands import KernelsConfig

_TENSORS = 400  # of the question "lists"
_ALPHA = 0.25
_ADAMW: dict[str, Any] = {"lr": 1e-5, "step": 100}

Section = tuple[str, str, str, float, list[Tensor], dict[str, Run]]


def run(config: KernelsConfig) -> None:
    sections = []
    check(KernelsConfig(elements=config.elements, device=config.device, dtype=config.dtype))
    with measuring(), torch.no_grad():
        for elements in config.elements:
            for question, case, asks, values, like, runs in cases(elements, config):
                if not config.only or question in config.only:
                    head = {"question": question, "case": case, "asks": asks, "elements": elements}
                    sections.append(measure(head, values, runs, like, config))
    report("kernels", config, sections)


def cases(elements: int, config: KernelsConfig) -> Iterator[Section]:
    for replicas in (2, 4, 8):
        yield rounds(elements, replicas, config)
    each = max(1, elements // _TENSORS)
    for length in dict.fromkeys((each, min(each, 4096))):
        yield from lists(length, config)
    yield from packing(elements, config)


def rounds(elements: int, n: int, config: KernelsConfig) -> Section:
    """Each replica's x and moments read and written and its grad read; z once."""
    z, *others = (
        tensors[0] for _ in range(-(-(5 * n + 1) // 9)) for tensors in make_operands([(elements,)], config)
    )
    xs, grads, firsts, seconds, updates = (others[k * n : (k + 1) * n] for k in range(5))

    def apart() -> None:
        for x, grad, first, second, update in zip(xs, grads, firsts, seconds, updates):
            # alpha 0: the pull comes later, to the reference after the round.
            ext.elastic_adamw_(x, grad, first, second, z, update, 0.0, 0, accumulate=False, **_ADAMW)
        ext.reference_apply_(z, updates, 1 / n, zero=False)
        for x in xs:
            ext.elastic_pull_(x, z, _ALPHA)

    states = [*firsts, *seconds]
    whole = partial(ext.elastic_round_, xs, grads, states, z, _ALPHA, optimizer="adamw", **_ADAMW)
    asks = "AdamW steps of N replicas, their mean into the reference, pulls (staleness 0): in one pass, or apart?"
    runs: dict[str, Run] = {"elastic_round_": whole, f"{n} adamw, 1 apply, {n} pull": apart}
    return "round", f"N = {n}", asks, 7 * n + 2, xs, runs


def lists(length: int, config: KernelsConfig) -> Iterator[Section]:
    asks = f"What does a list of {_TENSORS} tensors cost beside one arena of the same bytes? (0.91 is 1.1 times.)"
    many = make_operands([(length,)] * _TENSORS, config)
    arena = make_operands([(length * _TENSORS,)], config)
    for name, values, count, rest, options in (
        ("elastic_adamw_", 10, 6, (_ALPHA, 1), _ADAMW),
        ("elastic_pull_", 3, 2, (_ALPHA,), {}),
    ):
        operator: Any = getattr(ext, name)
        runs: dict[str, Run] = {
            "list": partial(operator, *many[:count], *rest, **options),
            "one arena": partial(operator, *arena[:count], *rest, **options),
        }
        yield "lists", f"{name}, {_TENSORS} x {length}", asks, values, many[0], runs


def packing(elements: int, config: KernelsConfig) -> Iterator[Section]:
    asks = "How close to the speed of a plain copy are packing of tensors for sending, and unpacking?"
    tensors, dtype = make_operands(model_shapes(elements), config)[0], getattr(torch, config.dtype)
    flats = [tensor.view(-1) for tensor in tensors]
    for wire in dict.fromkeys((dtype, torch.bfloat16)):
        buffer = torch.full((elements,), 0.01, dtype=wire, device=config.device)
        parts = list(buffer.split([flat.numel() for flat in flats]))
        values = 1 + wire.itemsize / dtype.itemsize
        case = f"61 tensors of {config.dtype}, buffer of {str(wire).removeprefix('torch.')}"
        kept: dict[str, Run] = {
            "pack, a kept buffer": partial(ext.pack, tensors, out=buffer),
            "_foreach_copy_ into a kept buffer": partial(torch._foreach_copy_, parts, flats),
        }
        new: dict[str, Run] = {
            "pack": partial(ext.pack, tensors, wire),
            "torch.cat" if wire == dtype else "torch.cat + to": lambda wire=wire: torch.cat(flats).to(wire),
        }
        back: dict[str, Run] = {
            "unpack_": partial(ext.unpack_, buffer, tensors),
            "_foreach_copy_": partial(torch._foreach_copy_, flats, parts),
        }
        yield "pack", f"{case}, kept", asks, values, tensors, kept
        yield "pack", f"{case}, new", asks, values, tensors, new
        yield "unpack", case, asks, values, tensors, back


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(callback(Command(KernelsConfig, "benchmarks.kernels.more")))
    app()
