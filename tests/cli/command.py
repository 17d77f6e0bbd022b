"""The command as a process of its own, and inside this one."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

import avgpipe as avgpipe_package
from avgpipe.cli.main import app

ROOT = Path(__file__).parents[2]
PACKAGES = str(Path(avgpipe_package.__file__).parents[1])  # where this process has avgpipe from
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Run:
    out: Path
    stdout: str
    stderr: str

    @property
    def summary(self):
        return strict((self.out / "summary.json").read_text())

    @property
    def rows(self):
        return rows(self.out)


def environment(**changes):
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    path = os.pathsep.join([PACKAGES, str(ROOT)])
    return {**env, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **changes}


def avgpipe(*arguments, **changes):
    """Start the command; its standard streams are pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", "avgpipe", *arguments],
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def invoke(*arguments):
    """The command in this process: exit code, standard output and error of a run that starts no workers."""
    result = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def strict(text):
    """One JSON value and nothing else, without NaN and Infinity."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def rows(out):
    return [strict(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def children(pid):
    """Processes whose parent is ``pid``."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(folder.name))
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def rank_of(pid):
    """The rank of a worker."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((int(v.removeprefix(b"RANK=")) for v in variables if v.startswith(b"RANK=")), None)
