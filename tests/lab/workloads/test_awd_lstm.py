import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from avgpipe.model.context import Position, set_position
from avgpipe.model.model import stage_bounds
from avgpipe.tasks import build_workload
from avgpipe_lab.workloads.awd_lstm import (
    PRESETS,
    AWDLSTMConfig,
    AWDLSTMLoss,
    DroppedEmbedding,
    WeightDropLSTM,
    awd_lstm_layers,
    locked_dropout,
)
from avgpipe_lab.workloads.recipe import NTASGD
from avgpipe_lab.workloads.tokens import log_frequencies, perplexity
from tests.lab.workloads.lowprec import needs_bfloat16_lstm

NO_DROPOUT = {f"{name}_dropout": 0.0 for name in ("embedding", "input", "hidden", "output", "weight")}
SMALL = {"vocabulary": 11, "embedding": 4, "hidden": 6, "lstm_layers": 2}


@pytest.fixture(autouse=True)
def _position_restored():
    before = set_position(Position())
    torch.manual_seed(0)
    yield
    set_position(before)


def model(dtype=torch.float64, **options):
    return nn.Sequential(*awd_lstm_layers(AWDLSTMConfig(**{**SMALL, **options}))).to(dtype)


def tokens(rows, length, vocabulary=11):
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(5))


def lstm(inputs=3, hidden=5, **options):
    def normal(*shape, bound):
        return nn.Parameter(torch.randn(shape) * bound)

    options = {"weight_drop": 0.0, "dropout": 0.0, "penalties": False, **options}
    return WeightDropLSTM(inputs, hidden, normal, **options).double()


def slow_lstm(layer, x, state, weight_hh):
    """The gates one by one."""
    h, c = state
    outputs = []
    for t in range(x.shape[1]):
        gates = x[:, t] @ layer.weight_ih.T + layer.bias_ih + h @ weight_hh.T + layer.bias_hh
        i, f, g, o = gates.split(h.shape[1], 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return torch.stack(outputs, 1), (h, c)


# ---- the LSTM ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_output_state_and_gradients_equal_explicit_gates(p):
    layer = lstm(weight_drop=p)
    x = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    before = torch.randn(2, 1, 2, 5, dtype=torch.float64)
    layer.training_carry.set((before[0], before[1]))
    torch.manual_seed(8)
    weight_hh = F.dropout(layer.weight_hh, p)
    expected, (h, c) = slow_lstm(layer, x, (before[0, 0], before[1, 0]), weight_hh)
    torch.manual_seed(8)
    found = layer(x)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    carried = layer.training_carry.get()
    torch.testing.assert_close(torch.stack(carried)[:, 0], torch.stack((h, c)), atol=1e-12, rtol=0)
    assert not any(t.requires_grad for t in carried)
    weigh = torch.randn_like(found)
    wanted = [x, *layer.parameters()]
    for a, b in zip(
        torch.autograd.grad((found * weigh).sum(), wanted),
        torch.autograd.grad((expected * weigh).sum(), wanted),
    ):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_single_precision_is_the_same_to_its_rounding():
    """On CPU another implementation than in double precision."""
    double = lstm(inputs=16, hidden=24, dropout=0.0)
    single = copy.deepcopy(double).float()
    x = torch.randn(4, 9, 16, dtype=torch.float64)
    for _ in range(2):  # the second from a carried state
        for layer, inputs in ((double, x), (single, x.float())):
            layer(inputs).square().sum().backward()
    for a, b in zip(double.parameters(), single.parameters()):
        torch.testing.assert_close(b.grad.double(), a.grad, atol=1e-4, rtol=1e-4)


def test_weight_dropout_masks_hidden_weights_alone_and_scales_the_rest():
    layer = lstm(hidden=40, weight_drop=0.4)
    layer.weight_ih.data.zero_()
    x = torch.zeros(1, 1, 3, dtype=torch.float64)
    # after one step from h = 1 the gradient of a hidden weight is nonzero exactly where it was kept
    layer.training_carry.set(
        (torch.ones(1, 1, 40, dtype=torch.float64), torch.ones(1, 1, 40, dtype=torch.float64))
    )
    layer(x).sum().backward()
    kept = layer.weight_hh.grad != 0
    assert abs(kept.double().mean() - 0.6) < 0.03
    assert kept.double().std() > 0.4  # of single weights, not of whole rows
    assert torch.all(layer.bias_hh.grad != 0)
    # every kept weight of a gate has the gradient of the gate's bias, times the scale
    ratio = layer.weight_hh.grad / layer.bias_hh.grad[:, None]
    torch.testing.assert_close(ratio[kept], torch.full_like(ratio[kept], 1 / 0.6))


def test_every_forward_in_training_draws_a_new_mask_from_the_default_generator():
    layer = lstm(weight_drop=0.5)
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    outputs = []
    for seed in (1, 2, 1):
        layer.training_carry.reset()
        torch.manual_seed(seed)
        outputs.append(layer(x))
    assert not torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_evaluation_drops_nothing():
    layer = lstm(weight_drop=0.5, dropout=0.5, penalties=True).eval()
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    zeros = torch.zeros(2, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x), slow_lstm(layer, x, (zeros, zeros), layer.weight_hh)[0])


# ---- the carried state -------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_two_segments_equal_one_of_double_length(training):
    whole, parts = model(**NO_DROPOUT).train(training), model(**NO_DROPOUT).train(training)
    x = tokens(3, 10)
    outputs = [_logits(parts(x[:, :4])), _logits(parts(x[:, 4:]))]
    torch.testing.assert_close(torch.cat(outputs, 1), _logits(whole(x)), atol=1e-12, rtol=0)


def _logits(output):
    return output[0] if isinstance(output, tuple) else output


def test_micro_batches_carry_apart():
    whole, cut = model(**NO_DROPOUT), model(**NO_DROPOUT)
    x = tokens(4, 9)
    for batch, segment in enumerate(x.split(3, 1)):
        expected = _logits(whole(segment))
        found = []
        for m, rows in enumerate(segment.split(2)):
            set_position(Position(0, batch, m))
            found.append(_logits(cut(rows)))
        set_position(Position())
        torch.testing.assert_close(torch.cat(found), expected, atol=1e-12, rtol=0)


def test_recomputation_sees_the_state_of_the_first_forward():
    plain, recomputing = model(**NO_DROPOUT), model(**NO_DROPOUT)
    x = tokens(2, 9)
    for batch, segment in enumerate(x.split(3, 1)):
        set_position(Position(0, batch, 0))
        _logits(plain(segment)).square().mean().backward()
        _logits(checkpoint(recomputing, segment, use_reentrant=False)).square().mean().backward()
    for a, b in zip(plain.parameters(), recomputing.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-14, rtol=0)


def test_evaluation_begins_at_zero_and_leaves_the_training_state():
    m = model(**NO_DROPOUT)
    x = tokens(2, 6)
    fresh = model(**NO_DROPOUT).eval()(x)
    m(x)
    kept = m[1].training_carry.get()
    for _ in range(2):
        m.eval()
        torch.testing.assert_close(m(x), fresh)
        m(x)
        m.train()
    assert m[1].training_carry.get() is kept


def test_another_number_of_rows_begins_at_zero():
    m, fresh = model(**NO_DROPOUT), model(**NO_DROPOUT)
    m(tokens(3, 5))
    x = tokens(2, 5)
    torch.testing.assert_close(_logits(m(x)), _logits(fresh(x)))


# ---- dropout -----------------------------------------------------------------------------------------------


def test_embedding_dropout_drops_whole_words_and_scales_the_others():
    p = 0.3
    weight = nn.Parameter(torch.rand(2000, 4, dtype=torch.float64) + 1)
    layer = DroppedEmbedding(weight, word_dropout=p)
    x = torch.arange(2000).repeat(2, 3)
    ratio = (layer(x) / weight[x]).round(decimals=12)
    assert torch.equal(ratio, ratio[:, :, :1].expand_as(ratio))
    assert torch.equal(ratio[:, :2000], ratio[:, 2000:4000])  # the same words at every place
    assert torch.equal(ratio[0], ratio[1])
    kept = ratio[0, :2000, 0]
    torch.testing.assert_close(kept.unique(), torch.tensor([0, 1 / (1 - p)], dtype=torch.float64))
    assert abs((kept > 0).double().mean() - (1 - p)) < 0.04
    assert torch.equal(layer.eval()(x), weight[x])


def test_locked_dropout_has_one_mask_for_all_time_steps():
    x = torch.ones(30, 7, 50, dtype=torch.float64)
    dropped = locked_dropout(x, 0.4, training=True)
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    torch.testing.assert_close(dropped.unique(), torch.tensor([0, 1 / 0.6], dtype=torch.float64))
    assert abs(dropped.mean() - 1) < 0.07
    assert dropped[:, 0].std(0).min() > 0  # rows differ
    assert locked_dropout(x, 0.4, training=False) is x


# ---- the model ---------------------------------------------------------------------------------------------


def test_decoder_and_embedding_share_one_parameter():
    layers = awd_lstm_layers(AWDLSTMConfig(**SMALL))
    assert layers[-1].weight is layers[0].weight
    copied = copy.deepcopy(nn.Sequential(*layers))
    assert copied[-1].weight is copied[0].weight
    x = tokens(2, 3)
    logits, _ = copied(x)
    logits.sum().backward()
    assert torch.all(copied[0].weight.grad != 0)  # also words that are not in x, by the decoder


def test_the_paper_has_33_million_parameters():
    config = AWDLSTMConfig(33_278, embedding=400, hidden=1150, lstm_layers=3)
    with torch.device("meta"):
        count = sum(p.numel() for p in nn.Sequential(*awd_lstm_layers(config)).parameters())
    assert count == 33_278 * 401 + 4 * 1150 * (1550 + 2) + 4 * 1150 * (2300 + 2) + 4 * 400 * (1550 + 2)
    assert round(count / 1e6, 1) == 33.6


def test_initial_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one, same, other = (awd_lstm_layers(AWDLSTMConfig(**SMALL), seed=s) for s in (4, 4, 5))
    assert torch.equal(torch.get_rng_state(), state)
    flat = [
        torch.cat([p.flatten() for p in nn.Sequential(*layers).parameters()]) for layers in (one, same, other)
    ]
    assert torch.equal(flat[0], flat[1])
    assert not torch.equal(flat[0], flat[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_copies_after_a_forward_are_independent(dtype):
    m = model(dtype)
    m(tokens(2, 5))
    twin = copy.deepcopy(m)
    twin(tokens(2, 5))[0].sum().backward()
    assert all(p.grad is None for p in m.parameters())


def test_only_training_with_regularisation_gives_penalties():
    x = tokens(2, 3)
    logits, penalties = model()(x)
    assert logits.shape == (2, 3, 11)
    assert penalties.shape == (2, 2)
    assert model().eval()(x).shape == (2, 3, 11)
    assert model(alpha=0.0, beta=0.0)(x).shape == (2, 3, 11)


@needs_bfloat16_lstm
def test_autocast_runs_in_bfloat16_without_warnings():
    m, loss_fn = model(torch.float32), AWDLSTMLoss()
    x = tokens(2, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                output = m(x)
                loss = loss_fn(output, x)
            loss.backward()
    assert output[0].dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert all(torch.isfinite(p.grad).all() for p in m.parameters())


def test_the_embedding_counts_as_a_look_up():
    with torch.device("meta"):
        layers = awd_lstm_layers(AWDLSTMConfig(30_000, 400, 1150, 3))
    assert stage_bounds(layers, 3, None) == [0, 2, 4, 5]


# ---- the loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 1])
def test_penalties_equal_the_published_formula(length):
    layers = model(output_dropout=0.5, weight_dropout=0.0)
    last, decoder = layers[2], layers[3]
    x = torch.randn(3, length, 6, dtype=torch.float64)
    zeros = torch.zeros(3, 4, dtype=torch.float64)
    raw, _ = slow_lstm(last, x, (zeros, zeros), last.weight_hh)
    dropped, penalties = last(x)
    target = tokens(3, length)
    logits = dropped @ decoder.weight.T + decoder.bias
    expected = -torch.log_softmax(logits, -1).gather(-1, target[..., None]).mean()
    expected = expected + 2.0 * (dropped**2).mean()
    if length > 1:
        expected = expected + 0.7 * ((raw[:, 1:] - raw[:, :-1]) ** 2).mean()
    found = AWDLSTMLoss(2.0, 0.7)(decoder((dropped, penalties)), target)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert ((dropped == 0) & (raw != 0)).any()


def test_the_mean_over_micro_batches_is_the_loss_of_the_batch():
    m, loss_fn = model(**NO_DROPOUT), AWDLSTMLoss(2.0, 1.0)
    x, y = tokens(5, 6), tokens(5, 7)[:, 1:]
    whole = loss_fn(m(x), y)
    parts = []
    for index, (rows, targets) in enumerate(zip(x.split(2), y.split(2))):
        set_position(Position(0, 0, index + 1))
        parts.append(loss_fn(m(rows), targets) * len(rows) / 5)
    torch.testing.assert_close(sum(parts), whole, atol=1e-12, rtol=0)


def test_evaluation_loss_is_plain_cross_entropy():
    logits, target = torch.randn(2, 3, 11), tokens(2, 3)
    expected = F.cross_entropy(logits.view(6, 11), target.view(6))
    loss_fn = AWDLSTMLoss(2.0, 1.0)
    penalties = torch.ones(2, 2)
    assert torch.equal(loss_fn.eval()((logits, penalties), target), expected)
    assert torch.equal(loss_fn(logits, target), expected)
    torch.testing.assert_close(loss_fn.train()((logits, penalties), target), expected + 3)


# ---- training ----------------------------------------------------------------------------------------------


def test_a_few_steps_learn_a_repeating_text():
    m = model(torch.float32, hidden=24, embedding=16, **{**NO_DROPOUT, "weight_dropout": 0.1})
    loss_fn, optimizer = AWDLSTMLoss(), torch.optim.AdamW(m.parameters(), lr=0.02)
    text = torch.arange(4 * 600).view(4, 600) * 3 % 11
    losses = []
    for t in range(0, 400, 10):
        loss = loss_fn(m(text[:, t : t + 10]), text[:, t + 1 : t + 11])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > math.log(11) - 0.1
    assert losses[-1] < 1


# ---- the workload --------------------------------------------------------------------------------------------------


def test_a_built_workload_trains(text_folder):
    workload = build_workload("awd-lstm", data=text_folder, batch_size=4, seed=3, max_batches=44)
    model, loss_fn = nn.Sequential(*workload.layers), workload.loss_fn
    optimizer = workload.optimizer(model.parameters())
    scheduler = workload.lr_scheduler(optimizer)
    before = evaluate(model, loss_fn, workload.valid_batches())
    for inputs, targets in [*workload.train_batches(0), *workload.train_batches(1)]:
        loss_fn(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), workload.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    after = evaluate(model, loss_fn, workload.valid_batches())
    assert workload.metric_name == "perplexity"
    assert workload.lower_is_better
    assert perplexity_of(workload, before) > 30
    assert perplexity_of(workload, after) < 0.8 * perplexity_of(workload, before)


def perplexity_of(workload, loss):
    return workload.metrics(loss, {})["perplexity"]


def evaluate(model, loss_fn, batches):
    model.eval(), loss_fn.eval()
    with torch.no_grad():
        losses = [loss_fn(model(x), y).item() for x, y in batches]
    model.train(), loss_fn.train()
    return sum(losses) / len(losses)


def test_weights_and_batches_depend_on_the_seed_and_not_on_the_caller(text_folder):
    def built(caller, **options):
        torch.manual_seed(caller)
        workload = build_workload("awd-lstm", data=text_folder, batch_size=4, **options)
        assert torch.initial_seed() == caller
        return torch.cat([p.detach().flatten() for p in nn.Sequential(*workload.layers).parameters()])

    assert torch.equal(built(1, seed=2), built(5, seed=2, pipelines=3))
    assert not torch.equal(built(1, seed=2), built(1, seed=3))


def test_training_is_divided_among_pipelines_and_evaluation_is_not(text_folder):
    asked = {"data": text_folder, "batch_size": 4, "batch": "per-pipeline"}
    one, two = (build_workload("awd-lstm", pipelines=n, **asked) for n in (1, 2))
    assert next(iter(two.train_batches(0)))[0].shape == (4, 35)
    assert abs(len(one.train_batches(0)) - len(two.train_batches(0))) <= 2
    assert len(one.valid_batches()) == len(two.valid_batches())
    whole, rest = list(two.train_batches(0)), list(two.train_batches(0, start=5))
    assert len(rest) == len(whole) - 5
    assert all(torch.equal(a, b) for a, b in zip(whole[5], rest[0], strict=True))


def test_a_text_too_short_for_the_rows_is_refused_when_built(text_folder):
    with pytest.raises(
        ValueError, match=r"valid has 4\d\d tokens, but 1 pipeline\(s\) x 300 rows need at least 600"
    ):
        build_workload("awd-lstm", data=text_folder, batch_size=300)


def test_optimizer_has_the_learning_rate_of_the_pipelines(text_folder):
    def rate(**options):
        workload = build_workload("awd-lstm", data=text_folder, batch_size=4, **options)
        return workload.optimizer([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"]

    lr = PRESETS["awd-lstm"]["tiny"].training.lr
    assert rate() == lr
    assert rate(pipelines=2) == lr
    assert rate(pipelines=2, rule="avgpipe") == pytest.approx(lr * math.sqrt(2))
    assert rate(pipelines=2, lr_scaling="linear") == 2 * lr
    assert rate(pipelines=2, lr_scaling="none") == lr


def test_paper_preset_scales_the_rate_with_the_length_of_the_segment(text_folder):
    turns = {"pipelines": 2, "batch": "per-pipeline"}
    workload = build_workload("awd-lstm", preset="paper", data=text_folder, batch_size=2, seed=4, **turns)
    optimizer = workload.optimizer([nn.Parameter(torch.zeros(1))])
    scheduler = workload.lr_scheduler(optimizer)
    lengths = [x.shape[1] for epoch in range(2) for x, _ in workload.train_batches(epoch)][::2]
    assert len(set(lengths)) > 3
    for length in lengths:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(30 * length / 70)
        optimizer.step()
        scheduler.step()


def test_paper_preset_averages_when_validation_stops_improving(text_folder):
    workload = build_workload("awd-lstm", preset="paper", data=text_folder, batch_size=2)
    optimizer = workload.optimizer([nn.Parameter(torch.zeros(1))])
    assert isinstance(optimizer, NTASGD)
    for loss in (6, 5, 4, 3, 2, 1):
        optimizer.observe(loss)
    assert not optimizer.triggered
    optimizer.observe(7)
    assert optimizer.triggered


def test_without_data_the_standard_library_is_read():
    workload = build_workload("awd-lstm")
    inputs, targets = next(iter(workload.train_batches(0)))
    assert inputs.shape == targets.shape == (workload.batch_size, 35)
    assert workload.layers[0].weight.shape == (PRESETS["awd-lstm"]["tiny"].vocabulary, 128)


def test_decoder_begins_with_the_frequencies_where_the_preset_says_so(text_folder):
    tiny, paper = (
        build_workload("awd-lstm", preset=preset, data=text_folder, batch_size=4).layers[-1].bias.detach()
        for preset in ("tiny", "paper")
    )
    assert tiny.exp().sum() == pytest.approx(1)
    assert tiny.max() - tiny.min() > 0.5
    assert not paper.any()


def test_log_frequencies_add_one():
    expected = torch.tensor([3 / 7, 1 / 7, 2 / 7, 1 / 7]).log()
    torch.testing.assert_close(log_frequencies(torch.tensor([0, 2, 0]), 4), expected)


def test_perplexity():
    assert perplexity(math.log(50)) == pytest.approx(50)
    assert perplexity(1e9) == math.inf
    assert math.isnan(perplexity(math.nan))
