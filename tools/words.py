"""Finds words that the glossary of docs/design/style.md replaces, and subjects of commits that break its rule.

    python -m tools.words [PATH ...]  words in docstrings, comments, messages and pages
    python -m tools.words --commits   subjects of the commits since the rule, or of the last one in a shallow clone

Prints the file, line and word of each finding; the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = (
    "python",
    "avgpipe_ext",
    "tools",
    "examples",
    "docs",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)
_VERBS = "asks|comes|does|gives|goes|has|is|makes|may|reads|stands|takes|uses|waits|wants"
WORDS = re.compile(
    rf"\b(who ({_VERBS})|whom|somebody|nobody|so many|amid|anew|at what|sees? to|told|untold|tells?|hears?"
    r"|stands? (for|in|still)|ha(s|ve) come|shall|but for|what is for all|as of :meth)\b",
    re.IGNORECASE,
)
_LONGEST = 72  # letters of a subject
_RULE = "158b6fb08002dbbef6c05c4e338b4a9443b59dc4"  # the last commit before this rule
_NOT_IMPERATIVE = re.compile(r"^(A|An|The|This|What|Whoever|It|No|\w+ed|\w+ing|\w+[^s]s)\b")
_IMPERATIVE = (
    "Bring",
    "Embed",
    "Feed",
    "Need",
    "Shed",
    "Speed",
    "Spring",
    "String",
    "Swing",
    "Alias",
    "Bias",
    "Focus",
)


def findings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the word of each finding in a Python or Markdown file."""
    text = path.read_text()
    spoken = enumerate(text.splitlines(), 1) if path.suffix == ".md" else _spoken(text)
    for line, sentence in spoken:
        for found in WORDS.finditer(sentence):
            yield line + sentence.count("\n", 0, found.start()), found.group()


def _spoken(source: str) -> Iterator[tuple[int, str]]:
    """Yield the text in a Python file that is for people: strings of several words, and comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def files(places: Sequence[str]) -> Iterator[Path]:
    for place in map(ROOT.joinpath, places):
        found = [place] if place.is_file() else sorted([*place.rglob("*.py"), *place.rglob("*.md")])
        yield from (path for path in found if path != Path(__file__) and path.name != "style.md")


def wrong_subject(subject: str) -> str | None:
    """Return the error in the subject of a commit, None if there is none."""
    first = subject.split(" ")[0]
    if subject.startswith("Merge "):
        return None
    if len(subject) > _LONGEST:
        return f"has {len(subject)} letters, {_LONGEST} at most"
    if not first[:1].isupper() or (_NOT_IMPERATIVE.match(subject) and first not in _IMPERATIVE):
        return "begins with no imperative, such as 'Add' or 'Refuse'"
    return None


def commits() -> list[tuple[str, str]]:
    """Return the short hashes and subjects of the commits that the rule is for."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)

    is_known = git("merge-base", "--is-ancestor", _RULE, "HEAD").returncode == 0
    lines = git("log", "--format=%h %s", *([f"{_RULE}..HEAD"] if is_known else ["-1"])).stdout.splitlines()
    return [(commit, subject) for commit, _, subject in (line.partition(" ") for line in lines)]


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", default=PLACES)
    parser.add_argument("--commits", action="store_true")
    asked = parser.parse_args(given)
    wrong = []
    if asked.commits:
        for commit, subject in commits():
            if (why := wrong_subject(subject)) is not None:
                wrong.append(f"{commit}: {subject!r} {why}")
    else:
        for path in files(asked.paths):
            wrong += [f"{path.relative_to(ROOT)}:{line}: {word!r}" for line, word in findings(path)]
    for line in wrong:
        print(line)
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
