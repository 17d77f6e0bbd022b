"""How far a run is, on standard error: a bar on a terminal, else a line every now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

_LINE_EVERY_S = 10.0
_SMOOTHING = 0.95  # of the loss shown, per batch


class Sized(Protocol):
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


class Silent:
    """Of the ranks other than the first."""

    def batch(self, loss: float, samples: int, seconds: float) -> None:
        """A batch is done; ``seconds`` of training it took since the one before."""

    def validating(self, batches: Sized) -> Iterable[Any]:
        """``batches``, with their progress shown as they are taken."""
        return batches

    def note(self, text: str) -> None:
        """Say something that stays."""

    def close(self) -> None: ...


class Progress(Silent):
    """``done`` of ``total`` batches at the beginning."""

    def __init__(self, total: int, done: int) -> None:
        self._total, self._done, self._begun = total, done, done
        self._loss = self._weight = 0.0
        self._samples = self._seconds = 0.0
        self._last_line = time.monotonic()
        self._bar: Bar | None = None
        if sys.stderr.isatty():
            columns = (
                TextColumn("{task.description:<8}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), refresh_per_second=4)
            self._training = self._bar.add_task("training", total=total, completed=done, facts="")
            self._bar.start()

    def batch(self, loss: float, samples: int, seconds: float) -> None:
        self._done += 1
        if loss == loss:  # a NaN would stay in the mean for ever
            self._loss = _SMOOTHING * self._loss + (1 - _SMOOTHING) * loss
            self._weight = _SMOOTHING * self._weight + (1 - _SMOOTHING)
        self._samples += samples
        self._seconds += seconds
        if self._bar is not None:
            self._bar.update(self._training, completed=self._done, facts=self._facts())
        elif self._line_is_due():
            self.note(f"batch {self._done}/{self._total}  {self._facts()}")

    def validating(self, batches: Sized) -> Iterable[Any]:
        if self._bar is None:
            return self._validating_lines(batches)
        return self._validating_bar(self._bar, batches)

    def note(self, text: str) -> None:
        self._last_line = time.monotonic()
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _validating_bar(self, bar: Bar, batches: Sized) -> Iterator[Any]:
        task = bar.add_task("validation", total=len(batches), facts="")
        for batch in batches:
            yield batch
            bar.advance(task)
        bar.remove_task(task)

    def _validating_lines(self, batches: Sized) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if self._line_is_due():
                self.note(f"validation {number}/{len(batches)}")
            yield batch

    def _line_is_due(self) -> bool:
        return time.monotonic() - self._last_line >= _LINE_EVERY_S

    def _facts(self) -> str:
        loss = self._loss / self._weight if self._weight else float("nan")
        rate = self._samples / self._seconds if self._seconds else 0.0
        per_batch = self._seconds / (self._done - self._begun)
        return f"loss {loss:.3f}  {rate:.1f} samples/s  {spell_s(per_batch * max(0, self._total - self._done))} left"


def spell_s(seconds: float) -> str:
    """A duration to read: 42 s, 3:05 min, 2:07 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"
