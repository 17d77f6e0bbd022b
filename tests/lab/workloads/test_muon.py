"""Muon for hidden matrices, AdamW for the rest: torch's own steps, in one optimizer that any pipeline may have."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR

from avgpipe import ElasticAveraging, Pipeline, Plan, Reference
from avgpipe.tasks import BuildOptions, build_workload
from avgpipe_lab.workloads.gnmt import GNMTConfig, gnmt_layers
from avgpipe_lab.workloads.images import VGG, ResNet
from avgpipe_lab.workloads.recipe import MuonAdamW, Recipe, hidden_matrices
from tests.runtime.cases import (
    Trained,
    assert_goes_on,
    assert_same_training,
    language_model,
    token_batches,
    train_on_one_device,
    train_pipeline,
)

LOSS = nn.CrossEntropyLoss()
RECIPE = Recipe(8, 1, "muon", lr=0.02, weight_decay=0.1, betas=(0.9, 0.95))
HIDDEN = {
    "1.weight",
    "3.lin.weight",
    "4.lin.weight",
}  # of language_model: its embedding is tied to the output


def parameters() -> list[nn.Parameter]:
    """Two hidden matrices, an embedding, and a bias."""
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=g)) for shape in ((6, 4), (3, 5), (7, 4), (4,))]


def groups(params: list[nn.Parameter], **options: Any) -> list[dict[str, Any]]:
    return [
        {"params": params[:2], "muon": True, **options},
        {"params": params[2:3]},
        {"params": params[3:], "weight_decay": 0.0},
    ]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    g = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g)


def apart(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [
        Muon(params[:2], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        AdamW(groups(params)[1:], lr=0.02, weight_decay=0.1, betas=(0.9, 0.95)),
    ]


def together(params: list[nn.Parameter]) -> MuonAdamW:
    return MuonAdamW(groups(params), 0.02, weight_decay=0.1, betas=(0.9, 0.95))


def run(params: list[nn.Parameter], optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        give_gradients(params, step)
        for optimizer in optimizers:
            optimizer.step()


def equal(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_a_step_is_torchs_own_bit_for_bit() -> None:
    ours, theirs = parameters(), parameters()
    run(ours, [together(ours)], range(5))
    run(theirs, apart(theirs), range(5))
    assert equal(ours, theirs)
    assert not equal(ours, parameters())


def test_learning_rates_of_all_groups_follow_one_schedule() -> None:
    def halved(params: list[nn.Parameter], optimizers: list[Any]) -> None:
        schedules = [LambdaLR(optimizer, lambda step: 0.5**step) for optimizer in optimizers]
        for step in range(4):
            run(params, optimizers, range(step, step + 1))
            for schedule in schedules:
                schedule.step()

    ours, theirs = parameters(), parameters()
    halved(ours, [together(ours)])
    halved(theirs, apart(theirs))
    assert equal(ours, theirs)


def test_groups_have_the_options_of_their_optimizer() -> None:
    muon, adamw, vectors = together(parameters()).param_groups
    assert (muon["momentum"], muon["nesterov"], muon["adjust_lr_fn"]) == (0.95, True, "match_rms_adamw")
    assert (muon["muon"], adamw["muon"], vectors["muon"]) == (True, False, False)
    assert adamw["betas"] == vectors["betas"] == (0.9, 0.95)
    assert [g["weight_decay"] for g in (muon, adamw, vectors)] == [0.1, 0.1, 0.0]
    assert MuonAdamW(groups(parameters(), momentum=0.8)).param_groups[0]["momentum"] == 0.8


def test_parameters_alone_are_adamws() -> None:
    ours, theirs = parameters(), parameters()
    run(ours, [MuonAdamW(ours, lr=0.1)], range(3))
    run(theirs, [AdamW(theirs, lr=0.1)], range(3))
    assert equal(ours, theirs)


def test_muon_takes_no_vectors() -> None:
    with pytest.raises(
        ValueError, match=r"Muon steps matrices, not a parameter of shape \(3,\): put it in a group"
    ):
        MuonAdamW([{"params": [nn.Parameter(torch.ones(3))], "muon": True}])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_kernels_are_matrices_with_a_row_for_each_output(memory_format: torch.memory_format) -> None:
    g = torch.Generator().manual_seed(1)
    kernel = torch.randn(6, 3, 2, 2, generator=g)
    ours = nn.Parameter(kernel.clone(memory_format=memory_format))
    theirs = nn.Parameter(kernel.flatten(1).clone())
    optimizer = MuonAdamW([{"params": [ours], "muon": True}], 0.02, weight_decay=0.1)
    reference = Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        grad = torch.randn(6, 3, 2, 2, generator=g)
        ours.grad, theirs.grad = grad.to(memory_format=memory_format), grad.flatten(1)
        optimizer.step()
        reference.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(ours.flatten(1), theirs)
    assert ours.is_contiguous(memory_format=memory_format)


def test_a_group_may_come_later_and_one_without_gradients_stays() -> None:
    ours, theirs = parameters(), parameters()
    optimizer = MuonAdamW(groups(ours)[1:], 0.02, weight_decay=0.1, betas=(0.9, 0.95))
    optimizer.add_param_group(groups(ours)[0])
    reference = apart(theirs)
    for step in range(3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        for params in (ours, theirs):
            params[0].grad = params[2].grad = None
        for each in (optimizer, *reference):
            each.step()
    assert equal(ours, theirs)
    assert torch.equal(ours[0], parameters()[0])
    assert ours[0] not in optimizer.state


def test_a_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    params = parameters()
    optimizer = together(params)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        return loss

    before = float(closure().detach())
    assert float(optimizer.step(closure).detach()) == before
    assert float(closure().detach()) < before


@pytest.mark.parametrize("way", ["state_dict", "file", "deepcopy"])
def test_a_copy_goes_on_in_the_same_way(way: str, tmp_path: Path) -> None:
    whole, params = parameters(), parameters()
    run(whole, [together(whole)], range(6))
    first = together(params)
    run(params, [first], range(3))
    if way == "deepcopy":
        copied = copy.deepcopy(first)
        params = [p for group in copied.param_groups for p in group["params"]]
    else:
        state = first.state_dict()
        if way == "file":
            torch.save(state, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt", weights_only=True)
        copied = MuonAdamW(groups(params), lr=9.0)
        copied.load_state_dict(state)
    run(params, [copied], range(3, 6))
    assert equal(whole, params)


# ---- which matrices ------------------------------------------------------------------------------------------------


def test_embeddings_outputs_and_what_is_tied_to_them_are_not_hidden() -> None:
    assert hidden_matrices(language_model()) == HIDDEN
    assert hidden_matrices(list(language_model())) == HIDDEN


def test_every_name_of_a_shared_hidden_matrix_counts() -> None:
    shared = nn.Linear(4, 4)
    found = hidden_matrices([nn.Embedding(5, 4), shared, shared, nn.Linear(4, 5)])
    assert found == {"1.weight", "2.weight"}


WORKLOADS = {
    "awd-lstm": {f"{n}.weight_{kind}" for n in (1, 2) for kind in ("ih", "hh")},
    "gpt": {
        f"transformer.h.{n}.{layer}.weight"
        for n in range(4)
        for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    },
    "bert": {"cls.predictions.transform.dense.weight"}
    | {
        f"bert.encoder.layer.{n}.{layer}.weight"
        for n in range(2)
        for layer in (
            *(f"attention.self.{part}" for part in ("query", "key", "value")),
            *("attention.output.dense", "intermediate.dense", "output.dense"),
        )
    },
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_know_their_hidden_matrices(name: str, text_folder: Path) -> None:
    if name in ("gpt", "bert"):
        pytest.importorskip("transformers", reason="the workload's model is one of transformers")
    workload = build_workload(name, optimizer="muon", data=text_folder)
    assert hidden_matrices(workload.layers) == WORKLOADS[name]
    layers = workload.layers
    model = layers if isinstance(layers, nn.Module) else nn.ModuleList(layers)
    muon, adamw, vectors = workload.optimizer(list(model.named_parameters())).param_groups
    assert {id(p) for p in muon["params"]} == {id(model.get_parameter(n)) for n in WORKLOADS[name]}
    assert all(p.dim() > 1 for p in adamw["params"])
    assert all(p.dim() <= 1 for p in vectors["params"])
    assert len(muon["params"] + adamw["params"] + vectors["params"]) == len(list(model.parameters()))


def test_models_that_need_data_have_hidden_matrices_too() -> None:
    translating = gnmt_layers(GNMTConfig(20, 8, encoder_layers=2, decoder_layers=2, tied_output=False))
    lstms = ("1.lstm", "1.backward_lstm", "2.lstm", "3.lstm", "4.lstm")
    expected = {f"{lstm}.weight_{kind}" for lstm in lstms for kind in ("ih", "hh")}
    assert hidden_matrices(translating) == expected | {
        "3.attention.query_weight",
        "3.attention.memory_weight",
    }
    classifying = VGG((1,), (4,), hidden=(8, 6)).layers((3, 8, 8), 10)
    assert hidden_matrices(classifying) == {"0.0.weight", "1.1.weight", "2.1.weight"}
    residual = hidden_matrices(ResNet(8).layers((3, 8, 8), 10))
    blocks = {f"{n}.body.{half}.0.weight" for n in (1, 2, 3) for half in (0, 1)}
    assert residual == {"0.0.weight"} | blocks


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1, 5, 4))


def test_other_parameters_of_many_dimensions_are_left_to_adamw() -> None:
    layers = [nn.Conv1d(3, 4, 3), Positions(), nn.Linear(4, 4), nn.Linear(4, 2)]
    assert hidden_matrices(layers) == {"0.weight", "2.weight"}


# ---- in pipelines --------------------------------------------------------------------------------------------------


def optimizer_of(model: Any) -> partial[torch.optim.Optimizer]:
    return RECIPE.optimizer_for(BuildOptions(), model)


def separately(named_params: Any) -> list[torch.optim.Optimizer]:
    """Torch's two optimizers."""
    muon = [p for name, p in named_params if name in HIDDEN]
    rest = [p for name, p in named_params if name not in HIDDEN]
    options = {"lr": RECIPE.lr, "weight_decay": RECIPE.weight_decay}
    decayed, plain = ([p for p in rest if (p.dim() > 1) == matrix] for matrix in (True, False))
    return [
        Muon(muon, **options, adjust_lr_fn="match_rms_adamw"),
        AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], betas=RECIPE.betas, **options),
    ]


def trained(plan: Plan, batches: list[Any], model: nn.Module) -> Trained:
    return train_pipeline(model, plan, batches, LOSS, optimizer_of(model))


@pytest.mark.parametrize("K", [1, 2, 3])
def test_a_pipeline_trains_as_torchs_two_optimizers(K: int) -> None:
    """Micro-batches of one: gradients are then the same bits, which Muon's steps in bfloat16 would not forgive."""
    batches, model = token_batches(6, 6), language_model()
    ours = trained(Plan(stages=K, micro_batches=1), batches, model)
    assert_same_training(ours, train_on_one_device(model, batches, LOSS, separately))


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("N", [1, 2])
def test_the_number_of_stages_changes_nothing(N: int, staleness: int) -> None:
    batches, model = token_batches(8, 6), language_model()
    one, two = (
        trained(Plan(stages=K, pipelines=N, micro_batches=3, staleness=staleness), batches, model)
        for K in (1, 2)
    )
    assert_same_training(two, one)


@pytest.mark.parametrize("correction", [None, "error-feedback"])
def test_late_gradients_are_corrected_after_its_step_as_after_any(correction: str | None) -> None:
    """2BW's delay is one batch on every stage, so the number of stages changes nothing there either."""
    batches, model = token_batches(8, 6), language_model()
    one, two = (
        trained(
            Plan(stages=K, micro_batches=2, schedule="pipedream-2bw", correction=correction), batches, model
        )
        for K in (1, 2)
    )
    assert_same_training(two, one)


def test_its_state_tells_no_weights_in_advance() -> None:
    plan = Plan(stages=2, schedule="pipedream", correction="predicted")
    with pytest.raises(ValueError, match="cannot be predicted from the state of MuonAdamW"):
        trained(plan, token_batches(2, 6), language_model())


def test_elastic_averaging_takes_its_own_step() -> None:
    params, alone = parameters(), parameters()
    reference = Reference([p.detach().clone().requires_grad_() for p in params], replicas=1)
    elastic = ElasticAveraging(together(params), reference, replica=0, parameters=params)
    run(params, [elastic], range(3))
    run(alone, [together(alone)], range(3))
    assert equal(params, alone)
    elastic.load_state_dict(elastic.state_dict())


@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize("K", [1, 2, 4])
def test_a_checkpoint_goes_on_under_other_stages(K: int, N: int, tmp_path: Path) -> None:
    batches, model = token_batches(8, 6), language_model()

    def pipeline(stages: int) -> Pipeline:
        schedule = lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step)  # noqa: E731
        plan = Plan(stages=stages, pipelines=N, micro_batches=2)
        return Pipeline(model, plan, loss_fn=LOSS, optimizer=optimizer_of(model), lr_scheduler=schedule)

    assert_goes_on(pipeline, K, batches, tmp_path / "c")
