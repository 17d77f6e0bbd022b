"""Progress of a run on standard error, as a bar on a terminal, else as lines; and what its log contains."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from logging.handlers import BufferingHandler
from operator import length_hint
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from avgpipe.links.choose import LINK_MESSAGE
from avgpipe.tasks import BatchLoader
from avgpipe.units import duration

_LINE_EVERY_S = 10.0
_SMOOTHING = 0.95  # weight of the former mean in the shown loss, per batch
_LOG = "avgpipe"


class ProgressBar:
    """Shows a run of ``total`` batches of which ``done`` were done before."""

    def __init__(self, total: int, done: int) -> None:
        self._total, self._done, self._begun = total, done, done
        self._loss = self._weight = 0.0
        self._samples = self._seconds = 0.0
        self._last_line = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (
                TextColumn("{task.description:<8}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), refresh_per_second=4)
            self._training = self._bar.add_task("training", total=total, completed=done, facts="")
            self._bar.start()

    def batch(self, loss: float, samples: int, seconds: float, is_new: bool = True) -> None:
        """Count a finished batch, or the rest of an older one; ``seconds``: the time since the batch before."""
        self._done += is_new
        if loss == loss:  # a NaN would stay in the mean for ever
            self._loss = _SMOOTHING * self._loss + (1 - _SMOOTHING) * loss
            self._weight = _SMOOTHING * self._weight + (1 - _SMOOTHING)
        self._samples += samples
        self._seconds += seconds
        if self._bar is not None:
            self._bar.update(self._training, completed=self._done, facts=self._facts())
        elif self._line_is_due():
            self.note(f"batch {self._done}/{self._total}  {self._facts()}")

    def validating(self, batches: BatchLoader, most: int | None = None) -> Iterator[Any]:
        """Yield the batches, or the first of them, and show the progress."""
        total = min((n for n in (length_hint(batches), most) if n), default=None)
        if self._bar is not None:
            task = self._bar.add_task("validation", total=total, facts="")
            for batch in islice(batches, total):
                yield batch
                self._bar.advance(task)
            self._bar.remove_task(task)
            return
        for number, batch in enumerate(islice(batches, total)):
            if self._line_is_due():
                self.note(f"validation {number}" + (f"/{total}" if total else ""))
            yield batch

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._last_line = time.monotonic()
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _line_is_due(self) -> bool:
        return time.monotonic() - self._last_line >= _LINE_EVERY_S

    def _facts(self) -> str:
        loss = self._loss / self._weight if self._weight else float("nan")
        rate = self._samples / self._seconds if self._seconds else 0.0
        per_batch = self._seconds / (self._done - self._begun)
        left = duration(per_batch * max(0, self._total - self._done))
        return f"loss {loss:.3f}  {rate:.1f} samples/s  {left} left"


# ---- the runtime's log -----------------------------------------------------------------------------------------------


@contextmanager
def log_records() -> Iterator[list[logging.LogRecord]]:
    """Collect what the runtime logs inside the block."""
    log, collecting = logging.getLogger(_LOG), BufferingHandler(sys.maxsize)
    level = log.level
    log.setLevel(min(log.getEffectiveLevel(), logging.INFO))
    log.addHandler(collecting)
    try:
        yield collecting.buffer
    finally:
        log.removeHandler(collecting)
        log.setLevel(level)


def links_of(records: Iterable[logging.LogRecord]) -> list[tuple[str, ...]]:
    """Return each pair of places that the runtime logged, this rank's first, and the link between them."""
    args = (record.args for record in records if record.msg == LINK_MESSAGE)
    return [tuple(map(str, found)) for found in args if isinstance(found, tuple)]


def warnings_of(records: Iterable[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


def links_line(links: Iterable[Sequence[Sequence[str]]]) -> list[str]:
    """Return one line on the links of all ranks; none where a single process has all stages."""
    joined: dict[frozenset[str], Sequence[str]] = {}
    for entry in chain.from_iterable(links):
        joined.setdefault(frozenset(entry[:2]), entry)  # both ends log it
    by_link: dict[str, list[str]] = {}
    for here, there, link in joined.values():
        by_link.setdefault(link, []).append(f"{here} to {there}")
    if len(by_link) == 1 and len(joined) > 1:
        return [f"links: all {len(joined)} by {next(iter(by_link))}"]
    said = "; ".join(f"{', '.join(pairs)} by {link}" for link, pairs in by_link.items())
    return [f"links: {said}"] if said else []
