"""The comparison for a person: latencies, then bandwidths by size."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from avgpipe.bench.result import Row, SectionResult
from avgpipe.bench.transfers.benchmark import GLOO, HANDED, LATENCY, READ
from avgpipe.bench.transfers.settings import TransferSettings

_STYLES = {"ours": "bold", "baseline": "", "limit": "dim"}
_TITLES = {
    LATENCY: "one way, from sending to having the tensor",
    HANDED: "bandwidth: message handed over",
    READ: "bandwidth: message handed over, and added up by the receiver",
}


def table(results: Sequence[SectionResult], settings: TransferSettings) -> Group:
    parts: list[RenderableType] = []
    for question in (LATENCY, HANDED, READ):
        of_question = [result for result in results if result.question == question]
        if of_question:
            parts += [Text(_TITLES[question], style="bold"), _table(of_question)]
    return Group(*parts, Text("\n".join(notes(results, settings))))


def _table(results: Sequence[SectionResult]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("", no_wrap=True)
    made.add_column("", no_wrap=True)
    for heading in ("us", "quartiles", "GB/s", "of memcpy", "times gloo"):
        made.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        for number, row in enumerate(result.rows):
            made.add_row(
                result.case if number == 0 else "",
                row.name,
                _us(row.median_s),
                f"{_us(row.quartile1_s)}-{_us(row.quartile3_s)}",
                *_speeds(row, copies=row.name != "local"),
                style=_STYLES[row.role],
                end_section=row is result.rows[-1],
            )
    return made


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}" if seconds < 1e-4 else f"{seconds * 1e6:.0f}"


def _speeds(row: Row, copies: bool) -> tuple[str, str, str]:
    """Where nothing is copied there is no bandwidth to speak of."""
    limit = row.fraction_of_limit
    return (
        f"{row.gb_per_s:.2f}" if copies else "",
        f"{limit:.2f}" if copies and limit is not None else "",
        f"{row.ratios[GLOO]:.1f}x" if GLOO in row.ratios else "",
    )


def notes(results: Sequence[SectionResult], settings: TransferSettings) -> list[str]:
    lines = [
        f"Two processes, a message at a time to and fro, half of a round trip: medians of {settings.rounds} rounds.",
        "The two threads that send and wait have a processor each, where there are two; threads of gloo run anywhere.",
        "plain gloo: dist.send, and dist.irecv that is posted before. memcpy: one, of the same bytes within a process,",
        "between as many buffers as the others touch. shm, gloo: our links, with the mailbox that workers wait on;",
        "where it is not said, it spins briefly and then sleeps. local: within a process, nothing is copied.",
    ]
    skipped = {item for result in results for item in result.skipped}
    return lines + [f"left out: {item.name}: {item.reason}" for item in skipped]
