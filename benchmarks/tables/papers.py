"""The papers' systems on their emulated cluster."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf

from avgpipe.units import format_bytes, format_seconds
from benchmarks.papers.emulated import ROWS
from benchmarks.papers.real import WAYS
from benchmarks.statistics.run import CASES
from benchmarks.statistics.samples import SLACK, samples_to
from benchmarks.tables.markdown import Record, against, duration, table

_WITHIN = (0.9, 1.1)  # of the simulated time
_PIPELINES = ("GPipe", "DAPPLE", "PipeDream", "PipeDream-2BW", "zero bubble")
_BARS = {**dict.fromkeys(_PIPELINES[:3], 1.5), "PipeDream-2BW": 1.3, "zero bubble": 1.2, "data parallel": 3.0}
_OWN_BARS = {"awd-lstm": {"data parallel": 5.0}}
_MEAN = 1.7
_PROMPT = ("data-parallel", "gpipe", "dapple", "zero-bubble-h1", "zero-bubble-v")  # no gradient is late
Cell = Callable[[Record], str]


def papers_forecast(record: Record) -> str:
    """Return simulated seconds per batch and what limits them, for the measured rows of the forecast."""
    cases = published(record)
    rows = [
        (system, *(f"{format_seconds(row['batch_s'])} ({row['binds']})" if row else "" for row in found))
        for system in ROWS
        if any(found := [{r["system"]: r for r in case["rows"]}.get(system) for case in cases])
    ]
    return table("system | " + " | ".join(f"{_name(case)}:" for case in cases), rows)


def papers_batches(record: Record) -> str:
    """Return seconds per batch; in brackets, divided by the simulated ones."""
    return _by_case(
        record, lambda row: f"{format_seconds(row['median_s'])} ({against(row['over_simulated'], *_WITHIN)})"
    )


def papers_memory(record: Record) -> str:
    """Return the bytes of the device that needs the most."""
    return _by_case(record, lambda row: format_bytes(row["memory_bytes"]))


def papers_busy(record: Record) -> str:
    """Return the share of a batch in which devices compute: the mean and the least."""

    def cell(row: Record) -> str:
        found = row["busy_fraction"]
        return f"{100 * statistics.fmean(found):.0f} % ({100 * min(found):.0f} %)"

    return _by_case(record, cell)


def papers_epochs(record: Record) -> str:
    """Return the seconds of an epoch of each data set."""
    return _by_case(
        record, lambda row: "; ".join(f"{data} {duration(s)}" for data, s in row["epoch_s"].items())
    )


def papers_plans(record: Record) -> str:
    """Return the plan of each row and what limits its speed; for the records of the forecast too."""
    rows = [
        (_name(case), row["system"], row["described"], row["binds"])
        for case in published(record)
        for row in nearest(case)
    ]
    return table("model, devices | system | plan | what binds", rows)


def papers_batch_sizes(record: Record) -> str:
    """Return samples per second on all devices, for each batch size of the models with several sizes."""
    made = []
    for model in dict.fromkeys(case["model"] for case in record["cases"]):
        cases = [c for c in record["cases"] if c["model"] == model and c["devices"].startswith("all")]
        sizes = {c["batch_size"]: {row["system"]: row for row in nearest(c)} for c in cases}
        if len(sizes) < 2:
            continue
        rows = [
            (
                system,
                *(
                    f"{by[system]['samples_per_second']:,.0f}" if system in by else ""
                    for by in sizes.values()
                ),
            )
            for system in in_several([*sizes.values()])
        ]
        made.append(
            table(f"{model}, samples/s | " + " | ".join(f"batches of {size}:" for size in sizes), rows)
        )
    return "\n\n".join(made)


def papers_scales(record: Record) -> str:
    """Return the rows that were measured in several ways, in each of these ways."""
    rows = []
    for case in record["cases"]:
        for system in dict.fromkeys(row["system"] for row in case["rows"]):
            found = [row for row in case["rows"] if row["system"] == system]
            for row in found if len(found) > 1 else ():
                times = (format_seconds(row["median_s"]), f"{row['over_simulated']:.3f}")
                rows.append((_name(case), system, f"{row['scale']:g}", f"{row['slower']:g}", *times))
    columns = (
        "model, devices | system | bytes and rates divided by: | times slower: | batch: | over simulated:"
    )
    return table(columns, rows)


def papers_targets(record: Record) -> str:
    """Return the time to target, its range over seeds, and the passes that it takes."""
    rows = []
    for case in published(record):
        times = [_to_target(row) for row in case["rows"]]
        best = min((time[0] for time in times if time and time[0] is not None), default=None)
        for row, time in zip(case["rows"], times):
            if time is None or time[0] is None or best is None:
                cells = ["not trained" if time is None else "not reached", "", ""]
            else:
                ends = ["never" if end is None else duration(end) for end in time[1:]]
                passes = f"{row['passes'][0]:.3f}"
                cells = [
                    f"{duration(time[0])} ({ends[0]} to {ends[1]})",
                    passes,
                    f"{time[0] / best:.2f}",
                ]
            rows.append((_name(case), row["system"], row["way"] or "", *cells))
    return table("model, devices | system | trained as | to target: | passes: | over the best:", rows)


def papers_bars(record: Record) -> str:
    """Return each system's time to target relative to AvgPipe's best setting within GPipe's memory.

    It is a lower bound if a system misses the target: as if it needed only the samples of one pipeline.
    """
    cases, found = published(record), {}
    for place, case in enumerate(cases):
        rows = {row["system"]: row for row in case["rows"]}
        ours = [row for system, row in rows.items() if system.startswith("AvgPipe (G)")]
        known = [time[0] for row in ours if (time := _to_target(row)) and time[0] is not None]
        for system in (name for name in rows if not name.startswith("AvgPipe")):
            time = _to_target(rows[system])
            reached = time is not None and time[0] is not None
            of_epochs = case["epochs"] * next(iter(rows[system]["epoch_s"].values())) / min(known)
            found[system, place] = (time[0] / min(known) if reached else of_epochs), reached
    bars = [{**_BARS, **_OWN_BARS.get(case["model"], {})} for case in cases]
    made = []
    for system in (name for name in ROWS if any((name, place) in found for place in range(len(cases)))):
        cells = []
        for place, bar in enumerate(bars):
            ratio, reached = found.get((system, place), (None, True))
            least = "" if reached else "\N{GREATER-THAN OR EQUAL TO} "
            cells.append("" if ratio is None else least + against(ratio, least=bar.get(system)))
        made.append((system, *cells))
    means = []
    for place in range(len(cases)):
        ratios = [found[system, place][0] for system in _PIPELINES if (system, place) in found]
        means.append(against(statistics.geometric_mean(ratios), least=_MEAN))
    made.append(("pipeline systems, geometric mean", *means))
    return table("system | " + " | ".join(f"{_name(case)}:" for case in cases), made)


def _to_target(row: Record) -> list[float | None] | None:
    """Return median and range of the first data set."""
    found: list[float | None] | None = next(iter(row["seconds_to_target"].values()))
    return found


def papers_real(record: Record) -> str:
    """Return median seconds to the target by system and workload, also relative to AvgPipe's best setting.

    The target is the highest last loss of systems whose gradients are not late, plus 0.5 %. The time of a
    run that was stopped early is estimated from its time per sample, and marked as approximate.
    """
    workloads = list(record["lines"])
    found = {workload: _seconds_to_target(record, workload) for workload in workloads}
    rows = []
    for way in WAYS:
        cells = []
        for workload in workloads:
            times = found[workload]
            best = min(
                statistics.median(seeds) for name, (seeds, _) in times.items() if name.startswith("avgpipe")
            )
            cells.append(_real_cell(*times[way], best) if way in times else "")
        if any(cells):
            rows.append((way, *cells))
    return table("way | " + " | ".join(f"{workload}:" for workload in workloads), rows)


def _real_cell(seeds: list[float], whole: bool, best: float) -> str:
    usual = statistics.median(seeds)
    if usual == inf:
        return "never"
    ends = "" if len(seeds) == 1 else f"; {_seconds(min(seeds))} to {_seconds(max(seeds))}"
    return f"{'' if whole else 'about '}{_seconds(usual)} ({usual / best:.2f}{ends})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if 100 <= seconds < 1000 else duration(seconds)


def _by_way(record: Record, workload: str) -> dict[str, list[Record]]:
    """Return the runs of each system: those to the end, if there are any."""
    found: dict[str, list[Record]] = {}
    for run in sorted(record["runs"], key=lambda run: not run["whole"]):
        if run["workload"] == workload:
            of_way = found.setdefault(run["way"], [])
            if run["whole"] or not (of_way and of_way[0]["whole"]):
                of_way.append(run)
    return found


def _seconds_to_target(record: Record, workload: str) -> dict[str, tuple[list[float], bool]]:
    """Return the seconds of each system's seeds, and whether they were measured to the end."""
    found = _by_way(record, workload)
    prompt = [run for way in _PROMPT for run in found.get(way, ()) if run["whole"]]
    target = (1 + SLACK) * max(run["losses"][-1][1] for run in prompt)
    usual = statistics.median(samples_to(_by_samples(run), target) for run in prompt)

    def seconds(run: Record) -> float:
        if not run["whole"]:
            return usual * _sample_s(run)
        needed = samples_to(_by_samples(run), target)
        between = next((pair for pair in pairwise(_clock(run)) if needed <= pair[1][0]), None)
        if between is None:
            return inf
        (before, from_s), (after, to_s) = between
        return from_s + (to_s - from_s) * (needed - before) / (after - before)

    return {way: ([seconds(run) for run in runs], runs[0]["whole"]) for way, runs in found.items()}


def _sample_s(run: Record) -> float:
    """Return the seconds per sample after the last validation but one."""
    (half, from_s), (last, to_s) = _clock(run)[-2:]
    return float((to_s - from_s) / (last - half))


def _clock(run: Record) -> list[tuple[int, float]]:
    """Return samples and seconds at the beginning and at each validation."""
    return [(0, 0.0), *((samples, taken) for samples, _, taken in run["losses"])]


def _by_samples(run: Record) -> list[tuple[int, float]]:
    return [(samples, loss) for samples, loss, _ in run["losses"]]


def papers_real_lines(record: Record) -> str:
    """Return the speed of the line, and the figures that it was computed from."""
    rows = [
        (
            workload,
            format_seconds(line["sample_s"]),
            format_bytes(line["cut_bytes"]),
            f"{line['share']:.2f}",
            f"{line['bits_per_s'] / 1e6:.1f} Mbit/s",
        )
        for workload, line in record["lines"].items()
    ]
    columns = (
        "workload | a sample on one core: | its bytes at the cut: | line over compute in the cluster: | line:"
    )
    return table(columns, rows)


def papers_real_plans(record: Record) -> str:
    """Return each system's plan, forecast and measured seconds per batch, and recorded busy shares."""
    rows = []
    for workload, line in record["lines"].items():
        by_way = _by_way(record, workload)
        for way, runs in ((way, by_way[way]) for way in WAYS if way in by_way):
            plan = line["plans"][way]
            batch_s = statistics.median(_batch_size(run) * _sample_s(run) for run in runs)
            cuts = ", ".join(map(str, plan["partition"] or ()))
            ahead = "" if plan["advance"] is None else str(plan["advance"])
            times = (format_seconds(plan["forecast_s"]), format_seconds(batch_s))
            shares = zip(*(run["busy"] for run in runs if "busy" in run))
            busy = " ".join(f"{100 * statistics.median(of_worker):.0f} %" for of_worker in shares)
            rows.append((workload, way, cuts, str(plan["micro_batches"]), ahead, *times, busy))
    return table("workload | way | cuts | M: | advance: | forecast: | measured: | workers busy:", rows)


def _batch_size(run: Record) -> float:
    samples = run["losses"][-1][0]
    return float(samples / (run["batches"] or CASES[run["workload"]].batches))


def _by_case(record: Record, cell: Cell) -> str:
    """A row for each system, a column for each case of a published batch size."""
    cases = published(record)
    by_system = [{row["system"]: row for row in nearest(case)} for case in cases]
    systems = dict.fromkeys(system for found in by_system for system in found)
    rows = [
        (system, *(cell(found[system]) if system in found else "" for found in by_system))
        for system in systems
    ]
    return table("system | " + " | ".join(f"{_name(case)}:" for case in cases), rows)


def published(record: Record) -> list[Record]:
    """Return the first case of each model and number of devices, where the batch is the model's own."""
    first: dict[tuple[str, str], Record] = {}
    for case in record["cases"]:
        first.setdefault((case["model"], case["devices"]), case)
    return list(first.values())


def in_several(found: Sequence[dict[str, Record]]) -> list[str]:
    """Return the systems of at least two cases, if there are as many cases."""
    counts = Counter(system for rows in found for system in rows)
    return [system for system, count in counts.items() if count > 1]


def nearest(case: Record) -> Sequence[Record]:
    """Return a case's rows; of those measured several times, the one with bytes nearest to the true ones."""
    found: dict[str, Record] = {}
    for row in case["rows"]:
        known = found.setdefault(row["system"], row)
        if row.get("scale", 1) < known.get("scale", 1):
            found[row["system"]] = row
    places = {system: place for place, system in enumerate(ROWS)}
    return sorted(found.values(), key=lambda row: places.get(row["system"], len(ROWS)))


def _name(case: Record) -> str:
    return f"{case['model']}, {case['devices']}"
