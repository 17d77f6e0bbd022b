"""Wall limits of tests grow with the load."""

from __future__ import annotations

import os

import pytest

from tests import patience
from tests.patience import VARIABLE, Deadline, limit, wait_until


@pytest.fixture(autouse=True)
def _idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(patience, "_wanting", lambda: 0.0)


def test_on_an_idle_machine_a_limit_is_what_is_written() -> None:
    assert limit(3) == 3


def test_twenty_processes_for_each_core_make_it_twenty_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_wanting", lambda: 20.0 * len(os.sched_getaffinity(0)))
    assert limit(3) == 60


def test_the_variable_is_stronger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "2.5")
    assert limit(2) == 5


def test_a_deadline_grows_and_does_not_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = Deadline(10)
    assert 9 < deadline.left_s <= 10
    monkeypatch.setenv(VARIABLE, "3")
    assert 29 < deadline.left_s <= 30
    monkeypatch.setenv(VARIABLE, "1")
    assert 29 < deadline.left_s <= 30
    assert Deadline(0).has_passed


def test_what_comes_true_is_returned_and_what_does_not_fails() -> None:
    answers = iter([0, "", "there"])
    assert wait_until(lambda: next(answers), 10) == "there"
    with pytest.raises(AssertionError, match="did not come true in time"):
        wait_until(lambda: False, 0.02)
