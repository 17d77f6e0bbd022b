"""Loggers that pass the results of a run to TensorBoard, Weights & Biases, MLflow, or a CSV file.

A logger takes ``log(step, values)``, numbers by name, and ``close()``. Loggers work in any training loop::

    with TensorBoard("runs/mine") as logger:
        for result in pipeline.train(loader):
            logger.log(result.batch, {"loss": result.loss})

The libraries are imported when a logger is made, and LibraryNotFound says how to install one that is missing.
"""

from __future__ import annotations

import csv
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from avgpipe.errors import library, reason

_PROJECT = "avgpipe"  # name under which services group the runs
_L = TypeVar("_L", bound="_Closing")


class Logger(Protocol):
    """The methods of a logger that a training loop uses."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step, by name; steps do not decrease."""

    def close(self) -> None:
        """Write what is left."""


class _Closing(ABC):
    """A logger that is a context manager, too."""

    def __enter__(self: _L) -> _L:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Write what is left."""


class CSV(_Closing):
    """Adds a line ``step,name,value`` for each number to ``metrics.csv`` in a folder, and makes both if needed.

    Args:
        folder: Folder of the run.
        about: Configuration of the run, which the file does not contain.
        first_step: First step that will be logged; lines of later steps in an earlier file stay.
    """

    package = ""

    def __init__(
        self, folder: str | Path, about: Mapping[str, Any] | None = None, *, first_step: int = 0
    ) -> None:
        path = Path(folder) / "metrics.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a" if first_step else "w", newline="", encoding="utf-8", buffering=1)
        self._writer = csv.writer(self._file)
        if not self._file.tell():
            self._writer.writerow(("step", "name", "value"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._writer.writerows((step, name, value) for name, value in values.items())

    def close(self) -> None:
        self._file.close()


class TensorBoard(_Closing):
    """Writes event files to ``tensorboard`` in a folder: ``tensorboard --logdir FOLDER`` shows them.

    Args:
        folder: Folder of the run.
        about: Configuration of the run, shown as a text.
        first_step: First step that will be logged; values that an earlier run logged for it and later steps
            are hidden.
    """

    package = "tensorboard"

    def __init__(
        self, folder: str | Path, about: Mapping[str, Any] | None = None, *, first_step: int = 0
    ) -> None:
        library("tensorboard", "the logger tensorboard", self.package)
        writer = library("torch.utils.tensorboard", "the logger tensorboard", self.package).SummaryWriter
        self._writer = writer(str(Path(folder) / "tensorboard"), purge_step=first_step or None)
        if about:
            lines = (f"    {name}: {value}" for name, value in about.items())
            self._writer.add_text("run", "\n".join(lines))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB(_Closing):
    """Logs to Weights & Biases, in the project ``avgpipe`` unless ``WANDB_PROJECT`` names another.

    Its other variables work, too: ``WANDB_MODE=offline`` keeps everything in the folder.

    Args:
        folder: Folder of the run, which keeps the files; its name is the run's.
        about: Configuration of the run.
        first_step: First step that will be logged. A resumed run becomes another run in the same group.
    """

    package = "wandb"

    def __init__(
        self, folder: str | Path, about: Mapping[str, Any] | None = None, *, first_step: int = 0
    ) -> None:
        import os

        wandb = library("wandb", "the logger wandb", self.package)
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        name = path.resolve().name
        project = os.environ.get("WANDB_PROJECT", _PROJECT)
        self._run = wandb.init(
            project=project, group=name, name=name, dir=str(path), config=dict(about or {})
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow(_Closing):
    """Logs to MLflow, in the experiment ``avgpipe``, at ``MLFLOW_TRACKING_URI`` or else MLflow's default location.

    Args:
        folder: Folder of the run; its name is the run's.
        about: Configuration of the run, logged as parameters.
        first_step: First step that will be logged. A resumed run becomes another run.
    """

    package = "mlflow"

    def __init__(
        self, folder: str | Path, about: Mapping[str, Any] | None = None, *, first_step: int = 0
    ) -> None:
        mlflow = library("mlflow", "the logger mlflow", self.package)
        self._metric = library("mlflow.entities", "the logger mlflow", self.package).Metric
        self._client = mlflow.MlflowClient()
        found = self._client.get_experiment_by_name(_PROJECT)
        experiment = found.experiment_id if found else self._client.create_experiment(_PROJECT)
        run = self._client.create_run(experiment, run_name=Path(folder).resolve().name)
        self._id = run.info.run_id
        for name, value in (about or {}).items():
            self._client.log_param(self._id, name, value)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = round(1000 * time.time())
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


LOGGERS: dict[str, Callable[..., Logger]] = {
    "csv": CSV, "mlflow": MLflow, "tensorboard": TensorBoard, "wandb": WandB,
}  # fmt: skip


def check_loggers(names: Iterable[str]) -> None:
    """Raise LibraryNotFound if a logger's library is missing: before training, not at its first batch."""
    for name in names:
        package: str = LOGGERS[name].package  # type: ignore[attr-defined]  # classes, each with its own
        if package:
            library(package, f"--logger {name}", package)


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
                made[name] = LOGGERS[name](folder, about, first_step=first_step)
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

    def _each(self, act: Callable[[Logger], None]) -> None:
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
