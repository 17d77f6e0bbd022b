from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.command import avgpipe
from tests.examples.scripts import EXAMPLES
from tests.patience import limit


@pytest.mark.ranks
@pytest.mark.slow
def test_it_continues_from_its_checkpoint(tmp_path: Path) -> None:
    printed = []
    for _ in range(2):
        line = ("--isolate", "--stages", "2", "--pipelines", "1", str(EXAMPLES / "every_host.py"))
        process = avgpipe("run", *line, str(tmp_path / "checkpoint"))
        stdout, stderr = process.communicate(timeout=limit(100))
        assert process.returncode == 0, stderr
        printed.append(stdout.splitlines())
    assert printed[0][0].startswith("batch 19: loss")
    assert printed[0][-1].startswith("batch 399: loss")
    assert printed[1] == []
    shutil.rmtree(tmp_path / "checkpoint")
