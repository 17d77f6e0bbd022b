"""The effect of each kind of fault on the process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from avgpipe.faults.connections import begin_message, connections, cut, reset
from avgpipe.faults.fault import Fault

_log = logging.getLogger("avgpipe")
# Sends SIGCONT to its parent after some seconds, unless the parent ends before.
_CONTINUE = """
import os, select, signal, sys
parent = os.pidfd_open(int(sys.argv[1]))
if not select.select([parent], [], [], float(sys.argv[2]))[0]:
    signal.pidfd_send_signal(parent, signal.SIGCONT)
"""


class InjectedFault(RuntimeError):
    """The error that ``fail_at(kind="exception")`` raises."""


def happen(fault: Fault, phase: str, place: Mapping[str, Any]) -> bool:
    """Let a fault happen; return whether the place itself must act on it."""
    where = f"at {phase}: {', '.join(f'{n} {v}' for n, v in place.items() if v is not None)}"
    _log.warning("avgpipe.testing: %s %s", fault.kind, where)
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        _stop(fault.for_s)
    elif fault.kind == "slow":
        time.sleep(fault.for_s or 0)
    elif fault.kind == "exception":
        raise InjectedFault(f"injected by avgpipe.testing {where}")
    elif fault.kind == "out of memory":
        _run_out_of_memory(where)
    elif fault.kind == "half-written message":
        for descriptor in connections():
            begin_message(descriptor)
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        if fault.kind in ("cut line", "reset"):
            for descriptor in connections(fault.store):
                (cut if fault.kind == "cut line" else reset)(descriptor)
        return fault.kind != "reset"
    return False


def _stop(for_s: float | None) -> None:
    command = [sys.executable, "-S", "-E", "-c", _CONTINUE, str(os.getpid()), str(for_s)]
    helper = None if for_s is None else subprocess.Popen(command)
    signal.raise_signal(signal.SIGSTOP)
    if helper is not None:
        helper.kill()  # another process may have sent SIGCONT before it
        helper.wait()


def _run_out_of_memory(where: str) -> NoReturn:
    text = f"out of memory, injected by avgpipe.testing {where}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.is_available():
        raise torch.OutOfMemoryError(text)
    raise MemoryError(text)
