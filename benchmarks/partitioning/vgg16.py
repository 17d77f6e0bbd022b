"""Question: does PipeDream's partitioner find PipeDream's published plan for VGG-16 on 16 workers, 15-1?

    python -m benchmarks.partitioning.vgg16

The profile is computed from the published layers (``benchmarks.papers.models``): operations at a stated speed, weights,
activations. Plans for 16 workers on one slow network, and for 4 machines of 4; beside them data parallelism and one
worker per stage. Seconds are predictions of the method's own objective.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import avgpipe
from avgpipe.planning import Partition, partition
from avgpipe.planning.profile import LinkProfile, Profile
from benchmarks.papers import models
from benchmarks.papers.cluster import V100, profile_of

RESULTS = Path(__file__).parents[1] / "results"

EFFICIENCIES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5, 2.0)
SAMPLES = 64  # of a micro-batch, as PipeDream trained VGG-16
TEN_GBIT_BYTES_PER_S = 1.25e9
IN_MACHINE_BYTES_PER_S = 10e9  # PCIe


def vgg16(samples: int = SAMPLES, efficiency: float = V100.efficiency) -> Profile:
    """For micro-batches of so many samples on a V100 that reaches so much of its speed."""
    device = V100._replace(
        name=f"computed: {efficiency:.0%} of {V100.flop_per_s / 1e12:g} TFLOP/s", efficiency=efficiency
    )
    model = replace(models.vgg16(), batch_size=samples)
    return replace(profile_of(model, device), link=LinkProfile(0.0, TEN_GBIT_BYTES_PER_S))


def plans(profile: Profile) -> dict[str, Partition]:
    machines = [(4, IN_MACHINE_BYTES_PER_S), (4, TEN_GBIT_BYTES_PER_S)]
    return {
        "16 workers, 10 Gbit/s": partition(profile, method="pipedream", workers=16),
        "4 machines of 4, 10 Gbit/s between them": partition(profile, method="pipedream", levels=machines),
        "16 workers, data parallel": partition(profile, 1, method="pipedream", workers=16),
        "16 workers, a stage each": partition(profile, 16, method="pipedream", workers=16),
    }


def by_speed() -> dict[str, str]:
    """The replication on 16 workers and the layer behind its first cut, by the device's share of its speed."""
    found = {}
    for efficiency in EFFICIENCIES:
        profile = vgg16(efficiency=efficiency)
        plan = partition(profile, method="pipedream", workers=16)
        cut = profile.layers[plan.boundaries[0]].name if plan.boundaries else "no cut"
        found[f"{efficiency:g}"] = f"{_dashes(plan)}, {cut}"
    return found


def _dashes(plan: Partition) -> str:
    return "-".join(map(str, plan.replication))


def row(found: Partition) -> dict[str, Any]:
    return {
        "slowest_s": found.value,
        "replication": found.replication,
        "boundaries": found.boundaries,
        "stage_s": found.stage_s,
        "memory_bytes": found.memory_bytes,
    }


def profile_table(profile: Profile) -> list[str]:
    lines = ["layer             forward ms  backward ms  weights MiB  output MiB"]
    for layer in profile.layers:
        times = f"{1e3 * layer.forward_s[0]:>10.2f}  {1e3 * layer.backward_s[0]:>11.2f}"
        sizes = f"{layer.parameter_bytes / 2**20:>11.2f}  {layer.output_bytes[0] / 2**20:>10.2f}"
        lines.append(f"{layer.name:<16}  {times}  {sizes}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="of the record; default: benchmarks/results")
    asked = parser.parse_args()
    profile = vgg16()
    begin = time.perf_counter()
    found = plans(profile)
    seconds = time.perf_counter() - begin
    print("\n".join(profile_table(profile)))
    for name, plan in found.items():
        print(f"\n{name}: {_dashes(plan)}\n{plan}")
    speeds = by_speed()
    print("\n16 workers, by the share of the device's speed: replication, first layer of stage 1")
    print("\n".join(f"{share:>4}: {plan}" for share, plan in speeds.items()))
    date = time.strftime("%Y-%m-%d")
    record = {
        "question": "PipeDream's partitioner on VGG-16 and 16 workers: the plan, and predicted seconds of its "
        "slowest stage, link or synchronisation per micro-batch",
        "date": date,
        "command": "python -m benchmarks.partitioning.vgg16",
        "machine": {"cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"avgpipe": avgpipe.__version__, "python": platform.python_version()},
        "seconds": seconds,
        "samples": SAMPLES,
        "flop_per_s": V100.flop_per_s,
        "efficiency": V100.efficiency,
        "bytes_per_s": {"between": TEN_GBIT_BYTES_PER_S, "inside": IN_MACHINE_BYTES_PER_S},
        "rows": {name: row(plan) for name, plan in found.items()},
        "by_efficiency": speeds,
        "profile": json.loads(profile.to_json()),
    }
    path = Path(asked.out) if asked.out else RESULTS / f"partitioning-vgg16-{date}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
