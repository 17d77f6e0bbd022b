"""Where arrived messages wait for the lane that needs them. Any thread delivers; one thread, the scheduler's, takes."""

from __future__ import annotations

import queue
from typing import Any

from avgpipe.runtime.message import Key


class Mailbox:
    def __init__(self) -> None:
        self._messages: dict[Key, Any] = {}
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._failure: BaseException | None = None

    def deliver(self, key: Key, value: Any) -> None:
        self._messages[key] = value
        self._wakeups.put(None)

    def fail(self, failure: BaseException) -> None:
        """Make every later :meth:`wait` raise ``failure`` (the first one stays)."""
        if self._failure is None:
            self._failure = failure
        self._wakeups.put(None)

    def __contains__(self, key: Key) -> bool:
        return key in self._messages

    def take(self, key: Key) -> Any:
        return self._messages.pop(key)

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def wait(self, timeout_s: float) -> bool:
        """Wait for anything to arrive; False after ``timeout_s`` seconds without."""
        self.raise_failure()
        try:
            self._wakeups.get(timeout=timeout_s)
        except queue.Empty:
            return False
        self.raise_failure()
        return True
