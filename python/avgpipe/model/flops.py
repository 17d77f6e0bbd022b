"""Counts the operations of a forward and a backward of each layer, on tensors without values.

The count is arithmetic: it is the same on all ranks, takes no memory for activations, and draws no random
numbers. Matrix products, convolutions and attention count by their FLOPs, with torch's own formulas if they
exist. All other operators count by the bytes that they read and write: without these, layers with much data
and few weights, such as the first ones of a network for images, would appear cheaper than they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from avgpipe.errors import reason
from avgpipe.model.compiled import copied
from avgpipe.model.context import generators, in_mode, set_generators, without_logs

# On a CPU core, moving a byte in an elementwise operator takes about as long as this many FLOPs of a matrix
# product. On GPUs it takes longer, but kernels are often fused there.
_FLOPS_PER_BYTE = 8
_MOST_OPERATORS = 200_000  # limit of one count, some seconds; unlike a time limit it is the same on all ranks
_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
_aten = torch.ops.aten


class CannotCount(ValueError):
    """The operations of a layer cannot be counted; the message says why."""


class FlopCount(NamedTuple):
    """The work of layers on the inputs of a micro-batch.

    Attributes:
        flops: FLOPs of each layer in forward and backward, with bytes converted to FLOPs.
        sent: Bytes that each layer but the last passes to later ones.
    """

    flops: list[int]
    sent: list[int]


def work_of(layers: Sequence[nn.Module], inputs: Any) -> FlopCount:
    """Count the work of a chain of layers on ``inputs``: in training, or if that fails, in evaluation.

    Layers, random generators and registrations are unchanged. Hooks are not called.

    Raises:
        CannotCount: A layer needs the values of a tensor, calls an operator without a formula, or fails.
    """
    before = generators()
    try:
        try:
            return _counted(layers, inputs, training=True)
        except CannotCount:
            raise
        except Exception:  # of any kind: this runs the layers' code
            return _counted(layers, inputs, training=False)
    except CannotCount:
        raise
    except Exception as error:
        raise CannotCount(reason(error)) from None
    finally:
        set_generators(before)


def _counted(layers: Sequence[nn.Module], inputs: Any, training: bool) -> FlopCount:
    from torch._subclasses import fake_tensor  # imported here, as it takes a second

    fake = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        memo = {id(t): _empty(t) for layer in layers for t in (*layer.parameters(), *layer.buffers())}
        value = pytree.tree_map_only(torch.Tensor, _empty, inputs)
    chain = copied(nn.ModuleList(layers), dict[int, Any](memo))
    for module in chain.modules():
        for kind in _HOOKS:
            getattr(module, kind).clear()
    flops, sent, counter = list[int](), list[int](), _Counter()
    with fake, torch.enable_grad(), in_mode(chain, training), _not_compiled(), without_logs():
        for layer in chain:
            try:
                value, done = _done(layer, value, counter)
            except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException):
                raise CannotCount(f"{_name(layer)} depends on the values of a tensor") from None
            flops.append(done)
            sent.append(sum(t.nbytes for t in _tensors(value)))
    return FlopCount(flops, sent[:-1])


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like a parameter, buffer or input, without values; on the CPU, as all devices do the same."""
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        raise CannotCount(f"{type(tensor).__name__} is no plain tensor")
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _not_compiled() -> AbstractContextManager[Any]:
    """Run compiled code uncompiled: the compiler would take minutes."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _name(layer: nn.Module) -> str:
    return getattr(layer, "calls", "") or type(layer).__name__


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _done(layer: nn.Module, value: Any, counter: _Counter) -> tuple[Any, int]:
    """Return a layer's output, and the work of its forward and backward."""
    received = pytree.tree_map_only(torch.Tensor, _received, value)
    leaves = [t for t in _tensors(received) if t.requires_grad]
    given = pytree.tree_map_only(torch.Tensor, _changeable, received)
    wanted = [*leaves, *dict.fromkeys(p for p in layer.parameters() if p.requires_grad)]
    before = counter.flops
    with counter:
        output = layer(given)
    made = [t for t in _tensors(output) if t.requires_grad]
    grads = [torch.empty_like(t) for t in made]
    if made and wanted:
        with counter:
            torch.autograd.grad(made, wanted, grads, allow_unused=True)
    return output, counter.flops - before


def _received(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _changeable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that a layer may change in place, unlike a leaf."""
    return tensor.clone() if tensor.requires_grad else tensor


# ---- formulas ------------------------------------------------------------------------------------------------------


def _recurrent(x: torch.Tensor, w_x: torch.Tensor, w_h: torch.Tensor, *_: Any, **__: Any) -> int:
    steps = x.shape[0] * x.shape[1]
    return 2 * steps * (w_x.numel() + w_h.numel())


def _formulas() -> Mapping[Any, Callable[..., int]]:
    """Return the formulas of torch, to which ``register_flop_formula`` adds, and those that torch lacks on the CPU."""
    from torch.utils.flop_counter import flop_registry

    return {
        _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
            _aten._scaled_dot_product_flash_attention
        ],
        _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
            _aten._scaled_dot_product_flash_attention_backward
        ],
        _aten.mkldnn_rnn_layer: _recurrent,
        _aten.mkldnn_rnn_layer_backward: lambda *args, **kwargs: 2 * _recurrent(*args),
        _aten._grouped_mm: lambda a, b, *_, **__: 2 * a.numel() * b.shape[-1],
        _aten.mv: lambda matrix, *_, **__: 2 * matrix.numel(),
        **flop_registry,
    }


_OWN = frozenset({"aten", "prim", "prims"})
# torch's own operators with much computation, for which there is no formula.
_UNKNOWN = frozenset({_aten._trilinear, _aten._thnn_fused_lstm_cell, _aten._cdist_forward})
# They move nothing, though they are no views; of their arguments they read a part.
_STILL = frozenset(
    {
        _aten._unsafe_view,
        _aten.detach,
        _aten.alias,
        _aten.lift_fresh,
        _aten.empty,
        _aten.empty_like,
        _aten.new_empty,
    }
)
_LOOKUPS = frozenset({_aten.embedding, _aten.index, _aten.index_select, _aten.gather})


def _moved(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes that an operator reads and writes."""
    operator = func._overloadpacket
    written = sum(t.nbytes for t in _tensors(out))
    if not written or func.is_view or operator in _STILL:
        return 0
    return written + (written if operator in _LOOKUPS else sum(t.nbytes for t in _tensors((args, kwargs))))


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the work of operators inside, except for those on the meta device, which belong to other layers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops, self._operators, self._known = 0, 0, _formulas()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = func._overloadpacket
        if func is torch.ops.prim.device.default:  # called by C++ code, where an exception is not possible
            return func(*args, **kwargs)
        if operator not in self._known:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        self._operators += 1
        if self._operators > _MOST_OPERATORS:
            raise CannotCount("the model runs too many operators")
        if any(t.is_meta for t in _tensors(out)):
            return out
        if operator in self._known:
            self.flops += int(self._known[operator](*args, **kwargs, out_val=out))
        elif func.namespace in _OWN and operator not in _UNKNOWN:
            self.flops += _FLOPS_PER_BYTE * _moved(func, args, kwargs, out)
        else:
            raise CannotCount(
                f"there is no FLOP formula for {func.namespace}.{operator.__name__}: register one with "
                "torch.utils.flop_counter.register_flop_formula"
            )
        return out
