"""Loading the engine."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from avgpipe.planning import native

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


def output_of(folder=None):
    """Of a process without torch that simulates; with ``avgpipe_ext`` from a folder."""
    path = [str(folder)] if folder else []
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(path=path)], capture_output=True, text=True, check=True
    ).stdout


def copied(tmp_path):
    copy = tmp_path / "avgpipe_ext"
    source = native.path().parent
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return copy / "libsimulate.so"


def test_it_needs_no_torch():
    assert output_of() == "9.0\n"


def test_it_needs_neither_torch_nor_python_to_be_linked():
    listed = subprocess.run(["ldd", native.path()], capture_output=True, text=True, check=True).stdout
    needed = {line.split()[0] for line in listed.splitlines() if "=>" in line}
    assert not [name for name in needed if name.startswith(("libpython", "libtorch", "libc10", "libcudart"))]


def test_a_missing_library_is_one_line_that_says_how_to_build(tmp_path):
    place = copied(tmp_path)
    assert output_of(tmp_path) == (
        f"{place} is missing: build it with `pip install --no-build-isolation -e .` in the folder of setup.py\n"
    )


def test_a_damaged_library_is_one_line_too(tmp_path):
    place = copied(tmp_path)
    place.write_text("no library")
    output = output_of(tmp_path)
    assert output.count("\n") == 1
    assert output.startswith(f"{place} cannot be loaded (")
    assert "pip install --no-build-isolation" in output


@pytest.mark.parametrize("name", ["Question", "Answer"])
def test_structs_have_the_fields_of_the_header(name):
    header = Path(__file__).parents[2] / "csrc/simulate/question.h"
    text = header.read_text().split(f"struct {name} {{")[1].split("};")[0]
    lines = [line.split("//")[0].strip() for line in text.splitlines()]
    wanted = []
    for line in filter(None, lines):
        kind, names = line.rstrip(";").removeprefix("const ").split(" ", 1)
        for field in names.split(", "):
            pointer = kind.endswith("*")
            wanted.append(
                (
                    field,
                    ctypes.c_void_p if pointer else {"uint64_t": ctypes.c_uint64}.get(kind, ctypes.c_int64),
                )
            )
    assert list(getattr(native, name)._fields_) == wanted


def test_records_have_the_size_of_the_header():
    assert native.RECORD.itemsize == 32
