"""The CUDA driver's own functions, through ctypes: memory that other processes open needs them.

Not through CuPy, which is an extra: a link between processes must not need it. torch has no call for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


class Driver:
    """Calls the driver, in torch's context of a device. OSError if there is no driver."""

    def __init__(self) -> None:
        self._library = _load()

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        """Make torch's context of a device the thread's inside: a thread may have none yet."""
        self.call("cuCtxPushCurrent_v2", self._primary(device))
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    @cache  # noqa: B019  there is one driver, which lives as long as the process
    def _primary(self, device: int) -> ctypes.c_void_p:
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(number), device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)  # until the process ends
        return context

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver; RuntimeError with its reason if it fails."""
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")


def _load() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def driver() -> Driver:
    return Driver()
