"""The pages of results: their tables are what the records give, and each page can be found."""

import json
import re
from fnmatch import fnmatch

import pytest

from benchmarks import pages
from tests.cli.command import ROOT

PAGES = sorted(pages.PAGES.glob("*.md"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A page without its table, and the record that it names."""
    rows = [{"name": "avgpipe, N = 1, shm", "us_per_action": 1204.05}]
    (tmp_path / "overhead-2026-01-31.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "page.md").write_text(
        "# Page\n\n<!-- generated: overhead overhead-2026-01-31 -->\n<!-- end -->\n\nText.\n"
    )
    monkeypatch.setattr(pages, "RECORDS", tmp_path)
    monkeypatch.setattr(pages, "PAGES", tmp_path)
    return tmp_path


def run(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["pages", *words])
    with pytest.raises(SystemExit) as ended:
        pages.main()
    return ended.value.code


@pytest.mark.parametrize("page", pages.every_page(), ids=lambda page: page.stem)
def test_tables_are_what_the_records_give(page):
    text = page.read_text()
    assert text.count("<!-- generated: ") == text.count("<!-- end -->")
    assert pages.fill(text) == text, "run python -m benchmarks.pages"


def test_every_record_is_shown():
    text = " ".join(page.read_text() for page in pages.every_page())
    shown = {name for mark in re.findall("<!-- generated: (.*?) -->", text) for name in mark.split()}
    records = [path.stem for path in pages.RECORDS.glob("*.json")]
    assert [name for name in records if not any(fnmatch(name, mark) for mark in shown)] == []


def test_every_page_is_linked_from_the_overview_and_in_the_navigation():
    overview, navigation = (ROOT / "docs" / "results.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES if f"(results/{page.name}" not in overview] == []
    assert [page.name for page in PAGES if f" results/{page.name}\n" not in navigation] == []


def test_check_notices_and_running_writes_once(folder, monkeypatch, capsys):
    before = (folder / "page.md").read_text()
    assert run(monkeypatch, "--check") == 1
    assert "page.md: not what the records give" in capsys.readouterr().out
    assert (folder / "page.md").read_text() == before

    assert run(monkeypatch) == 0
    after = (folder / "page.md").read_text()
    assert "| avgpipe, N = 1, shm | 1,204 |" in after
    assert after.startswith("# Page\n")
    assert after.endswith("<!-- end -->\n\nText.\n")

    assert run(monkeypatch) == 0
    assert (folder / "page.md").read_text() == after
    assert run(monkeypatch, "--check") == 0


def test_a_table_without_a_function_is_refused():
    with pytest.raises(ValueError, match="no table 'overheads' is known"):
        pages.make("overheads overlap-overhead-2026-11-23")


def test_a_record_without_a_date_has_that_of_its_name():
    assert "| 2026-11-22 |" in pages.make("source compare-awd-lstm-2026-11-22")
