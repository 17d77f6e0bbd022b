"""One more pipeline for a run, where the run cannot be reached."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from avgpipe.cli import hosts as command
from avgpipe.cli.config import JoinConfig
from avgpipe.errors import PipelineError
from avgpipe.fault.door import Door, encoded, received
from avgpipe.fault.group import OVER
from avgpipe.fault.joining import LEFT, TRAINS, NoPlace, RunLost, join_far
from avgpipe.ranks.launch import Job


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


SECRET = "a secret that is known"
ITS = {TRAINS: "iso.py --lr 3", "--stages": "2", "--seed": "0"}


class Idle:
    """Processes that run until they are killed."""

    is_killed = False

    def poll_or_kill(self) -> bool | None:
        return self.is_killed or None

    def kill(self, why: str = "", blamed: int | None = None) -> None:
        self.is_killed = True

    def close(self, number: int) -> None:
        pass


@contextmanager
def launcher(*replies: Any) -> Iterator[str]:
    """Yield the address of a launcher that greets one command, sends this, and closes the connection."""

    def serve() -> None:
        while not (entered := door.entered()):
            pass
        received(entered[0])
        for reply in replies:
            entered[0].send_bytes(encoded(reply))
        entered[0].close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        door = Door([(server.dup(), SECRET.encode())])
        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        serving.join(10)
        door.close()


def welcome(options: Mapping[str, str]) -> list[Any]:
    job = asdict(Job("stderr", ["python", "iso.py"], 1, {}, options=options))
    return ["welcome", {"pipeline": 1, "group": 1, "restart": "0", "job": job}]


def test_a_command_that_gives_another_program_is_refused() -> None:
    own = {TRAINS: "another.py", "--stages": "3", "--seed": "0", "--recompute": "all"}
    text = (
        '^the run at 127.0.0.1:[0-9]+ trains "iso.py --lr 3" with --stages 2, no --recompute, '
        'and this command says "another.py" with --stages 3, --recompute all: give the same$'
    )
    with launcher(["welcome", {"options": ITS}]) as address, pytest.raises(ValueError, match=text):
        join_far(address, SECRET, print, own)


def test_the_script_must_exist_where_a_command_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"^iso.py does not exist in {tmp_path}: begin in a folder with the run's script$"
    with launcher(welcome(ITS)) as address, pytest.raises(ValueError, match=text):
        join_far(address, SECRET, print)


def test_another_secret_and_an_unknown_host_are_named() -> None:
    text = "the run there has another secret: AVGPIPE_JOIN_TOKEN must be the same on all hosts"
    with socket.create_server(("127.0.0.1", 0)) as server:
        door, address = Door([(server.dup(), b"another secret")]), f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"^{address}: {text}$"):
            join_far(address, SECRET, print)
        door.close()
    with pytest.raises(NoPlace, match=r"^host nosuchhost\.invalid is not known here$"):
        join_far("nosuchhost.invalid:7000", SECRET, print)


def test_the_end_of_the_run_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "start", lambda *_: Idle())
    said = list[str]()
    with launcher(welcome({}), ["end", OVER]) as address:
        assert join_far(address, SECRET, said.append) == 1
    assert said[-1] == "pipeline 1 is ended: nothing was left to train"
    for ends in ([], [["end", LEFT]]):  # by SIGKILL, and by Ctrl-C
        with launcher(welcome({}), *ends) as address, pytest.raises(RunLost) as lost:
            join_far(address, SECRET, print)
        assert str(lost.value) == f"the run at {address} has ended before its last step"


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
