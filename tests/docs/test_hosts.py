"""The files of the guides about several hosts: their commands have options that fit, also to the scripts they run."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import avgpipe
from avgpipe.cli import run as run_command
from avgpipe.cli import train as train_command
from avgpipe.cli.config import RunConfig
from avgpipe.fault.door import parse_address
from avgpipe.runtime.placement import Placement
from tests.cli.command import ROOT, invoke
from tests.docs.test_guides import blocks

SLURM, KUBERNETES = ROOT / "docs/guides/slurm.md", ROOT / "docs/guides/kubernetes.md"
BY_HAND = ROOT / "docs/guides/several-hosts.md", ROOT / "docs/guides/when-something-fails.md"
Fits = Callable[[str, Sequence[str], int], None]


class Made(Exception):
    """Ends a script where it makes its Pipeline."""

    def __init__(self, model: nn.Sequential, plan: avgpipe.Plan) -> None:
        self.model, self.plan = model, plan


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> Fits:
    """Check that a script's plan is for a number of processes, and its model has a layer for each of its stages."""

    def make(model: nn.Sequential, plan: avgpipe.Plan, **_: Any) -> None:
        raise Made(model, plan)

    def check(script: str, arguments: Sequence[str], ranks: int) -> None:
        with monkeypatch.context() as changed:
            changed.setattr(avgpipe, "Pipeline", make)
            changed.setattr(sys, "argv", [script, *arguments])
            changed.setenv("WORLD_SIZE", str(ranks))
            with pytest.raises(Made) as ended:
                runpy.run_path(str(ROOT / script))
        model, plan = ended.value.model, ended.value.plan
        placement = Placement.of(plan, ranks, isolated=0 if plan.isolate else None)
        assert placement.ranks == ranks
        assert plan.stages <= len(model)

    return check


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of commands, which do nothing."""
    found: list[Any] = []
    monkeypatch.setattr(run_command, "run", found.append)
    monkeypatch.setattr(train_command, "run", found.append)
    return found


@pytest.mark.parametrize("script", blocks(SLURM, "slurm"))
def test_batch_scripts(script: str, asked: list[Any], fits: Fits, tmp_path: Path) -> None:
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
    sizes = {name: int(n) for name, n in re.findall(r"^#SBATCH --([\w-]+) (\d+)$", script, re.MULTILINE)}
    each = options.stages if options.isolate else sizes["ntasks-per-node"]
    assert sizes.get("gpus-per-node", each) == each
    if isinstance(options, RunConfig):
        fits(options.script, options.args, each if options.isolate else sizes["nodes"] * each)


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from mappings(inner)


@pytest.mark.parametrize("text", blocks(KUBERNETES, "yaml")[1:])
def test_manifests(text: str, asked: list[Any], fits: Fits) -> None:
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
        assert {"name": "shared", "mountPath": "/shared"} in mappings(manifest)
        assert container.get("resources", manifest["spec"].get("trainer", {}).get("resourcesPerNode")) == {
            "limits": {"nvidia.com/gpu": asked[-1].stages}
        }
    assert [of["name"] for of in mappings(manifest) if "persistentVolumeClaim" in of] == ["shared"] * len(
        containers
    )
    (script,) = re.findall(r"`(/app/\S+)` with the contents of `", KUBERNETES.read_text())
    (example,) = re.findall(r"with the contents of `(examples/\S+)`", KUBERNETES.read_text())
    for options in asked:
        assert options.isolate
        assert options.script == script
        fits(example, options.args, options.stages)
    if manifest["kind"] == "JobSet":
        (jobs,) = manifest["spec"]["replicatedJobs"]
        (name,) = {manifest["metadata"]["name"]}
        assert parse_address(asked[0].at) == (f"{name}-{jobs['name']}-0-0.{name}", 7000)
        assert asked[0].max_pipelines == jobs["template"]["spec"]["parallelism"]
    else:
        assert {options.at for options in asked} == {None}


def test_lines_that_are_typed_on_each_host(asked: list[Any], fits: Fits) -> None:
    text = "".join(code for page in BY_HAND for language in ("sh", "bash") for code in blocks(page, language))
    lines = [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]
    runs = [words[1:] for words in lines if words[:2] == ["avgpipe", "run"]]
    assert len(runs) >= 3
    for words in runs:
        result = invoke(*words)
        assert result.exit_code == 0, result.stderr
        fits(asked[-1].script, asked[-1].args, asked[-1].stages)
    (torchrun,) = (words for words in lines if words[0] == "torchrun")
    hosts, each = (int(torchrun[torchrun.index(f"--{name}") + 1]) for name in ("nnodes", "nproc-per-node"))
    fits(torchrun[-2], torchrun[-1:], hosts * each)


def test_the_pipelines_that_ray_starts(fits: Fits) -> None:
    tree = ast.parse((ROOT / "examples/on_ray.py").read_text())
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    (call,) = (call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "run")
    given = {word.arg: word.value for word in call.keywords}
    stages = ast.literal_eval(given["stages"])
    fits("examples/every_host.py", ["checkpoint"], stages)
    assert ast.literal_eval(given["resources"])["CPU"] == stages
