"""The CUDA kernels against the CPU ones: equal bit for bit, on torch's streams, without waiting."""

from __future__ import annotations

import os

import pytest
import torch

import avgpipe_ext
from avgpipe_ext import run_time
from tests.avgpipe_ext.cases import CASES, FLOATS, PULL, SIXTEEN_BIT, adam, arguments, mixes, same, sgd

pytestmark = pytest.mark.gpu

EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)
LIST_SIZES = (0, 1, 7, 8, 9, 4095, 4096, 4097, 0, 10007)


@pytest.fixture(autouse=True)
def _kernels():
    path = run_time.cuda_path()
    if path.startswith("none"):
        assert os.environ.get("AVGPIPE_REQUIRE_CUDA") != "1", path
        pytest.skip(path)  # which says why there are no kernels here


def on_gpu(tensors):
    """Copies, of tensors or of lists of them; a slice off a 16-byte boundary stays one."""

    def copy(t):
        whole = torch.empty(t.storage_offset() + t.numel(), dtype=t.dtype, device="cuda")
        return whole[t.storage_offset() :].view(t.shape).copy_(t)

    return [[copy(t) for t in item] if isinstance(item, list) else copy(item) for item in tensors]


def flat(tensors):
    return [t for item in tensors for t in (item if isinstance(item, list) else [item])]


def check(case, on_cpu, **options):
    """Both devices leave the same numbers in all arguments, and count the same."""
    on_cuda = on_gpu(on_cpu)
    expected = case.operator(*on_cpu, *case.scalars, **options)
    lost = case.operator(*on_cuda, *case.scalars, **options)
    assert lost.device.type == "cuda"
    assert torch.equal(lost.cpu(), expected)
    for name, a, b in zip(case.tensors, map(flat, zip(on_cuda)), map(flat, zip(on_cpu))):
        assert all(same(s.cpu(), t) for s, t in zip(a, b)), name


def list_arguments(case, sizes, dtype, offset=0):
    """A list of tensors per argument, each `offset` elements past the beginning of its memory."""
    per_tensor = [arguments(case, (size + offset,), dtype, seed) for seed, size in enumerate(sizes)]
    return [[t[offset:] for t in column] for column in zip(*per_tensor)]


@EVERY_CASE
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [0, 1, 7, 8, 1023, 4097, (1 << 20) + 3])
def test_cuda_equals_cpu(case, dtype, size):
    check(case, arguments(case, (size,), dtype), check_finite=True)
    check(case, arguments(case, (size,), dtype))


@EVERY_CASE
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_cuda_mixes_16_bit_with_float32(case, dtype):
    for dtypes in mixes(case, dtype):
        check(case, arguments(case, (10007,), dtypes), check_finite=True)


@EVERY_CASE
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_cuda_lists_of_uneven_misaligned_and_empty_tensors(case, dtype, offset):
    check(case, list_arguments(case, LIST_SIZES, dtype, offset), check_finite=True)


@EVERY_CASE
def test_cuda_lists_longer_than_one_launch_holds(case):
    check(case, list_arguments(case, [1 + i % 50 for i in range(1500)], torch.float32))


@EVERY_CASE
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_cuda_counts_what_cpu_counts(case, dtype):
    for position in range(len(case.tensors)):
        tensors = arguments(case, (5003,), dtype)
        tensors[position][::7] = float("inf")
        tensors[position][3::11] = float("nan")
        check(case, tensors, check_finite=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("zero", [True, False])
def test_cuda_applies_updates_of_several_replicas(dtype, zero):
    def run(device):
        generator = torch.Generator().manual_seed(0)
        z, *updates = (torch.randn(5003, generator=generator).to(dtype).to(device) for _ in range(6))
        avgpipe_ext.reference_apply_(z, updates, 0.2, zero=zero)
        return [t.cpu() for t in (z, *updates)]

    assert all(same(a, b) for a, b in zip(run("cuda"), run("cpu")))


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("wire", FLOATS, ids=str)
def test_cuda_packs_and_unpacks_as_cpu(source, wire):
    generator = torch.Generator().manual_seed(0)
    on_cpu = [torch.randn(size, generator=generator).to(source) for size in (0, 1, 7, 5000, 13)]
    on_cuda = on_gpu(on_cpu)
    buffer = avgpipe_ext.pack(on_cpu, wire)
    on_device = avgpipe_ext.pack(on_cuda, wire)
    assert same(on_device.cpu(), buffer)
    avgpipe_ext.unpack_(buffer, on_cpu)
    avgpipe_ext.unpack_(on_device, on_cuda)
    assert all(same(a.cpu(), b) for a, b in zip(on_cuda, on_cpu))


# ---- values in device memory -------------------------------------------------------------------------------
DEVICE_CASES = (sgd("momentum", lr=0.1, mu=0.9), adam("step3", step=3, lr=0.01))


@pytest.mark.parametrize("case", DEVICE_CASES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_gradient_scale_and_found_inf_are_read_on_the_device(case, dtype, found):
    on_cpu = arguments(case, (5003,), dtype)
    on_cuda = on_gpu(on_cpu)
    for tensors, device in ((on_cpu, "cpu"), (on_cuda, "cuda")):
        grad_scale, found_inf = (torch.full((), value, device=device) for value in (3.0, found))
        case.operator(*tensors, *case.scalars, grad_scale=grad_scale, found_inf=found_inf)
    assert all(same(a.cpu(), b) for a, b in zip(on_cuda, on_cpu))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("step_dtype", [torch.float32, torch.float64], ids=str)
def test_the_step_is_read_on_the_device(dtype, step_dtype):
    case = DEVICE_CASES[1]
    on_cpu = arguments(case, (5003,), dtype)
    on_cuda = on_gpu(on_cpu)
    case.operator(*on_cpu, *case.scalars)
    case.operator(*on_cuda, *case.scalars, step=torch.tensor(3.0, dtype=step_dtype, device="cuda"))
    # The device's power function may differ from the host's in the last place of a double.
    bound = 1e-6 if dtype == torch.float32 else 1e-14
    for a, b in zip(on_cuda, on_cpu):
        torch.testing.assert_close(a.cpu(), b, rtol=bound, atol=bound)


# ---- streams, graphs, waiting ------------------------------------------------------------------------------
def test_cuda_runs_on_the_current_stream():
    stream = torch.cuda.Stream()
    x, z = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    avgpipe_ext.elastic_pull_(x, z, 1.0)  # compiled and loaded before the race
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # on any other stream the pull would overtake the fill
        z.fill_(1.0)
        avgpipe_ext.elastic_pull_(x, z, 1.0)
        copy = x.clone()
    stream.synchronize()
    assert torch.equal(copy, torch.ones_like(copy))


@EVERY_CASE
def test_cuda_never_waits(case):
    tensors = on_gpu(arguments(case, (1 << 16,), torch.float32))
    case.operator(*tensors, *case.scalars, check_finite=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1_000_000_000)
        end = torch.cuda.Event()
        case.operator(*tensors, *case.scalars, check_finite=True)
        end.record()
        assert not end.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


@EVERY_CASE
def test_cuda_can_be_captured_in_a_graph(case):
    columns = list_arguments(case, LIST_SIZES, torch.float32)
    on_cuda = on_gpu(columns)
    case.operator(*on_gpu(columns), *case.scalars)  # kernels are compiled and loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.operator(*on_cuda, *case.scalars)
    for _ in range(2):
        graph.replay()
        case.operator(*columns, *case.scalars)
    assert all(same(a.cpu(), b) for a, b in zip(flat(on_cuda), flat(columns)))


def test_a_captured_step_counts_on():
    case = DEVICE_CASES[1]
    on_cpu = arguments(case, (5003,), torch.float32)
    on_cuda = on_gpu(on_cpu)
    step = torch.zeros((), device="cuda")
    case.operator(*on_gpu(on_cpu), *case.scalars, step=step + 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step += 1
        case.operator(*on_cuda, *case.scalars, step=step)
    for count in (1.0, 2.0, 3.0):
        graph.replay()
        case.operator(*on_cpu, *case.scalars, step=count)
    for a, b in zip(on_cuda, on_cpu):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-6)


# ---- sizes, devices --------------------------------------------------------------------
def test_cuda_indexes_beyond_32_bits():
    count = (1 << 31) + 9
    needed = 3 * 2 * count
    if torch.cuda.mem_get_info()[0] < needed + (1 << 30):
        pytest.skip(f"needs {needed >> 30} GiB of free device memory")
    x = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
    z = torch.ones(count, dtype=torch.bfloat16, device="cuda")
    avgpipe_ext.elastic_pull_(x, z, 0.5)
    assert torch.equal(x, z.mul_(0.5))


def test_cuda_runs_on_the_tensors_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    x, z = torch.zeros(5003, device="cuda:1"), torch.ones(5003, device="cuda:1")
    avgpipe_ext.elastic_pull_(x, z, 0.5)
    assert torch.equal(x, torch.full_like(x, 0.5))
    assert torch.cuda.current_device() == 0


def test_devices_do_not_mix():
    with pytest.raises(ValueError, match="z is on cpu but x is on cuda:0; move all tensors to one device"):
        avgpipe_ext.elastic_pull_(torch.zeros(3, device="cuda"), torch.zeros(3), 0.5)


# ---- kernels compiled by CuPy ------------------------------------------------------------------------------
@pytest.fixture
def _by_cupy():
    if not run_time.has_cupy():
        pytest.skip(f"CuPy is not installed: {run_time.how_to_get_cupy()}")
    run_time.install(everywhere=True)
    yield
    run_time.uninstall()
    run_time.install_if_needed()


@pytest.mark.usefixtures("_by_cupy")
@EVERY_CASE
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_kernels_compiled_by_cupy_equal_cpu(case, dtype):
    tensors = list_arguments(case, LIST_SIZES, dtype)
    for column in tensors:
        column[3][::7] = float("inf")
        column[4][0] = 1e-40  # subnormal
    check(case, tensors, check_finite=True)


@pytest.mark.usefixtures("_by_cupy")
@EVERY_CASE
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_kernels_compiled_by_cupy_mix_16_bit_with_float32(case, dtype):
    for dtypes in mixes(case, dtype):
        check(case, arguments(case, (10007,), dtypes), check_finite=True)


@pytest.mark.usefixtures("_by_cupy")
@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("wire", FLOATS, ids=str)
def test_kernels_compiled_by_cupy_pack_and_unpack_as_cpu(source, wire):
    test_cuda_packs_and_unpacks_as_cpu(source, wire)


@pytest.mark.usefixtures("_by_cupy")
def test_kernels_compiled_by_cupy_run_on_the_current_stream_and_in_graphs():
    test_cuda_runs_on_the_current_stream()
    test_cuda_can_be_captured_in_a_graph(PULL)


def test_a_device_that_has_machine_code_does_not_use_cupy():
    if not avgpipe_ext.build_info()["cuda"]:
        pytest.skip("built without CUDA kernels")
    launches = []
    try:
        for everywhere in (False, True):
            run_time.install(lambda *arguments: launches.append(arguments), everywhere)
            x, z = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")
            avgpipe_ext.elastic_pull_(x, z, 0.5)
            assert x[0] == (0.0 if everywhere else 0.5)
            assert len(launches) == everywhere
    finally:
        run_time.uninstall()
        run_time.install_if_needed()


@pytest.mark.usefixtures("_by_cupy")
def test_a_kernel_that_cupy_has_not_compiled_is_refused_within_a_capture():
    run_time.install(everywhere=True)  # which has no kernel yet
    x, z = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")
    with (
        pytest.raises(RuntimeError, match="call the operator once before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        avgpipe_ext.elastic_pull_(x, z, 0.5)
    avgpipe_ext.elastic_pull_(x, z, 0.5)
    assert torch.equal(x, torch.full_like(x, 0.5))


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy", reason=f"CuPy is not installed: {run_time.how_to_get_cupy()}")


@EVERY_CASE
def test_cupy_arrays_are_updated_in_place(case, cupy):
    on_cpu = arguments(case, (5003,), torch.float32)
    arrays = [[cupy.asarray(t.numpy()) for t in flat([item])] for item in on_cpu]
    passed = [array if isinstance(item, list) else array[0] for array, item in zip(arrays, on_cpu)]
    expected = case.operator(*on_cpu, *case.scalars, check_finite=True)
    lost = case.operator(*passed, *case.scalars, check_finite=True)
    assert torch.equal(lost.cpu(), expected)
    for array, tensor in zip(flat(arrays), flat(on_cpu)):
        assert same(torch.from_numpy(cupy.asnumpy(array)), tensor)


def test_an_update_of_a_cupy_array_waits_for_cupys_current_stream(cupy):
    x, z = cupy.zeros(1 << 20, cupy.float32), cupy.zeros(1 << 20, cupy.float32)
    z.fill(0.5)
    avgpipe_ext.elastic_pull_(x, z, 1.0)  # both kernels are loaded before the race
    torch.cuda.synchronize()
    filling = torch.cuda.Stream()
    with torch.cuda.stream(filling):
        torch.cuda._sleep(100_000_000)
    with cupy.cuda.Stream.from_external(filling):
        z.fill(1.0)
        avgpipe_ext.elastic_pull_(x, z, 1.0)  # on torch's current stream
    torch.cuda.synchronize()
    assert bool((x == 1.0).all())
