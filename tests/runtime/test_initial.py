"""Models on the meta device, whose stages make and fill what they hold."""

import copy
import os
from functools import partial
from itertools import count

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from avgpipe import Plan
from tests.interop.models import batches, build, loss_of, transformers
from tests.lab.workloads.equality import sgd
from tests.runner import run
from tests.runtime.cases import assert_same_training, train_pipeline


def layers():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
        nn.Linear(8, 3),
    ).double()


def on_meta(model):
    return copy.deepcopy(model).to("meta")


def data():
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(12, 4, generator=draw).double(), torch.randn(12, 3, generator=draw).double())
        for _ in range(3)
    ]


def trained(model, loss_fn=F.mse_loss, loader=None, *, stages=2, pipelines=1, **options):
    plan = Plan(stages=stages, pipelines=pipelines, micro_batches=2 * pipelines)
    return train_pipeline(model, plan, loader or data(), loss_fn, sgd, **options)


assert_same = partial(assert_same_training, bound=0)


def fill(modules):
    """Give every tensor values that depend on its shape alone."""
    for module in modules.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                numbers = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
                tensor.copy_(numbers.sin().abs() if tensor.is_floating_point() else torch.zeros(()))


@pytest.mark.parametrize("pipelines", [1, 2])
def test_stages_train_from_the_values_that_are_given(pipelines):
    model = layers()
    expected = trained(model, pipelines=pipelines)
    meta = on_meta(model)
    assert_same(trained(meta, pipelines=pipelines, weights_from=model.state_dict()), expected)
    assert all(t.is_meta for t in meta.state_dict().values())


@pytest.mark.parametrize("stages", [1, 3])
def test_a_function_fills_the_modules_of_a_stage(stages):
    model = layers()
    with torch.no_grad():
        fill(model)
    expected = trained(model, stages=stages)
    assert_same(trained(on_meta(model), stages=stages, weights_from=fill), expected)


def test_a_file_of_safetensors_or_a_folder_of_them(tmp_path):
    state = layers().state_dict()
    save_file(state, tmp_path / "all.safetensors")
    parts = tmp_path / "parts"
    parts.mkdir()
    names = list(state)
    for n, some in enumerate((names[:3], names[3:])):
        save_file({name: state[name] for name in some}, parts / f"part-{n}.safetensors")
    expected = trained(layers())
    for source in (tmp_path / "all.safetensors", str(parts)):
        assert_same(trained(on_meta(layers()), weights_from=source), expected)


def test_what_has_values_keeps_them():
    model, state = layers(), layers().state_dict()
    half = on_meta(model)
    half[0] = model[0]
    del state["0.weight"]
    state["0.weight"] = torch.zeros(8, 4)  # not asked for
    assert_same(trained(half, weights_from=state), trained(layers()))


def test_frozen_and_tied_tensors():
    def tied():
        model = layers().append(nn.Linear(3, 8, bias=False)).append(nn.Linear(8, 3, bias=False)).double()
        model[3][0].requires_grad_(False)
        model[6].weight = model[4].weight
        return model

    model = tied()
    with torch.device("meta"):
        meta = tied()
    for stages in (2, 3):
        expected = trained(model, stages=stages)
        assert_same(trained(meta, stages=stages, weights_from=model.state_dict()), expected)


def test_tied_tensors_that_stages_fill_each_their_own_way_are_refused():
    with torch.device("meta"):
        model = layers().append(nn.Linear(3, 8, bias=False)).append(nn.Linear(8, 3, bias=False)).double()
        model[6].weight = model[4].weight

    numbers = count()

    def unlike(modules):
        for parameter in modules.parameters():
            parameter.fill_(next(numbers))
        for buffer in modules.buffers():
            buffer.zero_()

    with pytest.raises(
        ValueError, match=r"different values: the function of WeightsFrom must give it the same"
    ):
        trained(model, stages=7, weights_from=unlike)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertForSequenceClassification"])
@pytest.mark.parametrize("stages", [1, 3])
def test_a_saved_model_of_transformers(name, stages, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        meta = getattr(transformers, name)(model.config).double()
    expected = trained(model, loss_of, batches(), stages=stages)
    assert_same(trained(meta, loss_of, batches(), stages=stages, weights_from=tmp_path), expected)


def test_a_body_that_was_saved_alone(tmp_path):
    model = build("BertForSequenceClassification")
    model.bert.save_pretrained(tmp_path)
    with torch.device("meta"):
        meta = type(model)(model.config).double()
    with pytest.raises(
        ValueError, match=r"nothing for 2 of the model's tensors, such as 'classifier\.weight'"
    ):
        trained(meta, loss_of, batches(), weights_from=tmp_path)
    meta.classifier = model.classifier
    trained(meta, loss_of, batches(), weights_from=tmp_path)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (None, ValueError, "'0.weight' is on the meta device .* WeightsFrom"),
        (3, TypeError, "WeightsFrom: source=3: it is a folder or file of safetensors, a mapping"),
        ({}, ValueError, r"nothing for 11 of the model's tensors, such as '0\.weight'"),
        (
            {**layers().state_dict(), "0.bias": torch.zeros(3)},
            ValueError,
            r"has \[3\] for '0\.bias', and the model \[8\]",
        ),
        (lambda stage: None, ValueError, "has left 'weight' of a Linear without a value"),
        ("nowhere", ValueError, "WeightsFrom: source='nowhere' cannot be read"),
    ],
)
def test_refusals(source, error, message):
    with pytest.raises(error, match=message):
        trained(on_meta(layers()), weights_from=source)


def test_an_empty_folder(tmp_path):
    with pytest.raises(ValueError, match=r"no file in it ends in \.safetensors"):
        trained(on_meta(layers()), weights_from=tmp_path)


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"x\.safetensors' cannot be read"):
        trained(on_meta(layers()), weights_from=tmp_path / "x.safetensors")


def test_a_buffer_that_is_not_saved_needs_its_maker():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(3).double(), persistent=False)

        def forward(self, x):
            return x * self.scale

    model = layers().append(Scaled())
    with pytest.raises(ValueError, match=r"'scale' of Scaled '.*' is on the meta device and is not saved"):
        trained(on_meta(model), weights_from=model.state_dict())


# ---- on ranks ------------------------------------------------------------------------------------------------------


def learn(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).double()
    read = []

    class Some(dict):
        def __getitem__(self, name):
            read.append(name)
            return super().__getitem__(name)

    from_files = trained(model, loss_of, batches(), weights_from=folder, timeout_s=30)
    values = Some(load_file(f"{folder}/model.safetensors"))
    from_values = trained(model, loss_of, batches(), weights_from=values, timeout_s=30)
    return from_files, from_values, read


@pytest.mark.ranks
def test_each_rank_asks_for_no_more_than_its_stages_hold(tmp_path):
    model = build("LlamaForCausalLM")
    model.save_pretrained(tmp_path)
    expected = trained(model, loss_of, batches())
    ranks = run(2, learn, folder=str(tmp_path))
    for from_files, from_values, _ in ranks:
        assert_same(from_files, expected)
        assert_same(from_values, expected)
    first, second = (set(read) for _, _, read in ranks)
    assert not first & second
    assert first | second == set(model.state_dict())
    assert "lm_head.weight" in second


def fill_unlike(modules):
    fill(modules)
    for parameter in modules.parameters():
        parameter.add_(int(os.environ["RANK"]))


def learn_unlike():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False)).double()
        model[2].weight = model[0].weight
    with pytest.raises(ValueError, match="different values") as refused:
        trained(model, weights_from=fill_unlike, timeout_s=30)
    return str(refused.value)


@pytest.mark.ranks
def test_ranks_that_fill_a_tied_parameter_unlike_all_raise():
    assert all("'0.weight'" in message for message in run(2, learn_unlike))
