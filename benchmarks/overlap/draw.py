"""Draw a picture of the emulated cluster from records: python -m benchmarks.overlap.draw PICTURE RECORD [RECORD...]"""

from __future__ import annotations

import sys

from avgpipe.files import read_json
from benchmarks.common.report import plot_schedules


def main() -> None:
    picture, *records = sys.argv[1:]
    found = [read_json(record) for record in records]
    results = [case for record in found for case in record["cases"]]
    plot_schedules(results, f"emulated cluster, {found[0]['machine']['cpu']}", picture)


if __name__ == "__main__":
    main()
