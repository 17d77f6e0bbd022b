import time

import pytest

from avgpipe.timeline import Event, Timeline
from avgpipe.timeline.explain import (
    RULES,
    Facts,
    advice,
    balance,
    host,
    links,
    more_pipelines,
    one_thread,
    overhead,
)
from tests.patience import limit


def event(stage, m, kind, start_s, end_s, detail="", pipeline=0, batch=0):
    return Event(stage, pipeline, batch, m, kind, start_s, end_s, detail)


def row(stage, *spans):
    """Events one after another: (kind, micro-batch, seconds) or (kind, micro-batch, seconds, detail); gaps as None."""
    events, now = [], 0.0
    for kind, m, seconds, *detail in spans:
        if kind is not None:
            events.append(event(stage, m, kind, now, now + seconds, *detail))
        now += seconds
    return events


def facts(*rows):
    return Facts(Timeline(len(rows), tuple(e for one in rows for e in one)))


# Two stages, one micro-batch after another; each waits for the other while it works.
FLUSH = facts(
    row(0, ("F", 0, 1), ("recv", 0, 3, "B"), ("B", 0, 2), ("F", 1, 1), ("recv", 1, 3, "B"), ("B", 1, 2)),
    row(1, ("recv", 0, 1, "F"), ("F", 0, 1), ("B", 0, 2), ("recv", 1, 3, "F"), ("F", 1, 1), ("B", 1, 2)),
)


def test_workers_that_wait_for_each_other_want_another_pipeline():
    gain, sentence = more_pipelines(FLUSH)
    assert gain == 6  # 12 s, of which each computes 6 s
    assert sentence == "every worker waits for its neighbours at least 50 % of the time: run 2 pipelines"
    assert advice(FLUSH) == f"{sentence} (up to 50 % less time)"


def test_further_pipelines_promise_less():
    two = Timeline(2, tuple(e._replace(pipeline=e.micro_batch) for e in FLUSH.timeline.events))
    gain, sentence = more_pipelines(Facts(two))
    assert gain == 3
    assert sentence.endswith("run 3 pipelines")


def test_more_pipelines_do_not_outrun_a_link():
    """Each of 4 messages to stage 1 takes 2 s: 8 of 12 s; a worker with nothing but waits would promise more."""
    busy = [(kind, m, s, *d) for m in range(4) for kind, s, *d in (("F", 1), ("recv", 2, "U"))]
    timeline = facts(row(0, *busy), row(1, *(("recv", 0, 3, "F"), ("F", 0, 1)), (None, None, 8)))
    assert timeline.transfers == {(1, "F"): (4, 2.0)}
    assert more_pipelines(timeline) is None  # stage 0 waits for nobody
    waiting = facts(row(0, *((k, m, s, *["B"][: len(d)]) for k, m, s, *d in busy)),
                    row(1, ("recv", 0, 3, "F"), ("F", 0, 1)))  # fmt: skip
    assert more_pipelines(waiting).gain_s == 12 - 8


def test_a_single_stage_has_no_peer_to_wait_for():
    alone = facts(row(0, ("F", 0, 1), ("recv", 0, 5), ("B", 0, 1)))
    assert [rule(alone) for rule in RULES if rule is not overhead] == [None] * 5
    assert advice(alone) == "no single change would gain 3 %: workers compute 29 % of the time"


def test_a_stage_that_computes_longer_gives_layers_to_the_idler_side():
    stages = facts(
        row(0, ("F", 0, 4), ("recv", 9, 5)),
        row(1, ("F", 0, 10)),
        row(2, ("F", 0, 1), ("recv", 9, 8)),
    )
    gain, sentence = balance(stages)
    assert gain == pytest.approx(10 - 5)  # the chain is stage 1's; even stages compute 5 s each
    assert sentence == "stage 1 computes 2.00 times as long as the mean: move layers from stage 1 to stage 2"
    assert advice(stages) == f"{sentence} (up to 50 % less time)"
    last = facts(row(0, ("F", 0, 2), ("recv", 0, 6)), row(1, ("F", 0, 8)))
    assert balance(last).sentence.endswith("move layers from stage 1 to stage 0")


def test_stages_that_differ_little_stay_as_they_are():
    assert balance(facts(row(0, ("F", 0, 10)), row(1, ("F", 0, 9)))) is None


def test_layers_are_not_moved_where_the_chain_does_not_compute():
    """Stage 1 computes three times as long as stage 0, in 3 of 30 s; the run is as long as the loader."""
    loads = facts(
        row(0, ("host", 0, 26, "loader"), ("F", 0, 1), ("recv", 0, 2, "U")),
        row(1, ("recv", 0, 27, "F"), ("F", 0, 3)),
    )
    assert balance(loads).gain_s == pytest.approx(3 * (1 - 2 / 3) + 1 * (1 - 2 / 1))
    assert host(loads) == (26, "the data loader takes 87 % of worker 0's time: use workers (num_workers)")
    assert advice(loads).startswith("the data loader takes 87 %")


def test_transfers_bind():
    """Stage 1 computes 1 s per micro-batch and waits 3.5 s for each; stage 0 has long been ready."""
    sends = row(0, *(("F", m, 1) for m in range(4)), ("recv", 9, 13, "U"))
    waits = [(kind, m, s, *d) for m in range(4) for kind, s, *d in (("recv", 3.5, "F"), ("F", 1))]
    bound = facts(sends, row(1, *waits))
    gain, sentence = links(bound)
    assert gain == 3.5 * 4 - 1  # all waits but the first second, in which stage 0 computes
    assert sentence == (
        "transfers are the bottleneck, from stage 0 to stage 1 at least 2.50 s each: "
        "use wire_dtype, larger stages, or a faster link"
    )
    assert advice(bound) == f"{sentence} (up to 72 % less time)"


def test_gradients_bind_in_the_other_direction():
    timeline = facts(row(0, ("recv", 0, 9, "B"), ("B", 0, 1)), row(1, ("B", 0, 1)))
    assert links(timeline).gain_s == 8
    assert "from stage 1 to stage 0 at least 8.00 s" in links(timeline).sentence
    assert links(facts(row(0, ("F", 0, 1)), row(1, ("F", 0, 1)))) is None


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("loader", "the data loader takes 75 % of worker 0's time: use workers (num_workers)"),
        ("caller", "the code between results takes 75 % of worker 0's time: do less there, or less often"),
        ("mending", "the host (mending) takes 75 % of worker 0's time: do less there"),
        ("", "the host (no detail) takes 75 % of worker 0's time: do less there"),
    ],
)
def test_the_host_is_in_the_way(word, sentence):
    timeline = facts(row(0, ("F", 0, 1), ("host", None, 6, word), ("B", 0, 1)))
    assert host(timeline) == (6, sentence)
    assert advice(timeline) == f"{sentence} (up to 75 % less time)"


def test_host_work_that_no_worker_waits_for_is_no_gain():
    timeline = facts(row(0, ("F", 0, 1), ("host", 0, 6, "caller")), row(1, ("F", 0, 8)))
    assert host(timeline) is None


def test_actions_that_are_small_beside_what_the_runtime_adds_should_be_larger():
    spans = [span for m in range(4) for span in (("F", m, 2e-3), ("send", m, 0.5e-3), (None, m, 0.5e-3))]
    gain, sentence = overhead(facts(row(0, *spans, ("B", 0, 2e-3))))
    assert gain == pytest.approx(2e-3)
    assert sentence == (
        "the runtime and its sends take 800 µs per action, which computes 2.00 ms: "
        "use larger micro-batches (micro_batches=2 instead of 4)"
    )
    single = facts(row(0, ("F", 0, 1), (None, 0, 1), ("B", 0, 1)))
    assert overhead(single).sentence.endswith("use larger batches")
    assert overhead(facts(row(0, ("F", 0, 1), (None, 0, 0.1), ("B", 0, 1)))) is None
    assert overhead(facts(row(0, ("host", 0, 1)))) is None


def test_all_stages_in_one_thread():
    one = facts(
        row(0, ("F", 0, 1), (None, 0, 6), ("B", 0, 2), ("host", 0, 1, "caller")),
        row(1, (None, 0, 1), ("F", 0, 1), (None, 0, 2), ("B", 0, 2)),
        row(2, (None, 0, 2), ("F", 0, 1), ("B", 0, 1)),
    )
    assert one_thread(one) == (
        7, "one thread runs all 3 stages in turn: start a worker for each (avgpipe run --stages 3)"
    )  # fmt: skip
    assert advice(one).startswith("one thread runs all 3 stages")
    assert one_thread(FLUSH) is None  # one at a time too, but they wait for messages


def test_nothing_to_gain():
    full = facts(row(0, ("F", 0, 19), ("recv", 0, 1, "B")), row(1, ("recv", 0, 1, "F"), ("F", 0, 19)))
    assert advice(full) == "nothing to gain: workers compute 95 % of the time"


def test_the_explanation_of_a_small_run():
    assert FLUSH.timeline.explain().splitlines() == [
        "batches: 1 in 12.0 s, 12.0 s per batch; stages: 2, pipelines: 1, micro-batches: 2",
        "worker (s, %)             F             B        wait B        wait F       outside",
        "            0   2.000  16.7   4.000  33.3   6.000  50.0   0.000   0.0   0.000   0.0",
        "            1   2.000  16.7   4.000  33.3   0.000   0.0   4.000  33.3   2.000  16.7",
        "critical path: computing 100.0 %",
        "advice: every worker waits for its neighbours at least 50 % of the time: "
        "run 2 pipelines (up to 50 % less time)",
    ]


def test_all_that_took_time_has_its_column():
    timeline = facts(row(0, *((kind, 0, 1e-3, "") for kind in ("F", "B", "I", "W", "U", "average", "send")),
                         ("recv", 0, 1e-3, "F"), ("recv", 0, 1e-3), ("host", 0, 1e-3, "loader"),
                         ("mending", 0, 1e-3)))  # fmt: skip
    header, line = timeline.timeline.explain().splitlines()[1:3]
    assert " ".join(header.split()) == "worker (ms, %) F B I W U average send wait F wait loader runtime"
    assert line.split() == ["0"] + ["1.000", "9.1"] * 11


def test_a_record_that_begins_later_on_one_stage_is_cut_there():
    """Stage 0 has lost its first 6 s: they are no overhead of it."""
    first = [e._replace(start_s=max(6, e.start_s)) for e in row(0, *(("F", m, 1) for m in range(10)))]
    second = row(1, *(("F", m, 1) for m in range(10)), ("recv", 9, 0))
    lines = Timeline(2, (*(e for e in first if e.start_s < e.end_s), *second)).explain().splitlines()
    assert lines[0].startswith("batches: 1 in 4.00 s")
    assert lines[1].split() == ["worker", "(s,", "%)", "F"]
    assert lines[-1] == "advice: nothing to gain: workers compute 100 % of the time"


def test_a_simulated_run_waits_and_has_no_runtime():
    timeline = Timeline(2, tuple(e for e in FLUSH.timeline.events if e.kind != "recv"))
    text = timeline.explain()
    assert "wait F" in text
    assert "runtime" not in text
    assert "run 2 pipelines" in text


@pytest.mark.parametrize("timeline", [Timeline(3, ()), Timeline(1, (event(0, 0, "F", 5, 5),))])
def test_what_took_no_time_is_not_explained(timeline):
    assert timeline.explain() == "nothing was recorded"


def test_long_runs_are_explained_quickly():
    spans = [s for m in range(2000) for s in (("recv", m, 1e-3, "F"), ("F", m, 1e-3), ("send", m, 1e-4))]
    timeline = facts(*(row(k, *spans) for k in range(4))).timeline
    begin = time.perf_counter()
    timeline.explain()
    assert time.perf_counter() - begin < limit(5)
    assert len(timeline.events) == 24_000


def test_a_timeline_in_which_no_worker_computed_is_explained():
    t = Timeline(2, (Event(0, 0, 0, None, "host", 0.0, 1.0, "loader"), Event(1, 0, 0, 0, "other", 0.0, 1.0)))
    assert "advice: " in t.explain()
