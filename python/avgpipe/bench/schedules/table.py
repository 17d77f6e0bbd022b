"""The comparison for a person."""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from avgpipe.bench.schedules.result import ScheduleResult

_DATA_PARALLEL = "avgpipe data-parallel"
_SINGLE = ("pipedream", "ea-pipe", "model-parallel")  # batches of one micro-batch


def table(result: ScheduleResult) -> Group:
    """Bounds, then rows.

    "over it": measured over simulated time; "as ran": over that with the times that actions took. "of limit": the
    limit over the row's time. "ours is": how many times faster our best pipeline is.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    made.add_column("", no_wrap=True)
    for heading in ("ms/batch", "quartiles", "simulated", "over it", "as ran", "of limit", "ours is"):
        made.add_column(heading, justify="right", no_wrap=True)
    limit = result.limit_s
    for bound in result.bounds:
        made.add_row(bound.name, f"{bound.seconds * 1e3:.1f}", *[""] * 6, style="dim")
    ours = [row.median_s for row in result.rows if row.is_ours and row.name != _DATA_PARALLEL]
    best = min(ours, default=None)
    for row in result.rows:
        faster = "" if best is None or row.is_ours else f"{row.median_s / best:.2f}x"
        simulated, over, as_ran = row.simulated_s, row.over_simulated, row.over_simulated_as_measured
        made.add_row(
            row.name,
            f"{row.median_s * 1e3:.1f}",
            f"{row.quartile1_s * 1e3:.1f}-{row.quartile3_s * 1e3:.1f}",
            "" if simulated is None else f"{simulated * 1e3:.1f}",
            "" if over is None else f"{over:.3f}",
            "" if as_ran is None else f"{as_ran:.3f}",
            f"{limit / row.median_s:.3f}",
            faster,
            style="bold" if row.is_ours else "",
        )
    return Group(Text(title(result), style="bold"), made, Text("\n".join(notes(result))))


def title(result: ScheduleResult) -> str:
    s = result.settings
    line = "loopback" if s.rate_bits_per_s is None else f"{s.rate_bits_per_s / 1e9:g} Gbit/s a line"
    return (
        f"emulated: K = {s.stages}, M = {s.micro_batches}, t_f = {s.forward_s * 1e3:g} ms, t_b "
        f"= {s.backward_s * 1e3:g} ms, "
        f"activations {s.activation_bytes / 2**20:g} MiB, {line}"
    )


def notes(result: ScheduleResult) -> list[str]:
    s = result.settings
    lines = [
        "Stages take their time and compute nothing; runtime, tensors and links are real.",
        f"Per batch of one pipeline in the steady state: medians of {s.rounds} rounds of at least {s.batches} batches.",
    ]
    if result.line_bytes_per_s is not None:
        lines.append(f"A plain 16 MiB send of gloo: {result.line_bytes_per_s * 8 / 1e9:.3f} Gbit/s.")
    return [
        *lines,
        *_notes_on_rows(result),
        *(f"left out: {row.name}: {row.reason}" for row in result.unavailable),
    ]


def _notes_on_rows(result: ScheduleResult) -> list[str]:
    names = [row.name for row in result.rows]
    lines = []
    if any(row.simulated_s is not None for row in result.rows):
        sent = (
            "all that a worker sends shares its line"
            if result.settings.rate_bits_per_s
            else "nothing travels"
        )
        lines += [
            f"Simulated: {sent}; updates and the host take nothing.",
            "As ran: over the same with actions that take what they took, the host's share included.",
        ]
    if single := [name for name in _SINGLE if f"avgpipe {name}" in names]:
        lines.append(f"{', '.join(single)}: a batch is one micro-batch; M of them are a row's batch here.")
    if _DATA_PARALLEL in names:
        lines.append(
            "data-parallel: a worker runs M/K micro-batches through all stages; no activation is sent, and gradients "
            "are too small here for their sum to count."
        )
    return lines
