"""The scale of float16 losses."""

from __future__ import annotations

from typing import Any

_INITIAL, _GROWTH, _BACKOFF, _GROWTH_INTERVAL = 65536.0, 2.0, 0.5, 2000
_KEPT = 256  # versions of the weights, more than are ever in flight


class LossScale:
    """Scales float16 losses, by the rule and defaults of torch.amp.GradScaler, to keep small gradients.

    The last stage multiplies the loss; all stages divide their gradients again before anything reads them,
    and all skip an update if a gradient on any of them overflowed. Each pipeline has its own scale.

    Args:
        fixed: a scale that never changes; None: dynamic.
        versioned: whether batches run on weights that are not the newest. A batch's scale is then the one at
            the time its weights were made; otherwise it would depend on timing.
    """

    _scale: float
    _first: float  # for weights older than this run
    _tracker: int
    _updates: int
    _scales: dict[int, float]  # by the number of updates that the weights include

    def __init__(self, fixed: float | None, versioned: bool) -> None:
        self._fixed, self._versioned = fixed, versioned
        self.load_state_dict({"scale": _INITIAL if fixed is None else fixed, "growth_tracker": 0})

    def at(self, version: int) -> float:
        """Return the scale for a batch that runs on this version of the weights, counted in updates."""
        return self._scales.get(version, self._first) if self._versioned else self._scale

    def update(self, overflowed: bool) -> None:
        """Adapt the scale after a batch. ``overflowed``: whether its gradient on any stage was not finite."""
        if self._fixed is None:
            self._tracker = 0 if overflowed else self._tracker + 1
            if overflowed:
                self._scale *= _BACKOFF
            elif self._tracker == _GROWTH_INTERVAL:
                self._scale, self._tracker = self._scale * _GROWTH, 0
        self._updates += 1
        self._scales[self._updates] = self._scale
        self._scales.pop(self._updates - _KEPT, None)

    def resume(self, updates: int) -> None:
        """Continue with weights that were replaced by those after ``updates`` updates."""
        self._updates, self._first = updates, self._scale
        self._scales = {updates: self._scale}

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale, "growth_tracker": self._tracker}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scale = float(state["scale"]) if self._fixed is None else self._fixed
        self._tracker = int(state["growth_tracker"])
        self.resume(0)
