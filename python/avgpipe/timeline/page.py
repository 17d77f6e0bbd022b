"""Self-contained HTML pages: text, tables and interactive charts in one file that loads nothing from a network.

A page is a value: sections of tables, sentences and charts. Jinja fills the template, which escapes every
text, since a page may show the folder of an unknown author; plotly.js, the styles and avgpipe's script are
part of the file. The content security policy at its head lets the browser run these scripts only and load
nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from importlib import resources
from typing import Any, Literal

from avgpipe.errors import library
from avgpipe.files import write_atomically

_PACKAGES = "'avgpipe[report]'"
_DIGITS = 6  # significant digits of numbers in charts


@dataclass(frozen=True)
class Line:
    """A line of a chart, over samples and over seconds.

    Attributes:
        run: Index of the run it belongs to.
        part: Distinguishes the lines of one run in a chart: a worker, or the name of the values.
        name: Name in words.
        samples, seconds, values: Lists of equal length; a value of None is a gap.
    """

    run: int
    part: int
    name: str
    samples: Sequence[float]
    seconds: Sequence[float]
    values: Sequence[float | None]
    style: Literal["line", "faint", "marks"] = "line"


@dataclass(frozen=True)
class Chart:
    """Lines over samples or seconds, as the reader chooses.

    Attributes:
        id: Id of the element, without spaces.
        unit: Unit of the values, in words.
        note: Hint for reading the chart.
        scale: "zero": the axis begins at 0; "share": it is 0 to 1, as percent.
    """

    id: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    note: str = ""
    scale: Literal["linear", "log", "zero", "share"] = "linear"

    kind = "chart"


@dataclass(frozen=True)
class Bars:
    """A bar for each row, divided into parts that add up to the whole.

    Attributes:
        rows: Names of the rows.
        runs: Index of the run of each row.
        parts: Share of each row, 0..1, by name in words.
    """

    id: str
    title: str
    rows: tuple[str, ...]
    runs: tuple[int, ...]
    parts: Mapping[str, Sequence[float]]
    note: str = ""

    kind = "bars"


@dataclass(frozen=True)
class Timelines:
    """Timelines, shown one at a time, down to each action; see ``avgpipe.timeline.html`` for the data."""

    id: str
    title: str
    timelines: tuple[Mapping[str, Any], ...]
    note: str = ""

    kind = "timelines"


@dataclass(frozen=True)
class Table:
    """Texts in rows; ``runs``: index of the run of each column, or None."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    runs: tuple[int | None, ...] = ()

    kind = "table"


@dataclass(frozen=True)
class Text:
    """Lines in a fixed width; ``advice``: a sentence that is emphasized below them."""

    text: str
    title: str = ""
    advice: str = ""
    run: int | None = None

    kind = "text"


@dataclass(frozen=True)
class Sentences:
    """A list of sentences."""

    items: tuple[str, ...]
    title: str = ""
    run: int | None = None

    kind = "sentences"


Block = Chart | Bars | Timelines | Table | Text | Sentences


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]
    note: str = ""


@dataclass(frozen=True)
class Page:
    """The content of a page.

    Attributes:
        about: A line below the title.
        runs: Names of the runs; the reader can hide each of them if there are several.
    """

    title: str
    about: str
    runs: tuple[str, ...]
    sections: tuple[Section, ...]

    def html(self) -> str:
        """Return the document; LibraryNotFound without plotly and Jinja."""
        scripts = [plotly_js(), _static("page.js")]
        data: dict[str, Any] = {"runs": self.runs, "chart": [], "bars": [], "timelines": []}
        for block in (block for section in self.sections for block in section.blocks):
            if block.kind in data:
                data[block.kind].append(chart_data(block))
        jinja = library("jinja2", "a page", _PACKAGES)
        template = jinja.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        filled: str = template.from_string(_static("page.html")).render(
            page=self,
            policy=policy(scripts),
            style=jinja.utils.markupsafe.Markup(_static("page.css")),
            data=jinja.utils.markupsafe.Markup(script_json(data)),
            scripts=[jinja.utils.markupsafe.Markup(script) for script in scripts],
        )
        return filled

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the document; an existing file is replaced atomically."""
        write_atomically(path, self.html())


def plotly_js() -> str:
    """Return the script plotly.js from the package plotly."""
    script: str = library("plotly.offline", "a page", _PACKAGES).get_plotlyjs()
    return script


def script_json(value: Any) -> str:
    """Return JSON that cannot end the script element around it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def policy(scripts: Sequence[str]) -> str:
    """Return the content security policy of a page: these scripts run, and nothing is loaded or sent anywhere.

    plotly.js makes elements with their own styles, and draws pictures that it offers for download.
    """
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def chart_data(value: Any) -> Any:
    """Return a value for JSON, with the digits that a chart can show; infinities and NaN become gaps."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [chart_data(item) for item in value]
    if is_dataclass(value):
        value = vars(value)
    return {k: chart_data(item) for k, item in value.items()} if isinstance(value, Mapping) else value


def _static(name: str) -> str:
    return (resources.files("avgpipe.timeline") / "static" / name).read_text(encoding="utf-8")
