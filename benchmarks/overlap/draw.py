"""Draw a picture of the emulated cluster from records: python benchmarks/overlap/draw.py PICTURE RECORD [RECORD...]"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    from avgpipe.bench.schedules.picture import plot_schedules
    from avgpipe.bench.schedules.result import ScheduleResult

    picture, *records = sys.argv[1:]
    found = [json.loads(Path(record).read_text()) for record in records]
    results = [ScheduleResult.from_json(case) for record in found for case in record["cases"]]
    plot_schedules(results, f"emulated cluster, {found[0]['machine']['cpu']}", picture)


if __name__ == "__main__":
    main()
