"""Network namespaces: hosts of one worker or several on one switch, each sending at a limited rate. Linux, as root.

    switch (bridge)  w0               w1              ...
                     |                |
    host            eth0 -- tbf      eth0 -- tbf               what a host sends passes the limit of its device

Workers of one host reach each other by its loopback, which nothing limits. Where hosts have several, each host has a
boot id of its own, so that only workers of the same one find that they can share memory.

Names contain the process that made them: a later run removes what a killed one left. Nothing is made in the
namespace of the system itself, so removing the namespaces removes everything.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from avgpipe.errors import PipelineError

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NAME = re.compile(r"avgpipe-(\d+)-(switch|\d+)")
# A few of TCP's largest packets, for with less a line that sends to two others stays below 1 Gbit/s; an activation is
# more.
_BURST_BYTES = 256 * 1024
# Of the line. Long, so that TCP finds its rate without losing packets.
_QUEUE_BYTES = 4 * 1024 * 1024
# A few packets, and as many as TCP needs not to stall.
_LEAST_BURST_BYTES, _LEAST_QUEUE_BYTES = 4096, 128 * 1024


@dataclass(frozen=True)
class Network:
    """Hosts on a switch, each of the same number of workers.

    Attributes:
        process: That made them.
        hosts: How many.
        workers_each: Of a host; worker w is on host w // workers_each.
        folder: Of a file for each host with its boot id; None: all have the machine's.
        device: The name of each one's interface.
    """

    process: int
    hosts: int
    workers_each: int = 1
    folder: Path | None = None
    device: str = "eth0"

    def host(self, number: int) -> str:
        return f"avgpipe-{self.process}-{number}"

    @property
    def switch(self) -> str:
        return f"avgpipe-{self.process}-switch"

    def address(self, number: int) -> str:
        """From the block for benchmarks of networks (RFC 2544)."""
        return f"198.18.0.{number + 1}"

    def boot_id(self, number: int) -> Path | None:
        """The file of a host that processes there find in place of the machine's own."""
        return None if self.folder is None else self.folder / str(number)

    def traffic(self, number: int) -> tuple[int, int]:
        """Return the bytes that a host has sent and received so far, headers included."""
        words = ["ip", "-n", self.host(number), "-s", "-j", "link", "show", "dev", self.device]
        (found,) = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
        return found["stats64"]["tx"]["bytes"], found["stats64"]["rx"]["bytes"]

    def connect(self, number: int, is_up: bool = True) -> None:
        """Let a host reach the switch, or cut its line: without a sign to either end."""
        _run(["ip", "-n", self.switch, "link", "set", f"w{number}", "up" if is_up else "down"])

    def inside(self, number: int) -> list[str]:
        """Words before a command that run it on a host."""
        words, boot_id = ["ip", "netns", "exec", self.host(number)], self.boot_id(number)
        if boot_id is None:
            return words
        # What is mounted is seen by this command alone: the one before gave it mounts of its own.
        return [*words, "sh", "-c", f'mount --bind "$0" {_BOOT_ID} && exec "$@"', str(boot_id)]

    def launching(self, workers: int | None = None) -> dict[str, Any]:
        """Return the options of ``run_on_ranks`` by which the first ``workers`` ranks, or all, are on their hosts."""
        count = self.hosts * self.workers_each if workers is None else workers
        prefixes = [self.inside(worker // self.workers_each) for worker in range(count)]
        return {"prefixes": prefixes, "environment": {"GLOO_SOCKET_IFNAME": self.device}}


def check_namespaces(why: str) -> None:
    """ValueError unless this process can make namespaces. `why`: the option that needs them."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise ValueError(f"{why} needs {' and '.join(missing)} of iproute2: install it, or leave {why} out")
    if os.geteuid() != 0:
        raise ValueError(f"{why} needs root for network namespaces: run as root, or leave {why} out")
    try:
        with network(1, 1e9):
            pass
    except PipelineError as error:
        raise ValueError(f"{why}: {error}; leave {why} out where namespaces cannot be made") from error


@contextmanager
def network(
    hosts: int,
    rate_bits_per_s: float,
    *,
    workers_each: int = 1,
    slower: float = 1.0,
    own_boot_ids: bool = False,
) -> Iterator[Network]:
    """The hosts, while inside. PipelineError where this system does not let us make them.

    SIGTERM and SIGHUP raise KeyboardInterrupt meanwhile, as SIGINT does, so that they are removed.

    Args:
        hosts: How many.
        rate_bits_per_s: At which each sends.
        workers_each: Of a host, which share its line.
        slower: How many times slower than the lines that are emulated: theirs are such a multiple of bursts and queues,
            which so take as much of the time.
        own_boot_ids: Whether processes of two hosts find that they are on different machines, which they do in any case
            where a host has several workers.
    """
    remove_stale()
    with tempfile.TemporaryDirectory(prefix="avgpipe-") as name:
        folder = Path(name) if own_boot_ids or workers_each > 1 else None
        made = Network(os.getpid(), hosts, workers_each, folder)
        with _removed_afterwards(made):
            _make(made, _limit(rate_bits_per_s, slower))
            yield made


@contextmanager
def _removed_afterwards(made: Network) -> Iterator[None]:
    handlers = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name in _existing(made.process):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def remove_stale() -> list[str]:
    """Remove namespaces whose process is gone; their names."""
    gone = []
    for name in _existing():
        match = _NAME.fullmatch(name)
        if match and not Path(f"/proc/{match[1]}").exists():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            gone.append(name)
    return gone


def _existing(process: int | None = None) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=False, capture_output=True, text=True).stdout
    names = [line.split()[0] for line in listed.splitlines() if line.strip()]
    return [name for name in names if (m := _NAME.fullmatch(name)) and process in (None, int(m[1]))]


def _limit(rate_bits_per_s: float, slower: float) -> list[str]:
    burst = max(_LEAST_BURST_BYTES, round(_BURST_BYTES / slower))
    queue = max(_LEAST_QUEUE_BYTES, round(_QUEUE_BYTES / slower))
    return ["tbf", "rate", f"{rate_bits_per_s:.0f}bit", "burst", str(burst), "limit", str(queue)]


def _make(made: Network, limit: list[str]) -> None:
    switch = ["ip", "-n", made.switch]
    _run(["ip", "netns", "add", made.switch])
    _run([*switch, "link", "add", "bridge", "type", "bridge"])
    _run([*switch, "link", "set", "bridge", "up"])
    for number in range(made.hosts):
        host, port = ["ip", "-n", made.host(number)], f"w{number}"
        _run(["ip", "netns", "add", made.host(number)])
        pair = ["type", "veth", "peer", "name", made.device, "netns", made.host(number)]
        _run([*switch, "link", "add", port, *pair])
        _run([*switch, "link", "set", port, "master", "bridge", "up"])
        _run([*host, "address", "add", f"{made.address(number)}/24", "dev", made.device])
        for device in ("lo", made.device):
            _run([*host, "link", "set", device, "up"])
        _run(["tc", "-n", made.host(number), "qdisc", "add", "dev", made.device, "root", *limit])
        if (boot_id := made.boot_id(number)) is not None:
            boot_id.write_text(f"{made.host(number)}\n")


def _run(words: list[str]) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise PipelineError(f"{' '.join(words)}: {reason}")
