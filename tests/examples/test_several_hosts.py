from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from tests.cli.command import children, environment, wait_for
from tests.examples.scripts import EXAMPLES

SCRIPT = EXAMPLES / "several_hosts.py"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def agents(tmp_path):
    """torchrun as it is run on each of two hosts; both are this one."""
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    words += ["--rdzv-id", "run-1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", str(SCRIPT)]
    command = [sys.executable, "-m", "torch.distributed.run", *words, str(tmp_path / "checkpoint")]
    started = []
    with contextlib.ExitStack() as opened:
        for number in range(2):
            log = opened.enter_context((tmp_path / f"log-{number}").open("w"))
            started.append(subprocess.Popen(command, env=environment(), stdout=log, stderr=log))
        yield started
        for agent in started:
            for pid in [*children(agent.pid), agent.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.wait(30)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_after_a_killed_worker_both_hosts_go_on_from_the_checkpoint(agents, tmp_path):
    logs = [tmp_path / f"log-{number}" for number in range(2)]
    wait_for(lambda: any("batch 19:" in log.read_text() for log in logs) or any(a.poll() for a in agents))
    for pid in children(agents[1].pid):
        os.kill(pid, signal.SIGKILL)
    codes = [agent.wait(120) for agent in agents]
    text = "".join(log.read_text() for log in logs)
    assert codes == [0, 0], text
    saved = [int(b) for b in re.findall(r"^batch (\d+): loss", text, re.MULTILINE)]
    assert saved.count(19) == 1  # the second attempt did not begin anew
    assert saved[-1] == 399
    # What was killed may have saved one without a word.
    assert len({*range(19, 400, 20)} - {*saved}) <= 1
