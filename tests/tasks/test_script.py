"""Functions of scripts: found, called, and answered for in one sentence that names file and line."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from avgpipe.tasks import build_workload, check_workload, find_workload
from avgpipe.tasks.script import ScriptError
from tests.scripts import HEAD, WriteScript

LINE = HEAD.count("\n") + 1  # the first one after the head


def test_a_script_is_named_by_its_path_or_as_a_module():
    script = find_workload("some/where/train.py:make")
    assert (script.name, script.reference) == ("train", f"{os.getcwd()}/some/where/train.py:make")
    assert find_workload("some/../train.py:make").reference == f"{os.getcwd()}/train.py:make"
    assert find_workload("train.py:other").name == "train-other"
    assert find_workload("package.train:make").reference == "package.train:make"
    assert find_workload("gpt").reference == find_workload("gpt").name == "gpt"


@pytest.mark.parametrize("text", ["train.py", "train.py:", ":make", "train.py:3", "a:b:c-d"])
def test_what_names_no_function_is_refused(text):
    with pytest.raises(ScriptError, match=f"^'{re.escape(text)}' names no function of a script: write "):
        find_workload(text)


def test_check_tells_what_the_task_is(write_script: WriteScript) -> None:
    path = write_script("def make(): return task(epochs=3, target='loss=0.1')")
    facts = check_workload(f"{path}:make")
    assert (facts.name, facts.layers, facts.batch_size, facts.epochs) == ("own_script", 3, 8, 3)
    assert (facts.target, facts.counts_batches, facts.settled) == ("loss=0.1", True, {})
    assert check_workload(f"{path}:make", epochs=5).epochs == 5


def test_the_seed_is_that_of_the_script_by_itself(write_script: WriteScript) -> None:
    path = write_script("def make(): return task()")
    first = build_workload(f"{path}:make", seed=3).layers
    torch.manual_seed(3)
    (own,) = [sys.modules["own_script"].make().model[0].weight]
    assert torch.equal(first[0].weight, own)  # type: ignore[index]
    torch.manual_seed(4)
    drawn = torch.rand(3)
    torch.manual_seed(4)
    again = build_workload(f"{path}:make", seed=3).layers
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(first[0].weight, again[0].weight)  # type: ignore[index]
    assert first is not again


def test_what_lies_beside_a_script_can_be_imported(write_script: WriteScript) -> None:
    write_script("WIDTH = 5", name="folder/beside_it.py", head="")
    path = write_script(
        "from beside_it import WIDTH\ndef make(): return task(model=nn.Linear(4, WIDTH))",
        name="folder/uses_it.py",
    )
    assert build_workload(f"{path}:make").layers.out_features == 5  # type: ignore[union-attr]


def test_a_module_is_found_from_the_current_folder(write_script: WriteScript, monkeypatch) -> None:
    write_script("", name="own_package/__init__.py", head="")
    path = write_script("def make(): return task()", name="own_package/training.py")
    monkeypatch.chdir(path.parents[1])
    assert check_workload("own_package.training:make").name == "training"
    for missing in ("own_package.trainin", "own_packag.training"):
        with pytest.raises(ScriptError, match=rf"^there is no module '{missing}' here: name a file, as in"):
            check_workload(f"{missing}:make")
    write_script("import nowhere_at_all", name="broken_package/__init__.py", head="")
    with pytest.raises(
        ScriptError, match=r"^module broken_package.training: .* No module named 'nowhere_at_all'"
    ):
        check_workload("broken_package.training:make")


def test_what_a_script_prints_is_kept_from_standard_output(write_script: WriteScript, capsys) -> None:
    path = write_script("print('loads')\ndef make():\n    print('makes')\n    return task()")
    build_workload(f"{path}:make")
    assert capsys.readouterr() == ("", "loads\nmakes\n")


def test_a_function_gets_the_given_options_that_it_has_arguments_for(
    write_script: WriteScript, capsys
) -> None:
    names = ["lr", "data", "loader_workers", "batch", "seed", "epochs", "max_batches", "pipelines"]
    path = write_script(
        f"def make({'=9, '.join(names)}=9):\n    print({', '.join(names)})\n    return task()"
    )
    build_workload(f"{path}:make")
    build_workload(
        f"{path}:make", lr=0.5, data="text", loader_workers=2, epochs=3, max_batches=7, pipelines=2
    )
    assert capsys.readouterr().err.splitlines() == ["9 9 9 9 0 9 9 1", "0.5 text 2 9 0 3 7 2"]


@pytest.mark.parametrize("name", ["preset", "data", "pretrained", "batch_size", "optimizer", "lr"])
def test_options_without_an_effect_are_refused(name, write_script: WriteScript) -> None:
    path = write_script("def make(): return task()")
    value = {"batch_size": 3, "lr": 0.1, "optimizer": "sgd"}.get(name, "x")
    option = f"--{name.replace('_', '-')}"
    message = f"{path}, line {LINE}, in make: has no argument {name}: add it, or leave out {option}"
    with pytest.raises(ScriptError, match=f"^{re.escape(message)}$"):
        check_workload(f"{path}:make", **{name: value})


# after the head of a script, what the message says after the script's path
WRONG = {
    "an import": (
        "import nowhere_at_all",
        f", line {LINE}, in <module>, 'import nowhere_at_all': ModuleNotFoundError: No module",
    ),
    "syntax": ("def make(:", f", line {LINE}: SyntaxError: invalid syntax"),
    "another function": (
        "def mkae(): pass",
        ": has no function make: did you mean 'mkae'? valid names: model, data, sgd, task, mkae",
    ),
    "no function": ("make = 3", ": has no function make: "),
    "a failure": (
        "def make():\n    return inner()\ndef inner():\n    return torch.zeros(2) @ torch.zeros(3)",
        f", line {LINE + 3}, in inner, 'return torch.zeros(2) @ torch.zeros(3)': RuntimeError: ",
    ),
    "an argument": (
        "def make(size): pass",
        f", line {LINE}, in make: TypeError: make() missing 1 required positional argument: 'size'",
    ),
    "another type": (
        "def make(): return model()",
        f", line {LINE}, in make: returned Sequential instead of avgpipe.Task(model=..., loader=...",
    ),
    "nothing": ("def make(): task()", f", line {LINE}, in make: returned nothing instead of avgpipe.Task("),
    "a wrong task": (
        "def make(): return avgpipe.Task(model=3, loader=3, loss_fn=sgd, optimizer=sgd)",
        f", line {LINE}, in make, "
        "'def make(): return avgpipe.Task(model=3, loader=3, loss_fn=sgd, optimizer=sgd)': TypeError: model=3: must be",
    ),
    "no pairs": (
        "def make(): return task(loader=[torch.zeros(3)])",
        ":make, its loader: TypeError: a loader must yield pairs (inputs, targets), or mappings of inputs with "
        "the targets as 'labels', not Tensor",
    ),
    "a failing loader": (
        "class Data:\n    def __len__(self): return 3\n    def __getitem__(self, n): return n / 0\n"
        "def make(): return task(loader=torch.utils.data.DataLoader(Data()))",
        f", line {LINE + 2}, in __getitem__, 'def __getitem__(self, n): return n / 0': ZeroDivisionError: ",
    ),
    "an exit": (
        "raise SystemExit(2)",
        f", line {LINE}, in <module>, 'raise SystemExit(2)': SystemExit: 2; put what the script runs itself",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("refuse", [check_workload, build_workload])
def test_what_is_wrong_is_said_in_one_sentence(case, refuse, write_script: WriteScript) -> None:
    body, message = WRONG[case]
    path = write_script(body)
    for _ in range(2):  # a script that could not be loaded is no module
        with pytest.raises(ScriptError, match="^" + re.escape(f"{path}{message}")) as caught:
            refuse(f"{path}:make")
        assert "\n" not in str(caught.value)


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=f"^script {tmp_path}/none.py does not exist: give the path"):
        check_workload(f"{tmp_path}/none.py:make")


def test_a_script_cannot_stand_for_another_module(write_script: WriteScript) -> None:
    path = write_script("def make(): return task()", name="random.py")
    with pytest.raises(
        ScriptError, match=f"^{path}: there is another module 'random' already: give the script"
    ):
        check_workload(f"{path}:make")
