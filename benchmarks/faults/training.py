"""Question: what does training lose, in quality and in pace, when a process is killed every 20 s on average?

    AVGPIPE_DATA=DIR python -m benchmarks.faults.training [--epochs 18] [--seeds 0,1,2] [--disturbed 0]
        [--mean-seconds 20] [--stages 1] [--pipelines 3] [--spare-pipelines 1] [--out FILE] [--resume]
        [--picture FILE.png]

Runs `avgpipe train gnmt --isolate` on Multi30k, one run after another: undisturbed with each of the seeds, which shows
how much seeds differ, and after the undisturbed run of each seed of --disturbed the same again, of which a random
process of a random pipeline is killed by SIGKILL again and again from the first update to the last, at intervals that
are drawn from an exponential distribution. Everything is drawn from the run's seed. A run that ends because no pipeline
is left is resumed from its last checkpoint; how often is told.

After each run the record is written; --resume leaves out the runs that it has. --picture draws validation losses.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import IO, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from avgpipe.files import read_json
from avgpipe.ranks.environment import PIPELINE, SPARE
from avgpipe.timeline.plot import dress, write_figure
from benchmarks.common.record import RESULTS, say, write_record

DATA = "multi30k-en-de"
QUESTION = "quality and pace of isolated pipelines, undisturbed and with kills at random moments"
LIMIT_S = 3600
MOST_ENDS = 20  # of one run, after each of which it is resumed
_POLL_S = 0.02
_LOST = re.compile(r"pipeline (\d+) is lost: ")
_CAME = re.compile(r"pipeline (\d+) trains with the others from step ")
_TOOK_OVER = re.compile(r"the others train on its samples of its last (?:step|(\d+) steps)")
_INK, _QUIET, _DISTURBED = "#333333", "#b9b9b9", "#2a6fb0"


# ---- one run ---------------------------------------------------------------------------------------------------------


def command(asked: argparse.Namespace, seed: int) -> list[str]:
    """Return the words of a run, but for its folder."""
    words = ["avgpipe", "train", "gnmt", "--preset", "tiny", "--data", f"$AVGPIPE_DATA/{DATA}", "--isolate"]
    for option in ("stages", "pipelines", "micro_batches", "spare_pipelines", "epochs", "validations"):
        words += [f"--{option.replace('_', '-')}", str(getattr(asked, option))]
    return [*words, "--checkpoint-minutes", "1", "--seed", str(seed)]


class Run:
    """A run that goes on: what it writes, and when.

    Attributes:
        lines: what it has said on standard error, each with the time when it came.
        seen: when its first and its newest training result were seen.
        samples: of the newest one, since the run's beginning.
    """

    def __init__(self, words: list[str], out: Path) -> None:
        self._words, self._metrics = [*words, "--out", str(out), "--json"], out / "metrics.jsonl"
        self.lines: list[tuple[float, str]] = []
        self.seen: list[float] = []
        self.samples = 0
        self._size = 0
        self.start()

    def start(self, *more: str) -> None:
        words = [word.replace("$AVGPIPE_DATA", os.environ["AVGPIPE_DATA"]) for word in self._words[1:]]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "avgpipe", *words, *more],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,))
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.append((time.monotonic(), line.rstrip()))

    def look(self) -> None:
        """Note whether results have come."""
        if not self._metrics.is_file():
            return
        size = self._metrics.stat().st_size
        self._size = min(self._size, size)  # what is resumed has cut it
        with self._metrics.open("rb") as file:
            file.seek(self._size)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._size += len(whole)
        trained = [row for row in map(json.loads, whole.splitlines()) if row["kind"] == "train"]
        if trained:
            self.seen = [*self.seen[:1], time.monotonic()]
            self.samples = trained[-1]["samples"]

    def wait(self) -> int:
        """Return the exit code, once all that it has said is read."""
        code = self.process.wait()
        self._reader.join()
        return code

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._metrics.read_text().splitlines()]


def ranks(launcher: int) -> list[int]:
    """Return the processes of pipelines that a launcher has started; not those that wait to take the place of some."""
    found = []
    for process in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        try:
            said = Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")
        except OSError:  # it has ended
            continue
        variables = dict(variable.split("=", 1) for variable in said if "=" in variable)
        spare = variables.get(SPARE)
        if PIPELINE in variables or (spare is not None and not Path(spare).exists()):
            found.append(process)
    return sorted(found)


def train(asked: argparse.Namespace, seed: int, is_disturbed: bool) -> dict[str, Any]:
    """Run to the end, and return what came of it."""
    draw = random.Random(seed)
    kills: list[dict[str, Any]] = []
    ends = 0
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        words = command(asked, seed)
        run = Run(words, Path(folder) / "run")
        begun, next_kill = time.monotonic(), None
        while True:
            while run.process.poll() is None:
                run.look()
                now = time.monotonic()
                if now > begun + LIMIT_S:
                    run.process.terminate()
                elif is_disturbed and run.seen:
                    if next_kill is None:
                        next_kill = now + draw.expovariate(1 / asked.mean_seconds)
                    elif now >= next_kill:
                        kills += _kill(run, draw)
                        next_kill = now + draw.expovariate(1 / asked.mean_seconds)
                time.sleep(_POLL_S)
            code = run.wait()
            if code == 0 or ends == MOST_ENDS or time.monotonic() > begun + LIMIT_S:
                break
            ends += 1
            say(run.lines[-1][1])
            run.start("--resume")
        if code:
            return {"seed": seed, "failed": run.lines[-1][1]}
        run.look()
        summary = read_json(Path(folder) / "run" / "summary.json")
        found = {"seed": seed, "command": " ".join(words), "load_before": load, "resumed": ends}
        return found | _course(run, summary) | (_faults(run, kills) if is_disturbed else {})


def _kill(run: Run, draw: random.Random) -> list[dict[str, Any]]:
    """Kill one process; return when, or nothing where none is there."""
    there = ranks(run.process.pid)
    if not there:
        return []
    try:
        os.kill(draw.choice(there), signal.SIGKILL)
    except ProcessLookupError:
        return []
    return [{"at": time.monotonic() - run.seen[0], "samples": run.samples}]


def _course(run: Run, summary: dict[str, Any]) -> dict[str, Any]:
    rows, first, last = run.rows(), *run.seen
    trained, valid = ([row for row in rows if row["kind"] == kind] for kind in ("train", "valid"))
    samples, before = Counter[int](), 0
    for row in trained:
        samples[row["batch"]] += row["samples"] - before
        before = row["samples"]
    return {
        "samples": summary["samples"],
        "seconds": last - first,  # from the first update to the last, with validations and checkpoints
        "samples_per_second": (summary["samples"] - trained[0]["samples"]) / (last - first),
        "training_samples_per_second": summary["samples_per_second"],  # without them
        "samples_of_batches": [
            [count, len(list(same))] for count, same in groupby(samples[b] for b in sorted(samples))
        ],
        "loss": valid[-1]["loss"],
        "bleu": valid[-1]["metric"],
        "validations": [{name: row[name] for name in ("samples", "loss", "metric")} for row in valid],
    }


def _faults(run: Run, kills: list[dict[str, Any]]) -> dict[str, Any]:
    """When what happened, in seconds since the first update."""
    first = run.seen[0]
    lost: dict[int, float] = {}  # since when pipelines are away
    away: list[dict[str, Any]] = []
    for at, line in run.lines:
        if (match := _LOST.match(line)) is not None:
            lost.setdefault(int(match[1]), at)
        elif (match := _CAME.match(line)) is not None and int(match[1]) in lost:
            since = lost.pop(int(match[1]))
            away.append({"pipeline": int(match[1]), "at": since - first, "seconds": at - since})
    happened = [line for _, line in run.lines if line.startswith("pipeline ")]
    return {
        "kills": kills,
        "lost": sum(_LOST.match(line) is not None for line in happened),
        "joined": sum(_CAME.match(line) is not None for line in happened),
        "away": away,
        "away_at_the_end": sorted(lost),
        "steps_taken_over": sum(int(match[1] or 1) for match in map(_TOOK_OVER.search, happened) if match),
        "said": happened,
    }


# ---- all runs --------------------------------------------------------------------------------------------------------


def _by_batch(counts: list[list[int]]) -> Counter[int]:
    """Return the samples of each batch; ``counts``: how many, of how many batches in a row."""
    samples = chain.from_iterable(repeat(samples, batches) for samples, batches in counts)
    return Counter(dict(enumerate(samples)))


def compared(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what the runs come to: ratios of pace to the undisturbed run of the same seed, and differences."""
    quiet = {run["seed"]: run for name, run in runs.items() if name.startswith("undisturbed")}
    found = []
    for run in runs.values():
        if "kills" not in run or run["seed"] not in quiet:
            continue
        other = quiet[run["seed"]]
        got, wanted = (_by_batch(one["samples_of_batches"]) for one in (run, other))
        found.append(
            {
                "seed": run["seed"],
                "pace": run["samples_per_second"] / other["samples_per_second"],
                "training_pace": run["training_samples_per_second"] / other["training_samples_per_second"],
                "loss_more": run["loss"] - other["loss"],
                "bleu_more": run["bleu"] - other["bleu"],
                "samples_twice": (got - wanted).total(),
                "samples_never": (wanted - got).total(),
            }
        )
    spread = {}
    for name in ("loss", "bleu"):
        values = [run[name] for run in quiet.values()]
        spread[name] = {"least": min(values), "most": max(values)}
    return {"undisturbed": spread, "disturbed": found}


def picture(runs: dict[str, dict[str, Any]], path: Path) -> Figure:
    """Draw validation losses by samples, and where processes were killed."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    labels = set()
    for run in runs.values():
        if "failed" in run:
            continue
        is_disturbed = "kills" in run
        color, label = (
            (_DISTURBED, "with kills") if is_disturbed else (_QUIET, "undisturbed, a line for each seed")
        )
        at, losses = zip(*[(row["samples"], row["loss"]) for row in run["validations"][1:]])
        axes.plot(at, losses, color=color, linewidth=1.3, label=None if label in labels else label)
        labels.add(label)
        for kill in run.get("kills", ()):
            axes.axvline(
                kill["samples"],
                ymax=0.04,
                color="#c0453c",
                linewidth=1.0,
                label=None if "kill" in labels else "a kill",
            )
            labels.add("kill")
    dress(axes)
    axes.set_xlabel("samples", fontsize=8, color=_INK)
    axes.set_ylabel("validation loss", fontsize=8, color=_INK)
    axes.set_title("gnmt at tiny, Multi30k, three isolated pipelines", loc="left", fontsize=9.5, color=_INK)
    axes.legend(fontsize=7.5, frameon=False)
    write_figure(figure, path, dpi=130)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=18, help="of each run: 11,996 sentence pairs each")
    parser.add_argument("--seeds", default="0,1,2", help="of undisturbed runs")
    parser.add_argument("--disturbed", default="0", help="those of the seeds that are run with kills, too")
    parser.add_argument("--mean-seconds", type=float, default=20.0, help="between two kills")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--pipelines", type=int, default=3)
    parser.add_argument("--spare-pipelines", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=3)
    parser.add_argument("--validations", type=int, default=10)
    parser.add_argument("--out", help="of the record; default: benchmarks/results")
    parser.add_argument("--resume", action="store_true", help="keep what --out has, and run the rest")
    parser.add_argument("--picture", type=Path, help="of validation losses")
    asked = parser.parse_args()
    if "AVGPIPE_DATA" not in os.environ:
        parser.error("AVGPIPE_DATA must name the folder of the data sets")
    out = asked.out or str(RESULTS / f"faults-training-{time.strftime('%Y-%m-%d')}.json")
    runs: dict[str, dict[str, Any]] = read_json(out)["runs"] if asked.resume else {}
    for seed in map(int, asked.seeds.split(",")):
        for kind in ("undisturbed", "disturbed"):
            name = f"{kind}, seed {seed}"
            is_disturbed = kind == "disturbed"
            if name in runs or (is_disturbed and str(seed) not in asked.disturbed.split(",")):
                continue
            say(name)
            runs[name] = run = train(asked, seed, is_disturbed)
            say(json.dumps({n: v for n, v in run.items() if isinstance(v, (int, float, str))}))
            good = {n: r for n, r in runs.items() if "failed" not in r}
            write_record("faults-training", QUESTION, {"runs": runs, "compared": compared(good)}, out)
    if asked.picture is not None:
        picture(runs, asked.picture)


if __name__ == "__main__":
    main()
