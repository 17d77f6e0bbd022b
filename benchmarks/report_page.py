"""Question: how soon is the page of a run of a thousand batches there in a browser, and how large is it?

    OMP_NUM_THREADS=1 python -m benchmarks.report_page

Trains the smallest AWD-LSTM for a thousand batches, two pipelines on two workers, has `avgpipe report` write the page,
and opens it in headless Chromium several times, each in a browser that has cached nothing. Seconds from the request
until every chart is drawn, processor time of the page's thread, and what the page asked any network for.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.record import say, write_record

BATCHES = 1000
MOST_BYTES, MOST_S = 6e6, 2.0
PLAN = ("--stages", "2", "--pipelines", "2", "--micro-batches", "4")


def avgpipe(*words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "avgpipe", *words], check=True, timeout=900, stdout=subprocess.DEVNULL
    )


def opened(playwright: Any, page: Path) -> dict[str, Any]:
    """Open the page in a browser of its own."""
    # The sandbox refuses to start for root.
    browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    shown = browser.new_page(viewport={"width": 1200, "height": 900})
    asked: list[str] = []
    shown.on("request", lambda request: asked.append(request.url))
    session = shown.context.new_cdp_session(shown)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    begun = time.perf_counter()
    shown.goto(page.as_uri())
    shown.wait_for_selector("html[data-ready]", state="attached")
    wall_s = time.perf_counter() - begun
    metrics = {
        metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]
    }
    browser.close()
    others = [url for url in asked if url != page.as_uri()]
    return {"wall_s": wall_s, "work_s": metrics["TaskDuration"], "requests": others}


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        say(f"training {BATCHES} batches")
        avgpipe(
            *(
                "train",
                "awd-lstm",
                "--preset",
                "tiny",
                "--epochs",
                "100",
                "--max-batches",
                str(BATCHES),
                *PLAN,
            ),
            *("--out", str(run)),
        )
        avgpipe("report", str(run))
        page = run / "report.html"
        size = page.stat().st_size
        with sync_playwright() as playwright:
            times = [opened(playwright, page) for _ in range(arguments.times)]
    walls, works = ([row[key] for row in times] for key in ("wall_s", "work_s"))
    print(f"{size / 1e6:.2f} MB, requests: {sum(len(row['requests']) for row in times)}")
    for name, found in (("until all is drawn", walls), ("processor time", works)):
        print(f"{name}: {statistics.median(found):.2f} s, {min(found):.2f} to {max(found):.2f}")
    found = {"batches": BATCHES, "bytes": size, "most_bytes": MOST_BYTES, "most_s": MOST_S, "rows": times}
    write_record("report-page", "size and loading time of a report's page", found, arguments.out)


if __name__ == "__main__":
    main()
