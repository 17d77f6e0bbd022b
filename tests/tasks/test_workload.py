import re
import subprocess
import sys

import pytest

from avgpipe.tasks import DataNotFound, build_workload, check_workload, workload_names
from tests.patience import limit


def test_names():
    assert "awd-lstm" in workload_names()
    for preset in ("tiny", "small", "paper"):
        assert check_workload("awd-lstm", preset=preset).preset == preset


@pytest.mark.parametrize("refuse", [check_workload, build_workload])
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("awdlstm", {}, "unknown workload 'awdlstm': did you mean 'awd-lstm'?"),
        ("awd-lstm", {"preset": "tyni"}, "unknown preset 'tyni' of awd-lstm: did you mean 'tiny'?"),
        ("awd-lstm", {"preset": "xxl"}, "unknown preset 'xxl' of awd-lstm: valid names: tiny, small, paper"),
        ("awd-lstm", {"pipelines": 0}, "pipelines must be at least 1, got 0"),
        ("awd-lstm", {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ("awd-lstm", {"epochs": -1}, "epochs must be at least 1, got -1"),
        ("awd-lstm", {"max_batches": 0}, "max_batches must be at least 1, got 0"),
        ("awd-lstm", {"seed": -1}, "seed must not be negative, got -1"),
        ("awd-lstm", {"optimizer": "lion"}, "optimizer must be one of sgd, adam, adamw, muon, got 'lion'"),
        ("awd-lstm", {"lr": 0.0}, "lr must be a finite number above 0, got 0.0"),
        ("awd-lstm", {"lr": float("nan")}, "lr must be a finite number above 0, got nan"),
        ("awd-lstm", {"lr_scaling": "log"}, "lr_scaling must be one of none, sqrt, linear, got 'log'"),
        ("awd-lstm", {"data": "/nowhere/at/all"}, "data folder /nowhere/at/all does not exist"),
        ("awd-lstm", {"pretrained": "/nowhere"}, "awd-lstm has no pretrained weights to begin with"),
        ("gnmt", {}, "gnmt needs a data folder: a folder with train.{en,de} and val.{en,de}"),
        (
            "alexnet",
            {},
            "alexnet needs images, which the package does not contain; give a folder with CIFAR-10's",
        ),
    ],
)
def test_bad_arguments_are_refused_in_one_line(refuse, name, options, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)) as caught:
        refuse(name, **options)
    assert "\n" not in str(caught.value)


def test_missing_files_are_named(tmp_path):
    (tmp_path / "train.txt").write_text("a b\n")
    with pytest.raises(DataNotFound, match=r"lacks valid.txt; give a folder with train.txt and valid.txt"):
        check_workload("awd-lstm", data=tmp_path)


def test_check_tells_what_the_workload_will_be(text_folder):
    facts = check_workload("awd-lstm", data=text_folder, epochs=2)
    workload = build_workload("awd-lstm", data=text_folder, epochs=2)
    assert (facts.name, facts.preset) == (workload.name, workload.preset) == ("awd-lstm", "tiny")
    assert facts.layers == len(workload.layers)
    assert facts.batch_size == workload.batch_size
    assert facts.epochs == workload.epochs == 2
    assert check_workload("awd-lstm", data=text_folder, batch_size=5).batch_size == 5


@pytest.mark.promise
def test_names_need_no_torch():
    code = "import sys, avgpipe.tasks as w; w.workload_names(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=limit(60))
