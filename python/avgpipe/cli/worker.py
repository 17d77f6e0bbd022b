"""A rank of a training run: ``avgpipe train`` starts ``python -m avgpipe.cli.worker PARENT`` for each."""

from __future__ import annotations

from avgpipe.cli.config import TrainConfig
from avgpipe.cli.errors import CommandFailed, arguments, running, say
from avgpipe.errors import PeerLost
from avgpipe.ranks.process import PEER_LOST


def run_rank(config: TrainConfig) -> None:
    """Train as this rank; raises CommandFailed."""
    with arguments():
        from avgpipe.cli.training import TrainingRun

        run = TrainingRun(config)
    try:
        with running():
            run.train()
            run.close()
    except BaseException:
        run.progress.close()
        raise


def run_worker(config: str) -> None:
    """Train as a rank that the command has started, and end with a code that says who is to blame."""
    try:
        run_rank(TrainConfig.from_json(config))
    except CommandFailed as failure:
        say(str(failure))
        lost = isinstance(failure.__cause__, PeerLost)
        raise SystemExit(PEER_LOST if lost else failure.exit_code) from failure
