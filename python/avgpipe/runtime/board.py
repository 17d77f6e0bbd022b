"""What ranks let each other know beside the pipeline, through a store of torch.distributed.

A store is asked in a thread of its own: its host may stand still or be cut off, and its calls then never return.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_ANSWER_S = 2.0  # a store that takes longer is held to be cut off
_LONGEST = 4000  # characters of a text


class Board:
    """Texts by name. Every method raises RuntimeError where the store is gone or does not answer."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._asking: threading.Thread | None = None  # what the store has not answered yet

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
            if self._asking.is_alive():
                raise RuntimeError("the store does not answer")
            self._asking = None
        try:
            return within(_ANSWER_S, question)
        except Unanswered as unanswered:
            self._asking = unanswered.thread
            raise RuntimeError("the store does not answer") from None


class Unanswered(TimeoutError):
    """What ``within`` was given has not come to an end; ``thread`` is still at it."""

    def __init__(self, seconds: float, thread: threading.Thread) -> None:
        super().__init__(f"not done after {seconds:g} s")
        self.thread = thread


def within(seconds: float, action: Callable[[], T]) -> T:
    """What ``action`` returns or raises, in a thread that is left to itself, with Unanswered, after ``seconds``."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="avgpipe-within", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise Unanswered(seconds, thread)
    return results[0]


def _plain(text: str) -> str:
    """Without what UTF-8 cannot say, as half of a surrogate pair, and of a length that a message may have."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
