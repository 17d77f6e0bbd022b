"""What all ranks do, or none."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from avgpipe.errors import CheckpointError, reason
from avgpipe.ranks.world import World

T = TypeVar("T")


class NotFinite(CheckpointError):
    """Weights with infinities or NaN, which no other disk would take either."""


def agreed(world: World, what: str, action: Callable[[], Any]) -> list[Any]:
    """What ``action`` returns on every rank, in rank order, as JSON carries it.

    Where it fails on one, CheckpointError on all, with the first one's reason behind ``what``. Collectives inside would
    hang.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as failure:
        error = failure
    mine = [spell(error), isinstance(error, NotFinite), result]
    told = [json.loads(text) for text in world.gather_texts(json.dumps(mine))]
    for rank, (failed, is_not_finite, _) in enumerate(told):
        if failed:
            where = f"{what} (rank {rank})" if world.size > 1 else what
            raise (NotFinite if is_not_finite else CheckpointError)(f"{where}: {failed}") from error
    return [value for _, _, value in told]


def spell(error: Exception | None) -> str:
    """In one line; empty without an error."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return "" if error is None else reason(error)
