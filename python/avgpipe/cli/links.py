"""By which link each stage reaches the next one, as the runtime's log says, in one line of the command's."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from types import TracebackType

_LOG = "avgpipe"
_MESSAGE = "stage %d to stage %d: %s"  # of `avgpipe.runtime.links.choose`


class LinkNotes(logging.Handler):
    """Inside, notes what this rank's links are. ``text``: JSON, a list of (stage, next stage, link)."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._found: list[tuple[int, int, str]] = []
        self._level_before = logging.NOTSET

    @property
    def text(self) -> str:
        return json.dumps(self._found)

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == _MESSAGE and isinstance(record.args, tuple):
            stage, other, link = record.args
            if isinstance(stage, int) and other == stage + 1:
                self._found.append((stage, other, str(link)))

    def __enter__(self) -> LinkNotes:
        log = logging.getLogger(_LOG)
        self._level_before = log.level
        if not log.isEnabledFor(logging.INFO):
            log.setLevel(logging.INFO)
        log.addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        log = logging.getLogger(_LOG)
        log.removeHandler(self)
        log.setLevel(self._level_before)


def links_line(texts: Sequence[str]) -> list[str]:
    """One line from the notes of all ranks; none where a single process has all stages."""
    found = [(stage, other, link) for text in texts for stage, other, link in json.loads(text)]
    by_link: dict[str, list[str]] = {}
    for stage, other, link in found:
        by_link.setdefault(link, []).append(f"stage {stage} to stage {other}")
    if not by_link:
        return []
    if len(by_link) == 1 and len(found) > 1:
        return [f"links: all {len(found) + 1} stages by {next(iter(by_link))}"]
    return ["links: " + "; ".join(f"{', '.join(pairs)} by {link}" for link, pairs in by_link.items())]
