from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.cli.command import environment
from tests.examples.scripts import EXAMPLES
from tests.patience import limit

SCRIPT = EXAMPLES / "fsdp_in_stages.py"


def losses(ranks, *arguments):
    """The first and last loss of each rank, in rank order."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = environment(PYTHONUNBUFFERED="1")  # what is not one write shows as such
    done = subprocess.run(
        [*command, SCRIPT, *arguments], env=env, capture_output=True, text=True, timeout=limit(100)
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^rank (\d): ([\d.]+) to ([\d.]+)$", done.stdout, re.MULTILINE)
    assert len(found) == ranks, done.stdout
    return [(float(first), float(last)) for _, first, last in sorted(found)]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_stages_without_shards_go_on_where_sharded_ones_ended(tmp_path):
    sharded = losses(4, str(tmp_path))
    assert sharded[0] == sharded[1] != sharded[2] == sharded[3]  # of two pipelines, with data of their own
    plain = losses(2, str(tmp_path), "plain")
    assert plain[0] == plain[1]
    assert plain[0][0] < (sharded[0][1] + sharded[2][1]) < sharded[0][0]


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) < 50
