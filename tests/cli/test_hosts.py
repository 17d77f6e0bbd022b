"""Pipelines that another host gives to a run of isolated ones: over TCP, on this host."""

from __future__ import annotations

import random
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from avgpipe_lab.bench.namespaces import check_namespaces, network
from tests.cli.command import ROOT, alive, children, invoke, strict
from tests.cli.test_isolated import SCRIPT, Command, Training, assert_whole, refused, trained
from tests.examples.test_several_hosts import free_port
from tests.patience import limit, wait_until
from tests.scripts import WriteScript

pytestmark = pytest.mark.timeout(240)

SECRET = "a secret that all hosts know"


@pytest.fixture
def start(write_script: WriteScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a run that listens, or with ``join`` a command of that name which joins what it is given."""
    monkeypatch.setenv("AVGPIPE_JOIN_TOKEN", SECRET)
    monkeypatch.chdir(tmp_path)
    script = write_script(SCRIPT.replace("GO", str(tmp_path / "go")))
    started: list[Command] = []

    def begin(*more: str, join: str = "", at: str = "127.0.0.1:0", inside: Sequence[str] = ()) -> Command:
        if join:
            started.append(Command(tmp_path, join, "join", *more, inside=inside))
        else:
            started.append(Training(script, "--listen", at, *more, inside=inside))
        return started[-1]

    yield begin
    for command in started:
        command.kill_all()


def address(training: Command) -> str:
    training.says("other hosts start pipelines by: avgpipe join ")
    found = re.search(r"avgpipe join (\S+)", training.stderr)
    assert found is not None
    return found[1]


def begun(start: Any, *more: str) -> tuple[Training, Command]:
    """Return a run of two pipelines, and the command by which a third has joined."""
    training = start("--max-pipelines", "3", *more)
    training.trains(5)
    joined = start(address(training), join="joined")
    training.says("pipeline 2 trains with the others from step")
    return training, joined


def test_what_is_needed_is_named(write_script: WriteScript, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"{write_script(SCRIPT)}:make"
    monkeypatch.delenv("AVGPIPE_JOIN_TOKEN", raising=False)
    assert "AVGPIPE_JOIN_TOKEN must be set to a secret of 16" in refused("join", "127.0.0.1:7000")
    listening = ("train", script, "--isolate", "--listen", "127.0.0.1:7000")
    assert "AVGPIPE_JOIN_TOKEN must be set to a secret of 16" in refused(*listening)
    monkeypatch.setenv("AVGPIPE_JOIN_TOKEN", SECRET)
    assert "--listen without --isolate" in refused("train", script, "--listen", "127.0.0.1:7000")
    assert "write HOST:PORT" in refused("train", script, "--isolate", "--listen", "7000")
    with socket.create_server(("127.0.0.1", 0)) as used:
        name = f"127.0.0.1:{used.getsockname()[1]}"
        options = ("--isolate", "--listen", name)
        for command in (("train", *options, script), ("run", *options, script.removesuffix(":make"))):
            assert f"cannot listen at {name}: Address already in use" in refused(*command)
    found = invoke("join", "--wait", "0", "127.0.0.1:1")
    assert found.exit_code == 1
    assert "127.0.0.1:1: no run is active there; given up after" in found.stderr
    assert "write HOST:PORT" in refused("join", "127.0.0.1:x")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("batch", ["global", "per-pipeline"])
def test_a_pipeline_of_another_host_trains_with_the_others(start: Any, batch: str) -> None:
    # Checkpoints after every round of those that began would leave none for a third pipeline that takes turns.
    often = () if batch == "per-pipeline" else ("--checkpoint-minutes", "0.0001")
    training, joined = begun(start, "--batch", batch, *often)
    training.go()
    assert training.end() == 0, training.stderr
    assert joined.end() == 0, joined.stderr
    assert_whole(training.out)
    assert [of["pipeline"] for of in strict(training.stdout)["joined"]] == [2]
    if batch == "per-pipeline":
        assert {row["pipeline"] for row in trained(training.out)} == {0, 1, 2}


@pytest.mark.ranks
@pytest.mark.slow
def test_its_loss_costs_no_sample_and_it_comes_again(start: Any) -> None:
    training = start("--max-pipelines", "3")
    training.trains(5)
    joined = start(address(training), "--restarts", "1", join="joined")
    training.says("pipeline 2 trains with the others from step")
    rank = random.randrange(2)
    joined.kill(2, rank)
    training.says(f"pipeline 2 is lost: rank {rank} (stage {rank})")
    joined.says("it is started again")
    wait_until(lambda: training.stderr.count("pipeline 2 trains with the others") == 2, 60)
    training.go()
    assert training.end() == 0, training.stderr
    assert joined.end() == 0, joined.stderr
    assert_whole(training.out)


@pytest.mark.ranks
@pytest.mark.slow
def test_it_trains_on_alone_when_all_on_the_launchers_host_are_lost(start: Any) -> None:
    training, joined = begun(start, "--restarts", "0")
    training.go()
    training.trains(36)
    for pipeline in (0, 1):
        training.kill(pipeline, 0)
        training.says(f"pipeline {pipeline} is lost")
    assert training.end() == 0, training.stderr
    assert joined.end() == 0, joined.stderr
    assert_whole(training.out)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_host_of_a_run_that_fails_fails_too(start: Any) -> None:
    training, joined = begun(start, "--restarts", "0", "--min-pipelines", "2")
    for pipeline in (0, 1):
        training.kill(pipeline, 0)
    training.go()
    assert training.end() == 1
    assert joined.end() == 1
    *_, last = joined.stderr.splitlines()
    # The second where pipeline 0 was lost in the step before the first one of pipeline 2.
    reasons = "too few pipelines are left", "it joined too late to know the lost samples of pipeline 0"
    assert last in {f"avgpipe: error: pipeline 2 was ended: {reason}" for reason in reasons}


@pytest.mark.ranks
@pytest.mark.slow
def test_the_guide_s_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/guides/when-something-fails.md").read_text()
    at = f"127.0.0.1:{free_port()}"
    block = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[0].replace("10.0.0.1:7000", f"{at} --wait 20")
    block = block.replace(" 1000", "")  # epochs, which take minutes
    _, line = (shlex.split(line, comments=True) for line in block.splitlines())
    monkeypatch.setenv("AVGPIPE_JOIN_TOKEN", SECRET)
    monkeypatch.chdir(ROOT)
    hosts = [Command(tmp_path, f"host {number}", *line[1:]) for number in range(3)]
    codes = [host.process.wait(limit(100)) for host in hosts]
    (first,) = (n for n, host in enumerate(hosts) if "the run begins here" in host.stderr)
    assert codes[first] == 0, hosts[first].stderr
    assert "epoch 2: loss" in "".join(host.stdout for host in hosts)
    assert set(codes) <= {0, 1}, codes  # the run may end before a host joins it


@pytest.mark.ranks
@pytest.mark.slow
def test_either_end_of_the_line_may_go(start: Any) -> None:
    training, gone = begun(start, "--restarts", "0")
    workers = children(gone.process.pid)
    gone.process.kill()
    training.says("pipeline 2 is lost")
    wait_until(lambda: not any(map(alive, workers)), 10)
    interrupted = start(address(training), join="interrupted")
    wait_until(lambda: training.stderr.count("pipeline 2 trains with the others") == 2, 60)
    interrupted.process.send_signal(signal.SIGINT)
    assert interrupted.end() == 130
    wait_until(lambda: training.stderr.count("pipeline 2 is lost") == 2, 20)

    left = start(address(training), join="left")
    wait_until(lambda: training.stderr.count("pipeline 2 trains with the others") == 3, 60)
    training.process.kill()
    assert left.end() == 1
    assert "has ended before its last step" in left.stderr or "cannot be reached any more" in left.stderr
    training.process.wait()


@pytest.mark.promise
def test_a_host_whose_line_is_cut_is_lost_and_may_come_again(start: Any) -> None:
    try:
        check_namespaces("this test")
    except ValueError as error:
        pytest.skip(f"emulated hosts need network namespaces: {error}")
    with network(2, 1e9) as hosts:
        own, other = hosts.inside(0), hosts.inside(1)
        limits = ("--timeout", "5", "--max-pipelines", "3", "--restarts", "0")
        training = start(*limits, at=f"{hosts.address(0)}:0", inside=own)
        training.trains(5)
        cut = start(address(training), join="cut", inside=other)
        training.says("pipeline 2 trains with the others from step")
        line = ["ip", "-n", hosts.host(1), "link", "set", hosts.device]
        subprocess.run([*line, "down"], check=True)
        begin = time.monotonic()
        training.says("pipeline 2 is lost: ")
        assert "sent no message for 5 s" in training.stderr or "has waited 5 s" in training.stderr
        seconds = [time.monotonic() - begin]
        assert cut.end() == 1
        seconds.append(time.monotonic() - begin)
        assert max(seconds) < 5 + limit(20), seconds
        subprocess.run([*line, "up"], check=True)
        again = start(address(training), join="again", inside=other)
        wait_until(lambda: training.stderr.count("pipeline 2 trains with the others") == 2, 60)
        training.go()
        assert training.end() == 0, training.stderr
        assert again.end() == 0, again.stderr
        assert_whole(training.out)
