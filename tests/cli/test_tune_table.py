"""What a reader sees."""

from rich.console import Console

from avgpipe.cli.tune_table import lines, show, table
from avgpipe.measure.tuning import ONE_DEVICE, PIPELINE, TRAVERSAL
from avgpipe.plan import Plan
from tests.measure.examples import row, tuning

TWO = Plan(stages=2, pipelines=2, micro_batches=4, partition=[1])
WIDE = Plan(stages=2, micro_batches=4, partition=[1], replication=[2, 2], advance=[1, 0])


def printed(found):
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(table(found))
    return [line.split() for line in capture.get().splitlines()]


def test_a_row_has_the_plan_and_both_times():
    found = tuning(row(PIPELINE, 0.5, 0.4, TWO), row(PIPELINE, 0.6, None, WIDE), row(ONE_DEVICE, 2.0))
    rows = [words for words in printed(found) if words and words[0] in ("pipeline", "one")]
    assert rows[0] == [
        *("pipeline", "2", "2", "4", "1", "K-1-k", "never"),
        *("500.0", "400.0", "+25.0", "%", "20", "100", "110"),
    ]
    assert rows[1][:8] == ["pipeline", "2", "x", "2", "1", "4", "1", "1,0"]
    assert rows[1][-4:] == ["-", "13.33", "100", "-"]
    assert rows[2][:5] == ["one", "device", "1", "1", "1"]


def test_the_lines_name_the_best_the_runner_up_and_what_failed():
    found = tuning(
        row(PIPELINE, 0.5, 0.4, TWO),
        row(ONE_DEVICE, 2.0, 2.1),
        row(PIPELINE, 0.6, None, WIDE, failure="worker 1 failed"),
        excluded=3,
    )
    said = lines(found)
    assert said[0].startswith(
        "12 sizes of plans were considered, 3 of those simulated do not fit into the memory; search 0.5 s"
    )
    assert said[1] == "best: pipeline, peak memory per worker 100, 100 MiB predicted, 110, 110 MiB measured"
    assert said[2].startswith("runner-up: one device, peak memory per worker 100 MiB predicted")
    assert said[3] == "pipeline was not timed: worker 1 failed"
    assert said[-1].startswith("Advice: ")


def test_a_traversal_is_compared_with_the_plan():
    every = (row(TRAVERSAL, 0.4, 0.39, TWO), row(TRAVERSAL, 0.6, 0.6, TWO))
    said = "\n".join(lines(tuning(row(PIPELINE, 0.5, 0.4, TWO), baselines=every)))
    assert "the best of 2 settings takes 390.0 ms, the plan 1.026 of it; measuring them took 60 s" in said


def test_long_lists_are_cut(capsys):
    plan = Plan(stages=9, micro_batches=9, partition=list(range(1, 9)))
    show(tuning(row(PIPELINE, 0.5, None, plan)), "plan.json")
    printed = capsys.readouterr().out
    assert "1,2,3,4,5,6,... (8)" in printed
    assert printed.strip().endswith("plan: plan.json")
