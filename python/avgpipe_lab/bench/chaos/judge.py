"""What a run with faults may look like, and what is wrong with one that does not.

Who may be blamed, by what happened first in a run:

- whose process fails of itself or is killed, it alone: kill, half-written message, exception, out of memory;
- who stands still, it alone;
- of a line that is cut or reset, and of a message with a flipped bit, nobody can know which end is at fault: any rank
  of the same pipeline;
- a full disk is an error of the save, which the job notes: nobody, and nobody for being slow;
- a pipeline that is ended as another one is gone, whose state it was to have, is not blamed;
- after several faults, those that all of them allow.

Nobody may wait for longer than the time limit and a few seconds. Where a new process replaces a rank, the time until it
has imported what it needs is no wait, see ``_wait_s``; it is in the pauses that are reported.

A run may end at a fault where the guide "When something fails" does not promise that it goes on: see ``_may_end``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from avgpipe.fault.supervise import TooFewLeft
from avgpipe.ranks.launch import RanksFailed
from avgpipe_lab.bench.chaos.draw import BATCH_SIZE, BATCHES, HARMLESS
from avgpipe_lab.bench.chaos.episode import PROMPT_S, RunShape, SeenRun

_ITSELF = ("kill", "half-written message", "exception", "out of memory", "stop")
_KILLED = ("kill", "half-written message")
_COPY_S = 1.5  # after a call, by which all have a copy for certain
_LOST = re.compile(
    r"(?:pipeline (\d+) is lost: )?rank (\d+)(?: \(stage \d+\))? (?:was killed|failed|sent|was stopped)"
)
_AWAITED = re.compile(r"pipeline (\d+) is lost: pipeline \d+ has waited")  # no rank is named
_UNSURE = 2  # last results of a process that was lost, which others may not have counted

Who = tuple[int, int | None]  # pipeline and rank
Row = tuple[int, int, float]  # batch, samples and loss of a result


@dataclass
class Verdict:
    """What became of a run.

    Attributes:
        faults: What happened: kind, place, pipeline, rank, who was blamed and the longest pause of the others.
        wrong: What must not be, in words, by the column of the table that counts it.
        ended: Whether a fault ended the run.
        repeated: Samples that were lost with a pipeline and that another one has trained on, as results told.
        curve: Losses of the evaluations, by the batches that were trained on before; all epochs' if it did not end.
    """

    name: str
    way: str
    kind: str
    faults: list[dict[str, Any]] = field(default_factory=list)
    wrong: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    ended: bool = False
    exit_codes: tuple[int, ...] = ()
    repeated: int = 0
    curve: dict[int, float] = field(default_factory=dict)


def judge(seen: SeenRun, shape: RunShape, undisturbed: Mapping[int, float]) -> Verdict:
    """Say what is wrong with a run; ``undisturbed``: losses by batch of one that nothing happened to."""
    scenario = seen.scenario
    verdict = Verdict(scenario.name, scenario.way, scenario.kind)
    verdict.faults = [_fault(event, seen, shape) for event in seen.of("fault")]
    verdict.ended = seen.failure is not None
    if isinstance(seen.failure, RanksFailed | TooFewLeft):
        verdict.exit_codes = seen.failure.exit_codes
    verdict.curve = {event["batch"]: event["loss"] for event in seen.of("evaluation")}
    if seen.left:
        verdict.wrong["left over"] += seen.left
    _judge_end(verdict, seen, shape)
    _judge_blame(verdict, seen)
    _judge_samples(verdict, seen)
    if scenario.way == "isolate":
        _judge_references(verdict, seen)
    else:
        _judge_losses(verdict, seen, undisturbed)
    return verdict


def _fault(event: dict[str, Any], seen: SeenRun, shape: RunShape) -> dict[str, Any]:
    text = event["text"]
    kind, _, place = text.partition(" at ") if " at " in text else ("kill", "", "outside: ")
    who = {name: event[name] for name in ("pipeline", "rank", "life")}
    found = {"at_s": event["at_s"], "kind": kind, "phase": place.partition(":")[0], "place": place, **who}
    pauses = _pauses(event, seen, shape)
    return {
        **found,
        "pause_s": max((end - begin for begin, end in pauses), default=None),
        "wait_s": max((_wait_s(seen, begin, end) for begin, end in pauses), default=None),
    }


def _wait_s(seen: SeenRun, begin_s: float, end_s: float) -> float:
    """What of a time others may have waited: the rest, once the last process that replaces a rank had started in it."""
    starts = [e["at_s"] for e in seen.of("start") if seen.scenario.way == "spares" and e["life"] > 0]
    return float(end_s - max([begin_s, *(at_s for at_s in starts if begin_s < at_s < end_s)]))


def _pauses(fault: dict[str, Any], seen: SeenRun, shape: RunShape) -> list[tuple[float, float]]:
    """The times between results of the others that began while the fault could be felt."""
    own = seen.scenario.way == "isolate"
    others = [e for e in seen.of("result", "evaluation", "end") if e["process"] != fault["process"]]
    felt_s = fault["at_s"] + shape.timeout_s + 2 * PROMPT_S
    if own:  # and who is lost meanwhile, or is not back yet, and comes again, has a pause of its own
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
    """From when to when a pipeline with a fault was not there: from its last event to the first of another life.

    Of a fault that has ended nothing, such as a flipped bit that nobody looks for, the time is empty.
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
        verdict.wrong["hangs"].append("nothing more was heard, and the run did not end")
        return
    for fault in verdict.faults:
        if fault["wait_s"] is not None and fault["wait_s"] > limit_s:
            verdict.wrong["hangs"].append(f"the others waited for {fault['wait_s']:.1f} s")
    last_s = max([fault["at_s"] for fault in verdict.faults], default=seen.ended_at_s)
    waited_s = _wait_s(seen, last_s, seen.ended_at_s)
    if verdict.ended and waited_s > limit_s + shape.timeout_s * (seen.scenario.way == "isolate"):
        verdict.wrong["hangs"].append(f"the run ended {waited_s:.1f} s after the last fault")
    if verdict.ended and not _may_end(verdict, seen):
        verdict.wrong["ended"].append(f"the run should have gone on: {seen.failure}")
    elif not verdict.ended and any(_must_be_noticed(fault, seen) for fault in verdict.faults):
        verdict.wrong["ended"].append("the run went on as if nothing had happened")


def _must_be_noticed(fault: Mapping[str, Any], seen: SeenRun) -> bool:
    """Whether a run cannot come to its end with a fault; flipped bits are looked for, see ``episode.play``.

    A save in which an error has come up fails alone, and says which.
    """
    way = seen.scenario.way
    if any(f"at {fault['place']}" in event["text"] for event in seen.of("not saved")):
        return False
    return way != "isolate" and (
        fault["kind"] in ("exception", "out of memory", "flipped bit")
        or (fault["kind"] in _KILLED and way == "plain")
    )


def _may_end(verdict: Verdict, seen: SeenRun) -> bool:
    """Whether the guide leaves it open that the run goes on."""
    if seen.scenario.way == "plain":
        return any(fault["kind"] not in HARMLESS for fault in verdict.faults)
    faults = [fault for fault in verdict.faults if fault["kind"] not in HARMLESS]
    if not faults:
        return False
    starts = any(fault["phase"] in ("start", "shutdown") for fault in faults)
    if seen.scenario.way == "spares":
        # Those that are not killed, two at once, and who dies between a call and the copy after the next batch.
        calls = any(fault["phase"] in ("save", "evaluation") for fault in faults)
        calls |= any(_follows_a_call(fault, seen) for fault in faults)
        return starts or calls or len(faults) > 1 or any(f["kind"] not in _KILLED for f in faults)
    gone = {
        fault["pipeline"] for fault in faults if not _came_again(fault, seen)
    }  # nobody is left with a state
    return starts or len(gone) == len({event["pipeline"] for event in seen.events})


def _came_again(fault: Mapping[str, Any], seen: SeenRun) -> bool:
    """Whether another life of its pipeline has come to a result since."""
    results = (e for e in seen.of("result") if e["pipeline"] == fault["pipeline"])
    return any(e["at_s"] > fault["at_s"] and e["life"] > fault["life"] for e in results)


def _follows_a_call(fault: Mapping[str, Any], seen: SeenRun) -> bool:
    """Whether all have evaluated or saved, and trained on no more than a few batches since, or on none at all."""
    results = [e["at_s"] for e in seen.of("result") if e["at_s"] < fault["at_s"]]
    calls = [e["at_s"] for e in seen.of("evaluation") if e["at_s"] < fault["at_s"]]
    return bool(fault["at_s"] - max([*calls, *results[:1]], default=fault["at_s"]) < _COPY_S)


def _judge_blame(verdict: Verdict, seen: SeenRun) -> None:
    blamed = _blamed(seen)
    faults = [fault for fault in verdict.faults if fault["kind"] not in HARMLESS]
    allowed: set[Who] = set()
    for fault in faults:
        who = fault["pipeline"] if seen.scenario.way == "isolate" else 0, fault["rank"]
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
    """Whom the launcher has blamed, in its own words."""
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
    """Every sample is trained on once."""
    if seen.scenario.way == "isolate":
        _judge_samples_of_all(verdict, seen)
        return
    results: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in seen.of("result"):
        results[event["process"]].append(event)
    ended = {event["process"] for event in seen.of("end")}
    for process, rows in results.items():
        batches = [row["batch"] for row in rows]
        last = BATCHES if process in ended else max(batches) + 1
        who = f"pipeline {rows[0]['pipeline']}, rank {rows[0]['rank']} was"
        of_all = [(row["batch"], row["samples"], row["loss"]) for row in rows]
        _tell_samples(verdict, who, of_all, range(min(batches), last))
    if not verdict.ended:
        told = {row["batch"] for rows in results.values() for row in rows}
        if told != set(range(BATCHES)):
            verdict.wrong["samples"].append(f"nobody told of batches {sorted(set(range(BATCHES)) - told)}")


def _judge_samples_of_all(verdict: Verdict, seen: SeenRun) -> None:
    """All processes of isolated pipelines are told the same results, each those of its time; together they are all."""
    told: dict[int, list[Row]] = defaultdict(list)
    for event in seen.of("result"):
        told[event["process"]].append((event["batch"], event["samples"], event["loss"]))
    ended = {event["process"] for event in seen.of("end")}
    parts = {process: rows if process in ended else rows[:-_UNSURE] for process, rows in told.items()}
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
                verdict.wrong["samples"].append(f"process {process} was told other results than the others")
                return
            whole = whole + rows[common:]
    batches = [batch for batch, _, _ in whole]
    verdict.repeated = sum(samples for n, (batch, samples, _) in enumerate(whole) if batch in batches[:n])
    if not verdict.ended and ended - left.keys():
        _tell_samples(verdict, "all were", whole, range(BATCHES))


def _tell_samples(verdict: Verdict, who: str, rows: Sequence[Row], batches: Sequence[int]) -> None:
    found: Counter[int] = Counter()
    for batch, samples, _ in rows:
        found[batch] += samples
    wrong = {batch: found[batch] for batch in batches if found[batch] != BATCH_SIZE}
    if wrong:
        verdict.wrong["samples"].append(f"samples by batch that {who} told of, of {BATCH_SIZE}: {wrong}")


def _judge_references(verdict: Verdict, seen: SeenRun) -> None:
    """All processes of isolated pipelines have the same reference, in every bit."""
    found: dict[int, set[str]] = defaultdict(set)
    for event in seen.of("evaluation"):
        found[event["batch"]].add(event["reference"])
    differ = [batch for batch, digests in sorted(found.items()) if len(digests) > 1]
    if differ:
        verdict.wrong["losses"].append(f"references of pipelines differ after batches {differ}")


def _judge_losses(verdict: Verdict, seen: SeenRun, undisturbed: Mapping[int, float]) -> None:
    """What is trained again comes to the same bits."""
    others = [e["batch"] for e in seen.of("result") if e["loss"] != undisturbed.get(e["batch"], e["loss"])]
    if others:
        verdict.wrong["losses"].append(
            f"losses differ from the undisturbed run's from batch {min(others)} on"
        )
