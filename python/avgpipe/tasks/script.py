"""Functions of a user's script that make tasks for the commands, named as ``path/to/script.py:make``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from avgpipe.errors import nearest, reason
from avgpipe.model.layers import layers_of
from avgpipe.tasks import BuildOptions, Workload, WorkloadFacts
from avgpipe.tasks.loaders import Draws, training_batches
from avgpipe.tasks.task import Task, workload_of

# Options that only the function can apply, and others that it may need.
_ITS_OWN = ("preset", "data", "pretrained", "batch_size", "optimizer", "lr", "lr_scaling", "loader_workers")
_ALSO = ("seed", "epochs", "max_batches", "pipelines")
_LINE_LETTERS = 80


class ScriptError(ValueError):
    """A script or its function failed to make a task. The message names the file and the line."""


@dataclass(frozen=True)
class Script:
    """A function that returns a :class:`Task`, of a file or of a module that Python finds.

    Attributes:
        module: Name of the module.
        path: The file, absolute; None for a module that is found by its name.
        function: Name of the function.
    """

    module: str
    path: str | None
    function: str

    @classmethod
    def parse(cls, text: str) -> Script:
        """Parse ``path/to/script.py:make`` or ``package.module:make``. ScriptError for anything else."""
        place, colon, function = text.rpartition(":")
        if not (colon and place and function.isidentifier()):
            file = text.partition(":")[0] or "path/to/script.py"
            raise ScriptError(f"{text!r} names no function of a script: write {file}:make")
        if place.endswith(".py") or os.sep in place:
            return cls(Path(place).stem, os.path.abspath(place), function)
        return cls(place, None, function)

    @property
    def name(self) -> str:
        stem = self.module.rpartition(".")[2]
        return stem if self.function == "make" else f"{stem}-{self.function}"

    @property
    def reference(self) -> str:
        return f"{self.path or self.module}:{self.function}"

    def check(self, options: BuildOptions) -> WorkloadFacts:
        """Call the function once for all calls of this method about the same task."""
        facts = _facts(self, options.seed, tuple(self._arguments(options).items()))
        return replace(facts, epochs=options.epochs or facts.epochs)

    def build(self, options: BuildOptions) -> Workload:
        return self._workload(self._make(options.seed, self._arguments(options)), options)

    def _workload(self, task: Task, options: BuildOptions) -> Workload:
        with _answering_for(self._find().file, f"{self.reference}, its loader"):
            return workload_of(task, self.name, options)

    def _make(self, seed: int, arguments: dict[str, Any]) -> Task:
        """Call the function after ``torch.manual_seed``; the caller's random state is unchanged."""
        found = self._find()
        with _answering_for(found.file, found.place), Draws(seed):
            torch.manual_seed(seed)
            task = found.function(**arguments)
        if isinstance(task, Task):
            return task
        what = "nothing" if task is None else type(task).__name__
        wanted = "avgpipe.Task(model=..., loader=..., loss_fn=..., optimizer=...)"
        raise ScriptError(f"{found.place}: returned {what} instead of {wanted}")

    def _arguments(self, options: BuildOptions) -> dict[str, Any]:
        """Return the given options that the function has arguments for. ScriptError for one without effect."""
        found = self._find()
        taken = inspect.signature(found.function).parameters
        own = {name: value for name in _ITS_OWN if (value := getattr(options, name))}
        for name in own:
            if name not in taken:
                option = f"--{name.replace('_', '-')}"
                raise ScriptError(f"{found.place}: has no argument {name}: add it, or leave out {option}")
        also = {name: value for name in _ALSO if (value := getattr(options, name)) is not None}
        return {name: value for name, value in (own | also).items() if name in taken}

    def _find(self) -> _FoundFunction:
        module = _imported(self.module) if self.path is None else _loaded(self.module, self.path)
        file = str(module.__file__)
        function = getattr(module, self.function, None)
        if not callable(function):
            names = [
                n
                for n, value in vars(module).items()
                if inspect.isfunction(value) and value.__module__ == module.__name__
            ]
            raise ScriptError(f"{file}: has no function {self.function}: {nearest(self.function, names)}")
        return _FoundFunction(file, function)


class _FoundFunction(NamedTuple):
    """A function and its file."""

    file: str
    function: Callable[..., Any]

    @property
    def place(self) -> str:
        inner = inspect.unwrap(self.function)
        line = f", line {inner.__code__.co_firstlineno}" if inspect.isfunction(inner) else ""
        return f"{self.file}{line}, in {getattr(inner, '__name__', self.function)}"


@lru_cache(maxsize=8)
def _facts(script: Script, seed: int, arguments: tuple[tuple[str, Any], ...]) -> WorkloadFacts:
    options = BuildOptions(seed=seed)
    task = script._make(seed, dict(arguments))
    workload = script._workload(task, options)
    return WorkloadFacts(
        name=script.name,
        preset="",
        layers=len(layers_of(workload.layers)),
        batch_size=workload.batch_size,
        epochs=task.epochs,
        counts_batches=training_batches(task.loader, seed, None, 0).are_counted,
        target=task.target,
    )


# ---- modules ---------------------------------------------------------------------------------------------------------


def _imported(name: str) -> ModuleType:
    """Import a module as ``python -m`` does: the current folder comes first."""
    _look_first_in(os.getcwd())
    with _answering_for(name, f"module {name}"):
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):  # a module that its package imports is missing
                raise
            spec = None
    if spec is None or not spec.origin:
        raise ScriptError(
            f"there is no module {name!r} here: name a file, as in path/to/script.py:make, or a module that can be "
            f"imported from {os.getcwd()}"
        )
    with _answering_for(spec.origin, f"module {name}"):
        return importlib.import_module(name)


def _loaded(name: str, path: str) -> ModuleType:
    """Run a file as ``python path`` does, once; it can import the files beside it.

    It becomes the module ``name``, so that other processes, such as a DataLoader's, find its definitions.
    """
    known = sys.modules.get(name)
    if known is not None:
        if os.path.realpath(getattr(known, "__file__", None) or "") == os.path.realpath(path):
            return known
        raise ScriptError(f"{path}: there is another module {name!r} already: give the script another name")
    if not Path(path).is_file():
        raise ScriptError(f"script {path} does not exist: give the path of a Python file")
    _look_first_in(str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with _answering_for(path, path):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _look_first_in(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


# ---- errors ----------------------------------------------------------------------------------------------------------


@contextmanager
def _answering_for(file: str, otherwise: str) -> Iterator[None]:
    """Run the user's code inside: its prints go to standard error, and its errors become ScriptErrors.

    They name the innermost line of ``file``, or ``otherwise`` if no code of it was running.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        hint = '; put what the script runs itself under if __name__ == "__main__":'
        said = f"{type(error).__name__}: {reason(error)}{hint if isinstance(error, SystemExit) else ''}"
        raise ScriptError(f"{_where(error, file) or otherwise}: {said}") from error


def _where(error: BaseException, file: str) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    if not frames:
        return ""
    line, code = frames[-1].line or "", frames[-1].name
    shown = line if len(line) <= _LINE_LETTERS else line[: _LINE_LETTERS - 3] + "..."
    return f"{file}, line {frames[-1].lineno}, in {code}, {shown!r}"
