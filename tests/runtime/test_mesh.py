"""Stages that are parallel inside: replicated, sharded, or with split layers, over the other dimensions of a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate as fully_replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from avgpipe import Pipeline, PipelineError, Plan
from avgpipe.errors import CheckpointError
from tests.options import grouped
from tests.runner import Ranks, run, touch
from tests.runtime.cases import (
    Tied,
    adamw,
    assert_same_state,
    assert_same_training,
    token_batches,
    train_on_one_device,
    train_pipeline,
)

pytestmark = pytest.mark.ranks

LOSS = nn.CrossEntropyLoss()
CLIP = 0.3
BOUND = 1e-10
SLOWER = partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[1, 3], gamma=0.5)


class Block(nn.Module):
    """Two layers between which tensor parallelism splits the features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def model_of_blocks() -> nn.Sequential:
    """An embedding, three blocks, and a decoder that shares the embedding's table, whose 11 rows divide unevenly."""
    torch.manual_seed(7)
    embedding = nn.Embedding(11, 8)
    return nn.Sequential(embedding, Block(), Block(), Block(), Tied(embedding.weight)).double()


# ---- what a user's hook does -----------------------------------------------------------------------------------------


def replicate(module: Any, stage: int, mesh: Any) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh["dp"].get_group())


def shard(module: Any, stage: int, mesh: Any) -> None:
    for layer in module.layers:
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])


def replicate_by_fsdp(module: Any, stage: int, mesh: Any) -> None:
    fully_replicate(module, mesh=mesh["dp"])


def split(module: Any, stage: int, mesh: Any) -> None:
    for layer in module.layers:
        if isinstance(layer, Block):
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def split_and_shard(module: Any, stage: int, mesh: Any) -> None:
    split(module, stage, mesh)
    shard(module, stage, mesh)


HOOKS: dict[str, tuple[Any, dict[str, int]]] = {
    "replicate": (replicate, {"dp": 2, "pp": 2}),
    "replicate by FSDP": (replicate_by_fsdp, {"dp": 2, "pp": 2}),
    "shard": (shard, {"dp": 2, "pp": 2}),
    "split": (split, {"tp": 2, "pp": 2}),
    "split and shard": (split_and_shard, {"dp": 2, "tp": 2, "pp": 1}),
    "plain": (None, {"pp": 3}),
}


def ranks(how: str) -> int:
    return math.prod(HOOKS[how][1].values())


def prepared(
    how: str, *, recompute: str = "never", schedule: str = "advance-forward", **options: Any
) -> tuple[Pipeline, slice]:
    """Return a Pipeline on this rank, and which samples of a batch are its own."""
    hook, shape = HOOKS[how]
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    plan = Plan(stages=shape["pp"], micro_batches=3, schedule=schedule, recompute=recompute)
    options = {"lr_scheduler": SLOWER, "clip_grad_norm": CLIP, **options}
    model = model_of_blocks()
    if options.pop("meta", False):
        options["weights_from"] = model.state_dict()
        with torch.device("meta"):
            model = model_of_blocks()
    made = Pipeline(
        model,
        plan,
        **grouped(
            loss_fn=LOSS, optimizer=adamw, mesh=mesh["pp"], prepare_stage=hook, timeout_s=30, **options
        ),
    )
    return made, slice(mesh["dp"].get_local_rank(), None, 2) if "dp" in shape else slice(None)


def parts(batches: Sequence[Any], own: slice) -> list[Any]:
    return [(x[own], y[own]) for x, y in batches]


# ---- equality with one device ----------------------------------------------------------------------------------------


def batches_with_gaps() -> list[Any]:
    """In every third batch nothing counts in any pipeline's last micro-batch."""
    batches = token_batches(4, 12)
    for _, y in batches[::3]:
        y[8:] = LOSS.ignore_index
    return batches


def learn(how: str, options: Sequence[dict[str, Any]]) -> list[Any]:
    found = []
    for more in options:
        made, own = prepared(how, **more)
        batches = parts(batches_with_gaps(), own)
        with made as p:
            losses = [r.loss for r in p.train(batches[:2])]
            evaluated, output = p.evaluate(batches[1:3]).loss, p.predict(batches[0][0])
            losses += [r.loss for r in p.train(batches[2:])]
            found.append((losses, p.state_dict(), evaluated, output))
    return found


OPTIONS = [
    {},
    {"schedule": "1f1b", "recompute": "always"},
    {"schedule": "all-forward-all-backward", "recompute": "except-last", "skip_nonfinite": True},
    {"loss_scale": "dynamic", "meta": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("how", [how for how in HOOKS if how != "plain"])
def test_stages_over_several_ranks_train_as_one_device(how: str) -> None:
    batches = batches_with_gaps()
    model = model_of_blocks()
    _, halfway = train_on_one_device(model, batches[:2], LOSS, adamw, clip=CLIP, lr_scheduler=SLOWER)
    losses, state = train_on_one_device(model, batches, LOSS, adamw, clip=CLIP, lr_scheduler=SLOWER)
    model.load_state_dict(halfway)
    with torch.no_grad():
        outputs = model(batches[0][0])
        evaluated = sum(float(LOSS(model(x), y)) for x, y in batches[1:3]) / 2
    for found in zip(*run(4, learn, how=how, options=OPTIONS), strict=True):
        for _, theirs, _, _ in found:
            assert_same_state(theirs, state, BOUND)
        mean = [sum(of_batch) / 4 for of_batch in zip(*(own for own, *_ in found), strict=True)]
        assert mean == pytest.approx(losses, abs=BOUND)
        assert sum(e for _, _, e, _ in found) / 4 == pytest.approx(evaluated, abs=BOUND)
        data = outputs[::2] if len(found[0][3]) == 6 else outputs
        torch.testing.assert_close(found[0][3], data, rtol=BOUND, atol=BOUND)


def learn_of_two_at_once(how: str) -> Any:
    made, own = prepared(how, accumulate=2)
    with made as p:
        p.load_state_dict(other_weights())
        for _ in p.train(parts(token_batches(4, 12), own)):
            pass
        return p.state_dict()


def other_weights() -> dict[str, torch.Tensor]:
    return {name: 0.9 * value for name, value in model_of_blocks().state_dict().items()}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("how", ["replicate", "shard"])
def test_several_batches_make_an_update_of_weights_from_outside(how: str) -> None:
    model, batches = model_of_blocks(), token_batches(4, 12)
    model.load_state_dict(other_weights())
    pairs = [[torch.cat(ts) for ts in zip(*batches[n : n + 2], strict=True)] for n in (0, 2)]
    _, state = train_on_one_device(model, pairs, LOSS, adamw, clip=CLIP, lr_scheduler=SLOWER)
    for theirs in run(4, learn_of_two_at_once, how=how):
        assert_same_state(theirs, state, BOUND)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def saved(how: str, folder: str) -> Any:
    """Train on two batches and save the state."""
    made, own = prepared(how)
    with made as p:
        for _ in p.train(parts(token_batches(2, 12), own)):
            pass
        dcp.save(p.sharded_state_dict(), checkpoint_id=folder)
        return p.state_dict()


def resumed(how: str, folder: str) -> Any:
    """Train on two more, after that."""
    made, own = prepared(how)
    with made as p:
        state = p.sharded_state_dict()
        dcp.load(state, checkpoint_id=folder)
        p.load_sharded_state_dict(state)
        loaded = p.state_dict()
        assert p.batches == 2
        for _ in p.train(parts(token_batches(4, 12)[2:], own)):
            pass
        return loaded, p.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "reader"),
    [("shard", "plain"), ("plain", "shard"), ("split", "replicate"), ("replicate", "split and shard")],
)
def test_a_distributed_checkpoint_goes_on_under_another_layout(
    writer: str, reader: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")
    before = run(ranks(writer), saved, how=writer, folder=folder)[0]
    _, state = train_on_one_device(
        model_of_blocks(), token_batches(4, 12), LOSS, adamw, clip=CLIP, lr_scheduler=SLOWER
    )
    for loaded, after in run(ranks(reader), resumed, how=reader, folder=folder):
        assert_same_state(loaded, before)
        assert_same_state(after, state, BOUND)
    model = model_of_blocks()
    loaded = {"model": model.state_dict()}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)  # torch alone, without any pipeline
    assert_same_state(model.state_dict(), before)


# ---- what goes over the network, and when ----------------------------------------------------------------------------


class Reductions(TorchDispatchMode):
    """Counts the collectives inside that add up what ranks have."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d" and "reduce" in func.name()
        return func(*args, **(kwargs or {}))


def reductions(how: str) -> int:
    made, own = prepared(how, clip_grad_norm=None)
    ((x, y),) = parts(token_batches(1, 12), own)
    with made as p:
        p.step(x, y)  # the first batch finds out in which order gradients are made
        with Reductions() as counted:
            p.step(x, y)
        return counted.count


@pytest.mark.slow
def test_gradients_are_averaged_once_a_batch() -> None:
    assert run(4, reductions, how="replicate") == [1, 1, 1, 1]  # of one bucket
    # Of blocks, and of what else a stage holds.
    assert run(4, reductions, how="shard") == [3, 2, 3, 2]


# ---- other ways ------------------------------------------------------------------------------------------------------


def sequences() -> tuple[nn.Sequential, list[Any]]:
    torch.manual_seed(3)
    model = nn.Sequential(Block(), Block(), Block()).double()
    return model, [(torch.randn(4, 6, 8).double(), torch.randn(4, 6, 8).double()) for _ in range(3)]


def along_the_sequence(module: Any, stage: int, mesh: Any) -> None:
    """Each rank has a part of the sequence between the layers that it has parts of."""
    for layer in module.layers:
        whole, part = Replicate(), Shard(1)
        plan = {
            "": PrepareModuleInput(input_layouts=whole, desired_input_layouts=part, use_local_output=True),
            "norm": SequenceParallel(use_local_output=True),
            "up": ColwiseParallel(input_layouts=part),
            "down": RowwiseParallel(output_layouts=part),
        }
        parallelize_module(layer, mesh["tp"], plan)
        parallelize_module(
            layer, mesh["tp"], PrepareModuleOutput(output_layouts=part, desired_output_layouts=whole)
        )


def learn_sequences() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))
    model, batches = sequences()
    how = {"mesh": mesh["pp"], "prepare_stage": along_the_sequence, "clip_grad_norm": 0.01, "timeout_s": 30}
    return train_pipeline(model, Plan(stages=2, micro_batches=2), batches, nn.MSELoss(), adamw, **how)


@pytest.mark.slow
def test_gradients_that_layers_leave_as_sums_to_be_added_up_are() -> None:
    expected = train_on_one_device(*sequences(), nn.MSELoss(), adamw, clip=0.01)
    for found in run(4, learn_sequences):
        assert_same_training(found, expected, BOUND)


def train_apart() -> Any:
    """Two pipelines of two ranks each, of different models, while the default group has all four."""
    dist.init_process_group("gloo", init_method="env://")
    number = dist.get_rank() % 2
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = model_of_blocks() if number else sequences()[0]
    batches = token_batches(2, 12) if number else sequences()[1][:2]
    loss_fn = LOSS if number else nn.MSELoss()
    plan = Plan(stages=2, pipelines=1 + number, micro_batches=2, partition=[1 + number])
    how = {"group": groups[number], "timeout_s": 30}
    return [
        train_pipeline(model, plan, batches, loss_fn, adamw, link=link, **how) for link in ("auto", "gloo")
    ]


@pytest.mark.promise
def test_groups_train_pipelines_of_their_own() -> None:
    ranks = run(4, train_apart)
    expected = train_on_one_device(*(sequences()[0], sequences()[1][:2]), nn.MSELoss(), adamw)
    for found in chain.from_iterable(ranks[::2]):
        assert_same_training(found, expected, BOUND)
    plan = Plan(stages=2, pipelines=2, micro_batches=2, partition=[2])
    expected = train_pipeline(model_of_blocks(), plan, token_batches(2, 12), LOSS, adamw)
    for found in chain.from_iterable(ranks[1::2]):
        assert found[0] == expected[0]
        assert_same_state(found[1], expected[1])


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
    outer = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    group = mesh["pp"].get_group()

    def unnamed(module: Any, stage: int, mesh: Any) -> None:
        module.layers[1].up.bias = None

    def returns(module: Any, stage: int, mesh: Any) -> nn.Module:
        return nn.Sequential(module)

    def inner(module: Any, stage: int, mesh: Any) -> Any:
        return DistributedDataParallel(module.layers[0], process_group=mesh["dp"].get_group())

    def unused(module: Any, stage: int, mesh: Any) -> Any:
        return DistributedDataParallel(
            module, process_group=mesh["dp"].get_group(), find_unused_parameters=True
        )

    def partly(module: Any, stage: int, mesh: Any) -> None:
        fully_shard(module.layers[1], mesh=mesh["dp"])

    def parts_ties(module: Any, stage: int, mesh: Any) -> None:
        for layer in module.layers:
            fully_shard(layer, mesh=mesh["dp"])

    def unlike(module: Any, stage: int, mesh: Any) -> None:
        if stage == 0:
            shard(module, stage, mesh)

    one = {"mesh": outer["pp"], "prepare_stage": shard}
    two = {"mesh": mesh["pp"], "prepare_stage": shard}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"stages": 2}, {"mesh": mesh}),
        ({"stages": 2}, {"mesh": "pp"}),
        ({"stages": 2}, {"mesh": mesh["pp"], "group": group}),
        ({"stages": 2}, {"group": "pp"}),
        ({"stages": 2}, {"prepare_stage": shard}),
        ({"stages": 2}, {"group": group, "prepare_stage": shard}),
        ({"stages": 2}, {"mesh": mesh["pp"], "prepare_stage": "shard"}),
        ({"stages": 2, "pipelines": 2}, two),
        ({"stages": 2, "schedule": "pipedream"}, two),
        ({"stages": 1, "replication": [2]}, two),
        ({"stages": 2, "schedule": "zero-bubble-h1"}, two),
        ({"stages": 2}, one),
        ({"stages": 2, "advance": "auto"}, two),
        ({"stages": 2}, {**two, "compile": True}),
        ({"stages": 1}, {**one, "prepare_stage": unnamed}),
        ({"stages": 1}, {**one, "prepare_stage": returns}),
        ({"stages": 1}, {**one, "prepare_stage": inner}),
        ({"stages": 1}, {**one, "prepare_stage": unused}),
        ({"stages": 1}, {**one, "prepare_stage": partly}),
        ({"stages": 1}, {**one, "prepare_stage": parts_ties}),
        ({"stages": 2}, {**two, "prepare_stage": unlike}),
    ]
    messages = []
    for plan, options in cases:
        try:
            Pipeline(
                model_of_blocks(),
                Plan(**{"micro_batches": 2, **plan}),
                **grouped(loss_fn=LOSS, optimizer=adamw, timeout_s=30, **options),
            ).close()
            messages.append("accepted")
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    return messages


WORDS = [
    "mesh has 2 dimensions (dp, pp)",
    "mesh must be a torch.distributed.device_mesh.DeviceMesh",
    "give one of the two",
    "group must be a torch.distributed process group that this rank is in, not 'pp'",
    "prepare_stage needs a mesh",
    "prepare_stage needs a mesh",
    "prepare_stage must be a function of (module, stage, mesh), not 'shard'",
    "pipelines=2",
    "weights='stash'",
    "replication=(2,)",
    "schedule='zero-bubble-h1'",
    "2 stages in one process",
    'advance="auto"',
    "compile",
    "layers.1.up.bias of stage 0",
    "prepare_stage returned Sequential for stage 0",
    "DistributedDataParallel of another module than stage 0",
    "DistributedDataParallel(find_unused_parameters=True)",
    "left out 'layers.0.weight'",
    "separated 'layers.4.weight' of stage 0 from 'layers.0.weight'",
    "prepare_stage has made it Shard(dim=0) over the 1 ranks of 'dp' and whole",
]


@pytest.mark.ranks
def test_what_cannot_be_is_refused_in_words() -> None:
    for messages in run(2, refusals):
        for message, words in zip(messages, WORDS, strict=True):
            assert words in message


def refused_later() -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
    options: dict[str, Any] = {
        "optimizer": adamw,
        "mesh": mesh["pp"],
        "prepare_stage": shard,
        "timeout_s": 10,
    }
    plan = Plan(stages=2, micro_batches=2)
    messages = []
    with Pipeline(model_of_blocks(), plan, **grouped(loss_fn=LOSS, **options)) as p:
        calls = [lambda: p.save("x"), lambda: p.load("x"), p.distances, lambda: p.requires_grad_("0", False)]
        for call in calls:
            with pytest.raises(ValueError, match="prepare_stage") as caught:
                call()
            messages.append(str(caught.value))
        with pytest.raises(CheckpointError) as damaged:
            p.load_sharded_state_dict({"model": {}})
        messages.append(str(damaged.value))

    def counted(output: torch.Tensor, target: torch.Tensor) -> Any:
        return nn.functional.cross_entropy(output, target, reduction="sum"), len(target)

    with (
        Pipeline(model_of_blocks(), plan, **grouped(loss_fn=counted, **options)) as p,
        pytest.raises(PipelineError, match="loss_weight") as late,
    ):
        p.step(*token_batches(1, 4)[0])
    return [*messages, str(late.value)]


def test_what_sharded_stages_cannot_do_is_refused_in_words() -> None:
    for messages in run(2, refused_later):
        assert "sharded_state_dict()" in messages[0]
        assert "load_sharded_state_dict()" in messages[1]
        assert "distances are 0" in messages[2]
        assert "freeze parameters before the Pipeline is made" in messages[3]
        assert "torch.distributed.checkpoint.load" in messages[4]
        assert "returns (sum, count)" in messages[5]


def mistaken() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))

    def fails(module: Any, stage: int, mesh: Any) -> None:
        raise ArithmeticError("the caller's own mistake")

    options = {"mesh": mesh["pp"], "prepare_stage": fails, "link": "gloo", "timeout_s": 30}
    Pipeline(
        model_of_blocks(),
        Plan(stages=2, micro_batches=2),
        **grouped(loss_fn=LOSS, optimizer=adamw, **options),
    )


def test_a_mistake_in_the_hook_ends_the_ranks_by_its_own_error() -> None:
    for code, output in Ranks(2, mistaken).join(30):
        assert code == 1, output  # no abort by a thread inside gloo
        assert "ArithmeticError: the caller's own mistake" in output


def die(how: str) -> str:
    made, own = prepared(how)
    batches = parts(token_batches(200, 12), own)
    try:
        with made as p:
            for result in p.train(batches):
                if result.batch == 2:
                    touch("trains")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["replicate", "shard"])
def test_ranks_of_all_pipelines_end_when_one_dies(how: str) -> None:
    started = Ranks(4, die, how=how)
    started.wait_for(4, "trains")
    started.kill(3)
    for code, output in started.join(30)[:3]:
        assert code == 0, output
    # Whoever hears of it first, by its own pipeline or by a collective inside its stage, takes the others along.
    for rank in range(3):
        assert torch.load(started.folder / f"{rank}.pt").startswith("PeerLost: rank ")
