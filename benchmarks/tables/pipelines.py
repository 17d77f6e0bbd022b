"""Schedules, links, memory and systems."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks.tables.markdown import MIB, Record, against, ms, table


def emulated(*records: Record) -> str:
    """Return bounds and rows of each case, in milliseconds per batch."""
    cases = [case for record in records for case in record["cases"]]
    bounds = [{_bound(b["name"]): b["seconds"] for b in case["bounds"]} for case in cases]
    times = [{row["name"]: row["median_s"] for row in case["rows"]} for case in cases]
    rows = [
        (name, *(ms(column[name]) if name in column else "" for column in columns))
        for columns in (bounds, times)
        for name in dict.fromkeys(name for column in columns for name in column)
    ]
    return table("|" + " | ".join(f"{_case(case)}:" for case in cases), rows)


def _bound(name: str) -> str:
    return "bound, " + name.replace("size/rate", "t")


def _case(case: Record) -> str:
    settings = case["settings"]
    rate = settings["rate_bits_per_s"]
    line = "loopback, shared memory" if rate is None else f"{rate / 1e9:g} Gbit/s"
    return f"{settings['activation_bytes'] // MIB} MiB, {line}"


def emulated_bars(*records: Record) -> str:
    cases = {_case(case): case for record in records for case in record["cases"]}
    small, large = cases["1 MiB, 1 Gbit/s"], cases["4 MiB, 1 Gbit/s"]
    loopback = cases["1 MiB, loopback, shared memory"]

    def time(case: Record, name: str) -> float:
        return float(next(row["median_s"] for row in case["rows"] if row["name"] == name))

    one, two = (f"avgpipe advance-forward, N = {n}" for n in (1, 2))
    ours = time(small, two)
    transfers = next(b["seconds"] for b in small["bounds"] if b["name"].startswith("flush and"))
    best = min(row["median_s"] for row in small["rows"] if row["name"].startswith("torch"))
    at_most = [
        ("one pipeline, 1 MiB, over flush and transfers", 1.06, time(small, one) / transfers),
        ("two pipelines, 1 MiB, over no bubble", 1.10, ours / small["limit_s"]),
        ("two pipelines, 4 MiB, over the line's bound", 1.15, time(large, two) / large["limit_s"]),
        ("two pipelines, loopback, over no bubble", 1.05, time(loopback, two) / loopback["limit_s"]),
    ]
    at_least = [
        ("torch's best schedule over two pipelines, 1 MiB", 1.6, best / ours),
        ("torch's 1F1B over two pipelines, 1 MiB", 2.3, time(small, "torch 1f1b") / ours),
    ]
    rows = [(what, f"at most {bar:.2f}", against(found, most=bar, digits=3)) for what, bar, found in at_most]
    rows += [(what, f"at least {bar}", against(found, bar)) for what, bar, found in at_least]
    return table("ratio | bar | measured:", rows)


def real_models(*records: Record) -> str:
    columns = []
    for record in records:
        single = max((r for r in record["rows"] if "one process" in r["name"]), key=lambda r: r["of_limit"])
        column = {"one process, best of 1, 2, 4, 8 micro-batches": single}
        column |= {_model_row(r["name"]): r for r in record["rows"] if "one process" not in r["name"]}
        columns.append({k: f"{r['of_limit']:.3f} ({ms(r['median_s'])})" for k, r in column.items()})
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    return table("|" + " | ".join(f"{record['model']}:" for record in records), rows)


def _model_row(name: str) -> str:
    return name.partition(" (")[0].replace(", shm", "")


def compiled(record: Record) -> str:
    rows = record["rows"]
    return table(
        "| plain: | compiled: | ratio: | first batch, plain: | first batch, compiled:",
        (
            (
                plain["name"],
                ms(plain["median_s"]),
                ms(made["median_s"]),
                f"{made['of_plain']:.3f}",
                ms(plain["first_s"]),
                ms(made["first_s"]),
            )
            for plain, made in zip(rows[::2], rows[1::2])
        ),
    )


def overhead(record: Record) -> str:
    rows = ((row["name"], f"{row['us_per_action']:,.0f}") for row in record["rows"])
    return table("| us per action:", rows)


def launches(record: Record) -> str:
    """Compare what a batch costs the host with and without graphs."""
    rows = (
        (
            *(
                f"{row['model']}, N = {row['pipelines']}",
                *(f"{row['ms'][way]:.1f}" for way in ("plain", "eager", "graphs")),
            ),
            *(f"{row['ms']['eager'] / row['ms']['graphs']:.1f}", f"{row['launches']:g}"),
        )
        for row in record["rows"]
    )
    return table(
        "| plain, ms: | eager, ms: | with graphs, ms: | eager over graphs: | launches of graphs:", rows
    )


def audit(record: Record) -> str:
    """Compare the first batches with and without the audit."""
    rows = []
    for row in record["rows"]:
        off, on = (row["first_s"][check] for check in ("off", "first-batch"))
        least, most = (row["peak_mib"][check] for check in ("off", "first-batch"))
        more = against(row["more_batches"], most=3.0, digits=1)
        rows.append(
            (
                *(row["model"], ms(row["later_s"]), ms(off), ms(on), more),
                *(f"{least:,.0f}", f"{most:,.0f}", f"{most - least:+,.0f}"),
            )
        )
    first = record["first"]
    return table(
        f"model | a later batch, ms: | first {first} without, ms: | with, ms: | more, in later batches: | "
        "peak without, MiB: | with, MiB: | more, MiB:",
        rows,
    )


def audit_later(record: Record) -> str:
    """Compare later batches with and without the audit."""
    rows = []
    for row in record["later"]:
        low, _, high = statistics.quantiles(row["ratios"], n=4)
        ratio = against(row["ratio"], most=1.01, digits=3)
        calls = row["calls"] or {}
        counted = (f"{calls[check]:,.0f}" if calls else "" for check in ("off", "first-batch"))
        rows.append((row["what"], f"{row['off_ms']:.3f}", ratio, f"{low:.3f} to {high:.3f}", *counted))
    return table(
        "batch of | without, ms: | with, over without: | quartiles: | function calls without: | with:",
        rows,
    )


def latency(record: Record) -> str:
    (section,) = (s for s in record["sections"] if s["question"] == "latency")
    bars = {"shm, the ring alone, spinning": 2.0, "shm, the ring alone, sleeping": 35.0}
    rows = []
    for row in section["rows"]:
        us = 1e3 * row["median_ms"]
        bar = bars.get(row["name"])
        rows.append(
            (row["name"], against(us, most=bar, digits=2 if us < 10 else 0), f"{bar:g}" if bar else "")
        )
    return table("1 KiB one way | us: | bar:", rows)


def bandwidth(record: Record) -> str:
    asked = {q: [s for s in record["sections"] if s["question"] == q] for q in ("handed over", "read once")}

    def line(what: str, question: str, figure: Callable[[Record, Record], str]) -> tuple[str, ...]:
        return what, *(figure(s, {row["name"]: row for row in s["rows"]}) for s in asked[question])

    def over_gloo(section: Record, rows: Record) -> str:
        return against(
            rows["shm"]["ratios"]["plain gloo"], 2 if section["elements"] == 64 * MIB else 3, digits=1
        )

    rows = [
        line("shared memory, handed over, GB/s", "handed over", lambda s, r: f"{r['shm']['gb_per_s']:.1f}"),
        line("times plain gloo (bar 3; 64 MiB: 2)", "handed over", over_gloo),
        line(
            "of one memcpy (bar 0.55)",
            "handed over",
            lambda s, r: against(r["shm"]["fraction_of_limit"], 0.55),
        ),
        line(
            "handed over and read once, times plain gloo",
            "read once",
            lambda s, r: f"{r['shm']['ratios']['plain gloo']:.1f}",
        ),
        line(
            "the same, of one memcpy and one read",
            "read once",
            lambda s, r: f"{r['shm']['fraction_of_limit']:.2f}",
        ),
    ]
    return table("|" + " | ".join(f"{section['case']}:" for section in asked["handed over"]), rows)


def group_link(record: Record) -> str:
    """Return a row for each question and size; bars only where there are some."""
    words = {"to_and_fro": "to and fro", "in_a_row": "in a row"}
    rows = []
    for row in record["rows"]:
        plain, link = (statistics.median(row["seconds"][way]) for way in ("plain", "link"))
        kib, alternates = row["bytes"] >> 10, row["question"] == "to_and_fro"
        rows.append(
            (
                f"{kib:,} KiB, {words[row['question']]}",
                f"{1e6 * plain:,.0f}",
                f"{1e6 * link:,.0f}",
                against(link / plain, most=1.5 if kib == 1 and alternates else None),
                against(plain / link, least=0.9 if kib >= 1024 else None),
            )
        )
    bars = "time (bar 1.5 in the first line): | bandwidth (bar 0.9 from 1 MiB on):"
    return table(f"| plain gloo, us: | link, us: | {bars}", rows)


def memory(record: Record) -> str:
    rows = []
    for key in dict.fromkeys((r["kind"], r["link"], r["pipelines"]) for r in record["rows"]):
        kind, link, pipelines = key
        stages = [r for r in record["rows"] if (r["kind"], r["link"], r["pipelines"]) == key]
        ratios = [r["own_bytes"] / r["expected_bytes"] for r in stages if r["expected_bytes"]]
        ours = kind == "avgpipe"
        rows.append(
            (
                f"avgpipe, {link}, N = {pipelines}" if ours else f"torch {kind}, {link}",
                _mib(stages, "own_bytes", 0),
                _mib(stages, "expected_bytes", 0) if ratios else "",
                against(max(ratios), most=1.10 if ours else None) if ratios else "",
                _mib(stages, "growth_bytes", 1),
            )
        )
    return table(
        "| peak, stages 0 to 3 | expected | largest ratio (bar 1.10): | growth, batches 30 to 300", rows
    )


def meta_memory(record: Record) -> str:
    def shares(of: list[Record], key: str) -> str:
        return ", ".join(f"{row[key] / record['model_bytes']:.2f}" for row in of)

    rows = []
    for way in dict.fromkeys(row["way"] for row in record["rows"]):
        of = [row for row in record["rows"] if row["way"] == way]
        largest = max(row["growth_bytes"] for row in of) / record["model_bytes"]
        bar = record["bar"] if way.startswith("meta") else None
        columns = [shares(of, key) for key in ("stage_bytes", "growth_bytes", "peak_bytes")]
        rows.append((way, *columns, against(largest, most=bar)))
    return table("| its stage | growth to the peak | the peak itself | largest growth (bar 0.35):", rows)


def report_page(record: Record) -> str:
    """Return the size of a report page, and how fast it is drawn."""

    def seconds(key: str, most: float | None = None) -> str:
        found = [row[key] for row in record["rows"]]
        return f"{against(statistics.median(found), most=most)} ({min(found):.2f} to {max(found):.2f})"

    requests = sum(len(row["requests"]) for row in record["rows"])
    size = against(record["bytes"] / 1e6, most=record["most_bytes"] / 1e6)
    row = (
        f"{record['batches']:,}",
        size,
        f"{requests}",
        seconds("wall_s", record["most_s"]),
        seconds("work_s"),
    )
    return table("batches: | MB: | requests: | s until everything is drawn: | s of processor time:", [row])


def _mib(rows: list[Record], key: str, digits: int) -> str:
    return ", ".join(f"{row[key] / MIB:.{digits}f}" for row in rows)


def compared(record: Record) -> str:
    rows = [
        (
            row["system"],
            f"{row['stages']}/{row['pipelines']}/{row['micro_batches']}",
            f"{record['workers']} replicas" if row["system"].startswith("data-parallel") else row["schedule"],
            f"{row['epoch_seconds']:.1f}",
            f"{row['samples_per_second']:.0f}",
            f"{row['peak_memory_bytes'] / MIB:.0f}",
            f"{100 * row['busy_fraction']:.0f} %",
            f"{row['best_metric']:.1f}",
            f"{row['metric']:.1f}",
        )
        for row in record["systems"]
    ]
    columns = (
        "system | stages, pipelines, micro-batches | schedule | s/epoch: | samples/s: | peak MiB: | busy: | "
    )
    columns += "best perplexity: | last perplexity:"
    return table(columns, rows) + f"\n\n{record['advice']}"


def simulated(record: Record) -> str:
    """Return measured and simulated times, both cases side by side."""
    names = [row["name"] for row in record["cases"][0]["rows"]]
    cases = [{row["name"]: row for row in case["rows"]} for case in record["cases"]]
    rows = []
    for name in names:
        cells: list[str] = []
        for case in cases:
            row = case[name]
            cells.append(ms(row["median_s"]))
            if row.get("simulated_s"):
                cells += [
                    ms(row["simulated_s"]),
                    against(row["over_simulated"], 0.9, 1.1, 3),
                    f"{row['over_simulated_as_measured']:.3f}",
                ]
            else:
                cells += [""] * 3
        rows.append((name, *cells))
    lines = ["loopback" if c["settings"]["rate_bits_per_s"] is None else "1 Gbit/s" for c in record["cases"]]
    return table(
        "|"
        + " | ".join(f"{at}: ms: | simulated: | measured/simulated: | with measured times:" for at in lines),
        rows,
    )
