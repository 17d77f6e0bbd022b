"""Using a pipeline: evaluation, prediction, export, single steps, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Audit, Pipeline, Plan, Precision, StageError
from tests.options import grouped
from tests.runner import run
from tests.runtime.cases import language_model, momentum, token_batches, train_on_one_device, unequal

LOSS = nn.CrossEntropyLoss()


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).double().mean()


def use(K: int, N: int) -> dict[str, Any]:
    """Train a little and use every way to look at the model; evaluation in the middle of an epoch included."""
    batches, held_out = token_batches(6, 8), token_batches(3, 7, last=2, seed=9)
    plan = Plan(stages=K, pipelines=N, micro_batches=3)
    with Pipeline(language_model(dropout=0.3), plan, loss_fn=LOSS, optimizer=momentum) as p:
        losses, middle = [], None
        for result in p.train(batches):
            losses.append(result.loss)
            if result.batch == 2:
                middle = p.evaluate(held_out, accuracy)
        after = p.evaluate(held_out, accuracy)
        state = p.state_dict()
        predicted = p.predict(held_out[0][0])
        one = p.predict(held_out[0][0][:1])
        mine = p.evaluate(held_out, weights=N - 1)
        several = p.evaluate(held_out, lambda o, t: {"right": accuracy(o, t), "wrong": 1 - accuracy(o, t)})
        timeline = p.timeline()
    return {
        "losses": losses,
        "middle": middle,
        "after": after,
        "state": state,
        "predicted": predicted,
        "one": one,
        "mine": mine,
        "several": several,
        "kinds": sorted({e.kind for e in timeline.events}),
        "busy": timeline.worker_busy_fraction,
    }


@pytest.mark.parametrize(("K", "N"), [(1, 1), (2, 1), (3, 2)])
def test_what_is_reported_is_what_the_exported_model_does(K: int, N: int) -> None:
    found = use(K, N)
    model = language_model().eval()
    model.load_state_dict(found["state"], strict=True)
    held_out = token_batches(3, 7, last=2, seed=9)
    x, y = torch.cat([b[0] for b in held_out]), torch.cat([b[1] for b in held_out])
    with torch.no_grad():
        output = model(x)
    assert abs(found["after"].loss - float(LOSS(output, y))) < 1e-10
    assert abs(found["after"].metric - float(accuracy(output, y))) < 1e-10
    assert found["after"].samples == len(x)
    right = found["after"].metric
    assert found["several"].metric == pytest.approx({"right": right, "wrong": 1 - right}, abs=1e-10)
    torch.testing.assert_close(found["predicted"], output[:7], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found["one"], output[:1], rtol=1e-10, atol=1e-10)
    assert {"F", "B", "U"} <= set(found["kinds"])
    assert len(found["busy"]) == K


@pytest.mark.promise
def test_every_rank_and_a_single_process_see_the_same() -> None:
    for N in (1, 2):
        alone = use(3, N)
        for rank in run(3, use, K=3, N=N):
            assert unequal(rank["losses"], alone["losses"]) < 1e-12
            assert rank["several"] == alone["several"]
            for name in ("middle", "after", "mine"):
                assert abs(rank[name].loss - alone[name].loss) < 1e-12
            for name, value in alone["state"].items():
                torch.testing.assert_close(rank["state"][name], value, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(rank["predicted"], alone["predicted"], rtol=1e-12, atol=1e-12)


def test_evaluation_in_the_middle_changes_nothing() -> None:
    batches = token_batches(7, 6)
    ends = []
    for interrupt in (False, True):
        with Pipeline(
            language_model(dropout=0.3),
            Plan(stages=2, pipelines=2, micro_batches=2),
            loss_fn=LOSS,
            optimizer=momentum,
        ) as p:
            losses = []
            for result in p.train(batches):
                losses.append(result.loss)
                if interrupt:
                    p.evaluate(batches[:2])
                    p.predict(batches[0][0])
            ends.append((losses, p.state_dict()))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(ends[0][1][n], ends[1][1][n]) for n in ends[0][1])


def test_step_trains_all_pipelines_at_once() -> None:
    (x, y), plan = token_batches(1, 12)[0], Plan(stages=2, pipelines=3, micro_batches=2, batch="per-pipeline")
    with Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=momentum) as p:
        mean = p.step(x, y)
        stepped = p.state_dict()
    with Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=momentum) as p:
        losses = [r.loss for r in p.train([(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)])]
        assert abs(mean - sum(losses) / 3) < 1e-12
        assert all(torch.equal(v, stepped[n]) for n, v in p.state_dict().items())


def test_an_abandoned_loop_is_finished_before_the_next_one() -> None:
    batches = token_batches(6, 6)
    with Pipeline(language_model(), Plan(stages=2, pipelines=2), loss_fn=LOSS, optimizer=momentum) as p:
        for result in p.train(batches):
            if result.batch == 1:
                break
        rest = list(p.train(batches[p.batches :]))
        assert [r.batch for r in rest] == list(range(3, 6))
        state = p.state_dict()
    with Pipeline(language_model(), Plan(stages=2, pipelines=2), loss_fn=LOSS, optimizer=momentum) as p:
        list(p.train(batches))
        assert all(torch.equal(v, state[n]) for n, v in p.state_dict().items())


def test_autocast_runs_the_layers_in_the_lower_precision() -> None:
    seen = []

    class Probe(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.dtype)
            return x.float()

    model = nn.Sequential(nn.Linear(4, 4), Probe(), nn.Linear(4, 3))
    batches = [(torch.randn(4, 4), torch.randint(3, (4,)))]
    plan = Plan(stages=2, micro_batches=2, partition=[1])
    with Pipeline(
        model,
        plan,
        loss_fn=LOSS,
        optimizer=momentum,
        extensions=[Precision(autocast=torch.bfloat16), Audit("off")],
    ) as p:
        list(p.train(batches))
        assert set(seen) == {torch.bfloat16}
        assert p.state_dict()["0.weight"].dtype == torch.float32


class Branching(nn.Module):
    """Not sequential: a skip connection over two layers, a parameter of its own, a buffer, dictionaries out."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.unused = nn.BatchNorm1d(8)
        self.register_buffer("shift", torch.linspace(0, 1, 8))
        self.drop = nn.Dropout(0.2)
        self.leave = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        first = self.enter(x) * self.scale
        h = first
        for block in self.blocks:
            h = torch.tanh(block(h) + self.shift) * self.scale
        h = self.drop(h).view(x.size(0), -1)
        return {"logits": self.leave(h + first), "first": first}


def dict_loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output["logits"], target) + 0.1 * output["first"].square().mean()


@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("named", [False, True])
def test_a_traced_model_trains_as_on_one_device(K: int, named: bool) -> None:
    torch.manual_seed(1)
    model = Branching().double()
    model.drop.p = 0.0
    generator = torch.Generator().manual_seed(2)
    batches = [
        (
            torch.randn(n, 6, dtype=torch.float64, generator=generator),
            torch.randint(3, (n,), generator=generator),
        )
        for n in (8, 8, 5)
    ]
    points = ["blocks.0", "blocks.2", "leave"][: K - 1] if named else None
    plan = Plan(stages=K, micro_batches=2, partition=points)
    with Pipeline(model, plan, loss_fn=dict_loss, optimizer=momentum) as p:
        losses = [r.loss for r in p.train(batches)]
        state = p.state_dict()
    expected_losses, expected = train_on_one_device(model, batches, dict_loss, momentum)
    assert unequal(losses, expected_losses) < 1e-10
    model.load_state_dict(state, strict=True)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10)


def test_dropout_of_a_traced_model_does_not_depend_on_its_cut() -> None:
    torch.manual_seed(1)
    model = Branching()
    batches = [(torch.randn(6, 6), torch.randint(3, (6,))) for _ in range(3)]
    ends = []
    for K, points in [(1, None), (2, ["leave"]), (3, None)]:
        plan = Plan(stages=K, micro_batches=2, partition=points)
        with Pipeline(model, plan, loss_fn=dict_loss, optimizer=momentum) as p:
            ends.append([r.loss for r in p.train(batches)])
    assert unequal(ends[0], ends[1]) < 1e-6
    assert unequal(ends[0], ends[2]) < 1e-6


class Stubborn(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x if bool((x > 0).all()) else -x


def refuse(
    model: Any = None, batch: Any = None, error: type[Exception] = ValueError, match: str = "", **options: Any
) -> None:
    plan = options.pop("plan", Plan(stages=2, micro_batches=2))
    model = language_model() if model is None else model
    with (
        pytest.raises(error, match=match) as caught,
        Pipeline(model, plan, **grouped(**{"loss_fn": LOSS, "optimizer": momentum, **options})) as p,
    ):
        list(p.train([batch if batch is not None else token_batches(1, 8)[0]]))
    assert "\n" not in str(caught.value)


def test_bad_input_is_refused_with_the_value_and_the_way_out() -> None:
    refuse(plan=Plan(stages=9), match=r"9 stages .* the model has 7: use fewer stages")
    refuse(nn.Sequential(), match="no layers")
    refuse(Stubborn(), match=r"Stubborn cannot be traced .* pass nn.Sequential")
    refuse(
        Branching(), plan=Plan(stages=2, partition=["blocks.7"]), match=r"split point 'blocks.7' .*blocks.0"
    )
    refuse(plan=Plan(stages=2, partition=[7]), match="leaves a stage without layers")
    refuse(
        nn.Sequential(nn.Embedding(11, 8), nn.Linear(9, 9)),
        error=StageError,
        match=r"layer 1 \(Linear\).*\[4, 8\] float32",
    )
    refuse(
        loss_fn=nn.CrossEntropyLoss(reduction="none"),
        error=StageError,
        match=r"returned shape \(4,\); .*scalar",
    )
    refuse(loss_fn=lambda o, t: 3.0, error=StageError, match="returned float; .*scalar")
    refuse(batch=(torch.zeros(8, dtype=torch.long), torch.zeros(7, dtype=torch.long)), match="8 samples.*7")
    refuse(
        batch=torch.zeros(3, 2),
        error=TypeError,
        match=r"pairs \(inputs, targets\), or mappings .* as 'labels', not Tensor",
    )
    refuse(clip_grad_norm=0.0, match="clip_grad_norm must be a number above 0, not 0")
    refuse(timeout_s=0, match="timeout_s must be positive and finite, not 0")
    refuse(timeout_s=float("nan"), match="timeout_s must be positive and finite, not nan")
    refuse(plan="1f1b", error=TypeError, match="plan must be an avgpipe.Plan, not '1f1b'")
    refuse(device="x", match=r"device 'x': torch .* sees no such device here; use 'cpu'")
    refuse(device="meta", match=r"device 'meta': torch .* sees no such device here; use 'cpu'")
    refuse(batch=token_batches(1, 0)[0], match="a batch has no samples")
    if not torch.cuda.is_available():
        refuse(device="cuda", match=r"device 'cuda': torch .* sees no such device here; use 'cpu'")


def test_an_empty_batch_is_refused_and_the_pipeline_goes_on() -> None:
    empty, (inputs, targets) = token_batches(1, 0)[0], token_batches(1, 4)[0]
    with Pipeline(language_model(), Plan(pipelines=2), loss_fn=LOSS, optimizer=momentum) as p:
        for call in (lambda: p.step(*empty), lambda: p.predict(empty[0]), lambda: list(p.train([empty]))):
            with pytest.raises(ValueError, match="a batch has no samples"):
                call()
        with pytest.raises(ValueError, match="found no tensor"):
            p.predict("text")
        p.step(inputs, targets)
    with (
        Pipeline(language_model(), Plan(pipelines=2), loss_fn=LOSS, optimizer=momentum) as p,
        pytest.raises(ValueError, match="a batch has no samples"),
    ):
        p.evaluate([empty])


def test_weights_must_be_named() -> None:
    with Pipeline(language_model(), Plan(pipelines=2), loss_fn=LOSS, optimizer=momentum) as p:
        for wrong in (2, -1, "refrence", True):
            with pytest.raises(ValueError, match=r"'reference' or a pipeline from 0 to 1"):
                p.state_dict(weights=wrong)
        with pytest.raises(ValueError, match="loader is empty"):
            p.evaluate([])
    with pytest.raises(RuntimeError, match="closed"):
        p.step(*token_batches(1, 8)[0])


def disagree(K: int) -> str:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    plan = Plan(stages=K, micro_batches=1 + dist.get_rank())
    with pytest.raises(ValueError, match="plan differs between ranks") as caught:
        Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=momentum)
    model = language_model()
    with torch.no_grad():
        model[0].weight.add_(dist.get_rank())
    with pytest.raises(ValueError, match="initial value of shared parameters differs between ranks"):
        Pipeline(model, Plan(stages=K), loss_fn=LOSS, optimizer=momentum)
    with pytest.raises(ValueError, match="for 3 workers and there are 2 ranks"):
        Pipeline(language_model(), Plan(stages=3), loss_fn=LOSS, optimizer=momentum)
    return str(caught.value)


@pytest.mark.ranks
def test_ranks_with_different_plans_are_refused_on_every_rank() -> None:
    assert all("[1] disagree with rank 0" in text for text in run(2, disagree, K=2))


def test_what_is_noted_of_a_batch_lies_in_its_stretch_of_training() -> None:
    """Also what the host does before the first batch and after the last one of a loader."""
    batches = token_batches(6, 8)
    plan = Plan(stages=2, pipelines=2, micro_batches=2)
    with Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=momentum) as p:
        list(p.train(iter(batches)))
        p.evaluate(batches)
        list(p.train(iter(batches)))
        p.evaluate(batches)
        timeline = p.timeline()
    first, second = timeline.window(0, 5), timeline.window(6, 11)
    assert len(first.events) + len(second.events) == len(timeline.events)
    assert max(e.end_s for e in first.events) < min(e.start_s for e in second.events)
    assert first.makespan_s + second.makespan_s < timeline.makespan_s
