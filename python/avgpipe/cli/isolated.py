"""Start isolated pipelines: what ``avgpipe train``, ``avgpipe run`` and ``avgpipe join`` share."""

from __future__ import annotations

import os
from dataclasses import fields

from avgpipe.cli.config import IsolationOptions
from avgpipe.cli.options import Options, flag
from avgpipe.fault.supervise import Isolation
from avgpipe.fault.trunk import parse_address

JOIN_TOKEN = "AVGPIPE_JOIN_TOKEN"
_LEAST = 16  # characters


def isolation_of(config: IsolationOptions, pipelines: int) -> Isolation:
    """Return the numbers of pipelines; ValueError for numbers that contradict each other."""
    most = config.max_pipelines or pipelines
    if not config.min_pipelines <= pipelines <= most:
        raise ValueError(
            f"--min-pipelines {config.min_pipelines}, --max-pipelines {most}: the {pipelines} pipelines that the run "
            "begins with must lie between the two"
        )
    listen = None if config.listen is None else (parse_address(config.listen), secret())
    return Isolation(pipelines, config.min_pipelines, most, config.restarts, config.spare_pipelines, listen)


def secret() -> str:
    """Return the secret that commands on several hosts share; ValueError if it is not set, or too short."""
    token = os.environ.get(JOIN_TOKEN, "")
    if len(token) < _LEAST:
        raise ValueError(
            f"{JOIN_TOKEN} must be set to a secret of {_LEAST} characters or more, the same on all hosts"
        )
    return token


def refuse_isolation(config: IsolationOptions, *more: str) -> None:
    """Refuse options that only isolated pipelines have, and the options in ``more``."""
    own = {f.name for f in fields(IsolationOptions)} - {f.name for f in fields(Options)}
    given = [flag(name) for name in config.given if name in own or name in more]
    if given:
        raise ValueError(f"{', '.join(given)} without --isolate: only isolated pipelines have this option")
