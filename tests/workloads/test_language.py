import math

import pytest
import torch
from torch import nn

from avgpipe.workloads import build_workload
from avgpipe.workloads.language import PRESETS, log_frequencies, perplexity
from avgpipe.workloads.ntasgd import NTASGD


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
    assert math.isfinite(evaluate(model, loss_fn, workload.test_batches()))


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
    one, two = (build_workload("awd-lstm", data=text_folder, batch_size=4, pipelines=n) for n in (1, 2))
    assert next(iter(two.train_batches(0)))[0].shape == (4, 35)
    assert abs(len(one.train_batches(0)) - len(two.train_batches(0))) <= 2
    assert len(one.valid_batches()) == len(two.valid_batches())
    assert len(two.train_batches(0, start=5)) == len(two.train_batches(0)) - 5


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
    assert rate(pipelines=2) == pytest.approx(lr * math.sqrt(2))
    assert rate(pipelines=2, lr_scaling="linear") == 2 * lr
    assert rate(pipelines=2, lr_scaling="none") == lr


def test_pretrained_weights_are_refused(text_folder):
    with pytest.raises(ValueError, match="awd-lstm has no pretrained weights"):
        build_workload("awd-lstm", data=text_folder, pretrained=text_folder)


def test_paper_preset_scales_the_rate_with_the_length_of_the_segment(text_folder):
    workload = build_workload("awd-lstm", preset="paper", data=text_folder, batch_size=2, pipelines=2, seed=4)
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
    said = [workload.after_validation(optimizer, loss) for loss in (6, 5, 4, 3, 2, 1, 7)]
    assert said == [False] * 6 + [True]
    with pytest.raises(TypeError, match="NTASGD optimizer, got SGD"):
        workload.after_validation(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1), 1.0)


def test_tiny_has_nothing_to_do_after_validation(text_folder):
    assert build_workload("awd-lstm", data=text_folder, batch_size=2).after_validation is None


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
