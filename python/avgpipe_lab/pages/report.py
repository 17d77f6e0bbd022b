"""``avgpipe report``: writes a page on one run, on several, or on a comparison."""

from __future__ import annotations

from pathlib import Path

from avgpipe.cli.output import answer, arguments, check_file, running
from avgpipe.files import write_atomically
from avgpipe.units import format_bytes
from avgpipe_lab.commands import ReportConfig
from avgpipe_lab.pages.folders import read_folders
from avgpipe_lab.pages.page import report_page

_NAME = "report.html"


def run(config: ReportConfig) -> None:
    with arguments():
        paths = [Path(folder) for folder in config.runs]
        out = Path(config.out or (paths[0] / _NAME if len(paths) == 1 else _NAME))
        runs, comparisons = read_folders(paths)
        check_file(str(out))
        content = report_page(runs, comparisons).html().encode()
    with running():
        write_atomically(out, content)
    found = {"report": str(out), "bytes": len(content), "runs": [one.name for one in runs]}
    problems = [f"{one.name}: {problem}" for one in runs for problem in one.problems]
    answer(
        config.json,
        {**found, "problems": problems},
        *problems,
        f"report: {out} ({format_bytes(len(content))})",
    )
