"""The busy share of each worker, beside the timeline; and what a notebook shows of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from avgpipe import Pipeline, Plan
from avgpipe.timeline import Timeline
from tests.runner import run
from tests.runtime.cases import language_model
from tests.runtime.test_distances import SHAPES, trained


def plain(pipeline: Pipeline, first_batch: int) -> list[float]:
    """From all events; of each worker's own record."""
    whole = pipeline.timeline()
    events = [event for event in whole.events if event.batch >= first_batch]
    rows = [tuple(e._replace(worker=0) for e in events if e.worker == k) for k in range(whole.stages)]
    return [Timeline(1, row).worker_busy_fraction[0] for row in rows]


@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize("first_batch", [0, 4])
def test_shares_are_those_of_the_timeline(options: dict[str, Any], first_batch: int) -> None:
    with trained(options, language_model()) as pipeline:
        assert pipeline.busy_fractions(first_batch) == pytest.approx(plain(pipeline, first_batch), rel=1e-6)


def test_after_the_last_batch_no_worker_was_busy() -> None:
    with trained(SHAPES[2], language_model()) as pipeline:
        assert pipeline.busy_fractions(pipeline.batches) == [0.0, 0.0, 0.0]


def on_ranks(options: dict[str, Any]) -> list[float]:
    with trained(options, language_model()) as pipeline:
        found = pipeline.busy_fractions()
        assert found == pytest.approx(plain(pipeline, 0), rel=1e-6)
    return found


@pytest.mark.ranks
def test_all_ranks_learn_them() -> None:
    first, *others = run(Plan(**SHAPES[1]).workers, on_ranks, options=SHAPES[1])
    assert all(other == first for other in others)
    assert all(0 < share <= 1 for share in first)


@pytest.mark.host  # the stand-in of a device has another name
def test_a_notebook_shows_plan_cut_and_device_as_text() -> None:
    with trained(SHAPES[0], language_model()) as pipeline:
        shown = pipeline._repr_html_()
    for name, value in {"pipelines": "2", "device": "cpu", "layers of the stages": "0..6"}.items():
        assert f"<tr><th>{name}</th><td>{value}</td></tr>" in shown
