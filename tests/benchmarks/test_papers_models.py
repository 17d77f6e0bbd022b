"""The papers' models: totals as published, layers as this project builds them, operations as torch counts them."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from avgpipe_lab.workloads.awd_lstm import AWDLSTMConfig, awd_lstm_layers
from avgpipe_lab.workloads.gnmt import GNMTConfig, gnmt_layers
from avgpipe_lab.workloads.images import VGG
from benchmarks.papers.models import MODELS, SharedWeights, awd_lstm, bert, gnmt, gpt, vgg16

PUBLISHED = [
    (gnmt(one_embedding=True), 160_671_297, 0.0),  # MLPerf
    (bert(), 340e6, 0.02),
    (bert("BERT-base", 12, hidden=768, heads=12), 110e6, 0.01),
    (awd_lstm("PTB"), 24e6, 0.01),
    (awd_lstm("WikiText-2"), 33e6, 0.02),
    (vgg16(), 138e6, 0.01),
    (MODELS["gpt-2"], 1542e6, 0.011),
    (MODELS["gpt-2.2b"], 2.2e9, 0.011),
]


@pytest.mark.parametrize(
    ("model", "published", "within"), PUBLISHED, ids=lambda value: getattr(value, "name", "")
)
def test_a_model_has_as_many_parameters_as_its_paper_says(model, published, within):
    assert model.parameters == pytest.approx(published, rel=within, abs=0)


def test_the_layers_of_gnmt_are_as_large_as_in_pipedreams_profile():
    lstm, narrow = 50_364_416, 33_587_200
    profile = [
        132_382_720,
        67_174_400,
        lstm,
        narrow,
        narrow,
        41_979_904 + 132_382_720,
        lstm,
        lstm,
        lstm,
        132_512_000,
    ]
    # It has no bias of the attention, and no length of its vector.
    assert [4 * layer.parameters for layer in gnmt().layers] == pytest.approx(profile, abs=4 * 1025)


def pairs(steps, targets):
    source = torch.zeros(2, steps, dtype=torch.int64)
    lengths = torch.full((2,), steps)
    return {"source": source, "lengths": lengths, "target": torch.zeros(2, targets, dtype=torch.int64)}


BUILT = {
    "gnmt": (gnmt(lengths=(4, 3)), lambda: gnmt_layers(GNMTConfig(32_320)), lambda: pairs(4, 3)),
    "gnmt-16": (
        gnmt(16, lengths=(4, 3)),
        lambda: gnmt_layers(GNMTConfig(32_320, 1024, 8, 8)),
        lambda: pairs(4, 3),
    ),
    "awd-lstm": (
        awd_lstm("WikiText-2", length=5),
        lambda: awd_lstm_layers(AWDLSTMConfig(33_278, 400, 1150, 3)),
        lambda: torch.zeros(2, 5, dtype=torch.int64),
    ),
    "vgg": (vgg16(), lambda: VGG(side=224).layers((3, 224, 224), 1000), lambda: torch.zeros(2, 3, 224, 224)),
}


def scales(layer):
    """Count the norms' weights, which the papers' networks do not have; the norms' biases are their convolutions'."""
    return sum(m.weight.numel() for m in layer.modules() if isinstance(m, nn.BatchNorm2d))


@pytest.mark.parametrize("name", BUILT)
def test_layers_have_the_parameters_and_operations_of_those_that_the_workload_builds(name):
    model, build, sample = BUILT[name]
    with torch.device("meta"):
        layers, x = build(), sample()
        flops = []
        for layer in layers:
            with FlopCounterMode(display=False) as counter:
                x = layer(x)
            flops.append(counter.get_total_flops() / 2)  # of two samples
    built = [sum(p.numel() for p in layer.parameters()) - scales(layer) for layer in layers]
    assert [layer.parameters for layer in model.layers] == built
    # The counter leaves the attention's scores out, a product with a vector.
    assert [layer.forward_flops for layer in model.layers] == pytest.approx(flops, rel=0.003)


def test_what_layers_share_is_what_the_workload_shares():
    with torch.device("meta"):
        first, *_, last = awd_lstm_layers(AWDLSTMConfig(10_000, 400, 1150, 3))
    assert last.weight is first.weight
    assert awd_lstm().shared == (SharedWeights((0, 4), first.weight.numel()),)


transformers = pytest.importorskip("transformers", reason="models of transformers to compare with")
SMALL = {"attn_implementation": "eager"}
LENGTH, HIDDEN, HEADS = 24, 64, 4


def small_bert(layers):
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "intermediate_size": 4 * HIDDEN}
    config = transformers.BertConfig(num_hidden_layers=layers, vocab_size=30_522, **sizes, **SMALL)
    return transformers.BertForSequenceClassification(config).train()


def small_gpt(layers):
    config = transformers.GPT2Config(n_embd=HIDDEN, n_layer=layers, n_head=HEADS, use_cache=False, **SMALL)
    return transformers.GPT2LMHeadModel(config).train()


TRANSFORMERS = {
    "bert": (small_bert, lambda n: bert(layers=n, hidden=HIDDEN, heads=HEADS, length=LENGTH)),
    "gpt": (small_gpt, lambda n: gpt("small", n, HIDDEN, HEADS, length=1024)),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_have_as_many_parameters(name):
    build, model = TRANSFORMERS[name]
    assert model(2).parameters == sum(p.numel() for p in build(2).parameters())


def test_transformers_compute_as_much():
    with FlopCounterMode(display=False) as counter:
        small_bert(2)(torch.zeros(2, LENGTH, dtype=torch.int64))
    model = bert(layers=2, hidden=HIDDEN, heads=HEADS, length=LENGTH)
    assert 2 * model.flops / 3 == pytest.approx(counter.get_total_flops())


def test_a_transformer_layer_keeps_what_autograd_keeps():
    kept = []
    for layers in (1, 2):
        model, sizes = small_bert(layers), {}
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def keep(tensor, sizes=sizes, weights=weights):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                sizes[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            output = model(torch.zeros(1, LENGTH, dtype=torch.int64))
        kept.append(sum(size for size, _ in sizes.values()))
        del output
    stored = bert(layers=1, hidden=HIDDEN, heads=HEADS, length=LENGTH).layers[1].stored_bytes
    masks = 3 * (2 * LENGTH * HIDDEN + HEADS * LENGTH**2)  # a CPU keeps four bytes of each
    statistics = 2 * 2 * 4 * LENGTH  # of the norms
    assert kept[1] - kept[0] == stored + masks + statistics


def test_a_decoder_hands_the_context_on():
    *_, before, last, _ = gnmt().layers
    assert before.cut_bytes == 2 * last.cut_bytes
    assert before.handed_bytes == last.handed_bytes == last.cut_bytes
    assert before.stored_bytes == last.stored_bytes


def test_a_rectifier_keeps_its_output_and_a_pooling_does_not():
    first, second, *_ = vgg16().layers
    assert (first.handed_bytes, first.stored_bytes) == (0, first.cut_bytes)
    assert second.handed_bytes == second.cut_bytes == first.cut_bytes / 4
    assert second.stored_bytes == first.stored_bytes + second.cut_bytes
