"""Commands of a run over emulated hosts: ``avgpipe run --listen`` on the first, ``avgpipe join`` on the others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from avgpipe.errors import PipelineError
from avgpipe_lab.bench.namespaces import Network

_LOOK_S = 0.05
_SECRET = "known to all hosts of this run"
_LISTENS = re.compile(r"avgpipe join (\S+:\d+)")


class CommandsOnHosts:
    """Commands of one run, at most one on each host; as a context manager it kills those that are left.

    Args:
        net: The hosts.
        folder: Folder of the files with what each command prints, and of each host's folder for temporary files; also
            the commands' working directory.
        added: Added to the commands' environment.

    Attributes:
        net: The hosts.
        commands: The processes of the commands by host.
        said: Host, time and text of each line that the commands have printed, as far as :meth:`look` has read them.
    """

    def __init__(self, net: Network, folder: Path, added: Mapping[str, str] | None = None) -> None:
        self.net, self._folder = net, folder
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": net.device}
        self._environment = {**os.environ, **own, "AVGPIPE_JOIN_TOKEN": _SECRET, **(added or {})}
        self._read: dict[int, int] = {}  # bytes of what each host's command has printed
        self.commands: dict[int, subprocess.Popen[bytes]] = {}
        self.said: list[tuple[int, float, str]] = []

    def __enter__(self) -> CommandsOnHosts:
        return self

    def __exit__(self, *_: object) -> None:
        for command in self.commands.values():
            command.kill()
            command.wait()

    def temporary(self, host: int) -> Path:
        """Return the folder for temporary files of a host."""
        return self._folder / f"tmp{host}"

    def start(self, host: int, *words: str) -> None:
        """Start Python with these arguments on a host."""
        self.temporary(host).mkdir(exist_ok=True)
        with self._output(host).open("w") as said:
            self.commands[host] = subprocess.Popen(
                [*self.net.inside(host), sys.executable, *words],
                cwd=self._folder,
                env={**self._environment, "TMPDIR": str(self.temporary(host))},
                stdout=said,
                stderr=said,
            )
        self._read[host] = 0

    def run(
        self, options: Sequence[str], script: Sequence[str], restarts: int, limit_s: float = 60.0
    ) -> None:
        """Start a run of one isolated pipeline on the first host, and have every other host join it.

        Args:
            options: Further options of ``avgpipe run``.
            script: The script and its arguments.
            restarts: How many times a host starts its pipeline again that was lost.
            limit_s: Seconds for the first command to listen.

        Raises:
            PipelineError: It did not.
        """
        most = ["--pipelines", "1", "--max-pipelines", str(self.net.hosts), "--restarts", str(restarts)]
        listen = ["--listen", f"{self.net.address(0)}:0"]
        self.start(0, "-m", "avgpipe", "run", "--isolate", *most, *listen, *options, *script)
        where = self.wait_for(_LISTENS, limit_s)
        for host in range(1, self.net.hosts):
            self.start(host, "-m", "avgpipe", "join", "--restarts", str(restarts), where)

    def look(self) -> None:
        """Read what the commands have printed since."""
        for host in self.commands:
            with self._output(host).open("rb") as file:
                file.seek(self._read[host])
                text, newline, _ = file.read().rpartition(b"\n")
            self._read[host] += len(text) + len(newline)
            now = time.monotonic()
            self.said += [(host, now, line) for line in text.decode(errors="replace").splitlines()]

    def wait_for(self, pattern: re.Pattern[str], limit_s: float, count: int = 1) -> str:
        """Wait for ``count`` lines of the first host that have the pattern; return the first group of the last one.

        Raises:
            PipelineError: They did not appear in time, or the command has ended without them.
        """

        def found() -> list[str]:
            return [match[1] for host, _, line in self.said if not host and (match := pattern.search(line))]

        self.wait_until(lambda: len(found()) >= count, limit_s, f"no {pattern.pattern!r}")
        return found()[count - 1]

    def wait_until(self, done: Callable[[], Any], limit_s: float, otherwise: str) -> None:
        """Wait until ``done`` returns a true value.

        Raises:
            PipelineError: It did not in time, or the first command has ended before; begins with ``otherwise``.
        """
        deadline = time.monotonic() + limit_s
        while True:
            has_ended = self.commands[0].poll() is not None
            self.look()
            if done():
                return
            if has_ended or time.monotonic() > deadline:
                why = (
                    f"the run has ended with exit code {self.commands[0].poll()}" if has_ended else "in time"
                )
                raise PipelineError(f"{otherwise}, {why}: {self._printed()}")
            time.sleep(_LOOK_S)

    def terminate(self, limit_s: float = 30.0) -> None:
        """Let all commands end by SIGTERM, those that join first; kill what has not ended in time."""
        for host in sorted(self.commands, reverse=True):
            self.commands[host].terminate()
        for command in self.commands.values():
            with suppress(subprocess.TimeoutExpired):
                command.wait(limit_s)

    def _output(self, host: int) -> Path:
        return self._folder / f"host{host}.txt"

    def _printed(self) -> str:
        return "\n".join(f"host {host}: {line}" for host, _, line in self.said[-20:])
