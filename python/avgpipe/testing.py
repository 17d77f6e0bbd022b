"""Faults on purpose: kill, stop, slow, cut or corrupt a rank of a run at a place that a test names.

See the guide "Test what happens when a rank fails".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from avgpipe.faults.fault import Armed, Fault, to_json
from avgpipe.faults.kinds import InjectedFault
from avgpipe.files import dataclass_of
from avgpipe.ranks.probe import VARIABLE, armed

__all__ = ["Armed", "InjectedFault", "environment", "fail_at"]


def fail_at(
    *,
    kind: str,
    rank: int | None = None,
    pipeline: int | None = None,
    stage: int | None = None,
    batch: int | None = None,
    micro_batch: int | None = None,
    phase: str | None = None,
    action: str | None = None,
    restart: int | None = None,
    after: int = 0,
    after_s: float = 0.0,
    times: int | None = 1,
    for_s: float | None = None,
    where: str | None = None,
    bit: int = 62,
    room_bytes: int = 0,
    store: bool = False,
) -> Armed:
    """Have a fault happen in this process where all that is given fits; every rank of a script may call it alike.

    What is armed waits until the process gets to such a place, in whatever Pipeline it has. The result is a context
    manager, which disarms at its end, and tells how often it has ``fired``. A warning in the log says what was injected
    where. While nothing is armed, training costs what it costs without this module.

    Kinds:

    - "kill": the process gets SIGKILL.
    - "stop": it gets SIGSTOP, and SIGCONT after ``for_s`` seconds; None: it stands still for ever.
    - "slow": it sleeps for ``for_s`` seconds; ``times`` says how often.
    - "exception": `InjectedFault` is raised, as an error of the caller's own code would be.
    - "out of memory": MemoryError is raised, or torch.OutOfMemoryError where the process has an accelerator.
    - "cut line": from now on nothing comes through the line between this rank and the others, and nothing is closed.
      TCP connections, as gloo's, carry nothing in either direction, collectives included. Other links, as shared
      memory, lose what this rank sends, and go on to bring what others send; of these the line is cut at "training",
      "evaluation", "update" and "averaging" alone. Stages of one process have no line between them.
    - "reset": the TCP connections with other ranks end by a reset, which both sides see. Shared memory goes on: its
      ranks notice at the next collective, such as that of a save.
    - "half-written message": the TCP connections with other ranks get the beginning of a message, and the process gets
      SIGKILL. What is half written to shared memory nobody is told of, so there it is a "kill".
    - "full disk": what a save writes finds room for ``room_bytes`` bytes of a file, then "No space left on device".
    - "flipped bit": of ``where="wire"``, the next message with tensors, once it is written for the other end; where it
      stays on a device or in one process, a copy of its first tensor. Of ``where="weights"``, the weights in memory of
      the stage and pipeline that the place is of. Of ``where="checkpoint"``, a file of a save, once it is written.

    Phases, and what names a place in them beside ``rank`` and ``restart``:

    - "start": before the process meets the others for a Pipeline.
    - "training" (``pipeline``, ``stage``, ``batch``, ``micro_batch``, ``action``): before a step, whose action is
      "forward", "backward", "update", or another part of an update, such as "send tied".
    - "evaluation" (as for training): before a forward. Batches are counted over all evaluations and predictions.
    - "update" (``pipeline``, ``stage``, ``batch``): before the optimizer's step, a step of training.
    - "averaging" (as for an update): after it; the reference of this stage has the update, that of others perhaps not.
    - "save" (``pipeline``, ``stage``, ``batch``, ``action``): the action is "begin"; "write" and "written", of each
      file; or, on the first rank, "manifest", before the checkpoint becomes one.
    - "load" (``pipeline``, ``stage``, ``action``): "begin", or "restore", when all is read and nothing changed yet.
    - "join" (``pipeline``, ``stage``): when an isolated pipeline that enters a run under way takes over its state.
    - "shutdown" (``pipeline``, ``stage``): when a Pipeline is closed, as at the end of the program.

    Args:
        kind: see above.
        rank: by its number, as in messages; at "start" as in the environment. None is any, here and below.
        pipeline: index of a pipeline.
        stage: index of a stage.
        batch: number of a batch over the life of the Pipeline.
        micro_batch: number of a micro-batch in its batch.
        phase: see above.
        action: see above.
        restart: how often torchrun or the launcher has started the process again; 0: in its first life alone.
        after: places that fit and are passed by before the first fault.
        after_s: seconds that pass before any place counts.
        times: how often it happens in this process; None: every time.
        for_s: seconds of "stop" and "slow".
        where: "wire", "weights" or "checkpoint", for "flipped bit".
        bit: which bit of the message, weights or file flips; more than there are count on from the first. The default
            makes a large change of a float64 or float32.
        room_bytes: of a "full disk".
        store: "cut line" and "reset" concern the connection with the store of torch.distributed (MASTER_PORT), too.

    Raises:
        ValueError: for an unknown name, and for what can never happen.
    """
    arguments = locals()  # a Fault has the same
    fault = Armed(Fault(**arguments))
    armed.append(fault)
    return fault


def environment(faults: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the variable that arms faults in processes that are yet to start, as the workers of ``avgpipe train``.

    Each process arms them when it imports avgpipe, and counts for itself. One that is started again arms them again,
    unless they have ``restart=0``.

    Args:
        faults: Of each the arguments of :func:`fail_at`, such as ``{"kind": "kill", "rank": 1, "batch": 3}``.

    Raises:
        ValueError: as :func:`fail_at`, and for an unknown argument.
    """
    return {VARIABLE: to_json(dataclass_of("a fault", Fault, dict(one)) for one in faults)}
