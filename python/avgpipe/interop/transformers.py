"""Models of the transformers library as chains of layers: embeddings, one layer per block, head.

``Pipeline`` takes such a model as it is. The layers call the model's own modules and hold them themselves, so names of
parameters, tied ones, attention implementation and dropout stay those of the model.

Input: token numbers ``input_ids``, int64 [b, T]; or a plain dict of ``input_ids`` and, as the model takes them,
``attention_mask`` (1: a token, 0: padding), ``token_type_ids``, ``position_ids``, all [b, T]. GPT-2 and Llama take
``position_ids`` without a mask that begin anew for several sequences in a row, as they do with ``use_cache=False``.
With the plain int ``at`` in the dict, a language model returns the logits of that position only, [b, V], as
generation wants them.

Output: what the model returns as ``logits``, or as ``last_hidden_state`` [b, T, d] where it has no head;
``BertForPreTraining`` returns the pair (prediction logits, next-sentence logits). Losses belong to the pipeline.

Between layers travel the hidden states [b, T, d], and only what was given of the attention mask, as bool [b, T], of
positions, and ``at``. Each block makes its own attention mask and rotary embedding of them: cheap beside what it
computes, and a [b, 1, T, T] mask would often be larger than the hidden states. A mask is used whether or not it
hides anything, since looking would make a GPU wait: leave it out where there is no padding.

Not done: key-value caches, cross-attention, gradient checkpointing by the model (the pipeline can recompute instead).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, arange, nn

# untyped on purpose: types would be checked against whichever release is installed
_masking: Any = importlib.import_module("transformers.masking_utils")

Passed: TypeAlias = "Tensor | dict[str, Any]"  # hidden states, or a dict of them and what else was given


def layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model of transformers, which share its modules and parameters; see above for what they take.

    Each states its ``compute_cost``, multiply-adds per token without those between queries and keys, and its
    first module's name in the model, by which a plan's ``partition`` may name it.

    Raises:
        ValueError: another class than the supported ones, or a model with cross-attention or gradient checkpointing.
    """
    computes = next(c for c in type(model).__mro__ if "forward" in vars(c))
    build = _BUILDERS.get(computes.__name__)
    if build is None or not computes.__module__.startswith("transformers.models."):
        raise ValueError(
            f"{type(model).__name__} of transformers cannot be split into stages: supported are "
            f"{', '.join(_BUILDERS)}; pass a list of layers for another model"
        )
    whole: Any = model
    if getattr(whole.config, "add_cross_attention", False):
        raise ValueError(
            f"{type(model).__name__} has cross-attention, which cannot be split into stages: "
            "build it with add_cross_attention=False"
        )
    if any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        raise ValueError(
            f"gradient checkpointing of {type(model).__name__} is on: switch it off and "
            "let the pipeline do it with Plan(recompute='always')"
        )
    names = {id(m): name for name, m in model.named_modules()}
    chain = build(whole)
    for layer in chain:
        layer.calls = next((names[id(m)] for m in layer.modules() if id(m) in names), "")  # type: ignore[assignment]
    return chain


def _weights(*modules: nn.Module) -> float:
    """Multiply-adds per token: the matrices, each used once."""
    return float(sum(p.numel() for m in modules for p in m.parameters() if p.dim() > 1))


# ---- first layers --------------------------------------------------------------------------------------------------


class _Embeddings(nn.Module, ABC):
    """Turns the input into hidden states, and passes on what later layers need of it."""

    takes: tuple[str, ...] = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "at")
    passes_positions = True  # whether the blocks need them too

    def __init__(self, config: Any, lookups: float) -> None:
        super().__init__()
        self.compute_cost = lookups * config.hidden_size

    def forward(self, inputs: Passed) -> Passed:
        given = {"input_ids": inputs} if isinstance(inputs, Tensor) else self._checked(inputs)
        mask, at = given.pop("attention_mask", None), given.pop("at", None)
        positions = given.get("position_ids") if self.passes_positions else None
        mask = None if mask is None else mask.bool()
        return _passed(hidden=self.embed(**given), mask=mask, positions=positions, at=at)

    @abstractmethod
    def embed(self, input_ids: Tensor, **given: Tensor) -> Any:
        """Return the first hidden states."""

    def _checked(self, inputs: Any) -> dict[str, Any]:
        if not isinstance(inputs, dict):
            raise TypeError(
                f"the model takes a tensor of input_ids or a plain dict, not {type(inputs).__name__}"
            )
        given = {name: value for name, value in inputs.items() if value is not None}
        unknown = sorted(given.keys() - set(self.takes))
        if unknown or "input_ids" not in given:
            wrong = f"unknown {', '.join(map(repr, unknown))}" if unknown else "no 'input_ids'"
            raise ValueError(f"the model takes {', '.join(self.takes)}; the inputs have {wrong}")
        tokens = given["input_ids"]
        for name, value in given.items():
            if name == "at" and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"at must be a plain int, the position to predict from, not {value!r}")
            if name != "at" and value.shape != tokens.shape:
                raise ValueError(
                    f"{name} is {list(value.shape)} and input_ids {list(tokens.shape)}: make them alike"
                )
        return given


class _BertEmbeddings(_Embeddings):
    passes_positions = False

    def __init__(self, base: Any) -> None:
        super().__init__(base.config, 4.0)
        self.embeddings = base.embeddings

    def embed(self, input_ids: Tensor, **given: Tensor) -> Any:
        return self.embeddings(input_ids=input_ids, **given)


class _GPT2Embeddings(_Embeddings):
    def __init__(self, base: Any) -> None:
        super().__init__(base.config, 2.0)
        self.tokens, self.positions, self.dropout = base.wte, base.wpe, base.drop

    def embed(self, input_ids: Tensor, **given: Tensor) -> Any:
        hidden = self.tokens(input_ids) + self.positions(_positions(input_ids, given.get("position_ids")))
        types = given.get("token_type_ids")
        return self.dropout(hidden if types is None else hidden + self.tokens(types))


class _LlamaEmbeddings(_Embeddings):
    takes = ("input_ids", "attention_mask", "position_ids", "at")

    def __init__(self, base: Any) -> None:
        super().__init__(base.config, 1.0)
        self.tokens = base.embed_tokens

    def embed(self, input_ids: Tensor, **given: Tensor) -> Any:
        return self.tokens(input_ids)


def _positions(like: Tensor, positions: Tensor | None) -> Tensor:
    """[b, T] as given, or 0, 1, ... as [1, T] for ``like`` [b, T, ...]."""
    return arange(like.shape[1], device=like.device).unsqueeze(0) if positions is None else positions


def _passed(**parts: Any) -> Passed:
    """What travels: the hidden states alone, or a dict where more was given."""
    kept = {name: value for name, value in parts.items() if value is not None}
    return kept if len(kept) > 1 else kept["hidden"]


def _parts(value: Passed) -> dict[str, Any]:
    return {"hidden": value} if isinstance(value, Tensor) else value


# ---- blocks --------------------------------------------------------------------------------------------------------


class _TransformerBlock(nn.Module):
    """One block of the model, between :func:`_parts` and :func:`_passed`.

    Args:
        block: the model's own.
        config: the model's.
        causal: whether it looks back only.
        positioned: whether it takes positions, and could have a cache.
        rotary: makes the embeddings of positions that it takes too; the blocks of a stage share one.
    """

    def __init__(
        self, block: nn.Module, config: Any, causal: bool, positioned: bool, rotary: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.block, self.config, self.rotary = block, config, rotary
        self.causal, self.positioned = causal, positioned
        self.compute_cost = _weights(block)

    def forward(self, value: Passed) -> Passed:
        parts = _parts(value)
        hidden, positions = parts["hidden"], parts.get("positions")
        given = {"attention_mask": self._attention_mask(hidden, parts.get("mask"), positions)}
        if self.positioned:
            positions = _positions(hidden, positions)
            given |= {"position_ids": positions, "use_cache": False}
        if self.rotary is not None:
            given["position_embeddings"] = self.rotary(hidden, position_ids=positions)
        return _passed(**{**parts, "hidden": self.block(hidden, **given)})

    def _attention_mask(self, hidden: Tensor, mask: Tensor | None, positions: Tensor | None) -> Any:
        """As the attention implementation wants it; None where it needs none."""
        given: dict[str, Any] = {"config": self.config, "inputs_embeds": hidden, "attention_mask": mask}
        if not self.causal:
            return _masking.create_bidirectional_mask(**given, allow_is_bidirectional_skip=mask is None)
        return _masking.create_causal_mask(
            **given, past_key_values=None, position_ids=positions, allow_is_causal_skip=mask is None
        )


# ---- last layers ---------------------------------------------------------------------------------------------------


class _Head(nn.Module):
    """Logits [b, T, V], or [b, V] of the position ``at``, or what else the last modules make of hidden states.

    Args:
        model: the whole, to name it.
        steps: the modules, called one after another; none for the last hidden states [b, T, d].
        language: whether it makes logits of each position, so that ``at`` can be asked for.
        calls: how many tokens there are to a call of the steps.
        pooler: held for its weights alone: only the pooled output needs it.
    """

    def __init__(
        self, model: Any, *steps: nn.Module, language: bool = True, calls: int = 1, pooler: Any = None
    ) -> None:
        super().__init__()
        self.steps, self.pooler = nn.ModuleList(steps), pooler
        self.refused = None if language else type(model).__name__
        self.compute_cost = max(1.0, _weights(*steps) / calls)

    def forward(self, value: Passed) -> Any:
        parts = _parts(value)
        if "at" in parts and self.refused is not None:
            asked = f"at={parts['at']} asks for a position's logits"
            raise ValueError(f"{asked}, and {self.refused} is no language model: leave it out")
        hidden = _at(parts)
        for step in self.steps:
            hidden = step(hidden)
        return hidden


class _BertPretrainingHead(nn.Module):
    """(logits [b, T, V] or [b, V] of the position ``at``, next-sentence logits [b, 2])."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pooler, self.output = model.bert.pooler, model.cls
        self.compute_cost = _weights(self.output)

    def forward(self, value: Passed) -> Any:
        parts = _parts(value)
        return self.output(_at(parts), self.pooler(parts["hidden"]))


def _at(parts: dict[str, Any]) -> Any:
    """The hidden states, or those of the position ``at`` alone."""
    return parts["hidden"][:, parts["at"]] if "at" in parts else parts["hidden"]


# ---- models --------------------------------------------------------------------------------------------------------


def _bert(base: Any, head: nn.Module) -> list[nn.Module]:
    causal = base.config.is_decoder
    blocks = [_TransformerBlock(b, base.config, causal, positioned=False) for b in base.encoder.layer]
    return [_BertEmbeddings(base), *blocks, head]


def _bert_classifier(model: Any) -> _Head:
    """Logits [b, classes] from the pooled first position: once per sequence, however long."""
    steps = model.bert.pooler, model.dropout, model.classifier
    return _Head(model, *steps, language=False, calls=model.config.max_position_embeddings)


def _gpt2(base: Any, head: nn.Module) -> list[nn.Module]:
    blocks = [_TransformerBlock(b, base.config, causal=True, positioned=True) for b in base.h]
    return [_GPT2Embeddings(base), *blocks, head]


def _llama(base: Any, head: nn.Module) -> list[nn.Module]:
    blocks = [_TransformerBlock(b, base.config, True, True, base.rotary_emb) for b in base.layers]
    return [_LlamaEmbeddings(base), *blocks, head]


_BUILDERS: dict[str, Callable[[Any], list[nn.Module]]] = {
    "BertModel": lambda m: _bert(m, _Head(m, language=False, pooler=m.pooler)),
    "BertForSequenceClassification": lambda m: _bert(m.bert, _bert_classifier(m)),
    "BertForMaskedLM": lambda m: _bert(m.bert, _Head(m, m.cls)),
    "BertForPreTraining": lambda m: _bert(m.bert, _BertPretrainingHead(m)),
    "GPT2Model": lambda m: _gpt2(m, _Head(m, m.ln_f, language=False)),
    "GPT2LMHeadModel": lambda m: _gpt2(m.transformer, _Head(m, m.transformer.ln_f, m.lm_head)),
    "LlamaModel": lambda m: _llama(m, _Head(m, m.norm, language=False)),
    "LlamaForCausalLM": lambda m: _llama(m.model, _Head(m, m.model.norm, m.lm_head)),
}
