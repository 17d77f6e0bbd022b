"""Inject faults: kill, stop, slow, cut or corrupt a rank of a run at a place that a test names.

See the guide "Test what happens when a rank fails".

Kinds:

- "kill": the process gets SIGKILL.
- "stop": it gets SIGSTOP, and SIGCONT after ``for_s`` seconds; None: it is never continued.
- "slow": it sleeps for ``for_s`` seconds; ``times`` says how often.
- "exception": `InjectedFault` is raised, as an error of the caller's own code would be.
- "out of memory": MemoryError is raised, or torch.OutOfMemoryError where the process has an accelerator.
- "cut line": from now on nothing passes between this rank and the others, and nothing is closed. TCP
  connections, such as gloo's, carry nothing in either direction, collectives included. Other links, such
  as shared memory, lose what this rank sends, and still carry what others send; these are cut at
  "training", "evaluation", "update" and "averaging" alone. Stages of one process have no line between
  them.
- "reset": the TCP connections with other ranks end by a reset, which both ends notice. Shared memory still
  works: its ranks notice at the next collective, such as that of a save.
- "half-written message": the TCP connections with other ranks get the beginning of a message, and the process gets
  SIGKILL. In shared memory a half-written message is never announced, so there it is a "kill".
- "full disk": what a save writes finds room for ``room_bytes`` bytes of a file, then "No space left on device".
- "flipped bit": one bit flips. With ``where="wire"``, in the next message with tensors, once it is written
  for the other end; where it stays on a device or in one process, in a copy of its first tensor. With
  ``where="weights"``, in the weights in memory of the place's stage and pipeline. With
  ``where="checkpoint"``, in a file of a save, once it is written.

Phases, and what names a place in them beside ``rank`` and ``restart``:

- "start": before the process meets the others for a Pipeline.
- "training" (``pipeline``, ``stage``, ``batch``, ``micro_batch``, ``action``): before an action, which is
  "forward", "backward", "update", or another part of an update, such as "send tied".
- "evaluation" (as for training): before a forward. Batches are counted over all evaluations and predictions.
- "update" (``pipeline``, ``stage``, ``batch``): before the optimizer's step, an action of training.
- "averaging" (as for an update): after it; the reference of this stage has the update, that of others perhaps not.
- "save" (``pipeline``, ``stage``, ``batch``, ``action``): the action is "begin"; "write" and "written", of each
  file; or, on the first rank, "manifest", before the checkpoint becomes valid.
- "load" (``pipeline``, ``stage``, ``action``): "begin", or "restore", when all is read and nothing changed yet.
- "join" (``pipeline``, ``stage``): when an isolated pipeline that joins a run takes over its state.
- "shutdown" (``pipeline``, ``stage``): when a Pipeline is closed, such as at the end of the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from avgpipe.faults.fault import Armed, Fault, InjectedFault, to_json
from avgpipe.files import dataclass_of
from avgpipe.ranks.environment import VARIABLE, armed

__all__ = ["Armed", "InjectedFault", "environment", "fail_at"]


def fail_at(*, kind: str, **options: Any) -> Armed:
    """Make a fault happen in this process where all given values fit; every rank may make the same call.

    An armed fault waits until the process reaches such a place, in any Pipeline. The result is a context
    manager, which disarms the fault at its end, and counts in ``fired`` how often it has happened. A warning
    in the log says what was injected where. While nothing is armed, training is as fast as without this
    module.

    Args:
        kind: see ``avgpipe.testing``.
        options: where and when; what is left out fits any place.

            - rank: by its number, as in messages; at "start" as in the environment.
            - pipeline, stage: their indices.
            - batch: number of a batch over the life of the Pipeline.
            - micro_batch: number of a micro-batch in its batch.
            - phase, action: their names.
            - restart: how often torchrun or the launcher has restarted the process; 0: only its first start.
            - after: number of fitting places to pass before the first fault, by default 0.
            - after_s: seconds to pass before any place counts, by default 0.
            - times: how often it happens in this process, by default once; None: every time.
            - for_s: seconds of "stop" and "slow".
            - where: "wire", "weights" or "checkpoint", for "flipped bit".
            - bit: which bit of the message, weights or file flips, modulo their number. The default, 62, makes a
              large change of a float64 or float32.
            - room_bytes: of a "full disk".
            - store: True: "cut line" and "reset" include the connection with the store of torch.distributed
              (MASTER_PORT).

    Raises:
        ValueError: for an unknown name, and for a fault that can never happen.
    """
    fault = Armed(dataclass_of("a fault", Fault, {"kind": kind, **options}))
    armed.append(fault)
    return fault


def environment(faults: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the variable that arms faults in new processes, such as the workers of ``avgpipe train``.

    Each process arms them when it imports avgpipe, and counts for itself. A restarted process arms them
    again, unless they have ``restart=0``.

    Args:
        faults: The arguments of :func:`fail_at` for each, such as ``{"kind": "kill", "rank": 1, "batch":
            3}``.

    Raises:
        ValueError: as :func:`fail_at`, and for an unknown argument.
    """
    return {VARIABLE: to_json(dataclass_of("a fault", Fault, dict(one)) for one in faults)}
