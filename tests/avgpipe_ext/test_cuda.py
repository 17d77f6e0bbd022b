"""The CUDA kernels against the CPU ones: equal bit for bit."""

from __future__ import annotations

import os

import pytest
import torch

import avgpipe_ext
from tests.avgpipe_ext.cases import CASES, FLOATS, SIXTEEN_BIT, arguments

EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(autouse=True)
def _gpu():
    missing = None
    if not avgpipe_ext.build_info()["cuda"]:
        missing = "built without CUDA"
    elif not torch.cuda.is_available():
        missing = "no CUDA device, or a CPU build of torch"
    if missing and os.environ.get("AVGPIPE_REQUIRE_CUDA") == "1":
        pytest.fail(f"AVGPIPE_REQUIRE_CUDA=1, but: {missing}")
    if missing:
        pytest.skip(missing)


def check(case, on_cpu, *, list_form=False, check_finite=True):
    on_cuda = [t.to("cuda") for t in on_cpu]
    expected = case.operator(*on_cpu, *case.scalars, check_finite=check_finite)
    lost = case.operator(
        *([[t] for t in on_cuda] if list_form else on_cuda), *case.scalars, check_finite=check_finite
    )
    assert lost.device.type == "cuda"
    assert torch.equal(lost.cpu(), expected)
    for a, b in zip(on_cuda, on_cpu):
        assert torch.equal(a.cpu().nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))


@EVERY_CASE
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [0, 1, 7, 8, 1023, 1 << 20, (1 << 22) + 3])
def test_cuda_equals_cpu(case, dtype, size):
    check(case, arguments(case, (size,), dtype))
    check(case, arguments(case, (size,), dtype), list_form=True, check_finite=False)


@EVERY_CASE
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_cuda_mixes_16_bit_with_float32(case, dtype):
    check(case, arguments(case, (10007,), (dtype, *[torch.float32] * (len(case.tensors) - 1))))


@EVERY_CASE
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_cuda_takes_views_off_16_byte_boundaries(case, dtype):
    on_cpu = arguments(case, (1001,), dtype)
    on_cuda = [t.to("cuda")[1:] for t in on_cpu]
    on_cpu = [t[1:] for t in on_cpu]
    case.operator(*on_cpu, *case.scalars)
    case.operator(*on_cuda, *case.scalars)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(on_cuda, on_cpu))


@EVERY_CASE
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_cuda_counts_what_cpu_counts(case, dtype):
    for position in range(len(case.tensors)):
        tensors = arguments(case, (5003,), dtype)
        tensors[position][::7] = float("inf")
        tensors[position][3::11] = float("nan")
        check(case, tensors)


def test_cuda_runs_on_the_current_stream():
    stream = torch.cuda.Stream()
    x, z = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # on any other stream the pull would overtake the fill
        z.fill_(1.0)
        avgpipe_ext.elastic_pull_(x, z, 1.0)
        copy = x.clone()
    stream.synchronize()
    assert torch.equal(copy, torch.ones_like(copy))


def test_cuda_can_be_captured_in_a_graph():
    x, z = torch.zeros(1000, device="cuda"), torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        avgpipe_ext.elastic_pull_(x, z, 0.5)
    x.zero_()
    graph.replay()
    graph.replay()
    assert torch.equal(x, torch.full_like(x, 0.75))


def test_devices_do_not_mix():
    with pytest.raises(ValueError, match="z is on cpu but x is on cuda:0; move all tensors to one device"):
        avgpipe_ext.elastic_pull_(torch.zeros(3, device="cuda"), torch.zeros(3), 0.5)
