"""Network namespaces: a host for each worker, all on one switch, each sending at a limited rate. Linux, as root.

    switch (bridge)  w0               w1              ...
                     |                |
    host 0          eth0 -- tbf      eth0 -- tbf               what a worker sends passes the limit of its device

Names contain the process that made them: a later run removes what a killed one left. Nothing is made in the
namespace of the system itself, so removing the namespaces removes everything.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from avgpipe.errors import PipelineError

_NAME = re.compile(r"avgpipe-(\d+)-(switch|\d+)")
# A few of TCP's largest packets, for with less a line that sends to two others stays below 1 Gbit/s; an activation is
# more.
_BURST_BYTES = 256 * 1024
# Of the line. Long, so that TCP finds its rate without losing packets.
_QUEUE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Network:
    """`workers` hosts. device: the name of each one's interface."""

    process: int
    workers: int
    device: str = "eth0"

    def host(self, worker: int) -> str:
        return f"avgpipe-{self.process}-{worker}"

    @property
    def switch(self) -> str:
        return f"avgpipe-{self.process}-switch"

    def address(self, worker: int) -> str:
        """From the block for benchmarks of networks (RFC 2544)."""
        return f"198.18.0.{worker + 1}"

    def inside(self, worker: int) -> list[str]:
        """Words before a command that run it on a host."""
        return ["ip", "netns", "exec", self.host(worker)]

    def launching(self) -> dict[str, Any]:
        """Return the options of ``run_on_ranks`` by which each rank gets a host of its own."""
        prefixes = [self.inside(worker) for worker in range(self.workers)]
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
def network(workers: int, rate_bits_per_s: float) -> Iterator[Network]:
    """The hosts, while inside. PipelineError where this system does not let us make them.

    SIGTERM and SIGHUP raise KeyboardInterrupt meanwhile, as SIGINT does, so that they are removed.
    """
    remove_stale()
    made = Network(os.getpid(), workers)
    handlers = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        _make(made, rate_bits_per_s)
        yield made
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


def _make(made: Network, rate_bits_per_s: float) -> None:
    switch = ["ip", "-n", made.switch]
    _run(["ip", "netns", "add", made.switch])
    _run([*switch, "link", "add", "bridge", "type", "bridge"])
    _run([*switch, "link", "set", "bridge", "up"])
    for worker in range(made.workers):
        host, port = ["ip", "-n", made.host(worker)], f"w{worker}"
        _run(["ip", "netns", "add", made.host(worker)])
        pair = ["type", "veth", "peer", "name", made.device, "netns", made.host(worker)]
        _run([*switch, "link", "add", port, *pair])
        _run([*switch, "link", "set", port, "master", "bridge", "up"])
        _run([*host, "address", "add", f"{made.address(worker)}/24", "dev", made.device])
        for device in ("lo", made.device):
            _run([*host, "link", "set", device, "up"])
        limit = [
            "tbf",
            "rate",
            f"{rate_bits_per_s:.0f}bit",
            "burst",
            str(_BURST_BYTES),
            "limit",
            str(_QUEUE_BYTES),
        ]
        _run(["tc", "-n", made.host(worker), "qdisc", "add", "dev", made.device, "root", *limit])


def _run(words: list[str]) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise PipelineError(f"{' '.join(words)}: {reason}")
