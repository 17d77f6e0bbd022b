"""The table of extensions in the reference names all of them, and every pair that is refused."""

from __future__ import annotations

import re

import pytest

import avgpipe
from avgpipe import options
from avgpipe.options import CONFLICTS, Conflict
from tests.cli.command import ROOT

PAGE = (ROOT / "docs/reference/extensions.md").read_text()
# By class: what it cannot be combined with, the last cell of its row.
REFUSED = {
    re.findall(r"\w+", row)[0]: row.split(" | ")[-1] for row in PAGE.splitlines() if row.startswith("| `")
}


def kinds() -> list[str]:
    named = (name for name in avgpipe.__all__ if getattr(options, name, None) is getattr(avgpipe, name))
    return [name for name in named if issubclass(getattr(avgpipe, name), avgpipe.Extension)]


def test_every_extension_has_a_row_and_a_section() -> None:
    assert sorted(REFUSED) == sorted({*kinds()} - {"Extension"})
    for name in REFUSED:
        assert f"\n::: avgpipe.options.{name}\n" in PAGE


@pytest.mark.parametrize("row", CONFLICTS, ids=lambda row: f"{row.option} {row.other}")
def test_a_pair_that_is_refused_is_in_the_table(row: Conflict) -> None:
    option, other = (re.findall(r"\w+", text)[0] for text in (row.option, row.other))
    assert f"`{other}" in REFUSED[option]
    if other in REFUSED:
        assert f"`{option}" in REFUSED[other]
