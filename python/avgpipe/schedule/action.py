"""One step of a stage: the forward or backward of a micro-batch, or the weight update."""

from __future__ import annotations

import re
from dataclasses import dataclass

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for the inputs",
    "W": "backward for the weights",
    "U": "update",
}

# Nine digits: any real count fits, and a cell of nonsense digits cannot become a gigantic integer.
_TOKEN = re.compile(r"(U)|([FBIW])(0|[1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True)
class Action:
    """A step of a stage: its kind, one of F, B, I, W, U, and its micro-batch, counted from 0 (None for U).

    ``str(action)`` is a token such as "F3" or "U", and :meth:`parse` inverts it. A backward is either whole
    (B) or split into I, which computes the gradient that the stage before waits for, and a later W for the
    weights.
    """

    kind: str
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: must be one of {', '.join(KINDS)}")
        if self.kind == "U":
            if self.micro_batch is not None:
                raise ValueError(f"micro_batch={self.micro_batch!r}: an update has none, pass Action('U')")
        elif type(self.micro_batch) is not int or self.micro_batch < 0:
            raise ValueError(f"micro_batch={self.micro_batch!r}: {self.kind} needs an int of at least 0")

    def __str__(self) -> str:
        return self.kind if self.micro_batch is None else f"{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, token: str) -> Action:
        """The action that prints as ``token``; ValueError if there is none."""
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise ValueError(
                f"{token!r} is not an action: write F, B, I or W with a micro-batch, as F3, or U"
            )
        update, kind, micro_batch = match.groups()
        return cls("U") if update else cls(kind, int(micro_batch))
