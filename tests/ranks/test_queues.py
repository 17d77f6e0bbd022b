"""Streams have hardware queues of their own: 32 are asked for, before CUDA starts, and never over a user's number."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from avgpipe.ranks.launch import run_on_ranks
from avgpipe.ranks.queues import VARIABLE, ask_for_queues, queue_environment, warn_of_few_queues

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, "before")  # so that it is put back
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))


def has_started(monkeypatch: pytest.MonkeyPatch, started: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)


def test_a_process_asks_for_them_before_it_uses_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    has_started(monkeypatch, False)
    ask_for_queues(torch.device("cpu"), 4)
    assert VARIABLE not in os.environ
    ask_for_queues(CUDA, 1)
    assert os.environ[VARIABLE] == "32"


def test_a_user_s_number_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    has_started(monkeypatch, False)
    monkeypatch.setenv(VARIABLE, "4")
    ask_for_queues(CUDA, 4)
    assert os.environ[VARIABLE] == "4"
    assert queue_environment() == {}


@pytest.mark.parametrize(("lanes", "warnings"), [(1, 0), (2, 1)])
def test_several_lanes_are_warned_where_cuda_has_started(
    lanes: int, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_started(monkeypatch, True)
    with caplog.at_level(logging.WARNING, "avgpipe"):
        ask_for_queues(CUDA, lanes)
    assert len(caplog.records) == warnings
    assert all(f"{VARIABLE}=32" in record.getMessage() for record in caplog.records)
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("asked", "communicators", "said"),
    [("32", 4, None), ("1", 0, None), ("1", 4, f"{VARIABLE}=1"), (None, 4, "8 hardware queues")],
)
def test_communicators_are_warned_of_queues_that_they_would_share_with_lanes(
    asked: str | None,
    communicators: int,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where a user has chosen 1 for another library."""
    if asked is not None:
        monkeypatch.setenv(VARIABLE, asked)
    with caplog.at_level(logging.WARNING, "avgpipe"):
        warn_of_few_queues(communicators)
    assert [said in record.getMessage() for record in caplog.records] == ([] if said is None else [True])


def test_processes_under_mps_get_fewer(tmp_path: Path) -> None:
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}\n")
    assert queue_environment() == {VARIABLE: "16"}


@pytest.mark.ranks
def test_launched_ranks_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"name": VARIABLE}
    assert run_on_ranks("tests.ranks.targets:variable", 1, named) == ["32"]
    monkeypatch.setenv(VARIABLE, "2")
    assert run_on_ranks("tests.ranks.targets:variable", 1, named) == ["2"]
