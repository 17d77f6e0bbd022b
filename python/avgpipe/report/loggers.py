"""Loggers that pass the results of a run to TensorBoard, Weights & Biases, MLflow, or a CSV file.

Each is a function of the run's folder, its configuration, and the first step that will be logged. Loggers work in any
training loop::

    with tensorboard("runs/mine") as logger:
        for result in pipeline.train(loader):
            logger.log(result.batch, {"loss": result.loss})

The libraries are imported when a logger is made, and LibraryNotFound says how to install one that is missing.
"""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from avgpipe.errors import library, reason
from avgpipe.files import make_folder

_PROJECT = "avgpipe"  # name under which services group the runs
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Logger(NamedTuple):
    """An open logger, and a context manager.

    Attributes:
        log: Logs the numbers of a step, by name; steps do not decrease.
        close: Writes what is left.
    """

    log: Callable[[int, Mapping[str, float]], object]
    close: Callable[[], object]

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def csv_file(folder: str | Path, about: Mapping[str, Any] = _NOTHING, first_step: int = 0) -> Logger:
    """Add a line ``step,name,value`` for each number to ``metrics.csv`` in a folder, and make both if needed.

    Lines of an earlier file stay if ``first_step`` is not 0.
    """
    path = Path(folder) / "metrics.csv"
    make_folder(path.parent)
    file = path.open("a" if first_step else "w", newline="", encoding="utf-8", buffering=1)
    writer = csv.writer(file)
    if not file.tell():
        writer.writerow(("step", "name", "value"))

    def log(step: int, values: Mapping[str, float]) -> None:
        writer.writerows((step, name, value) for name, value in values.items())

    return Logger(log, file.close)


def tensorboard(folder: str | Path, about: Mapping[str, Any] = _NOTHING, first_step: int = 0) -> Logger:
    """Write event files to ``tensorboard`` in a folder: ``tensorboard --logdir FOLDER`` shows them.

    Values that an earlier run logged for ``first_step`` and later steps are hidden.
    """
    _imported("tensorboard")
    writer = _imported("tensorboard", "torch.utils.tensorboard").SummaryWriter(
        str(Path(folder) / "tensorboard"), purge_step=first_step or None
    )
    if about:
        writer.add_text("run", "\n".join(f"    {name}: {value}" for name, value in about.items()))

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Logger(log, writer.close)


def wandb(folder: str | Path, about: Mapping[str, Any] = _NOTHING, first_step: int = 0) -> Logger:
    """Log to Weights & Biases, in the project ``avgpipe`` unless ``WANDB_PROJECT`` names another.

    The folder keeps the files, and its name is the run's. A resumed run becomes another run in the same group. The
    library's other variables work, too: ``WANDB_MODE=offline`` keeps everything in the folder.
    """
    path = Path(folder)
    make_folder(path)
    name, project = path.resolve().name, os.environ.get("WANDB_PROJECT", _PROJECT)
    run = _imported("wandb").init(project=project, group=name, name=name, dir=str(path), config=dict(about))
    return Logger(lambda step, values: run.log(dict(values), step=step), run.finish)


def mlflow(folder: str | Path, about: Mapping[str, Any] = _NOTHING, first_step: int = 0) -> Logger:
    """Log to MLflow, in the experiment ``avgpipe``, at ``MLFLOW_TRACKING_URI`` or else MLflow's default location.

    The name of the folder is the run's. A resumed run becomes another run.
    """
    client = _imported("mlflow").MlflowClient()
    metric = _imported("mlflow", "mlflow.entities").Metric
    found = client.get_experiment_by_name(_PROJECT)
    experiment = found.experiment_id if found else client.create_experiment(_PROJECT)
    run = client.create_run(experiment, run_name=Path(folder).resolve().name).info.run_id
    for name, value in about.items():
        client.log_param(run, name, value)

    def log(step: int, values: Mapping[str, float]) -> None:
        now = round(1000 * time.time())
        client.log_batch(run, metrics=[metric(name, value, now, step) for name, value in values.items()])

    return Logger(log, lambda: client.set_terminated(run))


def _imported(name: str, module: str | None = None) -> Any:
    return library(module or name, f"the logger {name}", name)


LOGGERS = {"csv": csv_file, "mlflow": mlflow, "tensorboard": tensorboard, "wandb": wandb}


def check_loggers(names: Iterable[str]) -> None:
    """Raise LibraryNotFound if a logger's library is missing: before training, not at its first batch."""
    for name in names:
        if name != "csv":
            library(name, f"--logger {name}", name)


class Loggers:
    """Several loggers as one. A logger that fails is reported once and dropped; training continues.

    Args:
        loggers: Loggers by name.
        warn: Called with the warning about a logger that failed.
    """

    def __init__(self, loggers: Mapping[str, Logger], warn: Callable[[str], None]) -> None:
        self._loggers, self._warn = dict(loggers), warn

    @classmethod
    def opened(
        cls,
        names: Iterable[str],
        folder: Path,
        about: Mapping[str, Any],
        first_step: int,
        warn: Callable[[str], None],
    ) -> Loggers:
        """Make the loggers of a run; ValueError names a logger that failed to start, and why."""
        made: dict[str, Logger] = {}
        for name in names:
            try:
                made[name] = LOGGERS[name](folder, about, first_step)
            except Exception as error:  # libraries raise many types
                raise ValueError(f"--logger {name}: {reason(error)}") from error
        return cls(made, warn)

    def log(self, step: int, row: Mapping[str, Any], kind: str) -> None:
        """Log the numbers of a row of metrics.jsonl, with ``kind`` before their names."""
        if self._loggers:
            values = flat_numbers(row, f"{kind}/")
            self._each(lambda logger: logger.log(step, values))

    def close(self) -> None:
        self._each(lambda logger: logger.close())
        self._loggers.clear()

    def _each(self, act: Callable[[Logger], object]) -> None:
        for name, logger in list(self._loggers.items()):
            try:
                act(logger)
            except Exception as error:  # a third-party library may raise anything; training continues
                del self._loggers[name]
                self._warn(
                    f"warning: the logger {name} failed ({reason(error)}); training continues without it"
                )


def flat_numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the finite numbers of nested objects and lists by names such as "distances/to_reference/0"."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            found |= flat_numbers({str(n): item for n, item in enumerate(value)}, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[f"{prefix}{name}"] = value
    return found
