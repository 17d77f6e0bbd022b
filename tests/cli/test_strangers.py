"""Other users of the host, and other hosts, against a run: they get neither in nor at its log. Real processes."""

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import alive, avgpipe, children, environment
from tests.patience import limit, wait_until

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(240),
]
NOBODY = 65534
# Of this process alone, as several run tests at once. Addresses for benchmarks of networks (RFC 2544).
OUTSIDE, DEVICE = f"avgpipe-stranger-{os.getpid()}", f"avg{os.getpid()}"
HERE, THERE = (f"198.18.{100 + os.getpid() % 100}.{host}" for host in (1, 2))

# Trains over gloo until the file "end" is there, then says how it went. With OWN it makes torch's group itself.
SCRIPT = """
import os, sys, torch, avgpipe
from pathlib import Path
from torch import nn
folder, own = Path(sys.argv[1]), sys.argv[2] == "own"
if own:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
data = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(4)]
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = lambda p: torch.optim.SGD(p, lr=0.01)
plan = avgpipe.Plan(stages=2, pipelines=2, micro_batches=2)
with avgpipe.Pipeline(model, plan, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer, link="gloo", timeout_s=20) as p:
    p.save(folder / "checkpoint")
    ends = False
    while not ends:
        list(p.train(data))
        (folder / f"trains-{os.environ['RANK']}").touch()
        agreed = torch.tensor([float((folder / "end").exists())])
        ends = bool(p.world.broadcast(agreed, 0).item())
    p.save(folder / "checkpoint")
print("trained to the end", flush=True)
"""

# What somebody does who knows torch and this project: a pickle for torch's launcher, a failure for our ranks.
ATTACK = """
import base64, json, os, pickle, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
host, ports, trace, uid = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
os.setgid(uid)
os.setuid(uid)

class Command:
    def __reduce__(self):
        return os.system, (f"id > {trace}",)

pickled = base64.b64encode(pickle.dumps(Command())).decode()
failure = "rank 99: Boom: text of another user"
reached = []

def write(port):
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
    names = store.list_keys()
    reached.append(port)
    for name in [n.lstrip("/") for n in names]:
        store.set(name, pickled if name.startswith("torch.rendezvous") else failure)
    for prefix in ("", "default_pg/0//", "/default_pg/0//"):
        for attempt in ("", "start-1/"):
            for number in (1, 2):
                store.set(f"{prefix}avgpipe/{number}/failure", failure)
                store.set(f"{prefix}avgpipe/{attempt}pipeline-{number}/failure", failure)

# What is no store may never answer.
threads = [threading.Thread(target=write, args=(port,), daemon=True) for port in ports]
for thread in threads:
    thread.start()
deadline = time.monotonic() + 5
for thread in threads:
    thread.join(max(0, deadline - time.monotonic()))
print(json.dumps(reached), flush=True)
os._exit(0)
"""


def family(pid):
    """The process and all below it."""
    return [pid, *(found for child in children(pid) for found in family(child))]


def listening(pids):
    """Addresses and ports at which processes listen, in words of /proc."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(link))
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        path = Path(f"/proc/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            is_open = fields[3] == "0A" or table.startswith("udp")
            if is_open and f"socket:[{fields[9]}]" in sockets:
                address, _, port = fields[1].rpartition(":")
                found.add((address, int(port, 16)))
    return found


# 127.0.0.1, ::1 and 127.0.0.1 within IPv6
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


class Running:
    def __init__(self, folder, *arguments):
        self.folder = folder
        self.process = avgpipe(*arguments, AVGPIPE_CACHE=str(folder / "cache"))

    def wait_for(self, condition):
        wait_until(lambda: self.process.poll() is not None or condition())
        assert self.process.poll() is None, self.process.communicate()

    def pids(self):
        return family(self.process.pid)

    def stop(self):
        for pid in self.pids():
            if alive(pid):
                os.kill(pid, 9)
        self.process.communicate()


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    started = []

    def begin(own):
        running = Running(tmp_path, "run", "--stages", "2", str(tmp_path / "script.py"), str(tmp_path), own)
        started.append(running)
        running.wait_for(lambda: len(list(tmp_path.glob("trains-*"))) == 2)
        return running

    yield begin
    for running in started:
        running.stop()


def finishes(running):
    """The run goes to its end, and says so twice, and nobody else says anything."""
    (running.folder / "end").touch()
    stdout, stderr = running.process.communicate(timeout=limit(60))
    assert running.process.returncode == 0, stderr
    assert stdout.count("trained to the end") == 2
    assert "another user" not in stdout + stderr
    assert not (running.folder / "trace").exists()
    assert len(list((running.folder / "checkpoint").glob("*.pt"))) == 2


def attack(running, host, ports, *inside):
    """Ports at which the attack found a store to write to."""
    arguments = [host, json.dumps(sorted(ports)), str(running.folder / "trace"), str(NOBODY)]
    done = subprocess.run(
        [*inside, sys.executable, "-c", ATTACK, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=limit(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which needs root")


@pytest.mark.slow
@pytest.mark.parametrize("own", ["ours", "own"])
def test_what_a_script_starts_listens_on_loopback_alone(script, own):
    running = script(own)
    found = listening(running.pids())
    assert found  # gloo's ports: it would be no test without
    assert {address for address, _ in found} <= LOOPBACK
    finishes(running)


@pytest.mark.slow
def test_what_train_starts_listens_on_loopback_alone(tmp_path, options):
    running = Running(
        tmp_path, "train", "awd-lstm", *options, "--epochs", "50", "--out", str(tmp_path / "run")
    )
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        running.wait_for(lambda: metrics.exists() and '"train"' in metrics.read_text())
        found = listening(running.pids())
        assert len(running.pids()) >= 3
        assert {address for address, _ in found} <= LOOPBACK
    finally:
        running.stop()


@pytest.mark.root
@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("own", ["ours", "own"])
def test_another_user_of_this_host_changes_nothing(script, own):
    running = script(own)
    reached = attack(running, "127.0.0.1", {port for _, port in listening(running.pids())})
    assert len(reached) <= 1  # the store for scripts that make torch's group themselves; ours is none of them
    finishes(running)


@pytest.mark.root
@pytest.mark.slow
@needs_root
def test_another_user_reads_and_writes_no_file_of_the_run(script):
    running = script("ours")
    variables = Path(f"/proc/{children(running.process.pid)[0]}/environ").read_bytes().split(b"\0")
    store = next(v.partition(b"=")[2].decode() for v in variables if v.startswith(b"AVGPIPE_STORE="))
    assert stat.S_IMODE(os.stat(Path(store).parent).st_mode) == 0o700
    worker = running.pids()[-1]
    looks = [
        store,
        f"/proc/{worker}/environ",
        f"/proc/{worker}/fd/0",
        str(running.folder / "checkpoint" / ".lock"),
    ]
    look = (
        "import os, sys\nos.setgid(65534)\nos.setuid(65534)\n"
        "for path in sys.argv[1:]:\n"
        "    for mode in ('rb', 'r+b'):\n"
        "        try:\n            open(path, mode)\n            print(path, mode)\n"
        "        except PermissionError:\n            pass\n"
    )
    done = subprocess.run([sys.executable, "-c", look, *looks], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    finishes(running)


@pytest.fixture
def outside():
    """Words before a command that run it on what looks like another host, from which this one is reached at HERE."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("makes a network namespace, which needs root and iproute2")

    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)

    if (made := ip("netns", "add", OUTSIDE)).returncode:
        pytest.skip(f"no network namespace can be made: {made.stderr.strip()}")
    try:
        ip("link", "add", DEVICE, "type", "veth", "peer", "name", "eth0", "netns", OUTSIDE)
        ip("addr", "add", f"{HERE}/30", "dev", DEVICE)
        ip("link", "set", DEVICE, "up")
        ip("-n", OUTSIDE, "addr", "add", f"{THERE}/30", "dev", "eth0")
        if (last := ip("-n", OUTSIDE, "link", "set", "eth0", "up")).returncode:
            pytest.skip(f"no pair of devices can be made: {last.stderr.strip()}")
        yield ["ip", "netns", "exec", OUTSIDE]
    finally:
        ip("netns", "del", OUTSIDE)
        ip("link", "del", DEVICE)


REACHABLE = """
import socket, sys
with socket.create_server(("0.0.0.0", 0)) as server:
    print(server.getsockname()[1], flush=True)
    server.accept()
"""


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("own", ["ours", "own"])
def test_another_host_reaches_nothing(script, outside, own):
    running = script(own)
    ports = {port for _, port in listening(running.pids())}
    # The line is there: what listens on all addresses is reached.
    with subprocess.Popen([sys.executable, "-c", REACHABLE], stdout=subprocess.PIPE, text=True) as server:
        port = server.stdout.readline().strip()
        connect = f"import socket; socket.create_connection(({HERE!r}, {port}), 5)"
        assert (
            subprocess.run(
                [*outside, sys.executable, "-c", connect], timeout=limit(60), check=False
            ).returncode
            == 0
        )
        assert server.wait(limit(10)) == 0
    assert attack(running, HERE, ports, *outside) == []
    refused = (
        "import socket, sys\n"
        "for port in sys.argv[2:]:\n"
        "    try:\n        socket.create_connection((sys.argv[1], int(port)), 5)\n        print(port)\n"
        "    except ConnectionRefusedError:\n        pass\n"
    )
    command = [*outside, sys.executable, "-c", refused, HERE, *map(str, ports)]
    assert (
        subprocess.run(command, capture_output=True, text=True, timeout=limit(120), check=True).stdout == ""
    )
    finishes(running)
