"""Writes docs/design/files.md, the map of the code: every file with the first sentence of its docstring.

    python -m tools.maps [--check]

With ``--check`` nothing is written, and the exit code is 1 where the page is not what the code says.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "design" / "files.md"
_HEAD = """# Every file

What each package and file is for: the first sentence of its docstring, in the order in which imports go, from what
everything uses up to the commands. `python -m tools.maps` writes this page, and a test compares it with the code.
[Architecture](architecture.md) says how the parts work together.
"""


def sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, without its full stop."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<! al)(?<=[a-z)`\"'0-9])\. (?=[A-Z])", first)[0].rstrip(".").replace("|", "\\|")


def layers() -> list[str]:
    """Return the packages and modules of avgpipe from the lowest layer up, as pyproject.toml has them."""
    text = (ROOT / "pyproject.toml").read_text()
    block = text.partition("\nlayers = [")[2].partition("]")[0]
    names = [name for row in re.findall(r'"([^"]+)"', block) for name in re.split(" [:|] ", row)]
    return names[::-1]


def table(folder: Path) -> Iterator[str]:
    yield "| file | what it holds |"
    yield "|---|---|"
    for path in sorted(folder.rglob("*.py")):
        if path.name != "__init__.py":
            yield f"| `{path.relative_to(folder).as_posix()}` | {sentence(path)} |"


def page() -> str:
    """Return the page."""
    lines = [_HEAD]
    home = ROOT / "python" / "avgpipe"
    single = [home / f"{name}.py" for name in layers() if (home / f"{name}.py").exists()]
    lines += ["## avgpipe: single files", "", "| file | what it holds |", "|---|---|"]
    lines += [f"| `{path.name}` | {sentence(path)} |" for path in single]
    folders = [home / name for name in layers() if (home / name).is_dir()]
    lab = ROOT / "python" / "avgpipe_lab"
    folders += [lab, ROOT / "avgpipe_ext"]
    for folder in folders:
        name = folder.relative_to(ROOT / "python" if folder.is_relative_to(ROOT / "python") else ROOT)
        about = sentence(folder / "__init__.py")
        lines += ["", f"## {name.as_posix()}/", "", *([f"{about}.", ""] if about else []), *table(folder)]
    return "\n".join(lines) + "\n"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args(given).check:
        PAGE.write_text(page())
        return 0
    is_current = PAGE.exists() and PAGE.read_text() == page()
    if not is_current:
        print(f"{PAGE.relative_to(ROOT)} is not what the code says: run python -m tools.maps")
    return not is_current


if __name__ == "__main__":
    raise SystemExit(main())
