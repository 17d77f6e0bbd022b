"""Builds the native libraries with CMake (see CMakeLists.txt) and packages them beside the Python code."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(f"avgpipe: setuptools {setuptools.__version__} is too old; pip install 'setuptools>=77'")
from setuptools.command.bdist_wheel import bdist_wheel

ROOT = Path(__file__).parent.resolve()
# The build requirements of pyproject.toml, quoted for a shell.
TOOLS = "'setuptools>=77' wheel 'cmake>=3.25.2' ninja 'pybind11>=3'"
FAILED = "avgpipe: the native build failed, see the messages above"
if os.environ.get("AVGPIPE_CUDA") != "0":
    FAILED += "; if they are about CUDA, AVGPIPE_CUDA=0 builds without it"


COMPILERS = ("c++", "g++", "clang++", "icpx")


def require_linux() -> None:
    if sys.platform != "linux":
        sys.exit(f"avgpipe: Linux alone is supported, and this is {sys.platform}; macOS and Windows are not")


def require_torch() -> None:
    """Stop early: once an isolated build has told its dependencies, pip would download torch."""
    if importlib.util.find_spec("torch") is None:
        sys.exit(
            "avgpipe: the build finds no torch. An isolated build does not see the environment's torch; "
            f"with torch>=2.11 installed, run\n  pip install {TOOLS}\n  pip install --no-build-isolation ."
        )


def require_compiler() -> None:
    if "CXX" not in os.environ and not any(map(shutil.which, COMPILERS)):
        sys.exit(
            "avgpipe: a build from source needs a C++20 compiler, and none is on PATH: install one (Debian and Ubuntu: "
            "apt-get install g++) or set CXX. A wheel needs none: `make wheels`, where there is a compiler, makes one "
            "for each version of Python"
        )


def version() -> str:
    """The version written in python/avgpipe/__init__.py; behind it, of a wheel, which of several it is."""
    text = (ROOT / "python/avgpipe/__init__.py").read_text()
    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if match is None:
        sys.exit('avgpipe: python/avgpipe/__init__.py has no line __version__ = "..."')
    variant = os.environ.get("AVGPIPE_LOCAL_VERSION", "")
    if not re.fullmatch(r"([a-z0-9]+(\.[a-z0-9]+)*)?", variant):
        sys.exit(
            f"avgpipe: AVGPIPE_LOCAL_VERSION is {variant!r}; use small letters, digits and dots, such as cpu or cu130"
        )
    return match.group(1) + (f"+{variant}" if variant else "")


def tool(name: str) -> str:
    """The program of the environment that builds, else the one on PATH."""
    beside = shutil.which(name, path=str(Path(sys.executable).parent))
    path = beside or shutil.which(name)
    if path is None:
        sys.exit(f"avgpipe: {name} is missing; pip install {TOOLS}")
    return path


class CMakeBuild(build_ext):
    """Builds target X for avgpipe_ext.X, and for avgpipe_ext.libX, which serves every Python: no tag in the name."""

    def get_ext_filename(self, fullname: str) -> str:
        is_library = fullname.rpartition(".")[2].startswith("lib")
        return f"{fullname.replace('.', '/')}.so" if is_library else super().get_ext_filename(fullname)

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extension(self, ext: Extension) -> None:
        build = ROOT / "build" / "native"
        self.configure(build)
        made = ext.name.removeprefix("avgpipe_ext.").removeprefix("lib")
        if subprocess.run([tool("cmake"), "--build", str(build), "--target", made]).returncode:
            sys.exit(FAILED)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(build / "lib" / target.name, target)

    def configure(self, build: Path) -> None:
        """Configure, and once more in an empty folder if that fails: paths that CMake keeps there may be gone."""
        command = [
            *(tool("cmake"), "-S", str(ROOT), "-B", str(build), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DAVGPIPE_LIBRARY_DIR={build / 'lib'}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
        ]
        configured_before = (build / "CMakeCache.txt").exists()
        failed = subprocess.run(command).returncode
        if failed and configured_before:
            print(f"avgpipe: {build} is from an earlier build: it is removed, for another try", flush=True)
            shutil.rmtree(build)
            failed = subprocess.run(command).returncode
        if failed:
            sys.exit(FAILED)

    def copy_extensions_to_source(self) -> None:
        # A process may have the old library mapped: leave it that file, and write another.
        for ext in self.extensions:
            (ROOT / self.get_ext_filename(ext.name)).unlink(missing_ok=True)
        super().copy_extensions_to_source()


class CleanWheel(bdist_wheel):
    def run(self) -> None:
        if not self.skip_build:
            # Modules removed since an earlier build would still be there, and go into the wheel.
            shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()


# A source distribution needs no torch; nor does egg_info, with which every build begins by asking what it requires.
if not {"egg_info", "sdist"}.intersection(sys.argv):
    require_linux()
    require_torch()
    require_compiler()
setup(
    version=version(),
    packages=[*find_packages("python"), "avgpipe_ext"],
    package_dir={"": "python", "avgpipe_ext": "avgpipe_ext"},
    package_data={
        "avgpipe": ["py.typed"],
        "avgpipe_lab": ["py.typed"],
        "avgpipe.timeline": ["static/*"],
        "avgpipe_ext": ["py.typed", "_native.pyi"],
    },
    ext_modules=[Extension(f"avgpipe_ext.{name}", sources=[]) for name in ("libavgpipe", "_native")],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": CleanWheel},
)
