"""Isolated pipelines on the nodes of a Ray cluster: two nodes, both on this host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import PACKAGES, ROOT
from tests.cli.test_every_host import RESUMES
from tests.examples.scripts import EXAMPLES
from tests.patience import limit, wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(240)]
pytest.importorskip("ray", reason="needs ray: pip install avgpipe[ray]")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", f"{PACKAGES}:{ROOT}")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    paths = [f'pathlib.Path("{name}")' for name in ("checkpoint", "go")]
    script = RESUMES
    for path, name in zip(paths, ("checkpoint", "go")):
        script = script.replace(path, f'pathlib.Path("{tmp_path / name}")')
    (tmp_path / "script.py").write_text(script)
    size = {"num_cpus": 2, "object_store_memory": 10**8}
    made = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    made.add_node(**size)
    ray.init(address=made.address)
    yield made
    ray.shutdown()
    made.shutdown()


def test_a_pipeline_on_each_node(cluster: Any, tmp_path: Path) -> None:
    from avgpipe.interop.ray import run

    (tmp_path / "go").touch()
    assert run(str(tmp_path / "script.py"), pipelines=2, resources={"CPU": 2}, timeout_s=100) == [0, 0]


def test_the_example(cluster: Any, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "on_ray.py"), str(tmp_path / "folder")]
    env = {**os.environ, "RAY_ADDRESS": cluster.address}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit(150))
    assert done.returncode == 0, done.stderr
    assert "the commands ended with [0, 0]" in done.stdout


def test_the_others_continue_without_a_lost_node(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from avgpipe.interop import ray as interop

    monkeypatch.setattr(interop, "_END_S", 1.0)
    with ThreadPoolExecutor(1) as pool:
        ends = pool.submit(
            interop.run, str(tmp_path / "script.py"), pipelines=2, resources={"CPU": 2}, timeout_s=100
        )
        wait_until(lambda: (tmp_path / "checkpoint").exists() or ends.done(), 100)
        others = [node for node in cluster.worker_nodes if not node.head]
        for node in others:
            cluster.remove_node(node)
        (tmp_path / "go").touch()
        error = ends.exception()
        if error is None:
            assert ends.result() == [0, -1]
        else:  # the lost node had the first command
            assert "its node is lost" in str(error)


def test_what_ray_has_not_is_said(cluster: Any) -> None:
    from avgpipe.errors import PipelineError
    from avgpipe.interop.ray import run

    text = r"Ray has no 2 times {'CPU': 3} free within 0.1 s: see ray status"
    with pytest.raises(PipelineError, match=text):
        run(os.devnull, pipelines=2, stages=3, timeout_s=0.1)
