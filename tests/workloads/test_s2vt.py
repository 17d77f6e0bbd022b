import pytest
import torch
import torch.nn.functional as F
from torch import nn

from avgpipe.planning.balance import balance
from avgpipe.runtime.model import Model
from avgpipe.workloads.captioning import caption_loss, caption_words
from avgpipe.workloads.s2vt import S2VTConfig, s2vt_costs, s2vt_layers
from tests.workloads.equality import assert_equal_to_one_device
from tests.workloads.lowprec import needs_bfloat16_lstm

SMALL = S2VTConfig(vocabulary=13, features=6, embedding=5, hidden=7)
DEEP = S2VTConfig(vocabulary=13, features=6, embedding=5, hidden=7, video_lstms=2, language_lstms=2)


def model(config, seed=1):
    return nn.Sequential(*s2vt_layers(config, seed=seed)).double()


def batch(b=5, frames=6, words=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, frames + 1, (b,), generator=draw)
    lengths[0] = frames
    inputs = {
        "frames": torch.randn(b, frames, 6, generator=draw, dtype=torch.float64),
        "lengths": lengths,
        "words": torch.randint(1, 13, (b, words), generator=draw),
    }
    said = torch.randint(1, 13, (b, words), generator=draw)
    for row in range(1, b):
        said[row, words - row % words :] = 0
    return inputs, said


def lstm_by_hand(layer, xs):
    h = c = torch.zeros(layer.weight_hh.shape[1], dtype=torch.float64)
    out = []
    for x in xs:
        i, f, g, o = (layer.weight_ih @ x + layer.weight_hh @ h + layer.bias).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        out.append(h)
    return out


def s2vt_by_hand(layers, frames, words):
    """Section 3.2 word for word, for one clip without padding."""
    embedding, first, second, output = layers
    zeros = torch.zeros(5, dtype=torch.float64)
    video = [embedding.weight @ frame + embedding.bias for frame in frames] + [zeros] * len(words)
    text = [zeros] * len(frames) + [second.embedding[word] for word in words]
    h1 = lstm_by_hand(first.lstm, video)
    h2 = lstm_by_hand(second.lstm, [torch.cat(pair) for pair in zip(h1, text)])
    return torch.stack([output.weight @ h + output.bias for h in h2[len(frames) :]])


def test_layers_compute_the_papers_model_for_each_clip():
    layers = model(SMALL)
    inputs, _ = batch()
    logits = layers(inputs)
    assert logits.shape == (5, 4, 13)
    for row, length in enumerate(inputs["lengths"].tolist()):
        expected = s2vt_by_hand(layers, inputs["frames"][row, :length], inputs["words"][row])
        assert torch.allclose(logits[row], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("config", [SMALL, DEEP])
def test_padding_of_frames_and_words_changes_nothing(config):
    layers = model(config)
    inputs, _ = batch()
    logits = layers(inputs)
    padded = {
        "frames": F.pad(inputs["frames"], (0, 0, 0, 3)),
        "lengths": inputs["lengths"],
        "words": F.pad(inputs["words"], (0, 2)),
    }
    for row, length in enumerate(inputs["lengths"].tolist()):
        padded["frames"][row, length:] = 1e6 * (row + 1)  # whatever may be there
    assert torch.allclose(layers(padded)[:, :4], logits, rtol=0, atol=1e-12)


def test_a_word_depends_on_all_frames_and_on_no_later_word():
    layers = model(SMALL)
    inputs, _ = batch(b=2)
    frames = inputs["frames"].requires_grad_()
    logits = layers(inputs)
    (gradient,) = torch.autograd.grad(logits[0, 0].sum(), frames)
    assert gradient[0].abs().sum(1).min() > 0
    assert not gradient[1].any()
    changed = {**inputs, "words": inputs["words"].clone()}
    changed["words"][:, 2] = inputs["words"][:, 2] % 12 + 1
    same = (layers(changed) == logits).all(2)
    assert same[:, :2].all()
    assert not same[:, 2:].any()


@pytest.mark.parametrize("config", [SMALL, DEEP])
def test_at_gives_the_logits_of_that_word_alone(config):
    layers = model(config)
    inputs, _ = batch()
    logits = layers(inputs)
    for at in range(4):
        alone = layers({**inputs, "at": at})
        assert alone.shape == (5, 13)
        assert torch.allclose(alone, logits[:, at], rtol=0, atol=1e-12)


def test_the_layer_before_the_output_passes_nothing_but_the_words_steps():
    layers = model(SMALL)
    inputs, _ = batch()
    assert layers[:3](inputs).shape == (5, 4, 7)
    assert layers[:3]({**inputs, "at": 2}).shape == (5, 7)
    assert set(layers[:1](inputs)) == {"x", "lengths", "words"}


@pytest.mark.parametrize("config", [SMALL, DEEP])
def test_pipelines_equal_one_device(config):
    layers = [layer.double() for layer in s2vt_layers(config, seed=2)]
    batches = [batch(b, frames, words, seed=b) for b, frames, words in ((5, 6, 4), (6, 4, 3), (3, 5, 4))]
    assert_equal_to_one_device(layers, batches, caption_loss, loss_weight=caption_words)


def test_weights_depend_on_the_seed_and_not_on_the_caller():
    def weights(caller, seed):
        torch.manual_seed(caller)
        layers = s2vt_layers(SMALL, seed=seed)
        assert torch.initial_seed() == caller
        return torch.cat([p.detach().flatten() for p in nn.Sequential(*layers).parameters()])

    assert torch.equal(weights(1, 3), weights(2, 3))
    assert not torch.equal(weights(1, 3), weights(1, 4))


def test_dropout_is_for_training_alone():
    config = S2VTConfig(vocabulary=13, features=6, embedding=5, hidden=7, dropout=0.5)
    layers, (inputs, _) = model(config), batch()
    assert not torch.equal(layers(inputs), layers(inputs))
    assert torch.equal(layers.eval()(inputs), model(SMALL)(inputs))


@needs_bfloat16_lstm
def test_mixed_precision_stays_close():
    layers = model(SMALL).float()
    inputs, said = batch()
    inputs["frames"] = inputs["frames"].float()
    expected = layers(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        logits = layers(inputs)
        caption_loss(logits, said).backward()
    assert torch.allclose(logits.float(), expected, atol=0.02)


@pytest.mark.parametrize("stages", [2, 4])
def test_paper_size_is_cut_and_goes_forward_and_back_on_the_meta_device(stages):
    config = S2VTConfig(vocabulary=12_594)
    with torch.device("meta"):
        layers = s2vt_layers(config)
        value = {
            "frames": torch.empty(4, 6, 4096),
            "lengths": torch.empty(4, dtype=torch.int64),
            "words": torch.empty(4, 5, dtype=torch.int64),
        }
    # The paper gives no total; by its sizes: frames and words to 500 features, one bias per gate, output
    counted = sum(p.numel() for layer in layers for p in layer.parameters())
    embeddings = 4096 * 500 + 500 + 12_594 * 500
    lstms = 4 * 1000 * (500 + 1000 + 1) + 4 * 1000 * (1000 + 500 + 1000 + 1)
    assert counted == embeddings + lstms + 12_594 * 1001 == 36_960_094
    cut = Model.split(layers, stages, balance(s2vt_costs(config, 50, 12), stages))
    for k in range(stages):
        value = nn.Sequential(*layers[cut.bounds[k] : cut.bounds[k + 1]])(value)
    assert value.shape == (4, 5, 12_594)
    value.sum().backward()
    assert all(p.grad is not None for layer in layers for p in layer.parameters())


def test_costs_are_multiply_adds():
    # embedding 3*6*5, LSTMs (3 + 2) steps, output 2*7*13
    assert s2vt_costs(SMALL, 3, 2) == [90, 5 * 28 * 12, 5 * 28 * 19, 182]
    assert len(s2vt_costs(DEEP, 3, 2)) == len(s2vt_layers(DEEP)) == 6


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hidden": 0}, "hidden must be at least 1, got 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_wrong_sizes_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        S2VTConfig(**{"vocabulary": 5, **wrong})
