"""Loading the engine, and what it refuses."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from avgpipe.planning import engine as native
from avgpipe.planning.costs import Costs
from avgpipe.planning.engine import compile_schedule, run
from avgpipe.schedule import build_schedule
from avgpipe.schedule.one_stage import from_warm_ups

PROGRAM = """
import sys
sys.path[:0] = {path!r}
sys.modules["torch"] = None  # as where there is none
from avgpipe import Costs, build_schedule, simulate
try:
    print(simulate(build_schedule("1f1b", 2, 2), Costs(1, 2)).makespan_s)
except ImportError as error:
    print(error)
"""
FILE = Path(native.engine().__file__)


def output_of(folder=None):
    """Of a process without torch that simulates; with ``avgpipe_ext`` from a folder."""
    path = [str(folder)] if folder else []
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(path=path)], capture_output=True, text=True, check=True
    ).stdout


def copied(tmp_path):
    """Where the engine belongs in a copy of the package that lacks it."""
    copy = tmp_path / "avgpipe_ext"
    shutil.copytree(FILE.parent, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return copy / FILE.name


@pytest.mark.promise
def test_it_needs_no_torch():
    assert output_of() == "9.0\n"


def test_it_is_linked_with_nothing_of_torch():
    listed = subprocess.run(["ldd", FILE], capture_output=True, text=True, check=True).stdout
    needed = {line.split()[0] for line in listed.splitlines() if "=>" in line}
    assert not [name for name in needed if name.startswith(("libtorch", "libc10", "libcudart"))]


def test_it_is_the_module_that_torch_users_import():
    from avgpipe_ext import _native

    assert _native is native.engine()


@pytest.mark.promise
def test_a_missing_library_is_one_line_that_says_how_to_build(tmp_path):
    place = copied(tmp_path)
    assert output_of(tmp_path) == (
        f"{place.parent / '__init__.py'} has no _native module for Python "
        f"{sys.version_info.major}.{sys.version_info.minor}: "
        "run `pip install --no-build-isolation -e .` in the folder of setup.py\n"
    )


@pytest.mark.ranks
def test_a_damaged_library_is_one_line_too(tmp_path):
    place = copied(tmp_path)
    place.write_text("no library")
    output = output_of(tmp_path)
    assert output.count("\n") == 1
    assert output.startswith(f"{place} cannot be loaded (")
    assert "pip install --no-build-isolation" in output


# ---- what it refuses ----------------------------------------------------------------------------------------
def simulate(**changes):
    question = compile_schedule(build_schedule("1f1b", 2, 3), Costs(1, 2))
    fields = {**question, "pipelines": 1, "batches": 1, **changes}
    return native.engine().simulate(
        events=False, **{name: value for name, value in fields.items() if value is not None}
    )


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"replicas": None}, TypeError, r"simulate\(\) needs replicas"),
        ({"stages": None}, TypeError, r"simulate\(\) needs stages"),
        ({"speed": 3}, TypeError, "got .* fields, know"),
        ({"replicas": np.zeros(2, dtype=np.int64)}, TypeError, "replicas: use a contiguous array of int32"),
        ({"replicas": [0, 1]}, TypeError, "replicas: use a contiguous array of int32"),
        (
            {"replicas": np.zeros(4, dtype=np.int32)[::2]},
            TypeError,
            "replicas: use a contiguous array of int32",
        ),
        ({"replicas": np.zeros(3, dtype=np.int32)}, ValueError, "replicas has 3 numbers, not 2"),
    ],
)
def test_fields_that_do_not_fit_are_named(changes, error, words):
    with pytest.raises(error, match=words):
        simulate(**changes)


def test_a_schedule_that_gets_stuck_is_refused():
    with pytest.raises(ValueError, match=r"gets stuck: call Schedule.validate\(\)"):
        run(compile_schedule(from_warm_ups("stuck", 3, [1, 3]), Costs(1, 2)), 1, 1)


def test_times_too_long_to_count_are_refused():
    with pytest.raises(OverflowError, match="too long to count"):
        simulate(sum_ticks=np.full(2, 2**58 - 1), batches=64)
