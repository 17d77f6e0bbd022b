"""Train one isolated pipeline on each emulated host, until its steps are steady, and time some of them."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from avgpipe_lab.bench.hosts import CommandsOnHosts
from avgpipe_lab.bench.namespaces import Network

FOLDER = Path(__file__).parent
LIMIT_S = 240.0
_SETTLE = 5  # steps after the last pipeline has joined, not timed
_JOINED = re.compile(r"(pipeline \d+) trains with the others from step")


@dataclass(frozen=True)
class TimedSteps:
    """Steps that were timed.

    Attributes:
        ends_s: When pipeline 0 had the result of each.
        samples: Samples of each.
        bytes_each: Bytes that each host has sent and received in a step, headers included.
    """

    ends_s: list[float]
    samples: list[int]
    bytes_each: dict[str, list[int]]

    @property
    def seconds(self) -> list[float]:
        return [end - begin for begin, end in pairwise(self.ends_s)]

    @property
    def samples_per_s(self) -> float:
        return sum(self.samples[1:]) / (self.ends_s[-1] - self.ends_s[0])


def train(
    net: Network, job: Sequence[str], steps: int, settle: int = _SETTLE, is_alone: bool = False
) -> TimedSteps:
    """Run ``job.py`` with these arguments; PipelineError if a host does not join, or the run ends.

    Args:
        settle: Steps that are not timed, once all have joined.
        is_alone: Whether the first host trains without the others, as plain Python does.
    """
    with tempfile.TemporaryDirectory(prefix="avgpipe-") as name:
        times = Path(name, "times")
        times.touch()
        script = [str(FOLDER / "job.py"), str(times), *job]

        def go_on(count: int) -> None:
            end = len(_results(times)) + count
            commands.wait_until(lambda: len(_results(times)) >= end, LIMIT_S, "no further steps")

        with CommandsOnHosts(net, Path(name)) as commands:
            if is_alone:
                commands.start(0, *script)
            else:
                commands.run(["--stages", "1"], script, restarts=0)
                commands.wait_for(_JOINED, LIMIT_S, net.hosts - 1)
            go_on(settle)
            begin_s, before = time.monotonic(), [net.traffic(host) for host in range(net.hosts)]
            go_on(steps)
            end_s, after = time.monotonic(), [net.traffic(host) for host in range(net.hosts)]
            commands.terminate()
        timed = [(samples, at_s) for _, samples, at_s in _results(times) if begin_s <= at_s <= end_s]
    ends_s = [at_s for _, at_s in timed]
    # The window holds parts of two further steps.
    count = (len(timed) - 1) * (end_s - begin_s) / (ends_s[-1] - ends_s[0])
    return TimedSteps(ends_s, [samples for samples, _ in timed], bytes_each(before, after, count))


def bytes_each(
    before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]], count: float
) -> dict[str, list[int]]:
    """Return what each host has sent and received, in each of ``count`` steps."""
    return {
        f"{name}_bytes": [round((b[way] - a[way]) / count) for a, b in zip(before, after)]
        for way, name in enumerate(("sent", "received"))
    }


def _results(times: Path) -> list[tuple[int, int, float]]:
    """Return batch, samples and time of each result so far; the last line may be incomplete."""
    return [json.loads(line) for line in times.read_text().splitlines(True) if line.endswith("\n")]
