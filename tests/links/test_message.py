"""The format of messages: any value comes out as it went in, and its structure travels once."""

from __future__ import annotations

import ctypes
import json
import math
import sys
from collections import OrderedDict, defaultdict, namedtuple
from enum import Enum
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from avgpipe.links.codec import Decoder, Encoder, Format, padded, view
from avgpipe.links.link import OF_MICRO_BATCHES, Channel, Mailbox, Message, detached
from avgpipe.links.transport import Endpoint, on_wire
from avgpipe_ext import pack, unpack_
from tests.links.device_tensor import DeviceTensor

CPU = torch.device("cpu")
Point = namedtuple("Point", "x y")
pytree._register_namedtuple(Point, serialized_type_name="tests.links.test_message.Point")

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn),
]


class Wire:
    """An encoder and a decoder with memory between them."""

    def __init__(self, wire_dtype: torch.dtype | None = None) -> None:
        self.encoder, self.decoder = Encoder(wire_dtype), Decoder(wire_dtype, CPU)
        self.texts = 0

    def __call__(self, value: Any) -> Any:
        number, format, text, tensors = self.encoder.encode(value)
        begin = padded(len(text))
        memory = torch.full((begin + format.bytes + 64,), 0xA5, dtype=torch.uint8)
        address = memory.data_ptr()
        ctypes.memmove(address, text, len(text))
        format.write(tensors, address + begin)
        assert (memory[begin + format.bytes :] == 0xA5).all(), "written beyond its end"
        lease = view(address, memory.numel())
        lease.memory = memory  # what reads the lease keeps the memory
        self.texts += bool(text)
        return self.decoder.decode(number, len(text), lease)


def assert_same(ours: Any, theirs: Any) -> None:
    a, a_spec = pytree.tree_flatten(ours)
    b, b_spec = pytree.tree_flatten(theirs)
    assert a_spec == b_spec
    for x, y in zip(a, b, strict=True):
        if isinstance(y, torch.Tensor):
            assert (x.shape, x.dtype, x.requires_grad) == (y.shape, y.dtype, y.requires_grad)
            assert x.is_leaf
            assert bits(x) == bits(y)
        else:
            assert type(x) is type(y)
            assert repr(x) == repr(y)  # tells -0.0 from 0.0, and nan is like nan


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = math.prod(shape)
    return (torch.arange(count) % 7 - (3 if dtype.is_signed else 0)).to(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (3, 0), (5,), (2, 3), (2, 1, 7)], ids=str)
def test_every_dtype_and_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    wire = Wire()
    for value in (filled(shape, dtype), [filled(shape, dtype)] * 3, {"a": (filled(shape, dtype), 1)}):
        assert_same(wire(value), value)
        assert_same(wire(value), value)


def layouts() -> dict[str, torch.Tensor]:
    x = torch.arange(24.0).reshape(4, 6)
    z = torch.complex(x, -x)
    return {
        "transposed": x.T,
        "strided": x[:, ::2],
        "offset": x[1:, 1:],
        "expanded": x[:1].expand(5, 6),
        "one element of an expanded": x[:1, :1].expand(1, 1),
        "channels last": torch.arange(2 * 3 * 4 * 5.0)
        .reshape(2, 3, 4, 5)
        .to(memory_format=torch.channels_last),
        "conjugate": z.conj(),
        "conjugate, strided": z.conj()[:, ::3],
        "imaginary part of a conjugate": z.conj().imag,
        "one imaginary part of a conjugate": z[1, 1:2].conj().imag,
        "flipped": x.flip(0),
        "requires grad, not a leaf": (x.clone().requires_grad_() * 2).T,
        "a parameter": torch.nn.Parameter(x.clone()),
    }


@pytest.mark.parametrize("name", layouts())
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=str)
def test_every_layout(name: str, wire_dtype: torch.dtype | None) -> None:
    value = layouts()[name]
    got = Wire(wire_dtype)(value)
    assert type(got) is torch.Tensor
    assert (got.shape, got.dtype, got.requires_grad) == (value.shape, value.dtype, value.requires_grad)
    assert torch.equal(got.detach(), value.detach())  # the values are small integers, exact in bfloat16


VALUES: list[Any] = [
    None,
    3,
    'text with ünicode \U0001f600 and "quotes"',
    [],
    (),
    {},
    [None, None],
    [torch.ones(2), None, torch.zeros(3)],
    [torch.ones(2)] * 16,
    [torch.ones(2)] * 17,
    [torch.ones(2)] * 40,
    (torch.ones(2), [torch.zeros(0, 3, dtype=torch.int64), None, 3, 2.5, True, "text", [[]]]),
    OrderedDict(b=torch.ones(1, dtype=torch.bfloat16), a={"c": torch.tensor(True), 4: 5}),
    Point(torch.ones(2), Point(1, torch.tensor(2.0))),
    [1, torch.ones(1), 2.5],
    {"inf": math.inf, "nan": math.nan, "zero": -0.0},
    [[torch.ones(1)]],
    (torch.ones(1),),
    [torch.ones(2, requires_grad=True), torch.ones(2), torch.ones(0, requires_grad=True)],
    10**30,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: str(v)[:50])
@pytest.mark.parametrize("wire_dtype", [None, torch.float16], ids=str)
def test_every_structure(value: Any, wire_dtype: torch.dtype | None) -> None:
    wire = Wire(wire_dtype)
    for _ in range(3):
        assert_same(wire(value), value)
    assert wire.texts == 1


def test_a_size_arrives_as_what_views_take() -> None:
    rebuilt = Wire()({"size": torch.Size([2, 3]), "x": torch.arange(6)})
    assert tuple(rebuilt["size"]) == (2, 3)
    assert rebuilt["x"].view(rebuilt["size"]).shape == (2, 3)


def test_what_is_handed_over_within_a_process_is_a_leaf_that_requires_what_it_did() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    first, second = detached([x, x.detach()])
    assert first.is_leaf
    assert first.requires_grad
    assert not second.requires_grad
    assert first.data_ptr() == x.data_ptr()


def test_all_structures_one_after_another_in_one_channel() -> None:
    wire = Wire()
    for _ in range(2):
        for value in VALUES:
            assert_same(wire(value), value)
    assert wire.texts == len(VALUES)


TREES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.builds(
            lambda shape, dtype, grad: filled(shape, dtype).requires_grad_(grad and dtype.is_floating_point),
            st.lists(st.integers(0, 3), max_size=3).map(tuple),
            st.sampled_from(DTYPES[:10]),
            st.booleans(),
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=150)
@given(st.lists(TREES, min_size=1, max_size=6))
def test_any_values_one_after_another(values: list[Any]) -> None:
    wire = Wire()
    for value in [*values, *values]:
        assert_same(wire(value), value)


def test_equal_values_of_unequal_kinds_are_kept_apart() -> None:
    wire = Wire()
    for value in (1, True, 1.0, 0, False, 0.0, -0.0, 0.0, "1", None):
        assert_same(wire([value, torch.ones(1)]), [value, torch.ones(1)])


def test_what_needs_gradients_changes_the_header() -> None:
    wire = Wire()
    for grad in (False, True, False):
        assert wire(torch.ones(2, requires_grad=grad)).requires_grad is grad
    assert wire.texts == 2


def test_plain_values_may_change_from_message_to_message() -> None:
    wire = Wire()
    for n in range(300):  # more headers than a channel remembers
        assert_same(
            wire({"step": n, "x": torch.full((2,), float(n))}), {"step": n, "x": torch.full((2,), float(n))}
        )
    assert wire.texts == 300


def test_forgotten_headers_are_sent_again() -> None:
    wire = Wire()
    for rounds in range(3):
        for n in range(100):
            value = torch.full((n,), float(rounds))
            assert_same(wire(value), value)
    assert wire.texts == 300  # of 100 in turn, the 64 remembered ones are always the wrong ones
    for n in (98, 99, 98, 99, 40, 99):
        assert_same(wire(torch.ones(n)), torch.ones(n))
    assert wire.texts == 300
    assert len(wire.encoder._known) == 64


def test_sixty_four_headers_are_remembered() -> None:
    wire = Wire()
    for _ in range(3):
        for n in range(64):
            assert wire(torch.full((n,), 1.0)).shape == (n,)
    assert wire.texts == 64


@pytest.mark.parametrize(
    "value",
    [{1, 2}, object(), [b"bytes"], [torch.ones(2), slice(1)], 1j],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_travel_is_named_and_leaves_the_channel_as_it_was(value: Any) -> None:
    wire = Wire()
    wire(torch.ones(2))
    with pytest.raises(TypeError, match="a stage returned a"):
        wire([torch.ones(1), value])
    assert_same(wire([torch.ones(1), 3]), [torch.ones(1), 3])
    assert_same(wire(torch.ones(2)), torch.ones(2))


def test_a_header_that_never_came_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="names format 3, which never arrived"):
        Decoder(None, CPU).decode(3, 0, view(0, 1))


def test_tensors_lie_at_multiples_of_64() -> None:
    _, format, _, _ = Encoder(None).encode([torch.ones(n, dtype=torch.uint8) for n in (1, 64, 65, 0, 3)])
    assert [p.offset for p in format.slices] == [0, 64, 128, 256, 256]
    assert format.bytes == 320


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_narrower_wire_rounds_as_pack_and_unpack_do(dtype: torch.dtype, wire_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(1000, dtype=dtype) * torch.logspace(-9, 5, 1000, dtype=dtype)
    expected = torch.empty_like(x)
    unpack_(pack([x], dtype=wire_dtype), [expected])
    assert torch.equal(Wire(wire_dtype)(x), expected)
    assert torch.equal(expected, x.to(wire_dtype).to(dtype))
    assert not torch.equal(expected, x)


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_narrower_wire_leaves_what_is_not_wide_as_it_is(wire_dtype: torch.dtype) -> None:
    wire = Wire(wire_dtype)
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.bfloat16, torch.float16, torch.uint8):
        x = filled((2, 3), dtype)
        assert_same(wire([x, x[:, ::2]]), [x, x[:, ::2]])
    big = torch.tensor([2**40 + 1])
    assert_same(wire(big), big)


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_tensors_of_a_device_are_narrowed_where_they_are(
    dtype: torch.dtype, wire_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel reads and writes memory of one device, so that the rounding and the way to the host are two steps, and
    what crosses is rounded already. The copy keeps the host until it is done, as that of any other tensor does: the
    message is sent at once. That it does, and on which stream, is for a device to show.
    """
    meetings: list[int] = []
    monkeypatch.setattr(DeviceTensor, "meetings", meetings)
    x = filled((5, 7), dtype)
    assert_same(Wire(wire_dtype)(DeviceTensor(x)), Wire(wire_dtype)(x))
    assert_same(Wire(wire_dtype)(DeviceTensor(x.T)), Wire(wire_dtype)(x.T))
    narrow = wire_dtype is not None and dtype.is_floating_point
    assert meetings == [x.numel() * (2 if narrow else dtype.itemsize)] * 2


def test_a_narrower_wire_takes_half_of_the_bytes() -> None:
    x = torch.ones(64, 64)
    assert Encoder(None).encode(x)[1].bytes == 2 * Encoder(torch.float16).encode(x)[1].bytes == x.nbytes


def test_only_activations_and_gradients_of_training_are_narrowed() -> None:
    end, x = Endpoint(Mailbox(), CPU, wire_dtype=torch.float16), torch.ones(64)
    found = [kind for kind in Message if end.encoder(Channel(kind, 0, 0, 1)).encode(x)[1].bytes < x.nbytes]
    assert found == ["F", "B", "X", "Y"]


def test_received_tensors_are_views_of_the_message() -> None:
    encoder, decoder = Encoder(None), Decoder(None, CPU)
    number, format, text, tensors = encoder.encode([torch.ones(4), torch.ones(3)])
    memory = (ctypes.c_ubyte * (padded(len(text)) + format.bytes + 64))()
    begin = -ctypes.addressof(memory) % 64
    where = ctypes.addressof(memory) + begin
    ctypes.memmove(where, text, len(text))
    format.write(tensors, where + padded(len(text)))
    got = decoder.decode(number, len(text), memory, begin)
    assert [x.data_ptr() for x in got] == [where + padded(len(text)) + 64 * n for n in range(2)]


# ---- what a stranger may write ------------------------------------------------------------------------------------


class Colour(Enum):
    RED = 1


def text(structure: str, leaves: int = 1) -> bytes:
    return json.dumps([structure, [{"value": 1}] * leaves]).encode()


def with_factory(module: str, name: str) -> bytes:
    """As a stranger would write the header of a defaultdict."""
    structure = json.loads(pytree.treespec_dumps(pytree.tree_structure(defaultdict(list, a=1))))
    context = structure[1]["context"]
    context["default_factory_module"], context["default_factory_name"] = module, name
    return text(json.dumps(structure))


@pytest.mark.parametrize("factory", [list, dict, int])
def test_dictionaries_with_defaults_travel(factory: Any) -> None:
    value = defaultdict(factory, a=torch.ones(2))
    found = Wire()(value)
    assert type(found) is defaultdict
    assert found.default_factory is factory


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("antigravity", "geohash"),
        ("builtins", "eval"),
        ("subprocess", "Popen"),
        ("torch", "load"),
    ],
)
def test_no_header_imports_a_module_or_names_a_function(module: str, name: str) -> None:
    before = set(sys.modules)
    with pytest.raises(TypeError, match=f"a defaultdict of {module}.{name} cannot be sent between stages"):
        Format.from_bytes(with_factory(module, name))
    assert set(sys.modules) == before


def test_a_factory_that_cannot_travel_is_refused_where_it_is_sent() -> None:
    with pytest.raises(
        TypeError, match=r"a defaultdict of .*Tensor cannot be sent between stages; use one of bool"
    ):
        Encoder(None).encode(defaultdict(torch.Tensor, a=torch.ones(2)))


def test_enumerations_as_keys_travel() -> None:
    assert list(Wire()({Colour.RED: torch.ones(2)})) == [Colour.RED]


@pytest.mark.parametrize(
    "name", ["antigravity:Colour", "os:system", "subprocess:Popen", f"{__name__}:Nobody"]
)
def test_classes_that_are_no_loaded_enumerations_are_refused(name: str) -> None:
    structure = pytree.treespec_dumps(pytree.tree_structure({Colour.RED: 1}))
    assert f"{__name__}:Colour" in structure
    before = set(sys.modules)
    with pytest.raises(TypeError, match="is no enumeration that this process has loaded"):
        Format.from_bytes(text(structure.replace(f"{__name__}:Colour", name)))
    assert set(sys.modules) == before


@pytest.mark.parametrize("dtype", ["load", "nothing", "nn"])
def test_a_dtype_is_one_of_torch(dtype: str) -> None:
    structure = pytree.treespec_dumps(pytree.tree_structure(1))
    found = json.dumps([structure, [{"tensor": [[2], dtype, False]}]]).encode()
    with pytest.raises(TypeError, match=f"a tensor of '{dtype}', which is no dtype of torch"):
        Format.from_bytes(found)


def test_what_travels_in_a_narrower_dtype() -> None:
    for kind in Message:
        trains = kind in OF_MICRO_BATCHES
        assert on_wire(kind, None) is None
        assert on_wire(kind, torch.float16) is (torch.float16 if trains else None)
        tied = kind is Message.TIED_GRADIENTS
        assert on_wire(kind, torch.bfloat16) is (torch.bfloat16 if trains or tied else None)
