"""What a run comes to, batch by batch, for other tools: TensorBoard, Weights & Biases, MLflow, or a CSV file.

A logger takes ``log(step, values)``, numbers by name, and ``close()``. Loggers work in any training loop::

    with TensorBoard("runs/mine") as logger:
        for result in pipeline.train(loader):
            logger.log(result.batch, {"loss": result.loss})

The libraries are imported when a logger is made, and LibraryNotFound tells how to install one that is missing.
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

_PROJECT = "avgpipe"  # under which the services that group runs list them
_L = TypeVar("_L", bound="_Closing")


class Logger(Protocol):
    """What a training loop needs of a logger."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Note the numbers of a step, by name; steps do not decrease."""

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
    """Adds a line ``step,name,value`` for each number to ``metrics.csv`` in a folder, and makes both if need be.

    Args:
        folder: Of the run.
        about: What the run is; the file does not say it.
        first_step: The first that will be logged; an earlier file's later ones stay in it.
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
        folder: Of the run.
        about: What the run is; shown as a text.
        first_step: The first that will be logged; what was logged for it and later ones by a run before is hidden.
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

    Its other variables count, too: ``WANDB_MODE=offline`` keeps everything in the folder.

    Args:
        folder: Of the run, where its files are kept; its name is the run's.
        about: What the run is: its configuration.
        first_step: The first that will be logged. A resumed run is a run of its own in the same group.
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
    """Logs to MLflow, in the experiment ``avgpipe``, where ``MLFLOW_TRACKING_URI`` says or else where mlflow does.

    Args:
        folder: Of the run, whose name is the run's.
        about: What the run is: its parameters.
        first_step: The first that will be logged. A resumed run is a run of its own.
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
    """Raise LibraryNotFound where a logger's library is missing: before training, not at its first batch."""
    for name in names:
        package: str = LOGGERS[name].package  # type: ignore[attr-defined]  # classes, each with its own
        if package:
            library(package, f"--logger {name}", package)


class Loggers:
    """Several loggers as one. A logger that fails is told of, once, and left out: training goes on.

    Args:
        loggers: By name.
        tell: Takes the sentence about one that failed.
    """

    def __init__(self, loggers: Mapping[str, Logger], tell: Callable[[str], None]) -> None:
        self._loggers, self._tell = dict(loggers), tell

    @classmethod
    def opened(
        cls,
        names: Iterable[str],
        folder: Path,
        about: Mapping[str, Any],
        first_step: int,
        tell: Callable[[str], None],
    ) -> Loggers:
        """Make the loggers of a run; ValueError says which one refused, and why."""
        made: dict[str, Logger] = {}
        for name in names:
            try:
                made[name] = LOGGERS[name](folder, about, first_step=first_step)
            except Exception as error:  # of whatever kind its library has for it
                raise ValueError(f"--logger {name}: {reason(error)}") from error
        return cls(made, tell)

    def log(self, step: int, row: Mapping[str, Any], kind: str) -> None:
        """Note the numbers of a row of metrics.jsonl, with ``kind`` before their names."""
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
            except Exception as error:  # of a library of others: whatever it is, hours of training weigh more
                del self._loggers[name]
                self._tell(
                    f"warning: the logger {name} failed ({reason(error)}); training goes on without it"
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
