"""Losses of replicas and workloads."""

from __future__ import annotations

import statistics

from benchmarks.tables.markdown import Record, table


def losses(record: Record) -> str:
    rates = list(next(iter(record["losses"].values())))
    rows = []
    for name, found in record["losses"].items():
        means = {rate: statistics.fmean(found[rate]) for rate in rates}
        cells = [f"{means[rate]:.3f} ({max(found[rate]) - min(found[rate]):.3f})" for rate in rates]
        rows.append((name, *cells, min(rates, key=means.__getitem__)))
    return table("|" + " | ".join(f"lr {rate}:" for rate in rates) + " | best lr:", rows)


_DATA = {
    "awd-lstm": ("`awd-lstm`", "WikiText-2"),
    "gnmt": ("`gnmt`", "Multi30k"),
    "bert": ("`bert`", "MRPC"),
    "bert-masked": ("`bert`", "masked WikiText-2"),
    "gpt": ("`gpt`", "WikiText-2"),
    "resnet": ("`resnet`", "CIFAR-10"),
    "vgg": ("`vgg`", "CIFAR-10"),
    "alexnet": ("`alexnet`", "CIFAR-10"),
    "resnet-mnist": ("`resnet`", "MNIST"),
}
_RATES = {"none": "lr as for N = 1", "sqrt": "lr x sqrt(N)", "linear": "lr x N"}


def workloads(record: Record) -> str:
    found, rows = record["rows"], []
    scalings = [s for s in _RATES if f"awd-lstm, N = 2, {s}" in found]
    variants = [f"N = 2, {s}" for s in scalings] or ["N = 2"]
    timed = "N = 2, sqrt" if scalings else "N = 2"
    for key, (name, data) in _DATA.items():
        if f"{key}, N = 1" not in found:
            continue
        one, two = found[f"{key}, N = 1"], found[f"{key}, {timed}"]
        metric = one["metric_name"]
        before = one["validations"][0]["metrics"][metric]
        trivial = one["trivial_metric"]
        rows.append(
            (
                f"{name}, {data}",
                f"{one['parameters'] / 1e6:.2f} M",
                f"{one['batches']:,} x {one['batch_size']}",
                metric,
                "-" if trivial is None else _metric(trivial),
                *(_metric(value) for value in (before, one["metric"])),
                *(_metric(found[f"{key}, {variant}"]["metric"]) for variant in variants),
                *(_duration(run) for run in (one, two)),
            )
        )
    headings = [f"N = 2, {_RATES[s]}:" for s in scalings] or ["N = 2:"]
    unit = "seconds" if next(iter(found.values()))["preset"] == "tiny" else "minutes"
    return table(
        "workload, data | parameters: | batches x samples: | metric | trivial answer: | before: | N = 1: | "
        + " | ".join(headings)
        + f" | {unit}, N = 1: | {unit}, {timed.replace(', ', ' ')}:",
        rows,
    )


def _metric(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _duration(run: Record) -> str:
    """Return the time of the whole command, and in brackets that of training alone."""
    if run["preset"] == "tiny":
        return f"{run['seconds']:.0f} ({run['train_seconds']:.0f})"
    return f"{run['seconds'] / 60:.1f} ({run['train_seconds'] / 60:.1f})"


def sixteen_bits(record: Record) -> str:
    rows = []
    for name, found in record["rows"].items():
        change = found["held_out_more"]
        rows.append(
            (
                name,
                f"{statistics.fmean(found['held_out']):.4f}",
                f"{max(found['held_out']) - min(found['held_out']):.4f}",
                f"{statistics.fmean(change):.1e}" if any(change) else "",
                f"{max(map(abs, change)):.1e}" if any(change) else "",
                f"{100 * statistics.fmean(found['zeros']):.2f} %",
            )
        )
    return table(
        "between stages | held-out loss: | spread over seeds: | mean change: | largest change: | "
        "gradients that become 0:",
        rows,
    )
