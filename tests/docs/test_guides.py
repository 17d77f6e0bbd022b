"""Every block of code in the guides runs: what a guide shows of an example is that example's text, which is run by its
own test or by a command of the page; the rest of a page's Python is one script; commands are run in their order.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cli.command import ROOT, environment
from tests.examples.scripts import EXAMPLES
from tests.patience import limit

GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPTS = [path.read_text() for path in sorted(EXAMPLES.glob("*.py"))]
# The first line of code that is for another library; of these only torch is there to run it with.
OTHERS = ("# DeepSpeed", "# torchgpipe")
TORCH = "# torch.distributed.pipelining"


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in BLOCK.findall(page.read_text()) if found == language]


def quoted(code: str) -> bool:
    """Whether the lines stand together in an example, at any indentation."""
    lines = textwrap.dedent(code).rstrip().splitlines()
    pattern = re.compile("\n".join(r" *" + re.escape(line.strip()) for line in lines) + "$", re.MULTILINE)
    return any(pattern.search(text) for text in SCRIPTS)


def own(page: Path) -> list[str]:
    """Blocks of Python that stand in no example and are for this library."""
    return [c for c in blocks(page, "python") if not c.startswith((*OTHERS, TORCH)) and not quoted(c)]


def run(*command: str, cwd: Path) -> str:
    # A command of the page is that of this checkout.
    words = [sys.executable, "-m", "avgpipe"] if command[0] == "avgpipe" else [command[0]]
    words = [sys.executable] if command[0] == "python" else words
    done = subprocess.run(
        [*words, *command[1:]], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=limit(300)
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


PAGES = pytest.mark.parametrize("page", GUIDES, ids=lambda p: p.stem)


@PAGES
def test_a_page_is_short_and_in_the_navigation(page):
    assert len(page.read_text().splitlines()) <= 130
    assert f"guides/{page.name}" in (ROOT / "mkdocs.yml").read_text()


def test_what_a_run_prints_is_in_the_code():
    table = (ROOT / "docs/guides/when-something-fails.md").read_text().partition("| the run printed |")[2]
    cells = [line.split(" | ")[0] for line in table.partition("\n\n")[0].splitlines()[2:]]
    shown = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell) if not code.startswith("--")]
    assert len(shown) >= 12
    printed = [
        node.value
        for path in (ROOT / "python" / "avgpipe").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    for line in shown:
        for part in re.split(r"[\d…:;,()]+|\b(?:HEAD|SIGKILL)\b|initial weights|(?<=a spare process)", line):
            assert any(part.strip() in text for text in printed), f"{line}: {part}"


@PAGES
def test_all_code_is_python(page):
    for code in blocks(page, "python"):
        compile(textwrap.dedent(code), page.name, "exec")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in GUIDES if own(p)], ids=lambda p: p.stem)
def test_what_is_in_no_example_runs_as_one_script(page, tmp_path):
    (tmp_path / "page.py").write_text("\n".join(own(page)))
    run("python", "page.py", cwd=tmp_path)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [p for p in GUIDES if blocks(p, "sh")], ids=lambda p: p.stem)
def test_the_commands_run_in_their_order(page, tmp_path):
    (tmp_path / "examples").symlink_to(EXAMPLES)
    for line in "".join(blocks(page, "sh")).splitlines():
        command = shlex.split(line, comments=True)
        # torchrun of several hosts is run by tests/examples/test_several_hosts.py
        if command and command[0] in ("avgpipe", "python"):
            run(*command, cwd=tmp_path)
        else:
            assert not command or command[0] in ("torchrun", "export"), line


@pytest.mark.ranks
@pytest.mark.slow
def test_code_for_torch_runs_and_learns_what_ours_does(tmp_path):
    """The first block, then torch's or ours: the same loss to four digits."""
    common, *others = blocks(ROOT / "docs/guides/migrate.md", "python")
    (torchs,) = (code for code in others if code.startswith(TORCH))
    ours = others[others.index(torchs) + 1]
    (tmp_path / "torchs.py").write_text(common + torchs)
    (tmp_path / "ours.py").write_text(common + ours)
    found = [
        run(
            "python",
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "torchs.py",
            cwd=tmp_path,
        ),
        run("avgpipe", "run", "--stages", "2", "ours.py", cwd=tmp_path),
    ]
    losses = [set(re.findall(r"loss [\d.]+", text)) for text in found]
    assert len(losses[0]) == 1
    assert losses[0] == losses[1]
