"""Installs a wheel and trains with it where there is no compiler. Linux, as root.

python tools/without_compilers.py WHEEL [--python PYTHON] [--torch torch==2.13.0]

The place is a separate root folder in a mount namespace, as in a container: the system's shared libraries and
/etc, the Python of PYTHON, a few small commands, all of them read-only, and an empty folder to work in. There
it makes a virtual environment; lets pip install the wheel and, from the package index, its dependencies, as
wheels only; imports it; runs `avgpipe doctor`; trains a tiny model with two stages and two pipelines; and
runs an example on two workers. With --torch, torch is also from the index; otherwise PYTHON's packages are
visible. A compiler or a build tool anywhere below that root is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

EXAMPLE = Path(__file__).parents[1].resolve() / "examples" / "skip_connection.py"
COMMANDS = ("sh", "env", "cat", "ls", "mkdir", "rm", "uname", "nproc")
# Settings of pip from the environment; a folder of PIP_FIND_LINKS is visible, too.
KEPT = (
    *("PIP_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT", "PIP_DEFAULT_TIMEOUT", "SSL_CERT_FILE"),
    *("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"),
)
# Path of the environment below the root, which is no folder of the system.
WORK = "/without-compilers"
PATIENCE_S = 900
# Finds programs that compile or build, in all folders but the kernel's.
LOOK = r"""
import os, re
name = r"([a-z0-9_]+-)*(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|cc1|cc1plus|cmake|ninja|nvcc|nvc\+\+|icpx|tcc)(-[0-9.]+)?"
for folder, below, files in os.walk("/"):
    if folder == "/":
        below[:] = sorted({*below} - {"proc", "sys", "dev"})
    for file in filter(re.compile(name).fullmatch, files):
        path = os.path.join(folder, file)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            print(path)
"""
ASK = """
import json, os, site, sys
executable, library = os.path.realpath(sys.executable), os.path.dirname(os.__file__)
print(json.dumps([executable, sys.base_prefix, library, site.getsitepackages()]))
"""
VERSIONS = """
import sys, torch, avgpipe, avgpipe_ext
print("Python", sys.version.split()[0], "torch", torch.__version__, "avgpipe", avgpipe.__version__)
print(avgpipe_ext.build_info())
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python and its folders: installation, standard library, packages."""

    executable: str
    base: str
    library: str
    packages: list[str]

    @classmethod
    def of(cls, python: str) -> Interpreter:
        done = subprocess.run([python, "-c", ASK], check=True, capture_output=True, text=True)
        return cls(*json.loads(done.stdout))

    @property
    def parts(self) -> list[Path]:
        """Return the files and folders that it needs to run."""
        return [Path(self.executable), Path(self.library)] if self.base == "/usr" else [Path(self.base)]


@dataclass(frozen=True)
class Place:
    """A root folder, with parts of the system mounted read-only under the same paths."""

    root: Path
    shown: tuple[Path, ...]

    @property
    def work(self) -> Path:
        return self.root / WORK.strip("/")

    def inside(self, *command: str) -> str:
        """Run a command there and return its output; a failure ends this program and prints the output."""
        lines = [self._mount(path, "bind", read_only=True) for path in self.shown]
        lines += [self._mount(Path(path), "rbind", read_only=False) for path in ("/proc", "/dev")]
        env = {name: os.environ[name] for name in KEPT if name in os.environ}
        env |= {"PATH": f"{WORK}/venv/bin:/usr/bin:/bin", "HOME": WORK, "OMP_NUM_THREADS": "1"}
        words = [
            "chroot",
            str(self.root),
            "/usr/bin/env",
            "-i",
            *(f"{k}={v}" for k, v in env.items()),
            *command,
        ]
        script = "\n".join(["set -eu", *lines, f"exec {shlex.join(words)}"])
        began = time.monotonic()
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=PATIENCE_S
        )
        print(f"{time.monotonic() - began:6.1f} s  {shlex.join(command)[:110].splitlines()[0]}", flush=True)
        if done.returncode:
            sys.exit(f"{done.stdout}{done.stderr}\ntools/without_compilers.py: exit code {done.returncode}")
        return done.stdout

    def _mount(self, path: Path, how: str, *, read_only: bool) -> str:
        source, target = shlex.quote(str(path)), shlex.quote(str(self.root / path.relative_to("/")))
        remount = f"\nmount -o remount,bind,ro {target}" if read_only else ""
        return f"mount --{how} {source} {target}{remount}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, help="the wheel, for PYTHON's version")
    parser.add_argument("--python", default=sys.executable, help="interpreter to make the environment of")
    parser.add_argument("--torch", metavar="REQUIREMENT", help="such as torch==2.13.0 (default: PYTHON's)")
    chosen = parser.parse_args(arguments)
    if not chosen.wheel.is_file():
        parser.error(f"there is no file {chosen.wheel}; make wheels builds some")
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        parser.error("makes a mount namespace, which needs root and util-linux's unshare")
    python = Interpreter.of(chosen.python)
    with tempfile.TemporaryDirectory(prefix="avgpipe-without-compilers-") as folder:
        place = make_place(Path(folder), python, reuses=chosen.torch is None)
        shutil.copy(chosen.wheel, place.work)
        shutil.copy(EXAMPLE, place.work)
        no_compiler(place, python)
        install(place, python, chosen.wheel.name, chosen.torch)
        use(place)
        no_compiler(place, python)
    print(f"{chosen.wheel.name}: installed and trained without a compiler")


def make_place(root: Path, python: Interpreter, *, reuses: bool) -> Place:
    """Make the root's folders, empty. With ``reuses`` the interpreter's packages are visible, too."""
    libraries = [*Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/lib64")]
    commands = [Path(found) for name in COMMANDS if (found := shutil.which(name, path="/usr/bin"))]
    packages = [Path(p) for p in python.packages] if reuses else []
    folders = [Path(word) for word in os.environ.get("PIP_FIND_LINKS", "").split()]
    wanted = [*libraries, Path("/etc"), *python.parts, *commands, *packages, *folders]
    shown = tuple(dict.fromkeys(path for path in wanted if path.is_absolute() and path.exists()))
    for path in (*shown, Path("/proc"), Path("/dev")):
        target = root / path.relative_to("/")
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
    for name in ("bin", "lib", "lib64"):  # distributions may have one folder for both
        if Path("/", name).is_symlink():
            (root / name).symlink_to(f"usr/{name}")
    (root / WORK.strip("/")).mkdir()
    (root / "tmp").mkdir(exist_ok=True)  # a checkout may be there
    return Place(root, shown)


def no_compiler(place: Place, python: Interpreter) -> None:
    found = place.inside(python.executable, "-c", LOOK)
    if found:
        sys.exit(f"tools/without_compilers.py: the root must not contain compilers, but has\n{found}")


def install(place: Place, python: Interpreter, wheel: str, torch: str | None) -> None:
    place.inside(python.executable, "-m", "venv", f"{WORK}/venv")
    pip = (f"{WORK}/venv/bin/pip", "install", "--quiet", "--no-cache-dir", "--only-binary=:all:")
    if torch is None:
        (packages,) = (place.work / "venv").glob("lib/python*/site-packages")
        (packages / "theirs.pth").write_text("\n".join(python.packages))
    else:
        place.inside(*pip, torch)
    # Only this file, not another package of the same name; then its dependencies.
    place.inside(*pip, "--no-deps", "--no-index", f"{WORK}/{wheel}")
    place.inside(*pip, f"{WORK}/{wheel}")


def use(place: Place) -> None:
    print(place.inside("python", "-c", VERSIONS), end="")
    found = json.loads(place.inside("avgpipe", "doctor", "--json"))
    if not found["usable"]:
        sys.exit(f"tools/without_compilers.py: avgpipe doctor says\n{json.dumps(found, indent=2)}")
    sizes = (
        "--stages",
        "2",
        "--pipelines",
        "2",
        "--micro-batches",
        "4",
        "--max-batches",
        "10",
        "--valid-batches",
        "5",
    )
    place.inside("avgpipe", "train", "awd-lstm", "--preset", "tiny", *sizes, "--out", f"{WORK}/run")
    summary = json.loads((place.work / "run/summary.json").read_text())
    if summary["batches"] != 10:
        sys.exit(
            f"tools/without_compilers.py: 10 batches were requested, but {summary['batches']} were trained"
        )
    print(place.inside("avgpipe", "run", "--stages", "2", f"{WORK}/{EXAMPLE.name}"), end="")


if __name__ == "__main__":
    main()
