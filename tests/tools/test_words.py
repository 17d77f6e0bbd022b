"""Words of the glossary, and subjects of commits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import words


def test_pages_docstrings_and_messages_have_no_word_that_the_glossary_replaces() -> None:
    assert words.main([]) == 0


def test_words_are_found_where_people_read_them(tmp_path: Path) -> None:
    module = tmp_path / "m.py"
    module.write_text(
        '"""Of whom it is."""\n\n'
        "whom = 1  # it tells nobody\n"
        'raise ValueError(f"{whom} has\\nbeen told", "told")\n'
    )
    found = sorted(words.findings(module))
    assert found == [(1, "whom"), (3, "nobody"), (3, "tells"), (5, "told")]
    page = tmp_path / "p.md"
    page.write_text("One.\nIt shall be, but for two, as many.\n")
    assert list(words.findings(page)) == [(2, "shall"), (2, "but for")]


@pytest.mark.parametrize(
    "subject", ["Add a glossary", "Bring words in line", "Merge branch 'x' into y", "Pass options on"]
)
def test_an_imperative_is_a_subject(subject: str) -> None:
    assert words.wrong_subject(subject) is None


@pytest.mark.parametrize(
    "subject",
    [
        "Added a glossary",
        "Adding words",
        "Rows of the overview",
        "add a glossary",
        "The glossary",
        "Add " + "a" * 70,
    ],
)
def test_other_subjects_are_refused(subject: str) -> None:
    assert words.wrong_subject(subject) is not None
