"""Losses of heads, proved against the model's own forward, and heads whose loss is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from avgpipe.interop.hf.loss import trainer_loss
from tests.interop.hf.cases import (
    bert,
    causal,
    classifier,
    images,
    llama,
    masked,
    mixture,
    texts,
    transformers,
    translator,
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
        (lambda: bert("BertForNextSentencePrediction"), "has the loss .* but its kind of head has"),
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

    with pytest.raises(ValueError, match="Doubled has the loss"):
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
