"""How to call a model whose forward stays its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn


def as_it_is(returned: Any) -> Any:
    """Return what a model returns."""
    return returned


@dataclass(frozen=True)
class Call:
    """How a model is called.

    Attributes:
        trials: small inputs to try it with, each by argument; the first has all that the model is likely to be given.
        main: the argument that a tensor alone is meant for.
        accepts: the names of arguments.
        is_block: whether a module of the model is one of the blocks that it calls one after another.
        fixed: further arguments, the same in every call.
        fill: by argument, an integer without a meaning of its own, such as a word that ends nothing; by default 0.
        output: makes what a pipeline returns of what the model returns.
    """

    trials: Sequence[Mapping[str, Any]]
    main: str
    accepts: frozenset[str]
    is_block: Callable[[nn.Module], bool]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    fill: Mapping[str, int] = field(default_factory=dict)
    output: Callable[[Any], Any] = as_it_is
