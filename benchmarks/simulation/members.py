"""Question: does the membership of a run keep its promises at 1,024 hosts, and what does the coordinator cost?

    OMP_NUM_THREADS=1 python -m benchmarks.simulation.members

The state machine is the true one (`avgpipe.fault.members`), and the hosts around it are those of
`benchmarks.membership.crowd`: a loss and a join a minute, with messages of drawn latency, hosts that are killed,
stopped, that hang, or are cut off. A broken promise ends the program with an error. Then come the events per second
of the state machine, its messages, and the share of a core that the true coordinator takes with as many connections.
Seconds of a core are those of the process, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from avgpipe.fault.door import encoded
from avgpipe.fault.group import Send
from avgpipe.fault.members import Members
from benchmarks.common.record import say, write_record
from benchmarks.membership.crowd import Crowd, Seen, Setting
from benchmarks.membership.served import served
from benchmarks.tables.exchange import members_cost, members_promises, members_seconds, members_sizes

_BEGINS_S = 60.0  # by then all have joined
_ADDRESS = 154, 8  # bytes of what gloo's processes post to meet, and of it for each of them
_FEW = 5  # minutes of the events that are measured


# ---- promises --------------------------------------------------------------------------------------------------------


def kept(hosts: int, minutes: float, seed: int, alive_s: float) -> Seen:
    return Crowd(Setting(hosts, minutes, alive_s=alive_s, seed=seed)).run()


def _kept(task: tuple[int, float, int, float, float]) -> tuple[int, float, Seen | None]:
    *task_, until = task
    hosts, minutes, seed, alive_s = task_
    seen = None if time.time() > until else kept(hosts, minutes, seed, alive_s)
    return hosts, minutes, seen


def summed(hosts: int, minutes: float, runs: Sequence[Seen]) -> dict[str, Any]:
    """Return the row of a number of hosts."""
    counted = ("events", "rosters", "joins", "steps", "retrained", "innocent")
    faults = sum((seen.faults for seen in runs), Counter[str]())
    seconds = {kind: [s for seen in runs for s in seen.roster_s.get(kind, [])] for kind in faults}
    pauses = [s for seen in runs for s in seen.pauses_s]
    return {
        "hosts": hosts,
        "waits": max((seen.waits for seen in runs), default=0),
        "minutes": minutes * len(runs),
        "runs": len(runs),
        **{name: sum(getattr(seen, name) for seen in runs) for name in counted},
        "faults": faults,
        "reasons": sum((seen.reasons for seen in runs), Counter[str]()),
        "roster_s": {kind: _spread(some) for kind, some in seconds.items()},
        "pauses_s": _spread(pauses),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"count": 0}
    return {"count": len(values), "median": statistics.median(values), "most": max(values)}


# ---- what it costs ---------------------------------------------------------------------------------------------------


def tape_of(hosts: int, minutes: float) -> list[Any]:
    """Return all events of the state machine in a run of some minutes, with a report of each host each second."""
    tape: list[Any] = []
    Crowd(Setting(hosts, minutes + 4, seed=1), tape).run()
    return tape


def replayed(tape: Sequence[Any], hosts: int, until_s: float) -> dict[str, float]:
    """Hand the events to a new state machine; return what it took, once all have joined."""
    members = Members(hosts, "host 0")
    begun_s = events = 0.0
    commands, rosters = list[Any](), list[int]()
    for method, values, now in tape:
        if now >= _BEGINS_S and not begun_s:
            rosters = _roster_bytes(commands)
            begun_s, commands = time.process_time(), []
        if now >= until_s:
            break
        commands += getattr(members, method)(*values, now) or []
        events += bool(begun_s)
    cpu_s, passed_s = time.process_time() - begun_s, until_s - _BEGINS_S
    out = [command.message for command in commands if isinstance(command, Send)]
    texts, sent_bytes, last, code_s = [], 0, None, time.process_time()
    for message in out:  # as the coordinator does: one that goes to many is encoded once
        if message is not last:
            last, text = message, encoded(message)
            texts.append(text)
        sent_bytes += len(text) + 4
    code_s = time.process_time() - code_s
    into = [
        encoded([values[2], *values[3]])
        for method, values, now in tape
        if method == "receive" and _BEGINS_S <= now < until_s
    ]
    decode_s = time.process_time()
    for text in into:
        json.loads(text)
    decode_s = time.process_time() - decode_s
    return {
        "events_per_s": events / cpu_s,
        "share": cpu_s / passed_s,
        "encode_share": code_s / passed_s,
        "decode_share": decode_s / passed_s,
        "in_per_s": len(into) / passed_s,
        "out_per_s": len(out) / passed_s,
        "in_bytes_per_s": sum(len(text) + 4 for text in into) / passed_s,
        "out_bytes_per_s": sent_bytes / passed_s,
        "roster_bytes": max(rosters),
        "change_bytes": max(size for size in _roster_bytes(commands) if size < max(rosters) / 2),
    }


def _roster_bytes(commands: Sequence[Any]) -> list[int]:
    sent = (command.message for command in commands if isinstance(command, Send))
    return [len(encoded(m)) for m in {id(m): m for m in sent if m[0] == "roster"}.values()]


def meeting(size: int) -> dict[str, float]:
    """Return what the coordinator passes on, in hexadecimal, where processes meet for a group of gloo."""
    return {"messages": size * size, "bytes": size * size * 2 * (_ADDRESS[0] + _ADDRESS[1] * size)}


# ---- the program -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hosts", type=lambda text: [int(n) for n in text.split(",")], default=[16, 128, 1024]
    )
    parser.add_argument("--minutes", type=float, default=10_000, help="simulated, of each number of hosts")
    parser.add_argument("--chunk", type=float, default=100, help="minutes of a run")
    parser.add_argument("--alive-s", type=float, default=10, help="between reports of a host, in these runs")
    parser.add_argument("--limit-s", type=float, default=720, help="after which no other run begins")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--served-s", type=float, default=60, help="of the true coordinator")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    asked = parser.parse_args()
    costs = []
    for hosts in asked.hosts:
        costs.append({"hosts": hosts, **replayed(tape_of(hosts, _FEW), hosts, _BEGINS_S + 60 * _FEW)})
        costs[-1]["served"] = served(hosts, asked.served_s)
        costs[-1]["meeting"] = meeting(hosts)
        say(f"{hosts} hosts: {costs[-1]}")
    runs = max(1, round(asked.minutes / asked.chunk))
    until = time.time() + asked.limit_s
    tasks = [(n, asked.chunk, seed, asked.alive_s, until) for seed in range(runs) for n in asked.hosts]
    found: dict[int, list[Seen]] = {hosts: [] for hosts in asked.hosts}
    with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        for hosts, _, seen in pool.imap_unordered(_kept, tasks):
            if seen is not None:
                found[hosts].append(seen)
    rows = [summed(hosts, asked.chunk, found[hosts]) for hosts in asked.hosts]
    settings = {name: value for name, value in vars(asked).items() if name != "out"}
    record = {**settings, "setting": {"timeout_s": Setting(1, 1).timeout_s}, "rows": rows, "costs": costs}
    write_record("simulation-members", "membership of many hosts", record, asked.out)
    for table in (members_promises, members_seconds, members_cost, members_sizes):
        print(table(record), end="\n\n")


if __name__ == "__main__":
    main()
