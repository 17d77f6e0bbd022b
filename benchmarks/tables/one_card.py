"""Several pipelines on one GPU: one worker of several, and a GPU divided to emulate several.

Every table takes the newest record of the GPU suite and an earlier record of the same experiments, which counts until
the suite has run their stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from benchmarks.one_card import fill, phases, shared_worker
from benchmarks.tables.markdown import NOTHING, Record, table

_HOWS = {"eager": "eagerly", "actions": "a graph for each action", "row": "a graph for the batch"}
_FIRST = "avgpipe 1f1b, N = 1, M = 4 each, own"
# Of a transformer in float32, samples per second relative to one pipeline of 1F1B with four micro-batches: what was
# expected before the first run, and the row.
_EXPECTED = (
    ("all forwards, then all backwards", "1.00", "avgpipe all-forward-all-backward, N = 1, M = 4 each, own"),
    ("1F1B, 8 micro-batches", "1.20 to 1.25", "avgpipe 1f1b, N = 1, M = 8 each, own"),
    ("ZB-H1", "1.20 to 1.35", "avgpipe zero-bubble-h1, N = 1, M = 4 each, own"),
    ("N = 2, a batch for each pipeline", "1.55 to 1.70", "avgpipe advance-forward, N = 2, M = 4 each, own"),
    ("N = 4, a batch for each pipeline", "1.60 to 1.70", "avgpipe advance-forward, N = 4, M = 4 each, own"),
    ("torch's 1F1B", "0.95 to 1.00", "torch 1f1b, M = 4"),
    ("data parallel", "1.70 to 1.80", "data parallel"),
)
_EXPECTED_WITH_LINE = (
    ("N = 2, with a line of 10 Gbit/s", "1.50 or more", "avgpipe advance-forward, N = 2, M = 4 each, own"),
    ("data parallel, with a line of 10 Gbit/s", "about 0.20", "data parallel"),
)


def one_card_fill() -> str:
    return fill.fill_table()


def one_card_phases() -> str:
    return phases.phases_table()


def one_card_shared_worker() -> str:
    return shared_worker.shared_worker_table()


def one_card_lanes(suite: Record | None, earlier: Record) -> str:
    """Return samples per second of one lane, and the ratios of two and four lanes to it."""
    new = _report(suite, "one worker")
    found: dict[tuple[str, int, str, int], dict[tuple[int, bool], Record]] = defaultdict(dict)
    for row in new["rows"] if new else earlier["lanes"]:
        if "samples_per_s" in row and not row["wire"]:
            found[row["model"], row["M"], row["how"], row["k"]][row["N"], row.get("apart", False)] = row
    rows = []
    for (model, micro_batches, how, worker), of in found.items():
        one = of.get((1, False))
        if one is not None:
            several = [of.get((n, apart)) for n in (2, 4) for apart in (False, True)]
            ratios = [f"{row['samples_per_s'] / one['samples_per_s']:.2f}" if row else "" for row in several]
            peaks = [f"{row['peak_mib']:,}" if row and "peak_mib" in row else "" for row in (one, several[0])]
            rows.append(
                (model, micro_batches, worker, _HOWS[how], f"{one['samples_per_s']:,.0f}", *ratios, *peaks)
            )
    columns = (
        "model | M: | stage: | issued | N = 1, samples/s: | N = 2: | N = 2, apart: | N = 4: | N = 4, apart:"
    )
    columns += " | peak, MiB, N = 1: | N = 2:"
    return f"{_of(suite) + '.' if new else _flawed(earlier)}\n\n{table(columns, rows)}"


def _flawed(earlier: Record) -> str:
    return (
        f"Record `{earlier['record']}.json`, NVIDIA H100. **Its neighbours were too slow.** They worked on one "
        "micro-batch after another, where neighbours work on several at once: at stage 0 of four, gradients arrived "
        "every 3 (F + B), not every F + B, so one lane took 41 ms for a batch of *bert* instead of the 22 ms of a "
        "pipeline that flushes. Stage 3 waited too little between batches, and took 16 ms. So the ratios of stages "
        "0 and 1 are too high, and those of stage 3 too low. What four lanes reach is near the rate of a full GPU: "
        "3,000 samples/s of *bert*, about twice the 1,430 of one lane that takes 22 ms."
    )


def one_card_more(suite: Record | None, earlier: Record) -> str:
    """Return what was measured beside lanes: updates, and how far kernels fill the multiprocessors."""
    new = _report(suite, "one worker")
    if new is None:
        return NOTHING
    rows = []
    for row in new["rows"]:
        kind = row.get("row")
        if "failed" in row and kind:
            rows.append((row["model"], kind, f"failed: {row['failed']}"))
        elif kind == "update":
            text = f"AdamW(fused=True) {row['fused_adamw_ms']:.3f} ms, ElasticAveraging(AdamW) "
            text += f"{row['elastic_adamw_ms']:.3f} ms, {row['times']:.2f} times, {row['weights'] / 1e6:.0f} M weights"
            rows.append((row["model"], "an elastic update beside AdamW", text))
        elif kind == "hidden update":
            text = f"batch {row['compute_ms']:.2f} ms, two updates {row['updates_ms']:.2f} ms, both at once "
            text += f"{row['both_ms']:.2f} ms: {100 * row['hidden']:.0f} % of the updates hidden"
            rows.append((row["model"], "an elastic update beside compute", text))
        elif kind == "occupancy" and "blocks_fill" in row:
            text = f"{100 * row['blocks_fill']:.0f} % of multiprocessors have a block, "
            text += f"{100 * row['warps_fill']:.0f} % of "
            text += (
                f"warps; {row['kernels']:,} kernels of {row['mean_us']:.1f} µs, {row['at_once']:.2f} at once"
            )
            rows.append((row["model"], f"kernels, N = {row['N']}", text))
    return table("model | what | measured", rows)


def one_card_cluster(suite: Record | None, earlier: Record) -> str:
    """Compare systems with one pipeline of 1F1B, on each model, precision and line."""
    found = _rates(suite, earlier)
    columns = list(found.get(_FIRST, {}))
    if not columns:
        return NOTHING
    first = found[_FIRST]
    rows = [("1F1B, N = 1, M = 4, samples/s", *(f"{first[column]:,.0f}" for column in columns))]
    for name, of in found.items():
        if name != _FIRST:
            cells = [f"{of[c] / first[c]:.2f}" if c in of else "" for c in columns]
            rows.append((name.removeprefix("avgpipe ").replace(" each, own", ""), *cells))
    heads = [", ".join(_column(*column)) + ":" for column in columns]
    return table(" | ".join(["", *heads]), rows)


def _column(model: str, precision: str, wire: float) -> Iterable[str]:
    yield model
    if precision != "fp32":
        yield precision
    if wire:
        yield "10 Gbit/s"


def one_card_partitions(suite: Record | None, earlier: Record) -> str:
    """Return whether partitions slow each other, and what to think of the rows below."""
    new = _report(suite, "quarters")
    if new is None:
        return (
            f"Record `{earlier['record']}.json`, NVIDIA H100: all four quarters at once multiplied matrices as fast as "
            "one alone (12.0 Tflop/s each). In this record models had an embedding and 8,192 words, and were "
            "cut by weights. Pipelines that share each batch ran within the warm-up, in which each "
            "round waits for the average; the other rows did not."
        )
    row = next((row for row in new["rows"] if row["row"] == "partitions"), {})
    if "alone" not in row:
        return f"{_of(suite)}. The partitions were not measured: {row.get('failed', 'the run ended before')}."
    part = row["together_to_alone"]
    verdict = (
        "so they do not slow each other"
        if row["holds"]
        else "**so they slow each other: this is no emulation**"
    )
    return (
        f"{_of(suite)}. All quarters at once multiplied matrices at {part:.2f} of the rate of one alone "
        f"({row['alone'][0]:.1f} Tflop/s, {row['sms']} multiprocessors), {verdict}."
    )


def one_card_expected(suite: Record | None, earlier: Record) -> str:
    """Return what was expected of the transformer in float32, beside what was measured."""
    found = _rates(suite, earlier)
    rows = []
    for expected, wire in ((_EXPECTED, False), (_EXPECTED_WITH_LINE, True)):
        for what, least_to_most, name in expected:
            of = {column: rate for column, rate in found.get(name, {}).items() if _is_asked(column, wire)}
            base = {column: rate for column, rate in found.get(_FIRST, {}).items() if _is_asked(column, wire)}
            ratio = next((rate / base[column] for column, rate in of.items() if column in base), None)
            rows.append((what, least_to_most, "" if ratio is None else f"{ratio:.2f}"))
    return table("transformer, float32 | expected: | measured:", rows)


def _is_asked(column: tuple[str, str, float], wire: bool) -> bool:
    return column[:2] == ("bert", "fp32") and bool(column[2]) == wire


def _rates(suite: Record | None, earlier: Record) -> dict[str, dict[tuple[str, str, float], float]]:
    """Return samples per second, by row, and by model, precision and line."""
    new = _report(suite, "quarters")
    found: dict[str, dict[tuple[str, str, float], float]] = defaultdict(dict)
    for row in new["rows"] if new else earlier["cluster"]["rows"]:
        if "samples_per_s" in row:
            found[row["row"]][row["model"], row["precision"], row["wire"]] = row["samples_per_s"]
    return found


def _report(suite: Record | None, step: str) -> Record | None:
    """The report of a step, if it measured anything on a GPU."""
    report: Record | None = (suite or {}).get("steps", {}).get(step, {}).get("report")
    measured = (
        report and report.get("device") != "cpu" and any("samples_per_s" in row for row in report["rows"])
    )
    return report if measured else None


def _of(suite: Record | None) -> str:
    assert suite is not None
    return f"Record `{suite['record']}.json`"
