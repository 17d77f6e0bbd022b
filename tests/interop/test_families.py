"""Families of transformers in stages, against a plain training loop of the model itself."""

import copy

import pytest
import torch

from avgpipe.model.layers import layers_of
from avgpipe.model.shrink import shrunk
from avgpipe.model.transformers import output_of
from benchmarks.models.depth import with_layers
from tests.interop.families import FAMILIES, batch, tiny
from tests.interop.models import pipeline_of, transformers


def loss_of(output, target):
    """A mean over samples of whatever the model returns, with the auxiliary loss of experts if there is one."""
    logits = output if isinstance(output, torch.Tensor) else output["logits"]
    rest = 0.0 if isinstance(output, torch.Tensor) else 0.01 * output["aux_loss"]
    weights = torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)
    return ((logits * weights).flatten(1).mean(1) - target).square().mean() + rest


def batches(model):
    return [(batch(model, n), torch.linspace(0, 1, 6, dtype=model.dtype) + n) for n in range(3)]


def trained(model, micro_batches=1):
    """Train a copy on one device, by the model's own forward, and return losses and weights."""
    model = copy.deepcopy(model).train()
    step, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for inputs, target in batches(model):
        parts = [t.tensor_split(micro_batches) for t in (*inputs.values(), target)]
        total = 0.0
        for *given, y in zip(*parts):
            loss = loss_of(output_of(model(**dict(zip(inputs, given)))), y) * len(y) / len(target)
            loss.backward()
            total += float(loss.detach())
        step.step()
        step.zero_grad()
        losses.append(total)
    return losses, model.state_dict()


def assert_equal(model, expected, **plan):
    losses, weights = expected
    with pipeline_of(model, loss_fn=loss_of, **plan) as pipeline:
        assert [r.loss for r in pipeline.train(batches(model))] == pytest.approx(losses, abs=1e-5)
        state = pipeline.state_dict()
    assert state.keys() == weights.keys()
    worst = max(float((state[n].double() - t.double()).abs().max()) for n, t in weights.items() if t.numel())
    assert worst < 1e-5  # some families compute in float32, or their norms
    assert any(not torch.equal(state[name], t) for name, t in model.state_dict().items())


@pytest.mark.grid(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_stages_train_as_the_model_itself_does(name):
    model = tiny(name)
    expected = trained(model)
    assert_equal(model, expected, stages=2, micro_batches=2)
    assert_equal(model, expected, stages=3, micro_batches=3, recompute="always")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma3nForCausalLM", "Gemma4ForCausalLM"])
def test_what_later_blocks_share_comes_to_their_stage(name):
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"this release of transformers has no {name}")
    default = kind.config_class()
    torch.manual_seed(0)
    model = kind(shrunk(with_layers(getattr(default, "text_config", None) or default, 4))).double()
    assert_equal(model, trained(model, 2), stages=2, micro_batches=2)


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_losses_of_experts_come_to_the_loss_function(name):
    model = tiny(name, output_router_logits=True)
    expected = trained(model, 2)
    assert_equal(model, expected, stages=2, micro_batches=2)
    assert_equal(model, expected, stages=4, micro_batches=2)


def test_what_is_made_up_does_not_run_into_what_a_model_multiplies():
    one, other = (tiny("GraniteForCausalLM", embedding_multiplier=by) for by in (1.0, 12.0))
    inputs = batch(one, 0)
    with torch.no_grad():
        for model in (one, other):
            with pipeline_of(model, stages=3) as pipeline:
                torch.testing.assert_close(pipeline.predict(inputs), model.eval()(**inputs).logits)


def test_two_towers_are_refused_with_what_differs():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    text, vision = {**sizes, "vocab_size": 50, **ends}, {**sizes, "image_size": 16, "patch_size": 8}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision))
    with pytest.raises(ValueError, match=r"CLIPModel is not the same when it is cut at .*differs by"):
        pipeline_of(model, stages=3)


def test_blocks_that_are_called_again_are_refused():
    config = transformers.AlbertConfig(
        hidden_size=32, num_attention_heads=4, intermediate_size=64, embedding_size=16
    )
    with pytest.raises(
        ValueError, match="AlbertModel of transformers cannot be split into stages: it has no"
    ):
        layers_of(transformers.AlbertModel(config))
