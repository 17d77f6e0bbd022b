"""This process's membership in a run of isolated pipelines: its end of the connection to the coordinator."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from typing import TYPE_CHECKING, Any

from avgpipe.errors import PeerLost, PipelineError, PipelineTimeout, reason
from avgpipe.fault.door import MOST_BYTES, VERSION, Messages, connect, cut, encoded, received, socket_of
from avgpipe.fault.roster import Roster, Term
from avgpipe.ranks.environment import PIPELINE, RUN
from avgpipe.ranks.process import host_here

if TYPE_CHECKING:
    from avgpipe.fault.exchange import TurnExchange

TOKEN, GROUP = "AVGPIPE_TOKEN", "AVGPIPE_GROUP"
_ALIVE_S = 1.0  # between two "alive" messages
_LONGEST = 1000  # characters of a reason
_MOST_FOUND = MOST_BYTES - 2**12  # bytes of a result, which messages hold beside its name
_RELEASE_S = 30.0  # at least, for the others to end the steps in which they need this process


def environment(address: str, token: str, group: int, pipeline: int) -> dict[str, str]:
    """Return the variables by which a process finds its run."""
    return {RUN: address, TOKEN: token, GROUP: str(group), PIPELINE: str(pipeline)}


@dataclass(frozen=True, eq=False)
class Known:
    """The coordinator's decisions.

    Attributes:
        roster: which pipelines train when.
        facts: what the processes of a term have said of themselves, by its number and their rank.
        epoch: how often the sums over hosts were begun again.
        resume: the first step whose sum is made in this epoch.
        owed: the host that has the sum of the step before it whole, and those that lack it; for this rank.
        here: the address of this host.
    """

    roster: Roster
    facts: Mapping[int, Mapping[int, Any]]
    epoch: int = 0
    resume: int = 0
    owed: tuple[str, list[str]] | None = None
    here: str = ""


class Membership:
    """Connects to the coordinator, and receives its decisions in a thread of its own.

    Args:
        rank, size: of this process in its pipeline.
        name: its name in messages.
        period: the number of steps from one published update to the next.
        timeout_s: the longest silence in seconds; after it a peer counts as lost.

    Attributes:
        rank: of this process.
        timeout_s: the longest silence.
        pipeline: the number of this process's pipeline.
        group: the number of its processes that were started together.
        host: names its host.
        has_begun: whether others trained already when this process connected.
        batches: the number of the loader's batches that each of them had begun then.
        spans_hosts: whether pipelines of other hosts may join.
        known: the coordinator's decisions; replaced as a whole.
        begun: how many steps this process has begun; the next has this number.
        here: the address of this host towards the launcher's, if that is another one.
        failure: the error for which this process can no longer take part in the run.
    """

    def __init__(self, rank: int, size: int, name: str, period: int, timeout_s: float) -> None:
        self.rank, self.host = rank, host_here()
        self.pipeline, self.group = int(os.environ[PIPELINE]), int(os.environ[GROUP])
        self.timeout_s = timeout_s
        self.known = Known(Roster(), {})
        self.begun = 0
        self.doing: Callable[[], str] = lambda: "its start"
        self._participant: TurnExchange
        self._is_frozen = False
        self._unseen: list[int] = []
        self._is_to_stop = False
        self._stop: int | None = None
        self.failure: PipelineError | None = None
        self._replies: dict[int, Any] = {}
        self._posted: dict[tuple[str, str], str] = {}
        self._requests = 0
        self._asked = Counter[str]()  # by name, the results requested between two steps
        self._asked_before = 0  # the later of these two steps
        self._asked_again = Counter[tuple[str, int]]()  # requests of found_before
        self._is_released = False
        self._lock = threading.Condition()
        self._sending = threading.Lock()
        welcome = self._connect({"rank": rank, "size": size, "name": name, "period": period})
        self.has_begun, self.batches = welcome["has_begun"], welcome["batches"]
        self.spans_hosts = bool(welcome["spans_hosts"])
        self._heard_at = time.monotonic()
        self._is_closed = False

    def _connect(self, about: dict[str, Any]) -> dict[str, Any]:
        where = os.environ[RUN]
        about |= {"pipeline": self.pipeline, "group": self.group, "host": self.host}
        try:
            self._connection = connect(where, os.environ[TOKEN].encode())
            with socket_of(self._connection) as end:
                self.here = "" if where.startswith("/") else end.getsockname()[0]
            self._send("hello", VERSION, {**about, "timeout_s": self.timeout_s})
            if not self._connection.poll(self.timeout_s):
                raise PeerLost(f"the launcher at {where} has not answered within {self.timeout_s:g} s")
            _, welcome = received(self._connection)
        except (OSError, EOFError, ValueError, AuthenticationError) as error:
            raise PeerLost(
                f"the launcher at {where} cannot be reached: {str(error) or 'it has closed the connection'}"
            ) from error
        if "why" in welcome:
            raise PeerLost(f"the launcher at {where} has refused this process: {welcome['why']}")
        return dict(welcome)

    # ---- for the main thread -----------------------------------------------------------------------------------------

    def serve(self, participant: TurnExchange) -> None:
        """Let the coordinator's decisions reach ``participant`` from now on."""
        self._participant = participant
        threading.Thread(target=self._run, name="avgpipe-membership", daemon=True).start()
        atexit.register(self._exit)

    def enter(self, digests: Mapping[str, str], facts: Any) -> int:
        """Become a member, with the other processes of this pipeline; return the first step.

        ``facts``: what other processes must know of this one. The launcher ends a pipeline that is not made as the
        others are.
        """
        self._request("enter", digests, facts)
        with self._lock:
            self._await(lambda: self.own_term is not None, None)
            return self.begun

    @property
    def own_term(self) -> Term | None:
        """That of this pipeline, once it is a member."""
        return self.known.roster.of(self.group)

    @property
    def is_late(self) -> bool:
        """Whether this pipeline, a member, has joined a run in which others trained already."""
        return self.own_term is not None and self.own_term.donor is not None

    def begin(self, is_first: bool = True) -> int | None:
        """Begin the next step, and return its number; waits while its members are being decided.

        Returns None if a pipeline joins with it, and ``is_first`` is false: steps are in flight here.
        """
        with self._lock:
            self._await(lambda: not self._is_frozen and not self._unseen, self.timeout_s)
            if not is_first and self.known.roster.joining(self.begun):
                return None
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

    def report_late(self, turn: int, host: str = "") -> None:
        """Report that this process timed out waiting for the others in a step; ``host``: for which one, if known."""
        self._send_if_alive("late", turn, self.timeout_s, host)

    def report_broken(self, epoch: int, host: str = "") -> None:
        """Report that a sum over hosts has failed, when it waited for ``host``; in any thread."""
        self._send_if_alive("broken", epoch, host)

    def report_state(self) -> None:
        """Report that this process has the state that it begins with."""
        self._send_if_alive("has state")

    def once(self, what: str, batches: int, find: Callable[[], Any]) -> Any:
        """Return the result that one pipeline computes for all between two steps, as JSON returns it.

        Another pipeline computes it if that one is lost. Every process calls this before the same step,
        equally often for each name.

        Args:
            batches: number of the loader's batches before it: the position at which a pipeline that joins
                later asks :meth:`found_before`.
        """
        turn = self.begun
        if turn != self._asked_before:
            self._asked, self._asked_before = Counter(), turn
        self._asked[what] += 1
        name = what, self._asked[what], turn
        reply = self._request("once", *name, batches, limit_s=None)
        if "value" not in reply:
            reply = {"value": find()}
            if (size := len(json.dumps(reply["value"]))) > _MOST_FOUND:
                raise ValueError(
                    f"once({what!r}): the result has {size} bytes as JSON, and may have at most {_MOST_FOUND}: "
                    "return less, such as the path of a file"
                )
            self._send_if_alive("done", *name, reply["value"])
        return reply["value"]

    def found_before(self, what: str, batches: int, is_here: bool = False) -> list[Any]:
        """Return in a list the others' result from after ``batches`` batches; empty if there is none.

        ``is_here``: this pipeline is to begin there. The result is the newest of that name once the others have begun
        its first step, before which they may still find one.
        """
        self._asked_again[what, batches] += 1
        name = what, self._asked_again[what, batches], batches
        turn = self.begun if is_here else -1
        return [
            *self._request(
                "found", turn, *name, is_here, limit_s=None if is_here else self.timeout_s
            ).values()
        ]

    def tell(self, kind: str, *values: Any) -> None:
        """Send a report to the recorder of the run, in the launcher."""
        self._send_if_alive("tell", kind, *values)

    def ask(self, kind: str, *values: Any) -> Any:
        """Return the answer of the recorder of the run, which may have to wait for a report."""
        return self._request("ask", kind, *values, limit_s=None)

    def post(self, name: str, key: str, value: str) -> None:
        """Make a text known to all processes of this rank, under the name of a meeting and a key; in any thread."""
        self._send_if_alive("post", name, key, value)

    def posted(self, name: str, key: str, goes_on: Callable[[], bool], limit_s: float) -> str:
        """Wait for a posted text, and return it; PeerLost once ``goes_on()`` is false. In any thread."""
        with self._lock:
            self._await(lambda: (name, key) in self._posted or not goes_on(), limit_s)
            if (name, key) not in self._posted:
                raise PeerLost(f"{name} is given up")
            return self._posted[name, key]

    def give_up(self, why: str) -> None:
        """Report why this process ends."""
        self._send_if_alive("gives up", why[:_LONGEST])

    def pause(self, limit_s: float) -> None:
        """Wait for the next message of the coordinator."""
        with self._lock:
            self._lock.wait(limit_s)

    def leave(self) -> None:
        """Report that this process is done; return once no other one needs it any more."""
        self._send_if_alive("leave", self.begun, self._participant.position()[-1])
        limit_s = max(_RELEASE_S, self.timeout_s)  # a step of other hosts may take that long
        with self._lock:
            self._lock.wait_for(lambda: self._is_released or self.failure is not None, limit_s)

    def close(self) -> None:
        self._is_closed = True
        atexit.unregister(self._exit)
        cut(self._connection)  # at once, though the thread waits for a message
        self._connection.close()

    def _exit(self) -> None:
        """Leave at the end of a script that closes nothing, unless an error has ended it."""
        if getattr(sys, "last_value", None) is None and self.failure is None:
            self.leave()

    def _request(self, kind: str, *values: Any, limit_s: float | None = -1.0) -> Any:
        with self._lock:
            number = self._requests = self._requests + 1
            self._send_if_alive(kind, number, *values)
            self._await(lambda: number in self._replies, self.timeout_s if limit_s == -1.0 else limit_s)
            return self._replies.pop(number)

    def _await(self, done: Callable[[], bool], limit_s: float | None) -> None:
        """Wait with the lock held; without a limit, as long as the launcher sends messages."""
        if not self._lock.wait_for(lambda: done() or self.failure is not None, limit_s):
            raise PipelineTimeout(f"the launcher has not answered within {limit_s:g} s")
        if self.failure is not None:
            raise self.failure

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        sent_at, has_sent_stop, inbox = 0.0, False, Messages(self._connection)
        try:
            while True:
                if self._is_to_stop and not has_sent_stop:
                    has_sent_stop = True
                    self._send("stop")
                if time.monotonic() >= sent_at + _ALIVE_S:
                    self._send_alive()
                    sent_at = time.monotonic()
                if self._connection.poll(max(0.0, sent_at + _ALIVE_S - time.monotonic())):
                    self._heard_at = time.monotonic()
                    for message in inbox.read():
                        self._handle(*message)
                elif time.monotonic() > self._heard_at + self.timeout_s:
                    raise TimeoutError(f"it sent no message for {self.timeout_s:g} s")
        except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
            why = str(error) or "it closed the connection"
            self._fail(PeerLost(f"the launcher has ended, or is cut off: {why}"))
        except Exception as error:  # such as without memory, or another thread
            self._fail(PipelineError(f"this process can no longer take part in the run: {reason(error)}"))

    def _fail(self, failure: PipelineError) -> None:
        if self._is_closed:
            return
        with self._lock:
            self.failure = failure
            self._lock.notify_all()
        cut(self._connection)  # else it would be missed only after a timeout
        self._participant.failed(failure)

    def _send_alive(self) -> None:
        batches, ended, published = self._participant.position()
        self._send("alive", self.doing()[:500], batches, self.begun, ended, published)

    def _handle(self, kind: str, *values: Any) -> None:
        with self._lock:
            if kind == "freeze":
                self._freeze(*values)
            elif kind == "roster":
                self._take_roster(*values)
            elif kind == "reply":
                self._replies[values[0]] = values[1]
            elif kind == "posted":
                self._posted[values[0], values[1]] = values[2]
            elif kind == "report":
                self._send_alive()
            elif kind == "released":
                self._is_released = True
            self._lock.notify_all()

    def _freeze(self, number: int, lost: Sequence[int], breaks: bool) -> None:
        self._is_frozen = True
        whole, seen = self._participant.freeze(lost, breaks)
        self._send("begun", number, self.begun, self._participant.position()[0], whole, seen)

    def _take_roster(
        self,
        terms: list[Any],
        facts: Mapping[str, Mapping[str, Any]],
        since: int,
        epoch: int,
        resume: int,
        owed: Mapping[str, Any],
        stop: int | None,
        here: str,
    ) -> None:
        was_member = self.own_term is not None
        roster = self.known.roster.changed(terms, since)
        numbers = {term.number for term in roster.terms}
        about = {n: fact for n, fact in self.known.facts.items() if n in numbers}
        about |= {int(n): {int(rank): fact for rank, fact in of.items()} for n, of in facts.items()}
        own = owed.get(str(self.rank))
        known = Known(roster, about, epoch, resume, None if own is None else (own[0], own[1]), here)
        self._unseen = self._participant.adopt(known)
        self.known, self._stop = known, stop
        if not was_member and self.own_term is not None:
            self.begun = self.own_term.first
        for number in self._unseen:
            self._send("unseen", number)
        self._is_frozen = False

    def _send(self, *message: Any) -> None:
        text = encoded(message)
        with self._sending:
            self._connection.send_bytes(text)

    def _send_if_alive(self, *message: Any) -> None:
        try:
            self._send(*message)
        except OSError:  # the thread reports why
            pass
