"""Simulations, partitions, predictions and tuned plans."""

from __future__ import annotations

import statistics

from benchmarks.tables.markdown import MIB, Record, against, ms, percent, spread_of, table


def rates(record: Record) -> str:
    rows = []
    for row in record["rates"]:
        found = [row["actions"] / seconds / 1e6 for seconds in row["seconds"]]
        middle = row["actions"] / statistics.median(row["seconds"]) / 1e6
        bar = None if row["case"].startswith("plain") else 20
        rows.append(
            (row["case"], f"{row['actions']:,}", against(middle, bar), f"{min(found):.2f}-{max(found):.2f}")
        )
    return table("case | actions: | million per second (bar 20): | spread:", rows)


def large_simulations(record: Record) -> str:
    rows = [
        (row["case"], f"{row['actions']:,}", f"{row['seconds']:.2f}", f"{row['peak_bytes'] / MIB:.0f}")
        for row in record["large"]
    ]
    return table("1,024 stages, 4,096 micro-batches | actions: | seconds: | peak MiB of the process:", rows)


def growth(record: Record) -> str:
    rows = [
        (
            f"N = {n}, seconds",
            *(f"{statistics.median(r['seconds']):.3g}" for r in record["growth"] if r["pipelines"] == n),
        )
        for n in (1, 2)
    ]
    return table("16 stages, 1F1B, actions | 10^4: | 10^5: | 10^6: | 10^7: | 10^8:", rows)


def vgg16(record: Record) -> str:
    layers = [layer["name"] for layer in record["profile"]["layers"]]
    rows = [
        (
            name,
            "-".join(map(str, found["replication"]))
            if set(found["replication"]) != {1}
            else f"{len(found['replication'])} x 1",
            ", ".join(layers[b] for b in found["boundaries"])
            if len(found["boundaries"]) < len(layers) - 1
            else "every layer",
            ms(found["slowest_s"], 1),
        )
        for name, found in record["rows"].items()
    ]
    return table("| replication | cut before | predicted ms of the slowest stage:", rows)


def vgg16_by_efficiency(record: Record) -> str:
    rows = ((f"{float(part):.0%}", *found.split(", ")) for part, found in record["by_efficiency"].items())
    return table("of the device's peak: | replication | cut before", rows)


def predictions(record: Record) -> str:
    rows, errors, pairs, sizes = [], [], [], []
    for found in record["settings"]:
        plan = found["plan"]
        predicted, measured = (statistics.median(found[key]) for key in ("predicted_s", "measured_s"))
        errors.append(predicted / measured - 1)
        pairs.append(statistics.median(p / m for p, m in zip(found["predicted_s"], found["measured_s"])) - 1)
        workers = [
            tuple(statistics.median(samples) / MIB for samples in columns)
            for columns in zip(zip(*found["predicted_bytes"]), zip(*found["measured_bytes"]))
        ]
        sizes.append(max((p / m - 1 for p, m in workers), key=abs))
        rows.append(
            (
                found["model"],
                *(plan[key] for key in ("stages", "pipelines", "micro_batches")),
                plan["partition"] or "-",
                ms(predicted, 1),
                ms(measured, 1),
                percent(errors[-1], 12),
                percent(pairs[-1], 12),
                ", ".join(f"{p:.0f}/{m:.0f}" for p, m in workers),
                percent(sizes[-1], 10),
            )
        )
    columns = (
        "model | K: | N: | M: | cut | predicted ms: | measured ms: | error: | in pairs: | "
        "MiB, predicted/measured | error:"
    )
    return table(columns, rows) + (
        f"\n\nTime: {spread_of(errors)}, mean {100 * statistics.fmean(errors):+.1f} %; in pairs: {spread_of(pairs)}.\n"
        f"Peak memory: {spread_of(sizes)}. {len(rows)} settings."
    )


def emulated_predictions(record: Record) -> str:
    rows = [
        (
            *(found[key] for key in ("workers", "pipelines", "micro_batches")),
            ms(found["predicted_s"], 1),
            ms(found["measured_s"], 1),
            percent(found["error"], 12),
        )
        for found in record["settings"]
    ]
    errors = [found["error"] for found in record["settings"]]
    return (
        table("K: | N: | M: | predicted ms: | measured ms: | error:", rows)
        + f"\n\n{spread_of(errors).capitalize()}, {len(rows)} settings."
    )


def tuning_time(record: Record) -> str:
    seconds = record["tuning"]["seconds"]
    parts = [("profile", "profile_s"), ("search", "search_s"), ("time the five best plans", "trials_s")]
    tuned = sum(seconds[key] for _, key in parts)
    rows = [(what, f"{seconds[key]:.2f}") for what, key in parts]
    count = sum(row["what"] == "traversal" for row in record["tuning"]["baselines"])
    rows += [
        ("`avgpipe tune`, total", f"{tuned:.0f}"),
        (f"the traversal of {count} settings", f"{seconds['traversal_s']:,.0f}"),
        ("traversal over tuning (bar 20)", against(seconds["traversal_s"] / tuned, 20, digits=1)),
    ]
    return table("| seconds:", rows)


def finals(record: Record) -> str:
    found = record["finals"]
    medians = [statistics.median(row["batch_s"]) for row in found]
    turns = [statistics.median(turn) for turn in zip(*(row["batch_s"] for row in found))]
    ratios = [statistics.median(own / turn for own, turn in zip(row["batch_s"], turns)) for row in found]
    settings = [n for n, row in enumerate(found) if "setting" in row["row"]]
    best, best_in_turns = (min(values[n] for n in settings) for values in (medians, ratios))
    rows = [
        (
            row["row"],
            row["plan"]["pipelines"],
            row["plan"]["micro_batches"],
            row["plan"]["partition"],
            "K-1-k" if row["plan"]["advance"] is None else row["plan"]["advance"],
            ms(median, 1),
            against(median / best, most=1.03 if row["row"].startswith("tuned") else None, digits=3),
            f"{ratio / best_in_turns:.3f}",
        )
        for row, median, ratio in zip(found, medians, ratios)
    ]
    return table("row | N: | M: | cut | advance | ms: | over the best setting: | in turns:", rows)


def large_plans(record: Record) -> str:
    rows = []
    for case in record["cases"]:
        pipeline = next(row for row in case["rows"] if row["what"] == "pipeline")
        rows.append(
            (
                f"{case['batch_size']:,}",
                f"{case['workers']:,}",
                f"{case['considered']:,}",
                f"{case['seconds']['search_s']:.1f}",
                case["plan"]["system"],
                *(
                    f"{case['batch_size'] / row['predicted_batch_s']:,.0f}"
                    for row in (case["rows"][0], pipeline)
                ),
            )
        )
    columns = (
        "batch: | workers: | plans considered: | search, s: | plan | samples/s predicted: | best pipeline:"
    )
    return table(columns, rows)
