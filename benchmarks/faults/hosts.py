"""Question: what does it cost isolated pipelines that one of them is on another host?

    OMP_NUM_THREADS=1 python -m benchmarks.faults.hosts

Two pipelines of one process each, A B C A B C: both on one host; the second on another host, which has joined over a
line of 1 Gbit/s, and of 10 (emulated: network namespaces on this machine, as root). They share each batch, and exchange
a model's gradient of ``--mib`` MiB in every step, which counts a step later. Timed are steps of both; memory
is what each host's command has resident, with its share of what processes share.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from avgpipe_lab.bench.hosts import CommandsOnHosts
from avgpipe_lab.bench.namespaces import check_namespaces, network
from benchmarks.common.record import say, write_record
from benchmarks.tables.faults import faults_hosts

MIB, WIDTH, LIMIT_S = 2**20, 1024, 300
LEAVE_OUT = 5  # steps after the second pipeline has come
JOINED = re.compile(r"pipeline 1 trains with the others from step (\d+)")
WAYS = {"one host": 0.0, "two hosts, 1 Gbit/s": 1e9, "two hosts, 10 Gbit/s": 1e10}
SCRIPT = f"""
import json, os, sys, time
import torch
from torch import nn
import avgpipe

out, layers, samples = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}) for _ in range(layers)), nn.Linear({WIDTH}, 1))
plan = avgpipe.Plan(stages=1, pipelines=2, micro_batches=4, isolate=True)
batch = torch.randn(samples, {WIDTH}), torch.zeros(samples, 1)
sgd = lambda params: torch.optim.SGD(params, lr=1e-4)
with avgpipe.Pipeline(model, plan, loss_fn=nn.MSELoss(), optimizer=sgd, timeout_s=60) as pipeline:
    for result in pipeline.train([batch] * (10000 - pipeline.batches)):
        if os.environ["AVGPIPE_PIPELINE"] == "0":
            with open(out, "a") as file:
                print(json.dumps([result.batch, time.monotonic()]), file=file)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="that are timed in a turn")
    parser.add_argument("--mib", type=int, default=24, help="of the model's weights")
    parser.add_argument("--samples", type=int, default=512, help="of a batch")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    asked = parser.parse_args()
    check_namespaces("this benchmark")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for number in range(asked.rounds):
        for name, rate in WAYS.items():
            say(f"round {number + 1} of {asked.rounds}: {name}")
            found[name].append(_turn(rate, asked))
    rows = [{"name": name, **_summary(turns)} for name, turns in found.items()]
    for row in rows:
        row["cost"] = row["median_s"] / rows[0]["median_s"] - 1
    settings = {name: getattr(asked, name) for name in ("rounds", "steps", "mib", "samples")}
    record = {**settings, "rows": rows, "turns": found}
    write_record("faults-hosts", "what it costs that a pipeline is on another host", record, asked.out)
    print(faults_hosts(record))


def _summary(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    medians = [turn["median_s"] for turn in turns]
    low, _, high = statistics.quantiles(medians, n=4) if len(medians) > 1 else medians * 3
    mib = statistics.median(max(turn["memory_bytes"]) for turn in turns) / MIB
    return {
        "median_s": statistics.median(medians),
        "quartile1_s": low,
        "quartile3_s": high,
        "command_mib": mib,
    }


def _turn(rate: float, asked: argparse.Namespace) -> dict[str, Any]:
    """Run two pipelines, and return how long their steps took."""
    with tempfile.TemporaryDirectory(prefix="avgpipe-") as name, network(2, rate or 1e10) as hosts:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        layers = max(1, round(asked.mib * MIB / 4 / WIDTH / WIDTH))
        script = ["script.py", str(folder / "times"), str(layers), str(asked.samples)]
        with CommandsOnHosts(hosts, folder) as commands:
            begins = LEAVE_OUT
            if rate:
                commands.run(["--stages", "1"], script, restarts=0)
                begins += int(commands.wait_for(JOINED, LIMIT_S))
            else:
                sizes = ["--isolate", "--stages", "1", "--pipelines", "2"]
                commands.start(0, "-m", "avgpipe", "run", *sizes, *script)
            ends = begins + asked.steps
            commands.wait_until(
                lambda: _times(folder)[-1:] and _times(folder)[-1][0] > ends, LIMIT_S, "no steps"
            )
            memory = [_memory_bytes(command.pid) for command in commands.commands.values()]
            commands.terminate()
        times = {batch: at for batch, at in _times(folder) if begins <= batch <= ends}
    steps = [after - before for before, after in pairwise(times.values())]
    return {"median_s": statistics.median(steps), "steps": len(steps), "memory_bytes": memory}


def _times(folder: Path) -> list[tuple[int, float]]:
    """Return when pipeline 0 had its results, by the number of the batch."""
    path = folder / "times"
    lines = path.read_text().splitlines(True) if path.exists() else []
    return [(batch, at) for batch, at in map(json.loads, (line for line in lines if line.endswith("\n")))]


def _memory_bytes(process: int) -> int:
    """Return what a command has resident; of memory that it shares its part."""
    status = Path(f"/proc/{process}/smaps_rollup").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
