"""Question: how long does a step of isolated pipelines on several hosts take, and how many bytes does each host send?

    OMP_NUM_THREADS=1 python -m benchmarks.hosts.steps

One pipeline on each of 2, 3 and 4 hosts, emulated by network namespaces on this machine, as root; each host sends at
``--rate``. A batch is 12 micro-batches of a layer whose gradient of ``--mib`` MiB takes longer to be exchanged than to
be computed. Beside it, in turns on the same hosts: gloo's all-reduce of a tensor of this size; batches of 1 micro-batch,
as all hosts compute on the cores of this machine; and the steps of the plan's warm-up, which end with their sums, so
that nothing is computed meanwhile. Bytes are those of the hosts' devices, headers included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from avgpipe_lab.bench.hosts import CommandsOnHosts
from avgpipe_lab.bench.namespaces import Network, check_namespaces, network
from benchmarks.common.record import say, write_record
from benchmarks.hosts.training import FOLDER, LIMIT_S, bytes_each, train
from benchmarks.tables.hosts import hosts_steps

REPEATS = 10  # of gloo's all-reduce


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=lambda text: [int(n) for n in text.split(",")], default=[2, 3, 4])
    parser.add_argument("--mib", type=float, default=12, help="of the model's gradient")
    parser.add_argument("--rate", type=float, default=1e9, help="bits a second that a host sends")
    parser.add_argument("--steps", type=int, default=30, help="that are timed in a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    asked = parser.parse_args()
    check_namespaces("this benchmark")
    rows = []
    for hosts in asked.hosts:
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in _TURNS}
        with network(hosts, asked.rate, own_boot_ids=True) as net:
            for number in range(asked.rounds):
                for name, turn in _TURNS.items():
                    turns[name].append(turn(net, asked))
                    say(f"{hosts} hosts, round {number + 1} of {asked.rounds}: {name} {turns[name][-1]}")
        rows.append({"hosts": hosts, "turns": turns, **_summary(turns)})
    settings = {name: getattr(asked, name) for name in ("mib", "rate", "steps", "rounds")}
    record = {**settings, "rows": rows}
    write_record("hosts-steps", "a step of isolated pipelines on several hosts", record, asked.out)
    print(hosts_steps(record))


def _summary(turns: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, each in turns.items():
        found[f"{name}_s"] = statistics.median(turn["median_s"] for turn in each)
        for way in ("sent", "received"):
            by_host = zip(*(turn[f"{way}_bytes"] for turn in each))
            found[f"{name}_{way}_bytes"] = [statistics.median(of) for of in by_host]
        # Of a turn and the one beside it, as the machine's speed changes.
        pairs = zip(each, turns["gloo"])
        found[f"{name}_over_gloo"] = statistics.median(a["median_s"] / b["median_s"] for a, b in pairs)
    return found


def _sum(net: Network, asked: argparse.Namespace) -> dict[str, Any]:
    """Time gloo's all-reduce; the bytes are those of one."""
    with tempfile.TemporaryDirectory(prefix="avgpipe-") as folder:
        commands = CommandsOnHosts(net, Path(folder))
        with commands:
            before = [net.traffic(host) for host in range(net.hosts)]
            for host in range(net.hosts):
                words = [host, net.hosts, net.address(0), asked.mib, REPEATS]
                commands.start(host, str(FOLDER / "allreduce.py"), *map(str, words))
            for command in commands.commands.values():
                command.wait(LIMIT_S)
            after = [net.traffic(host) for host in range(net.hosts)]
            commands.look()
    (found,) = (line for host, _, line in commands.said if not host and line.startswith('{"seconds"'))
    seconds = json.loads(found)["seconds"]
    return {"median_s": statistics.median(seconds), **bytes_each(before, after, REPEATS + 1)}


def _train(
    net: Network, asked: argparse.Namespace, words: Sequence[str] = ("--warmup-rounds", "0")
) -> dict[str, Any]:
    """Time steps of one pipeline on each host."""
    timed = train(net, ["--pipelines", str(net.hosts), "--mib", f"{asked.mib:g}", *words], asked.steps)
    return {
        "median_s": statistics.median(timed.seconds),
        "steps": len(timed.seconds),
        **timed.bytes_each,
    }


_TURNS = {
    "gloo": _sum,
    "avgpipe": _train,
    "light": partial(_train, words=("--warmup-rounds", "0", "--micro-batches", "1")),
    "warmup": partial(_train, words=()),
}


if __name__ == "__main__":
    main()
