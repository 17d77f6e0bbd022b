from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from avgpipe_lab.bench.namespaces import check_namespaces, network
from tests.cli.command import children, environment
from tests.examples.scripts import EXAMPLES
from tests.patience import limit, wait_until

SCRIPT = EXAMPLES / "several_hosts.py"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def hosts(apart):
    """Words before torchrun and among its options on each of two hosts, which both may be this one."""
    if not apart:
        yield [([], ["--rdzv-endpoint", meeting]) for meeting in [f"127.0.0.1:{free_port()}"] * 2]
        return
    try:
        check_namespaces("this test")
    except ValueError as error:
        pytest.skip(f"emulated hosts need network namespaces: {error}")
    with network(2, 1e9) as made:
        # Inside, the host's name leads nowhere.
        meeting = ["--rdzv-endpoint", f"{made.address(0)}:29400"]
        yield [
            (made.inside(n), [*meeting, "--rdzv-conf", f"is_host={1 - n}", "--local-addr", made.address(n)])
            for n in range(2)
        ]


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.root)], ids=["one host", "two hosts"])
def agents(request, tmp_path):
    """torchrun as it is run on each of two hosts."""
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    command = [sys.executable, "-m", "torch.distributed.run", *words, "--rdzv-id", "run-1"]
    env = environment(**({"GLOO_SOCKET_IFNAME": "eth0"} if request.param else {}))
    started = []
    with hosts(request.param) as places, contextlib.ExitStack() as opened:
        for number, (inside, options) in enumerate(places):
            log = opened.enter_context((tmp_path / f"log-{number}").open("w"))
            script = [*options, str(SCRIPT), str(tmp_path / "checkpoint")]
            started.append(subprocess.Popen([*inside, *command, *script], env=env, stdout=log, stderr=log))
        yield started
        for agent in started:
            for pid in [*children(agent.pid), agent.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.wait(limit(30))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_after_a_killed_worker_both_hosts_go_on_from_the_checkpoint(agents, tmp_path):
    logs = [tmp_path / f"log-{number}" for number in range(2)]
    wait_until(lambda: any("batch 19:" in log.read_text() for log in logs) or any(a.poll() for a in agents))
    for pid in children(agents[1].pid):
        os.kill(pid, signal.SIGKILL)
    codes = [agent.wait(limit(120)) for agent in agents]
    text = "".join(log.read_text() for log in logs)
    assert codes == [0, 0], text
    saved = [int(b) for b in re.findall(r"^batch (\d+): loss", text, re.MULTILINE)]
    assert saved.count(19) == 1  # the second attempt did not begin anew
    assert saved[-1] == 399
    # What was killed may have saved one without a word.
    assert len({*range(19, 400, 20)} - {*saved}) <= 1
