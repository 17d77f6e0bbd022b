"""Backwards in two parts against whole ones: the same gradients, and no product computed twice."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from avgpipe.links.link import tensors_of
from avgpipe.runtime import split_backward
from avgpipe.runtime.compute import run_backward
from avgpipe.runtime.split_backward import Deferred, input_backward


class Call(nn.Module):
    """``function`` of its layers and the inputs."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        self.parts: list[Any] = list(layers)
        for n, layer in enumerate(layers):
            setattr(self, f"p{n}", layer)

    def forward(self, *inputs: Any) -> Any:
        return self.function(*(getattr(self, f"p{n}") for n in range(len(self.parts))), *inputs)


def vector(*shape: int, seed: int = 3, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def wanting(*shape: int, **options: Any) -> torch.Tensor:
    return vector(*shape, **options).requires_grad_()


def weight(*shape: int, seed: int = 5) -> nn.Parameter:
    return nn.Parameter(vector(*shape, seed=seed))


def lin(inputs: int = 6, outputs: int = 6, **options: Any) -> nn.Linear:
    return nn.Linear(inputs, outputs, dtype=torch.float64, **options)


def forward(layers: nn.Module, inputs: Sequence[Any], seed: int = 0) -> tuple[list[GradientEdge], list[Any]]:
    """Edges of the outputs that want a gradient, and their gradients."""
    torch.manual_seed(seed)
    outputs = [t for t in tensors_of(layers(*inputs)) if t.requires_grad]
    grads = [vector(*t.shape, seed=n, dtype=t.dtype) for n, t in enumerate(outputs)]
    return [get_gradient_edge(t) for t in outputs], grads


def leaves_of(inputs: Sequence[Any]) -> list[torch.Tensor]:
    return [t for t in tensors_of(list(inputs)) if t.requires_grad]


def fresh(inputs: Sequence[Any]) -> list[Any]:
    return [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in inputs
    ]


def assert_same(mine: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert (mine is None) == (expected is None)
    if mine is not None and expected is not None:
        assert torch.equal(mine, expected)


def split_and_whole(layers: nn.Module, inputs: Sequence[Any]) -> tuple[set[str], set[str]]:
    """Compare both; returns the names of parameters that got their gradients in I and in W."""
    reference, theirs, mine = copy.deepcopy(layers), fresh(inputs), fresh(inputs)
    run_backward(*forward(reference, theirs))
    deferred = input_backward(*forward(layers, mine), leaves_of(mine))
    now = {name for name, p in layers.named_parameters() if p.grad is not None}
    if leaves_of(mine):
        for x, y in zip(leaves_of(mine), leaves_of(theirs)):
            assert_same(x.grad, y.grad)
    deferred.run()
    late = {name for name, p in layers.named_parameters() if p.grad is not None} - now
    for x, y in zip(leaves_of(mine), leaves_of(theirs)):
        assert_same(x.grad, y.grad)
    for p, q in zip(layers.parameters(), reference.parameters()):
        assert_same(p.grad, q.grad)
    deferred.run()  # nothing is left
    for p, q in zip(layers.parameters(), reference.parameters()):
        assert_same(p.grad, q.grad)
    return now, late


class Product(torch.autograd.Function):
    """x @ w; refuses to run its backward twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.runs = 0
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.runs += 1
        assert ctx.runs == 1
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(None, x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _, x = ctx.saved_tensors
        s = x.sigmoid()
        return grad * (s + x * s * (1 - s))


def recurrence(cell: nn.Linear, x: torch.Tensor) -> list[torch.Tensor]:
    h, states = torch.zeros_like(x), []
    for _ in range(4):
        h = torch.tanh(cell(h) + x)
        states.append(h)
    return states


def into_a_slice(layer: nn.Linear, row: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(x.shape[0] + 1, 6, dtype=x.dtype)
    buffer[1:] = layer(x)
    buffer[0] = row
    buffer[1:].mul_(2)
    return buffer


def two_heads(a: nn.Linear, b: nn.Linear, ids: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
    rows = x[ids]
    return {"sum": a(rows) + b(y[ids]), "rows": rows * 2, "ids": ids, "other": (b(y), 3)}


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def no_bias_gradient(layer: nn.Linear) -> nn.Linear:
    assert layer.bias is not None
    layer.bias.requires_grad_(False)
    return layer


def normed(layer: nn.Linear) -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(layer)


def attention() -> nn.Module:
    return nn.MultiheadAttention(6, 2, **ATTENTION)


def decoder_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(6, 2, 8, **ATTENTION)


def embedding() -> nn.Embedding:
    return nn.Embedding(4, 6, **F64)


def conv(inputs: int, outputs: int, size: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, size, **F64)


def learned_query(query: nn.Parameter, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    query = query.expand(3, 1, 4, 6)
    return functional.scaled_dot_product_attention(query, layer(x)[:, None], x[:, None])


def recomputed(a: nn.Linear, b: nn.Linear, x: torch.Tensor, use_reentrant: bool = False) -> torch.Tensor:
    return b(checkpoint(lambda v: a(v).tanh(), x, use_reentrant=use_reentrant))


F64: Any = {"dtype": torch.float64}
IDS = torch.tensor([1, 0, 3, 1])
X, Y = wanting(4, 6), wanting(4, 6, seed=9)
SEQUENCE, MEMORY = wanting(3, 4, 6), wanting(3, 5, 6, seed=9)
IMAGE = wanting(3, 2, 5, 5)
ATTENTION: Any = {"dropout": 0.3, "batch_first": True, "dtype": torch.float64}
RECURRENT = {f"{kind}_hh_l{layer}" for kind in ("weight", "bias") for layer in range(2)}
SHARED = {"p0.weight", "p0.bias"}

# Layers, inputs, and which parameters get their gradients in I; all others get theirs in W.
Case = tuple[Callable[[], nn.Module], list[Any], set[str]]
# fmt: off
CASES: dict[str, Case] = {
    "linear": (lin, [X], set()),
    "no bias": (lambda: nn.Sequential(lin(bias=False), nn.Tanh(), lin(bias=False)), [X], set()),
    "three dimensions": (lambda: nn.Sequential(lin(), nn.GELU(), lin(6, 2)), [SEQUENCE], set()),
    "softmax, dropout": (lambda: nn.Sequential(lin(), nn.Softmax(-1), nn.Dropout(0.5), lin()), [X], set()),
    "convolutions": (lambda: nn.Sequential(conv(2, 3, 3), nn.ReLU(inplace=True), conv(3, 2, 2)), [IMAGE], set()),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 3, bias=False, **F64), [IMAGE], set()),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(6, **F64), lin(), nn.LayerNorm(6, **F64)), [X], set()),
    "rms norm": (lambda: nn.Sequential(nn.RMSNorm(6, **F64), lin()), [X], set()),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(1, 2, **F64), conv(2, 2, 1)), [IMAGE], set()),
    "batch norm": (lambda: nn.Sequential(conv(2, 3, 3), nn.BatchNorm2d(3, **F64)), [IMAGE], {"1.weight", "1.bias"}),
    "prelu": (lambda: nn.Sequential(lin(), nn.PReLU(**F64)), [X], {"1.weight"}),
    "embedding first": (lambda: nn.Sequential(embedding(), lin(), nn.Dropout(0.2)), [IDS], set()),
    "embedding added": (lambda: Call(lambda e, x: x + e(IDS), embedding()), [X], set()),
    "tied": (lambda: Call(lambda e, a, x: a(x + e(IDS)) @ e.weight.T, embedding(), lin()), [X], {"p0.weight"}),
    "residual": (lambda: Call(lambda a, b, x: x + b(torch.tanh(a(x))), lin(), lin()), [X], set()),
    "scale and shift": (lambda: Call(lambda w, b, x: x * w + b, weight(6), weight(4, 1)), [X], set()),
    "several inputs and outputs": (lambda: Call(two_heads, lin(), lin()), [IDS, X, Y], set()),
    "one input wants nothing": (lambda: Call(lambda a, b, x, y: a(x) + b(y), lin(), lin()), [X, Y.detach()], set()),
    "input not used": (lambda: Call(lambda a, x, y: a(y), lin()), [X, Y.detach()], set()),
    "weight not used": (lambda: Call(lambda a, b, x: a(x), lin(), lin()), [X], set()),
    "input passed through": (lambda: Call(lambda a, x: (x, a(x), x), lin()), [X], set()),
    "nothing but inputs": (lambda: Call(lambda x, y: (y, x)), [X, SEQUENCE], set()),
    "outputs from weights alone": (lambda: Call(lambda a, w, x: (a(x), w * 2, w), lin(), weight(3)), [X], set()),
    "views": (lambda: Call(lambda a, x: (*a(x).chunk(2, -1), a.weight.T, x[1:].t()), lin()), [X], set()),
    "used twice in a chain": (lambda: Call(lambda a, b, x: a(b(a(x).tanh()).tanh()), lin(), lin()), [X], SHARED),
    "used twice side by side": (lambda: Call(lambda a, x, y: a(x) * a(y.exp()).tanh(), lin()), [X, Y], set()),
    "recurrence": (lambda: Call(lambda a, b, x: recurrence(a, b(x)), lin(), lin()), [X], SHARED),
    "lstm": (lambda: nn.LSTM(6, 3, 2, dropout=0.3, **F64), [SEQUENCE], RECURRENT),
    "attention": (lambda: Call(lambda a, x: a(x, x, x), attention()), [SEQUENCE], set()),
    "cross attention": (lambda: Call(lambda a, x, y: a(x.tanh(), y, y), attention()), [SEQUENCE, MEMORY], set()),
    "learned query": (lambda: Call(learned_query, weight(4, 6), lin()), [SEQUENCE], {"p0"}),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, **ATTENTION), [SEQUENCE], set()),
    "decoder layers": (lambda: nn.TransformerDecoder(decoder_layer(), 2), [SEQUENCE, MEMORY], set()),
    "custom product": (lambda: Call(lambda w, a, x: a(Product.apply(x, w)), weight(6, 6), lin()), [X], {"p0"}),
    "custom activation": (lambda: Call(lambda a, b, x: b(Swish.apply(a(x))), lin(), lin()), [X], set()),
    "into slices": (lambda: Call(into_a_slice, lin(), weight(6)), [X], set()),
    "in place": (lambda: Call(lambda a, b, x: b(a(x).tanh_()).mul_(2).relu_(), lin(), lin()), [X], set()),
    "bias frozen": (lambda: nn.Sequential(no_bias_gradient(lin()), nn.Tanh(), lin()), [X], set()),
    "layer frozen": (lambda: nn.Sequential(lin(), nn.Tanh(), frozen(lin()), nn.GELU(), lin()), [X], set()),
    "all frozen": (lambda: frozen(nn.Sequential(lin(), nn.GELU(), lin())), [X], set()),
    "weight norm": (lambda: nn.Sequential(normed(lin()), nn.Tanh(), normed(lin())), [X], set()),
    "recomputed in part": (lambda: Call(recomputed, lin(), lin()), [X], SHARED),
    "recomputed by a backward in a backward": (
        lambda: Call(lambda a, b, x: recomputed(a, b, x, use_reentrant=True), lin(), lin()),
        [X],
        SHARED | {"p1.weight", "p1.bias"},
    ),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_the_parts_make_the_whole(name: str) -> None:
    make, inputs, expected = CASES[name]
    torch.manual_seed(1)
    now, late = split_and_whole(make().train(), inputs)
    assert now == expected
    assert late or expected or name in ("nothing but inputs", "all frozen")


# ---- what each part computes -------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def counted(function: Callable[..., Any], *args: Any) -> tuple[Any, Counter[str]]:
    with Operators() as operators:
        result = function(*args)
    return result, operators.counts


def mlp(layers: int) -> nn.Module:
    return nn.Sequential(*[layer for _ in range(layers) for layer in (lin(), nn.GELU())])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_a_linear_layer_costs_one_product_in_each_part(layers: int, first: bool) -> None:
    x = vector(4, 6).requires_grad_(not first)
    edges, grads = forward(mlp(layers), [x])
    deferred, now = counted(input_backward, edges, grads, leaves_of([x]))
    _, late = counted(deferred.run)
    product = "aten.mm.default"
    # the first stage: no input wants a gradient, so all waits, and the first layer's product is not needed at all
    assert (now[product], late[product]) == ((0, 2 * layers - 1) if first else (layers, layers))


@pytest.mark.parametrize(
    "name",
    ["linear", "softmax, dropout", "used twice in a chain", "recurrence", "tied", "residual", "attention"],
)
def test_nothing_is_computed_twice(name: str) -> None:
    layers, inputs = CASES[name][0](), fresh(CASES[name][1])
    _, whole = counted(run_backward, *forward(copy.deepcopy(layers), fresh(inputs)))
    deferred, now = counted(input_backward, *forward(layers, inputs), leaves_of(inputs))
    _, late = counted(deferred.run)
    moved = {"aten.detach.default"}  # how tensors come and go
    assert {k: n for k, n in (now + late).items() if k not in moved} == {
        k: n for k, n in whole.items() if k not in moved
    }


def test_the_engine_runs_once_for_each_depth_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    engine = split_backward._engine_run_backward
    monkeypatch.setattr(
        split_backward, "_engine_run_backward", lambda *args, **kw: (runs.append(args), engine(*args, **kw))
    )
    heads = Call(
        lambda q, k, v, o, x: o(torch.sigmoid(q(x)) * k(x) + v(x).tanh()), *[lin() for _ in range(4)]
    )
    x = wanting(4, 6)
    input_backward(*forward(heads, [x]), [x]).run()
    assert len(runs) == 3  # I; o; q, k and v together


def test_without_inputs_all_waits() -> None:
    layers = nn.Sequential(nn.Embedding(4, 6, **F64), lin())
    deferred, now = counted(input_backward, *forward(layers, [IDS]), [])
    assert not now
    assert all(p.grad is None for p in layers.parameters())
    deferred.run()
    assert all(p.grad is not None for p in layers.parameters())


def test_nothing_to_do() -> None:
    deferred = input_backward([], [], [wanting(3)])
    assert isinstance(deferred, Deferred)
    deferred.run()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_recomputation_happens_once(inside: bool, first: bool) -> None:
    forwards = []

    def block(x: torch.Tensor) -> torch.Tensor:
        forwards.append(1)
        return torch.tanh(layers[1](torch.tanh(layers[0](x))))

    layers = nn.ModuleList([lin() for _ in range(4)])
    end = (lambda v: layers[3](torch.tanh(layers[2](v)))) if inside else (lambda v: v)
    stage = Call(lambda _, x: end(checkpoint(block, x, use_reentrant=False)), layers)
    x = vector(4, 6).requires_grad_(not first)
    deferred = input_backward(*forward(stage, [x]), leaves_of([x]))
    now = {name for name, p in layers.named_parameters() if p.grad is not None}
    deferred.run()
    assert len(forwards) == 2
    assert all((p.grad is not None) == (int(name[0]) < 2 or inside) for name, p in layers.named_parameters())
    assert now == (set() if first else {"0.weight", "0.bias", "1.weight", "1.bias"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_types(dtype: torch.dtype) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 6))
            self.lstm = nn.LSTM(6, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                return self.lstm(self.layers(x))[0]

    now, late = split_and_whole(Cast(), [wanting(2, 4, 6, dtype=torch.float32)])
    assert {name for name in now if name.startswith("layers")} == set()
    assert {name for name in late if name.startswith("layers")} != set()


# ---- around it ---------------------------------------------------------------------------------------------------


def test_hooks_of_leaves_run_once_in_the_part_that_fills_them() -> None:
    calls: list[str] = []
    layers, x = nn.Sequential(lin(), nn.Tanh(), lin(), nn.BatchNorm1d(6, **F64)), wanting(4, 6)
    for name, t in [("x", x), *layers.named_parameters()]:
        t.register_hook(lambda grad, name=name: calls.append(name) or grad * 2)
        t.register_post_accumulate_grad_hook(lambda t, name=name: calls.append(name + "!"))
    reference, y = copy.deepcopy(layers), x.detach().clone().requires_grad_()
    run_backward(*forward(reference, [y]))
    deferred = input_backward(*forward(layers, [x]), [x])
    assert sorted(calls) == sorted(["x", "x!", "3.weight", "3.weight!", "3.bias", "3.bias!"])
    calls.clear()
    deferred.run()
    assert sorted(calls) == sorted(
        n + e for n in ("0.weight", "0.bias", "2.weight", "2.bias") for e in ("", "!")
    )
    assert y.grad is not None
    assert_same(x.grad, 2 * y.grad)
    for p, q in zip(layers.parameters(), reference.parameters()):
        assert q.grad is not None
        assert_same(p.grad, 2 * q.grad)


def test_hooks_of_activations_count_once() -> None:
    def scaled(a: nn.Linear, b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        y = a(x)
        y.register_hook(lambda grad: grad * 3)
        z = torch.tanh(y)
        z.register_hook(lambda grad: grad - 1)
        return b(z)

    split_and_whole(Call(scaled, lin(), lin()), [X])


def test_hooks_of_modules_run_once() -> None:
    calls: list[int] = []
    layers, x = nn.Sequential(lin(), nn.GELU(), lin()), wanting(4, 6)
    for n, layer in enumerate(layers):
        layer.register_full_backward_hook(lambda module, theirs, grads, n=n: calls.append(n))
    deferred = input_backward(*forward(layers, [x]), [x])
    deferred.run()
    assert calls == [2, 1, 0]


@pytest.mark.parametrize("order", ["I0 I1 W0 W1", "I0 W0 I1 W1", "I0 I1 W1 W0", "I1 I0 W0 W1"])
def test_micro_batches_add_up_in_any_order(order: str) -> None:
    layers = nn.Sequential(lin(), nn.GELU(), nn.BatchNorm1d(6, **F64), lin())
    reference, inputs = copy.deepcopy(layers), [wanting(4, 6, seed=20 + m) for m in range(2)]
    for m, y in enumerate(fresh(inputs)):
        run_backward(*forward(reference, [y], seed=m))
    forwards = [forward(layers, [x], seed=m) for m, x in enumerate(inputs)]
    waiting: dict[int, Deferred] = {}
    for kind, m in (action for action in order.split()):
        if kind == "I":
            waiting[int(m)] = input_backward(*forwards[int(m)], [inputs[int(m)]])
        else:
            waiting.pop(int(m)).run()
    for p, q in zip(layers.parameters(), reference.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)


class Watched(torch.autograd.Function):
    """Copies its input into memory whose end can be seen."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[Any]) -> torch.Tensor:
        memory = np.array(x.detach().numpy())
        seen.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


@pytest.mark.parametrize("activation", [functional.gelu, Swish.apply], ids=["built-in", "custom"])
def test_what_only_inputs_needed_is_free_after_the_first_part(activation: Any) -> None:
    seen: list[Any] = []

    def stage(a: nn.Linear, b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(b(Watched.apply(activation(Watched.apply(a(Watched.apply(x, seen)), seen)), seen)))

    x = wanting(4, 6)
    layers = Call(stage, lin(), lin())
    edges, grads = forward(layers, [x])
    gradient = weakref.ref(grads[0])
    assert all(memory() is not None for memory in seen)
    deferred = input_backward(edges, grads, [x])
    del edges, grads
    assert [memory() is not None for memory in seen] == [True, False, True]
    assert gradient() is None  # exp's; what reached the Linear before it waits
    deferred.run()
    assert [memory() is not None for memory in seen] == [False, False, False]


def test_forgetting_the_second_part_frees_everything() -> None:
    seen: list[Any] = []
    x, layer = wanting(4, 6), lin()
    stage = Call(lambda a, x: a(Watched.apply(x, seen)).relu(), layer)
    deferred = input_backward(*forward(stage, [x]), [x])
    assert seen[0]() is not None
    del deferred
    assert seen[0]() is None


def test_an_overwritten_activation_is_refused() -> None:
    x, kept = wanting(4, 6), []
    layers = Call(lambda a, x: (kept.append(torch.tanh(a(x))), kept[0] * 2)[1], lin())
    edges, grads = forward(layers, [x])
    with torch.no_grad():
        kept[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        input_backward(edges, grads, [x])


def test_saved_tensors_that_have_hooks_stay_with_them() -> None:
    x, layers = wanting(4, 6), mlp(2)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True), torch.from_numpy):
        edges, grads = forward(layers, [x])
    input_backward(edges, grads, [x]).run()
    reference, y = copy.deepcopy(layers), x.detach().clone().requires_grad_()
    reference.zero_grad()
    run_backward(*forward(reference, [y]))
    assert_same(x.grad, y.grad)
    for p, q in zip(layers.parameters(), reference.parameters()):
        assert_same(p.grad, q.grad)


def test_a_deep_graph_needs_no_deep_stack() -> None:
    def deep(a: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        x = a(x)
        for _ in range(3000):
            x = x + 1e-3
        return x

    _, late = split_and_whole(Call(deep, lin()), [X])
    assert late == {"p0.weight", "p0.bias"}


@pytest.mark.parametrize("x", [vector(2, 3), wanting(2, 3) * 1], ids=["no gradient", "not a leaf"])
def test_only_leaves_are_inputs(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"shape \[2, 3\].*detach"):
        input_backward([], [], [x])


# ---- any graph ---------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 40), st.integers(0, 40), st.integers(0, 3)), max_size=14
)


class Program(nn.Module):
    """Steps (what, of which value, of which other value, with which layer) on a growing list of values."""

    def __init__(self, steps: list[tuple[int, int, int, int]], outputs: int) -> None:
        super().__init__()
        self.steps, self.outputs = steps, outputs
        self.layers = nn.ModuleList(
            [lin(), lin(bias=False), nn.LayerNorm(6, **F64), nn.BatchNorm1d(6, **F64)]
        )
        self.vectors = nn.ParameterList([weight(6, seed=n) for n in range(4)])

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        values = [*inputs, self.vectors[0] * 2]
        for step in self.steps:
            values.append(self._step(values, *step))
        return values[-self.outputs :]

    def _step(self, values: list[torch.Tensor], what: int, one: int, other: int, layer: int) -> torch.Tensor:
        a, b = (values[n % len(values)].expand(4, 6) for n in (one, other))
        if what < 4:
            return self.layers[layer](a)
        if what == 4:
            return a * self.vectors[layer] + b
        if what == 5:
            return torch.tanh(a) + b
        if what == 6:
            return torch.cat([a[1:], torch.relu_(b[:1] * 1.5)])
        if what == 7:
            return torch.sin(Product.apply(a, torch.outer(self.vectors[layer], self.vectors[0])))
        if what == 8:
            return checkpoint(lambda v: torch.tanh(self.layers[layer](v)), a, use_reentrant=False)
        return Swish.apply(a)


@settings(max_examples=150)
@given(STEPS, st.integers(1, 4), st.integers(0, 7), st.integers(0, 255))
def test_any_graph(steps: list[tuple[int, int, int, int]], outputs: int, wanted: int, trained: int) -> None:
    torch.manual_seed(2)
    program = Program(steps, outputs)
    for n, p in enumerate(program.parameters()):
        p.requires_grad_(trained >> n % 8 & 1 == 1)
    inputs = [vector(4, 6, seed=n).requires_grad_(wanted >> n & 1 == 1) for n in range(3)]
    split_and_whole(program, inputs)


# ---- plans that are used again -------------------------------------------------------------------------------------


@pytest.fixture
def explored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Without plans. Each graph that is planned is in the list, by its number of nodes."""
    split_backward._plans.newest.clear()
    found: list[int] = []
    plan = split_backward._plan

    def noted(graph: Any, *arguments: Any) -> Any:
        found.append(len(graph.nexts))
        return plan(graph, *arguments)

    monkeypatch.setattr(split_backward, "_plan", noted)
    return found


def chain(a: nn.Module, b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(b(torch.relu(a(x))))


def test_a_graph_like_one_before_is_not_planned_again(explored: list[int]) -> None:
    layers = Call(chain, lin(), lin())
    for _ in range(3):
        assert split_and_whole(layers, [wanting(4, 6)]) == (
            set(),
            {"p0.weight", "p0.bias", "p1.weight", "p1.bias"},
        )
        layers.zero_grad()
    # Another micro-batch's size, and other layers alike
    split_and_whole(layers, [wanting(2, 6)])
    split_and_whole(Call(chain, lin(), lin()), [wanting(4, 6)])
    assert len(explored) == 1


# Pairs of functions whose graphs have the same kinds of nodes, and another plan.
ALIKE: dict[str, tuple[Any, Any]] = {
    "wiring": (
        lambda a, b, x: torch.relu(a(x)) + torch.relu(b(x)),
        lambda a, b, x: torch.relu(a(x)) + torch.relu(a(x)),
    ),
    "a weight used again in a chain": (chain, lambda a, b, x: chain(a, a, x)),
    "a weight that is frozen": (chain, lambda a, b, x: chain(a, b.requires_grad_(False), x)),
    "weights saved through hooks": (chain, lambda a, b, x: with_hooks(chain, a, b, x)),
    "another output": (chain, lambda a, b, x: (chain(a, b, x), a(x))),
    "outputs that are one": (lambda a, b, x: (a(x), b(x)), lambda a, b, x: (y := a(x), y)),
}


def with_hooks(function: Callable[..., Any], *arguments: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda kept: kept):
        return function(*arguments)


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("turned", [False, True])
def test_a_plan_is_for_graphs_of_its_shape_alone(explored: list[int], name: str, turned: bool) -> None:
    first, second = ALIKE[name][::-1] if turned else ALIKE[name]
    expected = []
    for function in (first, second):  # each planned anew
        split_backward._plans.newest.clear()
        expected.append(split_and_whole(Call(function, lin(), lin()), [wanting(4, 6)]))
    split_backward._plans.newest.clear()
    found = [split_and_whole(Call(f, lin(), lin()), [wanting(4, 6)]) for f in (first, second, first, second)]
    assert found[1::2] == [expected[1]] * 2 or name == "weights saved through hooks"  # less may be split then
    assert found[0::2] == [expected[0]] * 2 or name == "weights saved through hooks"


def test_a_plan_knows_which_leaves_are_inputs(explored: list[int]) -> None:
    layers = Call(lambda a, x, y: a(x) * y, lin())
    x, y = wanting(4, 6), wanting(4, 6)
    for wanted in ([x, y], [x], [y], [x, y]):
        edges, grads = forward(layers, [x, y])
        input_backward(edges, grads, wanted).run()
        assert all(t.grad is not None for t in wanted)
        x.grad = y.grad = None
    assert len(explored) == 3


def test_few_plans_are_kept_and_no_graph(explored: list[int]) -> None:
    for n in range(split_backward._KEPT_PLANS + 3):
        layers = nn.Sequential(*[lin() for _ in range(n + 1)])
        split_and_whole(layers, [wanting(2, 6)])
    assert len(split_backward._plans.newest) == split_backward._KEPT_PLANS
    x = wanting(2, 6)
    gone = weakref.ref(x)
    input_backward(*forward(layers, [x]), [x]).run()
    del x
    assert gone() is None
