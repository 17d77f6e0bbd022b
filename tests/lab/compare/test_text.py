"""The table and the notes below it."""

import io

from rich.console import Console

from avgpipe_lab.compare.comparison import DOES_NOT_FIT, OK, OUT_OF_MEMORY, SystemResult
from avgpipe_lab.compare.text import cells, headings, markdown, notes, table
from tests.lab.compare.comparisons import PLAIN, REPLICAS, at, compared, reaching

BIG = SystemResult("ea-pipe", DOES_NOT_FIT, at(99, pipelines=2, micro_batches=1), "needs 3.12 GiB")
BROKEN = SystemResult("pipedream", OUT_OF_MEMORY, None, "RuntimeError: CUDA out of memory")


def printed(comparison, width):
    console = Console(width=width, file=io.StringIO())
    console.print(table(comparison))
    return console.file.getvalue()


def rows(comparison):
    return {
        outcome.system: [text for text, _ in cells(comparison, outcome)] for outcome in comparison.outcomes
    }


def test_a_row_has_a_cell_for_every_heading():
    found = compared(BIG, BROKEN, gpipe=PLAIN, data_parallel=at(20, **REPLICAS), target=100.0)
    assert all(len(row) == len(headings(found)) for row in rows(found).values())
    assert headings(found)[:3] == ["system", "stages, pipelines, micro-batches", "schedule"]


def test_figures_are_spelt_out():
    assert rows(compared(gpipe=PLAIN))["gpipe"] == [
        *("gpipe", "2/1/4", "1f1b", "40.0", "10.0", "400 MiB", "50 %", "110", "120"),
    ]
    row = rows(compared(a=reaching(31.4), b=PLAIN, target=100.0))
    assert row["a"][5:7] == ["800", "31.4"]
    assert row["b"][5:7] == ["-", "-"]


def test_replicas_stand_where_a_schedule_means_nothing():
    found = rows(compared(data_parallel=at(9, **REPLICAS), dapple=at(9, stages=2, replicas=3)))
    assert found["data-parallel"][1:3] == ["1/1/4", "2 replicas"]
    assert found["dapple"][2] == "3 replicas, 1f1b"


def test_what_gave_no_figures_says_so_in_its_row():
    found = rows(compared(BIG, BROKEN, gpipe=PLAIN))
    assert found["pipedream"][:4] == ["pipedream", "-", "out of memory", "-"]
    assert found["ea-pipe"][:3] == ["ea-pipe", "2/2/1", "does not fit: needs 3.12 GiB"]
    assert found["ea-pipe"][4] == "99.0"


def test_what_a_run_warned_of_is_reported():
    warned = SystemResult("pipedream", OK, PLAIN, warnings=("a stage waits",))
    assert "pipedream: a stage waits." in notes(compared(warned, gpipe=PLAIN))


def test_only_the_best_are_marked():
    found = compared(BIG, gpipe=at(10), dapple=at(20, peak_memory_bytes=500 * 2**20))
    marked = {o.system: [text for text, best in cells(found, o) if best] for o in found.outcomes}
    assert marked == {
        "ea-pipe": [],
        "gpipe": ["400 MiB", "50 %", "110", "120"],
        "dapple": ["20.0", "20.0", "50 %", "110", "120"],
    }


def test_the_printed_table_has_stars_and_no_cut_words():
    text = printed(
        compared(BIG, BROKEN, gpipe=at(10), dapple=at(20, schedule="all-forward-all-backward")), 120
    )
    assert "20.0*" in text
    assert "all-forward-all-backward" in text
    assert "…" not in text


def test_markdown_is_a_table_with_notes_and_advice():
    text = markdown(compared(BROKEN, gpipe=at(10), dapple=at(20)))
    lines = text.splitlines()
    assert lines[0] == "# awd-lstm tiny: systems compared"
    head = next(n for n, line in enumerate(lines) if line.startswith("| system |"))
    assert len({line.count("|") for line in lines[head : head + 5]}) == 1
    assert lines[head + 4].startswith("| dapple | 2/1/4 | 1f1b | **20.0** | **20.0** |")
    assert "- pipedream: out of memory: RuntimeError: CUDA out of memory." in lines
    assert lines[-1] == "Advice: dapple is fastest here, 2.0 times as fast as gpipe: use it."
    assert text.endswith("\n")


def test_the_notes_say_what_was_equal():
    said = notes(compared(a=PLAIN, b=at(20)))
    assert (
        said[0]
        == "Equal for all: awd-lstm tiny, 2 workers, seed 0, batches of 16 samples, 50 batches, 800 samples."
    )
    assert "less than 5 % does not count as a difference" in said[-1]


def test_what_was_not_equal_is_not_called_so():
    said = notes(compared(a=reaching(90.0, batches=40, samples=640), b=PLAIN, target=110.0))
    assert said[0] == (
        "Equal for all: awd-lstm tiny, 2 workers, seed 0, batches of 16 samples, "
        "the order of batches (40 to 50 batches until the target)."
    )
    assert said[1] == "Target: perplexity 110; not reached by b."
    assert "batches of" not in notes(compared(a=PLAIN, b=at(9, batch_size=8)))[0]


def test_the_notes_explain_what_is_left_out():
    said = notes(compared(BIG, BROKEN, gpipe=PLAIN, memory_limit_bytes=2**30))
    assert said[0] == "ea-pipe: does not fit: needs 3.12 GiB; left out of the ranking."
    assert said[1] == "pipedream: out of memory: RuntimeError: CUDA out of memory."
    assert "Memory limit: 1 GiB per worker, compared with the peak of each run." in said


def test_the_trivial_answer_puts_metrics_into_perspective():
    said = notes(compared(a=PLAIN, trivial=900.0))
    assert "The best answer that ignores the input has perplexity 900." in said
    said = notes(compared(a=PLAIN, trivial=90.0))
    assert any("and no system beats it: the run is too short" in line for line in said)


def test_short_runs_are_said_to_be_short():
    said = notes(compared(a=at(800, epochs=0.25)))
    assert "s/epoch is extrapolated from 0.25 of an epoch." in said
    assert "The shortest run trained 1000 ms, so its start-up matters in the figures." in said


def test_without_figures_there_are_only_reasons():
    assert notes(compared(BROKEN)) == ["pipedream: out of memory: RuntimeError: CUDA out of memory."]
