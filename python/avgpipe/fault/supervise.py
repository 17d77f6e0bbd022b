"""Starts isolated pipelines on this host, each as processes of its own, and restarts those that are lost.

Other commands may start more, here or on other hosts.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from avgpipe.errors import PipelineError, reason
from avgpipe.fault.coordinator import Coordinator
from avgpipe.fault.generation import assign_place, pipe_of
from avgpipe.fault.group import OVER, REFUSED, Group
from avgpipe.fault.joining import TOO_FEW, Joined, leave_address
from avgpipe.fault.membership import environment
from avgpipe.ranks.environment import RESTART, SPARE
from avgpipe.ranks.launch import STOPPED, Job, RanksFailed, Started, StoppedTimer
from avgpipe.ranks.limits import LIMITS
from avgpipe.ranks.process import WRONG_ARGUMENTS, fits_a_socket, folder_for_a_socket, host_here
from avgpipe.ranks.supervisor import watch

_FEW_TURNS = 2  # steps that a pipeline with a wrong loader may publish until it notices that and ends
_ADDRESS = "coordinator"
_NO_ROOM = OSError, MemoryError, RuntimeError  # of a start: no room, or no more processes or threads


@dataclass(frozen=True)
class IsolatedCounts:
    """How many pipelines a run has.

    Attributes:
        pipelines: how many the run begins with, and has while none is lost.
        least: with fewer pipelines the run ends.
        most: how many it may have, with those that join.
        restarts: how many times in a row a lost pipeline is restarted that has made no step.
        spares: pipelines whose processes have started up to their Pipeline, and wait there to replace a lost
            one.
        listening: a socket where commands on other hosts find the run, with the secret that they must know.
    """

    pipelines: int
    least: int = 1
    most: int = 0
    restarts: int = 3
    spares: int = 0
    listening: tuple[socket.socket, str] | None = None


class TooFewLeft(PipelineError):
    """A run of isolated pipelines has ended, or has not begun, because too few of them were left.

    Attributes:
        exit_codes: of the processes of the first pipeline that was lost and did not join again.
    """

    def __init__(self, least: int, lost: Sequence[LostPipeline], has_begun: bool = True) -> None:
        self.exit_codes = lost[0].exit_codes
        left = "no pipeline is left" if least == 1 else f"fewer than {least} pipelines are left"
        left = left if has_begun else "the run has not begun"
        why = (f"pipeline {loss.pipeline}: {loss.why}{': ' * bool(loss.said)}{loss.said}" for loss in lost)
        super().__init__(f"{left}: {'; '.join(why)}")


@dataclass(frozen=True)
class LostPipeline:
    """A pipeline that has ended before it was done.

    Attributes:
        why: names the process to blame.
        exit_codes: of its processes; () where another command started them.
        code: the exit code of the process to blame, as far as it is known.
        said: the error of that process, if the launcher has it.
    """

    pipeline: int
    why: str
    exit_codes: tuple[int, ...]
    code: int = 0
    said: str = ""


@dataclass
class _Launched:
    pipeline: int  # -1: a spare
    processes: Started | Joined
    resources: ExitStack
    why: str | None = None  # the reason for ending it; "" where the exit code of its process says more
    blamed: int | None = None  # a rank
    kill_at: float = float("inf")  # of the monotonic clock
    stopped_timer: StoppedTimer = field(default_factory=StoppedTimer)  # before its processes have connected


class Supervisor:
    """Runs a job as the processes of several isolated pipelines, until they have finished.

    Args:
        folder: readable for this user alone; :func:`avgpipe.fault.joining.join` finds the run there.
        say: prints a line for the user.
        recorder: see :class:`avgpipe.fault.coordinator.Coordinator`.
    """

    def __init__(
        self,
        job: Job,
        isolation: IsolatedCounts,
        folder: Path,
        say: Callable[[str], None],
        recorder: Any = None,
    ) -> None:
        self._job, self._isolation, self._folder, self._say = job, isolation, folder, say
        self._groups: dict[int, _Launched] = {}
        self._spares: list[_Launched] = []
        self._no_spares_until = 0.0  # of the monotonic clock
        self._later: dict[int, float] = {}  # when pipelines are started again that could not be
        self._started = 0  # groups
        self._starts: Counter[int] = Counter()  # of each pipeline
        self._left = dict.fromkeys(range(isolation.pipelines), isolation.restarts)
        self._settling: dict[int, _Launched] = {}  # that ended well, if no other one goes on
        self._finished: set[int] = set()  # pipelines
        self._losses: dict[int, LostPipeline] = {}  # of groups, in their order
        self._missing: list[LostPipeline] = []  # once too few are left
        self._has_connected = False  # a process that has ended since
        self._token = secrets.token_hex(16)
        self._resources = ExitStack()
        address = folder / _ADDRESS
        if not fits_a_socket(address):
            address = Path(self._resources.enter_context(folder_for_a_socket())) / _ADDRESS
        self._coordinator = Coordinator(
            str(address),
            self._token.encode(),
            isolation.pipelines,
            self._lose,
            self._say_of_members,
            recorder,
            self._let_join,
            isolation.listening,
        )
        self._members = self._coordinator.members
        leave_address(folder, self._coordinator.address, self._token)

    def run(self, preemption_s: float | None = None) -> bool:
        """Run to the end; return whether its processes ended by themselves before, after a SIGTERM.

        Args:
            preemption_s: the time limit for that, in seconds. None: SIGTERM ends the processes.

        Raises:
            TooFewLeft: too few pipelines were left.
            Interrupted: a signal arrived. In any case no process is left.
        """
        with ExitStack() as stack:
            stack.enter_context(self._resources)
            stack.callback(self._coordinator.close)
            is_preempted = watch(self, preemption_s, poll_s=0.0)
        if self._missing and not self._finished:
            raise TooFewLeft(self._isolation.least, self._missing, self._members.has_begun)
        if not (self._has_connected or is_preempted):
            self._say("no process made a Pipeline; each has run the script by itself")
        return is_preempted

    def begin(self) -> None:
        for pipeline in range(self._isolation.pipelines):
            self._start(pipeline)

    def look(self) -> bool:
        """Serve the processes for a moment; return whether there are some."""
        self._coordinator.serve(LIMITS.look_s)
        self._look()
        self._start_late()
        self._keep_spares()
        return bool(self._groups)

    def close(self, number: int) -> None:
        for one in (*self._groups.values(), *self._spares):
            one.processes.close(number)
            one.resources.close()

    def all_started(self) -> list[Started]:
        groups = (*self._groups.values(), *self._spares)
        return [group.processes for group in groups if isinstance(group.processes, Started)]

    def history(self) -> dict[str, Any]:
        """Return the pipelines lost and joined so far; steps are counted from 0, over all pipelines."""
        terms = sorted(self._members.history.items())
        lost = [(term, self._losses[number]) for number, term in terms if number in self._losses]
        lost.sort(key=lambda loss: loss[0].published)
        return {
            "lost": [
                {
                    "pipeline": s.pipeline,
                    "step": s.counts_until,
                    "steps_lost": s.end - s.counts_until,
                    "why": loss.why,
                }
                for s, loss in lost
            ],
            "joined": [{"pipeline": s.pipeline, "step": s.first} for _, s in terms if s.donor is not None],
        }

    # ---- starting ----------------------------------------------------------------------------------------------------

    def _start(self, pipeline: int) -> None:
        number, place = self._new_group(pipeline)
        group = self._groups[number] = self._from_spares(place) or self._start_processes(place)
        group.pipeline = pipeline

    def _start_late(self) -> None:
        """Start pipelines whose start failed before, as long as the run continues."""
        for pipeline, at in list(self._later.items()):
            if time.monotonic() < at or self._finished or self._missing:
                continue
            del self._later[pipeline]
            if pipeline not in {group.pipeline for group in self._groups.values()}:  # else one has joined
                self._say(f"pipeline {pipeline}: {self._start_again(pipeline)}")

    def _start_again(self, pipeline: int) -> str:
        """Start a pipeline, now or later; return a text that says which."""
        try:
            self._start(pipeline)
            return "it is started again"
        except _NO_ROOM as error:  # the others need none
            self._later[pipeline] = time.monotonic() + LIMITS.again_s
            return f"it cannot be started again now, the next try is in {LIMITS.again_s:g} s: {reason(error)}"

    def _start_processes(self, place: Mapping[str, str]) -> _Launched:
        with ExitStack() as stack:
            return _Launched(-1, self._job.start(stack, place), stack.pop_all())

    def _from_spares(self, place: Mapping[str, str]) -> _Launched | None:
        """Assign a place to a spare that is ready; keep the others, except those that have ended."""
        for spare in list(self._spares):
            assert isinstance(spare.processes, Started)
            has_ended = spare.processes.poll_or_kill() is not None
            pipes = [pipe_of(spare.processes.folder, rank) for rank in range(self._job.size)]
            if has_ended or assign_place(pipes, place):
                self._spares.remove(spare)
                if not has_ended:
                    return spare
                spare.resources.close()
        return None

    def _keep_spares(self) -> None:
        """Replace used spares; a spare that ended by itself is noticed only when it is needed."""
        if not self._members.has_begun or self._finished or self._missing:
            return
        try:
            while len(self._spares) < self._isolation.spares and time.monotonic() > self._no_spares_until:
                self._spares.append(self._start_processes({SPARE: ""}))
        except _NO_ROOM as error:
            self._no_spares_until = time.monotonic() + LIMITS.again_s
            self._say(f"no spare pipeline can be started: {reason(error)}")

    def _new_group(self, pipeline: int) -> tuple[int, dict[str, str]]:
        number, self._started = self._started, self._started + 1
        self._coordinator.started(number)
        place = environment(self._coordinator.address, self._token, number, pipeline)
        place[RESTART] = str(self._starts[pipeline])
        self._starts[pipeline] += 1
        return number, place

    def _let_join(self, connection: Connection, about: Mapping[str, Any]) -> dict[str, Any]:
        """Let another command start one more pipeline; return what it needs, or the reason for a refusal."""
        used = {group.pipeline for group in self._groups.values()}
        most = max(self._isolation.most, self._isolation.pipelines)
        free = [pipeline for pipeline in range(most) if pipeline not in used]
        if (about.get("options") or self._job.options) != self._job.options:
            return {"options": self._job.options}
        if self._finished or self._missing:
            return {"why": OVER if self._finished else TOO_FEW}
        if not about["is_far"] and about["host"] != host_here():
            return {"why": "its launcher cannot see this process: run the command where that one runs"}
        if not free:
            return {
                "why": f"the run has {len(used)} pipelines, and may have no more: see its --max-pipelines"
            }
        number, place = self._new_group(free[0])
        joined, resources = Joined(connection), ExitStack()
        resources.callback(connection.close)
        self._groups[number] = _Launched(free[0], joined, resources)
        where = f"on {about['name']}" if about["is_far"] else "by avgpipe join"
        self._say(f"pipeline {free[0]}: started {where}")
        found = {"pipeline": free[0], "group": number, "restart": place[RESTART]}
        return {**found, "folder": os.getcwd(), "job": asdict(self._job)}

    # ---- ending ------------------------------------------------------------------------------------------------------

    def _say_of_members(self, line: str) -> None:
        if not self._missing:  # else the run ends, and its last line gives the reason
            self._say(line)

    def _lose(self, number: int, rank: int | None, why: str) -> None:
        """End a pipeline of which a process is lost: the others cannot go on without it."""
        group = self._groups.get(number)
        if group is not None and group.why is None:
            stopped = group.processes.stopped() if isinstance(group.processes, Started) else []
            if rank in stopped and STOPPED not in why:
                why += f"; it {STOPPED}"
            group.why, group.blamed = why, rank
            if why:
                group.processes.kill(why, rank)
            else:  # one that ends by an error closes its connection before: killed now, it would hide its exit code
                group.kill_at = time.monotonic() + LIMITS.closed_end_s

    def _look(self) -> None:
        """Handle pipelines that have ended, are late, or are stopped."""
        for number, group in list(self._groups.items()):
            known = self._members.groups.get(number)
            end = group.processes.poll_or_kill()
            if end is None:
                if time.monotonic() > group.kill_at:
                    group.kill_at = float("inf")
                    limit = f"{LIMITS.closed_end_s:g} s"
                    group.why = f"it has left the run, and its processes have not ended within {limit}"
                    group.processes.kill(group.why, group.blamed)
                continue
            del self._groups[number]
            group.resources.close()
            self._has_connected |= known is not None
            if known is not None and known.published() > _FEW_TURNS:
                self._left[group.pipeline] = self._isolation.restarts
            if end is True and group.why is None and self._may_be_done(known):
                self._settling[number] = group
            elif group.why not in (OVER, TOO_FEW):
                self._losses[number] = loss = _loss_of(group, known, end)
                has_left = known is not None and known.left_at is not None
                self._replace(group, loss, is_done=has_left and bool(self._members.is_done(number)))
            self._coordinator.gone(number)
        self._settle()
        if self._is_over():
            self._end(OVER)
        elif not self._missing and self._too_few() and not self._are_ending():
            self._missing = self._lost_for_good()
        if self._missing:
            self._end(TOO_FEW)
        self._look_for_stopped()

    def _are_ending(self) -> bool:
        """Whether lost pipelines have not ended yet, so that their exit codes are not known."""
        return any(group.why is not None for group in self._groups.values())

    def _may_be_done(self, known: Group | None) -> bool:
        """Whether processes that succeeded may have done all their work, as far as it is known yet."""
        return known.left_at is not None if known is not None else not self._members.is_awaited

    def _settle(self) -> None:
        """Decide which of those that left have reached the end of the run: all, unless others train on."""
        for number, group in list(self._settling.items()):
            known, is_done = self._members.groups.get(number), self._members.is_done(number)
            if is_done is None or (known is None and is_done and self._groups):  # others may train yet
                continue
            del self._settling[number]
            if is_done and known is None and self._missing:  # the run has not begun
                continue
            if is_done:
                self._finished.add(group.pipeline)
            else:
                at = "before its first step" if known is None else f"after {known.left_at} steps"
                why = f"it has left {at}, and the others go on"
                self._losses[number] = loss = LostPipeline(group.pipeline, why, (0,) * self._job.size)
                self._replace(group, loss)

    def _look_for_stopped(self) -> None:
        """End pipelines with a stopped process that no other process waits for yet, or any more."""
        for number, group in self._groups.items():
            processes, known = group.processes, self._members.groups.get(number)
            trains = known is not None and len(known.processes) == known.size and known.left_at is None
            stopped = processes.stopped() if isinstance(processes, Started) and not trains else []
            if group.stopped_timer.expired(bool(stopped)):
                self._lose(number, stopped[0], f"rank {stopped[0]} {STOPPED}")
            silent_s = (
                0.0 if isinstance(processes, Started) or trains else time.monotonic() - processes.heard_at
            )
            if silent_s > LIMITS.join_silent_s:
                self._lose(number, None, f"its command has sent no message for {LIMITS.join_silent_s:g} s")

    def _end(self, why: str) -> None:
        for group in self._groups.values():
            if group.why is None:
                group.why = why
                group.processes.kill(why, None)
        self._left = dict.fromkeys(self._left, 0)

    def _is_over(self) -> bool:
        """Whether all pipelines that trained are done, so that none is left to join."""
        return bool(self._finished) and not self._members.training

    def _living(self) -> set[int]:
        """The pipelines that train, are done, or are to begin the run."""
        done = self._finished | {group.pipeline for group in self._settling.values()}
        if not self._members.has_begun:
            return {group.pipeline for group in self._groups.values() if group.why is None} | done
        return self._members.training | done

    def _too_few(self, without: Collection[int] = ()) -> bool:
        return not self._finished and len(self._living().difference(without)) < self._isolation.least

    def _lost_for_good(self) -> list[LostPipeline]:
        last = {loss.pipeline: number for number, loss in self._losses.items()}
        gone = [loss for number, loss in self._losses.items() if number == last[loss.pipeline]]
        return [loss for loss in gone if loss.pipeline not in self._living()]

    def _replace(self, group: _Launched, loss: LostPipeline, is_done: bool = False) -> None:
        """Restart a lost pipeline, if that is allowed, and it has not trained to the end."""
        pipeline, has_begun = group.pipeline, self._members.has_begun
        refuses = WRONG_ARGUMENTS in loss.exit_codes or loss.why.startswith(REFUSED)
        is_hopeless = refuses or not (has_begun or loss.code < 0)  # it would fail again
        goes_on = has_begun and not self._too_few(without={pipeline})
        may_start = self._left.get(pipeline, 0) > 0 and isinstance(group.processes, Started)
        is_restarted = may_start and not (is_hopeless or is_done) and (goes_on or not has_begun)
        then = ""
        if is_restarted:
            self._left[pipeline] -= 1
            then = f"; {self._start_again(pipeline)}"
        far = group.processes if isinstance(group.processes, Joined) else None
        if goes_on and not loss.why.endswith("the others go on"):
            # Another command may start it again, as long as it runs.
            alone = "; the others go on without it" if far is None or far.is_cut else "; the others go on"
            then += ", and the others go on" if is_restarted else alone
        self._say(f"pipeline {pipeline} is lost: {loss.why}{then}")
        if goes_on and far is None and not (is_restarted or is_done or is_hopeless):
            self._say(f"another one takes its place by: avgpipe join {self._folder}")
        if (not is_restarted or pipeline in self._later) and not has_begun and pipeline in self._left:
            self._missing = [loss]  # the others wait for it
            self._end(TOO_FEW)


def _loss_of(group: _Launched, known: Group | None, end: RanksFailed | bool) -> LostPipeline:
    codes: tuple[int, ...] = ()
    rank, reason, code, said = group.blamed, "has ended", 0, ""
    if isinstance(end, RanksFailed):
        codes, rank, reason, said = end.exit_codes, end.rank, end.reason, end.said
        code = codes[rank]
    process = None if known is None or rank is None else known.processes.get(rank)
    if isinstance(group.processes, Joined) and group.processes.is_cut and not group.why:
        return LostPipeline(group.pipeline, "the command that started it has ended", codes)
    name = process.name if process is not None else "a process" if rank is None else f"rank {rank}"
    return LostPipeline(
        group.pipeline, group.why or f"{name} {reason}", codes, code, "" if group.why else said
    )
