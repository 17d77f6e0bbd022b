"""Split models of transformers against their own forward, and pipelines of them against one device."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from avgpipe import StageError
from avgpipe.model.layers import layers_of
from avgpipe.model.model import stage_bounds
from avgpipe.model.tracing import TracedLayer
from tests.interop.models import (
    CLASSES,
    LANGUAGE_MODELS,
    VOCABULARY,
    batches,
    build,
    chained,
    exact,
    inputs_of,
    loss_of,
    own,
    padding,
    pipeline_of,
    same,
    tokens,
    transformers,
)
from tests.lab.workloads.equality import assert_equal_to_one_device

# ---- one device ----------------------------------------------------------------------------------------------------


@pytest.mark.grid(5)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CLASSES)
def test_layers_return_what_the_model_returns(name, attention):
    model, tolerance = build(name, attn_implementation=attention).eval(), 1e-12
    if name.startswith("Llama") and attention == "eager":
        # its softmax is in float32, where the mask of a float64 model is infinite and padding becomes NaN
        model, tolerance = model.float(), 1e-6
    for kind in ("plain", "left", "right", "all", "packed"):
        given = inputs_of(kind, name)
        with torch.no_grad():
            same(chained(model, given), own(model, given), tolerance)
    with torch.no_grad():
        same(chained(model, tokens()), own(model, {"input_ids": tokens()}), tolerance)


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", CLASSES)
def test_gradients_are_those_of_the_models_own_forward(name):
    model = exact(build(name)).train()
    other = copy.deepcopy(model)
    given = inputs_of("right", name)
    loss_of(own(model, given), tokens(1)).backward()
    loss_of(chained(other, given), tokens(1)).backward()
    gradients = {key: p.grad for key, p in model.named_parameters()}
    for key, p in other.named_parameters():
        assert (p.grad is None) == (gradients[key] is None), key
        if p.grad is not None:
            same(p.grad, gradients[key])


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel"])
def test_a_mask_that_hides_nothing_changes_nothing(name):
    model = build(name).eval()
    with torch.no_grad():
        same(chained(model, {"input_ids": tokens(), "attention_mask": padding()}), chained(model, tokens()))


def test_a_bert_decoder_looks_back_only():
    model = build("BertModel", is_decoder=True).eval()
    for kind in ("plain", "left"):
        with torch.no_grad():
            same(chained(model, inputs_of(kind, "Bert")), own(model, inputs_of(kind, "Bert")))


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForSequenceClassification"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_autocast_is_that_of_the_model(name, attention):
    model = build(name, attn_implementation=attention).float().eval()
    given = inputs_of("left", name)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(chained(model, given), own(model, given))


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_the_models_own_arguments_are_handed_on(name):
    model = build(name).eval()
    given = inputs_of("right", name)
    with torch.no_grad():
        same(chained(model, {**given, "logits_to_keep": 2}), own(model, given)[:, -2:])


# ---- pipelines -----------------------------------------------------------------------------------------------------


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", CLASSES)
def test_pipelines_equal_one_device(name):
    assert_equal_to_one_device(exact(build(name)), batches(right=(2, 4)), loss_of)


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_pipelines_equal_one_device_with_untied_embeddings_and_eager_attention(name):
    model = build(name, attn_implementation="eager", tie_word_embeddings=name.startswith("Llama"))
    assert_equal_to_one_device(exact(model), batches(), loss_of, micro_batches=(3,))


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", CLASSES)
def test_what_was_learnt_loads_into_the_model(name):
    model = build(name).eval()
    with pipeline_of(model) as pipeline:
        list(pipeline.train(batches()))
        state = pipeline.state_dict()
        predicted = pipeline.predict(inputs_of("left", name))
    assert state.keys() == model.state_dict().keys()
    before = copy.deepcopy(model.state_dict())
    model.load_state_dict(state, strict=True)
    assert any(not torch.equal(before[key], value) for key, value in state.items())
    with torch.no_grad():
        same(predicted, own(model, inputs_of("left", name)), 1e-6 if name.startswith("Llama") else 1e-12)


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "LlamaForCausalLM"])
def test_a_saved_model_is_loaded_and_split(name, tmp_path):
    build(name, seed=3).save_pretrained(tmp_path)
    loaded = getattr(transformers, name).from_pretrained(tmp_path, local_files_only=True, dtype=torch.float64)
    with torch.no_grad(), pipeline_of(loaded, stages=3) as pipeline:
        same(pipeline.predict(tokens()), own(build(name, seed=3).eval(), {"input_ids": tokens()}), 1e-6)


def test_a_pipeline_generates_from_the_last_position():
    model = build("GPT2LMHeadModel").eval()
    with torch.no_grad(), pipeline_of(model) as pipeline:
        predicted = pipeline.predict({"input_ids": tokens(), "logits_to_keep": 1})
        same(predicted, own(model, {"input_ids": tokens()})[:, -1:])


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM"])
def test_dropout_and_recomputing_depend_on_no_number_of_stages(name):
    runs = []
    for stages, recompute in ((1, "never"), (3, "never"), (2, "always")):
        model = exact(build(name, dropout=0.3))
        with pipeline_of(model, stages=stages, recompute=recompute) as pipeline:
            runs.append([result.loss for result in pipeline.train(batches(left=(2,)))])
    assert runs[0] == pytest.approx(runs[1], abs=1e-10)
    assert runs[0] == pytest.approx(runs[2], abs=1e-10)
    with pipeline_of(exact(build(name)), stages=1) as pipeline:
        assert runs[0] != pytest.approx([r.loss for r in pipeline.train(batches(left=(2,)))], abs=1e-3)


# ---- layers --------------------------------------------------------------------------------------------------------


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", CLASSES)
def test_layers_share_the_models_parameters_and_hold_no_more_than_their_own(name):
    model = build(name)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    chain = layers_of(model)
    assert len(chain) == 5
    assert {id(p) for layer in chain for p in layer.parameters()} == {id(p) for p in model.parameters()}
    held = [sum(p.numel() for p in layer.parameters()) for layer in chain]
    tied = (name in LANGUAGE_MODELS and model.config.tie_word_embeddings) or name == "BertForPreTraining"
    assert sum(held) == sum(p.numel() for p in model.parameters()) + tied * VOCABULARY * 32
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks
    own(model, {"input_ids": tokens(), "output_hidden_states": True})  # leaves hooks in the modules
    with torch.no_grad():
        same(chained(model.eval(), tokens()), own(model, {"input_ids": tokens()}))
    copy.deepcopy(nn.ModuleList(layers_of(model)))


def test_a_split_leaves_the_model_as_it_was():
    model = build("BertForMaskedLM", dropout=0.5)
    model.bert.encoder.layer[1].eval()
    before, state = copy.deepcopy(model), torch.get_rng_state()
    with pipeline_of(model, stages=3):
        assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert all(p.grad is None for p in model.parameters())
    for (name, a), (_, b) in zip(model.state_dict().items(), before.state_dict().items()):
        assert torch.equal(a, b), name


def test_costs_and_names_cut_a_model_into_stages():
    chain = layers_of(build("GPT2LMHeadModel"))
    assert stage_bounds(chain, 3, None) == [0, 2, 3, 5]
    assert stage_bounds(chain, 3, ["transformer.h.1", "transformer.ln_f"]) == [0, 2, 4, 5]
    with pytest.raises(ValueError, match=r"it calls transformer\.wte, transformer\.h\.0, "):
        stage_bounds(chain, 2, ["transformer.h.7"])


@pytest.mark.parametrize("ends", [{"eos_token_id": [2, 3]}, {"pad_token_id": None}])
def test_settings_of_special_words_may_be_lists_or_absent(ends):
    model = build("LlamaForCausalLM", **ends).eval()
    if ends == {"pad_token_id": None}:
        del model.config.pad_token_id  # as some configurations have none
    with torch.no_grad():
        same(chained(model, tokens()), own(model, {"input_ids": tokens()}), 1e-6)


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_a_subclass_is_split_by_whose_forward_it_has():
    class Mine(transformers.BertModel):
        pass

    class Traced(type(build("BertModel").pooler)):
        def forward(self, hidden):
            return self.activation(self.dense(hidden))

    config = build("BertModel").config
    assert len(layers_of(Mine(config))) == 5
    assert all(isinstance(layer, TracedLayer) for layer in layers_of(Traced(config)))


def test_what_stages_cannot_follow_is_refused():
    model = build("GPT2LMHeadModel")
    model.transformer.h[1].gradient_checkpointing = True
    with pytest.raises(ValueError, match="gradient checkpointing of GPT2LMHeadModel is on: switch it off"):
        layers_of(model)
    config = transformers.OPTConfig(layerdrop=0.1, hidden_size=32, num_attention_heads=4)
    with pytest.raises(ValueError, match=r"leaves out layers at random.*config\.layerdrop to 0\.0"):
        layers_of(transformers.OPTModel(config))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"at": 3}, r"the model takes attention_mask, .*; the inputs have unknown 'at'"),
        ({"input_ids": None}, "the inputs have nothing"),
    ],
)
def test_wrong_inputs(given, message):
    with pytest.raises(ValueError, match=message):
        chained(build("GPT2LMHeadModel"), {"input_ids": tokens(), **given})


def test_inputs_that_are_neither_a_tensor_nor_a_dict():
    with pytest.raises(TypeError, match="a plain dict, not list"):
        chained(build("BertModel"), [tokens()])


def test_a_pipeline_names_the_stage_of_wrong_inputs():
    with pipeline_of(build("LlamaModel")) as pipeline, pytest.raises(StageError, match="'token_typ_ids'"):
        pipeline.predict({"input_ids": tokens(), "token_typ_ids": tokens()})


@pytest.mark.ranks
@pytest.mark.slow
def test_other_models_do_not_import_the_library():
    script = """
import sys, torch
from avgpipe import Pipeline, Plan
class Traced(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    def forward(self, x):
        return self.b(self.a(x)) + x
for model in (Traced(), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))):
    with Pipeline(model, Plan(stages=2, micro_batches=1), loss_fn=torch.nn.functional.mse_loss,
                  optimizer=lambda p: torch.optim.SGD(p, 0.1)) as pipeline:
        pipeline.step(torch.ones(2, 2), torch.ones(2, 2))
print("transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
