"""The table of the guide "What composes": each of its cells is a case here, and what it says is what the case checks.

Equal means equal in every bit to one device that does the same: same autocast, compiler, conversion, optimizer.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from avgpipe import CheckpointError, Pipeline, Plan
from tests.runner import run
from tests.runtime.composed import (
    CUT,
    Result,
    Setup,
    Ways,
    adamw,
    assert_equal,
    in_a_pipeline,
    labelled,
    momentum,
    on_one_device,
    result_of,
)
from tests.runtime.composed import blocks as model_of_blocks

# torch.compile does not work where operators are noted, and graphs have a device of their own.
pytestmark = [pytest.mark.host, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "what-composes.md"
TORCHAO = ROOT / ".venv" / "torchao"  # where make puts it: transformers imports it wherever it sees it


# ---- the columns -----------------------------------------------------------------------------------------------------


def torchao(part: str) -> Any:
    """Import a part of the library."""
    if str(TORCHAO) not in sys.path:
        sys.path.append(str(TORCHAO))
    return pytest.importorskip(f"torchao.{part}", reason="torchao is not installed")


def to_fp8(model: nn.Module, **settings: Any) -> nn.Module:
    """Have linear layers multiply in 8 bits, computed as a device without such products can."""
    float8 = torchao("float8")
    converted: nn.Module = float8.convert_to_float8_training(
        model, config=float8.Float8LinearConfig(emulate=True, **settings)
    )
    return converted


def few_bits(params: Any, kind: str) -> torch.optim.Optimizer:
    """An optimizer of torchao. Each has its step compiled."""
    optim = torchao("optim")
    from torch._inductor import config

    config.compile_threads = 1
    made: torch.optim.Optimizer = getattr(optim, kind)(params, lr=1e-2)
    return made


BF16, FP16, WEIGHTS, COMPILE = "bfloat16 autocast", "float16 autocast", "bfloat16 weights", "compile"
GRAPHS, FP8, BITS, EMA = "CUDA graphs", "fp8 layers", "8-bit optimizer", "EMA"
COLUMNS: dict[str, list[dict[str, Any]]] = {  # what they set; the first of several meets the other columns
    BF16: [{"autocast": torch.bfloat16}],
    FP16: [{"autocast": torch.float16}],
    WEIGHTS: [{"dtype": torch.bfloat16}],
    COMPILE: [{"backend": "aot_eager"}, {"backend": "aot_eager", "comes_compiled": True}],
    GRAPHS: [{"graphs": True}],
    FP8: [{"convert": to_fp8}],
    BITS: [{"optimizer": partial(few_bits, kind=kind)} for kind in ("AdamW8bit", "AdamW4bit", "AdamWFp8")],
    EMA: [{"ema": True}],
}


# ---- the rows --------------------------------------------------------------------------------------------------------

TWO: dict[str, Any] = {"stages": 2, "partition": (CUT,), "micro_batches": 2}
HALVES = {**TWO, "pipelines": 2, "micro_batches": 4, "staleness": 0}
DREAM = {**TWO, "micro_batches": 1, "schedule": "pipedream"}
SEVERAL = {"stages": 4, "micro_batches": 2, "schedule": "interleaved-1f1b", "stages_per_worker": 2}
REPLICAS = {**TWO, "micro_batches": 4, "schedule": "1f1b", "replication": (2, 2)}
PLANS: dict[str, tuple[dict[str, Any], Ways]] = {
    "pipelines, elastic averaging": ({**HALVES, "rule": "avgpipe", "staleness": 1}, Ways(4, 2, elastic=True)),
    "pipelines, shared batches": ({**HALVES, "rule": "mean-gradient"}, Ways(4, 2)),
    "weights stashed": ({**DREAM, "weights": "stash"}, Ways(1, delays=(1, 0))),
    "weights double-buffered": ({**TWO, "schedule": "pipedream-2bw"}, Ways(delays=(1, 1))),
    "weights predicted": ({**DREAM, "weights": "predicted"}, Ways(1, delays=(1, 0), predicts=True)),
    "recomputation": ({**TWO, "recompute": "always"}, Ways()),
    "split backward": ({**TWO, "schedule": "zero-bubble-h1"}, Ways()),
    "several stages a worker": (SEVERAL, Ways()),
    "replicas of a stage": (REPLICAS, Ways(4, 2, dealt=True)),
}


def check_plan(setup: Setup, plan: dict[str, Any], ways: Ways) -> None:
    if ways.predicts and setup.optimizer is adamw:
        setup = replace(setup, optimizer=momentum)
    with setup.device():
        ours = in_a_pipeline(setup, Plan(**plan))
    assert_equal(ours, on_one_device(setup, ways))


def check_shared(setup: Setup) -> None:
    """With gradients of a round before, one device is a pipeline of one stage."""
    check_plan(setup, *PLANS["pipelines, shared batches"])
    late = {**HALVES, "rule": "mean-gradient", "staleness": 1}
    with setup.device():
        ours, theirs = (
            in_a_pipeline(setup, Plan(**plan)) for plan in (late, {**late, "stages": 1, "partition": None})
        )
    assert_equal(ours, theirs)


def check_evaluation(setup: Setup, folder: Path) -> None:
    """Between batches, with another number of samples than those have."""
    batches = setup.data()
    with setup.device(), setup.pipeline(Plan(**TWO)) as p:
        losses = []
        for result in p.train(batches):
            losses.append(result.loss)
            p.evaluate([(x[:5], y[:5]) for x, y in batches])
            p.predict(batches[0][0][:3])
        ours = result_of(p, setup, losses, batches)
    assert_equal(ours, on_one_device(setup, Ways()))


LAYOUTS = [
    (TWO, {"stages": 4, "micro_batches": 2}),
    (
        {**TWO, "schedule": "zero-bubble-h1"},
        {"stages": 3, "pipelines": 2, "micro_batches": 2, "staleness": 0},
    ),
    ({**HALVES, "micro_batches": 2}, {"stages": 1, "micro_batches": 2}),
    ({**HALVES, "micro_batches": 2}, {**HALVES, "micro_batches": 2}),
]


def check_checkpoint(setup: Setup, folder: Path) -> None:
    expected, batches = on_one_device(setup, Ways()), setup.data()
    for n, (before, after) in enumerate(LAYOUTS):
        with setup.device(), setup.pipeline(Plan(**before)) as p:
            losses = [r.loss for r in p.train(batches[:2])]
            p.save(folder / str(n))
        with setup.device(), setup.pipeline(Plan(**after)) as p:
            p.load(folder / str(n))
            losses += [r.loss for r in p.train(batches[2:])]
            assert_equal(result_of(p, setup, losses, batches), expected)


def check_transformers(setup: Setup, folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}

    def llama() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
        return model

    def tokens() -> list[Any]:
        drawn = torch.randint(64, (3, 2, 8, 9), generator=torch.Generator().manual_seed(2))
        return [(x, y) for x, y in drawn]

    setup = replace(
        setup,
        model=llama,
        batches=tokens,
        loss_fn=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        output=lambda output: output.logits,
    )
    with setup.device():
        ours = in_a_pipeline(setup, Plan(stages=2, micro_batches=2))
    assert_equal(ours, on_one_device(setup, Ways()))


def on_ranks(column: str) -> Result:
    setup = replace(Setup(), **COLUMNS[column][0])
    with setup.device():
        return in_a_pipeline(setup, Plan(**TWO))


def check_on_ranks(column: str) -> None:
    expected = on_one_device(replace(Setup(), **COLUMNS[column][0]), Ways())
    for ours in run(2, on_ranks, 400, column=column):
        assert_equal(ours, expected)


# Half a matrix of these is large enough for states of 8 bits, and made of whole blocks.
WIDE: dict[str, Any] = {"model": partial(model_of_blocks, 96), "batches": partial(labelled, 96)}


def shard(module: Any, stage: int, mesh: Any) -> None:
    for layer in module.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])


def sharded(setup: Setup, hook: Any = shard) -> tuple[Pipeline, list[Any]]:
    """A pipeline of two stages over two ranks each, and this rank's half of each batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    own = mesh["dp"].get_local_rank()
    p = setup.pipeline(Plan(**TWO), mesh=mesh["pp"], prepare_stage=hook)
    return p, [(x.tensor_split(2)[own], y.tensor_split(2)[own]) for x, y in setup.data()]


def train_shards(options: dict[str, Any], hook: Any = shard) -> Result | str:
    """Or what a refusal says, on every rank alike."""
    setup = replace(Setup(), **WIDE, **options)
    with setup.device():
        try:
            p, batches = sharded(setup, hook)
        except ValueError as error:
            return str(error)
        with p:
            return Result([r.loss for r in p.train(batches)], p.state_dict())


def resume_shards(options: dict[str, Any], folder: str, hook: Any) -> Result:
    """Train on two batches and save, in shards; go on with two more, with ``hook``."""
    setup = replace(Setup(), **WIDE, **options)
    p, batches = sharded(setup)
    with p:
        losses = [r.loss for r in p.train(batches[:2])]
        dcp.save(p.sharded_state_dict(), checkpoint_id=folder)
    p, batches = sharded(setup, hook)
    with p:
        state = p.sharded_state_dict()
        dcp.load(state, checkpoint_id=folder)
        p.load_sharded_state_dict(state)
        losses += [r.loss for r in p.train(batches[2:])]
        return Result(losses, p.state_dict())


def check_shards(options: dict[str, Any], hook: Any = shard, alike: Any = None) -> None:
    found = run(4, train_shards, 400, options=options, hook=hook)
    if isinstance(found[0], str):
        raise ValueError(found[0])
    expected = on_one_device(replace(Setup(), **WIDE, **(alike or options)), Ways(4, 2))
    for ours in found:
        assert [n for n, value in expected.state.items() if not torch.equal(value, ours.state[n])] == []
    halves = zip(found[0].losses, found[2].losses)
    assert [(a + b) / 2 for a, b in halves] == pytest.approx(expected.losses, abs=1e-6)


# ---- the cells -------------------------------------------------------------------------------------------------------

SITUATIONS: dict[str, Callable[[Setup, Path, str], None]] = {
    "a process for each stage": lambda setup, folder, column: check_on_ranks(column),
    **{
        row: (lambda setup, folder, column, of=of: check_plan(setup, *of))  # type: ignore[misc]
        for row, of in PLANS.items()
    },
    "pipelines, shared batches": lambda setup, folder, column: check_shared(setup),
    "FSDP2 inside a stage": lambda setup, folder, column: check_shards(COLUMNS[column][0]),
    "evaluate, predict": lambda setup, folder, column: check_evaluation(setup, folder),
    "save, load in another layout": lambda setup, folder, column: check_checkpoint(setup, folder),
    "models of transformers": lambda setup, folder, column: check_transformers(setup, folder),
}
ONCE = ("a process for each stage", "FSDP2 inside a stage")  # with the first of several
REFUSED = {  # the note in the guide, and what the error says
    (FP16, WEIGHTS): (
        "a",
        r"autocast=torch.float16\) with weights in torch.bfloat16 .* use autocast=torch.bfloat16",
    ),
    ("weights stashed", GRAPHS): ("b", "CudaGraphs\\(\\) cannot have weights='stash'.*flushes"),
    ("weights double-buffered", GRAPHS): ("b", "CudaGraphs\\(\\) cannot have weights='double-buffer'"),
    ("weights predicted", GRAPHS): ("b", "CudaGraphs\\(\\) cannot have weights='predicted'"),
    ("weights predicted", BITS): ("c", "cannot be predicted from the state of AdamW.*error-feedback"),
    ("FSDP2 inside a stage", COMPILE): ("d", r"cannot have Compile\(\): .* call layer.compile\(\)"),
    ("FSDP2 inside a stage", GRAPHS): ("e", "cannot have CudaGraphs\\(\\): leave it out"),
    ("FSDP2 inside a stage", EMA): ("e", "cannot have MovingAverage\\(0.7\\): leave it out"),
}
APART = [{BF16, FP16}]  # one or the other
SLOW = {COMPILE, BITS, "a process for each stage", "FSDP2 inside a stage", "models of transformers"}


def mark_of(row: str, column: str) -> str:
    if row == column or {row, column} in APART:
        return "–"
    for cell in ((row, column), (column, row)):
        if cell in REFUSED:
            return f"no ({REFUSED[cell][0]})"
    return "(=)" if GRAPHS in (row, column) else "="


CELLS = {(row, column): mark_of(row, column) for row in (*COLUMNS, *SITUATIONS) for column in COLUMNS}


def cases() -> Iterator[Any]:
    names = list(COLUMNS)
    for (row, column), mark in CELLS.items():
        is_mirrored = row in COLUMNS and names.index(row) > names.index(column)
        if mark != "–" and not is_mirrored:
            marks = [pytest.mark.slow, pytest.mark.timeout(600)] if {row, column} & SLOW else []
            marks += [pytest.mark.ranks] if row in ONCE else []
            yield pytest.param(row, column, marks=marks, id=f"{row} x {column}")


@pytest.mark.grid(16)
@pytest.mark.parametrize(("row", "column"), list(cases()))
def test_a_cell_says_what_is(row: str, column: str, tmp_path: Path) -> None:
    def check(options: dict[str, Any], folder: Path) -> None:
        setup = replace(Setup(), **options)
        setup.made(), setup.optimizer([nn.Parameter(torch.zeros(2))])  # skips what is not installed
        if row in COLUMNS:
            check_plan(replace(setup, **COLUMNS[row][0]), TWO, Ways())
        else:
            SITUATIONS[row](setup, folder, column)

    refused = REFUSED.get((row, column))
    variants = COLUMNS[column][: 1 if row in COLUMNS or row in ONCE else None]
    if row == "models of transformers":  # of which no part is called as it comes, but for its blocks
        variants = [options for options in variants if "comes_compiled" not in options]
    for n, options in enumerate(variants):
        if refused is None:
            check(options, tmp_path / str(n))
        else:
            with pytest.raises(Exception, match=refused[1]):
                check(options, tmp_path / str(n))


def test_the_table_of_the_guide_has_these_cells() -> None:
    text = GUIDE.read_text()
    rows = [
        [cell.strip().replace("<br>", " ") for cell in line.strip().strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    head, _, *body = rows
    found = {
        (name, column): mark for name, *marks in body for column, mark in zip(head[1:], marks, strict=True)
    }
    assert found == CELLS
    notes = set(re.findall(r"^- \((\w)\) ", text, re.MULTILINE))
    assert notes == {letter for letter, _ in REFUSED.values()}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_column_is_felt() -> None:
    """An option that changed nothing would compose with everything."""
    plain = on_one_device(Setup(), Ways())
    for column in (BF16, FP16, WEIGHTS, FP8, BITS):
        for options in COLUMNS[column]:
            assert on_one_device(replace(Setup(), **options), Ways()).losses[1:] != plain.losses[1:]
    frames = torch._dynamo.utils.counters["frames"]
    for options in COLUMNS[COMPILE]:
        frames.clear()
        in_a_pipeline(replace(Setup(), **options), Plan(**TWO))
        assert frames["ok"] >= 2
    setup = replace(Setup(), graphs=True)
    with setup.device() as device:
        in_a_pipeline(setup, Plan(**TWO))
        assert len(device.graphs) == 2 * 2 * 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_at_once() -> None:
    together = {"autocast": torch.bfloat16, "backend": "aot_eager", "ema": True}
    for options in (together, together | COLUMNS[FP8][0] | COLUMNS[BITS][0]):
        check_plan(replace(Setup(), **options), TWO, Ways())
        check_plan(replace(Setup(), **options), *PLANS["pipelines, elastic averaging"])


@pytest.mark.slow
@pytest.mark.timeout(600, func_only=True)
@pytest.mark.ranks
@pytest.mark.usefixtures("default_backend")
def test_the_default_backend_computes_the_same_in_stages() -> None:
    for options in ({}, {"autocast": torch.bfloat16}, COLUMNS[FP8][0]):
        check_plan(replace(Setup(), backend="inductor", **options), TWO, Ways())


@pytest.mark.gpu
@pytest.mark.parametrize("column", [c for c in COLUMNS if CELLS[GRAPHS, c] == "(=)"])
def test_graphs_on_a_gpu_launch_what_runs_without(column: str) -> None:
    setup = replace(Setup(), **COLUMNS[column][0])
    ours, theirs = (
        in_a_pipeline(setup, Plan(**TWO), device="cuda", cuda_graphs=graphs) for graphs in (True, False)
    )
    assert_equal(ours, theirs)


# ---- what the notes say ----------------------------------------------------------------------------------------------


def shard_compiled(module: Any, stage: int, mesh: Any) -> None:
    for layer in module.layers:
        layer.compile(backend="aot_eager")
    shard(module, stage, mesh)


def shard_fp8(module: Any, stage: int, mesh: Any) -> None:
    for layer in module.layers[: 2 if stage == 0 else 1]:  # the last layer is itself linear
        to_fp8(layer, enable_fsdp_float8_all_gather=True)
    shard(module, stage, mesh)


def to_fp8_in_blocks(model: nn.Module) -> nn.Module:
    for block in list(model.children())[:3]:
        to_fp8(block)
    return model


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_hook_compiles_and_converts_what_it_shards() -> None:
    check_shards({}, shard_compiled, {"backend": "aot_eager"})
    torchao("float8")
    check_shards({}, shard_fp8, {"convert": to_fp8_in_blocks})


def replicate(module: Any, stage: int, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, process_group=mesh["dp"].get_group())


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hook", [shard, replicate])
def test_states_of_8_bits_go_on_from_shards(hook: Any, tmp_path: Path) -> None:
    torchao("optim")
    options = COLUMNS[BITS][0]
    expected = on_one_device(replace(Setup(), **WIDE, **options), Ways(4, 2))
    for ours in run(4, resume_shards, 400, options=options, folder=str(tmp_path), hook=hook):
        assert [n for n, value in expected.state.items() if not torch.equal(value, ours.state[n])] == []


def test_fp8_weights_that_only_shards_can_hold_are_refused() -> None:
    setup = replace(Setup(), convert=partial(to_fp8, enable_fsdp_float8_all_gather=True))
    with pytest.raises(ValueError, match=r"'0.lin.weight' trains, .*\(prepare_stage=.*, before fully_shard"):
        setup.pipeline(Plan(**TWO))


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("rule", ["mean-gradient", "avgpipe"])
def test_a_rate_that_is_a_tensor_follows_its_schedule(rule: str, staleness: int) -> None:
    """As optimizers with a compiled step want it; a schedule changes it in place."""
    halving = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    plan = Plan(**{**HALVES, "rule": rule, "staleness": staleness})

    def trained(rate: Callable[[], Any]) -> Result:
        def optimizer(params: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(params, lr=rate(), foreach=False)

        return in_a_pipeline(replace(Setup(), optimizer=optimizer), plan, lr_scheduler=halving)

    plain, ours = trained(lambda: 0.01), trained(lambda: torch.tensor(0.01))
    assert ours.losses == pytest.approx(plain.losses, abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_states_of_8_bits_go_with_their_optimizer(tmp_path: Path) -> None:
    setup = replace(Setup(), **COLUMNS[BITS][0])
    batches = setup.data()
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    with setup.pipeline(Plan(**TWO), lr_scheduler=schedule) as p:
        list(p.train(batches[:2]))
        p.save(tmp_path / "c")
        dcp.save(p.sharded_state_dict(), checkpoint_id=tmp_path / "d", no_dist=True)
        expected = [r.loss for r in p.train(batches[2:])]
    with setup.pipeline(Plan(stages=4, micro_batches=2), lr_scheduler=schedule) as p:
        p.load(tmp_path / "c")
        assert [r.loss for r in p.train(batches[2:])] == expected
    for warm in (False, True):
        with setup.pipeline(Plan(stages=4, micro_batches=2), lr_scheduler=schedule) as p:
            list(p.train(batches[:1])) if warm else None
            state = p.sharded_state_dict()
            dcp.load(state, checkpoint_id=tmp_path / "d", no_dist=True)
            p.load_sharded_state_dict(state)
            assert [r.loss for r in p.train(batches[2:])] == expected
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:  # where nobody has heard of torchao
        for file in (tmp_path / "c").glob("*.pt"):
            torch.load(file, weights_only=True)
    finally:
        torch.serialization.add_safe_globals(known)
    refusal = "keeps OptimState8bit of torchao, and AdamW has no such"
    with Setup().pipeline(Plan(**TWO)) as p, pytest.raises(CheckpointError, match=refusal):
        p.load(tmp_path / "c")
