"""Results of the GPU suite; and, before there is a record, what it will test."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_suite import STAGES, Gpu, steps
from benchmarks.tables.markdown import NOTHING, Record, table

# Of rows in records that have no groups yet: benchmarks.gpu_pipelines has this group, too.
_SHARING = "sharing a batch on one full GPU, fp32"
_STATES = {"failed": "**failed**"}


def gpu_state(record: Record | None) -> str:
    if record is None or not record["gpu"]:
        return (
            "**Nothing has run on a GPU yet.** There is no figure of one on this page, nor anywhere else in this "
            "documentation: it says what `make gpu` is going to do."
        )
    gpu, versions = record["gpu"], record["versions"]
    cards = sorted({step["gpu"] or "no GPU" for step in record["steps"].values()})
    failed = [name for name, step in record["steps"].items() if step["state"] == "failed"]
    missing = [str(n) for n in STAGES if all(step["stage"] != n for step in record["steps"].values())]
    size = f"compute capability {gpu['capability']}, {gpu['memory_bytes'] / 2**30:.0f} GiB"
    found = [
        f"Run on {' and '.join(cards)} ({size}),",
        f"{record['date']}, torch {versions['torch']}, CUDA {versions['cuda']}, Python {versions['python']};",
        f"record `{record['record']}.json`.",
        f"**Failed: {', '.join(failed)}.**" if failed else "No step failed.",
        f"Not run: stage {', '.join(missing)}." if missing else "",
    ]
    return " ".join(filter(None, found))


def gpu_stages() -> str:
    every = steps(Gpu("", "9.0", 0))
    rows = []
    for number, what in STAGES.items():
        own = [step for step in every if step.stage == number]
        names = ", ".join(f"`{step.name}`" for step in own)
        rows.append((number, what, names, sum(step.limit_s for step in own)))
    rows.append(("", "all", "", sum(step.limit_s for step in every)))
    return table("stage | what | steps | at most, s:", rows)


def gpu_verdicts(record: Record | None) -> str:
    if record is None:
        return NOTHING
    rows = []
    for name, step in record["steps"].items():
        state = _STATES.get(step["state"], step["state"])
        rows.append(
            (step["stage"], f"`{name}`", state, _cell(step["says"]), f"{step['seconds']:.0f}", step["gpu"])
        )
    return table("stage | step | verdict | details | s: | on", rows)


def gpu_kernels(record: Record | None) -> str:
    """Return GB/s of the machine's copy and of our kernels."""
    report = _report(record, "kernels")
    if report is None:
        return NOTHING
    rows = []
    for section in report["sections"]:
        head = f"{section['elements'] / 1e6:.0f} M", section["question"], section["case"]
        for row in section["rows"]:
            if row["role"] == "ours" or (row["role"] == "limit" and section["question"] == "limit"):
                best = min(row.get("ratios", {}).values(), default=None)
                beside = f"{best:.2f}" if best is not None and row["role"] == "ours" else ""
                of_limit = f"{row['fraction_of_limit']:.2f}"
                rows.append(
                    (
                        *head,
                        f"`{row['name']}`",
                        f"{row['median_ms']:.3f}",
                        f"{row['gb_per_s']:.0f}",
                        of_limit,
                        beside,
                    )
                )
    return table(
        "elements | question | case | row | ms: | GB/s: | of the copy: | fastest in torch, times ours:", rows
    )


def gpu_counters(record: Record | None) -> str:
    report = _report(record, "counters")
    if report is None:
        return NOTHING
    if report["refused"]:
        return f"ncu may not profile on that machine: {report['refused']}."
    rows = [
        (
            f"`{name}`",
            f"{row['dram_percent']:.0f} %",
            f"{row['occupancy_percent']:.0f} %",
            f"{row['registers']:.0f}",
            f"{row['time_ns'] / 1e6:.3f}",
            f"{(row['read_bytes'] + row['written_bytes']) / report['elements']:.1f}",
        )
        for name, row in report["kernels"].items()
    ]
    return table("kernel | DRAM: | occupancy: | registers: | ms: | bytes moved per element:", rows)


def gpu_pipelines(record: Record | None) -> str:
    report = _report(record, "pipelines")
    if report is None:
        return NOTHING
    rows = []
    for model, made in report["rows"].items():
        for row in made:
            head = (model, row.get("group", _SHARING), row["name"])
            if "failed" in row:
                rows.append((*head, f"failed: {_cell(row['failed'])}", "", "", ""))
            elif "left_out" not in row:
                spread = f"{row['least']:.0f} to {row['most']:.0f}"
                peak = f"{row['peak_mib']:,}" if "peak_mib" in row else ""
                figures = f"{row['samples_per_s']:.0f}", spread, f"{row['against_plain']:.2f}", peak
                rows.append((*head, *figures))
    left = [row for made in report["rows"].values() for row in made if "left_out" in row]
    head = f"{report['stages']} stages, the transformer {report['width']} wide"
    head += f"; {len(left)} rows were left out for lack of time:\n\n" if left else ":\n\n"
    columns = "model | group | row | samples/s: | least to most: | times the group's first row: | peak, MiB:"
    return head + table(columns, rows)


def gpu_actions(record: Record | None) -> str:
    report = _report(record, "pipelines")
    trace = report and report.get("trace")
    if not trace:
        return NOTHING
    acts = [
        (a["action"], a["count"], a["host_us"], a.get("kernels", ""), a.get("device_us", ""))
        for a in trace["actions"]
    ]
    kernels = [
        (f"`{k['kernel']}`", k["count"], k["total_us"], k["mean_us"]) for k in trace["kernels_by_time"]
    ]
    copies = f"{trace['copies_during_a_kernel']} of {trace['copies_to_the_device']} copies to the device ran while a "
    at_once = trace["kernels_that_begin_during_one_of_another_stream"]
    copies += f"kernel did; {at_once} of {trace['kernels']} kernels began during one of another stream."
    return "\n\n".join(
        (
            table("action | count: | host, µs: | kernels: | device, µs:", acts),
            table("kernel | count: | together, µs: | each, µs:", kernels),
            copies,
        )
    )


def gpu_answers(record: Record | None) -> str:
    report = _report(record, "questions")
    if report is None:
        return NOTHING
    return table("question | answer", [(_cell(a["question"]), _cell(a["answer"])) for a in report["answers"]])


def _report(record: Record | None, name: str) -> Any:
    return None if record is None else record["steps"].get(name, {}).get("report")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")
