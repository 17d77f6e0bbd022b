"""Configurations of transformers with few layers: some of each stack, at least one of each kind."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_DEPTHS = r"(num_|n_)?((hidden|encoder|decoder)_)?layers?|num_decoder_layers"
_SOME_LAYERS = (  # a number of layers, or the index of one
    r"num_kv_shared_layers|num_dense_layers|first_k_dense_replace|max_window_layers|moe_layer_end_index"
)


def with_layers(config: Any, layers: int) -> Any:
    """Return a copy of a configuration, and of its parts, that keeps ``layers`` of each stack.

    If there are more kinds of layers, one of each is kept.
    """
    small, fields = copy.deepcopy(config), dict(vars(config))
    per_layer = {int(n): own for n, own in config.to_dict().get("per_layer_config", {}).items()}
    if per_layer:
        small.per_layer_config = None  # otherwise its fields cannot be set
    depth = fields.get(config.attribute_map.get("num_hidden_layers", "num_hidden_layers"))
    stack = _Stack(fields, per_layer, depth, layers)
    for name, value in fields.items():
        if hasattr(value, "to_dict"):
            setattr(small, name, with_layers(value, layers))
        elif (new := stack.of(name, value)) is not value:
            setattr(small, name, new)
    if per_layer:
        small.per_layer_config = {at: per_layer[n] for at, n in enumerate(stack.kept) if n in per_layer}
    return small


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Stack:
    """Values of fields about layers, for the kept layers.

    Attributes:
        kept: Their numbers, ascending.
    """

    def __init__(
        self, fields: Mapping[str, Any], per_layer: Mapping[int, Any], depth: Any, layers: int
    ) -> None:
        self._depth, self._layers = depth if _is_number(depth) else 0, layers
        lists = [
            value
            for name, value in fields.items()
            if self._is_of_each(value) and not self._is_of_numbers(value)
        ]
        kinds: dict[str, int] = {}  # by the settings of a layer, the first such layer
        for n in range(self._depth):
            kinds.setdefault(repr([*(of[n] for of in lists), per_layer.get(n)]), n)
        first = list(kinds.values())
        count = max(layers, len(first))
        self.kept = sorted([*first, *(n for n in range(self._depth) if n not in first)][:count])

    def of(self, name: str, value: Any) -> Any:
        """Return a field's value for the kept layers."""
        if len(self.kept) < self._depth:
            if self._is_of_each(value):
                value = type(value)(value[n] for n in self.kept)
            if self._is_of_numbers(value) and name.endswith("_layers"):
                return type(value)(
                    self._place(n) for n in value if len(value) == len(self.kept) or n in self.kept
                )
            if _is_number(value) and re.fullmatch(_SOME_LAYERS, name):
                return math.ceil(value * len(self.kept) / self._depth)
        if not (_is_number(value) and re.fullmatch(_DEPTHS, name)):
            return value
        return len(self.kept) if value == self._depth else min(value, self._layers)

    def _is_of_each(self, value: Any) -> bool:
        return isinstance(value, list | tuple) and len(value) == self._depth > 0

    def _is_of_numbers(self, value: Any) -> bool:
        """Return whether a list seems to hold layers' numbers, instead of flags."""
        if not (isinstance(value, Sequence) and value and all(map(_is_number, value))):
            return False
        return max(value) < self._depth and (max(value) > 1 or len(set(value)) == len(value))

    def _place(self, number: int) -> int:
        """Return a layer's place among the kept ones, or that of the last one before it."""
        return max(at for at, n in enumerate(self.kept) if n <= number)
