"""Isolated pipelines on the nodes of a Ray cluster: python examples/on_ray.py FOLDER, on a machine that is in it.

FOLDER, for checkpoints, and this file are on all nodes under the same path.
"""

import pathlib
import sys

import ray

from avgpipe.interop.ray import run

ray.init(address="auto")
script = pathlib.Path(__file__).absolute().parent / "every_host.py"
codes = run(
    str(script), sys.argv[1], pipelines=2, stages=2, resources={"CPU": 2}, options=["--restarts", "100"]
)
print(f"the commands ended with {codes}")
