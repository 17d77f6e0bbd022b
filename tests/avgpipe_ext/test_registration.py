"""Schemas, fake kernels, version counters, torch.compile."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import avgpipe_ext
from avgpipe_ext.operators import OPERATORS
from tests.avgpipe_ext.cases import CASES, FLOATS, OPTIMIZERS, RULES, arguments

NAMES = tuple(OPERATORS)
WRITTEN = {  # positions
    "elastic_pull_": (0,),
    "elastic_step_": (0, 3),
    "easgd_step_": (0, 2),
    "elastic_sgd_": (0, 2, 4),
    "elastic_adamw_": (0, 2, 3, 5),
    "elastic_round_": (0, 2, 3),
    "reference_apply_": (0, 1),
    "trial_sgd_": (0, 4),
    "trial_adam_": (0, 5),
    "predict_sgd_": (0,),
    "predict_adam_": (0,),
    "correct_update_": (0, 2),
}
COPIES = ("pack", "pack.out", "unpack_")
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)
# What makes torch.compile's output text-free and quick here: no code generation is under test.
BACKEND = "aot_eager"


def qualified_names():
    listed = [f"avgpipe::{name}{suffix}" for name in NAMES for suffix in ("", ".list")]
    return listed + [f"avgpipe::{name}" for name in COPIES]


def test_the_family_is_complete():
    assert set(NAMES) == set(WRITTEN)


def test_every_operator_has_its_overloads_and_no_others():
    found = {
        s.name + ("." + s.overload_name if s.overload_name else "") for s in torch._C._jit_get_all_schemas()
    }
    assert {name for name in found if name.startswith("avgpipe::")} == set(qualified_names())


@pytest.mark.parametrize("name", qualified_names())
def test_kernels_exist_for_cpu_and_where_built_cuda(name):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
    if avgpipe_ext.build_info()["cuda"]:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("overload", ["default", "list"])
def test_the_schema_marks_what_is_written(name, overload):
    schema = getattr(getattr(torch.ops.avgpipe, name), overload)._schema
    written = tuple(
        i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )
    assert written == WRITTEN[name]
    assert schema.arguments[-1].name == "check_finite"
    assert schema.arguments[-1].kwarg_only


@pytest.mark.parametrize("name", NAMES)
def test_the_typed_face_has_the_arguments_and_defaults_of_the_schema(name):
    parameters = inspect.signature(getattr(avgpipe_ext, name)).parameters.values()
    arguments = getattr(torch.ops.avgpipe, name).default._schema.arguments
    assert [(p.name, p.kind is p.KEYWORD_ONLY) for p in parameters] == [
        (a.name, a.kwarg_only) for a in arguments
    ]
    for p, a in zip(parameters, arguments):
        if p.name != "step":  # a number or a tensor; the operators want a tensor
            assert (p.default is not p.empty) == a.has_default_value()
            assert p.default is p.empty or p.default == a.default_value


def rows(case, shapes, dtype):
    """The case's arguments as lists of tensors of the shapes."""
    return [list(column) for column in zip(*(arguments(case, shape, dtype, seed=1) for shape in shapes))]


@pytest.mark.grid
@EVERY_CASE
@pytest.mark.parametrize("list_form", [False, True])
def test_opcheck(case, list_form):
    tensors = (
        rows(case, ((4,), (0,), (2, 3)), torch.bfloat16)
        if list_form
        else arguments(case, (5, 3), torch.float32)
    )
    overload, passed = case.raw(tensors)
    torch.library.opcheck(overload, passed, {**case.raw_options, "check_finite": list_form})


def test_opcheck_of_several_updates_and_of_scaled_gradients():
    z, updates = rows(RULES[-1], ((3,), (4,)), torch.float32)
    torch.library.opcheck(
        torch.ops.avgpipe.reference_apply_.list, (z, updates + updates[:0], 0.5), {"zero": False}
    )
    case = OPTIMIZERS[-1]
    scaling = {"grad_scale": torch.tensor(8.0), "found_inf": torch.zeros(1)}
    overload, passed = case.raw(arguments(case, (5,), torch.float32))
    torch.library.opcheck(overload, passed, {**case.raw_options, **scaling})


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
def test_opcheck_of_pack_and_unpack(dtype):
    tensors = [torch.randn(3), torch.randn(2, 5).t(), torch.empty(0)]
    torch.library.opcheck(torch.ops.avgpipe.pack.default, (tensors,), {"dtype": dtype})
    torch.library.opcheck(torch.ops.avgpipe.unpack_.default, (torch.randn(13, dtype=dtype), tensors))


@pytest.mark.grid
@EVERY_CASE
@pytest.mark.parametrize("check_finite", [False, True])
def test_fake_results_match_real_ones(case, check_finite):
    for dtype in FLOATS:
        tensors = arguments(case, (5,), dtype)
        real = case.operator(*tensors, *case.scalars, check_finite=check_finite)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t) for t in tensors]
            fake = case.operator(*fakes, *case.scalars, check_finite=check_finite)
            listed = case.operator(*([t] for t in fakes), *case.scalars, check_finite=check_finite)
        for result in (fake, listed):
            assert (result.shape, result.dtype, result.device) == (real.shape, real.dtype, real.device)


@EVERY_CASE
def test_meta_tensors_give_a_meta_count(case):
    tensors = arguments(case, (5,), torch.float32, device="meta")
    assert case.operator(*tensors, *case.scalars, check_finite=True).device.type == "meta"
    tensors[-1] = torch.zeros(6, device="meta")
    with pytest.raises(ValueError, match="pass tensors of one shape"):
        case.operator(*tensors, *case.scalars)


@pytest.mark.grid
@EVERY_CASE
@pytest.mark.parametrize("raw", [False, True])
def test_version_counters_of_exactly_what_is_written_move(case, raw):
    def call(tensors):
        overload, passed = case.raw(tensors)
        if raw:
            overload(*passed, **case.raw_options)
        else:
            case.operator(*tensors, *case.scalars)

    tensors = arguments(case, (3,), torch.float32)
    call(tensors)
    expected = [int(name in case.written) for name in case.tensors]
    assert [t._version for t in tensors] == expected
    call([[t] for t in tensors])
    assert [t._version for t in tensors] == [2 * moved for moved in expected]


def test_unpacked_tensors_versions_move():
    tensors = [torch.zeros(3), torch.zeros(4, 2).t()]
    buffer = avgpipe_ext.pack(tensors)
    avgpipe_ext.unpack_(buffer, tensors[:1] + tensors[1:])
    assert buffer._version == 0
    assert all(t._version > 0 for t in tensors)


def test_a_backward_that_needs_an_overwritten_value_fails():
    x = torch.ones(3, requires_grad=True)
    loss = (x * x).sum()
    avgpipe_ext.elastic_pull_(x, torch.zeros(3), 0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@EVERY_CASE
def test_works_in_inference_mode(case):
    with torch.inference_mode():
        tensors = arguments(case, (3,), torch.float32)
        case.operator(*tensors, *case.scalars)


@pytest.mark.grid
@EVERY_CASE
@pytest.mark.parametrize("list_form", [False, True])
def test_compiled_calls_do_what_eager_ones_do(case, list_form):
    def call(*tensors):
        passed = [[t] for t in tensors] if list_form else tensors
        lost = case.operator(*passed, *case.scalars, check_finite=True)
        return lost, tensors[0] * 2

    torch._dynamo.reset()
    eager, compiled = arguments(case, (9,), torch.float32), arguments(case, (9,), torch.float32)
    expected = call(*eager)
    results = torch.compile(call, backend=BACKEND, fullgraph=True)(*compiled)
    assert all(torch.equal(a, b) for a, b in zip(expected, results))
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled))
