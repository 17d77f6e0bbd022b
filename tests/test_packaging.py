"""The source distribution is complete: a wheel builds from it alone, and works where the checkout is not."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import avgpipe

pytestmark = pytest.mark.timeout(600)  # of which a minute or two is the build

ROOT = Path(__file__).parents[1]
# Not of the source: hidden folders, and what .gitignore names.
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__", "*.so")
STRAY = [
    ".git/config",
    ".venv/bin/tool.py",
    "avgpipe_ext/libavgpipe.so",
    "avgpipe_ext/_native.cpython-311-x86_64-linux-gnu.so",
    "build/lib/avgpipe/removed.py",
    "build/native/CMakeCache.txt",
    "csrc/tests/__pycache__/sass.cpython-311.pyc",
    "dist/avgpipe-0.0.1.tar.gz",
    "examples/__pycache__/translate.cpython-311.pyc",
    "python/avgpipe/__pycache__/plan.cpython-311.pyc",
    "runs/demo/plan.json",
]
EARLIER_BUILD = f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
# As an isolated build: it sees the tools, but not torch.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from setuptools import build_meta; "
PROBE = """
import runpy, sys
import avgpipe, avgpipe_ext._library
runpy.run_path(sys.argv[1], run_name="__main__")
print(avgpipe.__file__, avgpipe_ext._library.PATH, sep="\\n")
"""


def run(*command, cwd: Path) -> subprocess.CompletedProcess[str]:
    """In an environment that does not lead to the checkout."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env = {**kept, "AVGPIPE_CUDA": "0", "OMP_NUM_THREADS": "1"}
    return subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True)


def output(*command, cwd: Path) -> str:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the checkout, with files that are not of the source."""
    folder = tmp_path_factory.mktemp("checkout") / "avgpipe"
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
    for name in STRAY:
        write(folder / name)
    return folder


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory):
    """The archive. It takes no torch to make it."""
    folder = tmp_path_factory.mktemp("sdist")
    steps = f"build_meta.get_requires_for_build_sdist(); build_meta.build_sdist({str(folder)!r})"
    output(sys.executable, "-c", WITHOUT_TORCH + steps, cwd=checkout)
    (archive,) = folder.iterdir()
    return archive


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory):
    parent = tmp_path_factory.mktemp("unpacked")
    output("tar", "-xf", sdist, cwd=parent)
    (folder,) = parent.iterdir()
    return folder


@pytest.fixture(scope="module")
def wheel(unpacked, tmp_path_factory):
    """Built from the source distribution alone, in a folder with the remains of an earlier build elsewhere."""
    write(unpacked / EARLIER_BUILD / "avgpipe" / "removed.py")
    write(unpacked / "build/native/CMakeCache.txt", "CMAKE_HOME_DIRECTORY:INTERNAL=/elsewhere\n")
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir", "--wheel-dir", folder)
    output(sys.executable, "-m", "pip", "wheel", *options, unpacked, cwd=folder)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """bin/ of a new environment with the wheel; torch and the like are those of the running interpreter."""
    folder = tmp_path_factory.mktemp("environment")
    output(sys.executable, "-m", "venv", folder, cwd=folder)
    python = folder / "bin" / "python"
    output(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    # These folders come after that of the wheel, and their own .pth files, such as that of an editable avgpipe, are
    # not read.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    return folder / "bin"


@pytest.mark.ranks
def test_the_source_distribution_has_what_the_build_reads_and_nothing_stray(sdist, checkout):
    with tarfile.open(sdist) as archive:
        names = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    sources = [path for path in (checkout / "csrc").rglob("*") if path.is_file()]
    needed = {str(path.relative_to(checkout)) for path in sources} - set(STRAY)
    needed |= {"CMakeLists.txt", "setup.py", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md"}
    needed |= {"docs/commands.md", "examples/skip_connection.py", "avgpipe_ext/py.typed"}
    assert sorted(needed - names) == []
    assert sorted(names & set(STRAY)) == []
    stray = re.compile(r"\.(so|pyc|o)$|(^|/)(build|dist|runs|__pycache__|\.[^/]*)/|^tests/")
    assert sorted(filter(stray.search, names)) == []


@pytest.mark.ranks
@pytest.mark.slow
def test_the_wheel_has_the_libraries_and_nothing_of_an_earlier_build(wheel, unpacked):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = [
        (unpacked / "python", "avgpipe"),
        (unpacked / "python", "avgpipe_lab"),
        (unpacked, "avgpipe_ext"),
    ]
    modules = {str(p.relative_to(top)) for top, package in sources for p in (top / package).rglob("*.py")}
    libraries = {"avgpipe_ext/libavgpipe.so", f"avgpipe_ext/_native{sysconfig.get_config_var('EXT_SUFFIX')}"}
    typed = {"avgpipe/py.typed", "avgpipe_lab/py.typed", "avgpipe_ext/py.typed", "avgpipe_ext/_native.pyi"}
    page = {f"avgpipe/timeline/static/page.{suffix}" for suffix in ("css", "html", "js")}
    assert names == modules | libraries | typed | page


@pytest.mark.ranks
@pytest.mark.slow
def test_an_example_runs_with_the_installed_wheel(environment, unpacked, tmp_path):
    script = unpacked / "examples" / "skip_connection.py"
    *lines, package, library = output(environment / "python", "-c", PROBE, script, cwd=tmp_path).splitlines()
    assert Path(package).is_relative_to(environment.parent), package
    assert Path(library).is_relative_to(environment.parent), library
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", "\n".join(lines))]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 5


@pytest.mark.ranks
def test_the_installed_command_finds_everything_it_needs(environment, tmp_path):
    assert '"usable": true' in output(environment / "avgpipe", "doctor", "--json", cwd=tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize("step", ["prepare_metadata_for_build_wheel", "prepare_metadata_for_build_editable"])
def test_without_torch_the_build_stops_before_it_lists_its_dependencies(step, checkout, tmp_path):
    """pip asks for the metadata, and then downloads what they name, before it builds."""
    done = run(sys.executable, "-c", f"{WITHOUT_TORCH}build_meta.{step}({str(tmp_path)!r})", cwd=checkout)
    assert done.returncode == 1
    assert "An isolated build does not see the environment's torch" in done.stderr
    assert f"pip install {tools()}\n" in done.stderr
    assert "pip install --no-build-isolation .\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


STOPS = {
    "sysconfig.get_config_vars(); sys.platform = 'darwin'": "Linux alone is supported, and this is darwin;",
    "os.environ.pop('CXX', None); os.environ['PATH'] = '/nowhere'": "needs a C++20 compiler, and none is on PATH",
    "os.environ['AVGPIPE_LOCAL_VERSION'] = 'CPU build'": "AVGPIPE_LOCAL_VERSION is 'CPU build'; use small letters",
}


@pytest.mark.ranks
@pytest.mark.parametrize("lack", STOPS)
def test_what_cannot_be_built_is_refused_before_it_lists_its_dependencies(lack, checkout, tmp_path):
    code = f"import os, sys, sysconfig; from setuptools import build_meta; {lack}; "
    done = run(
        sys.executable,
        "-c",
        f"{code}build_meta.prepare_metadata_for_build_wheel({str(tmp_path)!r})",
        cwd=checkout,
    )
    assert done.returncode == 1
    assert STOPS[lack] in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.ranks
def test_a_wheel_says_in_its_version_alone_which_of_several_it_is(checkout, tmp_path):
    code = "import os; from setuptools import build_meta; os.environ['AVGPIPE_LOCAL_VERSION'] = 'cu130'; "
    output(
        sys.executable,
        "-c",
        f"{code}build_meta.prepare_metadata_for_build_wheel({str(tmp_path)!r})",
        cwd=checkout,
    )
    assert [path.name for path in tmp_path.glob("*.dist-info")] == [
        f"avgpipe-{avgpipe.__version__}+cu130.dist-info"
    ]


@pytest.mark.ranks
def test_every_place_has_the_version_of_the_package(environment, sdist, tmp_path):
    code = (
        "import importlib.metadata, avgpipe, avgpipe_ext; print(importlib.metadata.version('avgpipe'), "
        "avgpipe.__version__, avgpipe_ext.build_info()['version'])"
    )
    assert {*output(environment / "python", "-c", code, cwd=tmp_path).split()} == {avgpipe.__version__}
    assert output(environment / "avgpipe", "--version", cwd=tmp_path) == f"avgpipe {avgpipe.__version__}\n"
    assert sdist.name == f"avgpipe-{avgpipe.__version__}.tar.gz"


def tools() -> str:
    """The build requirements of pyproject.toml, quoted for a shell."""
    (text,) = re.findall(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return " ".join(re.sub(r'"(.*>.*)"', r"'\1'", word).strip('"') for word in text.split(", "))


@pytest.mark.parametrize("name", ["README.md", "Makefile"])
def test_whoever_names_the_build_tools_names_those_of_pyproject(name):
    assert f"{tools()}\n" in (ROOT / name).read_text().replace('"', "'")
