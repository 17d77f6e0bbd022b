"""What the runtime logs that a command repeats: its warnings, and by which links workers reach each other."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from types import TracebackType

from avgpipe.links.choose import LINK_MESSAGE

_LOG = "avgpipe"


class LogNotes(logging.Handler):
    """Inside, notes warnings and what this rank's links are. ``links``: JSON, a list of (what is here, what is there,
    link).
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.warnings: list[str] = []
        self._found: list[tuple[str, ...]] = []
        self._level_before = logging.NOTSET

    @property
    def links(self) -> str:
        return json.dumps(self._found)

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == LINK_MESSAGE and isinstance(record.args, tuple):
            self._found.append(tuple(map(str, record.args)))
        elif record.levelno >= logging.WARNING:
            self.warnings.append(record.getMessage())

    def __enter__(self) -> LogNotes:
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
    by_link: dict[str, list[str]] = {}
    seen: set[frozenset[str]] = set()
    for here, there, link in (entry for text in texts for entry in json.loads(text)):
        if {here, there} not in seen:  # both ends say so
            seen.add(frozenset((here, there)))
            by_link.setdefault(link, []).append(f"{here} to {there}")
    if not by_link:
        return []
    if len(by_link) == 1 and len(seen) > 1:
        return [f"links: all {len(seen)} by {next(iter(by_link))}"]
    return ["links: " + "; ".join(f"{', '.join(pairs)} by {link}" for link, pairs in by_link.items())]
