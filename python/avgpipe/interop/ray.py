"""Isolated pipelines on the nodes of a Ray cluster: ``run`` starts the same command in an actor on each.

Needs ``pip install avgpipe[ray]``. Nothing else of avgpipe imports this module.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from avgpipe.errors import PipelineError
from avgpipe.ranks.launch import tied

_LOST = -1  # instead of an exit code
# For the other commands to end, once the run has ended; a lost one may wait for a node for ever.
_END_S = 60.0


class Node:
    """Runs the command on its node."""

    def address(self) -> str:
        """Return an address of this node at which the others may find it."""
        host = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def run(self, words: Sequence[str], token: str) -> int:
        """Run ``avgpipe run`` to its end, and return its exit code; it ends with this actor, too."""
        command = tied("stdout", sys.executable, "-m", "avgpipe", "run", "--isolate", *words)
        return subprocess.run(command, env={**os.environ, "AVGPIPE_JOIN_TOKEN": token}).returncode


def run(
    script: str,
    *args: str,
    pipelines: int,
    stages: int = 1,
    options: Sequence[str] = (),
    resources: Mapping[str, float] | None = None,
    timeout_s: float = 300.0,
) -> list[int]:
    """Train by a script, as isolated pipelines on the nodes of the cluster that ``ray.init`` has connected to.

    The first node begins the run, the others join it. The secret is a new one, which Ray carries to them.
    When a node is lost, the others continue without its pipeline; Ray starts its actor on another node, if there
    is one. The loss of the first node ends the run.

    Args:
        script: path of the script, the same on all nodes, below the folder in which Ray's workers run.
        args: arguments of the script.
        pipelines: number of pipelines, each on a node of its own where there are enough nodes.
        stages: number of processes of a pipeline.
        options: more options of ``avgpipe run``, such as ``["--restarts", "100"]``.
        resources: what a pipeline needs of a node, such as ``{"CPU": 8, "GPU": 4}``. Default: a CPU per stage.
        timeout_s: seconds to wait for the resources, and for the first node.

    Returns:
        The exit codes of the commands, first that of the one that began the run, which is 0; -1 for a lost node.

    Raises:
        PipelineError: the resources are not free in time, the first node is lost, or the run has failed.
    """
    bundle = dict(resources or {"CPU": stages})
    group = placement_group([bundle] * pipelines, strategy="SPREAD")
    try:
        if not group.wait(timeout_s):
            raise PipelineError(
                f"Ray has no {pipelines} times {bundle} free within {timeout_s:g} s: see ray status"
            )
        nodes = [_actor(group, place, bundle) for place in range(pipelines)]
        address = ray.get(nodes[0].address.remote())
        words = ["--stages", str(stages), "--at", address, "--max-pipelines", str(pipelines)]
        words += ["--wait", f"{timeout_s:g}", *options, script, *args]
        token = secrets.token_hex(16)
        first, *others = [node.run.remote(words, token) for node in nodes]
        if code := _code(first):  # the others would wait for it
            why = "its node is lost" if code == _LOST else f"its command ended with {code}"
            raise PipelineError(f"the run on {address} has failed: {why}")
        ended, _ = ray.wait(others, num_returns=len(others), timeout=_END_S) if others else ([], [])
        return [0, *(_code(end) if end in ended else _LOST for end in others)]
    finally:
        remove_placement_group(group)  # which ends its actors, and these their commands


def _actor(group: Any, place: int, bundle: Mapping[str, float]) -> Any:
    """Make the actor of a node: the first one is not started again, as its address would be another one."""
    more = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    return (
        ray.remote(Node)
        .options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            resources=more,
            max_restarts=-1 if place else 0,
            max_task_retries=-1 if place else 0,
        )
        .remote()
    )


def _code(end: Any) -> int:
    """Return the exit code of a command, when it has ended."""
    try:
        return int(ray.get(end))
    except ray.exceptions.RayActorError:
        return _LOST
