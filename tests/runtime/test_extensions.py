"""Extensions of a Pipeline: how they are given, what they see, and when they are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import avgpipe
from avgpipe import (
    Audit,
    CudaGraphs,
    Extension,
    MovingAverage,
    Pipeline,
    Plan,
    Precision,
    StageError,
    StepGradients,
)
from avgpipe.options import CONFLICTS
from avgpipe.runtime.options import TrainingOptions
from avgpipe.runtime.session import Session
from avgpipe.runtime.spec import Spec
from tests.runner import run
from tests.runtime.cases import language_model, momentum, token_batches

LOSS = nn.CrossEntropyLoss()


class Norms(Extension):
    """Notes the gradient of every parameter before each step."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.seen: list[tuple[int, int, int]] = []
        self.gradients: dict[tuple[int, str], torch.Tensor] = {}

    def configure(self, options: TrainingOptions) -> TrainingOptions:
        self.calls.append("configure")
        return options

    def check(self, spec: Spec) -> None:
        self.calls.append("check")

    def opened(self, session: Session) -> None:
        self.calls.append("opened")

    def before_step(self, step: StepGradients) -> None:
        self.seen.append((step.batch, step.pipeline, step.stage))
        for name, gradient in step.gradients.items():
            self.gradients[step.batch, name] = gradient.clone()

    def closed(self) -> None:
        self.calls.append("closed")


def gradients_of_one_device(limit: float) -> dict[tuple[int, str], torch.Tensor]:
    model, found = language_model(), {}
    optimizer = momentum(model.parameters())
    for batch, (inputs, targets) in enumerate(token_batches(3, 8)):
        optimizer.zero_grad()
        LOSS(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        found |= {(batch, name): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return found


@pytest.mark.parametrize(
    "plan",
    [Plan(), Plan(stages=2, micro_batches=4), Plan(stages=3, micro_batches=2, schedule="gpipe")],
    ids=str,
)
def test_a_step_shows_the_gradients_that_one_device_has(plan: Plan) -> None:
    norms = Norms()
    with Pipeline(
        language_model(), plan, loss_fn=LOSS, optimizer=momentum, clip_grad_norm=0.1, extensions=[norms]
    ) as pipeline:
        list(pipeline.train(token_batches(3, 8)))
    expected = gradients_of_one_device(0.1)
    assert norms.gradients.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(norms.gradients[key], gradient, rtol=1e-10, atol=1e-12)
    assert sorted(norms.seen) == [(batch, 0, stage) for batch in range(3) for stage in range(plan.stages)]
    assert norms.calls == ["configure", "check", "opened", "closed"]


def test_gradients_may_be_changed_in_place() -> None:
    class Zeroed(Extension):
        def before_step(self, step: StepGradients) -> None:
            for gradient in step.gradients.values():
                gradient.zero_()

    with Pipeline(
        language_model(), Plan(stages=2), loss_fn=LOSS, optimizer=momentum, extensions=[Zeroed()]
    ) as pipeline:
        list(pipeline.train(token_batches(2, 8)))
        after = pipeline.state_dict()
    assert all(torch.equal(after[name], value) for name, value in language_model().state_dict().items())


def test_updates_that_are_left_out_show_nothing() -> None:
    norms = Norms()
    layers = [nn.Linear(2, 2), nn.Linear(2, 1)]
    options: dict[str, Any] = {"loss_fn": nn.MSELoss(), "optimizer": momentum}
    extensions = [norms, Precision(skip_nonfinite=True), Audit("off")]
    with Pipeline(layers, Plan(stages=2), **options, extensions=extensions) as pipeline:
        bad = torch.full((2, 2), torch.inf)
        list(pipeline.train([(bad, torch.zeros(2, 1)), (torch.ones(2, 2), torch.zeros(2, 1))]))
        assert pipeline.skipped_updates == 1
    assert sorted(norms.seen) == [(1, 0, 0), (1, 0, 1)]


def test_an_error_in_an_extension_ends_the_run_by_its_name() -> None:
    class Failing(Extension):
        def before_step(self, step: StepGradients) -> None:
            raise RuntimeError("no room for logs")

    with (
        pytest.raises(
            StageError, match=r"stage ., batch 0 of pipeline 0: Failing failed before the step: no room"
        ),
        Pipeline(
            language_model(), Plan(stages=2), loss_fn=LOSS, optimizer=momentum, extensions=[Failing()]
        ) as pipeline,
    ):
        list(pipeline.train(token_batches(1, 8)))


def test_wrong_extensions_are_refused_with_the_way_out() -> None:
    def made(*extensions: Any) -> None:
        Pipeline(language_model(), Plan(), loss_fn=LOSS, optimizer=momentum, extensions=extensions)

    with pytest.raises(TypeError, match=r"extensions\[1\] is torch.bfloat16: give objects of avgpipe"):
        made(Precision(), torch.bfloat16)
    with pytest.raises(TypeError, match="is a class: give an object of it, such as MovingAverage"):
        made(MovingAverage)
    with pytest.raises(ValueError, match="extensions has two of Precision: give each once"):
        made(Precision(autocast=torch.bfloat16), Precision(skip_nonfinite=True))
    with pytest.raises(TypeError, match="unexpected keyword argument 'autocast'"):
        Pipeline(language_model(), Plan(), loss_fn=LOSS, optimizer=momentum, autocast=torch.bfloat16)  # type: ignore[call-arg]
    with pytest.raises(
        ValueError, match=r"CudaGraphs\(\) cannot have weights='stash': a graph reads one version"
    ):
        Pipeline(
            language_model(),
            Plan(stages=2, micro_batches=2, schedule="pipedream", weights="stash"),
            loss_fn=LOSS,
            optimizer=momentum,
            extensions=[CudaGraphs()],
        )


def test_conflicts_name_options_that_exist() -> None:
    for row in CONFLICTS:
        assert hasattr(avgpipe, row.option.partition("(")[0])
        assert row.way_out


def norms_of_ranks() -> list[tuple[int, int, int]]:
    norms = Norms()
    plan = Plan(stages=2, pipelines=2, micro_batches=2)
    with Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=momentum, extensions=[norms]) as pipeline:
        list(pipeline.train(token_batches(2, 8)))
    return norms.seen


@pytest.mark.ranks
def test_each_rank_sees_its_own_stages() -> None:
    for stage, seen in enumerate(run(2, norms_of_ranks)):
        assert sorted(map(tuple, seen)) == [(batch, i, stage) for batch in range(2) for i in range(2)]
