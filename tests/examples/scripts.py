"""Running an example as a user does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cli.command import ROOT, avgpipe, environment
from tests.patience import limit

EXAMPLES = ROOT / "examples"
COMMANDS = ["python", "avgpipe run"]


def printed(script: Path, command: str, *arguments: str) -> str:
    """What a script prints, alone or on two workers."""
    if command == "python":
        done = subprocess.run(
            [sys.executable, script, *arguments],
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
            timeout=limit(100),
        )
        return done.stdout
    process = avgpipe("run", "--stages", "2", str(script), *arguments)
    stdout, stderr = process.communicate(timeout=limit(100))
    assert process.returncode == 0, stderr
    return stdout
