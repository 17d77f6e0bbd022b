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
        layer.calls = next((names[id(m)] for m in layer.children()), "")  # type: ignore[assignment]
    return chain


def _weights(*modules: nn.Module | None) -> float:
    """Multiply-adds per token: the matrices, each used once."""
    return float(sum(p.numel() for m in modules if m is not None for p in m.parameters() if p.dim() > 1))


# ---- first layers --------------------------------------------------------------------------------------------------


class _Embeddings(nn.Module):
    """Turns the input into hidden states, and passes on what later layers need of it."""

    takes: tuple[str, ...] = ("input_ids", "attention_mask", "position_ids", "at")
    passes_positions = True  # whether the blocks need them too

    def forward(self, inputs: Passed) -> Passed:
        given = {"input_ids": inputs} if isinstance(inputs, Tensor) else self._checked(inputs)
        hidden = self.embed(
            given["input_ids"], given.get("token_type_ids"), positions := given.get("position_ids")
        )
        mask, at = given.get("attention_mask"), given.get("at")
        passed = {
            "hidden": hidden,
            "mask": None if mask is None else mask.bool(),
            "positions": positions if self.passes_positions else None,
            "at": at,
        }
        return _passed(passed)

    def embed(self, tokens: Tensor, token_types: Tensor | None, positions: Tensor | None) -> Tensor:
        raise NotImplementedError  # each family's own, below

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
    takes = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "at")
    passes_positions = False

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.embeddings = base.embeddings
        self.compute_cost = 4.0 * base.config.hidden_size

    def embed(self, tokens: Tensor, token_types: Tensor | None, positions: Tensor | None) -> Tensor:
        hidden: Tensor = self.embeddings(input_ids=tokens, token_type_ids=token_types, position_ids=positions)
        return hidden


class _GPT2Embeddings(_Embeddings):
    takes = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "at")

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = base.wte, base.wpe, base.drop
        self.compute_cost = 2.0 * base.config.hidden_size

    def embed(self, tokens: Tensor, token_types: Tensor | None, positions: Tensor | None) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(_positions(tokens, positions))
        if token_types is not None:
            hidden = hidden + self.tokens(token_types)
        dropped: Tensor = self.dropout(hidden)
        return dropped


class _LlamaEmbeddings(_Embeddings):
    def __init__(self, base: Any) -> None:
        super().__init__()
        self.tokens = base.embed_tokens
        self.compute_cost = float(base.config.hidden_size)

    def embed(self, tokens: Tensor, token_types: Tensor | None, positions: Tensor | None) -> Tensor:
        hidden: Tensor = self.tokens(tokens)
        return hidden


def _positions(like: Tensor, positions: Tensor | None) -> Tensor:
    """[b, T] as given, or 0, 1, ... as [1, T] for ``like`` [b, T, ...]."""
    return arange(like.shape[1], device=like.device).unsqueeze(0) if positions is None else positions


def _passed(parts: dict[str, Any]) -> Passed:
    """What travels: the hidden states alone, or a dict where more was given."""
    kept = {name: value for name, value in parts.items() if value is not None}
    return kept if len(kept) > 1 else kept["hidden"]


def _parts(value: Passed) -> dict[str, Any]:
    return {"hidden": value} if isinstance(value, Tensor) else value


# ---- blocks --------------------------------------------------------------------------------------------------------


class _TransformerBlock(nn.Module):
    """One block of the model, between :func:`_parts` and :func:`_passed`."""

    def __init__(self, block: nn.Module, config: Any, causal: bool) -> None:
        super().__init__()
        self.block, self.config, self.causal = block, config, causal
        self.compute_cost = _weights(block)

    def forward(self, value: Passed) -> Passed:
        parts = _parts(value)
        hidden, positions = parts["hidden"], parts.get("positions")
        mask = self._attention_mask(hidden, parts.get("mask"), positions)
        return _passed({**parts, "hidden": self.run(hidden, mask, positions)})

    def run(self, hidden: Tensor, mask: Any, positions: Tensor | None) -> Tensor:
        raise NotImplementedError  # each family's own, below

    def _attention_mask(self, hidden: Tensor, mask: Tensor | None, positions: Tensor | None) -> Any:
        """As the attention implementation wants it; None where it needs none."""
        given: dict[str, Any] = {"config": self.config, "inputs_embeds": hidden, "attention_mask": mask}
        if not self.causal:
            return _masking.create_bidirectional_mask(**given, allow_is_bidirectional_skip=mask is None)
        return _masking.create_causal_mask(
            **given, past_key_values=None, position_ids=positions, allow_is_causal_skip=mask is None
        )


class _BertBlock(_TransformerBlock):
    def run(self, hidden: Tensor, mask: Any, positions: Tensor | None) -> Tensor:
        output: Tensor = self.block(hidden, mask)
        return output


class _GPT2Block(_TransformerBlock):
    def run(self, hidden: Tensor, mask: Any, positions: Tensor | None) -> Tensor:
        positions = _positions(hidden, positions)
        output: Tensor = self.block(hidden, attention_mask=mask, use_cache=False, position_ids=positions)
        return output


class _LlamaBlock(_TransformerBlock):
    def __init__(self, block: nn.Module, config: Any, rotary: nn.Module) -> None:
        super().__init__(block, config, causal=True)
        self.rotary = rotary  # the blocks of a stage share one

    def run(self, hidden: Tensor, mask: Any, positions: Tensor | None) -> Tensor:
        positions = _positions(hidden, positions)
        output: Tensor = self.block(
            hidden,
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
            position_embeddings=self.rotary(hidden, position_ids=positions),
        )
        return output


# ---- last layers ---------------------------------------------------------------------------------------------------


class _Hidden(nn.Module):
    """The last hidden states [b, T, d]. A pooler is held for its weights alone: only the pooled output needs it."""

    def __init__(self, name: str, norm: nn.Module | None = None, pooler: nn.Module | None = None) -> None:
        super().__init__()
        self.name, self.norm, self.pooler = name, norm, pooler
        self.compute_cost = 1.0

    def forward(self, value: Passed) -> Tensor:
        hidden = _without_at(value, self.name)
        return hidden if self.norm is None else self.norm(hidden)


class _LanguageModelHead(nn.Module):
    """Logits [b, T, V], or [b, V] of the position ``at``."""

    def __init__(self, norm: nn.Module | None, output: nn.Module) -> None:
        super().__init__()
        self.norm, self.output = norm, output
        self.compute_cost = _weights(output)

    def forward(self, value: Passed) -> Tensor:
        hidden = _at(_parts(value))
        if self.norm is not None:
            hidden = self.norm(hidden)
        logits: Tensor = self.output(hidden)
        return logits


class _BertPretrainingHead(nn.Module):
    """(logits [b, T, V] or [b, V] of the position ``at``, next-sentence logits [b, 2])."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pooler, self.output = model.bert.pooler, model.cls
        self.compute_cost = _weights(self.output)

    def forward(self, value: Passed) -> tuple[Tensor, Tensor]:
        parts = _parts(value)
        logits, next_sentence = self.output(_at(parts), self.pooler(parts["hidden"]))
        return logits, next_sentence


class _BertClassifier(nn.Module):
    """Logits [b, classes] from the pooled first position."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.name = type(model).__name__
        self.pooler, self.dropout, self.classifier = model.bert.pooler, model.dropout, model.classifier
        # once per sequence, however long
        self.compute_cost = _weights(self.pooler, self.classifier) / model.config.max_position_embeddings

    def forward(self, value: Passed) -> Tensor:
        logits: Tensor = self.classifier(self.dropout(self.pooler(_without_at(value, self.name))))
        return logits


def _at(parts: dict[str, Any]) -> Tensor:
    hidden: Tensor = parts["hidden"]
    return hidden[:, parts["at"]] if "at" in parts else hidden


def _without_at(value: Passed, name: str) -> Tensor:
    parts = _parts(value)
    if "at" in parts:
        raise ValueError(
            f"at={parts['at']} asks for a position's logits, and {name} is no language model: leave it out"
        )
    hidden: Tensor = parts["hidden"]
    return hidden


# ---- models --------------------------------------------------------------------------------------------------------


def _bert(base: Any, head: nn.Module) -> list[nn.Module]:
    blocks = [_BertBlock(block, base.config, base.config.is_decoder) for block in base.encoder.layer]
    return [_BertEmbeddings(base), *blocks, head]


def _gpt2(base: Any, head: nn.Module) -> list[nn.Module]:
    return [_GPT2Embeddings(base), *(_GPT2Block(block, base.config, True) for block in base.h), head]


def _llama(base: Any, head: nn.Module) -> list[nn.Module]:
    blocks = [_LlamaBlock(block, base.config, base.rotary_emb) for block in base.layers]
    return [_LlamaEmbeddings(base), *blocks, head]


_BUILDERS: dict[str, Callable[[Any], list[nn.Module]]] = {
    "BertModel": lambda m: _bert(m, _Hidden("BertModel", pooler=m.pooler)),
    "BertForSequenceClassification": lambda m: _bert(m.bert, _BertClassifier(m)),
    "BertForMaskedLM": lambda m: _bert(m.bert, _LanguageModelHead(None, m.cls)),
    "BertForPreTraining": lambda m: _bert(m.bert, _BertPretrainingHead(m)),
    "GPT2Model": lambda m: _gpt2(m, _Hidden("GPT2Model", norm=m.ln_f)),
    "GPT2LMHeadModel": lambda m: _gpt2(m.transformer, _LanguageModelHead(m.transformer.ln_f, m.lm_head)),
    "LlamaModel": lambda m: _llama(m, _Hidden("LlamaModel", norm=m.norm)),
    "LlamaForCausalLM": lambda m: _llama(m.model, _LanguageModelHead(m.model.norm, m.lm_head)),
}
