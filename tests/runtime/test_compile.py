"""Compiled layers train what plain ones train, under the names of the model that was passed in.

Bounds. The backends "eager" and "aot_eager" run the operators of torch that the plain layers run, so float64 weights
agree to 1e-10 as everywhere else, and mostly to the bit. The default backend makes loops of its own, whose sums are
taken in another order: 1e-6 in float32, some ten roundings of weights of size one over a few batches.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from avgpipe import Compile, Pipeline, Plan, StageError
from avgpipe.model.compiled import is_compiled
from avgpipe.model.compiler import Compiler, compile_options, described
from avgpipe.model.context import Carry
from avgpipe.model.layers import layers_of
from avgpipe.model.tracing import TracedLayer
from tests.options import grouped
from tests.runner import run
from tests.runtime.capture_rules import capture_rules
from tests.runtime.cases import adamw, assert_same_state, language_model, momentum, token_batches, unequal
from tests.runtime.norms import image_batches, image_model, slow_training

# torch.compile does not work where operators are noted.
pytestmark = pytest.mark.host

LOSS = nn.CrossEntropyLoss()


@pytest.fixture(autouse=True)
def _compiler_as_new() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Backend:
    """Runs what it is given as it is, and counts."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any, **_: Any) -> Any:
        self.graphs += 1
        return graph.forward


def train(model: Any, plan: Plan, batches: list[Any], **options: Any) -> tuple[list[float], Any]:
    options = {"loss_fn": LOSS, "optimizer": momentum, **options}
    with Pipeline(model, plan, **grouped(**options)) as p:
        losses = [r.loss for r in p.train(batches)]
        state = p.state_dict()
    return losses, state


def compare(model: Any, plan: Plan, batches: list[Any], bound: float = 1e-10, **options: Any) -> Any:
    """Compiled training against plain; the compiled state, and how many graphs there were where they are counted."""
    compiling = options.pop("compile", None)
    backend = Backend()
    losses, state = train(model, plan, batches, compile=compiling or {"backend": backend}, **options)
    expected_losses, expected = train(model, plan, batches, **options)
    assert unequal(losses, expected_losses) < bound
    assert_same_state(state, expected, bound)
    assert compiling or backend.graphs > 0
    return state, backend.graphs


# ---- equality ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_weights_are_those_of_plain_layers_for_any_number_of_stages(K: int) -> None:
    # tied weights, pytrees between layers, an in-place activation, uneven micro-batches, a short last batch
    compare(
        language_model(frozen=True),
        Plan(stages=K, micro_batches=4),
        token_batches(4, 9, last=5),
        compile={"backend": "aot_eager"},
    )


def check_on_ranks() -> str:
    compare(
        language_model(),
        Plan(stages=2, micro_batches=4),
        token_batches(3, 9, last=5),
        compile={"backend": "aot_eager"},
    )
    options = {"backend": "eager", "dynamic": os.environ["RANK"] == "1"}
    with pytest.raises(ValueError, match="compile differs between ranks") as caught:
        train(language_model(), Plan(stages=2), token_batches(1, 4), compile=options)
    return str(caught.value)


@pytest.mark.ranks
@pytest.mark.slow
def test_on_ranks() -> None:
    assert "'dynamic': True" in run(2, check_on_ranks)[1]


PLANS = {
    "gpipe": {"schedule": "all-forward-all-backward"},
    "recompute": {"recompute": "always"},
    "recompute-except-last": {"recompute": "except-last"},
    "zero-bubble": {"schedule": "zero-bubble-h1"},
    "dualpipe": {"schedule": "dualpipe-v"},
    "stash": {"schedule": "pipedream", "weights": "stash"},
    "vertical-sync": {"schedule": "pipedream", "weights": "vertical-sync"},
    "double-buffer": {"schedule": "pipedream-2bw", "weights": "double-buffer"},
    "elastic": {"pipelines": 2, "staleness": 1},
    "elastic, in one pass": {"pipelines": 2, "staleness": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_weights_are_those_of_plain_layers_under_every_plan(name: str) -> None:
    plan = Plan(stages=2, micro_batches=3, **PLANS[name])
    compare(
        language_model(), plan, token_batches(8, 6, last=5), compile={"backend": "aot_eager"}, optimizer=adamw
    )


@pytest.mark.grid(1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dropout_draws_what_plain_layers_draw(backend: str) -> None:
    batches = token_batches(4, 8)
    ends = [
        compare(
            language_model(dropout=0.4),
            Plan(stages=K, micro_batches=3),
            batches,
            compile={"backend": backend},
        )
        for K in (1, 3)
    ]
    assert_same_state(ends[0][0], ends[1][0])


def test_autocast_and_float32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    batches = [(torch.randn(6, 8), torch.randint(3, (6,))) for _ in range(3)]
    compare(model, Plan(stages=2, micro_batches=2), batches, 1e-6, autocast=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
@pytest.mark.ranks
@pytest.mark.usefixtures("default_backend")
def test_the_default_backend() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 3))
    batches = [(torch.randn(n, 8), torch.randint(3, (n,))) for n in (6, 5)]
    compare(model, Plan(stages=2, micro_batches=2), batches, 1e-6, compile=True)
    model.insert(1, nn.Dropout(0.5))  # its own random numbers, keyed as ever
    ends = [train(model, Plan(stages=K, micro_batches=2), batches, compile=True)[1] for K in (1, 2)]
    assert_same_state(ends[0], ends[1], 1e-6)


# ---- what is compiled, and how often -------------------------------------------------------------------------------


def counted(model: Any, batches: list[Any], plan: Plan, **options: Any) -> int:
    torch.compiler.reset()
    backend = Backend()
    train(model, plan, batches, compile={"backend": backend, **options})
    return backend.graphs


class Carrying(nn.Module):
    """A recurrence over batches, which is in no graph but for what is between reading and writing."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.carry = layer, Carry()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.carry.get()
        y = torch.tanh(self.layer(x) + (0.0 if before is None else before.mean(0)))
        self.carry.set(y.detach())
        return y


def carrying_model() -> nn.Sequential:
    torch.manual_seed(2)
    layers = [nn.Embedding(11, 8), Carrying(nn.Linear(8, 8)), Carrying(nn.Linear(8, 8)), nn.Linear(8, 11)]
    return nn.Sequential(*layers).double()


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"recompute": "always"}, {"pipelines": 2}], ids=str)
@pytest.mark.parametrize("name", ["plain", "batch norm", "carry"])
def test_no_batch_is_compiled_for_itself(name: str, plan: dict[str, Any]) -> None:
    make, batches = {
        "plain": (language_model, token_batches(24, 6)),
        "batch norm": (lambda: image_model(twice=True), image_batches(24)),
        "carry": (carrying_model, token_batches(24, 6)),
    }[name]
    shape = Plan(stages=2, micro_batches=3, **plan)
    few, many = (counted(make(), batches[:n], shape) for n in (6, 24))
    assert few == many
    compare(make(), shape, batches[:8])


@pytest.mark.slow
def test_statistics_of_batch_norm_are_in_the_graph() -> None:
    batches = image_batches(4, last=11)
    for recompute in ("never", "always"):
        plan = Plan(stages=2, micro_batches=3, recompute=recompute)
        _, state = train(
            image_model(twice=True), plan, batches, compile={"backend": "aot_eager", "fullgraph": True}
        )
        assert_same_state(state, slow_training(image_model(twice=True), batches, 3)[1])


class Checkpointed(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=False)


def test_a_layer_that_recomputes_of_its_own_accord_is_counted_once() -> None:
    layers = list(image_model())
    model = nn.Sequential(layers[0], Checkpointed(*layers[1:4]), *layers[4:])
    compare(model, Plan(stages=2, micro_batches=3), image_batches(3), compile={"backend": "aot_eager"})


def test_layers_that_look_alike_are_compiled_once() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(12)]
    model = nn.Sequential(*blocks, nn.Linear(8, 3)).double()
    batches = [(torch.randn(6, 8, dtype=torch.float64), torch.randint(3, (6,))) for _ in range(4)]
    # the first block's input wants no gradient
    assert counted(model, batches, Plan(stages=3, pipelines=2, micro_batches=2)) == 3


def test_many_layers_that_differ_are_all_compiled() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(n, n + 1) for n in range(3, 17))).double()
    batches = [(torch.randn(6, 3, dtype=torch.float64), torch.randint(17, (6,))) for _ in range(3)]
    assert counted(model, batches, Plan(stages=2, micro_batches=2)) == 14


class Branching(nn.Module):
    """Traced into more pieces than torch.compile keeps variants of one function."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(10)])
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.enter(x)
        h = first
        for block in self.blocks:
            h = torch.tanh(block(h)) + 0.1 * first
        return self.leave(self.norm(h))


def branching() -> tuple[Branching, list[Any]]:
    torch.manual_seed(4)
    batches = [(torch.randn(n, 6, dtype=torch.float64), torch.randint(3, (n,))) for n in (8, 8, 7)]
    return Branching().double(), batches


@pytest.mark.slow
def test_traced_models() -> None:
    model, batches = branching()
    plan = Plan(stages=3, pipelines=1, micro_batches=2)
    state, graphs = compare(model, plan, batches)
    assert graphs > 10
    model.load_state_dict(state, strict=True)


def test_a_list_of_layers() -> None:
    layers = list(language_model())
    state, _ = compare(layers, Plan(stages=2, micro_batches=2), token_batches(2, 4))
    nn.ModuleList(layers).load_state_dict(state, strict=True)


def test_hooks_of_layers_are_called() -> None:
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    train(
        model,
        Plan(micro_batches=2),
        [(torch.ones(2, 4), torch.zeros(2).long())] * 3,
        compile={"backend": "eager"},
        check="off",  # which calls them once more
    )
    assert len(seen) == 6


# ---- using the pipeline --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("N", [1, 2])
def test_evaluation_saving_and_loading(N: int, tmp_path: Path) -> None:
    plan, batches, held_out = (
        Plan(stages=2, pipelines=N, micro_batches=3),
        image_batches(8),
        image_batches(2, seed=5),
    )
    options = {"loss_fn": LOSS, "optimizer": adamw}
    with Pipeline(image_model(), plan, **grouped(**options)) as p:
        list(p.train(batches))
        expected, loss = p.state_dict(), p.evaluate(held_out).loss
    with Pipeline(image_model(), plan, **grouped(**options, compile={"backend": "aot_eager"})) as p:
        for result in p.train(batches[:4]):
            if result.batch in (0, 2):
                p.evaluate(held_out)
                p.predict(held_out[0][0])
        p.save(tmp_path / "c")
    with Pipeline(image_model(), plan, **grouped(**options, compile={"backend": "eager"})) as p:
        p.load(tmp_path / "c")
        list(p.train(batches[4:]))
        assert abs(p.evaluate(held_out).loss - loss) < 1e-10
        state = p.state_dict()
    assert_same_state(state, expected)
    model = image_model().eval()
    model.load_state_dict(state, strict=True)
    with Pipeline(image_model(), plan, **grouped(**options)) as p:
        p.load(tmp_path / "c")  # compiled or not, a checkpoint is the same


def test_capturing_compiled_layers() -> None:
    plan, batches = Plan(stages=2, micro_batches=3), token_batches(5, 6)
    expected = train(language_model(), plan, batches)
    backend = Backend()
    with capture_rules() as device:
        losses, state = train(language_model(), plan, batches, compile={"backend": backend}, cuda_graphs=True)
    assert backend.graphs > 0
    assert [graph.replays for graph in device.graphs] == [3]
    assert losses == expected[0]
    assert_same_state(state, expected[1])


# ---- models that come compiled -------------------------------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def chain() -> tuple[nn.Sequential, list[Any]]:
    torch.manual_seed(6)
    layers = [nn.Linear(6, 8), Nested(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))), nn.Linear(8, 3)]
    batches = [(torch.randn(n, 6, dtype=torch.float64), torch.randint(3, (n,))) for n in (8, 8, 7)]
    return nn.Sequential(*layers).double(), batches


def _itself(model: nn.Sequential, backend: Any) -> Any:
    model[1].compile(backend=backend)
    return model


def _nested(model: nn.Sequential, backend: Any) -> Any:
    model[1].inner.compile(backend=backend)
    return model


def _wrapped(model: nn.Sequential, backend: Any) -> Any:
    model[1] = torch.compile(model[1], backend=backend)
    return model


def _nested_wrapped(model: nn.Sequential, backend: Any) -> Any:
    model[1].inner = torch.compile(model[1].inner, backend=backend)
    return model


def _whole(model: nn.Sequential, backend: Any) -> Any:
    model.compile(backend=backend)
    return model


def _whole_wrapped(model: nn.Sequential, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def _list_of_wrapped(model: nn.Sequential, backend: Any) -> Any:
    return [torch.compile(layer, backend=backend) for layer in model]


WAYS = [_itself, _nested, _wrapped, _nested_wrapped, _whole, _whole_wrapped, _list_of_wrapped]


@pytest.mark.grid(4)
@pytest.mark.parametrize("pipelines", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_modules_that_come_compiled_stay_so(way: Any, pipelines: int) -> None:
    (model, batches), backend = chain(), Backend()
    plan = Plan(stages=2, micro_batches=2, pipelines=pipelines)
    _, expected = train(model, plan, batches)
    given = way(model, backend)
    whole = nn.ModuleList(given) if isinstance(given, list) else given
    own = whole.state_dict()
    before = {name: value.clone() for name, value in own.items()}
    _, state = train(given, plan, batches)
    assert 1 <= backend.graphs <= (4 if "whole" not in way.__name__ and "list" not in way.__name__ else 12)
    assert list(state) == list(own)
    for value, theirs in zip(state.values(), expected.values()):
        torch.testing.assert_close(value, theirs, rtol=1e-10, atol=1e-10)
    # what was passed in is as it was, still compiled, and takes what was learnt
    assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())
    assert any(is_compiled(module) for module in whole.modules())
    whole.load_state_dict(state, strict=True)


def test_a_module_s_own_options_come_before_the_pipeline_s() -> None:
    (model, batches), own, other = chain(), Backend(), Backend()
    model[0].compile(backend=own)
    train(model, Plan(micro_batches=2), batches, compile={"backend": other})
    assert own.graphs
    assert other.graphs


class Breaking(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x


@pytest.mark.parametrize("way", [_itself, _wrapped, _nested_wrapped])
def test_all_options_stay(way: Any) -> None:
    model, batches = chain()
    model[1].inner = Breaking()
    fullgraph = {"backend": "eager", "fullgraph": True}
    if way is _itself:
        model[1].compile(**fullgraph)
    elif way is _wrapped:
        model[1] = torch.compile(model[1], **fullgraph)
    else:
        model[1].inner = torch.compile(model[1].inner, **fullgraph)
    with pytest.raises(
        StageError, match=r"stage 0, layer 1 \(Nested\) failed .*torch.compile: Data-dependent"
    ):
        train(model, Plan(), batches)


def test_a_module_that_is_kept_from_the_compiler_stays_so() -> None:
    (model, batches), backend = chain(), Backend()
    model[0], model[2] = torch.compiler.disable(model[0]), torch.compiler.disable(model[2])
    _, state = train(model, Plan(micro_batches=2), batches, compile={"backend": backend})
    assert backend.graphs
    assert list(state) == list(model.state_dict())
    (model, _), backend = chain(), Backend()
    for n in (0, 1, 2):
        model[n] = torch.compiler.disable(model[n])
    train(model, Plan(micro_batches=2), batches, compile={"backend": backend})
    assert not backend.graphs


@pytest.mark.grid(1)
@pytest.mark.parametrize("way", ["layer", "wrapped layer", "whole", "whole wrapped"])
def test_traced_models_that_come_compiled(way: str) -> None:
    model, batches = branching()
    model.enter, plan = Nested(model.enter), Plan(stages=2, micro_batches=2)
    _, expected = train(model, plan, batches)
    given, backend = model, Backend()
    if way == "layer":
        model.enter.compile(backend=backend)
    elif way == "wrapped layer":
        model.enter = torch.compile(model.enter, backend=backend)
    elif way == "whole":
        model.compile(backend=backend)
    else:
        given = torch.compile(model, backend=backend)
    assert all(isinstance(layer, TracedLayer) for layer in layers_of(given))
    _, state = train(given, plan, batches)
    assert backend.graphs
    for value, theirs in zip(state.values(), expected.values()):
        torch.testing.assert_close(value, theirs, rtol=1e-10, atol=1e-10)
    given.load_state_dict(state, strict=True)


def test_a_compiled_forward_is_refused() -> None:
    model, _ = chain()
    model[1].forward = torch.compile(model[1].forward, backend="eager")
    with pytest.raises(
        ValueError, match=r"Nested.forward was replaced by .* call module.compile\(\) instead"
    ):
        Pipeline(model, Plan(), loss_fn=LOSS, optimizer=momentum)


# ---- transformers --------------------------------------------------------------------------------------------------


@pytest.mark.grid(1)
@pytest.mark.parametrize("way", ["blocks", "whole", "option"])
def test_models_of_transformers(way: str) -> None:
    from tests.interop.models import batches, build, loss_of

    model = build("LlamaForCausalLM")
    plan, given = Plan(stages=2, micro_batches=2), batches()
    _, expected = train(model, plan, given, loss_fn=loss_of)
    backend = Backend()
    if way == "blocks":
        for block in model.model.layers:
            block.compile(backend=backend)
    handed = torch.compile(model, backend=backend) if way == "whole" else model
    options = {"compile": {"backend": backend}} if way == "option" else {}
    _, state = train(handed, plan, given, loss_fn=loss_of, **options)
    assert backend.graphs
    # its norm rounds to float32 on the way
    for value, theirs in zip(state.values(), expected.values()):
        torch.testing.assert_close(value, theirs, rtol=1e-6, atol=1e-6)
    assert list(state) == list(handed.state_dict())
    handed.load_state_dict(state, strict=True)


# ---- what is refused, and what fails -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"bakend": "eager"}, ValueError, "takes no 'bakend': did you mean 'backend'"),
        ({"model": nn.Linear(1, 1)}, ValueError, "takes no 'model'"),
        ({"backend": "nonsense"}, ValueError, "torch.compile refuses it: .*nonsense"),
        ({"backend": 3}, TypeError, "backend=3 is neither a name nor a function"),
        ({"mode": "fast"}, ValueError, "torch.compile refuses it: .*fast.*reduce-overhead"),
        ({"mode": "default", "options": {"debug": True}}, ValueError, "refuses it: Either mode or options"),
        ({"options": {"no such thing": 1}}, ValueError, "refuses it: .*no such thing"),
    ],
)
def test_wrong_values_are_refused_at_once(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Pipeline(language_model(), Plan(), loss_fn=LOSS, optimizer=momentum, extensions=[Compile(**given)])


def test_options_are_read_as_torch_compile_s() -> None:
    assert compile_options({}) == {}
    # Sizes that are fixed in the graph: what runs again must save what the first forward saved.
    assert compile_options({}, "always") == {"dynamic": False}
    assert compile_options({"dynamic": None}, "always") == {"dynamic": None}
    filtering = {"options": {"guard_filter_fn": lambda guards: [True for _ in guards]}}
    compile_options(filtering)
    assert filtering["options"]
    assert (
        described({"mode": None, "backend": train})
        == "compile={'backend': tests.runtime.test_compile.train, 'mode': None}"
    )
    assert described(None) == "compile=False"


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune"},
        {"options": {"triton.cudagraphs": True}},
        {"backend": "cudagraphs"},
    ],
    ids=str,
)
def test_cuda_graphs_of_the_compiler_are_refused_where_there_are_any(options: dict[str, Any]) -> None:
    model, _ = chain()
    refused = pytest.raises(ValueError, match="use mode 'max-autotune-no-cudagraphs' or none")
    with refused:
        Compiler(compile_options(options)).refuse_cuda_graphs(list(model))
    with refused:
        Compiler(None, torch.compile(model, **options)).refuse_cuda_graphs(list(model))
    model[1].inner.compile(**options)
    with refused:
        Compiler().refuse_cuda_graphs(list(model))
    Compiler(compile_options({"mode": "max-autotune-no-cudagraphs"})).refuse_cuda_graphs(list(chain()[0]))
    Compiler(compile_options({})).refuse_cuda_graphs(list(chain()[0]))
    Compiler().refuse_cuda_graphs(list(chain()[0]))


def test_errors_in_compiled_layers_name_stage_layer_and_reason() -> None:
    def failing(graph: Any, inputs: Any) -> Any:
        raise AssertionError("no such instruction")

    class Refusing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("too long")

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * self.calls

    one = {"backend": "eager", "fullgraph": True}
    cases = [
        (
            nn.Linear(5, 4),
            {"backend": "eager"},
            r"torch.compile: RuntimeError .*must have same reduction dim",
        ),
        (nn.Linear(4, 4), {"backend": failing}, "torch.compile: AssertionError: no such instruction"),
        (Refusing(), {"backend": "eager"}, "too long"),
        (Breaking(), one, "torch.compile: Data-dependent branching"),
        (Counter(), one, "torch.compile: .*fullgraph=True"),
    ]
    batches = [(torch.ones(2, 4), torch.zeros(2).long())] * 12
    for layer, options, reason in cases:
        model = nn.Sequential(torch.compiler.disable(nn.Linear(4, 4)), layer)
        name = type(layer).__name__
        with pytest.raises(StageError, match=rf"stage 1, layer 1 \({name}\) failed on .*: {reason}"):
            train(model, Plan(stages=2), batches, compile=options)
