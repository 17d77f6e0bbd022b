"""The overview's figures were measured with default plans; if options differed, the page names them."""

import json
import re
import runpy
from fnmatch import fnmatch

import pytest

import avgpipe
from avgpipe import rules
from benchmarks import pages
from tests.cli.command import ROOT

# What decides what is learnt, beside the sizes of a plan, its schedule and what each stage holds.
LEARNT = (
    "rule",
    "alpha",
    "staleness",
    "period",
    "warmup_rounds",
    "batch",
    "weights",
    "correction",
    "isolate",
)
SIZES = ("stages", "pipelines", "micro_batches", "schedule", "advance", "stages_per_worker", "replication")

# Plans that a record does not hold were the defaults of their day, whose last day this is.
EARLIER = {"2026-11-23": {"batch": "per-pipeline"}, "2026-11-26": {"warmup_rounds": 0}}

TURNS, LATE = {"batch": "per-pipeline"}, {"warmup_rounds": 0}
APART = {"isolate": True, **LATE}
HEADLINES = {
    "statistics-default-plan-*": {},
    "overlap-emulated-*": TURNS,
    "overlap-lstm-*": TURNS,
    "overlap-transformer-*": TURNS,
    "overlap-compiled-transformer-*": TURNS,
    "overlap-overhead-*": TURNS,
    "overlap-memory-*": TURNS,
    "compare-awd-lstm-*": TURNS,
    "systems-emulated-*": TURNS,
    "tuning-*": TURNS,
    "workloads-*": TURNS,
    "papers-[eft]*": LATE,
    "papers-headlines-*": LATE,
    "gpu_suite-*": LATE,
    "checkpoints-*": LATE,
    "faults-copies-*": LATE,
    "faults-injected-*": {},
    "faults-lost-worker-*": LATE,
    "faults-lost-pipeline-*": APART,
    "faults-training-*": APART,
}
"""What was asked for beside sizes and schedule, of records with several pipelines."""

OTHERS = {
    "statistics-2026-11-24": "ways of training, each named with its warm-up",
    "one_card-*": "timed within the warm-up, as the page says, and without avgpipe",
    "papers-real-*": "a fifth of each run waits, as the page says",
    "elastic_averaging-*": "no plan: replicas in a loop of one's own",
    "families-*": "one pipeline",
    "models-*": "one pipeline",
    "kernels-*": "no plan",
    "links-*": "no plan",
    "transfers-*": "no plan",
    "overlap-launches-*": "a device that does nothing: no training",
    "overlap-audit-*": "timed, with and without the audit",
    "report-page-*": "no plan",
    "slips-*": "staleness 0, as the page says: equality with one device is asked",
    "hosts-*": "timed, as the page says without the warm-up, and within it",
    "faults-pauses-*": "timed, around faults",
    "versions-*": "timed, in both versions alike",
    "simulation-*": "simulated: no training",
}


@pytest.fixture(autouse=True)
def shipped(monkeypatch):
    """The rounds of warm-up that a user's plan has, not those of these tests."""
    monkeypatch.setattr(rules, "WARMUP_ROUNDS", runpy.run_path(rules.__file__)["WARMUP_ROUNDS"])


def shown():
    """The records of each page that the overview's table of numbers links to, by the page."""
    overview = (ROOT / "docs" / "results.md").read_text()
    table = overview.partition("## The numbers that matter")[2].partition("\n## ")[0]
    found = {}
    for page in dict.fromkeys(re.findall(r"^\| \[[^]]*\]\(([^)#]*)", table, re.MULTILINE)):
        marks = re.findall("<!-- generated: (.*?) -->", (ROOT / "docs" / page).read_text())
        names = dict.fromkeys(name for mark in marks for name in mark.split()[1:])
        found[page] = [
            path.stem for name in names for path in sorted(pages.RECORDS.glob(f"{name}.json"))[-1:]
        ]
    return found


def of(record, table):
    return next((key for key in table if fnmatch(record, key)), None)


def plans_in(value):
    """The plans of avgpipe with several pipelines that a record holds."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return
    if {"stages", "pipelines", "rule", "staleness"} <= value.keys():
        if value["system"] == "avgpipe" and value["pipelines"] > 1:
            yield value
        return
    for part in value.values():
        yield from plans_in(part)


def recorded(name):
    """The plans of a record: those that it holds, or else what was the default on its day."""
    record = pages.load(name)
    held = [json.dumps({"warmup_rounds": 0, **plan}) for plan in plans_in(record)]
    if held:
        return [avgpipe.Plan.from_json(text) for text in dict.fromkeys(held)]
    # A suite's steps have dates of their own.
    date = record["steps"]["pipelines"]["time"][:10] if name.startswith("gpu_suite") else record["date"]
    then = [options for last, options in EARLIER.items() if date <= last]
    asked = {key: value for key, value in HEADLINES[of(name, HEADLINES)].items() if key == "isolate"}
    return [avgpipe.Plan(pipelines=2, micro_batches=4, **{**asked, **(then[0] if then else {})})]


def learnt(plan):
    return {name: getattr(plan, name) for name in LEARNT}


HEADED = [(page, record) for page, records in shown().items() for record in records if of(record, HEADLINES)]


def test_every_record_of_a_headline_is_known_to_have_several_pipelines_or_not():
    tables = {**HEADLINES, **OTHERS}
    assert [record for records in shown().values() for record in records if not of(record, tables)] == []


@pytest.mark.parametrize(("page", "record"), HEADED)
def test_plans_are_the_defaults_and_what_the_page_names(page, record):
    named = HEADLINES[of(record, HEADLINES)]
    for plan in recorded(record):
        sizes = {name: getattr(plan, name) for name in SIZES}
        assert learnt(plan) == learnt(avgpipe.Plan(**sizes, **named))
    text = (ROOT / "docs" / page).read_text()
    missing = [word for name, value in named.items() if (word := f"{name}={json_word(value)}") not in text]
    assert missing == [], f"{page} does not say that the plans of {record} had this beside the defaults"


def json_word(value):
    return f'"{value}"' if isinstance(value, str) else str(value)


def test_a_plan_with_another_setting_is_noticed():
    late = avgpipe.Plan(stages=2, pipelines=2, warmup_rounds=0)
    assert learnt(late) != learnt(avgpipe.Plan(stages=2, pipelines=2))
    assert next(plans_in({"rows": [{"plan": json.loads(late.to_json())}]}))["warmup_rounds"] == 0
