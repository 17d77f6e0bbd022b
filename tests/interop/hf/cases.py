"""Small models of transformers, their data, and both trainers on them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from avgpipe import Plan
from avgpipe.interop.hf import PipelineTrainer

transformers: Any = importlib.import_module("transformers")

WORDS = 23
_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def causal() -> Any:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": WORDS}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def llama(**settings: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, **settings))


def bert(kind: str, **settings: Any) -> Any:
    dropped = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    torch.manual_seed(0)
    return getattr(transformers, kind)(transformers.BertConfig(**_SIZES, **dropped, **settings))


def classifier(**settings: Any) -> Any:
    return bert("BertForSequenceClassification", **({"num_labels": 3} | settings))


def masked() -> Any:
    return bert("BertForMaskedLM")


def mixture() -> Any:
    """Experts, whose router has a loss of its own."""
    experts = {"num_key_value_heads": 1, "num_local_experts": 4}
    router = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**_SIZES, **experts, **router))


def translator() -> Any:
    sizes = {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "d_kv": 8, "vocab_size": WORDS}
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, dropout_rate=0))


def images() -> Any:
    sizes = {name: _SIZES[name] for name in list(_SIZES)[:4]}
    torch.manual_seed(0)
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3)
    return transformers.ViTForImageClassification(config)


def texts(count: int = 26) -> list[dict[str, torch.Tensor]]:
    """Tokens as their own labels, of which some at the beginning count for nothing."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for n in range(count):
        ids = torch.randint(1, WORDS, (12,), generator=draw)
        labels = ids.clone()
        labels[: n % 5] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def sentences(count: int = 26) -> list[dict[str, torch.Tensor]]:
    """Tokens with a class."""
    return [{"input_ids": t["input_ids"], "labels": t["input_ids"][0] % 3} for t in texts(count)]


def pictures(count: int = 26) -> list[dict[str, torch.Tensor]]:
    """Pictures with a class."""
    draw = torch.Generator().manual_seed(1)
    return [
        {"pixel_values": torch.randn(3, 8, 8, generator=draw), "labels": torch.tensor(n % 3)}
        for n in range(count)
    ]


def translations(count: int = 26) -> list[dict[str, torch.Tensor]]:
    """Texts with what the decoder is given, as DataCollatorForSeq2Seq makes it of labels."""
    found = []
    for text in texts(count):
        before = torch.cat([torch.zeros(1, dtype=torch.long), text["input_ids"][:-1]])
        found.append({**text, "decoder_input_ids": before})
    return found


def arguments(folder: Path, **settings: Any) -> Any:
    fixed = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-4,  # else steps of gradients near 0 are made of their rounding
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 3,
    }
    return transformers.TrainingArguments(str(folder), **(fixed | settings))


def pipelined(model: Any, args: Any, data: Any, plan: Plan | None = None, **settings: Any) -> Any:
    """Make a trainer of two stages."""
    if "eval_dataset" not in settings:
        settings["eval_dataset"] = data[:10]
    given = {"train_dataset": data} | settings
    return PipelineTrainer(model, args, plan=plan or Plan(stages=2, micro_batches=2), **given)


def numbers(trainer: Any, *names: str) -> list[tuple[Any, ...]]:
    """Return what a trainer has logged under some names, in order."""
    return [(name, row[name]) for row in trainer.state.log_history for name in names if name in row]


def assert_near(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    """Compare what two trainers have logged, and the weights that they ended with."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "epoch")
    found, expected = numbers(ours, *names), numbers(theirs, *names)
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, mine), (_, their) in zip(found, expected):
        assert mine == pytest.approx(their, rel=tolerance, abs=tolerance), name
    assert_same_weights(ours.model, theirs.model, tolerance)


def assert_same_weights(ours: Any, theirs: Any, tolerance: float = 0.0) -> None:
    mine, their = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == their.keys()
    for name, value in mine.items():
        torch.testing.assert_close(
            value, their[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
