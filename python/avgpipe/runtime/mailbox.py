"""Where arrived messages wait for the lane that needs them. Any thread delivers; one, the scheduler's, takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from avgpipe.runtime.message import Key


class Mailbox:
    def __init__(self) -> None:
        self._messages: dict[Key, Any] = {}
        self._changed = threading.Event()
        self._failure: BaseException | None = None

    def deliver(self, key: Key, value: Any) -> None:
        self._messages[key] = value
        self._changed.set()

    def fail(self, failure: BaseException) -> None:
        """Make every later wait raise ``failure`` (the first one stays)."""
        if self._failure is None:
            self._failure = failure
        self._changed.set()

    def __contains__(self, key: Key) -> bool:
        return key in self._messages

    def take(self, key: Key) -> Any:
        return self._messages.pop(key)

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def wait_until(self, arrived: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for ``arrived()`` to come true, looked at whenever something is delivered; False after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._changed.clear()  # before the look: what arrives during it ends the wait after it
            self.raise_failure()
            if arrived():
                return True
            if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                return False
