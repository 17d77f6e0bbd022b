"""Wrong arguments: ValueError with the values that clashed and the way out; nothing is written."""

from __future__ import annotations

import pytest
import torch

import avgpipe_ext
from tests.avgpipe_ext.cases import (
    APPLY,
    CORRECT,
    LATE,
    OPTIMIZERS,
    PREDICT_ADAM,
    PREDICT_SGD,
    PULL,
    ROUNDS,
    RULES,
    STEP,
    TRIAL_ADAM,
    TRIALS,
    adam,
    arguments,
    sgd,
)
from tests.avgpipe_ext.refusing import raises

NAN, INF = float("nan"), float("inf")
TUPLES = RULES + OPTIMIZERS + TRIALS + LATE  # one tensor of each argument makes a tuple; of rounds below
EVERY_CASE = pytest.mark.parametrize("case", TUPLES, ids=str)
EVERY_CASE_OF_EQUAL_LISTS = pytest.mark.parametrize("case", [c for c in TUPLES if c is not APPLY], ids=str)
WITH_A_STEP = pytest.mark.parametrize("case", [adam(lr=0.1, step=1), PREDICT_ADAM, TRIAL_ADAM], ids=str)


def refuses(case, tensors, match, scalars=None, **options):
    """The call raises and leaves every tensor, also the right ones of a list, as it was."""
    raises(case.operator, case.name, match, *tensors, *(scalars or case.scalars), **options)


@EVERY_CASE
def test_shapes(case):
    for position, name in enumerate(case.tensors[1:], 1):
        tensors = arguments(case, (3, 4), torch.float32)
        tensors[position] = torch.zeros(4, 3)
        first = case.tensors[0]
        message = rf"{name} has shape \(4, 3\) but {first} has \(3, 4\); pass tensors of one shape"
        refuses(case, tensors, message)
        tensors[position] = torch.zeros(12)
        refuses(case, tensors, rf"{name} has shape \(12,\) but {first} has \(3, 4\)")


@pytest.mark.grid
@EVERY_CASE
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_dtypes_that_are_no_float(case, dtype):
    tensors = [t.to(dtype) for t in arguments(case, (3,), torch.float32)]
    name = str(dtype).removeprefix("torch.")
    refuses(case, tensors, f"{case.tensors[0]} has dtype {name}; pass float32, float64, bfloat16 or float16")


@pytest.mark.grid
@EVERY_CASE
@pytest.mark.parametrize(
    ("first", "other"),
    [
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float64),
    ],
    ids=str,
)
def test_dtypes_that_do_not_pair(case, first, other):
    for position, name in enumerate(case.tensors[1:], 1):
        dtypes = [first] * len(case.tensors)
        dtypes[position] = other
        names = [str(dtype).removeprefix("torch.") for dtype in (other, first)]
        message = (
            f"{name} has dtype {names[0]} but {case.tensors[0]} has {names[1]}; pass one dtype, or float32"
        )
        refuses(case, arguments(case, (3,), dtypes), message)


@EVERY_CASE_OF_EQUAL_LISTS
def test_a_float32_first_tensor_takes_no_16_bit_companion(case):
    dtypes = [torch.float32] + [torch.bfloat16] * (len(case.tensors) - 1)
    message = f"has dtype bfloat16 but {case.tensors[0]} has float32"
    refuses(case, arguments(case, (3,), dtypes), message)


@EVERY_CASE
def test_gaps(case):
    for position, name in enumerate(case.tensors):
        tensors = arguments(case, (3, 4), torch.float32)
        tensors[position] = torch.zeros(3, 8)[:, ::2]
        message = (
            rf"{name} of shape \(3, 4\) has strides \(8, 2\), which leave gaps or overlap; pass .contiguous"
        )
        refuses(case, tensors, message)


@EVERY_CASE
def test_expanded_tensors(case):
    tensors = arguments(case, (3, 4), torch.float32)
    tensors[1] = torch.zeros(4).expand(3, 4)
    refuses(case, tensors, r"has strides \(0, 1\), which leave gaps or overlap")


@EVERY_CASE
def test_orders_of_strides(case):
    tensors = arguments(case, (3, 4), torch.float32)
    tensors[-1] = torch.zeros(4, 3).t()
    first, last = case.tensors[0], case.tensors[-1]
    message = rf"{last} has strides \(1, 3\) but {first} has \(4, 1\); give all tensors one memory format"
    refuses(case, tensors, message)


@EVERY_CASE
def test_shared_memory(case):
    for position, name in enumerate(case.tensors[1:], 1):
        tensors = arguments(case, (10,), torch.float32)
        buffer = torch.arange(15.0)
        tensors[0], tensors[position] = buffer[:10], buffer[5:]
        message = f"{name} shares 20 bytes of memory with {case.tensors[0]}; pass a .clone"
        refuses(case, tensors, message)


@EVERY_CASE
def test_shared_memory_among_the_tensors_of_lists(case):
    rows = [arguments(case, (10,), torch.float32, seed) for seed in range(4)]
    rows[3] = [torch.empty(0) for _ in case.tensors]
    rows[2][-1] = rows[0][0]
    tensors = [list(column) for column in zip(*rows)]
    refuses(case, tensors, rf"{case.tensors[-1]}\[2\] shares 40 bytes of memory with {case.tensors[0]}\[0\]")


def test_what_is_only_read_may_be_shared():
    case = STEP
    x, z, update = torch.ones(3), torch.zeros(3), torch.zeros(3)
    case.operator([x, torch.ones(3)], [z, z], [z, z], [update, torch.zeros(3)], 0.5, 0)
    assert x.tolist() == [0.5] * 3
    assert update.tolist() == [1.0] * 3


@EVERY_CASE
def test_neighbours_in_one_buffer_share_nothing(case):
    buffer = torch.ones(len(case.tensors), 5)
    case.operator(*buffer.unbind(), *case.scalars)


@EVERY_CASE_OF_EQUAL_LISTS
def test_lists_of_different_lengths(case):
    for position, name in enumerate(case.tensors[1:], 1):
        tensors = [[torch.zeros(2), torch.zeros(2)] for _ in case.tensors]
        tensors[position].pop()
        message = f"{name} has 1 tensors but {case.tensors[0]} has 2; pass lists of one length"
        refuses(case, tensors, message)


def test_updates_that_are_not_equally_many_for_each_reference():
    z, updates = [torch.zeros(2), torch.zeros(2)], [torch.zeros(2) for _ in range(3)]
    message = "update has 3 tensors but z has 2; pass as many, or a multiple: one for each replica"
    refuses(APPLY, [z, updates], message)
    refuses(APPLY, [z, []], "update has 0 tensors but z has 2")
    refuses(APPLY, [[], updates], "update has 3 tensors but z has 0")
    refuses(APPLY, [z, [*updates, torch.zeros(3)]], r"update\[3\] has shape \(3,\) but z\[1\] has \(2,\)")


@EVERY_CASE
def test_the_last_of_a_list_is_checked_before_the_first_is_written(case):
    rows = [arguments(case, (4,), torch.float32, seed) for seed in range(3)]
    rows[2][-1] = torch.zeros(5)
    message = rf"{case.tensors[-1]}\[2\] has shape \(5,\) but {case.tensors[0]}\[2\] has \(4,\)"
    refuses(case, [list(column) for column in zip(*rows)], message)


@pytest.mark.grid
@pytest.mark.parametrize("case", [*RULES, *OPTIMIZERS, PREDICT_SGD], ids=str)
@pytest.mark.parametrize("factor", [NAN, float("inf"), -float("inf")], ids=str)
def test_factors_that_are_not_finite(case, factor):
    name = "scale" if case in (APPLY, PREDICT_SGD) else "alpha"
    scalars = (factor, *case.scalars[1:])
    refuses(case, arguments(case, (3,), torch.float32), f"{name} is {factor}; pass a finite number", scalars)


@pytest.mark.parametrize(
    ("momentum", "gain", "message"),
    [
        (-0.5, 1.0, "momentum is -0.5; pass a number from 0 to below 1"),
        (1.0, 1.0, "momentum is 1; pass a number from 0 to below 1"),
        (NAN, 1.0, "momentum is nan; pass a number from 0 to below 1"),
        (0.5, INF, "gain is inf; pass a finite number"),
        (0.5, NAN, "gain is nan; pass a finite number"),
    ],
)
def test_numbers_of_corrections(momentum, gain, message):
    refuses(CORRECT, arguments(CORRECT, (3,), torch.float32), message, (momentum, gain))
    refuses(CORRECT, arguments(CORRECT, (3,), torch.float32), message, (momentum, gain), first=True)


@pytest.mark.parametrize("case", [STEP, *OPTIMIZERS], ids=str)
@pytest.mark.parametrize("staleness", [-1, 2])
def test_staleness(case, staleness):
    tensors = arguments(case, (3,), torch.float32)
    refuses(case, tensors, f"staleness is {staleness}; pass 0 or 1", (0.5, staleness))


@EVERY_CASE
def test_devices(case):
    """Sent to the CPU kernel by hand: a meta tensor among the arguments would choose the fake one."""
    for position, name in enumerate(case.tensors[1:], 1):
        tensors = arguments(case, (3,), torch.float32)
        tensors[position] = tensors[position].to("meta")
        message = f"{name} is on meta but {case.tensors[0]} is on cpu; move all tensors to one device"
        overload, passed = case.raw(tensors)
        with pytest.raises(ValueError, match=message):
            overload.redispatch(
                torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *passed, **case.raw_options
            )


@EVERY_CASE
def test_sparse_tensors(case):
    tensors = [t.to_sparse() for t in arguments(case, (3,), torch.float32)]
    with pytest.raises(ValueError, match=f"{case.tensors[0]} is not strided; pass dense tensors"):
        case.operator(*tensors, *case.scalars)


NUMBERS = {
    "elastic_sgd_": ("lr", "mu", "dampening", "weight_decay"),
    "elastic_adamw_": ("lr", "eps", "weight_decay"),
    "trial_sgd_": ("lr", "mu", "dampening", "weight_decay"),
    "trial_adam_": ("lr", "eps", "weight_decay"),
    "predict_adam_": ("updates", "lr", "eps", "weight_decay"),
}


@pytest.mark.parametrize("case", [*OPTIMIZERS, *TRIALS, PREDICT_ADAM], ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
def test_options_that_are_not_finite(case, value):
    for name in NUMBERS[case.name]:
        tensors = arguments(case, (3,), torch.float32)
        refuses(case, tensors, f"{name} is -?{abs(value)}; pass a finite number", **{name: value})


def test_fewer_updates_than_none():
    tensors = arguments(PREDICT_ADAM, (3,), torch.float32)
    refuses(PREDICT_ADAM, tensors, "updates is -1; pass a finite number of at least 0", updates=-1)


@WITH_A_STEP
@pytest.mark.parametrize("name", ["beta1", "beta2"])
@pytest.mark.parametrize("value", [-0.1, 1.0, 2.0, NAN], ids=str)
def test_betas(case, name, value):
    message = rf"{name} is {value:g}; pass a number from 0 to below 1"
    refuses(case, arguments(case, (3,), torch.float32), message, **{name: value})


@WITH_A_STEP
@pytest.mark.parametrize("missing", [1, 2, 0.5, NAN])
def test_steps_before_the_first(case, missing):
    first = 0 if case is TRIAL_ADAM else 1  # a trial is told of the steps before it
    step = first - missing
    for given in (step, torch.tensor(step, dtype=torch.float64)):
        message = f"step is {step}; count steps from {first}"
        refuses(case, arguments(case, (3,), torch.float32), message, step=given)


@WITH_A_STEP
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (torch.tensor(3), "step has 1 elements of dtype int64; pass one float32 or float64"),
        (torch.ones(2), "step has 2 elements of dtype float32; pass one float32 or float64"),
        (torch.ones(()).half(), "step has 1 elements of dtype float16"),
    ],
)
def test_steps_that_are_no_counter(case, step, message):
    refuses(case, arguments(case, (3,), torch.float32), message, step=step)


@pytest.mark.parametrize("case", OPTIMIZERS + ROUNDS, ids=str)
@pytest.mark.parametrize("option", ["grad_scale", "found_inf"])
def test_what_gradscaler_does_not_pass(case, option):
    for value, found in (
        (torch.ones(2), "2 elements of dtype float32"),
        (torch.ones((), dtype=torch.float64), "1 elements of dtype float64"),
        (torch.ones(0), "0 elements"),
    ):
        tensors = arguments(case, (3,), torch.float32)
        refuses(case, tensors, f"{option} has {found}.*; pass one float32", **{option: value})


@pytest.mark.parametrize("case", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("name", ["from_step", "from_force"])
def test_coefficients_that_are_not_finite(case, name):
    message = f"{name} is nan; pass a finite number"
    refuses(case, arguments(case, (3,), torch.float32), message, **{name: float("nan")})


@pytest.mark.parametrize(
    ("without", "with_buffers"),
    [(sgd(lr=0.1), sgd(lr=0.1, mu=0.9)), (TRIALS[0], TRIALS[2])],
    ids=["pass", "trial"],
)
def test_momentum_belongs_to_mu(without, with_buffers):
    tensors = arguments(without, (3,), torch.float32)
    refuses(without, tensors, "mu is 0.9 but there is no momentum; pass buffers like x", mu=0.9)
    refuses(without, [[t] for t in tensors], "mu is 0.9 but there is no momentum", mu=0.9)
    tensors = arguments(with_buffers, (3,), torch.float32)
    refuses(with_buffers, tensors, "mu is 0 but there are 1 momentum buffers; pass none", mu=0.0)
    refuses(with_buffers, [[t, t.clone()] for t in tensors], "mu is 0 but there are 2 momentum", mu=0.0)


@EVERY_CASE
def test_a_meta_tensor_among_others_is_not_silently_nothing(case):
    """It would choose the fake kernel, which writes nothing."""
    for position in range(len(case.tensors)):
        tensors = arguments(case, (3,), torch.float32)
        tensors[position] = tensors[position].to("meta")
        with pytest.raises(ValueError, match=r"on meta.*on cpu|on cpu.*on meta"):
            case.operator(*tensors, *case.scalars)


@EVERY_CASE
def test_a_row_of_meta_tensors_among_others_is_not_silently_nothing(case):
    rows = [arguments(case, (3,), torch.float32, seed) for seed in range(3)]
    rows[1] = [t.to("meta") for t in rows[1]]
    with pytest.raises(ValueError, match=r"on meta.*on cpu|on cpu.*on meta"):
        case.operator(*[list(column) for column in zip(*rows)], *case.scalars)


LAZY = {
    "negative": (torch._neg_view, "the negative bit: its memory is not its value; pass a .resolve_neg()"),
    "conjugate": (
        lambda t: torch.complex(t, t).conj(),
        "the conjugate bit: its memory is not its value; pass a .resolve_conj()",
    ),
    "zero": (
        lambda t: torch._efficientzerotensor(t.shape),
        "no memory, being zero throughout: its memory is not its value; pass a .clone()",
    ),
}


@pytest.mark.grid
@EVERY_CASE
@pytest.mark.parametrize("lazy", LAZY)
@pytest.mark.parametrize("in_lists", [False, True], ids=["tensors", "lists"])
def test_tensors_whose_memory_is_not_their_value(case, lazy, in_lists):
    make, message = LAZY[lazy]
    for position, name in enumerate(case.tensors):
        rows = [arguments(case, (4,), torch.float32, seed) for seed in range(2)]
        rows[1][position] = make(rows[1][position])
        tensors = [list(column) for column in zip(*rows)] if in_lists else rows[1]
        refuses(case, tensors, rf"{name}(\[1\])? has {message}")


def test_a_written_view_of_a_conjugate_is_left_as_it_was():
    numbers = torch.complex(torch.ones(1), torch.full((1,), 2.0))
    view = torch.imag(torch.conj(numbers))
    refuses(PULL, [view, torch.zeros(1)], "x has the negative bit")
    assert numbers.tolist() == [1 + 2j]


def test_options_and_copies_whose_memory_is_not_their_value():
    case = adam(lr=0.1, step=1)
    for option in ("step", "grad_scale", "found_inf"):
        refuses(
            case,
            arguments(case, (3,), torch.float32),
            f"{option} has the negative bit",
            **{option: torch._neg_view(torch.ones(()))},
        )
    lazy, buffer = torch._neg_view(torch.ones(3)), torch.ones(3)
    raises(avgpipe_ext.pack, "pack", r"tensors\[1\] has the negative bit", [torch.ones(3), lazy])
    raises(avgpipe_ext.pack, "pack", "out has the negative bit", [buffer], out=lazy)
    raises(avgpipe_ext.unpack_, "unpack_", "buffer has the negative bit", lazy, [buffer])
    raises(avgpipe_ext.unpack_, "unpack_", r"tensors\[0\] has the negative bit", buffer, [lazy])


def refuses_type(function, match, *arguments, **options):
    with pytest.raises(TypeError, match=match) as raised:
        function(*arguments, **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("value", "found"),
    [(None, "NoneType"), ("x", "str"), (3, "int"), (object(), "object")],
    ids=["none", "text", "number", "object"],
)
def test_what_is_no_list_of_tensors(value, found):
    x, two = torch.ones(3), [torch.ones(3), torch.ones(3)]
    for wrong, label in ((value, ""), ([x, value], r"\[1\]")):
        message = f"{label} is of type {found}; pass a list of tensors"
        refuses_type(avgpipe_ext.elastic_pull_, f"avgpipe::elastic_pull_: x{message}", wrong, wrong, 0.5)
        refuses_type(avgpipe_ext.elastic_pull_, f"avgpipe::elastic_pull_: z{message}", two, wrong, 0.5)
        refuses_type(avgpipe_ext.reference_apply_, f"update{message}", x, wrong, 0.5)
        refuses_type(avgpipe_ext.pack, f"avgpipe::pack: tensors{message}", wrong)
        refuses_type(avgpipe_ext.unpack_, f"avgpipe::unpack_: tensors{message}", x, wrong)
        refuses_type(
            *(avgpipe_ext.elastic_round_, f"avgpipe::elastic_round_: states{message}"),
            *(two, two, wrong, two, 0.5),
            optimizer="sgd",
            lr=0.1,
        )
    refuses_type(avgpipe_ext.unpack_, f"buffer is of type {found}; pass a tensor", value, [x])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": None}, "lr is of type NoneType; pass a float"),
        ({"lr": "x"}, "lr is of type str; pass a float"),
        ({"lr": torch.ones(3)}, "lr is of type Tensor; pass a float"),
        ({"from_step": "x"}, "from_step is of type str; pass a float"),
        ({"accumulate": "x"}, "accumulate is of type str; pass True or False"),
        ({"grad_scale": 3.0}, "grad_scale is of type float; pass a tensor or None"),
    ],
)
def test_options_of_other_types(options, message):
    case = adam(lr=0.1, step=1)
    refuses_type(
        case.operator,
        f"avgpipe::elastic_adamw_: {message}",
        *arguments(case, (3,), torch.float32),
        *case.scalars,
        **options,
    )
    refuses_type(
        *(STEP.operator, "staleness is of type float; pass an int"),
        *(*arguments(STEP, (3,), torch.float32), 0.5, 0.5),
    )


def test_types_of_pack():
    refuses_type(avgpipe_ext.pack, "dtype is of type str; pass a torch.dtype", [torch.ones(3)], "float32")
    refuses_type(avgpipe_ext.pack, "out is of type int; pass a tensor", [torch.ones(3)], out=3)


@pytest.mark.parametrize("option", ["step", "grad_scale", "found_inf"])
def test_options_on_meta_or_sparse(option):
    case = adam(lr=0.1, step=1)
    tensors = arguments(case, (3,), torch.float32)
    with pytest.raises(ValueError, match=f"{option} is on meta"):
        case.operator(*tensors, *case.scalars, **{option: torch.ones(1, device="meta")})
    refuses(
        case, tensors, f"{option} is not strided; pass a dense tensor", **{option: torch.ones(1).to_sparse()}
    )
