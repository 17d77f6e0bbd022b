"""Scripts that tests write, loaded into this process and forgotten afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from avgpipe.tasks import script as scripts

HEAD = """\
import torch
from torch import nn
import avgpipe

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def data(count):
    return torch.utils.data.TensorDataset(torch.randn(count, 4), torch.randint(2, (count,)))

def sgd(params):
    return torch.optim.SGD(params, lr=0.1)

def task(**changed):
    loader = torch.utils.data.DataLoader(data(40), batch_size=8, shuffle=True)
    usual = {"model": model(), "loader": loader, "loss_fn": nn.CrossEntropyLoss(), "optimizer": sgd}
    return avgpipe.Task(**{**usual, **changed})

"""
WriteScript = Callable[..., Path]


@pytest.fixture
def write_script(tmp_path: Path) -> Iterator[WriteScript]:
    """Write a script that begins as ``HEAD`` does; its modules and folders are forgotten after the test."""
    modules, folders = set(sys.modules), list(sys.path)

    def write(body: str, name: str = "own_script.py", head: str = HEAD) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(head + body)
        return path

    yield write
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    sys.path[:] = folders
    scripts._facts.cache_clear()
