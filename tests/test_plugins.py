"""What other packages add is found by entry points; without the laboratory messages say what is missing."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Any

import pytest

import avgpipe
from avgpipe import plugins
from avgpipe.planning import Partition, Profile, partition, partition_methods
from avgpipe.tasks import find_workload, workload_names
from tests.cli.command import environment
from tests.planning.chains import layer, profile


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """The entry points that packages have, by group: none at first."""
    found: dict[str, dict[str, str]] = {}

    def points(group: str) -> dict[str, EntryPoint]:
        return {name: EntryPoint(name, value, group) for name, value in found.get(group, {}).items()}

    monkeypatch.setattr(plugins, "_found", points)
    return found


CHAIN = profile(layer(1.0, 1.0), layer(1.0, 1.0), layer(1.0, 1.0))


def halves(chain: Profile, stages: int | None = None, *, first: int = 1) -> Partition:
    layers = len(chain.layers)
    return Partition("halves", layers, [first], [1, 1], [1.0, 1.0], "time", 1.0, 1.0, 2)


def test_another_package_adds_a_partitioner(installed: Any) -> None:
    installed[plugins.PARTITIONERS] = {"halves": "tests.test_plugins:halves"}
    assert partition_methods() == ["simulated", "balance", "halves"]
    found = partition(CHAIN, 2, method="halves", first=2)
    assert found.boundaries == (2,)
    with pytest.raises(TypeError, match="method 'halves' has no such option; valid names: first"):
        partition(CHAIN, 2, method="halves", by="time")


def test_another_package_adds_a_workload(installed: Any) -> None:
    installed[plugins.WORKLOADS] = {"mine": "tests.test_plugins:SOURCE"}
    assert workload_names() == ("mine",)
    assert find_workload("mine") is SOURCE


SOURCE = object()


def test_without_the_laboratory_workloads_are_functions_of_scripts(installed: Any) -> None:
    with pytest.raises(ValueError, match="avgpipe_lab, which has those of the papers, is not installed here"):
        find_workload("gnmt")


def test_without_the_laboratory_its_names_are_missing(installed: Any) -> None:
    for name in ("compare", "Comparison"):
        avgpipe.__dict__.pop(name, None)
        with pytest.raises(ImportError, match=f"{name} is a part of avgpipe_lab, which is not installed"):
            getattr(avgpipe, name)


@pytest.mark.promise
def test_a_command_of_the_laboratory_says_that_it_is_missing() -> None:
    code = "import importlib.metadata as m; m.entry_points = lambda **_: (); from avgpipe.cli.main import main; main()"
    command = [sys.executable, "-c", code, "compare", "gnmt", "--systems", "all"]
    process = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert process.returncode == 2
    assert "avgpipe compare is a command of avgpipe_lab, which is not installed here" in process.stderr
