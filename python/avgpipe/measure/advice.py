"""One sentence on what to do, from what tuning found."""

from __future__ import annotations

from avgpipe.measure.result import DATA_PARALLEL, ONE_DEVICE, PIPELINE, Row, Tuning

CLOSE = 0.05  # plans of one machine differ by as much from run to run


def advice(found: Tuning) -> str:
    """The simplest of the plans that are hardly slower than the fastest: one device, then data parallelism.

    What was measured is not compared with what was only predicted.
    """
    rows = {row.what: row for row in reversed(found.rows) if bool(row.trial) == bool(found.best.trial)}
    one, parallel, pipeline = (rows.get(what) for what in (ONE_DEVICE, DATA_PARALLEL, PIPELINE))
    fastest = found.best.batch_s
    if one is not None and one.batch_s <= fastest * (1 + CLOSE):
        return f"Advice: one device is enough: {_against(found, one, parallel or pipeline)}."
    if parallel is not None and parallel.batch_s <= fastest * (1 + CLOSE):
        return f"Advice: use data parallelism here: {_against(found, parallel, pipeline)}."
    sentence = f"use the pipeline, {_against(found, found.best, parallel)}"
    if found.of(DATA_PARALLEL) is None and found.workers > 1:
        sentence += "; the whole model does not fit into each worker"
    if found.best.plan.pipelines > 1:
        sentence += (
            f"; its {found.best.plan.pipelines} pipelines make one update of the reference from as many batches, so "
            "compare what it learns, too"
        )
    return f"Advice: {sentence}."


def _against(found: Tuning, row: Row, other: Row | None) -> str:
    """Samples a second of a row, and how another one compares."""
    speed = f"{found.samples_per_s(row):.4g} samples/s{'' if row.trial else ' predicted'}"
    if other is None or other is row:
        return speed
    return f"{speed}, {other.what} {found.samples_per_s(other):.4g}"
