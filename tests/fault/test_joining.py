"""One more pipeline for a run, where the run cannot be reached."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from avgpipe.cli import hosts as command
from avgpipe.cli.config import JoinConfig
from avgpipe.errors import PipelineError
from avgpipe.fault.door import Door, encoded
from avgpipe.fault.joining import TRAINS, Joined, NoPlace, _ask, join_far
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


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 50, b"SSH-2.0-OpenSSH_9\r\n"])
def test_what_listens_there_may_be_no_run(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("avgpipe.fault.door.GREET_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        answering = threading.Thread(target=lambda: _say(server, said))
        answering.start()
        with pytest.raises(NoPlace, match=f"^{address}: its launcher cannot be reached: ") as raised:
            join_far(address, "a secret that is known", print)
        answering.join()
    why = "bad message length" if said else "it closed the connection, or said nothing for 10 s"
    assert str(raised.value).endswith(f"reached: {why}: it may be no run of avgpipe")


def _say(server: socket.socket, said: bytes) -> None:
    end, _ = server.accept()
    with end, suppress(OSError):
        end.sendall(said)
        while end.recv(1000):
            pass


JOB = {"out": "stdout", "command": ["a.py"], "size": 1, "added": {}, "arguments": None, "options": {}}
PLACE = {"pipeline": 0, "group": 0, "restart": "0", "folder": "/tmp", "job": JOB}


def _job(**changes: Any) -> dict[str, Any]:
    return {**PLACE, "job": JOB | changes}


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (None, "not an object"),
        (float("nan"), "not an object"),
        ({}, "pipeline is missing"),
        ({name: value for name, value in PLACE.items() if name != "job"}, "job is missing"),
        (PLACE | {"job": "x"}, "job must be a JSON object"),
        (PLACE | {"more": 1}, "unknown key 'more'"),
        (PLACE | {"pipeline": "x"}, "pipeline='x': must be an int"),
        (PLACE | {"group": float("nan")}, "group=nan: must be an int"),
        (PLACE | {"restart": 5}, "restart and folder must be texts"),
        (PLACE | {"restart": "x"}, "invalid literal for int"),
        (PLACE | {"folder": "a\0b"}, "restart and folder must be texts without NUL"),
        (_job(more=1), "unknown key 'more'"),
        (_job(out="x"), "unknown out 'x'"),
        (_job(size=0), "size=0: must be an int of at least 1"),
        (_job(size=10**12), "size=1000000000000: must be at most 65536"),
        (_job(command=[]), "command is empty"),
        (_job(command="a.py"), "command must be a tuple"),
        (_job(command=[1]), "command must be texts"),
        (_job(command=["a\0b"]), "command must be texts without NUL"),
        (_job(command=["\ud800"]), "surrogates not allowed"),
        (_job(added={"A": 1}), "added must be texts"),
        (_job(added=["A"]), "added must be a dict"),
        (_job(arguments=[1]), "arguments must be an object"),
        (_job(options=5), "options must be a dict"),
        (_job(options={TRAINS: "it's"}), "No closing quotation"),
        ({"options": 5}, "options must be a dict"),
        ({"why": [1]}, "why must be texts"),
    ],
)
def test_an_invalid_answer_of_a_launcher_is_refused(answer: Any, named: str) -> None:
    here, there = Pipe()
    with here, there:
        there.send_bytes(encoded(["welcome", answer]))
        with pytest.raises(ValueError, match=f"^the run: its launcher has sent an invalid answer: .*{named}"):
            _ask(here, "the run", {})


def test_a_valid_answer_of_a_launcher_has_its_job() -> None:
    here, there = Pipe()
    with here, there:
        there.send_bytes(encoded(["welcome", PLACE]))
        assert asdict(_ask(here, "the run", {})["job"]) | {"command": ["a.py"]} == JOB
        there.send_bytes(b"[]")
        with pytest.raises(ValueError, match="has sent an invalid answer: not a message"):
            _ask(here, "the run", {})
        there.send_bytes(encoded(["welcome", {"options": {}}]))
        with pytest.raises(ValueError, match=r"^the run at the run trains"):
            _ask(here, "the run", {})


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
