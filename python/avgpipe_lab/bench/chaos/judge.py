"""The rules for runs with faults, and the check whether a run broke one.

The launcher may blame, depending on the first fault of a run:

- kill, half-written message, exception, out of memory: only the rank whose process failed or was killed;
- a stopped process: only its rank;
- a line that is cut or reset, a message with a flipped bit: any rank of the same pipeline, as neither end can
  know which one is at fault;
- a full disk: no rank, as it is an error of the save, which the job notes; a slow rank: none;
- a pipeline that is ended because the donor of its state was lost is not blamed;
- several faults: the ranks that any of these rules allows.

No process may wait longer than the time limit and a few seconds. If a new process replaces a rank, the time
until it has imported its modules is no wait, see ``_wait_s``; it is part of the reported pauses.

A run may end at a fault where the guide "When something fails" does not promise that it continues: see
``_may_end``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from avgpipe.ranks.launch import RanksFailed
from avgpipe_lab.bench.chaos.draw import BATCH_SIZE, BATCHES, HARMLESS, ISOLATED
from avgpipe_lab.bench.chaos.episode import PROMPT_S, RunShape, SeenRun

_ITSELF = ("kill", "half-written message", "exception", "out of memory", "stop")
_KILLED = ("kill", "half-written message")
_COPY_S = 1.5  # after a call all ranks certainly have a copy after this time
_LOST = re.compile(
    r"(?:pipeline (\d+) is lost: )?rank (\d+)(?: \(stage \d+\))? (?:was killed|failed|sent|was stopped)"
)
_AWAITED = re.compile(r"pipeline (\d+) is lost: pipeline \d+ has waited")  # no rank is named
_WAITS = "it is waited for"  # as a command of another host says where no run answers
_UNSURE = 2  # last results of a lost process, which the others may not have counted

Who = tuple[int, int | None]  # pipeline and rank
Row = tuple[int, int, float]  # batch, samples and loss of a result


@dataclass
class Verdict:
    """The outcome of a run.

    Attributes:
        faults: Faults that happened: kind, place, pipeline, rank, who was blamed and the longest pause of the
            others.
        wrong: Broken promises as sentences, by the column of the table that counts them.
        ended: Whether a fault ended the run.
        repeated: Samples that a lost pipeline and then another one trained on, by the published results.
    """

    name: str
    way: str
    kind: str
    faults: list[dict[str, Any]] = field(default_factory=list)
    wrong: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    ended: bool = False
    repeated: int = 0


def judge(seen: SeenRun, shape: RunShape, undisturbed: Mapping[int, float]) -> Verdict:
    """Check a run; ``undisturbed``: the losses by batch of a run without faults."""
    scenario = seen.scenario
    verdict = Verdict(scenario.name, scenario.way, scenario.kind)
    verdict.faults = [_fault(event, seen, shape) for event in seen.of("fault")]
    verdict.ended = seen.failure is not None
    if seen.left:
        verdict.wrong["left over"] += seen.left
    _judge_end(verdict, seen, shape)
    _judge_blame(verdict, seen)
    _judge_samples(verdict, seen)
    _judge_odometers(verdict, seen)
    _judge_codes(verdict, seen, shape)
    if scenario.way in ISOLATED:
        _judge_references(verdict, seen)
    else:
        _judge_losses(verdict, seen, undisturbed)
    return verdict


def _fault(event: dict[str, Any], seen: SeenRun, shape: RunShape) -> dict[str, Any]:
    kind, _, place = event["text"].partition(" at ")
    who = {name: event[name] for name in ("pipeline", "rank", "life")}
    found = {"at_s": event["at_s"], "kind": kind, "phase": place.partition(":")[0], "place": place, **who}
    pauses = _pauses(event, seen, shape)
    return {
        **found,
        "pause_s": max((end - begin for begin, end in pauses), default=None),
        "wait_s": max((_wait_s(seen, begin, end) for begin, end in pauses), default=None),
    }


def _wait_s(seen: SeenRun, begin_s: float, end_s: float) -> float:
    """Return the part of a time that may be a wait: what follows the last start of a process that replaces a rank."""
    starts = [e["at_s"] for e in seen.of("start") if seen.scenario.way == "spares" and e["life"] > 0]
    return float(end_s - max([begin_s, *(at_s for at_s in starts if begin_s < at_s < end_s)]))


def _pauses(fault: dict[str, Any], seen: SeenRun, shape: RunShape) -> list[tuple[float, float]]:
    """Return the times between results of the other processes that began while the fault could affect them."""
    own = seen.scenario.way in ISOLATED
    others = [e for e in seen.of("result", "evaluation", "end") if e["process"] != fault["process"]]
    felt_s = fault["at_s"] + shape.timeout_s + 2 * PROMPT_S
    if own:  # a pipeline that is lost or restarting meanwhile has a pause of its own
        away = {fault["pipeline"]}
        for loss in (e for e in seen.of("fault") if e["text"].partition(" at ")[0] not in HARMLESS):
            begin_s, end_s = _absence(loss, others)
            away |= {loss["pipeline"]} if begin_s < felt_s and end_s > fault["at_s"] else set()
        others = [event for event in others if event["pipeline"] not in away]
    times = sorted(event["at_s"] for event in others)
    if not times or times[0] > fault["at_s"]:
        return []
    return [
        (begin, end)
        for begin, end in pairwise([fault["at_s"], *(t for t in times if t > fault["at_s"])])
        if begin < felt_s
    ]


def _absence(loss: dict[str, Any], events: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return when a pipeline with a fault was absent: from its last event to the first one of its next life.

    If a fault ended nothing, such as an unchecked flipped bit, the time is empty.
    """
    its = [event for event in events if event["pipeline"] == loss["pipeline"]]
    same_life = [event for event in its if event["life"] == loss["life"]]
    if any(event["event"] == "end" for event in same_life):
        return float("inf"), float("-inf")
    begin_s = max([loss["at_s"], *(event["at_s"] for event in same_life)])
    return begin_s, min((e["at_s"] for e in its if e["life"] > loss["life"]), default=float("inf"))


def _judge_end(verdict: Verdict, seen: SeenRun, shape: RunShape) -> None:
    limit_s = shape.timeout_s + PROMPT_S
    if seen.is_hung:
        verdict.wrong["hangs"].append("no more events, and the run did not end")
        return
    for fault in verdict.faults:
        if fault["wait_s"] is not None and fault["wait_s"] > limit_s:
            verdict.wrong["hangs"].append(f"the others waited for {fault['wait_s']:.1f} s")
    # A connection that was reset may be needed only later, as by the next save.
    signs = [*verdict.faults, *seen.of("result", "evaluation")]
    last_s = max((sign["at_s"] for sign in signs), default=seen.ended_at_s)
    waited_s = _wait_s(seen, last_s, seen.ended_at_s)
    if verdict.ended and waited_s > limit_s + shape.timeout_s * (seen.scenario.way in ISOLATED):
        verdict.wrong["hangs"].append(f"the run ended {waited_s:.1f} s after the last fault or result")
    if verdict.ended and not _may_end(verdict, seen):
        verdict.wrong["ended"].append(f"the run should have continued: {seen.failure}")
    elif not verdict.ended and any(_must_be_noticed(fault, seen) for fault in verdict.faults):
        verdict.wrong["ended"].append("the run continued as if nothing had happened")


def _must_be_noticed(fault: Mapping[str, Any], seen: SeenRun) -> bool:
    """Return whether a fault must end the run; flipped bits are detected, see ``episode.play``.

    A save that meets an error fails alone, and notes the error.
    """
    way = seen.scenario.way
    if any(f"at {fault['place']}" in event["text"] for event in seen.of("not saved")):
        return False
    return way not in ISOLATED and (
        fault["kind"] in ("exception", "out of memory", "flipped bit")
        or (fault["kind"] in _KILLED and way == "plain")
    )


def _may_end(verdict: Verdict, seen: SeenRun) -> bool:
    """Return whether the guide does not promise that the run continues."""
    if seen.scenario.way == "plain":
        return any(fault["kind"] not in HARMLESS for fault in verdict.faults)
    faults = [fault for fault in verdict.faults if fault["kind"] not in HARMLESS]
    if not faults:
        return False
    starts = any(fault["phase"] in ("start", "shutdown") for fault in faults)
    if seen.scenario.way == "spares":
        # Faults other than kills, two at once, and one between a call and the copy after the next batch.
        calls = any(fault["phase"] in ("save", "evaluation") for fault in faults)
        calls |= any(_follows_a_call(fault, seen) for fault in faults)
        return starts or calls or len(faults) > 1 or any(f["kind"] not in _KILLED for f in faults)
    gone = {
        fault["pipeline"] for fault in faults if not _came_again(fault, seen)
    }  # no pipeline has the state
    return starts or len(gone) == len({event["pipeline"] for event in seen.events})


def _came_again(fault: Mapping[str, Any], seen: SeenRun) -> bool:
    """Return whether a later life of the pipeline published a result after the fault."""
    results = (e for e in seen.of("result") if e["pipeline"] == fault["pipeline"])
    return any(e["at_s"] > fault["at_s"] and e["life"] > fault["life"] for e in results)


def _follows_a_call(fault: Mapping[str, Any], seen: SeenRun) -> bool:
    """Return whether all evaluated or saved shortly before the fault, or had trained on at most a few batches."""
    results = [e["at_s"] for e in seen.of("result") if e["at_s"] < fault["at_s"]]
    calls = [e["at_s"] for e in seen.of("evaluation") if e["at_s"] < fault["at_s"]]
    return bool(fault["at_s"] - max([*calls, *results[:1]], default=fault["at_s"]) < _COPY_S)


def _judge_blame(verdict: Verdict, seen: SeenRun) -> None:
    blamed = _blamed(seen)
    faults = [fault for fault in verdict.faults if fault["kind"] not in HARMLESS]
    allowed: set[Who] = set()
    for fault in faults:
        who = fault["pipeline"] if seen.scenario.way in ISOLATED else 0, fault["rank"]
        others = [(who[0], rank) for rank in range(_size(seen))]
        allowed |= {who} if fault["kind"] in _ITSELF else set(others)
        fault["blamed"] = [
            list(one) for one, _ in blamed if one in ({who} if fault["kind"] in _ITSELF else others)
        ]
    for who, text in blamed:
        is_allowed = who in allowed if who[1] is not None else who[0] in {pipeline for pipeline, _ in allowed}
        if not is_allowed:
            name = f"pipeline {who[0]}" + (f", rank {who[1]}" if who[1] is not None else "")
            verdict.wrong["wrong blame"].append(f"{name} was blamed: {text}")


def _blamed(seen: SeenRun) -> list[tuple[Who, str]]:
    """Return the ranks that the launcher blamed, each with its sentence."""
    found: list[tuple[Who, str]] = []
    for _, line in seen.said:
        if match := _LOST.match(line):
            found.append(((int(match[1] or 0), int(match[2])), line))
        elif match := _AWAITED.match(line):
            found.append(((int(match[1]), None), line))
    if isinstance(seen.failure, RanksFailed):
        found.append(((0, seen.failure.rank), str(seen.failure)))
    return found


def _size(seen: SeenRun) -> int:
    return 1 + max((event["rank"] for event in seen.events), default=0)


def _judge_samples(verdict: Verdict, seen: SeenRun) -> None:
    """Check that every sample is trained on once."""
    if seen.scenario.way in ISOLATED:
        _judge_samples_of_all(verdict, seen)
        return
    results: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in seen.of("result"):
        results[event["process"]].append(event)
    ended = {event["process"] for event in seen.of("end")}
    for process, rows in results.items():
        batches = [row["batch"] for row in rows]
        last = BATCHES if process in ended else max(batches) + 1
        who = f"pipeline {rows[0]['pipeline']}, rank {rows[0]['rank']} has"
        of_all = [(row["batch"], row["samples"], row["loss"]) for row in rows]
        _check_samples(verdict, who, of_all, range(min(batches), last))
    if not verdict.ended:
        found = {row["batch"] for rows in results.values() for row in rows}
        if found != set(range(BATCHES)):
            verdict.wrong["samples"].append(
                f"no process has results of batches {sorted(set(range(BATCHES)) - found)}"
            )


def _judge_samples_of_all(verdict: Verdict, seen: SeenRun) -> None:
    """Check that isolated pipelines publish the same results to all processes, and that together they are complete."""
    results: dict[int, list[Row]] = defaultdict(list)
    for event in seen.of("result"):
        results[event["process"]].append((event["batch"], event["samples"], event["loss"]))
    ended = {event["process"] for event in seen.of("end")}
    parts = {process: rows if process in ended else rows[:-_UNSURE] for process, rows in results.items()}
    whole: list[Row] = max(
        (rows for rows in parts.values() if rows[:1] and rows[0][0] == 0), key=len, default=[]
    )
    left = {process: rows for process, rows in parts.items() if rows}
    while fitting := {process: rows for process, rows in left.items() if rows[0] in whole}:
        for process, rows in fitting.items():
            del left[process]
            begin = whole.index(rows[0])
            common = min(len(rows), len(whole) - begin)
            if rows[:common] != whole[begin : begin + common]:
                verdict.wrong["samples"].append(f"process {process} has other results than the others")
                return
            whole = whole + rows[common:]
    batches = [batch for batch, _, _ in whole]
    verdict.repeated = sum(samples for n, (batch, samples, _) in enumerate(whole) if batch in batches[:n])
    if not verdict.ended and ended - left.keys():
        _check_samples(verdict, "all processes have", whole, range(BATCHES))


def _check_samples(verdict: Verdict, who: str, rows: Sequence[Row], batches: Sequence[int]) -> None:
    found: Counter[int] = Counter()
    for batch, samples, _ in rows:
        found[batch] += samples
    wrong = {batch: found[batch] for batch in batches if found[batch] != BATCH_SIZE}
    if wrong:
        verdict.wrong["samples"].append(f"samples by batch that {who}, instead of {BATCH_SIZE}: {wrong}")


def _judge_odometers(verdict: Verdict, seen: SeenRun) -> None:
    """Check that the weights count each sample once, and no other."""
    for event in seen.of("evaluation", "weights"):
        if wrong := event.get("miscounted"):
            some = ", ".join(f"{name} {count:g}" for name, count in list(wrong.items())[:3])
            at_least = f"weights after {event['batch']} batches have miscounted samples: {some}"
            verdict.wrong["samples"].append(at_least)
            return  # all that follows has them, too


def _judge_codes(verdict: Verdict, seen: SeenRun, shape: RunShape) -> None:
    """Check the exit codes of commands on several hosts: 0 of all that the run has not lost for good, or of none."""
    struck = [event for event in seen.of("fault") if "host" in event]
    excused = {e["host"] for e in struck if e["for_s"] is None or e["for_s"] >= shape.timeout_s}
    for host, code in seen.codes.items():
        said = [line for _, line in seen.said if line.startswith(f"host {host}: ")]
        if code is None and host in excused and any(_WAITS in line for line in said):
            continue  # cut off at the end of the run, it waits for one that begins again
        if code is None:
            verdict.wrong["hangs"].append(f"the command of host {host} did not end")
        elif host not in excused and (code not in (0, 1) or code != verdict.ended):
            verdict.wrong["exit codes"].append(f"{code} of host {host}: {' '.join(said[-1:])}")


def _judge_references(verdict: Verdict, seen: SeenRun) -> None:
    """Check that all processes of isolated pipelines have the same reference, in every bit."""
    found: dict[int, set[str]] = defaultdict(set)
    for event in seen.of("evaluation"):
        found[event["batch"]].add(event["reference"])
    differ = [batch for batch, digests in sorted(found.items()) if len(digests) > 1]
    if differ:
        verdict.wrong["losses"].append(f"references of pipelines differ after batches {differ}")


def _judge_losses(verdict: Verdict, seen: SeenRun, undisturbed: Mapping[int, float]) -> None:
    """Check that repeated training gives the same bits."""
    others = [e["batch"] for e in seen.of("result") if e["loss"] != undisturbed.get(e["batch"], e["loss"])]
    if others:
        verdict.wrong["losses"].append(
            f"losses differ from those of the run without faults from batch {min(others)} on"
        )
