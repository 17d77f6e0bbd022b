"""This process's membership in a run of isolated pipelines: its end of the connection to the coordinator."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from typing import Any

from avgpipe.errors import PeerLost, PipelineError, PipelineTimeout
from avgpipe.fault.roster import VERSION, Roster, encoded, received
from avgpipe.ranks.environment import PIPELINE, RUN
from avgpipe_ext.ring import Memory

TOKEN, GROUP = "AVGPIPE_TOKEN", "AVGPIPE_GROUP"
_ALIVE_S = 1.0  # between two "alive" messages


def environment(address: str, token: str, group: int, pipeline: int) -> dict[str, str]:
    """Return the variables by which a process finds its run."""
    return {RUN: address, TOKEN: token, GROUP: str(group), PIPELINE: str(pipeline)}


@dataclass(frozen=True)
class Neighbour:
    """What other pipelines know of the processes of a pipeline that were started together.

    Attributes:
        published: where each of its ``places`` stage replicas counts the steps that it has published.
        memory: by name, the memory that they publish in.
        bells: the bells of its processes.
    """

    published: list[Any]
    places: int
    memory: Mapping[str, list[Any]]
    bells: list[list[Any]]


@dataclass(frozen=True)
class Known:
    """The roster, and the pipeline's processes by the number of a term."""

    roster: Roster
    neighbours: Mapping[int, Neighbour]


class Membership:
    """Connects to the coordinator, and receives its decisions in a thread of its own.

    Args:
        rank, size: of this process in its pipeline.
        name: its name in messages.
        places: how many stage replicas the pipeline has.
        period: the number of steps from one published update to the next.
        bell: where others ring for this process: a path, bytes, and an offset.
        timeout_s: the longest silence in seconds; after it a peer counts as lost.

    Attributes:
        pipeline: the number of this process's pipeline.
        group: the number of its processes that were started together.
        has_begun: whether others trained already when this process connected.
        batches: the number of the loader's batches that each of them had begun then.
        published: the memory in which this pipeline counts the steps that it has published.
        position: returns the number of batches that this process has begun, for its reports.
        known: the coordinator's decisions; replaced as a whole.
        begun: how many steps this process has begun; the next has this number.
    """

    def __init__(
        self, rank: int, size: int, name: str, places: int, period: int, bell: list[Any], timeout_s: float
    ) -> None:
        self.pipeline, self.group = int(os.environ[PIPELINE]), int(os.environ[GROUP])
        self._timeout_s = timeout_s
        self.known = Known(Roster(), {})
        self.begun = 0
        self.position: Callable[[], int] = lambda: self.batches
        self.doing: Callable[[], str] = lambda: "its start"
        self.changed: Callable[[], None] = lambda: None  # called by the thread
        self._is_frozen = False
        self._is_to_stop = False
        self._stop: int | None = None
        self._failure: PipelineError | None = None
        self._replies: dict[int, Any] = {}
        self._handed: dict[str, Any] = {}
        self._requests = 0
        self._lock = threading.Condition()
        self._sending = threading.Lock()
        where = os.environ[RUN]
        try:
            self._connection = Client(where, authkey=os.environ[TOKEN].encode())
            about = {
                "rank": rank,
                "size": size,
                "name": name,
                "places": places,
                "period": period,
                "bell": bell,
            }
            self._send(
                "hello",
                VERSION,
                about | {"pipeline": self.pipeline, "group": self.group, "timeout_s": timeout_s},
            )
            if not self._connection.poll(timeout_s):
                raise PeerLost(f"the launcher at {where} has not answered within {timeout_s:g} s")
            _, welcome = received(self._connection)
        except (OSError, EOFError, ValueError, AuthenticationError) as error:
            raise PeerLost(
                f"the launcher at {where} cannot be reached: {str(error) or 'it has closed the connection'}"
            ) from error
        if "why" in welcome:
            raise PeerLost(f"the launcher at {where} has refused this process: {welcome['why']}")
        self.has_begun, self.batches = welcome["has_begun"], welcome["batches"]
        self.published = Memory.open(*welcome["published"])
        self._heard_at = time.monotonic()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="avgpipe-membership", daemon=True)
        self._thread.start()

    # ---- for the main thread -----------------------------------------------------------------------------------------

    def memory(self, name: str, size: int) -> Memory:
        """Return memory that the launcher holds, which outlives this process; it may exist already."""
        reply = self._request("memory", name, size)
        if "why" in reply:
            raise MemoryError(f"{size} bytes of shared memory for {name}: {reply['why']}")
        return Memory.open(*reply["place"])

    def enter(self, digests: list[str]) -> int:
        """Become a member, with the other processes of this pipeline; return the first step.

        ValueError where the pipeline is not made as the others are.
        """
        reply = self._request("enter", digests)
        if "why" in reply:
            raise ValueError(reply["why"])
        with self._lock:
            self._await(lambda: self._own_first() is not None, None)
            return self.begun

    def _own_first(self) -> int | None:
        return next((term.first for term in self.known.roster.terms if term.number == self.group), None)

    @property
    def is_late(self) -> bool:
        """Whether this pipeline, a member, has joined a run in which others trained already."""
        return any(term.donor is not None for term in self.known.roster.terms if term.number == self.group)

    def begin(self) -> int:
        """Begin the next step, and return its number; waits while its members are being decided."""
        with self._lock:
            self._await(lambda: not self._is_frozen, self._timeout_s)
            self.begun += 1
            return self.begun - 1

    def stop(self) -> None:
        """Have all pipelines stop: from a step that no process has begun on, there are no batches.

        May be called in any thread, and in a signal handler.
        """
        self._is_to_stop = True

    def stops_at(self, turn: int) -> bool:
        """Whether a step that was begun has no batches, because the run stops."""
        return self._stop is not None and turn >= self._stop

    @property
    def has_stopped(self) -> bool:
        """Whether this process has begun such a step. All processes stop at the same step."""
        return self.stops_at(self.begun - 1)

    def leave(self) -> None:
        """Report that this process is done."""
        self._send_if_alive("leave")

    def report_late(self, turn: int) -> None:
        """Report that this process timed out waiting for the others in a step."""
        self._send_if_alive("late", turn, self._timeout_s)

    def once(self, what: str, number: int, turn: int, batches: int) -> list[Any]:
        """Return another pipeline's result in a list; empty where this one must compute it for `done`.

        Args:
            number: how often it was requested before the step.
            batches: the number of the loader's batches before it.
        """
        reply = self._request("once", what, number, turn, batches, limit_s=None)
        return [reply["value"]] if "value" in reply else []

    def done(self, what: str, number: int, turn: int, value: Any) -> None:
        self._send_if_alive("done", what, number, turn, value)

    def found(self, what: str, number: int, batches: int) -> list[Any]:
        """Return in a list the result from after ``batches`` batches; empty if it is not known."""
        reply = self._request("found", what, number, batches)
        return [reply["value"]] if "value" in reply else []

    def tell(self, kind: str, *values: Any) -> None:
        """Send a report to the recorder of the run, in the launcher."""
        self._send_if_alive("tell", kind, *values)

    def ask(self, kind: str, *values: Any) -> Any:
        """Return the answer of the recorder of the run, which may have to wait for a report."""
        return self._request("ask", kind, *values, limit_s=None)

    def hand_over(self, number: int, name: str, value: Any) -> None:
        """Send something to the processes of another group."""
        self._send_if_alive("hand over", number, name, value)

    def received(self, name: str) -> Any:
        """Wait for what another process has handed over, and return it."""
        with self._lock:
            self._await(lambda: name in self._handed, None)
            return self._handed.pop(name)

    def close(self) -> None:
        self._is_closed = True
        self._connection.close()

    def _request(self, kind: str, *values: Any, limit_s: float | None = -1.0) -> Any:
        with self._lock:
            number = self._requests = self._requests + 1
            self._send_if_alive(kind, number, *values)
            self._await(lambda: number in self._replies, self._timeout_s if limit_s == -1.0 else limit_s)
            return self._replies.pop(number)

    def _await(self, done: Callable[[], bool], limit_s: float | None) -> None:
        """Wait with the lock held; without a limit, as long as the launcher sends messages."""
        if not self._lock.wait_for(lambda: done() or self._failure is not None, limit_s):
            raise PipelineTimeout(f"the launcher has not answered within {limit_s:g} s")
        if self._failure is not None:
            raise self._failure

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        sent_at, has_sent_stop = 0.0, False
        try:
            while True:
                if self._is_to_stop and not has_sent_stop:
                    has_sent_stop = True
                    self._send("stop")
                if time.monotonic() >= sent_at + _ALIVE_S:
                    self._send("alive", self.doing()[:500], self.position())
                    sent_at = time.monotonic()
                if self._connection.poll(max(0.0, sent_at + _ALIVE_S - time.monotonic())):
                    self._heard_at = time.monotonic()
                    self._handle(*received(self._connection))
                elif time.monotonic() > self._heard_at + self._timeout_s:
                    raise TimeoutError(f"it sent no message for {self._timeout_s:g} s")
        except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
            if not self._is_closed:
                with self._lock:
                    self._failure = PeerLost(
                        f"the launcher has ended, or is cut off: {str(error) or 'it closed the connection'}"
                    )
                    self._lock.notify_all()
                self.changed()

    def _handle(self, kind: str, *values: Any) -> None:
        with self._lock:
            if kind == "freeze":
                self._is_frozen = True
                self._send("begun", self.begun, self.position())
            elif kind == "roster":
                self._take_roster(*values)
            elif kind == "reply":
                self._replies[values[0]] = values[1]
            elif kind == "handed over":
                self._handed[values[0]] = values[1]
            self._lock.notify_all()
        if kind == "roster":
            self.changed()

    def _take_roster(
        self, terms: list[Any], neighbours: Mapping[str, Mapping[str, Any]], stop: int | None
    ) -> None:
        was_member = self._own_first() is not None
        about = {int(number): Neighbour(**neighbour) for number, neighbour in neighbours.items()}
        self.known, self._stop = Known(Roster.from_json(terms), about), stop
        first = self._own_first()
        if not was_member and first is not None:
            self.begun = first
        self._is_frozen = False

    @property
    def failure(self) -> PipelineError | None:
        """The error for which this process can no longer take part in the run."""
        return self._failure

    def _send(self, *message: Any) -> None:
        with self._sending:
            self._connection.send_bytes(encoded(message))

    def _send_if_alive(self, *message: Any) -> None:
        try:
            self._send(*message)
        except OSError:  # the thread reports why
            pass
