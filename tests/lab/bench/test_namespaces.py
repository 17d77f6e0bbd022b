"""Namespaces come, limit, and go."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from avgpipe.ranks.launch import run_on_ranks
from avgpipe_lab.bench import namespaces
from avgpipe_lab.bench.namespaces import check_namespaces, network, remove_stale
from tests.cli.command import ROOT, environment
from tests.patience import limit, wait_until


def _can_make():
    try:
        check_namespaces("--rate")
    except ValueError:
        return False
    return True


needs_root = pytest.mark.skipif(not _can_make(), reason="needs root, iproute2 and network namespaces")


def existing():
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines() if line}


def test_without_root_it_says_what_is_needed(monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: f"/usr/sbin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match="--rate needs root for network namespaces: run as root, or leave"):
        check_namespaces("--rate")


def test_without_iproute2_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="--rate needs ip and tc of iproute2"):
        check_namespaces("--rate")


@pytest.mark.ranks
@pytest.mark.root
@needs_root
def test_workers_meet_inside_and_nothing_is_left():
    with network(2, 1e9) as made:
        assert {made.switch, made.host(0), made.host(1)} <= existing()
        target = "tests.ranks.targets:meets"
        assert run_on_ranks(target, 2, {}, timeout_s=60, **made.launching()) == [3.0, 3.0]
    assert not {name for name in existing() if name.startswith(f"avgpipe-{os.getpid()}-")}


@pytest.mark.ranks
@pytest.mark.root
@needs_root
def test_only_workers_of_one_host_share_memory():
    with network(2, 1e9, workers_each=2) as made:
        target = "tests.benchmarks.targets:links"
        # The last host has one worker.
        found = run_on_ranks(target, 3, {}, timeout_s=60, **made.launching(3))
    shared, group = "shared memory", "torch.distributed"
    assert found == [["local", shared, group], [shared, "local", group], [group, group, "local"]]


@pytest.mark.root
@needs_root
def test_what_a_host_sends_is_limited_and_what_it_receives_is_not():
    with network(1, 5e8) as made:
        shown = [
            subprocess.run(
                ["tc", "-n", namespace, "qdisc", "show", "dev", device],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for namespace, device in ((made.host(0), made.device), (made.switch, "w0"))
        ]
        assert "tbf" in shown[0]
        assert "rate 500Mbit" in shown[0]
        assert "tbf" not in shown[1]


@pytest.mark.root
@needs_root
def test_a_slower_line_has_shorter_bursts_and_queues():
    with network(1, 1e8, slower=10) as made:
        words = ["tc", "-n", made.host(0), "qdisc", "show", "dev", made.device]
        shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "rate 100Mbit burst 2621" in shown  # 256 KiB over 10, rounded to its clock
    with network(1, 1e6, slower=1000) as made:
        shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "rate 1Mbit burst 4Kb" in shown


@pytest.mark.root
@needs_root
def test_a_failure_inside_leaves_nothing():
    with pytest.raises(KeyboardInterrupt), network(1, 1e9):
        raise KeyboardInterrupt
    assert not {name for name in existing() if name.startswith(f"avgpipe-{os.getpid()}-")}


@pytest.mark.ranks
@pytest.mark.root
@needs_root
def test_what_a_killed_run_left_is_removed_and_a_living_one_is_left_alone():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale = f"avgpipe-{gone.pid}-0"
    subprocess.run([shutil.which("ip"), "netns", "add", stale], check=True)
    with network(1, 1e9) as made:
        assert stale not in existing()
        remove_stale()
        assert made.host(0) in existing()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.root
@needs_root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_program_leaves_no_namespace(number):
    words = [sys.executable, "-m", "benchmarks.overlap.emulated", "--cases", "1MiB", "--rounds", "100"]
    process = subprocess.Popen(words, env=environment(), cwd=ROOT, stderr=subprocess.DEVNULL)
    mine = f"avgpipe-{process.pid}-"
    try:
        wait_until(lambda: sum(name.startswith(mine) for name in existing()) == 7)
        process.send_signal(number)
        assert process.wait(limit(30)) != 0
    finally:
        process.kill()
    assert not any(name.startswith(mine) for name in existing())


@pytest.mark.root
@needs_root
def test_a_host_is_cut_off_and_back_and_its_bytes_are_counted():
    ask = "import socket, sys; socket.create_connection((sys.argv[1], 1), 1)"
    with network(2, 1e9, own_boot_ids=True) as made:
        reach = [*made.inside(0), sys.executable, "-S", "-c", ask, made.address(1)]
        found = []
        for is_up in (True, False, True):
            made.connect(1, is_up)
            said = subprocess.run(reach, capture_output=True, check=False, text=True).stderr
            found.append("ConnectionRefusedError" in said)  # by the other host, where nothing listens
        assert found == [True, False, True]
        sent, received = made.traffic(0)
        assert sent > 100
        assert received > 100
        read = [*made.inside(1), "cat", namespaces._BOOT_ID]
        assert subprocess.run(read, capture_output=True, text=True, check=True).stdout == f"{made.host(1)}\n"
