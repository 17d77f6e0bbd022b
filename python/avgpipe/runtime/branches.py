"""Checks whether micro-batches of a batch take the same branches, if a forward reads values of tensors."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_log = logging.getLogger("avgpipe")
_FIRST = 3  # batches that are checked
_ASKS = torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.item


class _BranchAnswers(TorchFunctionMode):
    """Records truth values and floats that the caller's own code reads from tensors.

    Integers, such as lengths, are left out: a forward may well read them for each micro-batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Any]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = function(*args, **(kwargs or {}))
        if function in _ASKS and isinstance(answer, bool | float):
            frame = sys._getframe(1)
            if frame.f_globals.get("__name__", "").split(".")[0] not in ("torch", "transformers"):
                self.found.append((f"{frame.f_code.co_name}, line {frame.f_lineno}", answer))
        return answer


class Branches:
    """Compares values that micro-batches of the first batches read from tensors on a stage; warns once."""

    def __init__(self) -> None:
        self._first: int | None = None  # batch
        self._batch: int | None = None
        self._answers: list[tuple[str, Any]] = []  # of the first micro-batch
        self.done = False

    @contextmanager
    def looking(self, batch: int) -> Iterator[None]:
        """Record the forward of a micro-batch, which runs inside the block."""
        self._first = batch if self._first is None else self._first
        if batch - self._first >= _FIRST:
            self.done = True
        if self.done:
            yield
            return
        with _BranchAnswers() as answers:
            yield
        if batch != self._batch:
            self._batch, self._answers = batch, answers.found
        elif different := next((a for a, b in zip(self._answers, answers.found) if a != b), None):
            self.done = True
            _log.warning(
                "a forward branches on the values of a tensor, or reads them (in %s), and they differ between "
                "micro-batches of batch %d: on one device the whole batch has one answer. Choose for each sample, as "
                "by torch.where, or train with micro_batches=1 and one pipeline",
                *(different[0], batch),
            )
