"""What the launcher of isolated pipelines hears and says, without any pipeline."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from avgpipe.fault.coordinator import Coordinator
from avgpipe.fault.door import MOST_BYTES, VERSION, connect, encoded, received, socket_of
from avgpipe.ranks.process import host_here
from tests.patience import Deadline, limit

_TOKEN = b"a token"
DIGESTS = {"plan": "a", "model": "a", "initial weights": "a"}


class Asked:
    """Records who asks, and whether it may write."""

    def hear(self, kind: str, *values: Any) -> None:
        pass

    def answer(self, reply: Any, writes: bool, kind: str, *values: Any) -> None:
        reply([kind, *values, writes])


class Served:
    """A coordinator that serves in a thread."""

    def __init__(self, folder: Path, wanted: int) -> None:
        self.lost: dict[int, str] = {}
        self.said: list[str] = []
        self.coordinator = Coordinator(
            str(folder / "coordinator"), _TOKEN, wanted, self._lose, self.said.append, Asked()
        )
        self._ended = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _lose(self, number: int, rank: int | None, why: str) -> None:
        self.lost.setdefault(number, why or f"rank {rank} has ended")

    def _serve(self) -> None:
        while not self._ended:
            self.coordinator.serve(0.01)
            for number in list(self.lost):
                self.coordinator.gone(number)

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        self.coordinator.close()

    def connect(self, pipeline: int, group: int, **changes: Any) -> Connection:
        self.coordinator.started(group)
        connection = connect(self.coordinator.address, _TOKEN)
        about = {"rank": 0, "size": 1, "name": "rank 0", "period": 1, "timeout_s": 9, "host": host_here()}
        connection.send_bytes(
            encoded(["hello", VERSION, about | {"pipeline": pipeline, "group": group} | changes])
        )
        return connection


@contextmanager
def served(folder: Path, wanted: int = 2) -> Iterator[Served]:
    one = Served(folder, wanted)
    try:
        yield one
    finally:
        one.close()


def heard(connection: Connection, kind: str) -> list[Any]:
    """The next message of a kind."""
    while connection.poll(limit(10)):
        message = received(connection)
        if message[0] == kind:
            return message[1:]
    raise AssertionError(f"no {kind} has come")


def enter(connection: Connection) -> Any:
    connection.send_bytes(encoded(["enter", 1, DIGESTS, {}]))
    return heard(connection, "reply")[1]


def alive(
    connection: Connection, batches: int = 0, begun: int = 0, ended: int = 0, published: int = 0
) -> None:
    """Report, and return once all that was said before has been heard."""
    connection.send_bytes(encoded(["alive", "a wait", batches, begun, ended, published]))
    heard(connection, "heard")


def begun(connection: Connection, turn: int, seen: dict[int, int] | None = None) -> None:
    number, *_ = heard(connection, "freeze")
    connection.send_bytes(encoded(["begun", number, turn, turn, turn, seen or {}]))


def test_a_run_begins_when_all_are_there_and_goes_on_with_those_that_are_left(tmp_path: Path) -> None:
    with served(tmp_path) as one:
        first, second = one.connect(0, 0), one.connect(1, 1)
        assert enter(first) == {}
        assert enter(second) == {}
        for connection in (first, second):
            assert [term[0] for term in heard(connection, "roster")[0]] == [0, 1]
        second.close()
        begun(first, 5, {1: 3})
        terms, *_ = heard(first, "roster")
        # It had published five steps at least: one ended here with it, and the sum of none is missing.
        assert [(term[0], *term[4:6]) for term in terms if term[0] == 1] == [(1, 5, 5)]
        assert one.lost == {1: "rank 0 has ended"}


def test_who_comes_begins_no_later_than_the_last_of_those_that_train(tmp_path: Path) -> None:
    with served(tmp_path, wanted=3) as one:
        members = [one.connect(i, i) for i in range(3)]
        for connection in members:
            assert enter(connection) == {}
        for connection, batches in zip(members, (7, 5)):  # the third has not said anything yet
            alive(connection, batches)
        assert heard(one.connect(3, 3), "welcome")[0]["batches"] == 5


def test_who_does_not_know_the_token_is_refused_and_nobody_is_disturbed(tmp_path: Path) -> None:
    with served(tmp_path) as one:
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            connect(one.coordinator.address, b"another").recv_bytes()
        first = one.connect(0, 0)
        assert heard(first, "welcome")[0]["has_begun"] is False


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"{}", "not a message"),
        (b"[]", "not a message"),
        (b"nonsense", "Expecting value"),
        (b'["hello", 99, {}]', "all processes of a run must have one version of avgpipe"),
        (b'["hello", 3, {"group": []}]', "int"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_makes_no_sense_ends_a_connection_alone(tmp_path: Path, text: bytes, why: str) -> None:
    with served(tmp_path) as one:
        stranger = connect(one.coordinator.address, _TOKEN)
        stranger.send_bytes(text)
        assert why in heard(stranger, "welcome")[0]["why"]
        with pytest.raises((EOFError, OSError)):
            stranger.recv_bytes()
        friend = one.connect(0, 0)
        assert heard(friend, "welcome")
        assert one.lost == {}


def test_a_message_whose_rest_never_comes_delays_no_other_one(tmp_path: Path) -> None:
    with served(tmp_path) as one:
        first, second = one.connect(0, 0), one.connect(1, 1)
        assert heard(first, "welcome")
        with socket_of(first) as end:
            end.sendall(struct.pack("!i", 1000) + b'["once", 1, "')
        alive(second)
        assert enter(second) == {}
        assert one.lost == {}


@pytest.mark.parametrize("kind", ["begun", "enter", "leave", "late", "alive", "once", "post", "ask", "found"])
@pytest.mark.parametrize(
    "values", [[], [None] * 3, [[]] * 4, [1e999] * 5, ["x"] * 5, [{}, 1, "x", [], None, 1.5]]
)
def test_values_that_no_message_has_cost_their_sender_its_pipeline_alone(
    tmp_path: Path, kind: str, values: list[Any]
) -> None:
    with served(tmp_path) as one:
        first, second = one.connect(0, 0), one.connect(1, 1)
        first.send_bytes(encoded([kind, *values]))
        alive(second)
        assert enter(second) == {}
        assert set(one.lost) <= {0}


def test_a_stopped_caller_does_not_delay_the_others(tmp_path: Path) -> None:
    with served(tmp_path) as one, socket.socket(socket.AF_UNIX) as silent:
        silent.connect(one.coordinator.address)
        assert heard(one.connect(0, 0), "welcome")


def test_another_plan_or_other_weights_are_refused(tmp_path: Path) -> None:
    with served(tmp_path) as one:
        first, second, third = (one.connect(i, i) for i in range(3))
        assert enter(first) == {}
        second.send_bytes(encoded(["enter", 1, {**DIGESTS, "plan": "b", "model": "c"}, {}]))
        third.send_bytes(encoded(["enter", 1, {**DIGESTS, "initial weights": "b"}, {}]))
        deadline = Deadline(10)
        while len(one.lost) < 2:
            assert not deadline.has_passed, one.lost
            alive(first)
        assert "it is refused: plan and model are not those of pipeline 0;" in one.lost[1]
        assert "it is refused: initial weights are not those of pipeline 0;" in one.lost[2]


def test_what_one_finds_all_are_told_and_another_finds_it_if_that_one_is_gone(tmp_path: Path) -> None:
    with served(tmp_path, wanted=3) as one:
        first, second, third = (one.connect(i, i) for i in range(3))
        for connection in (first, second, third):
            connection.send_bytes(encoded(["once", 7, "loss", 1, 5, 20]))
            if connection is first:
                assert heard(first, "reply") == [7, {}]
            else:
                alive(connection)  # so that they ask in this order
        first.close()
        assert heard(second, "reply") == [7, {}]
        second.send_bytes(encoded(["done", "loss", 1, 5, 1.5]))
        assert heard(third, "reply") == [7, {"value": 1.5}]
        known = {"value": 1.5}
        for (*name, is_newest), reply in (
            (("loss", 1, 20, False), known),
            (("loss", 2, 20, True), {}),
            (("loss", 1, 21, False), {}),
            (("loss", 1, 21, True), known),
            (("loss", 1, 19, True), {}),
        ):
            third.send_bytes(encoded(["found", 8, -1, *name, is_newest]))
            assert heard(third, "reply") == [8, reply]


@pytest.mark.parametrize(
    "values", [[8, -1, "loss", 1, 20], [8, -1, "loss", "x", 20, True], [8, -1, "loss", 1, [], True]]
)
def test_a_lookup_that_makes_no_sense_ends_its_connection_alone(tmp_path: Path, values: list[Any]) -> None:
    with served(tmp_path) as one:
        first, second = one.connect(0, 0), one.connect(1, 1)
        second.send_bytes(encoded(["found", *values]))
        while 1 not in one.lost:
            alive(first)
        assert "sent an invalid message" in one.lost[1]


def test_the_newest_result_is_looked_up_once_another_has_begun_the_step_that_follows(tmp_path: Path) -> None:
    with served(tmp_path) as one:
        first, second = one.connect(0, 0), one.connect(1, 1)
        heard(second, "welcome")
        second.send_bytes(encoded(["found", 8, 5, "loss", 1, 20, True]))
        first.send_bytes(encoded(["once", 7, "loss", 1, 5, 20]))
        assert heard(first, "reply") == [7, {}]
        alive(first, begun=5)
        assert not second.poll()
        first.send_bytes(encoded(["done", "loss", 1, 5, 1.5]))
        alive(first, begun=6)
        assert heard(second, "reply") == [8, {"value": 1.5}]


def test_who_is_silent_for_too_long_is_lost(tmp_path: Path) -> None:
    with served(tmp_path) as one:
        silent = one.connect(0, 0, timeout_s=0.2)
        with pytest.raises((EOFError, OSError)):
            heard(silent, "a word that never comes")
        assert one.lost[0].startswith("rank 0 sent no message for 0.2 s")


def late(connection: Connection, turn: int, waited_s: float) -> None:
    connection.send_bytes(encoded(["late", turn, waited_s]))


def test_who_does_something_for_all_is_not_late_for_the_turn_of_one_that_comes(tmp_path: Path) -> None:
    with served(tmp_path) as one:
        first, second = one.connect(0, 0), one.connect(1, 1)
        assert enter(first) == enter(second) == {}
        for connection in (first, second):
            heard(connection, "roster")
        first.send_bytes(encoded(["once", 7, "evaluate", 1, 1, 1]))
        assert heard(first, "reply") == [7, {}]
        late(second, 0, 0.2)
        alive(second, published=1)
        alive(first)
        assert one.lost == {}
        first.send_bytes(encoded(["done", "evaluate", 1, 1, 1.5]))
        alive(first)
        late(second, 0, 0.2)  # the first one has only just come back from it
        alive(second, published=1)
        alive(first)
        assert one.lost == {}
        deadline = Deadline(10)
        while not one.lost and not deadline.has_passed:
            late(second, 0, 0.2)
            alive(second, published=1)
            alive(first)
        assert one.lost[0].startswith("pipeline 1 has waited 0.2 s for pipeline 0's part of step 0")
        assert list(one.lost) == [0]


def test_a_second_timeout_on_a_step_that_all_have_published_loses_the_reporter(tmp_path: Path) -> None:
    with served(tmp_path) as one:
        first, second = one.connect(0, 0), one.connect(1, 1)
        assert enter(first) == enter(second) == {}
        for connection in (first, second):
            heard(connection, "roster")
        late(first, 0, 3)
        for connection in (first, second):
            alive(connection, published=1)
        while one.coordinator.members.groups[0].processes[0].reported_late < 0:
            alive(first, published=1)
        assert one.lost == {}
        late(first, 0, 3)
        for connection in (first, second):
            alive(connection, published=1)
        with pytest.raises((EOFError, OSError)):
            heard(first, "a word that never comes")
        assert one.lost == {
            0: "pipeline 0 has waited 3 s for step 0, which every pipeline has published; rank 0 last reported: a wait"
        }


def test_a_run_that_is_to_stop_before_it_has_begun_begins_and_stops_at_once(tmp_path: Path) -> None:
    with served(tmp_path) as one:
        first, second = one.connect(0, 0), one.connect(1, 1)
        first.send_bytes(encoded(["stop"]))
        alive(first)
        for connection in (first, second):
            assert enter(connection) == {}
        for connection in (first, second):
            terms, *_, stop, _ = heard(connection, "roster")
            assert [term[0] for term in terms] == [0, 1]
            assert stop == 0


def test_files_are_written_on_another_host_only_when_no_pipeline_is_left_here(tmp_path: Path) -> None:
    with served(tmp_path) as one:
        near, far = one.connect(0, 0), one.connect(1, 1, host="another")
        assert enter(near) == enter(far) == {}
        for connection, writes in ((far, False), (near, True)):
            connection.send_bytes(encoded(["ask", 7, "finish"]))
            assert heard(connection, "reply") == [7, ["finish", writes]]
        near.close()
        begun(far, 0)
        far.send_bytes(encoded(["ask", 8, "finish"]))
        assert heard(far, "reply") == [8, ["finish", True]]


def test_another_host_does_what_is_for_all_before_the_first_turn_of_one_that_comes_here(
    tmp_path: Path,
) -> None:
    with served(tmp_path) as one:
        near, far = one.connect(0, 0), one.connect(1, 1, host="another")
        assert enter(near) == enter(far) == {}
        near.close()
        begun(far, 3)
        comes = one.connect(0, 2)
        assert enter(comes) == {}
        begun(far, 6)
        assert heard(comes, "roster")[0][-1][1] == 2
        far.send_bytes(encoded(["once", 7, "loss", 1, 6, 6]))
        assert heard(far, "reply") == [7, {}]
        alive(comes, published=1)
        far.send_bytes(encoded(["once", 8, "loss", 1, 7, 7]))
        comes.send_bytes(encoded(["once", 8, "loss", 1, 7, 7]))
        assert heard(comes, "reply") == [8, {}]
        comes.send_bytes(encoded(["done", "loss", 1, 7, 1.5]))
        assert heard(far, "reply") == [8, {"value": 1.5}]


def test_another_host_does_what_only_it_asks_for_once_those_here_are_past_it(tmp_path: Path) -> None:
    with served(tmp_path) as one:
        near, far = one.connect(0, 0), one.connect(1, 1, host="another")
        assert enter(near) == enter(far) == {}
        far.send_bytes(encoded(["once", 7, "loss", 1, 1, 1]))
        for turn in range(2):
            alive(far)
            alive(near, published=turn + 1)
        assert heard(far, "reply") == [7, {}]


def test_another_host_does_nothing_for_all_before_the_run_begins_here(tmp_path: Path) -> None:
    with served(tmp_path) as one:
        far, near = one.connect(1, 1, host="another"), one.connect(0, 0)
        far.send_bytes(encoded(["once", 7, "checkpoints there", 1, 0, 0]))
        alive(far)
        near.send_bytes(encoded(["once", 7, "checkpoints there", 1, 0, 0]))
        assert heard(near, "reply") == [7, {}]
        near.send_bytes(encoded(["done", "checkpoints there", 1, 0, ["last"]]))
        assert heard(far, "reply") == [7, {"value": ["last"]}]


def test_who_has_its_state_goes_on_without_who_gave_it(tmp_path: Path) -> None:
    with served(tmp_path, wanted=1) as one:
        first, second = one.connect(0, 0), one.connect(1, 1)
        assert enter(first) == enter(second) == {}
        begun(first, 3)
        assert [term[2:4] for term in heard(second, "roster")[0]][-1] == [3, 0]
        second.send_bytes(encoded(["has state"]))
        alive(second)
        first.close()
        begun(second, 4)
        alive(second)
        assert 1 not in one.lost


def test_a_pipeline_without_a_published_step_is_lost_with_the_last_member(tmp_path: Path) -> None:
    with served(tmp_path, wanted=1) as one:
        first = one.connect(0, 0)
        assert enter(first) == {}
        heard(first, "roster")
        second = one.connect(1, 1)
        assert enter(second) == {}
        begun(first, 3)
        assert [term[2:4] for term in heard(second, "roster")[0]] == [[0, None], [3, 0]]
        first.close()
        begun(second, 3)
        with pytest.raises((EOFError, OSError)):
            heard(second, "a word that never comes")
        assert one.lost[1] == "pipeline 0, whose state it was to get, has ended"


def test_a_message_over_the_limit_is_refused_where_it_is_sent() -> None:
    with pytest.raises(
        ValueError, match=f"'done evaluation 1' has [0-9]+ bytes as JSON, .* at most {MOST_BYTES}"
    ):
        encoded(["done", "evaluation", 1, 0, "x" * MOST_BYTES])
