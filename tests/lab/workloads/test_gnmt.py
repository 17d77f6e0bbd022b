import copy
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan, Source
from avgpipe_lab.workloads.gnmt import GNMTConfig, gnmt_layers, reverse
from avgpipe_lab.workloads.tokens import TokenLoss, beam_search
from tests.lab.workloads.equality import assert_equal_to_one_device, sgd

PAD, BEGIN, END = 0, 1, 2
V, H = 17, 6


def layers_in_double(tied_output=True, seed=3, **changes):
    config = GNMTConfig(
        V, H, dropout=0.0, tied_output=tied_output, **{"encoder_layers": 3, "decoder_layers": 3, **changes}
    )
    # .double() in one go, so that what is tied stays tied
    return list(nn.ModuleList(gnmt_layers(config, seed=seed)).double())


def pairs(count, *, longest=6, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def sentence():
        length = int(torch.randint(1, longest, (), generator=draw))
        return torch.randint(4, V, (length,), generator=draw).tolist()

    return [(sentence(), sentence()) for _ in range(count)]


def pad(rows, width=0):
    width = max(width, *map(len, rows))
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows])


def batch(pairs, extra=0):
    """Inputs and targets, with ``extra`` columns of padding."""
    source = [[*s, END] for s, _ in pairs]
    wide = [max(map(len, side)) + extra for side in (source, [[*t, END] for _, t in pairs])]
    inputs = {
        "source": pad(source, wide[0]),
        "lengths": torch.tensor([len(s) for s in source]),
        "target": pad([[BEGIN, *t] for _, t in pairs], wide[1]),
    }
    return inputs, pad([[*t, END] for _, t in pairs], wide[1])


def run(layers, value):
    for layer in layers:
        value = layer(value)
    return value


# ---- one sentence, one step at a time, from the formulas ---------------------------------------------------


def _lstm(xs, weights, name):
    w_x, w_h, b_x, b_h = (
        weights[f"{name}.{part}"] for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    h = c = torch.zeros(w_h.shape[1], dtype=torch.float64)
    out = []
    for x in xs:
        i, f, g, o = (w_x @ x + b_x + w_h @ h + b_h).chunk(4)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        out.append(h)
    return out


def _reference(layers, source, target):
    """Logits [T, V] of one sentence pair without padding."""
    w = nn.ModuleList(layers).state_dict()
    xs = [w["0.weight"][piece] for piece in [*source, END]]
    backwards = _lstm(xs[::-1], w, "1.backward_lstm")[::-1]
    xs = [torch.cat(both) for both in zip(_lstm(xs, w, "1.lstm"), backwards)]
    xs = _lstm(xs, w, "2.lstm")
    xs = [x + y for x, y in zip(xs, _lstm(xs, w, "3.lstm"))]
    ys = _lstm([w["0.weight"][piece] for piece in [BEGIN, *target]], w, "4.lstm")
    v = w["4.attention.g"] * w["4.attention.v"] / w["4.attention.v"].norm()
    contexts = []
    for y in ys:
        scores = [
            v
            @ torch.tanh(
                w["4.attention.query_weight"] @ y + w["4.attention.memory_weight"] @ x + w["4.attention.bias"]
            )
            for x in xs
        ]
        total = sum(math.exp(s) for s in scores)
        contexts.append(sum(math.exp(s) / total * x for s, x in zip(scores, xs)))
    ys = _lstm([torch.cat(both) for both in zip(ys, contexts)], w, "5.lstm")
    ys = [y + z for y, z in zip(ys, _lstm([torch.cat(both) for both in zip(ys, contexts)], w, "6.lstm"))]
    return torch.stack([w["7.weight"] @ y + w["7.bias"] for y in ys])


@pytest.mark.parametrize("tied_output", [True, False])
def test_logits_are_those_of_the_formulas(tied_output):
    layers, some = layers_in_double(tied_output), pairs(5)
    logits = run(layers, batch(some)[0])
    for row, (source, target) in enumerate(some):
        expected = _reference(layers, source, target)
        assert torch.allclose(logits[row, : len(target) + 1], expected, rtol=0, atol=1e-12)


# ---- padding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoder_layers", [1, 2])
def test_padding_changes_nothing(encoder_layers):
    layers, some = layers_in_double(encoder_layers=encoder_layers, decoder_layers=2), pairs(6)
    logits, (inputs, _) = run(layers, batch(some)[0]), batch(some, extra=3)
    wider = run(layers, inputs)
    inputs["source"][inputs["source"] == PAD] = 9  # what stands there is of no account either
    other = run(layers, inputs)
    for row, (_, target) in enumerate(some):
        real = logits[row, : len(target) + 1]
        assert torch.allclose(wider[row, : len(target) + 1], real, rtol=0, atol=1e-12)
        assert torch.allclose(other[row, : len(target) + 1], real, rtol=0, atol=1e-12)


def test_reverse_turns_each_sentence_round_by_its_own_length():
    x = torch.arange(1, 13.0).view(3, 4, 1)
    expected = [[2, 1, 3, 4], [8, 7, 6, 5], [9, 10, 11, 12]]
    assert reverse(x, torch.tensor([2, 4, 1])).squeeze(2).tolist() == expected


def test_at_gives_the_logits_of_one_position():
    layers, (inputs, _) = layers_in_double(), batch(pairs(4))
    logits = run(layers, inputs)
    for at in range(logits.shape[1]):
        assert torch.equal(run(layers, {**inputs, "at": at}), logits[:, at])


def test_only_what_later_layers_need_travels():
    layers, (value, _) = layers_in_double(), batch(pairs(4))
    for layer, expected in zip(layers, [{"x", "lengths", "target"}] * 4 + [{"x", "context"}] * 2 + [{"x"}]):
        value = layer({**value, "at": 0})
        assert value.keys() == expected | {"at"}


# ---- the loss ----------------------------------------------------------------------------------------------


def test_loss_is_the_mean_over_real_pieces_and_smooth_in_training_alone():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=draw, dtype=torch.float64)
    target = torch.tensor([[4, 2, 0], [2, 0, 0]])
    log_p = logits.log_softmax(-1)
    real = [log_p[0, 0], log_p[0, 1], log_p[1, 0]]
    hard = -(real[0][4] + real[1][2] + real[2][2]) / 3
    even = -sum(row.mean() for row in real) / 3
    loss = TokenLoss(PAD, smoothing=0.1)
    assert float(loss(logits, target)) == pytest.approx(float(0.9 * hard + 0.1 * even), abs=1e-12)
    assert float(loss.eval()(logits, target)) == pytest.approx(float(hard), abs=1e-12)
    assert loss.weight(target) == 3.0


def test_loss_of_bfloat16_logits_is_taken_in_float32():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    target = torch.tensor([[4, 2, 0], [2, 0, 0]])
    loss = TokenLoss(PAD).eval()
    assert loss(logits, target).dtype == torch.float32
    assert torch.equal(loss(logits, target), loss(logits.float(), target))


# ---- pipelines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied_output", [True, False])
def test_stages_train_as_one_device_does(tied_output):
    loss = TokenLoss(PAD)
    batches = [batch(pairs(7 - j, longest=4 + j, seed=j)) for j in range(3)]
    model = layers_in_double(tied_output, encoder_layers=2, decoder_layers=2)
    assert_equal_to_one_device(model, batches, loss, loss_weight=loss.weight)


def test_translations_are_alike_from_any_stages_and_from_the_plain_model():
    torch.manual_seed(0)
    source = {name: part for name, part in batch(pairs(5))[0].items() if name != "target"}
    batches = [batch(pairs(6, seed=j)) for j in range(4)]
    options = {"begin": BEGIN, "end": END, "beam": 3, "max_length": 7}
    found = []
    for K in (1, 2, 3):
        model, loss = layers_in_double(embedding_bound=2.0), TokenLoss(PAD)
        with torch.no_grad():
            model[-1].bias[END] = -3.0  # so that sentences are translated at some length
        plan = Plan(stages=K, pipelines=2, micro_batches=2)
        with Pipeline(
            model, plan, loss_fn=loss, optimizer=sgd, extensions=[Source(loss_weight=loss.weight)]
        ) as pipeline:
            list(pipeline.train(batches))
            found.append(beam_search(pipeline.predict, source, **options))
            state = pipeline.state_dict()
        plain = nn.Sequential(*layers_in_double(seed=9, embedding_bound=2.0))
        plain.load_state_dict(state, strict=True)
        found.append(beam_search(plain.eval(), source, **options))
    assert len({tuple(h.pieces) for h in found[0]}) > 1
    assert max(len(h.pieces) for h in found[0]) > 2
    for other in found[1:]:
        assert [h.pieces for h in other] == [h.pieces for h in found[0]]
        assert [h.score for h in other] == pytest.approx([h.score for h in found[0]], abs=1e-9)


# ---- sizes and initial weights -----------------------------------------------------------------------------


def paper_layers():
    with torch.device("meta"):
        return gnmt_layers(GNMTConfig(32_000))


def test_paper_sizes():
    layers = paper_layers()
    assert len(layers) == 10
    lstms = [
        sum(p.numel() for name, p in layer.named_parameters() if "lstm" in name) for layer in layers[1:-1]
    ]
    gates = 4 * 1024
    first, wide, plain = 2 * gates * (2048 + 2), gates * (3072 + 2), gates * (2048 + 2)
    assert lstms == [first, wide, plain, plain, plain, wide, wide, wide]
    attention = sum(p.numel() for p in layers[5].attention.parameters())
    assert attention == 2 * 1024**2 + 2 * 1024 + 1
    total = sum(p.numel() for p in nn.ModuleList(layers).parameters())  # the shared embedding once
    assert total == sum(lstms) + attention + 2 * 32_000 * 1024 + 32_000


def test_parameters_are_as_many_as_published():
    """NVIDIA's GNMT v2 for PyTorch, whose WMT16 vocabulary has 31,794 pieces, logs 159,593,523 of them."""
    with torch.device("meta"):
        layers = gnmt_layers(GNMTConfig(31_794))
    assert sum(p.numel() for p in nn.ModuleList(layers).parameters()) == 159_593_523


@pytest.mark.parametrize("bounds", [(0, 6, 10), (0, 3, 5, 7, 10)])
def test_paper_sizes_run_in_stages_on_meta(bounds):
    layers = paper_layers()
    tokens = torch.zeros(4, 11, dtype=torch.int64, device="meta")
    value = {"source": tokens, "lengths": tokens[:, 0], "target": tokens[:, :9]}
    for first, last in pairwise(bounds):
        value = run(layers[first:last], value)
    assert value.shape == (4, 9, 32_000)
    TokenLoss(PAD)(value, tokens[:, :9]).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in nn.ModuleList(layers).parameters())


def test_one_step_at_paper_depth_lowers_the_loss():
    layers = gnmt_layers(GNMTConfig(V, 16))
    loss, (inputs, targets) = TokenLoss(PAD), batch(pairs(6))
    before = copy.deepcopy(layers)
    optimizer = torch.optim.Adam(nn.ModuleList(layers).parameters(), lr=0.01)
    loss(run(layers, inputs), targets).backward()
    optimizer.step()
    for layer in (*layers, *before):
        layer.eval()
    assert loss(run(layers, inputs), targets) < loss(run(before, inputs), targets)


def test_initial_weights_depend_on_the_seed_alone():
    config = GNMTConfig(V, H, 2, 2)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = nn.ModuleList(gnmt_layers(config, seed=1)).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    second = nn.ModuleList(gnmt_layers(config, seed=1)).state_dict()
    other = nn.ModuleList(gnmt_layers(config, seed=2)).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["0.weight"], other["0.weight"])


def test_what_is_tied_is_one_parameter():
    for tied in (True, False):
        layers = gnmt_layers(GNMTConfig(V, H, tied_output=tied))
        assert layers[5].embedding is layers[0].weight
        assert (layers[-1].weight is layers[0].weight) == tied


def test_initial_values_are_within_their_bounds_and_the_bias_is_as_asked():
    bias = torch.randn(V, generator=torch.Generator().manual_seed(0))
    layers = gnmt_layers(GNMTConfig(V, 64, embedding_bound=2.0), output_bias=bias)
    assert 1.9 < layers[0].weight.abs().max() <= 2.0
    others = [p for layer in layers[1:-1] for name, p in layer.named_parameters() if "lstm" in name]
    assert 0.12 < max(p.abs().max().item() for p in others) <= 0.125
    assert torch.equal(layers[-1].bias, bias)
    assert torch.equal(gnmt_layers(GNMTConfig(V, H))[-1].bias, torch.zeros(V))


def test_dropout_acts_in_training_alone():
    layers, (inputs, _) = gnmt_layers(GNMTConfig(V, H, 2, 2, dropout=0.5)), batch(pairs(4))
    assert not torch.equal(run(layers, inputs), run(layers, inputs))
    for layer in layers:
        layer.eval()
    assert torch.equal(run(layers, inputs), run(layers, inputs))


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2), (4, 4)])
def test_costs_of_large_layers_follow_their_weights(sizes):
    config = GNMTConfig(30_000, 1024, *sizes)
    with torch.device("meta"):
        layers = gnmt_layers(config)
    for layer in layers[1:]:
        looked_up = layer.embedding.numel() if hasattr(layer, "embedding") else 0
        weights = sum(p.numel() for p in layer.parameters()) - looked_up
        assert weights < layer.compute_cost < 1.3 * weights


def test_small_attention_costs_more_than_its_weights():
    costs = [layer.compute_cost for layer in gnmt_layers(GNMTConfig(2_000, 128, 2, 2))]
    assert costs[3] == max(costs)
