"""What is measured: bytes as counted by hand, times in order, and a model that stays as it was."""

import copy

import pytest
import torch
from torch import nn

from avgpipe.errors import StageError
from avgpipe.measure import profiler
from avgpipe.measure.profiler import profile
from avgpipe.measure.updates import Updates
from avgpipe.measure.workers import WorkerCosts
from avgpipe.planning.profile import LinkProfile, Profile, Skip, Tie
from tests.runtime.cases import adamw, language_model, momentum

LINK, SUM = LinkProfile(1e-4, 1e9), LinkProfile(2e-4, 5e8)
SIZES = (1, 3, 8)


@pytest.fixture(autouse=True)
def measures_workers(monkeypatch):
    """What processes of their own would measure is known; the function that starts them."""
    function = profiler.measure_workers
    known = WorkerCosts(1e-5, 2e-5, 3e8, LINK, SUM)
    monkeypatch.setattr(profiler, "measure_workers", lambda *_, **__: known)
    return function


def measured(model, inputs, **changes):
    return profile(model, inputs, **{"micro_batch_sizes": SIZES, "budget_s": 0.05, **changes})


def dense(first=8, inner=16):
    torch.manual_seed(0)
    return [nn.Linear(first, inner), nn.ReLU(), nn.Linear(inner, 4)]


def each(size):
    """So many bytes a sample."""
    return tuple(size * b for b in SIZES)


def test_bytes_of_a_list_are_those_counted_by_hand():
    found = measured(
        dense(), torch.zeros(5, 8), loss_fn=nn.MSELoss(), target=torch.zeros(5, 4), optimizer=adamw
    )
    assert [layer.name for layer in found.layers] == ["0 Linear", "1 ReLU", "2 Linear"]
    # the first layer keeps its input, ReLU its output, the loss both of its inputs
    assert [layer.held_bytes for layer in found.layers] == [each(32), each(64), each(32)]
    assert [layer.handed_bytes for layer in found.layers] == [each(0)] * 3
    assert [layer.output_bytes for layer in found.layers] == [each(64), each(64), each(0)]
    assert [layer.parameter_bytes for layer in found.layers] == [576, 0, 272]
    # two moments and a counter for each tensor
    assert [layer.optimizer_bytes for layer in found.layers] == [2 * 576 + 8, 0, 2 * 272 + 8]
    assert (found.skips, found.ties, found.second_lane) == ((), (), (1.0, 1.0, 1.0))
    assert (found.action_s, found.process_bytes, found.link, found.reduction) == (1e-5, 3e8, LINK, SUM)


def test_working_bytes_are_what_is_there_only_for_a_moment():
    found = measured(dense(), torch.zeros(5, 8), loss_fn=lambda output, target: output.sum())
    first, relu, last = (layer.working_bytes for layer in found.layers)
    # backward of ReLU: the gradients of its output and of its input
    assert relu == each(64 + 64)
    # of the first layer: that of its output, beside new gradients of its weights, which are added to the old ones
    assert first == tuple(64 * b + 576 for b in SIZES)
    # of the last: the input's of 64 bytes and the weights' 272; the output's is one number in all, expanded
    assert all(64 * b + 272 <= size <= 64 * b + 272 + 16 * b + 64 for size, b in zip(last, SIZES))


def test_a_forward_may_need_more_than_it_leaves():
    class Wide(nn.Module):
        def forward(self, x):
            return torch.cat([x] * 100, 1).detach().sum() * 0 + x

    found = measured([nn.Linear(8, 8), Wide(), nn.Linear(8, 1)], torch.zeros(5, 8))
    # 100 copies of the input, gone before its output of 32 bytes is there
    assert all(3168 * b <= size <= 3168 * b + 64 for size, b in zip(found.layers[1].working_bytes, SIZES))


def test_an_output_that_only_the_next_layer_keeps_is_handed_on():
    found = measured(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), torch.zeros(5, 8))
    assert found.layers[0].held_bytes == each(32 + 64)
    assert found.layers[0].handed_bytes == each(64)


def test_times_are_there_and_the_parts_of_a_backward_are_within_it():
    model = [*dense(), nn.Flatten()]
    found = measured(model, torch.zeros(8, 8), optimizer=momentum)
    for layer in found.layers:
        assert min(layer.forward_s) > 0
        for part, whole in zip(layer.input_backward_s, layer.backward_s):
            assert 0 <= part <= whole
    assert found.layers[0].accumulate_s > 0
    assert found.step_s > 0
    assert found.layers[1].update_s == found.layers[1].elastic_s == found.layers[1].accumulate_s == 0


def test_a_layer_with_more_work_takes_longer():
    """As far as other work lets it be seen: what is measured beside much of it says little, and is measured again."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 1024), nn.Linear(1024, 1024))

    def is_seen():
        found = measured(
            model, torch.randn(64, 256), micro_batch_sizes=(1, 64), optimizer=adamw, budget_s=2.0
        )
        small, _, large = found.layers
        return (
            large.forward_s[1] > 3 * small.forward_s[1]
            and large.backward_s[1] > 3 * small.backward_s[1]
            and large.forward_s[1] > 2 * large.forward_s[0]
            and large.update_s > 3 * small.update_s
        )

    assert any(is_seen() for _ in range(10))


@pytest.mark.parametrize("limit", [None, 1.0])
def test_a_norm_that_is_clipped_counts_with_the_step(limit, monkeypatch):
    """The clipping is among what is timed."""
    timed, clipped = [], []
    before = Updates._timed
    monkeypatch.setattr(
        Updates, "_timed", lambda self, acts, *rest: timed.append(acts) or before(self, acts, *rest)
    )
    monkeypatch.setattr(Updates, "_clip", lambda self, replica, limit: clipped.append(limit))
    model = [nn.Linear(8, 8)]
    measured(model, torch.randn(1, 8), micro_batch_sizes=(1,), optimizer=momentum, clip_grad_norm=limit)
    assert set(clipped) == ({limit} if limit else set())
    clipped.clear()
    for act in timed[-1]:
        act()
    assert clipped == ([limit] * len(timed[-1]) if limit else [])


@pytest.mark.parametrize("kind", ["list", "traced"])
def test_an_optimizer_may_ask_for_names(kind):
    seen = set()

    def noting(named_params):
        seen.add(tuple(name for name, _ in named_params))
        return momentum([p for _, p in named_params])

    model = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)] if kind == "list" else Branching()
    measured(model, torch.zeros(1, 4), micro_batch_sizes=(1,), optimizer=noting)
    layers = "02" if kind == "list" else "abcd"
    assert seen == {
        ("weight",),
        *((f"{n}.weight", f"{n}.bias") for n in layers),
    }  # the first: a step without weights


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        a = self.a(x)
        return self.d(self.relu(self.c(self.b(a)))) + a


def test_a_branching_model_has_skips():
    found = measured(Branching(), torch.zeros(3, 4))
    assert [layer.name for layer in found.layers] == ["a", "b", "c", "relu", "d"]
    assert found.skips == (Skip(1, 4, each(16)),)
    assert [layer.output_bytes for layer in found.layers] == [*[each(16)] * 4, each(0)]
    assert found.boundary_bytes(3) == [48, 96, 96, 96]


def test_ties_frozen_weights_and_pytrees_between_layers():
    model = language_model(frozen=True)
    found = measured(model, torch.zeros(4, dtype=torch.int64), target=torch.zeros(4, dtype=torch.int64))
    assert found.ties == (Tie((0, 6), 11 * 8 * 8),)
    assert found.layers[1].parameter_bytes == 0
    assert found.layers[1].frozen_bytes == (64 + 8) * 8
    assert found.layers[3].output_bytes == each(64 + 64 + 8)  # main, skip, mask
    assert found.layers[0].input_backward_s == (0, 0, 0)  # tokens want no gradient


def test_tuples_of_inputs_and_mappings_are_cut_like_tensors():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x, scale):
            return self.lin(x) * scale

    for inputs in ((torch.ones(2, 4), torch.ones(2, 1)), {"x": torch.ones(2, 4), "scale": torch.ones(2, 1)}):
        assert len(measured(Two(), inputs).layers) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BertForSequenceClassification", "GPT2LMHeadModel"])
def test_a_model_of_transformers(name):
    pytest.importorskip("transformers")
    from tests.interop.models import build, tokens

    found = measured(build(name), {"input_ids": tokens()}, optimizer=adamw)
    assert len(found.layers) >= 4
    assert found.at(2)[1].output_bytes >= 2 * 9 * 32 * 8
    assert bool(found.ties) == (name == "GPT2LMHeadModel")


def test_model_random_state_and_threads_stay_as_they_were():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5), nn.Flatten(), nn.Linear(18, 2)
    )
    model[2].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    measured(model, torch.randn(4, 1, 5, 5, generator=torch.Generator()), optimizer=momentum)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == threads
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [m.training for m in model] == [True, True, False, True, True]
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[4].weight.grad is None


@pytest.mark.ranks
@pytest.mark.slow
def test_processes_tell_of_the_runtime_and_the_link(measures_workers, monkeypatch):
    monkeypatch.setattr(profiler, "measure_workers", measures_workers)
    found = measured(dense(), torch.zeros(2, 8), micro_batch_sizes=(1,))
    assert 0 < found.action_s < 0.05
    assert found.process_bytes > 50e6
    assert 0 < found.link.latency_s < 0.1
    assert found.link.bytes_per_s > 1e6
    assert 0 < found.reduction.latency_s < 0.1
    assert found.reduction.bytes_per_s > 1e6
    assert Profile.from_json(found.to_json()) == found


# ---- refusals ------------------------------------------------------------------------------------------------------


class Refuses(nn.Module):
    def forward(self, x):
        raise IndexError("no such row")


class Returns(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return self.value(x)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Refuses(), r"layer 1 \(1 Refuses\) cannot be timed: no such row \(input: \[1, 16\] float32\)"),
        (nn.Linear(7, 16), r"layer 1 \(1 Linear\) cannot be timed: .*shapes cannot be multiplied"),
        (Returns(lambda x: 3), r"layer 1 \(1 Returns\) cannot be timed: it returned no tensor but int"),
        (Returns(lambda x: x.argmax(1, True).float() @ torch.ones(1, 16)), "no gradient flows back"),
    ],
)
def test_a_layer_that_cannot_be_timed_is_named(layer, words):
    first, _, last = dense()
    with pytest.raises(StageError, match=words):
        measured([first, layer, last], torch.zeros(2, 8))


def test_a_first_layer_without_gradients_is_none_to_refuse():
    found = measured([nn.Flatten(), *dense()], torch.zeros(2, 2, 4))
    assert found.layers[0].backward_s == (0, 0, 0)


def test_a_loss_that_is_no_scalar_is_refused():
    with pytest.raises(StageError, match=r"layer 2 .*loss_fn returned shape \(1, 4\)"):
        measured(dense(), torch.zeros(2, 8), loss_fn=lambda output, target: output)
    with pytest.raises(StageError, match="no gradient flows back from its output or the loss"):
        measured(dense(), torch.zeros(2, 8), loss_fn=lambda output, target: torch.zeros(()))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"micro_batch_sizes": ()}, "micro_batch_sizes"),
        ({"micro_batch_sizes": (0,)}, "micro_batch_sizes"),
        ({"budget_s": 0}, "budget_s must be above 0"),
        ({"clip_grad_norm": 0}, "clip_grad_norm must be above 0"),
        ({"threads": 0}, "threads must be above 0"),
        ({"device": "meta"}, "device 'meta'"),
        ({"target": torch.zeros(3, 4)}, "2 samples and the targets 3"),
    ],
)
def test_wrong_arguments_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        measured(dense(), torch.zeros(2, 8), **changes)


def test_a_batch_without_samples_is_refused():
    with pytest.raises(ValueError, match="no samples"):
        measured(dense(), torch.zeros(0, 8))
