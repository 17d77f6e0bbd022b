"""A script whose generators are seeded is run as Python runs it."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from avgpipe.model.context import generators, set_generators
from avgpipe.ranks import seeded

SCRIPT = """
import json, pickle, random, sys
import numpy, torch
import beside
class Own: pass
assert isinstance(pickle.loads(pickle.dumps(Own())), Own)
if __name__ == "__main__":
    drawn = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
    print(json.dumps([drawn, sys.argv, __file__, beside.value]))
if sys.argv[2:]:
    raise ValueError("of the script")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the script with a seed and arguments."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("value = 3")
    for module in ("__main__", "beside"):
        monkeypatch.setitem(sys.modules, module, sys.modules.get(module, sys))
    monkeypatch.delitem(sys.modules, "beside")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "elsewhere"), *sys.path[1:]])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch may have put its own there
    before = generators()

    def run(seed: int, *args: str) -> None:
        monkeypatch.setattr(sys, "argv", ["seeded", str(seed), str(tmp_path / "script.py"), *args])
        seeded.main()

    yield run
    set_generators(before)


def test_it_draws_from_the_seed_and_finds_what_lies_beside_it(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(5, "word")
    drawn, argv, file, value = json.loads(capsys.readouterr().out)
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    assert drawn == [random.random(), float(np.random.rand()), float(torch.rand(()))]
    assert (argv, file, value) == ([str(tmp_path / "script.py"), "word"], str(tmp_path / "script.py"), 3)


def test_a_traceback_begins_with_the_script(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="of the script") as raised:
        run(5, "word", "fail")
    sys.excepthook(raised.type, raised.value, raised.tb)
    shown = capsys.readouterr().err.splitlines()
    assert shown[1].startswith(f'  File "{tmp_path / "script.py"}", line')
