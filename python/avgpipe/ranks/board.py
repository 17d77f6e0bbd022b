"""What ranks let each other know beside the pipeline, through a store of torch.distributed.

A store is asked in a thread of its own: its host may stand still or be cut off, and its calls then never return.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from avgpipe.errors import PeerLost, reason

T = TypeVar("T")

_ANSWER_S = 2.0  # a store that takes longer is held to be cut off
_LONGEST = 4000  # characters of a text


class Silence(RuntimeError):
    """A store has not answered in time; it may later."""


class Board:
    """Texts by name. Every method raises RuntimeError where the store is gone, and Silence where it does not answer."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._asking: Task[Any] | None = None  # what the store has not answered yet

    @classmethod
    def beside(cls, store: Any, timeout_s: float) -> Board:
        """On a connection of its own: what others ask ``store`` meanwhile, and have to wait for, would keep it."""
        try:
            return cls(within(timeout_s, store.clone))
        except NotImplementedError:  # a store of another maker
            return cls(store)
        except (RuntimeError, Unanswered) as error:
            raise PeerLost(
                f"nobody answers who holds the store, rank 0 or the launcher: {reason(error)}"
            ) from error

    def put(self, name: str, text: str) -> None:
        self._ask(lambda: self._store.set(name, _plain(text)))

    def put_first(self, name: str, text: str) -> str:
        """Unless there is a text of that name already; the text that is there then."""
        return self._ask(lambda: str(self._store.compare_set(name, "", _plain(text)).decode()))

    def get(self, name: str) -> str | None:
        def look() -> str | None:
            return str(self._store.get(name).decode()) if self._store.check([name]) else None

        return self._ask(look)

    def _ask(self, question: Callable[[], T]) -> T:
        if self._asking is not None:
            if not self._asking.ends_within(0):
                raise Silence("the store does not answer")
            self._asking = None
        try:
            return within(_ANSWER_S, question)
        except Unanswered as unanswered:
            self._asking = unanswered.task
            raise Silence("the store does not answer") from None


class Unanswered(TimeoutError):
    """``task`` has not come to an end."""

    def __init__(self, seconds: float, task: Task[Any]) -> None:
        super().__init__(f"not done after {seconds:g} s")
        self.task = task


class Task(Generic[T]):
    """``action`` in a thread of its own, which is left to itself if it never ends."""

    def __init__(self, action: Callable[[], T]) -> None:
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(action,), name="avgpipe-task", daemon=True)
        self._thread.start()

    def ends_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> T:
        """What it returned or raised, once it has ended."""
        if self._errors:
            raise self._errors[0]
        return self._results[0]

    def _run(self, action: Callable[[], T]) -> None:
        try:
            self._results.append(action())
        except BaseException as error:
            self._errors.append(error)


def within(seconds: float, action: Callable[[], T]) -> T:
    """What ``action`` returns or raises; Unanswered where that takes longer."""
    task = Task(action)
    if not task.ends_within(seconds):
        raise Unanswered(seconds, task)
    return task.result()


def _plain(text: str) -> str:
    """Without what UTF-8 cannot say, as half of a surrogate pair, and of a length that a message may have."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
