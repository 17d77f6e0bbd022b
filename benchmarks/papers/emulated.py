"""Question: how fast is each system on the papers' cluster when the real runtime drives it, and is it as simulated?

    python -m benchmarks.papers.emulated --models gnmt,bert,awd-lstm            (as root: it makes network namespaces)

Three hosts of two workers, 1 Gbit/s between hosts, shared memory within. The plans are those of a record of
``benchmarks.papers.forecast``: on all six devices, and on as many of them as are best. The runtime, its links, its sums
and averages are real, activations and gradients are of their true sizes; stages take a V100's time by sleeping
(``benchmarks.papers.stages``). Devices compute for nothing else, so hosts may work slowly: everything is emulated so
many times slower that moving bytes and issuing actions, which two cores do for six hosts here, count for little.

``--scale S`` divides bytes and the rates of lines by S, ``--slower T`` multiplies seconds, and divides rates, by T; all
that is told is of the cluster itself. By default S is up to 16 where weights travel, whose true number would not fit
into this machine for six workers, as long as activations are much larger than a packet; else 1. Give several, 1,16, to
measure a row in several ways. A row with a pipeline on each host averages weights once in very many updates: it is
measured with a shorter period and as much less of them.

Every plan is a run of its own, and the record is written after each: ``--out`` goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from avgpipe.errors import PipelineError
from avgpipe.files import read_json
from avgpipe.units import format_bytes, format_seconds
from avgpipe_lab.bench.namespaces import check_namespaces
from benchmarks.common.record import RESULTS, say, write_record
from benchmarks.papers.cluster import profile_of
from benchmarks.papers.forecast import AVGPIPES, Contest
from benchmarks.papers.models import MODELS
from benchmarks.papers.runs import Emulation, emulation, measure

ROWS = (
    *("data parallel", "GPipe", "DAPPLE", "PipeDream", "PipeDream-2BW", "EA-Pipe", "zero bubble"),
    *("GPipe, 16 bits", "DAPPLE, 16 bits", "PipeDream, 16 bits", "PipeDream-2BW, 16 bits"),
    *("zero bubble, 16 bits", "AvgPipe, best", "AvgPipe, 16 bits, best", "AvgPipe, a pipeline on each host"),
    *("AvgPipe (P), best", "AvgPipe (P), 16 bits, best"),
    *("AvgPipe (G), N = 2", "AvgPipe (G), best"),
    *("AvgPipe (G), 16 bits, N = 1", "AvgPipe (G), 16 bits, N = 2", "AvgPipe (G), 16 bits, best"),
)
ALL = "all"  # in place of the names of rows
# Of a batch here, which has many gradients of true size, as the replicas of many micro-batches add them up.
_LONGEST_S = 120
_DEVICES = {"all": "all devices", "best": "as many devices as are best"}
EPOCHS = {
    # Pairs: as Vaswani et al. 2017, section 5.1, count those of WMT's English to German.
    "gnmt": {"WMT en-de": 4_500_000},
    # Dolan, Brockett 2005; Wang et al., ICLR 2019 (GLUE), table 1, with the number of its files.
    "bert": {"MRPC": 3_668, "QQP": 363_846},
    # Sequences of 70 words: Merity et al. 2018, section 5.
    "awd-lstm": {"PTB": 929_589 // 70},
    "awd-lstm-wikitext": {"WikiText-2": 2_088_628 // 70},
}
"""Samples of an epoch; of other models, what ``benchmarks.papers.models`` has."""


# ---- rows ------------------------------------------------------------------------------------------------------------


def described(model: str, batch_size: int, row: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the record: a forecast's with what was measured, and what follows from both."""
    epochs = EPOCHS.get(model, {"an epoch": MODELS[model].epoch_samples})
    per_second = batch_size / measured["median_s"]
    return {
        "system": row["system"],
        "described": row["described"],
        "way": row["way"],
        "binds": row["binds"],
        "memory_bytes": row["memory_bytes"],
        **measured,
        "samples_per_second": per_second,
        "epoch_s": {data: samples / per_second for data, samples in epochs.items()},
        "plan": row["plan"],
        "updates": row["updates"],
        "period": row["period"],
        "wire_bits": row["wire_bits"],
    }


def wanted(
    record: dict[str, Any], asked: argparse.Namespace
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield cases and rows of a forecast that are asked for."""
    places = [_DEVICES[name] for name in asked.devices]
    for case in record["cases"]:
        if case["model"] not in asked.models or case["devices"] not in places:
            continue
        if asked.batch_sizes and case["batch_size"] not in asked.batch_sizes:
            continue
        for row in case["rows"]:
            if ALL in asked.rows or row["system"] in asked.rows:
                yield case, row


def run(forecast: dict[str, Any], asked: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[None]:
    """Measure what ``cases`` have not; yield after each row. Rows of one plan are measured once."""
    known = {_key(case, row): row for case in cases for row in case["rows"]}
    contests: dict[tuple[str, int], Contest] = {}
    for case, row in wanted(forecast, asked):
        name, size = case["model"], case["batch_size"]
        if (name, size) not in contests:
            model = replace(MODELS[name], batch_size=size)
            contests[name, size] = Contest(model, profile_of(model, reading=forecast["reading"]))
        for scale, slower in product(asked.scale, asked.slower):
            made = emulation(contests[name, size], row, scale, slower)
            into = _case(cases, case)
            at = {"scale": made.scale, "slower": made.slower}
            if any(r["system"] == row["system"] and at.items() <= r.items() for r in into["rows"]):
                continue
            say(f"{name}, batches of {size}, {case['devices']}: {row['system']}: {row['described']}, {at}")
            key = _key(case, {**row, **at})
            if key in known:
                measured = {field: known[key][field] for field in known[key] if field not in row}
            else:
                try:
                    measured = _measured(made, asked)
                except PipelineError as error:
                    into["failed"].append({"system": row["system"], **at, "reason": str(error)})
                    say(f"failed: {error}")
                    yield
                    continue
            into["rows"].append(described(name, size, row, measured))
            known[key] = into["rows"][-1]
            yield


def _measured(made: Emulation, asked: argparse.Namespace) -> dict[str, Any]:
    batch_s = made.batch_s * made.slower
    if batch_s > _LONGEST_S:
        raise PipelineError(
            f"a batch would take {format_seconds(batch_s)} here; at most {_LONGEST_S} s are waited for"
        )
    return measure(made, asked.rounds, asked.batches)


def _case(cases: list[dict[str, Any]], case: dict[str, Any]) -> dict[str, Any]:
    """Return the case of the record that belongs to one of the forecast."""
    head = {name: case[name] for name in ("model", "batch_size", "devices")}
    found = next((c for c in cases if head.items() <= c.items()), None)
    if found is None:
        found = {**head, "rows": [], "failed": []}
        cases.append(found)
    return found


def _key(case: dict[str, Any], row: dict[str, Any]) -> str:
    """What rows have in common that are measured alike."""
    alike = ("plan", "updates", "period", "wire_bits", "scale", "slower")
    return json.dumps([case["model"], case["batch_size"], *(row[name] for name in alike)])


# ---- the program -----------------------------------------------------------------------------------------------------


def table(case: dict[str, Any]) -> Table:
    title = f"{case['model']}, {case['devices']}, batches of {case['batch_size']}, emulated"
    made = Table(
        "system", "plan", "batch", "simulated", "over it", "busy", "memory", "samples/s", title=title
    )
    for row in case["rows"]:
        busy = f"{100 * statistics.fmean(row['busy_fraction']):.0f} %"
        times = [format_seconds(row[name]) for name in ("median_s", "simulated_s")]
        memory, rate = format_bytes(row["memory_bytes"]), f"{row['samples_per_second']:.0f}"
        made.add_row(
            row["system"], row["described"], *times, f"{row['over_simulated']:.3f}", busy, memory, rate
        )
    return made


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
        return lambda text: [kind(part) for part in text.split(",")]

    parser.add_argument("--models", type=several(str), default=AVGPIPES)
    parser.add_argument(
        "--rows",
        type=lambda text: text.split(";"),
        default=ROWS,
        help=f"of the forecast, separated by semicolons, or {ALL}; default: {'; '.join(ROWS)}",
    )
    parser.add_argument(
        "--devices", type=several(str), default=["all", "best"], help="all of them, or as many as are best"
    )
    parser.add_argument("--batch-sizes", type=several(int), default=[], help="default: all of the forecast")
    parser.add_argument("--scale", type=several(float), default=[0.0])
    parser.add_argument("--slower", type=several(float), default=[0.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=4, help="of a round, where they are quick")
    parser.add_argument("--forecast", help="its record; default: the newest in benchmarks/results")
    parser.add_argument("--out", help="file of the record, which is gone on with if it is there")
    asked = parser.parse_args()
    unknown = [name for name in asked.models if name not in MODELS]
    unknown += [name for name in asked.devices if name not in _DEVICES]
    if unknown:
        known = f"models {', '.join(MODELS)}, devices {', '.join(_DEVICES)}"
        parser.error(f"unknown: {', '.join(unknown)}; there are {known}")
    return asked


def _forecast(path: str | None) -> dict[str, Any]:
    """Read a record of the forecast."""
    found = [Path(path)] if path else sorted(RESULTS.glob("papers-forecast-*.json"))
    if not found:
        raise FileNotFoundError(
            "there is no record of the forecast: run python -m benchmarks.papers.forecast"
        )
    record: dict[str, Any] = read_json(found[-1])
    return {"source": found[-1].name, **record}


def main() -> None:
    asked = _arguments()
    check_namespaces("this benchmark")
    forecast = _forecast(asked.forecast)
    path = Path(asked.out) if asked.out else None
    cases = read_json(path)["cases"] if path is not None and path.is_file() else []
    question = "the papers' systems on their emulated cluster, by the real runtime"
    settings = {"rounds": asked.rounds, "forecast": forecast["source"], "reading": forecast["reading"]}
    for case in cases:
        case["failed"] = []  # which may be better now
    for _ in run(forecast, asked, cases):
        # After each row: what has been measured is kept, whatever happens to the others.
        write_record("papers-emulated", question, {"settings": settings, "cases": cases}, asked.out)
    screen = Console(highlight=False, width=150)
    for case in cases:
        screen.print(table(case))
    sys.exit(1 if any(case["failed"] for case in cases) else 0)


if __name__ == "__main__":
    main()
