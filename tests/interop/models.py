"""Tiny models of transformers, inputs of every kind, and losses, for the tests of the adapter."""

import os
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.model.layers import layers_of
from avgpipe.model.model import stage_layers
from tests.lab.workloads.equality import sgd

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported
transformers = pytest.importorskip("transformers")
from avgpipe.model.transformers import output_of  # noqa: E402  where the library is

VOCABULARY, B, T = 50, 6, 9
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BERT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
LLAMA = {**BERT, "num_key_value_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4}
SIZES = {"Bert": BERT, "GPT2": GPT2, "Llama": LLAMA}
DROPOUTS = {
    "Bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "GPT2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "Llama": ("attention_dropout",),
}
CLASSES = [
    *("BertModel", "BertForSequenceClassification", "BertForMaskedLM", "BertForPreTraining"),
    *("GPT2Model", "GPT2LMHeadModel", "LlamaModel", "LlamaForCausalLM", "LlamaForSequenceClassification"),
]
LANGUAGE_MODELS = ["BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM"]


def build(name, *, dropout=0.0, seed=0, **changes):
    """A tiny float64 model by its class's name."""
    family = next(f for f in DROPOUTS if name.startswith(f))
    drops = dict.fromkeys(DROPOUTS[family], dropout)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY, max_position_embeddings=16, **{**SIZES[family], **drops, **ENDS, **changes}
    )
    torch.manual_seed(seed)
    return getattr(transformers, name)(config).double()


def exact(model):
    """Llama's norm rounds to float32 on its way; torch's does not."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon).double()
                norm.weight = child.weight
                setattr(parent, name, norm)
    return model


def tokens(seed=0):
    return torch.randint(3, VOCABULARY, (B, T), generator=torch.Generator().manual_seed(seed))


def padding(*, left=(), right=()):
    """int64 [B, T]; ``left`` and ``right``: how many of the first rows' positions are padding."""
    mask = torch.ones(B, T, dtype=torch.int64)
    for row, n in enumerate(left):
        mask[row, :n] = 0
    for row, n in enumerate(right):
        mask[row, T - n :] = 0
    return mask


def inputs_of(kind, name):
    """Inputs of one kind as the model takes them."""
    given = {"input_ids": tokens()}
    if kind in ("left", "right"):
        given["attention_mask"] = padding(**{kind: (3, 1, 5)})
    if kind == "all":
        given["attention_mask"] = padding(left=(3, 1, 5))
        given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    if kind == "packed":  # two sequences in a row
        given["position_ids"] = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]).repeat(B, 1)
    if kind in ("all", "packed") and not name.startswith("Llama"):
        given["token_type_ids"] = torch.arange(B * T).view(B, T) % 2
    return given


def own(model, given):
    """What a pipeline returns of the model's own forward. With a cache it would not look for packed sequences."""
    return output_of(model(**given, use_cache=False))


def chained(model, value, cuts=None):
    """What the model's layers return, each by itself, or in stages that begin at ``cuts``."""
    layers = layers_of(model)
    bounds = [0, *(range(1, len(layers)) if cuts is None else cuts), len(layers)]
    for begin, end in pairwise(bounds):
        for layer in stage_layers(layers, begin, end):
            value = layer(value)
    return value


def loss_of(output, target):
    """A mean over samples of whatever the model returns."""
    if isinstance(output, dict):
        return sum(loss_of(value, target) for value in output.values())
    if output.shape[-1] == VOCABULARY:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())
    if output.dim() == 2:
        return F.cross_entropy(output, target[:, 0] % output.shape[1])
    return (output * torch.linspace(-1, 1, output.shape[-1])).square().mean()


def batches(count=2, **mask):
    given = [
        {"input_ids": tokens(n), "attention_mask": padding(**mask)} if mask else tokens(n)
        for n in range(count)
    ]
    return [(x, tokens(10 + n)) for n, x in enumerate(given)]


def pipeline_of(model, *, stages=2, micro_batches=2, loss_fn=loss_of, **plan):
    return Pipeline(
        model, Plan(stages=stages, micro_batches=micro_batches, **plan), loss_fn=loss_fn, optimizer=sgd
    )


def same(got, expected, tolerance=1e-12):
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
