"""Isolated pipelines that come when others train: what they do before their first turn, and what the others do then."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from tests.isolated import Isolated
from tests.options import grouped
from tests.runtime.cases import assert_same_state, language_model, token_batches
from tests.runtime.test_shared_batch import OPTIMIZERS

LOSS = nn.CrossEntropyLoss()
DATA = token_batches(12, 12)


def pipeline_of(K: int, **options: Any) -> Pipeline:
    plan = Plan(stages=K, pipelines=2, micro_batches=4, isolate=True)
    options = {"optimizer": OPTIMIZERS["adamw"], "timeout_s": 20, **options}
    return Pipeline(language_model(), plan, **grouped(loss_fn=LOSS, **options))


def assert_all_end_well(run: Isolated, K: int = 1) -> None:
    assert set(run.results) == {(i, k) for i in range(3) for k in range(K)}, (run.why, run.failures)


def wait_for_another(p: Pipeline) -> None:
    """Wait until another pipeline is to come."""
    membership = p.launcher
    with membership._lock:
        assert membership._lock.wait_for(
            lambda: any(term.donor is not None for term in membership.known.roster.terms), 20
        )


def use_at_once(K: int, what: str, folder: str) -> Any:
    """Train batch by batch; the last pipeline only uses the model. Returns states after each, and what it got."""
    comes = os.environ["AVGPIPE_PIPELINE"] == "2"
    with pipeline_of(K) as p:
        if comes:
            if what == "state":
                return p.state_dict()
            if what == "own state":
                return p.state_dict(weights=2)
            if what == "output":
                return p.predict(DATA[0][0])
            if what == "distances":
                return p.distances().to_reference
            if what == "evaluation":
                return p.evaluate(DATA[:2]).loss
            p.save(folder)
            return p.batches
        states = [p.state_dict()]
        for j, batch in enumerate(DATA):
            list(p.train([batch]))
            states.append(p.state_dict())
            if j == 5:
                wait_for_another(p)
        return states


@pytest.mark.ranks
@pytest.mark.parametrize("what", ["state", "own state", "output", "distances", "evaluation", "checkpoint"])
@pytest.mark.parametrize("K", [1, 2])
def test_a_pipeline_that_finds_nothing_left_to_train_on_has_what_the_others_have(
    what: str, K: int, tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    run = Isolated(2, K, use_at_once, restarts=0, joins=[2], joins_after=6, K=K, what=what, folder=folder)
    assert_all_end_well(run, K)
    (term,) = (term for term in run.terms if term.donor is not None)
    expected, found = run.results[0, 0][term.first], run.results[2, K - 1]
    model = language_model()
    model.load_state_dict(expected)
    assert term.first > 5
    if "state" in what:
        assert_same_state(found, expected)
    elif what == "output":
        torch.testing.assert_close(found, model(DATA[0][0]), rtol=1e-10, atol=1e-10)
    elif what == "distances":
        assert max(found) < 1e-10
    elif what == "evaluation":
        with torch.no_grad():
            losses = [float(LOSS(model(x), y)) * len(x) for x, y in DATA[:2]]
        assert abs(found - sum(losses) / sum(len(x) for x, _ in DATA[:2])) < 1e-10
    else:
        assert found == term.first
        with Pipeline(language_model(), Plan(), loss_fn=LOSS, optimizer=OPTIMIZERS["adamw"]) as p:
            p.load(folder)
            assert p.batches == term.first
            assert_same_state(p.state_dict(), expected)


def begin(K: int, folder: str, first: str, resumes: bool) -> Any:
    """Do ``first``, evaluate, ask, and train; the last pipeline comes late. What was found, and the last state."""
    comes = os.environ["AVGPIPE_PIPELINE"] == "2"
    with pipeline_of(K, verify_every=1) as p:
        if resumes:
            p.load(folder)
        if first == "state":
            p.state_dict()
        elif first == "load":
            p.load_state_dict({name: value / 2 for name, value in language_model().state_dict().items()})
        elif first == "enter":
            p.enter()
        found = (
            p.evaluate(DATA[:2]).loss,
            p.evaluate(DATA[2:4]).loss,
            p.once("who", lambda: p.launcher.pipeline),
        )
        data = DATA[-2:] * resumes + DATA
        for result in p.train(data[p.batches :]):
            if result.batch == 7 and not comes:
                wait_for_another(p)
        return found, p.state_dict()


@pytest.mark.ranks
@pytest.mark.parametrize("first", ["", "state", "load", "enter"])
@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("far", [(), (2,)], ids="far {}".format)
def test_what_all_found_before_the_first_step_is_passed_to_pipelines_that_join_later(
    first: str, resumes: bool, far: tuple[int, ...], tmp_path: Path
) -> None:
    with Pipeline(language_model(), Plan(), loss_fn=LOSS, optimizer=OPTIMIZERS["adamw"]) as p:
        list(p.train(DATA[-2:]))
        p.save(tmp_path / "saved")
    arguments = {"K": 1, "folder": str(tmp_path / "saved"), "first": first, "resumes": resumes}
    run = Isolated(2, 1, begin, restarts=0, joins=[2], joins_after=6, far=far, **arguments)
    assert_all_end_well(run)
    (found, state), *others = run.results.values()
    for theirs, its_state in others:
        assert theirs == found
        assert all(torch.equal(its_state[name], value) for name, value in state.items())


def train_behind(K: int) -> Any:
    """Train two loaders; the last pipeline thinks that the first one is not at its end. What each has found and is."""
    with pipeline_of(K, verify_every=1) as p:
        if comes := os.environ["AVGPIPE_PIPELINE"] == "2":
            p._session.feed.next_batch = 3  # the others have gone on meanwhile
        found, first = [], p.batches
        for end in (6, len(DATA)):
            for result in p.train(DATA[first:end]):
                if result.batch == 8 and not comes:
                    wait_for_another(p)
            found += [p.evaluate(DATA[:2]).loss, p.evaluate(DATA[2:4]).loss, p.once("end", lambda: end)]  # noqa: B023
            first = end
        return found, p.state_dict()


@pytest.mark.ranks
@pytest.mark.parametrize("far", [(), (2,)], ids="far {}".format)
@pytest.mark.parametrize("K", [1, 2])
def test_a_pipeline_that_is_behind_gets_what_the_others_found_there(K: int, far: tuple[int, ...]) -> None:
    run = Isolated(2, K, train_behind, restarts=0, joins=[2], joins_after=9, far=far, K=K)
    assert_all_end_well(run, K)
    assert run.terms[2].first > 8
    found, state = run.results[0, 0]
    assert found[2::3] == [6, len(DATA)]
    for theirs, its_state in run.results.values():
        assert theirs == found
        assert all(torch.equal(its_state[name], value) for name, value in state.items())


def use_then_train() -> Any:
    """Train on all; the last pipeline makes its loader, then uses the model. The batches, and what it has seen."""
    comes, seen = os.environ["AVGPIPE_PIPELINE"] == "2", []
    with pipeline_of(1, verify_every=1) as p:
        if comes:
            p._session.feed.next_batch = 3  # the others have gone on meanwhile
        first = p.batches
        if comes:
            seen = [p.evaluate(DATA[:2]).loss, p.evaluate(DATA[2:4]).loss]
        batches = []
        for result in p.train(DATA[first:]):
            batches.append(result.batch)
            if result.batch == 5 and not comes:
                wait_for_another(p)
        return batches, seen


@pytest.mark.ranks
@pytest.mark.parametrize("far", [(), (2,)], ids="far {}".format)
def test_a_loader_goes_on_where_it_was_made_though_the_model_was_used_before(far: tuple[int, ...]) -> None:
    run = Isolated(2, 1, use_then_train, restarts=0, joins=[2], joins_after=6, far=far)
    assert_all_end_well(run)
    batches, seen = run.results[2, 0]
    assert batches == list(range(run.terms[2].first, len(DATA)))
    assert seen[0] != seen[1]
    assert run.results[0, 0][0] == run.results[1, 0][0] == list(range(len(DATA)))


def step_by_step(enters: bool) -> int:
    """Train by step(); return how many batches this pipeline has had a part in."""
    comes = os.environ["AVGPIPE_PIPELINE"] == "2"
    with pipeline_of(1) as p:
        if comes and enters:
            p.enter()
        elif comes:
            p._session.feed.next_batch = 4  # the others have gone on meanwhile
        first = p.batches
        for j in range(first, len(DATA)):
            p.step(*DATA[j])
            if j == 5 and not comes:
                wait_for_another(p)
        return len(DATA) - first


@pytest.mark.ranks
@pytest.mark.parametrize("enters", [True, False])
def test_a_pipeline_that_joins_and_trains_by_steps_must_enter_first(enters: bool) -> None:
    run = Isolated(2, 1, step_by_step, restarts=0, joins=[2], joins_after=6, enters=enters)
    if enters:
        assert run.results[2, 0] == len(DATA) - run.terms[2].first
    else:
        assert "step() was given batch 4, and the run is at batch 6: call enter()" in run.failures[2, 0][1]
    assert run.results[0, 0] == run.results[1, 0] == len(DATA)


def change(K: int, how: str, folder: str) -> Any:
    """Train, change what is trained when another pipeline is about to come, and train on."""
    comes = os.environ["AVGPIPE_PIPELINE"] == "2"
    with pipeline_of(K, verify_every=1) as p:
        if comes:
            p.enter()
            losses = [r.loss for r in p.train(DATA[p.batches :])]
        else:
            losses = [r.loss for r in p.train(DATA[:6])]
            p.save(folder)
            losses += [r.loss for r in p.train(DATA[6:9])]
            wait_for_another(p)
            p.evaluate(DATA[:1])  # runs what is due, as what one that comes is given
            if how == "load":
                p.load(folder)
            elif how == "load_state_dict":
                p.load_state_dict({name: value / 2 for name, value in p.state_dict().items()})
            else:
                for optimizer in p.optimizers:
                    optimizer.param_groups[0]["lr"] *= 3
            losses += [r.loss for r in p.train(DATA[p.batches :])]
        return losses, p.state_dict()


@pytest.mark.promise(3)
@pytest.mark.parametrize("how", ["load", "load_state_dict", "rate"])
@pytest.mark.parametrize("K", [1, 2])
def test_a_pipeline_that_joins_with_the_next_step_has_what_the_others_changed_before_it(
    how: str, K: int, tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    run = Isolated(2, K, change, restarts=0, joins=[2], joins_after=9, K=K, how=how, folder=folder)
    assert_all_end_well(run, K)
    losses, state = run.results[0, 0]
    assert len(losses) == (9 + 6 if how == "load" else 12)
    for other, its_state in run.results.values():
        assert other == losses[-len(other) :]
        assert all(torch.equal(its_state[name], value) for name, value in state.items())
