"""All sections of the kernels' benchmark, and running them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from avgpipe.bench.kernels import limits, lists, optimizers, packing, rounds, rules
from avgpipe.bench.kernels.settings import KernelSettings
from avgpipe.bench.result import SectionResult, summarise
from avgpipe.bench.section import Section, Skipped, Variant
from avgpipe.bench.timing import measure

_USABLE = 0.9  # of the free memory; the rest is for allocators, compilers and everybody else


def kernel_sections(settings: KernelSettings) -> list[Section]:
    """What will be measured, in order; nothing is allocated yet."""
    made: list[Section] = []
    for elements in settings.elements:
        for module in (limits, optimizers, rules, rounds, lists, packing):
            made += module.sections(settings, elements)
    return made


def check_memory(sections: Sequence[Section], available_bytes: int | None) -> None:
    """ValueError naming the section that needs the most, if it does not fit into `available_bytes`."""
    largest = max(sections, key=lambda section: section.memory_bytes)
    if available_bytes is None or largest.memory_bytes <= _USABLE * available_bytes:
        return
    fitting = int(largest.elements * _USABLE * available_bytes / largest.memory_bytes)
    raise ValueError(
        f"{largest.title}: needs {largest.memory_bytes / 2**30:.1f} GiB and {available_bytes / 2**30:.1f} GiB "
        f"are free, of which {_USABLE:.0%} may be used; use --elements {fitting:.1e} or fewer, or leave it out by "
        "naming others with --only"
    )


def run_sections(settings: KernelSettings, sections: Sequence[Section]) -> Iterator[SectionResult]:
    """Measure the sections one after another, each on operands of its own, with `settings.threads` threads."""
    with _threads(settings.threads):
        for section in sections:
            yield _run(settings, section)
            # Operands go before the next section's come.
            torch.compiler.reset()
            gc.collect()
            if settings.device == "cuda":
                torch.cuda.empty_cache()


def _run(settings: KernelSettings, section: Section) -> SectionResult:
    prepared = section.prepare()
    variants = [item for item in prepared if isinstance(item, Variant)]
    skipped = [item for item in prepared if isinstance(item, Skipped)]
    with torch.no_grad():
        samples = measure(variants, settings.rounds, settings.device)
    return summarise(section, variants, samples, skipped)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
