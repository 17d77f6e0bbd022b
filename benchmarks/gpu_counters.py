"""Question: what do the hardware's counters say of the kernels: memory's share, occupancy, registers?

    python benchmarks/gpu_counters.py --out build/counters.json

Runs itself under ncu, which profiles one launch of each kernel at 1e8 float32 elements, and prints one JSON object. The
clocks are left as they are. A driver that lets nobody profile is an answer, not an error.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# By what ncu calls them, what the record does. In base units: nanoseconds, bytes, per cent.
METRICS = {
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "launch__registers_per_thread": "registers",
    "launch__grid_size": "blocks",
    "gpu__time_duration.sum": "time_ns",
    "dram__bytes_read.sum": "read_bytes",
    "dram__bytes_write.sum": "written_bytes",
}
# Of a driver, or of a machine, that does not let it.
_REFUSALS = ("ERR_NVGPUCTRPERM", "LibraryNotLoaded", "not supported", "No kernels were profiled")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=float, default=1e8)
    parser.add_argument("--launch", action="store_true", help="only launch the kernels, as ncu does it")
    parser.add_argument("--out", type=Path, help="a file for the record, which is printed in any case")
    options = parser.parse_args()
    if options.launch:
        launch(int(options.elements))
        return
    done = subprocess.run(command(options.elements), capture_output=True, text=True)
    found = judge(done.returncode, done.stdout, done.stderr)
    text = json.dumps({"elements": int(options.elements), **found}, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    sys.exit(0 if found["kernels"] or found["refused"] else 1)


def command(elements: float) -> list[str]:
    asked = ["--metrics", ",".join(METRICS), "--kernel-name", "regex:avgpipe_", "--clock-control", "none"]
    program = [sys.executable, __file__, "--launch", "--elements", f"{elements:g}"]
    return ["ncu", "--csv", "--print-units", "base", *asked, *program]


def judge(code: int, out: str, err: str) -> dict[str, Any]:
    kernels = parse(out)
    text = out + err
    refused = next((why for why in _REFUSALS if why in text), "") if not kernels else ""
    if kernels:
        parts = (
            f"{name.removeprefix('avgpipe_')} {row['dram_percent']:.0f} % of DRAM"
            for name, row in kernels.items()
        )
        verdict = ", ".join(parts)
    elif refused:
        verdict = f"ncu may not profile here: {refused}"
    else:
        lines = text.strip().splitlines() or ["nothing was printed"]
        verdict = f"ncu ended with {code}: {lines[-1][:200]}"
    return {"verdict": verdict, "refused": refused, "kernels": kernels}


def parse(out: str) -> dict[str, dict[str, float]]:
    """Read ncu's CSV: by kernel, the figures of its last launch.

    A line is either one metric of one launch ("Metric Name", "Metric Value"), or all of a launch, in columns with a
    line of units below their names. Lines that begin with "==" are ncu's own.
    """
    lines = [line for line in out.splitlines() if line.startswith('"')]
    found: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(lines):
        if not row.get("Kernel Name"):
            continue  # units
        kernel = found.setdefault(row["Kernel Name"].partition("(")[0].removeprefix("void ").strip(), {})
        values = {row["Metric Name"]: row["Metric Value"]} if "Metric Name" in row else row
        kernel.update(
            {
                name: float(values[metric].replace(",", ""))
                for metric, name in METRICS.items()
                if values.get(metric)
            }
        )
    return {name: row for name, row in found.items() if "dram_percent" in row}


def launch(elements: int, device: str = "cuda") -> None:
    import torch

    import avgpipe_ext as ext

    x, grad, first, second, z, update, more = (
        torch.empty(elements, device=device).uniform_(0.005, 0.015) for _ in range(7)
    )
    others = [torch.empty(elements, device=device).uniform_(0.005, 0.015) for _ in range(3)]
    adamw: dict[str, Any] = {"lr": 1e-5, "step": 100}
    ext.elastic_adamw_(x, grad, first, second, z, update, 0.25, 1, **adamw)
    ext.elastic_pull_(x, z, 0.25)
    ext.pack([x], out=more)
    states = [first, others[0], second, others[1]]
    ext.elastic_round_([x, more], [grad, others[2]], states, z, 0.25, optimizer="adamw", **adamw)
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
