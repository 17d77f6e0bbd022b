"""Question: what do four elastic replicas gain over one replica, given as many steps, and given as much work?

    OMP_NUM_THREADS=1 python -m benchmarks.elastic_averaging.run

Rows: one replica; four replicas, each with a batch of its own at every step; one replica with four times the steps,
the work of four. Held-out loss of examples/elastic_averaging.py at each learning rate, mean over the seeds.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
RATES = (0.002, 0.004, 0.008, 0.016)
ROWS = {
    "one replica": (1, 1000),
    "four elastic replicas": (4, 1000),
    "one replica, four times the steps": (1, 4000),
}
SEEDS = (0, 1, 2)


def main() -> None:
    spec = importlib.util.spec_from_file_location(
        "example", HERE.parents[1] / "examples" / "elastic_averaging.py"
    )
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.set_num_threads(1)
    table: dict[str, dict[str, list[float]]] = {}
    print(
        "| | " + " | ".join(f"lr {lr:g}" for lr in RATES) + " | seconds |\n|---|" + "---|" * (len(RATES) + 1)
    )
    for name, (replicas, steps) in ROWS.items():
        begin = time.perf_counter()
        losses = {lr: [example.fit(replicas, lr, steps, seed) for seed in SEEDS] for lr in RATES}
        table[name] = {f"{lr:g}": values for lr, values in losses.items()}
        cells = [f"{statistics.mean(v):.3f} ({max(v) - min(v):.3f})" for v in losses.values()]
        print(f"| {name} | " + " | ".join(cells) + f" | {time.perf_counter() - begin:.0f} |", flush=True)
    record = {
        "question": "elastic averaging against one replica, held-out nats per byte",
        "date": time.strftime("%Y-%m-%d"),
        "command": "OMP_NUM_THREADS=1 python -m benchmarks.elastic_averaging.run",
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seeds": SEEDS,
        "losses": table,
    }
    path = HERE.parent / "results" / f"elastic_averaging-{record['date']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"mean over seeds (spread); written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
