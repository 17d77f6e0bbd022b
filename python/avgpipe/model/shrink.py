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
from collections.abc import Iterator, Mapping
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


def shrunk(config: Any) -> Any:
    """Return a copy of a configuration of transformers that makes a tiny model of the same kind.

    It may be any ``PreTrainedConfig``; its parts become tiny as well, and the numbers of layers stay.
    """
    return _shrunk(config, dict(_widths(config)))


def _shrunk(config: Any, widths: Mapping[int, int]) -> Any:
    small, fields = copy.deepcopy(config), dict(vars(config))
    per_layer = {int(n): own for n, own in config.to_dict().get("per_layer_config", {}).items()}
    if per_layer:
        small.per_layer_config = None  # otherwise its fields cannot be set
    sizes = _Sizes(config, fields, widths)
    for name, value in fields.items():
        if hasattr(value, "to_dict"):
            setattr(small, name, _shrunk(value, widths))
        elif (new := sizes.of(name, value)) is not value:
            setattr(small, name, new)
    if per_layer:
        small.per_layer_config = {
            n: _Sizes(config, {**fields, **own}, widths).all(own) for n, own in per_layer.items()
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
