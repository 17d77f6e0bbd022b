"""One more pipeline for a run, where the run cannot be reached."""

from __future__ import annotations

import socket
import threading
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from avgpipe.cli import hosts as command
from avgpipe.cli.config import JoinConfig
from avgpipe.errors import PipelineError
from avgpipe.fault.door import Door, encoded
from avgpipe.fault.joining import Joined, NoPlace, join_far
from avgpipe.ranks.launch import RanksFailed


def _let_in_and_close(server: socket.socket) -> None:
    door = Door([(server.dup(), b"a secret that is known")])
    while not (entered := door.entered()):
        pass
    entered[0].close()
    door.close()


def test_a_launcher_that_does_not_answer_may_do_so_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        closing = threading.Thread(target=lambda: server.accept()[0].close())
        closing.start()
        with pytest.raises(NoPlace, match=f"{address}: its launcher cannot be reached"):
            join_far(address, "a secret that is known", print)
        closing.join()
        closing = threading.Thread(target=lambda: _let_in_and_close(server))
        closing.start()
        with pytest.raises(NoPlace, match=f"{address}: its launcher (has not answered|cannot be reached)"):
            join_far(address, "a secret that is known", print)
        closing.join()
    with pytest.raises(NoPlace, match=f"{address}: no run is active there"):  # it may not listen yet
        join_far(address, "a secret that is known", print)


@pytest.mark.parametrize(
    "message", [["ended"], ["ended", [0, -9], 1, "was killed"], ["ended", "x", 1, ""], ["ended", 7]]
)
def test_the_launcher_hears_how_the_processes_of_another_command_have_ended(message: list[Any]) -> None:
    here, there = Pipe()
    with here, there:
        joined = Joined(here)
        assert joined.poll_or_kill() is None
        there.send_bytes(encoded(message))
        end = joined.poll_or_kill()
        if message[1:] == [[0, -9], 1, "was killed"]:
            assert isinstance(end, RanksFailed)
            assert (end.exit_codes, end.rank, end.reason) == ((0, -9), 1, "was killed")
        else:
            assert end is True
        assert joined.is_cut == (message not in (["ended"], ["ended", [0, -9], 1, "was killed"]))
        assert joined.poll_or_kill() is end


def test_a_pipeline_joins_again_from_where_the_command_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time it goes to its launcher's folder, and the first time the line is cut."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    tries: list[Path] = []

    def join(run: Path, say: object) -> int:
        tries.append(run.absolute())
        monkeypatch.chdir(tmp_path / "elsewhere")
        if len(tries) == 1:
            raise PipelineError("pipeline 1: rank 0 failed with exit code 1")
        if len(tries) == 2:
            raise NoPlace("run: its launcher cannot be reached: timed out")
        return 1

    monkeypatch.setattr(command, "join", join)
    monkeypatch.setattr(command, "_ASK_S", 0.0)
    command.join_run(JoinConfig(run="run", restarts=1))
    assert tries == [tmp_path / "run"] * 3
