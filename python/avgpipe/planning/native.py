"""Loads avgpipe_ext._native, whose ``simulate`` is the engine of csrc/simulate."""

from __future__ import annotations

import sys
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import Any

TICKS_PER_S = 10**12
LONGEST_STEP = 2**58  # ticks

KINDS = "FBIWU"  # by their numbers

_MODULE = "avgpipe_ext._native"
_BUILD = "run `pip install --no-build-isolation -e .` in the folder of setup.py"


@cache
def engine() -> Any:
    """The module, loaded from its file: importing its package would take torch.

    Raises ImportError where it is not built.
    """
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    package = find_spec("avgpipe_ext")
    if package is None:
        raise ImportError(f"avgpipe_ext, which holds the simulation engine, is not installed: {_BUILD}")
    spec = PathFinder.find_spec(_MODULE, package.submodule_search_locations)
    if spec is None or spec.loader is None:
        version = ".".join(map(str, sys.version_info[:2]))
        raise ImportError(f"{package.origin} has no _native module for Python {version}: {_BUILD}")
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ImportError(f"{spec.origin} cannot be loaded ({error}): {_BUILD}") from None
    sys.modules[_MODULE] = module
    return module


def too_long() -> ValueError:
    return ValueError(
        f"the costs are too long to simulate: a single one must be below {LONGEST_STEP / TICKS_PER_S:.0f} s, a run "
        f"below {16 * LONGEST_STEP / TICKS_PER_S:.0f} s; costs are in seconds"
    )
