"""The place that wheels are tried in. Needs root, for mounts."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from tools.without_compilers import EXAMPLE, WORK, Interpreter, make_place, no_compiler

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts, which needs root and util-linux"
    ),
]


@pytest.fixture(scope="module")
def python():
    return Interpreter.of(sys.executable)


@pytest.fixture
def place(tmp_path, python):
    return make_place(tmp_path, python, reuses=False)


@pytest.mark.ranks
def test_no_compiler_is_there(place, python):
    no_compiler(place, python)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", ["cc", "x86_64-linux-gnu-g++-12", "clang-14", "cmake", "ninja", "nvcc"])
def test_a_compiler_that_is_there_is_found(name, place, python):
    (place.work / name).write_text("#!/bin/sh\n")
    (place.work / name).chmod(0o755)
    with pytest.raises(SystemExit, match=f"\n{WORK}/{name}".replace("+", r"\+")):
        no_compiler(place, python)


@pytest.mark.ranks
def test_what_the_place_shows_of_the_system_cannot_be_written_and_the_rest_is_not_there(place, python):
    code = f"""
import os
assert not os.path.exists({str(EXAMPLE)!r})
for folder in ("/etc", {python.base!r}):
    try:
        open(folder + "/written-by-a-test", "w")
    except OSError as error:
        print(error.strerror)
open("{WORK}/written", "w")
"""
    assert place.inside(python.executable, "-c", code).splitlines() == ["Read-only file system"] * 2
    assert (place.work / "written").exists()
