"""``avgpipe bench faults``: what it draws, what it finds wrong, and a run of some seconds."""

import pytest

from avgpipe.errors import PipelineError
from avgpipe.faults.fault import KINDS
from avgpipe.ranks.launch import RanksFailed
from avgpipe.testing import environment
from avgpipe_lab.bench import faults
from avgpipe_lab.bench.chaos.draw import BATCH_SIZE, BATCHES, OF_HOSTS, OF_LINES, WAYS, Scenario, Strike, draw
from avgpipe_lab.bench.chaos.episode import RunShape, SeenRun, play
from avgpipe_lab.bench.chaos.judge import judge
from avgpipe_lab.commands import FaultsConfig
from tests.cli.command import avgpipe, invoke, strict
from tests.lab.bench.test_namespaces import needs_root
from tests.patience import limit

SHAPE = RunShape(stages=2, pipelines=2, link="auto", timeout_s=5.0)
LOSSES = dict.fromkeys(range(BATCHES), 1.0)
KILL = {"kind": "kill", "phase": "training", "rank": 1, "restart": 0, "pipeline": 0, "batch": 20}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_drawn_can_happen_and_follows_from_the_seed(way):
    for number in range(200):
        drawn = draw(3, way, number, tuple(KINDS), 2, 3, 20.0)
        assert drawn == draw(3, way, number, tuple(KINDS), 2, 3, 20.0)
        environment(drawn.faults)  # ValueError for what cannot be
    some = [draw(3, way, number, tuple(KINDS), 2, 3, 20.0) for number in range(200)]
    assert {one.kind for one in some} == set(KINDS)
    assert [one.faults for one in some] != [
        draw(4, way, n, tuple(KINDS), 2, 3, 20.0).faults for n in range(200)
    ]


def test_only_the_kinds_that_are_asked_for_are_drawn():
    for number in range(50):
        drawn = draw(0, "isolate", number, ("slow", "reset"), 2, 2, 1.0)
        assert {fault["kind"] for fault in drawn.faults} <= {"slow", "reset", "kill"}  # who joins was killed
        assert not drawn.strikes


def test_only_hosts_are_struck_in_other_ways_than_by_kills_and_only_by_kinds_that_are_asked_for():
    def strikes(way, *kinds):
        drawn = [draw(5, way, number, kinds, 1, 3, 2.0) for number in range(100)]
        return {strike.kind for one in drawn for strike in one.strikes}

    assert strikes("hosts", *KINDS) == {"kill", *OF_HOSTS}
    assert strikes("hosts", "exception", "cut line") == {"cut line"}
    assert strikes("hosts", "exception") == set()
    assert [strikes(way, *KINDS) for way in ("isolate", "spares", "plain")] == [{"kill"}] * 3


def seen(way="isolate", fault_at_s=20.05, lost=0, **changes):
    """A run of two pipelines of two ranks with a result each second, of which one is killed and does not come again."""
    made = SeenRun(Scenario("a run", way, (KILL,)), ended_at_s=BATCHES + 0.5)
    for process in range(4 if way == "isolate" else 2):
        who = {"process": process, "pipeline": process // 2, "rank": process % 2, "life": 0}
        is_lost = process // 2 == lost and way == "isolate"
        batches = [batch for batch in range(BATCHES) if not is_lost or batch < fault_at_s]
        rows = [("result", batch, {"batch": batch, "samples": BATCH_SIZE, "loss": 1.0}) for batch in batches]
        if not is_lost:
            evaluated = {"batch": BATCHES, "loss": 1.0, "reference": "the same"}
            rows += [("evaluation", BATCHES, evaluated), ("end", BATCHES, {})]
        made.events += [{"event": kind, "at_s": float(at), **who, **about} for kind, at, about in rows]
    killed = {"process": 1, "pipeline": 0, "rank": 1, "life": 0, "text": "kill at training: rank 1, batch 20"}
    made.events.append({"event": "fault", "at_s": fault_at_s, **killed})
    made.events.sort(key=lambda event: event["at_s"])
    made.said.append((fault_at_s, "pipeline 0 is lost: rank 1 (stage 1) was killed by SIGKILL (by hand)"))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_run_that_goes_on_as_promised_has_nothing_wrong():
    verdict = judge(seen(), SHAPE, LOSSES)
    assert not verdict.wrong
    (fault,) = verdict.faults
    assert (fault["kind"], fault["phase"], fault["blamed"]) == ("kill", "training", [[0, 1]])
    assert fault["pause_s"] == pytest.approx(1.0)


def test_what_is_left_over_is_wrong():
    assert judge(seen(left=["process 7: python"]), SHAPE, LOSSES).wrong == {
        "left over": ["process 7: python"]
    }


def test_who_cannot_be_at_fault_must_not_be_blamed():
    said = [
        (20.1, "pipeline 0 is lost: rank 0 (stage 0) was killed by SIGKILL (by hand); it is started again")
    ]
    assert list(judge(seen(said=said), SHAPE, LOSSES).wrong) == ["wrong blame"]


@pytest.mark.parametrize(("rank", "wrong"), [(1, []), (0, ["wrong blame"])])
def test_a_silent_rank_is_blamed(rank, wrong):
    who = f"rank {rank} (stage {rank})"
    said = [(20.1, f"pipeline 0 is lost: {who} sent no message for 5 s; it last reported: its start")]
    assert list(judge(seen(said=said), SHAPE, LOSSES).wrong) == wrong


def test_a_long_pause_is_a_hang():
    late = seen()
    late.events = [e for e in late.events if not (e["event"] == "result" and 20.05 < e["at_s"] < 33)]
    assert "hangs" in judge(late, SHAPE, LOSSES).wrong


@pytest.mark.parametrize(("ended_at_s", "wrong"), [(36.0, []), (51.0, ["hangs"])])
def test_the_end_of_a_run_is_late_by_the_time_since_its_last_result(ended_at_s, wrong):
    run = seen("plain", failure=RanksFailed([0, 1], 1), ended_at_s=ended_at_s)
    run.events = [e for e in run.events if e["at_s"] < 35]
    fault = next(event for event in run.events if event["event"] == "fault")
    fault["text"] = "reset at training: rank 1, batch 20"
    verdict = judge(run, SHAPE, LOSSES)
    assert [name for name in verdict.wrong if name == "hangs"] == wrong


def test_the_pause_of_who_is_lost_itself_is_no_wait_for_another():
    run = handed_on()
    fault = next(e for e in run.events if e["event"] == "fault")
    run.events.append({**fault, "text": "slow at training: rank 0", "pipeline": 1, "at_s": 19.5})
    assert not judge(run, SHAPE, LOSSES).wrong


@pytest.mark.parametrize("life", [1, 0])
def test_who_was_lost_before_and_is_not_back_waits_for_nobody(life):
    """But who has not ended with its own fault does."""
    run = seen()
    run.events = [e for e in run.events if e["pipeline"] == 0 or not 15 < e["at_s"] < 35]
    for event in run.events:
        event["life"] = life if event["pipeline"] == 1 and event["at_s"] > 20 else 0
    lost = {"process": 3, "pipeline": 1, "rank": 1, "life": 0, "text": "kill at training: rank 1, batch 15"}
    run.events.append({"event": "fault", "at_s": 15.5, **lost})
    run.events.sort(key=lambda event: event["at_s"])
    waits = judge(run, SHAPE, LOSSES).wrong.get("hangs", [])
    assert waits == [] if life else waits


def test_who_tells_of_a_result_after_a_fault_that_it_does_not_survive_waits_for_nobody():
    """As the other rank of a pipeline of which one was killed."""
    run = handed_on()
    for event in run.events:
        if event["pipeline"] == 1 and event["at_s"] > 15.6:
            event["life"] = 1
    run.events = [e for e in run.events if e["pipeline"] == 0 or not 15.6 < e["at_s"] < 35]
    lost = {"process": 3, "pipeline": 1, "rank": 1, "life": 0, "text": "kill at training: rank 1, batch 15"}
    run.events.append({"event": "fault", "at_s": 14.5, **lost})
    run.events.sort(key=lambda event: event["at_s"])
    assert "hangs" not in judge(run, SHAPE, LOSSES).wrong


def test_a_fault_that_ends_nothing_hides_nobody_who_goes_on():
    """Pipeline 1 goes on, and a flipped bit that nobody looks for is no reason not to look at it."""
    run = seen()
    flip = {"process": 3, "pipeline": 1, "rank": 1, "life": 0, "text": "flipped bit at training: rank 1"}
    run.events.append({"event": "fault", "at_s": 21.5, **flip})
    killed = judge(run, SHAPE, LOSSES).faults[0]
    assert killed["pause_s"] == pytest.approx(1.0)


def test_the_start_of_a_process_that_replaces_a_rank_is_no_wait():
    late = seen(
        "spares", said=[(20.1, "rank 1 was killed by SIGKILL (by hand); a new process takes its place")]
    )
    late.events = [e for e in late.events if not (e["event"] == "result" and 20.05 < e["at_s"] < 40)]
    assert "hangs" in judge(late, SHAPE, LOSSES).wrong
    start = {"event": "start", "at_s": 35.0, "process": 7, "pipeline": 0, "rank": 1, "life": 1}
    late.events.append(start)
    verdict = judge(late, SHAPE, LOSSES)
    assert "hangs" not in verdict.wrong
    assert (verdict.faults[0]["pause_s"], verdict.faults[0]["wait_s"]) == pytest.approx((19.95, 5.0))
    start["at_s"] = 25.0
    assert "hangs" in judge(late, SHAPE, LOSSES).wrong


def test_a_sample_that_is_lost_or_trained_on_twice_is_wrong():
    lost = seen()
    lost.events = [e for e in lost.events if not (e["event"] == "result" and e["batch"] == 50)]
    assert list(judge(lost, SHAPE, LOSSES).wrong) == ["samples"]
    twice = seen()
    twice.events += [dict(e) for e in twice.events if e["event"] == "result" and e["batch"] == 50]
    assert list(judge(twice, SHAPE, LOSSES).wrong) == ["samples"]


@pytest.mark.parametrize("event", ["evaluation", "weights"])
def test_a_sample_that_the_weights_have_not_counted_once_is_wrong(event):
    run = seen()
    run.events.append({**run.events[-1], "event": event, "batch": 80, "reference": "the same"})
    run.events[-1]["miscounted"] = {"1.odometer[7]": -2.0, "1.odometer[9]": 0.0}
    text = "weights after 80 batches have miscounted samples: 1.odometer[7] -2, 1.odometer[9] 0"
    assert judge(run, SHAPE, LOSSES).wrong == {"samples": [text]}


def struck(codes, kind="lost host", for_s=None, failure=None, said=()):
    """A run over three hosts, of which the last one was lost or cut off."""
    run = seen("hosts", codes=dict(enumerate(codes)), failure=failure)
    place = {"host": 2, "for_s": for_s, "text": f"{kind} at outside: host 2", "at_s": 60.0}
    fault = next(event for event in run.events if event["event"] == "fault")
    run.events.append({**fault, **place})
    run.said += [(150.0, line) for line in ("host 1: avgpipe: error: no run goes on there", *said)]
    return judge(run, SHAPE, LOSSES).wrong


@pytest.mark.parametrize("code", [-9, 1, 0])
def test_the_command_of_a_lost_host_may_end_with_any_exit_code(code):
    assert not struck([0, 0, code])
    assert not struck([0, 0, code], "cut line", SHAPE.timeout_s)


def test_a_host_that_is_cut_off_may_outlast_the_run_only_while_it_says_that_it_waits():
    assert struck([0, 0, None], "cut line") == {"hangs": ["the command of host 2 did not end"]}
    line = "host 2: avgpipe: 10.0.0.1:7000: its launcher cannot be reached: refused; it is waited for, up to 60 s"
    assert not struck([0, 0, None], "cut line", said=[line])


def test_other_commands_end_with_the_exit_code_of_the_run():
    wrong = struck([0, 2, 0])
    assert wrong == {"exit codes": ["2 of host 1: host 1: avgpipe: error: no run goes on there"]}
    assert list(struck([0, 0, 1], "cut line", 1.0)) == ["exit codes"]
    assert struck([0, None, 0]) == {"hangs": ["the command of host 1 did not end"]}
    ended = struck([1, 0, 1], failure=PipelineError("exit code 1"))
    assert ended["exit codes"] == ["0 of host 1: host 1: avgpipe: error: no run goes on there"]


def handed_on():
    """As above, but those that were there at the beginning are all lost later, and others have come before."""
    run = seen()
    for process in (2, 3):
        last = {e["event"]: e for e in run.events if e["process"] == process}
        run.events = [e for e in run.events if e["process"] != process or e["at_s"] < 100]
        who = {"process": process + 10, "pipeline": 0, "rank": process % 2, "life": 1}
        came = [(batch, {"batch": batch, "samples": BATCH_SIZE, "loss": 1.0}) for batch in range(50, BATCHES)]
        run.events += [{"event": "result", "at_s": float(at), **who, **about} for at, about in came]
        run.events += [{**last[kind], **who} for kind in ("evaluation", "end")]
    return run


def test_samples_are_counted_though_nobody_was_there_from_the_beginning_to_the_end():
    assert not judge(handed_on(), SHAPE, LOSSES).wrong
    lost = handed_on()
    lost.events = [e for e in lost.events if not (e["event"] == "result" and e["batch"] in (10, 120))]
    (text,) = judge(lost, SHAPE, LOSSES).wrong["samples"]
    assert text == f"samples by batch that all processes have, instead of {BATCH_SIZE}: {{10: 0, 120: 0}}"


def test_processes_that_are_told_other_results_than_the_others_are_wrong():
    run = handed_on()
    next(e for e in run.events if (e["process"], e.get("batch")) == (12, 60))["loss"] = 0.9
    assert judge(run, SHAPE, LOSSES).wrong == {"samples": ["process 12 has other results than the others"]}


def test_references_that_differ_in_a_bit_are_wrong():
    run = seen()
    next(e for e in run.events if e["event"] == "evaluation")["reference"] = "another"
    assert judge(run, SHAPE, LOSSES).wrong == {
        "losses": [f"references of pipelines differ after batches [{BATCHES}]"]
    }


@pytest.mark.parametrize(("pipeline", "wrong"), [(0, []), (1, ["wrong blame"])])
def test_whose_part_others_have_waited_for_is_blamed(pipeline, wrong):
    said = [
        (25.1, f"pipeline {pipeline} is lost: pipeline {1 - pipeline} has waited 5 s for its part of step 7")
    ]
    assert list(judge(seen(said=said), SHAPE, LOSSES).wrong) == wrong


def test_what_ended_nothing_or_was_made_good_excuses_no_end():
    run = handed_on()
    run.failure = RanksFailed([0, -9], 1)
    slow = next(e for e in run.events if e["event"] == "fault")
    run.events.append({**slow, "text": "slow at start: rank 1", "pipeline": 1, "at_s": 1.0})
    assert "ended" in judge(run, SHAPE, LOSSES).wrong
    run.events.append({**slow, "text": "kill at training: rank 1", "pipeline": 1, "at_s": 100.0})
    assert "ended" in judge(run, SHAPE, LOSSES).wrong  # pipeline 0 had come again
    run.events.append({**slow, "text": "kill at training: rank 1", "life": 1, "at_s": 159.0})
    assert "ended" not in judge(run, SHAPE, LOSSES).wrong


def test_a_run_that_ends_where_another_pipeline_is_left_is_wrong():
    assert "ended" in judge(seen(failure=RanksFailed([0, -9], 1)), SHAPE, LOSSES).wrong


def test_an_error_must_be_seen_where_others_than_isolated_pipelines_meet_it():
    run = seen("spares")
    place = "save: rank 1, restart 0, action written, stage 1, pipeline {0}, batch 20"
    fault = next(event for event in run.events if event["event"] == "fault")
    fault["text"] = f"out of memory at {place}"
    assert judge(run, SHAPE, LOSSES).wrong == {"ended": ["the run continued as if nothing had happened"]}
    told = {**fault, "event": "not saved", "text": "nothing was saved to a folder: No space left on device"}
    run.events.append(told)
    assert list(judge(run, SHAPE, LOSSES).wrong) == ["ended"]
    told["text"] = f"nothing was saved to a folder: out of memory, injected by avgpipe.testing at {place}"
    assert not judge(run, SHAPE, LOSSES).wrong


def test_a_replaced_rank_trains_to_the_same_bits():
    said = [(20.1, "rank 1 was killed by SIGKILL (by hand); a spare process takes its place")]
    assert not judge(seen("spares", said=said), SHAPE, LOSSES).wrong
    assert list(judge(seen("spares", said=said), SHAPE, {**LOSSES, 30: 0.9}).wrong) == ["losses"]


def test_unknown_names_are_refused():
    for option, name in (("--kinds", "kil"), ("--ways", "isolated"), ("--links", "nccl")):
        result = invoke("bench", "faults", option, name)
        assert result.exit_code == 2
        assert name in result.stderr


def test_runs_over_several_hosts_are_left_out_where_there_is_no_root(monkeypatch, capsys):
    def refuse(why):
        raise ValueError(f"{why} needs root for network namespaces")

    monkeypatch.setattr(faults, "check_namespaces", refuse)
    config = FaultsConfig()
    assert faults._ways(config) == ("isolate", "spares", "plain")
    assert "several hosts are left out: --ways hosts needs root" in capsys.readouterr().err
    result = invoke("bench", "faults", "--ways", "hosts")
    assert result.exit_code == 2
    assert "--ways hosts needs root" in result.stderr


@pytest.mark.ranks
@pytest.mark.root
@needs_root
def test_a_host_that_is_lost_and_one_that_is_cut_off_cost_the_run_nothing():
    shape = RunShape(stages=1, pipelines=3, link="auto", timeout_s=limit(5.0))
    strikes = Strike("cut line", 0.5, 0, for_s=1.0), Strike("lost host", 3.0, 1)
    run = play(Scenario("hosts-0", "hosts", strikes=strikes), shape)
    verdict = judge(run, shape, {})
    assert not verdict.wrong
    assert [fault["kind"] for fault in verdict.faults] == ["cut line", "lost host"]
    assert sorted(run.codes.values()) == [-9, 0, 0]


def test_one_stage_sends_nothing_that_could_be_cut():
    result = invoke("bench", "faults", "--stages", "1", "--kinds", "cut line,reset")
    assert result.exit_code == 2
    assert "these faults need messages between stages, and --stages is 1" in result.stderr
    drawn = {draw(0, "plain", number, tuple(KINDS), 1, 2, 20.0).kind for number in range(200)}
    assert drawn == set(KINDS).difference(OF_LINES)


@pytest.mark.ranks
def test_it_runs_for_some_seconds_and_says_how_to_repeat_it():
    options = (
        "--seed",
        "1",
        "--kinds",
        "kill,exception",
        "--ways",
        "spares,plain",
        "--only",
        "spares-2,plain-0",
    )
    process = avgpipe("bench", "faults", *options, "--json")
    stdout, stderr = process.communicate(timeout=limit(200))
    assert process.returncode == 0, stderr
    found = strict(stdout)
    assert found["command"].startswith("avgpipe bench faults --seed 1 ")
    assert stderr.startswith(f"seed 1: {found['command']}")
    assert found["violations"] == []
    assert {run["name"] for run in found["runs"]} == {"spares-2", "plain-0"}
    assert found["faults"] >= 2
