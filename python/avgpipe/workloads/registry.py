"""The workloads by name."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from avgpipe.errors import nearest
from avgpipe.workloads.options import BuildOptions

if TYPE_CHECKING:
    from avgpipe.workloads.workload import Workload, WorkloadFacts

# Each module has PRESETS by workload, check() and build(); it is imported when it is needed, and torch with it.
_MODULES = {
    "awd-lstm": "language",
    "gnmt": "translation",
    "bert": "bert",
    "gpt": "gpt",
    "resnet": "classification",
    "vgg": "classification",
    "alexnet": "classification",
    "captioning": "captioning",
}


def workload_names() -> tuple[str, ...]:
    return tuple(_MODULES)


def preset_names(name: str) -> tuple[str, ...]:
    """The presets of a workload, smallest first. Raises ValueError for an unknown workload."""
    return tuple(_module(name).PRESETS[name])


def check_workload(name: str, options: BuildOptions | None = None, **asked: Any) -> WorkloadFacts:
    """Refuse what :func:`build_workload` would refuse, without reading the data.

    ``asked``: fields of ``BuildOptions``, instead of ``options`` or over it.

    Raises:
        ValueError: an unknown name or preset, or a number out of range.
        avgpipe.workloads.DataNotFound: a ValueError that names the folder and the missing files.
        avgpipe.workloads.LibraryNotFound: a ValueError that names a library that is not installed.
    """
    module, options = _module(name), _options(options, asked)
    presets = module.PRESETS[name]
    if options.preset not in presets:
        raise ValueError(
            f"unknown preset {options.preset!r} of {name}: {nearest(options.preset, tuple(presets))}"
        )
    facts: WorkloadFacts = module.check(name, options)
    return facts


def build_workload(name: str, options: BuildOptions | None = None, **asked: Any) -> Workload:
    """Read the data and make the model with its initial weights, the same on every rank.

    The caller's random state stays as it is. Raises what :func:`check_workload` raises, and ValueError for data that
    are not what they should be.
    """
    options = _options(options, asked)
    check_workload(name, options)
    workload: Workload = _module(name).build(name, options)
    return workload


def _options(options: BuildOptions | None, asked: dict[str, Any]) -> BuildOptions:
    for what in ("data", "pretrained"):
        if asked.get(what) is not None:
            asked[what] = Path(asked[what])
    return replace(options or BuildOptions(), **asked)


def _module(name: str) -> Any:
    if name not in _MODULES:
        raise ValueError(f"unknown workload {name!r}: {nearest(name, workload_names())}")
    return importlib.import_module(f"avgpipe.workloads.{_MODULES[name]}")
