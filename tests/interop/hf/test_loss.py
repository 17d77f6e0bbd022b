"""Losses of heads, proved against the model's own forward, and heads whose loss is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from avgpipe.interop.hf.loss import trainer_loss
from tests.interop.hf.cases import WORDS, bert, causal, classifier, llama, masked, texts, transformers

_TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def mixture() -> Any:
    config = transformers.MixtralConfig(
        **_TINY,
        vocab_size=WORDS,
        num_key_value_heads=1,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )
    return transformers.MixtralForCausalLM(config)


def translator() -> Any:
    sizes = {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "d_kv": 8, "vocab_size": WORDS}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def images() -> Any:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**_TINY, image_size=8, patch_size=4, num_labels=3)
    )


KNOWN: dict[str, Callable[[], Any]] = {
    "causal": causal,
    "llama": llama,
    "masked": masked,
    "classes": classifier,
    "regression": lambda: classifier(num_labels=1),
    "several classes": lambda: classifier(problem_type="multi_label_classification"),
    "tokens": lambda: bert("BertForTokenClassification", num_labels=5),
    "mixture": mixture,
    "translator": translator,
    "images": images,
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_loss_is_that_of_the_models_forward(name: str) -> None:
    model = KNOWN[name]()
    kind = getattr(model.config, "problem_type", None)
    trainer_loss(model)  # raises unless it is
    assert getattr(model.config, "problem_type", None) == kind
    assert model.training


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: bert("BertForQuestionAnswering"),
            "the loss of BertForQuestionAnswering is not known to a pipeline",
        ),
        (lambda: bert("BertForPreTraining"), "cannot be tried on a tiny input .*: give compute_loss_func"),
        (lambda: bert("BertForNextSentencePrediction"), "makes the loss .* where its kind of head makes"),
        (lambda: torch.nn.Linear(2, 2), "the loss of Linear is not known"),
    ],
)
def test_other_losses_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_loss(make())


def test_a_forward_with_another_loss_is_refused() -> None:
    class Doubled(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            if output.loss is not None:
                output.loss = 2 * output.loss
            return output

    with pytest.raises(ValueError, match="Doubled makes the loss"):
        trainer_loss(Doubled(llama().config))


def test_micro_batches_make_up_the_batch() -> None:
    model = llama()
    batch = {name: torch.stack([text[name] for text in texts(6)]) for name in ("input_ids", "labels")}
    loss = trainer_loss(model)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits
        parts = [loss(logits[rows], batch["labels"][rows]) for rows in (slice(0, 1), slice(1, 6))]
        expected = model(**batch).loss
    total, count = (sum(float(part[n]) for part in parts) for n in (0, 1))
    assert total / count == pytest.approx(float(expected), rel=1e-6)
