"""A process of `cluster.run_workers`: ``python -m avgpipe.bench.schedules.worker PARENT TARGET FOLDER``."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from avgpipe.bench.schedules.cluster import ARGUMENTS, PEER_LOST
from avgpipe.cli.process import die_with_parent
from avgpipe.errors import PeerLost


def main() -> None:
    parent, target, folder = sys.argv[1:]
    die_with_parent(int(parent))
    module, _, name = target.partition(":")
    function: Callable[..., object] = getattr(importlib.import_module(module), name)
    try:
        result = function(**json.loads((Path(folder) / ARGUMENTS).read_text()))
    except PeerLost as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(PEER_LOST)
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    _leave()


def _leave() -> None:
    """Together: the store lives in rank 0. And at once: a library's thread may still wait for what never comes."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
