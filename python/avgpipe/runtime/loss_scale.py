"""Dynamic scaling of the loss, which keeps small gradients of float16 from becoming 0: torch.amp.GradScaler's rule.

The last stage multiplies the loss; all stages divide their gradients again before anything looks at them, and all skip
an update where a gradient on any of them overflowed. Each pipeline has a scale of its own.
"""

from __future__ import annotations

from typing import Any

# Those of torch.amp.GradScaler.
_INITIAL, _GROWTH, _BACKOFF, _GROWTH_INTERVAL = 65536.0, 2.0, 0.5, 2000
_KEPT = 256  # versions of the weights, more than are ever under way


class LossScale:
    """``fixed``: a scale that never changes; None: dynamic.

    versioned: whether batches run on weights that are not the newest. A batch's scale is then the one that was there
    when its weights were made, or it would depend on timing.
    """

    _scale: float
    _first: float  # for weights that are older than this run
    _tracker: int
    _updates: int
    _scales: dict[int, float]  # by updates that the weights had seen

    def __init__(self, fixed: float | None, versioned: bool) -> None:
        self._fixed, self._versioned = fixed, versioned
        self.load_state_dict({"scale": _INITIAL if fixed is None else fixed, "growth_tracker": 0})

    def at(self, version: int) -> float:
        """The scale for a batch that runs on this version of the weights, counted in updates."""
        return self._scales.get(version, self._first) if self._versioned else self._scale

    def update(self, overflowed: bool) -> None:
        """A batch is done; ``overflowed``: a gradient of it, on any stage, was not finite."""
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
        """The weights were replaced by those after so many updates."""
        self._updates, self._first = updates, self._scale
        self._scales = {updates: self._scale}

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale, "growth_tracker": self._tracker}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scale = float(state["scale"]) if self._fixed is None else self._fixed
        self._tracker = int(state["growth_tracker"])
        self.resume(0)
