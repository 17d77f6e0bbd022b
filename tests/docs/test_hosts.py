"""The files of the guides about schedulers: their commands have options that fit, and the places that they name."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from avgpipe.cli import run as run_command
from avgpipe.cli import train as train_command
from avgpipe.cli.config import RunConfig
from avgpipe.fault.door import parse_address
from tests.cli.command import ROOT, invoke
from tests.docs.test_guides import blocks

SLURM, KUBERNETES = ROOT / "docs/guides/slurm.md", ROOT / "docs/guides/kubernetes.md"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of commands, which do nothing."""
    found: list[Any] = []
    monkeypatch.setattr(run_command, "run", found.append)
    monkeypatch.setattr(train_command, "run", found.append)
    return found


@pytest.mark.parametrize("script", blocks(SLURM, "slurm"))
def test_batch_scripts(script: str, asked: list[Any], tmp_path: Path) -> None:
    (tmp_path / "train.sbatch").write_text(script)
    subprocess.run(["bash", "-n", str(tmp_path / "train.sbatch")], check=True)
    *directives, line = (line for line in script.splitlines() if line)
    assert directives[0] == "#!/bin/bash"
    assert all(directive.startswith("#SBATCH --") for directive in directives[1:])
    words = shlex.split(line)
    assert words[0] == "srun"
    assert words[1].startswith("--kill-on-bad-exit=")
    assert words[2] == "avgpipe"
    result = invoke(*words[3:])
    assert result.exit_code == 0, result.stderr
    (options,) = asked
    if options.requeue:
        assert "#SBATCH --requeue" in directives
    if isinstance(options, RunConfig):
        assert (ROOT / options.script).is_file()


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from mappings(inner)


@pytest.mark.parametrize("text", blocks(KUBERNETES, "yaml")[1:])
def test_manifests(text: str, asked: list[Any]) -> None:
    yaml = pytest.importorskip("yaml", reason="comes with the packages for the documentation")
    secret = yaml.safe_load(blocks(KUBERNETES, "yaml")[0])
    manifest = yaml.safe_load(text)
    assert {"apiVersion", "kind", "metadata", "spec"} == set(manifest)
    containers = [of for of in mappings(manifest) if "command" in of]
    assert containers
    for container in containers:
        name, *words = container["command"]
        assert name == "avgpipe"
        assert all(isinstance(word, str) for word in words)
        result = invoke(*words)
        assert result.exit_code == 0, result.stderr
        (variable,) = container["env"]
        key = variable["valueFrom"]["secretKeyRef"]
        assert variable["name"] == "AVGPIPE_JOIN_TOKEN"
        assert key["name"] == secret["metadata"]["name"]
        assert len(secret["stringData"][key["key"]]) >= 16
    assert all(options.isolate for options in asked)
    if manifest["kind"] == "JobSet":
        (jobs,) = manifest["spec"]["replicatedJobs"]
        (name,) = {manifest["metadata"]["name"]}
        assert parse_address(asked[0].at) == (f"{name}-{jobs['name']}-0-0.{name}", 7000)
        assert asked[0].max_pipelines == jobs["template"]["spec"]["parallelism"]
    else:
        assert {options.at for options in asked} == {None}
