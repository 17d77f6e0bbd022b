"""The options of an averaging rule, checked."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

from avgpipe.errors import nearest

RULES = ("avgpipe", "easgd")
STALENESS = (0, 1, "asynchronous")
EASGD_BETA = 0.9  # Zhang, Choromanska, LeCun 2015: alpha = beta / N


@dataclass(frozen=True)
class Elasticity:
    """How ``replicas`` (N) replicas agree with the reference: see :class:`avgpipe.Reference` for the
    meanings."""

    replicas: int
    rule: str
    alpha: float
    staleness: int | str
    period: int

    @staticmethod
    def checked(
        replicas: int, alpha: float | None, rule: str, staleness: int | str, period: int
    ) -> Elasticity:
        """The options with the default of ``alpha`` filled in; ValueError or TypeError for a wrong one."""
        _positive("replicas", replicas)
        _positive("period", period)
        if rule not in RULES:
            raise ValueError(f"unknown rule {rule!r}: {nearest(str(rule), RULES)}")
        if isinstance(staleness, str) and staleness != "asynchronous":
            raise ValueError(
                f"unknown staleness {staleness!r}: {nearest(staleness, ['0', '1', 'asynchronous'])}"
            )
        if isinstance(staleness, bool) or staleness not in STALENESS:
            raise ValueError(f"staleness must be 0, 1 or 'asynchronous', not {staleness!r}")
        if alpha is None:
            alpha = EASGD_BETA / replicas if rule == "easgd" else 1 / replicas if replicas > 1 else 0.0
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
            raise TypeError(f"alpha must be a number from 0 to 1 or None, not {alpha!r}")
        if not (math.isfinite(alpha) and 0 <= alpha <= 1):
            raise ValueError(
                f"alpha must be from 0 (no elasticity) to 1 (replicas restart at z), not {alpha!r}"
            )
        if rule == "easgd" and replicas * alpha > 1 + 1e-9:
            warnings.warn(
                f"easgd with alpha {alpha} and {replicas} replicas: z overshoots when replicas * alpha > 1; "
                f"the published value is {EASGD_BETA}/{replicas}",
                stacklevel=3,
            )
        return Elasticity(replicas, rule, float(alpha), staleness, period)

    @property
    def asynchronous(self) -> bool:
        return self.staleness == "asynchronous"

    @property
    def force(self) -> tuple[float, int]:
        """Elasticity and staleness of the part of rule avgpipe that a replica does when it arrives."""
        # staleness 0: the force comes with z', once all updates are in; here only the update is gathered
        return (0.0, 0) if self.staleness == 0 else (self.alpha, 1)

    @property
    def pulls_at_the_end(self) -> bool:
        """The step that completes a round moves the weights of all replicas."""
        return self.rule == "avgpipe" and self.staleness == 0 and self.alpha != 0

    @property
    def scale(self) -> float:
        """What one replica's update is multiplied by on its way into z."""
        return 1 / self.replicas if self.rule == "avgpipe" else 1.0


def _positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
