"""Models with adapters: a PeftModel as it is, of which only the adapters train.

A stand-in has what a pipeline looks at; the library itself is tested where it is installed.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from tests.runner import run
from tests.runtime.cases import assert_same_training, train_on_one_device, train_pipeline

LOSS = nn.CrossEntropyLoss()


class Adapted(nn.Module):
    """A linear layer with a trained low-rank part."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x) + self.b(self.a(x))
        return out


class PeftModel(nn.Module):
    """Named as the library's, with the model behind two attributes, and a forward that cannot be traced."""

    def __init__(self, model: nn.Module, **config: Any) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model
        self.active_peft_config = SimpleNamespace(peft_type="LORA", **config)

    def get_base_model(self) -> Any:
        return self.base_model.model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args[0].sum() == 0:
            raise AssertionError
        return self.base_model.model(*args, **kwargs)


PeftModel.__module__ = "peft.peft_model"


def adapted() -> PeftModel:
    torch.manual_seed(2)
    layers: list[nn.Module] = [nn.Embedding(11, 8).requires_grad_(False)]
    for _ in range(3):
        layers += [Adapted(nn.Linear(8, 8)), nn.Tanh()]
    return PeftModel(nn.Sequential(*layers, nn.Linear(8, 11).requires_grad_(False)).double())


def dict_batches(count: int, samples: int = 6) -> list[dict[str, torch.Tensor]]:
    """As collators make them."""
    generator = torch.Generator().manual_seed(0)
    return [
        {name: torch.randint(11, (samples,), generator=generator) for name in ("input_ids", "labels")}
        for _ in range(count)
    ]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05)


def train(K: int, N: int = 1) -> Any:
    model = adapted()
    before = copy.deepcopy(model.state_dict())
    batches = [(batch["input_ids"], batch["labels"]) for batch in dict_batches(5)]
    plan = Plan(stages=K, pipelines=N, micro_batches=2, staleness=0)
    losses, state = train_pipeline(model, plan, batches, LOSS, adamw)
    assert_same_training((losses, state), train_on_one_device(model, batches, LOSS, adamw))
    model.load_state_dict(state)
    moved = {name for name, value in state.items() if not torch.equal(value, before[name])}
    assert moved == {name for name in state if ".a." in name or ".b." in name}
    assert all(name.startswith("base_model.model.") for name in state)
    return losses


@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize("K", [1, 2, 4])
def test_adapters_alone_train_as_on_one_device(K: int, N: int) -> None:
    train(K, N)


@pytest.mark.ranks
def test_adapters_train_on_ranks() -> None:
    first, second = run(2, train, K=2)
    assert first == second


def test_prompts_before_the_input_are_refused() -> None:
    model = PeftModel(nn.Sequential(nn.Linear(2, 2)), is_prompt_learning=True)
    with pytest.raises(
        ValueError, match=r"the adapters of LORA put a prompt .* use adapters that change layers"
    ):
        Pipeline(model, Plan(), loss_fn=LOSS, optimizer=adamw)


class TakesNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.table(input_ids)))
        return out


def test_batches_of_collators_train_and_evaluate_as_pairs_do() -> None:
    torch.manual_seed(1)
    model, batches = TakesNames().double(), dict_batches(4)
    pairs = [({"input_ids": batch["input_ids"]}, batch["labels"]) for batch in batches]
    found = []
    for given in (batches, pairs):
        with Pipeline(model, Plan(stages=2, micro_batches=2), loss_fn=LOSS, optimizer=adamw) as p:
            losses = [r.loss for r in p.train(given)]
            found.append((losses, p.evaluate(given).loss, p.predict(pairs[0][0]).tolist()))
    assert found[0] == found[1]


# ---- the library itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [1, 2])
def test_lora_of_the_library(K: int, tmp_path: Any) -> None:
    peft = pytest.importorskip("peft", reason="adapters of their own package")
    transformers = pytest.importorskip("transformers", reason="the model is one of transformers")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, "vocab_size": 11}
    torch.manual_seed(0)
    base = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )
    untouched = copy.deepcopy(base)
    config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, r=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config).double()
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(11, (4, 8), generator=generator) for _ in range(4)]
    batches = [{"input_ids": x, "labels": x} for x in ids]

    def loss_fn(output: Any, target: Any) -> Any:
        return nn.functional.cross_entropy(output[:, :-1].reshape(-1, 11), target[:, 1:].reshape(-1))

    losses, state = train_pipeline(model, Plan(stages=K, micro_batches=2), batches, loss_fn, adamw)
    pairs = [(x, x) for x in ids]
    whole = lambda output, target: loss_fn(output.logits, target)  # noqa: E731
    assert_same_training((losses, state), train_on_one_device(model, pairs, whole, adamw))
    model.load_state_dict(state)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(untouched, tmp_path).double()
    with torch.no_grad():
        torch.testing.assert_close(again(ids[0]).logits, model(ids[0]).logits, rtol=1e-5, atol=1e-5)
