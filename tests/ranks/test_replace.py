"""Ranks that are replaced by the launcher: who takes the place, what it is told, and that nobody is left."""

import os
import sys
from pathlib import Path

from avgpipe.ranks.launch import tied
from avgpipe.ranks.replace import Replacing

# A spare that never comes as far as its Pipeline; rank 0 is killed once it is there, and rank 1 waits for the next.
_SCRIPT = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
if "AVGPIPE_SPARE" in os.environ:
    (folder / "new").write_text(str(os.getpid()))
    (folder / "new").rename(folder / "spare")
    signal.pause()
awaited = folder / ("spare" if os.environ["RANK"] == "0" else "1")
while not awaited.exists():
    time.sleep(0.01)
(folder / os.environ["AVGPIPE_RESTART"]).touch()
if os.environ["AVGPIPE_RESTART"] == "0" and os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_spare_that_is_not_ready_stays_one_and_is_ended_with_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    command = tied("stderr", sys.executable, "-c", _SCRIPT, str(tmp_path))
    Replacing(command, 2, 1, {}, said.append).run()
    assert len(said) == 1
    assert said[0].endswith("a new process takes its place")
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "spare"]  # each life knows how often it was started
    assert not Path("/proc", (tmp_path / "spare").read_text()).exists()
