"""The coordinator of isolated pipelines: it connects their processes with :class:`avgpipe.fault.members.Members`.

The launcher runs it. Each process has one connection to it. A process that ends closes its connection, so its
end is known at once, whatever its cause.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from avgpipe.fault import door
from avgpipe.fault.common import CommonResults
from avgpipe.fault.group import Command, Group, Kill, Say
from avgpipe.fault.members import Members
from avgpipe.ranks.process import host_here


class Coordinator:
    """Serves one run from one thread, which calls :meth:`serve` repeatedly.

    Args:
        address: a path for a Unix socket.
        token: what a process must know.
        wanted: how many pipelines begin the run together.
        lost: called with the number of a group, the rank to blame (None if unknown) and the reason, once one
            of its processes has ended (reason "", as its exit code says more), hangs, or sends an invalid
            message. It must end the other processes; :meth:`gone` is called when all of them have ended.
        say: prints a line for the user.
        recorder: records what processes report about the run, which several may report alike, and answers their
            requests by ``answer(reply, writes, kind, *values)``, now or after a later report; ``writes``:
            whether that process may write files. It raises ValueError for invalid values.
        let_join: called with the connection of another command that wants to start a pipeline, and its
            description of itself; keeps the connection, and returns the reply to that command.
        listening: a socket for processes and commands of other hosts, with the secret that they must know.

    Attributes:
        members: the state of the run.
        far_address: host and port where commands of other hosts find the run; None if they cannot.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        wanted: int,
        lost: Callable[[int, int | None, str], None],
        say: Callable[[str], None],
        recorder: Any = None,
        let_join: Callable[[Connection, dict[str, Any]], dict[str, Any]] | None = None,
        listening: tuple[socket.socket, str] | None = None,
    ) -> None:
        self.address = address
        self.far_address = None if listening is None else door.called(listening[0])
        far = [] if listening is None else [(listening[0], listening[1].encode())]
        self._door = door.Door([(door.listen_here(address), token), *far])
        self._lost, self._say, self._recorder, self._let_join = lost, say, recorder, let_join
        self.members = Members(wanted, host_here())
        self._common = CommonResults()
        self._lookups: list[tuple[int, Callable[[], None]]] = []  # of earlier results, and a step to wait for
        self._here = "127.0.0.1"  # the address of this host, as other hosts have found it
        self._unknown: set[Connection] = set()  # that have not identified themselves
        self._known: dict[Connection, tuple[int, int]] = {}  # group and rank
        self._connections: dict[tuple[int, int], Connection] = {}
        self._selector = selectors.DefaultSelector()  # of all connections
        self._deaf: set[Connection] = set()  # that were cut, as they took no message

    def close(self) -> None:
        self._door.close()
        for connection in (*self._unknown, *self._known):
            connection.close()
        self._selector.close()
        with suppress(OSError):
            os.unlink(self.address)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def serve(self, timeout_s: float) -> None:
        """Handle the messages that arrive within ``timeout_s``, and all changes that are due."""
        for one in self._door.entered():
            self._unknown.add(one)
            self._selector.register(one, selectors.EVENT_READ, door.Messages(one))
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.fileobj, Connection) and not key.fileobj.closed:
                self._receive(key.fileobj, key.data)
        for lookup in [*self._lookups]:
            turn, answer = lookup
            if turn < self.members.reached:  # all have requested what they need before that step
                self._lookups.remove(lookup)
                answer()
        self._common.choose(self._is_near, self._may_ask_near)
        self._do(self.members.tick(time.monotonic(), self._common.computed_at))

    def started(self, number: int) -> None:
        """Note that the processes of a group are being started."""
        self.members.started(number, time.monotonic())

    def lose(self, number: int, rank: int | None, why: str) -> None:
        """End a group of which a process is lost."""
        self._do(self.members.lose(number, rank, why, time.monotonic()))

    def gone(self, number: int) -> None:
        """Note that all processes of a group have ended."""
        for place, connection in list(self._connections.items()):
            if place[0] == number:
                self._forget(connection)
        self._common.gone(number)
        self._do(self.members.gone(number, time.monotonic()))

    def _do(self, commands: list[Command]) -> None:
        last: Any = None
        text = b""
        for command in commands:
            if isinstance(command, Kill):
                self._lost(command.group, command.rank, command.why)
            elif isinstance(command, Say):
                self._say(command.line)
            elif (connection := self._connections.get((command.group, command.rank))) is not None:
                if command.message is not last:  # else it is the same for many: a roster of a thousand hosts
                    last = message = command.message
                    text = door.encoded([*message, self._here] if message[0] == "roster" else message)
                self._send_text(connection, text)

    # ---- connections -------------------------------------------------------------------------------------------------

    def _receive(self, connection: Connection, inbox: door.Messages) -> None:
        try:
            messages = inbox.read()
        except (OSError, EOFError):
            self._closed(connection)
            return
        except ValueError as error:
            self._refuse(connection, error)
            return
        for kind, *values in messages:
            try:
                if connection in self._known:
                    self._answer(*self._known[connection], kind, *values)
                elif connection in self._unknown:
                    self._greet(connection, kind, *values)
            except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
                self._refuse(connection, error)

    def _refuse(self, connection: Connection, error: Exception) -> None:
        """Drop a peer that sent an invalid message."""
        if connection in self._known:
            number, rank = self._known[connection]
            name = self.members.groups[number].processes[rank].name
            self.lose(number, rank, f"{name} sent an invalid message: {error}")
        else:
            self._send(connection, "welcome", {"why": str(error)})
        self._closed(connection)

    def _closed(self, connection: Connection) -> None:
        self._unknown.discard(connection)
        known, is_deaf = self._known.get(connection), connection in self._deaf
        self._forget(connection)
        if known is not None:
            self._common.gone(known[0])
            if is_deaf:
                name = self.members.groups[known[0]].processes[known[1]].name
                self.lose(*known, f"{name} took no message for {door.SEND_S} s")
            self._do(self.members.closed(*known, time.monotonic()))

    def _forget(self, connection: Connection) -> None:
        if not connection.closed:
            self._selector.unregister(connection)
        self._deaf.discard(connection)
        known = self._known.pop(connection, None)
        if known is not None:
            del self._connections[known]
        connection.close()

    def _greet(self, connection: Connection, kind: str, version: int, about: dict[str, Any]) -> None:
        if kind not in ("hello", door.JOIN) or version != door.VERSION:
            raise ValueError(f"{kind} {version}: all processes of a run must have one version of avgpipe")
        with door.socket_of(connection) as end:
            is_far = end.family != socket.AF_UNIX
            if is_far:
                self._here = end.getsockname()[0]
        if kind == door.JOIN and self._let_join is not None:
            reply = self._let_join(connection, {**about, "is_far": is_far})
            self._unknown.discard(connection)
            self._selector.unregister(connection)
            self._send(connection, "welcome", reply)
            return
        place = int(about["group"]), int(about["rank"])
        progress = self.members.progress()
        self.members.hello(*place, about, time.monotonic())
        self._unknown.discard(connection)
        self._known[connection], self._connections[place] = place, connection
        self._send(connection, "welcome", {**progress, "spans_hosts": self.far_address is not None})

    def _send(self, connection: Connection, *message: Any) -> None:
        self._send_text(connection, door.encoded(message))

    def _send_text(self, connection: Connection, text: bytes) -> None:
        try:
            connection.send_bytes(text)
        except OSError as error:  # the closed connection will show it
            if isinstance(error, BlockingIOError):
                self._deaf.add(connection)
            door.cut(connection)

    # ---- messages of processes ---------------------------------------------------------------------------------------

    def _answer(self, number: int, rank: int, kind: str, *values: Any) -> None:
        def reply(request: int, value: Any) -> None:
            if (connection := self._connections.get((number, rank))) is not None:
                self._send(connection, "reply", request, value)

        if kind == "post":
            self._post(rank, *values)
        elif kind == "once":
            request, what, times, turn, batches = values
            self._common.ask(number, what, times, turn, batches, partial(reply, request))
        elif kind == "done":
            self._common.done(*values)
        elif kind == "found":
            request, turn, what, times, batches, is_newest = values
            name = str(what), int(times), int(batches), bool(is_newest)  # refused here, not later
            self._lookups.append((int(turn), lambda: reply(request, self._common.found(*name))))
        elif kind == "tell" and self._recorder is not None:
            self._recorder.hear(*values)
        elif kind == "ask" and self._recorder is not None:
            group = self.members.groups[number]
            self._recorder.answer(partial(reply, values[0]), self._writes(group), *values[1:])
        else:
            self._do(self.members.receive(number, rank, kind, values, time.monotonic()))
            return
        self.members.groups[number].processes[rank].heard_at = time.monotonic()

    def _post(self, rank: int, name: str, key: str, value: str) -> None:
        """Pass on what a process says to the others of its rank, to connect with them."""
        for group in self.members.living():
            connection = self._connections.get((group.number, rank))
            if connection is not None:
                self._send(connection, "posted", name, key, value)

    # ---- files are written on this host, as long as a pipeline here trains -------------------------------------------

    def _is_near(self, number: int) -> bool:
        group = self.members.groups.get(number)
        return group is not None and group.host == host_here()

    def _near(self) -> list[Group]:
        return [group for group in self.members.living() if self._is_near(group.number)]

    def _writes(self, group: Group) -> bool:
        """Whether a group may write files; a near one that joined counts once it has published a step."""
        return self._is_near(group.number) or not any(
            self.members.term_of(near).donor is None or near.published() > 0 for near in self._near()
        )

    def _may_ask_near(self, turn: int) -> bool:
        """Whether a near pipeline may still request a result that is needed before a step.

        One that joins with the step does not, nor one that has published it.
        """
        if not self.members.has_begun:
            return True  # the run begins here
        terms = [(self.members.term_of(near), near) for near in self._near()]
        return any(
            (term.first < turn or term.donor is None) and term.first + near.published() <= turn
            for term, near in terms
        )
