"""The page of a report in a real browser: what it shows, what a reader can do with it, and that it asks nobody."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from avgpipe_lab.pages.folders import Run, read_folders
from avgpipe_lab.pages.page import report_page
from tests.lab.pages.folders import BATCH_S, timeline, write_run
from tests.lab.pages.test_page import EVIL
from tests.lab.pages.test_runs import COMPARISON, write_comparison

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)

pytest.importorskip("plotly", reason="pip install 'avgpipe[report]'")
sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed: apt-get install chromium"
    ),
]


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        # The sandbox refuses to start for root, as which tests may run.
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


class Shown:
    """A page that is opened, with what it asked for and what went wrong in it."""

    def __init__(self, browser, path, width=1200, scheme="light"):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.requests, self.errors = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("dialog", lambda dialog: (self.errors.append(dialog.message), dialog.dismiss()))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]", state="attached")

    def plot(self, name):
        return self.page.locator(f"#{name} .plot")

    def traces(self, name, what):
        return self.plot(name).evaluate(f"plot => plot.data.map(trace => trace.{what})")

    def range(self):
        """Seconds that the timeline shows."""
        return self.plot("timeline").evaluate("plot => plot.layout.xaxis.range")

    def blocks(self):
        return self.plot("timeline").evaluate(
            "plot => plot.data.reduce((sum, trace) => sum + trace.x.length, 0)"
        )

    def hovered(self, name, share_x, share_y):
        """What is read at a place of a chart's plot area."""
        area = self.plot(name).locator(".nsewdrag").first
        area.scroll_into_view_if_needed()
        box = area.bounding_box()
        x, y = box["x"] + share_x * box["width"], box["y"] + share_y * box["height"]
        self.page.mouse.move(x - 3, y)
        self.page.mouse.move(x, y)
        words = self.plot(name).locator(".hoverlayer .hovertext")
        words.first.wait_for()
        return words.first.text_content()

    def drag(self, area, share_from, share_to):
        """Drag over a part of a chart's width."""
        area.scroll_into_view_if_needed()
        box = area.bounding_box()
        y = box["y"] + box["height"] / 2
        self.page.mouse.move(box["x"] + share_from * box["width"], y)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + share_to * box["width"], y, steps=4)
        self.page.mouse.up()


@pytest.fixture
def show(chromium):
    opened = []

    def show(path, **options):
        opened.append(Shown(chromium, path, **options))
        return opened[-1]

    yield show
    for shown in opened:
        assert shown.errors == []
        shown.context.close()


def page_of(folder, *runs):
    path = Path(folder) / "report.html"
    report_page(*read_folders(runs)).write(path)
    return path


@pytest.fixture(scope="module")
def thousand(tmp_path_factory):
    """The page of a run of 1,000 batches, with all 40,000 events of its timeline."""
    folder = tmp_path_factory.mktemp("thousand")
    return page_of(folder, write_run(folder / "run", batches=1000, shown=1000))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    return page_of(folder, write_comparison(folder / "compared"))


def test_a_thousand_batches_are_one_file_of_six_megabytes_that_asks_no_server(thousand, show):
    shown = show(thousand)
    assert shown.requests == [thousand.as_uri()]
    assert thousand.stat().st_size <= 6e6
    assert shown.page.locator(".plot .main-svg").count() > 0


def test_a_page_could_not_ask_anybody(thousand, show):
    """The policy holds: even a script that runs in the page gets nothing from anywhere."""
    shown = show(thousand)
    outcome = shown.page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'fetched', error => 'refused')")
    assert outcome == "refused"
    violations = shown.page.evaluate(
        """() => new Promise(resolve => {
            document.addEventListener("securitypolicyviolation", event => resolve(event.effectiveDirective));
            const image = document.createElement("img");
            image.src = "http://127.0.0.1:9/a.png";
            document.body.append(image);
        })"""
    )
    assert violations == "img-src"
    shown.errors.clear()  # which told of what was refused


def test_a_run_is_clicked_away_and_comes_back(compared, show):
    shown = show(compared)
    names = [outcome.system for outcome in COMPARISON.outcomes]
    assert shown.page.locator("#runs button").all_text_contents() == names
    button = shown.page.locator("#runs button").nth(1)
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert shown.traces("metric", "visible") == [True, False, True]
    assert [label for label in shown.traces("time", "y")[0] if label.startswith(names[1])] == []
    assert shown.page.locator('td[data-run="1"]').first.is_hidden()
    button.click()
    assert shown.traces("metric", "visible") == [True, True, True]
    assert shown.page.locator('td[data-run="1"]').first.is_visible()


def test_values_are_read_off_a_curve(thousand, show):
    shown = show(thousand)
    said = shown.hovered("rate", 0.5, 0.05)
    assert "learning rate: 0.01" in said
    assert "samples" in said


def test_curves_are_drawn_against_seconds_too(thousand, show):
    shown = show(thousand)
    assert shown.traces("metric", "x")[0] == [0, 2000, 4000, 6000, 8000]
    shown.page.get_by_role("button", name="seconds").click()
    assert shown.traces("metric", "x")[0] == [0, 10, 20, 30, 40]
    assert "seconds of training" in shown.plot("metric").text_content()


def test_the_timeline_is_zoomed_down_to_an_action(thousand, show):
    shown = show(thousand)
    shown.page.get_by_role("button", name="everything").click()
    assert shown.range() == pytest.approx([0, timeline(1000).makespan_s], rel=1e-3)
    assert shown.blocks() < 6000  # what is too narrow is drawn together
    assert "times" in shown.hovered("timeline", 0.9, 0.25)
    for _ in range(4):
        shown.drag(shown.plot("timeline").locator(".nsewdrag").first, 0.89, 0.92)
    begin, end = shown.range()
    assert 0 < end - begin < BATCH_S
    box = shown.plot("timeline").locator(".nsewdrag").first.bounding_box()
    steps = [shown.hovered("timeline", share, 0.25) for share in (0.3, 0.5, 0.7)]
    assert box["width"] > 300
    assert any("of micro-batch" in said and "stage 0" in said for said in steps), steps


def test_a_stretch_of_the_strip_is_shown_below_it(thousand, show):
    shown = show(thousand)
    strip = shown.page.locator("#timeline .strip .nsewdrag").first
    shown.drag(strip, 0.8, 0.85)
    whole = timeline(1000).makespan_s
    assert shown.range() == pytest.approx([0.8 * whole, 0.85 * whole], rel=0.02)
    ends = shown.page.locator("#timeline .strip").evaluate(
        "plot => [plot.layout.shapes[0].x0, plot.layout.shapes[0].x1]"
    )
    assert ends == shown.range()


def test_another_runs_timeline_is_chosen(compared, show):
    shown = show(compared)
    select = shown.page.locator("#timeline select")
    assert select.locator("option").all_text_contents() == [outcome.system for outcome in COMPARISON.outcomes]
    select.select_option("2")
    assert shown.blocks() > 0


def test_every_chart_has_a_table(thousand, show):
    shown = show(thousand)
    for name, headings in (
        ("rate", ["line", "samples", "seconds", "learning rate"]),
        ("timeline", ["worker", "what", "pipeline", "batch", "micro-batch", "from, ms", "takes, ms"]),
    ):
        shown.page.locator(f"#{name} summary").click()
        table = shown.page.locator(f"#{name} details table")
        table.wait_for()
        assert table.locator("th").all_text_contents() == headings
        assert table.locator("tbody tr").count() > 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_scrolls_in_one_direction(scheme, compared, show):
    shown = show(compared, width=380, scheme=scheme)
    assert shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_reader_chooses_between_dark_and_light(thousand, show):
    shown = show(thousand)
    ground = "plot => plot.layout.paper_bgcolor"
    before = shown.plot("loss").evaluate(ground)
    shown.page.locator("#theme").click()
    assert shown.plot("loss").evaluate(ground) != before


def test_names_of_a_strangers_runs_are_only_text(tmp_path, show):
    runs = [
        Run.read(write_run(tmp_path / str(n), batches=8, metric_name=EVIL), f"{EVIL}{n}") for n in range(2)
    ]
    path = tmp_path / "report.html"
    report_page(runs).write(path)
    shown = show(path)
    assert shown.page.locator("img").count() == 0
    assert shown.page.locator("#runs button").first.text_content() == f"{EVIL}0"
    assert EVIL in shown.hovered("metric", 0.98, 0.5) or EVIL in shown.plot("metric").text_content()


def test_the_page_of_a_timeline_alone(tmp_path, show):
    timeline(20).to_html(tmp_path / "t.html")
    shown = show(tmp_path / "t.html")
    assert shown.blocks() > 0
    assert shown.page.locator("#along").is_hidden()
