"""Question: how many bytes and seconds does the sum of a gradient over hosts take, at up to 1,024 hosts?

    OMP_NUM_THREADS=1 python -m benchmarks.simulation.exchange

Simulates every message of an exchange on a `Cluster` of hosts, whose lines are full duplex and carry one message at a
time in each direction. A message occupies its sender for ``--message-us``, then the line for its bytes, and arrives
``--latency-us`` later. On the network of two levels all hosts of a group share one line to other groups in each
direction. Adding numbers takes no time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from avgpipe.planning.cluster import Cluster, Device, Level
from benchmarks.common.record import write_record
from benchmarks.tables.exchange import exchange_bytes, exchange_seconds

Array = np.ndarray
MIB = 2**20


class Round(NamedTuple):
    """Messages of equal size; each host sends at most one, and receives at most one."""

    senders: Array
    receivers: Array
    size_bytes: float


Phase = list[
    Round
]  # each host sends its messages in their order once it has received those of the phase before


# ---- ways to sum a gradient over hosts -------------------------------------------------------------------------------


def ring(hosts: int, gradient: float, group: int) -> Iterator[Phase]:
    """A chunk goes around, is summed on its way, and goes around again."""
    every = np.arange(hosts)
    for _ in range(2 * (hosts - 1)):
        yield [Round(every, (every + 1) % hosts, gradient / hosts)]


def chunks(hosts: int, gradient: float, group: int) -> Iterator[Phase]:
    """Each host receives its chunk from all, sums it, and sends the sum to all."""
    for _ in range(2):
        yield _to_all(np.arange(hosts).reshape(1, -1), gradient / hosts)


def star(hosts: int, gradient: float, group: int) -> Iterator[Phase]:
    """The first host receives all gradients, sums them, and sends the sum to all."""
    ends = [(np.array([0]), np.array([host])) for host in range(1, hosts)]
    yield [Round(host, first, gradient) for first, host in ends]
    yield [Round(first, host, gradient) for first, host in ends]


def relay(hosts: int, gradient: float, group: int) -> Iterator[Phase]:
    """The first host sends its gradient to all, and passes on to each host the gradients of the others."""
    ends = [(np.array([0]), np.array([host])) for host in range(1, hosts)]
    out = [Round(first, host, gradient) for first, host in ends]
    yield out + [Round(host, first, gradient) for first, host in ends]
    yield [Round(first, host, (hosts - 2) * gradient) for first, host in ends if hosts > 2]


def gather(hosts: int, gradient: float, group: int) -> Iterator[Phase]:
    """Each host sends its gradient to all, and sums what it receives."""
    yield _to_all(np.arange(hosts).reshape(1, -1), gradient)


def levels(hosts: int, gradient: float, group: int) -> Iterator[Phase]:
    """Groups sum chunks; hosts with the same chunk sum them over groups, by chunks again; groups share the sums."""
    size = min(group, hosts)
    inside = np.arange(hosts).reshape(-1, size)
    across = inside.T
    yield _to_all(inside, gradient / size)
    for _ in range(2 if len(inside) > 1 else 0):
        yield _to_all(across, gradient / size / len(inside))
    yield _to_all(inside, gradient / size)


def _to_all(groups: Array, size_bytes: float) -> Phase:
    """Return the messages of each member of a group, a row, to each other one; no two go to one host at a time."""
    count = groups.shape[1]
    places = np.arange(count)
    return [
        Round(groups.ravel(), groups[:, (places + step) % count].ravel(), size_bytes)
        for step in range(1, count)
    ]


WAYS: dict[str, Callable[[int, float, int], Iterator[Phase]]] = {
    "ring": ring,
    "chunks": chunks,
    "two levels of chunks": levels,
    "star that sums": star,
    "all to all, whole": gather,
    "star that passes on": relay,
}


# ---- the network -----------------------------------------------------------------------------------------------------


@dataclass
class Exchange:
    """Simulates rounds of messages on a cluster of one or two levels.

    Attributes:
        sent: Bytes that each host has sent.
        messages: How many messages each host has sent.
        shared: Bytes that each group has sent to others.
    """

    cluster: Cluster
    message_s: float
    sent: Array = field(init=False)
    messages: Array = field(init=False)
    shared: Array = field(init=False)

    def __post_init__(self) -> None:
        hosts, own = self.cluster.workers, self.cluster.levels[0].units
        self.sent, self.messages = np.zeros(hosts), np.zeros(hosts, dtype=np.int64)
        self.shared = np.zeros(hosts // own)
        # When each line is free: out of and into hosts, and groups.
        self._free = [np.zeros(hosts), np.zeros(hosts), np.zeros(hosts // own), np.zeros(hosts // own)]
        self._done = np.zeros(hosts)  # when each host has received all of the phase before

    def run(self, phase: Phase) -> float:
        """Run a phase; return when the last host has received all of it, in seconds since the beginning."""
        done = self._done.copy()
        for round_ in phase:
            end_s = self._send(round_)
            done[round_.receivers] = np.maximum(done[round_.receivers], end_s)
        self._done = done
        return float(done.max())

    def _send(self, round_: Round) -> Array:
        """Return when each message has arrived."""
        senders, receivers, size = round_
        out, into, _, _ = self._free
        own = self.cluster.levels[0]
        begin = np.maximum(self._done[senders], out[senders]) + self.message_s
        left = begin + size / own.bytes_per_s
        out[senders] = left
        self.sent[senders] += size
        self.messages[senders] += 1
        latency = np.full(len(senders), own.latency_s)
        groups = senders // own.units, receivers // own.units
        crosses = groups[0] != groups[1]
        if crosses.any():
            outer = self.cluster.levels[1]
            self.shared += np.bincount(groups[0][crosses], minlength=len(self.shared)) * size
            for free, group in zip(self._free[2:], groups):
                left[crosses] = self._share(free, group[crosses], begin[crosses], left[crosses], size, outer)
            latency[crosses] = outer.latency_s
        arrived = np.maximum(
            np.maximum(into[receivers], begin + latency) + size / own.bytes_per_s, left + latency
        )
        into[receivers] = arrived
        return arrived

    def _share(
        self, free: Array, group: Array, begin: Array, left: Array, size: float, outer: Level
    ) -> Array:
        """Return when each message has left a line that all of a group share: together, as they do on a switch."""
        first = np.full(len(free), np.inf)
        np.minimum.at(first, group, begin)
        end = np.maximum(free, first) + np.bincount(group, minlength=len(free)) * size / outer.bytes_per_s
        used = np.unique(group)
        free[used] = end[used]
        return np.maximum(left, end[group])


def simulate(way: str, cluster: Cluster, gradient: float, group: int, message_s: float) -> dict[str, float]:
    """Return seconds, and of the busiest host the bytes and messages it sends and of the busiest group the bytes."""
    exchange, seconds = Exchange(cluster, message_s), 0.0
    for phase in WAYS[way](cluster.workers, gradient, group):
        seconds = exchange.run(phase)
    return {
        "seconds": seconds,
        "sent_bytes": float(exchange.sent.max()),
        "messages": int(exchange.messages.max()),
        "shared_bytes": float(exchange.shared.max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hosts", type=lambda text: [int(n) for n in text.split(",")], default=[2, 4, 16, 128, 1024]
    )
    parser.add_argument("--mib", type=float, default=12, help="of the gradient")
    parser.add_argument("--rate", type=float, default=1e9, help="bits a second of a host's line")
    parser.add_argument("--latency-us", type=float, default=40)
    parser.add_argument(
        "--message-us", type=float, default=40, help="for which a message occupies its sender"
    )
    parser.add_argument("--group", type=int, default=32, help="hosts of a group")
    parser.add_argument("--outer-hosts", type=float, default=8, help="a group's line, in lines of a host")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    asked = parser.parse_args()
    rows = []
    for name in ("one switch", "groups"):
        for way in WAYS:
            for hosts in asked.hosts:
                inner = min(asked.group, hosts) if name == "groups" else hosts
                own = Level(inner, asked.rate / 8, asked.latency_us * 1e-6)
                outer = Level(hosts // inner, asked.outer_hosts * asked.rate / 8, 2 * asked.latency_us * 1e-6)
                cluster = Cluster((Device(),) * hosts, (own, outer) if hosts > inner else (own,))
                found = simulate(way, cluster, asked.mib * MIB, asked.group, asked.message_us * 1e-6)
                rows.append({"network": name, "way": way, "hosts": hosts, **found})
    settings = {name: value for name, value in vars(asked).items() if name != "out"}
    record = {**settings, "rows": rows}
    write_record("simulation-exchange", "the sum of a gradient over many hosts", record, asked.out)
    print(exchange_seconds(record), exchange_bytes(record), sep="\n\n")


if __name__ == "__main__":
    main()
