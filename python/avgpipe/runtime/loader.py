"""The caller's batches, one of them fetched ahead while nothing else can run, and on its way to a CUDA device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from avgpipe.device import Handed
from avgpipe.runtime.batch import pair

Batch = tuple[Any, Any, Handed | None]

_LEFT = 4  # iterators left with a batch ahead that are remembered, for they may be given again


class Prefetch:
    """Pairs (inputs, targets) of the loaders that are opened one after another, with what ``copy`` made of each.

    Fetching happens in the scheduler's thread, when it would wait otherwise, so loaders need to know nothing of
    threads and their calls keep their order. What a loader raises comes out of :meth:`next`, where it would have
    without. A batch is always ahead when a result is handed out, had there been time to fetch it or not: what the
    loader and the caller draw from one generator must not depend on timing.
    """

    def __init__(self, copy: Callable[[Any, Any], Handed | None]) -> None:
        self._copy = copy
        self._source: Iterator[Any] = iter(())
        self._loader: Any = None
        self._state: Any = None  # of the loader, before the newest batch was fetched from it
        self._ahead: list[Any] = []  # at most one: a batch, or what was raised instead
        self._left: deque[tuple[Iterator[Any], list[Any]]] = deque(maxlen=_LEFT)
        self._ended = False

    def open(self, loader: Iterable[Any]) -> None:
        source = iter(loader)
        self._loader, self._state = loader, None
        # An iterator that is given again goes on with the batch that was fetched from it already.
        if source is not self._source:
            if self._ahead:
                self._left.append((self._source, self._ahead))
            ahead = next((ahead for left, ahead in self._left if left is source), [])
            self._left = deque((item for item in self._left if item[0] is not source), _LEFT)
            self._source, self._ahead = source, ahead
        self._ended = False

    def fetch(self, outside: Callable[[], AbstractContextManager[None]]) -> bool:
        """Fetch a batch unless one is there, inside ``outside()``; whether there was something to do."""
        if self._ahead or self._ended:
            return False
        with outside():
            self._fetch()
        return True

    def _fetch(self) -> None:
        tell = getattr(self._loader, "state_dict", None)
        try:
            # What it would give next if it began anew: the batch that is fetched now may never be trained on.
            self._state = tell() if callable(tell) else None
            inputs, targets = pair(next(self._source))
            self._ahead.append((inputs, targets, self._copy(inputs, targets)))
        except StopIteration:
            self._ended = True
        except Exception as error:
            self._ahead.append(error)
            self._ended = True

    def state(self, loader: Any) -> Any:
        """The state of ``loader`` after the batches that were taken from it here."""
        tell = getattr(loader, "state_dict", None)
        if not callable(tell):
            raise TypeError(
                f"a {type(loader).__name__} has no state_dict: use a loader that has one, such as torchdata's "
                "StatefulDataLoader, or skip pipeline.batches batches of the same order"
            )
        if self._loader is not None and self._loader is not loader:
            raise ValueError(
                f"train was given a {type(self._loader).__name__} and not this {type(loader).__name__}, whose place it "
                "cannot tell: give it the loader itself"
            )
        return self._state if self._ahead else tell()

    def next(self) -> Batch | None:
        """The next batch, or None at the end."""
        if not self._ahead and not self._ended:
            self._fetch()
        if not self._ahead:
            return None
        batch = self._ahead.pop()
        if isinstance(batch, BaseException):
            raise batch
        inputs, targets, copied = batch
        return inputs, targets, copied
