import copy
import math

import pytest
import torch

from avgpipe import Pipeline, Plan
from avgpipe.workloads.generation import generate

V = 11
TABLE = torch.randn(V, V, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def scores(x):
    """Logits [b, T, V] that depend on the last two pieces."""
    before = torch.cat([x[:, :1], x[:, :-1]], 1)
    return TABLE[x] + 0.7 * TABLE.T[before]


def predict(inputs):
    assert inputs.keys() == {"input_ids", "at"}
    return scores(inputs["input_ids"])[:, inputs["at"]]


def naive(row, length, window, end=None):
    """Greedy, one row in plain Python."""
    row = list(row)
    for _ in range(length):
        x = row[-window:]
        before = x[-2] if len(x) > 1 else x[0]
        values = [float(TABLE[x[-1], v]) + 0.7 * float(TABLE[v, before]) for v in range(V)]
        row.append(values.index(max(values)) if end is None or row[-1] != end else end)
    return row


PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 10, 10]])


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_greedy_is_the_likeliest_piece_each_time(window):
    expected = [naive(row, 12, window) for row in PROMPT.tolist()]
    text = generate(predict, PROMPT, length=12, window=window)
    assert text.dtype == torch.int64
    assert text.tolist() == expected


def test_scores_of_all_positions_and_models_of_tokens_alone_serve_too():
    expected = generate(predict, PROMPT, length=8, window=4)
    assert torch.equal(
        generate(lambda inputs: scores(inputs["input_ids"]), PROMPT, length=8, window=4), expected
    )
    assert torch.equal(generate(scores, PROMPT, length=8, window=4, at=False), expected)


def test_the_model_never_reads_more_than_its_window():
    seen = []

    def spy(inputs):
        seen.append((inputs["input_ids"].shape[1], inputs["at"]))
        return predict(inputs)

    generate(spy, PROMPT, length=4, window=5)
    assert seen == [(3, 2), (4, 3), (5, 4), (5, 4)]


def test_a_row_stops_at_its_end_and_all_stop_with_the_last():
    free = generate(predict, PROMPT, length=20, window=3)
    for end in range(V):
        expected = torch.tensor([naive(row[:3], 20, 3) for row in free.tolist()])
        for row in expected:
            at = next((t for t in range(3, 23) if row[t] == end), 23)
            row[at:] = end
        last = max(next((t for t in range(3, 23) if row[t] == end), 22) for row in expected)
        assert torch.equal(generate(predict, PROMPT, length=20, window=3, end=end), expected[:, : last + 1])


def test_draws_follow_from_the_seed_and_leave_the_callers_state():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = generate(predict, PROMPT, length=30, window=4, temperature=1.0, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generate(predict, PROMPT, length=30, window=4, temperature=1.0, seed=1), first)
    assert not torch.equal(generate(predict, PROMPT, length=30, window=4, temperature=1.0, seed=2), first)


def test_draws_have_the_softmax_of_the_scores_over_temperature():
    rows = 20_000
    text = generate(predict, torch.full((rows, 1), 3), length=1, window=1, temperature=1.7, seed=4)
    share = torch.bincount(text[:, 1], minlength=V).double() / rows
    expected = (scores(torch.tensor([[3]]))[0, 0] / 1.7).softmax(0)
    # five standard deviations of a share of so many draws
    assert torch.all((share - expected).abs() < 5 * (expected * (1 - expected) / rows).sqrt())


def test_a_low_temperature_is_greedy():
    greedy = generate(predict, PROMPT, length=6, window=3)
    assert torch.equal(generate(predict, PROMPT, length=6, window=3, temperature=1e-3), greedy)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"length": 0}, ValueError, "length must be at least 1, got 0"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"temperature": -1.0}, ValueError, "temperature must be finite and not negative, got -1.0"),
        ({"temperature": math.nan}, ValueError, "temperature must be finite"),
        ({"prompt": torch.zeros(1, 0, dtype=torch.int64)}, ValueError, r"prompt must be .*, got \[1, 0\]"),
        ({"prompt": torch.zeros(3, dtype=torch.int64)}, ValueError, r"prompt must be .*, got \[3\]"),
        ({"prompt": torch.zeros(1, 3)}, TypeError, "int64, got torch.float32"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    arguments = {"prompt": PROMPT, "length": 2, "window": 2} | change
    with pytest.raises(error, match=message):
        generate(predict, **arguments)


# ---- from pipelines -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=8, n_embd=16, n_layer=3, n_head=2, use_cache=False,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, initializer_range=0.5,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


def batches(count):
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(V, (count, 4, 9), generator=draw)
    return [(row[:, :-1], row[:, 1:]) for row in rows]


def loss(output, target):
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def sgd(params):
    return torch.optim.SGD(params, lr=0.05)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("stages", "pipelines", "micro_batches"), [(1, 1, 1), (2, 1, 2), (3, 1, 1), (2, 2, 1)]
)
def test_a_pipeline_and_its_exported_model_write_the_same_text(
    model, stages, pipelines, micro_batches, temperature
):
    plan = Plan(stages=stages, pipelines=pipelines, micro_batches=micro_batches)
    options = {"length": 9, "window": 8, "temperature": temperature}
    with Pipeline(copy.deepcopy(model), plan, loss_fn=loss, optimizer=sgd, seed=0) as pipeline:
        for _ in pipeline.train(batches(4)):
            pass
        text = generate(pipeline.predict, PROMPT, **options)
        state = pipeline.state_dict()
    plain = copy.deepcopy(model).eval()
    plain.load_state_dict(state, strict=True)

    def whole(inputs):
        return plain(inputs["input_ids"]).logits

    with torch.no_grad():
        assert torch.equal(generate(whole, PROMPT, **options), text)
    assert not torch.equal(
        state["transformer.h.0.attn.c_attn.weight"], model.transformer.h[0].attn.c_attn.weight
    )


def test_the_number_of_stages_does_not_change_the_text(model):
    texts = []
    for stages in (1, 2, 3):
        plan = Plan(stages=stages, micro_batches=1)
        with Pipeline(copy.deepcopy(model).eval(), plan, loss_fn=loss, optimizer=sgd) as pipeline:
            texts.append(generate(pipeline.predict, PROMPT, length=9, window=8))
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
