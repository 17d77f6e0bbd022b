"""Configurations of transformers that make a tiny model of the same kind.

Settings that decide the course of a forward are unchanged: flags, multipliers, kinds of layers, sections of
rotary embeddings and with them the widths of heads. Settings that make a model large become small: the
numbers of heads, experts and words, and the widths between. Related numbers stay consistent: fields equal to
the model's width are equal to it in the tiny one.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_HEADS, _WORDS = 2, 160
_HEAD_WIDTH, _MULTIPLE = 32, 8  # of models without a setting; grouped products need a multiple

# By the full name of a field, its greatest value.
_COUNTS = {
    r"(\w+_)?(n_)?heads?(_per_layer)?": _HEADS,
    r"(\w+_)?vocab_size(_per_layer_input)?": _WORDS,
    r"num_experts|n_routed_experts|num_local_experts|moe_num_experts|zero_expert_num": 4,
    r"(num_)?experts_per_tok(en)?|moe_(top)?k|top_k_experts": 2,
    r"n_groups?|topk_group|num_expert_group|o_groups": 1,
    r"sliding_window(_size)?|attention_chunk_size|attention_window": 4,  # so that they have an effect on a few words
    r"max_source_positions": 24,
}
_INNER = {  # widths that may differ from the model's
    r"(\w+_)?intermediate_size|(\w+_)?ffn_(dim|hidden_size)|d_ff|[dn]_inner|hidden_dim|share_expert_dim": 96,
    r"moe_hidden_size": 64,
    r"embed_dim": 32,
    r"embedding_(size|dim)|word_embed_proj_dim": 40,  # differs from all widths: then models project
    r"[qko]v?_lora_rank|time_step_rank": 16,
}
_KEY_HEADS = r"(\w+_)?(key_value|kv)_heads"
_SPECIAL_WORDS = r"\w*(_token|_token_id|_token_index|_bos_id|_eos_id)s?"
_DEPTHS = r"(num_|n_)?((hidden|encoder|decoder)_)?layers?|num_decoder_layers"
_SOME_LAYERS = (  # a number of layers, or the index of one
    r"num_kv_shared_layers|num_dense_layers|first_k_dense_replace|max_window_layers|moe_layer_end_index"
)


def shrunk(config: Any, *, layers: int | None = None) -> Any:
    """Return a copy of a configuration of transformers that makes a tiny model of the same kind.

    Args:
        config: Any ``PreTrainedConfig``; its parts become tiny as well.
        layers: Number of layers to keep of each stack, or one of each kind if there are more kinds. None:
            all.
    """
    return _shrunk(config, layers, dict(_widths(config)))


def _shrunk(config: Any, layers: int | None, widths: Mapping[int, int]) -> Any:
    small, fields = copy.deepcopy(config), dict(vars(config))
    per_layer = {int(n): own for n, own in config.to_dict().get("per_layer_config", {}).items()}
    if per_layer:
        small.per_layer_config = None  # otherwise its fields cannot be set
    sizes = _Sizes(config, fields, widths)
    stack = _Stack(fields, per_layer, _common(config, fields, "num_hidden_layers"), layers)
    for name, value in fields.items():
        if hasattr(value, "to_dict"):
            setattr(small, name, _shrunk(value, layers, widths))
        elif (new := sizes.of(name, stack.of(name, value))) is not value:
            setattr(small, name, new)
    if per_layer:
        small.per_layer_config = {
            at: _Sizes(config, {**fields, **per_layer[n]}, widths).all(per_layer[n])
            for at, n in enumerate(stack.kept)
            if n in per_layer
        }
    return small


def _widths(config: Any) -> Iterator[tuple[int, int]]:
    """Yield the widths of a configuration's model and of its parts, each with the small one; its own is last."""
    fields = dict(vars(config))
    for part in fields.values():
        if hasattr(part, "to_dict"):
            yield from _widths(part)
    width, heads = (_common(config, fields, name) for name in ("hidden_size", "num_attention_heads"))
    if _is_number(width):
        head = width // heads if _is_number(heads) else _HEAD_WIDTH
        yield width, _HEADS * math.ceil(head / _MULTIPLE) * _MULTIPLE


def _common(config: Any, fields: Mapping[str, Any], name: str) -> Any:
    """Return a field by the name that most models use; None if there is none."""
    return fields.get(config.attribute_map.get(name, name))


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _most(known: Mapping[str, int], name: str) -> int | None:
    return next((most for names, most in known.items() if re.fullmatch(names, name)), None)


class _Sizes:
    """Small values of the fields that make a model large."""

    def __init__(self, config: Any, fields: Mapping[str, Any], widths: Mapping[int, int]) -> None:
        self._heads = _common(config, fields, "num_attention_heads")
        self._widths = widths
        self._special: dict[int, int] = {}

    def all(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.of(name, value) for name, value in fields.items()}

    def of(self, name: str, value: Any) -> Any:
        """Return the small value of a field, or the value itself if it should not change."""
        if isinstance(value, list | tuple) and all(map(_is_number, value)):
            made = type(value)(self.of(name, each) for each in value)
            return value if made == value else made
        if not _is_number(value):
            return value
        if re.fullmatch(_KEY_HEADS, name):
            return 1 if _is_number(self._heads) and value < self._heads else min(value, _HEADS)
        if (most := _most(_COUNTS, name)) is not None:
            return min(value, most)
        if re.fullmatch(_SPECIAL_WORDS, name):
            return self._special_word(value)
        if value in self._widths:
            return self._widths[value]
        most = _most(_INNER, name)
        return value if most is None else min(value, most)

    def _special_word(self, word: int) -> int:
        """Move the number of a special word to the end of the small vocabulary, each to a different place."""
        return word if word < _WORDS else self._special.setdefault(word, _WORDS - 1 - len(self._special))


class _Stack:
    """Values of fields about layers, for the kept layers.

    Attributes:
        kept: Their numbers, ascending.
    """

    def __init__(
        self, fields: Mapping[str, Any], per_layer: Mapping[int, Any], depth: Any, layers: int | None
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
        count = self._depth if layers is None else max(layers, len(first))
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
        if self._layers is None or not (_is_number(value) and re.fullmatch(_DEPTHS, name)):
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
