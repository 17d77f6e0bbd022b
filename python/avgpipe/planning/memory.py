"""What a worker of a stage must hold, and what is said where that is more than it has."""

from __future__ import annotations

import math

from avgpipe.planning.chain import Chain
from avgpipe.units import format_bytes


def stage_bytes(
    chain: Chain,
    first: int,
    last: int,
    *,
    in_flight: int,
    versions: int = 1,
    copies: int = 1,
    extra_copies: int = 0,
    recompute: bool = False,
    whole: int = 1,
) -> float:
    """Bytes of a worker with layers ``first`` to ``last`` - 1.

    in_flight: micro-batches between their forward and backward, of all copies. versions: of the weights, the newest
    included. copies: of the model, each with its weights, gradients and optimizer state. extra_copies: of the
    trained weights alone. recompute: micro-batches in flight hold their inputs, and ``whole`` of them at a time all
    the rest.
    """
    weights = chain.parameter_bytes(first, last)
    state = weights * (versions + 1) + chain.optimizer_bytes(first, last) + chain.frozen_bytes(first, last)
    held = chain.held_bytes(first, last)
    kept = in_flight * held
    if recompute:
        kept = in_flight * chain.input_bytes(first) + min(whole, in_flight) * (
            held - chain.input_bytes(first)
        )
    needed = copies * state + extra_copies * weights + kept + chain.working_bytes(first, last)
    return chain.profile.process_bytes + needed


def check_limit(limit: float | None) -> None:
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
        raise ValueError(
            f"memory_limit_bytes={limit!r}: must be a number of bytes above 0, or None for no limit"
        )


def does_not_fit(limit: float, least: float, advice: str) -> ValueError:
    """``least``: the smallest limit with which a plan can be made."""
    least, limit = math.ceil(least), math.floor(limit)  # what is allowed then is enough
    return ValueError(
        f"memory_limit_bytes={limit:.0f}: nothing fits; the plan that needs least needs {least:.0f} bytes on one "
        f"worker, {least - limit:.0f} more ({format_bytes(least)} instead of {format_bytes(limit)}): "
        f"allow that, or {advice}"
    )
