"""A rank of a training run: ``avgpipe train`` starts ``python -m avgpipe.cli.worker PARENT`` for each."""

from __future__ import annotations

import os
import signal
import sys
import traceback

from avgpipe.cli.config import CONFIG, TrainConfig
from avgpipe.cli.errors import FAILED, CommandFailed, arguments, running, say
from avgpipe.cli.launch import PEER_LOST
from avgpipe.cli.process import die_with_parent, ending_on_signals
from avgpipe.errors import PeerLost

GRACE_S = 3.0  # after SIGTERM, to see the closed connection of the worker that died and name it


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


def main() -> None:
    (parent,) = sys.argv[1:]
    die_with_parent(int(parent))
    text = os.environ.pop(CONFIG)
    os.dup2(2, 1)  # standard output belongs to the command
    with ending_on_signals(_nothing, GRACE_S):
        try:
            run_rank(TrainConfig.from_json(text))
            leave_group()
            code = 0
        except CommandFailed as failure:
            say(str(failure))
            code = PEER_LOST if isinstance(failure.__cause__, PeerLost) else failure.exit_code
        except Exception:
            traceback.print_exc()
            code = FAILED
        sys.stderr.flush()
        if code:
            os._exit(code)  # threads that wait for a lost peer must not hold this process up


def _nothing(_: signal.Signals) -> None:
    """The command says why all workers end."""


def leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
