// The CUDA kernels' own source, compiled for the host and run a thread after another, compared with the CPU
// kernels: equal bit for bit. A device only adds its rounding of 16-bit formats and its memory.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "elastic/cpu.h"
#include "elastic/launch.h"

// ---- a device of one thread at a time
// ----------------------------------------------------------------------------------
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

namespace {

struct Index {
    unsigned int x;
};
Index threadIdx, blockIdx, gridDim;

void __syncthreads() {}

// Sums over a warp whose lanes run from the last to the first: lane 0 gets the others' sum at the first of
// the five steps.
int of_other_lanes = 0;
int __shfl_down_sync(unsigned int, int mine, int offset) {
    if (offset != 16) return 0;
    if (threadIdx.x % 32 != 0) {
        of_other_lanes += mine;
        return 0;
    }
    return std::exchange(of_other_lanes, 0);
}
void atomicAdd(unsigned long long* total, unsigned long long more) {
    *total += more;
}

}  // namespace

#include "elastic/kernels.h"

AVGPIPE_CUDA_KERNELS(AVGPIPE_DEFINE_KERNEL)

namespace {

using namespace avgpipe;

#define AVGPIPE_ADDRESS(name, kernel, type, is_mixed) &avgpipe_##name,
void (*const kKernels[])(const LaunchBlock) = {AVGPIPE_CUDA_KERNELS(AVGPIPE_ADDRESS)};

void emulate(const Launch& launch) {
    gridDim.x = static_cast<unsigned int>(grid_size(launch.block.head.chunks, 1));
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        // Thread 0 writes what all read after the barrier; a block without chunks does nothing else.
        auto preparation = std::make_unique<LaunchBlock>(launch.block);
        preparation->head.chunks = 0;
        threadIdx.x = 0;
        kKernels[launch.kernel](*preparation);
        for (threadIdx.x = kThreads; threadIdx.x-- > 0;) kKernels[launch.kernel](launch.block);
    }
}

// ---- jobs
// --------------------------------------------------------------------------------------------------------------
int failures = 0;

void expect(bool condition, const char* what, int kernel, int dtype, long long seen, long long wanted) {
    if (condition || ++failures > 20) return;
    std::fprintf(stderr, "kernel %d, dtype %d: %s: got %lld, want %lld\n", kernel, dtype, what, seen, wanted);
}

enum class Format { kFloat32, kFloat64, kBFloat16, kFloat16, kBFloat16Master, kFloat16Master };
constexpr Format kFormats[] = {Format::kFloat32, Format::kFloat64,        Format::kBFloat16,
                               Format::kFloat16, Format::kBFloat16Master, Format::kFloat16Master};

DType dtype_of(Format format, Slot slot) {
    const bool is_x = slot == Slot::kX || slot == Slot::kGrad;
    if (format == Format::kBFloat16Master) return is_x ? DType::kBFloat16 : DType::kFloat32;
    if (format == Format::kFloat16Master) return is_x ? DType::kFloat16 : DType::kFloat32;
    return static_cast<DType>(format);
}

void put(void* data, DType dtype, int64_t index, double value) {
    const auto narrow_value = static_cast<float>(value);
    if (dtype == DType::kFloat64) static_cast<double*>(data)[index] = value;
    if (dtype == DType::kFloat32) static_cast<float*>(data)[index] = narrow_value;
    if (dtype == DType::kBFloat16) narrow(narrow_value, static_cast<BFloat16*>(data)[index]);
    if (dtype == DType::kFloat16) narrow(narrow_value, static_cast<Float16*>(data)[index]);
}

// Tensors of every operand in separate memory, `shift` elements past a 16-byte boundary.
struct Memory {
    std::vector<std::unique_ptr<unsigned char[]>> buffers;
    std::vector<int64_t> sizes;
    std::vector<Work> works;

    Memory(Kernel kernel, Format format, const std::vector<int64_t>& counts, int64_t replicas, int64_t shift,
           bool has_lost, unsigned int seed) {
        std::mt19937 generator(seed);
        std::normal_distribution<double> normal;
        const auto tensors = static_cast<int64_t>(counts.size());
        for (int64_t index = 0; index < replicas * tensors; ++index) {
            Work work;
            work.count = counts[index % tensors];
            for (int slot = 0; slot < kSlots; ++slot) {
                if (!uses(kernel, static_cast<Slot>(slot))) continue;
                if (static_cast<Slot>(slot) == Slot::kZ && index >= tensors) {
                    work.operands[slot] = works[index % tensors].operands[slot];
                    continue;
                }
                const DType dtype = dtype_of(format, static_cast<Slot>(slot));
                sizes.push_back((work.count + shift + 16) * size_of(dtype));
                buffers.emplace_back(new unsigned char[sizes.back()]());
                void* data = buffers.back().get() + shift * size_of(dtype);
                work.operands[slot] = {data, dtype};
                for (int64_t i = 0; i < work.count; ++i) {
                    double value = normal(generator);
                    if (static_cast<Slot>(slot) == Slot::kSecond) value *= value;
                    if (has_lost && generator() % 29 == 0) value = generator() % 2 == 0 ? INFINITY : 6e4;
                    put(data, dtype, i, value);
                }
            }
            works.push_back(work);
        }
    }
};

void compare(Kernel kernel, Format format, const Settings& settings, const Settings& resolved,
             const std::vector<int64_t>& counts, int64_t replicas, int64_t shift, bool has_lost) {
    Memory on_cpu(kernel, format, counts, replicas, shift, has_lost, 7);
    Memory on_cuda(kernel, format, counts, replicas, shift, has_lost, 7);
    Job job;
    job.kernel = kernel;
    job.tensors = static_cast<int64_t>(counts.size());
    job.replicas = replicas;
    job.settings = resolved;
    job.works = on_cpu.works.data();
    int64_t wanted = 0;
    for (int64_t t = 0; t < job.tensors; ++t) wanted += baseline::run(job, t, 0, counts[t]);
    job.settings = settings;
    job.works = on_cuda.works.data();
    unsigned long long lost = 0;
    for_each_launch(job, &lost, emulate);
    const auto k = static_cast<int>(kernel), f = static_cast<int>(format);
    if (settings.check_finite) expect(static_cast<int64_t>(lost) == wanted, "lost", k, f, lost, wanted);
    for (size_t b = 0; b < on_cpu.buffers.size(); ++b) {
        const int different = std::memcmp(on_cpu.buffers[b].get(), on_cuda.buffers[b].get(), on_cpu.sizes[b]);
        expect(different == 0, "operand differs", k, f, static_cast<long long>(b), -1);
    }
}

Settings example_settings() {
    Settings s;
    s.alpha = 0.3, s.scale = 0.5, s.lr = 0.01, s.weight_decay = 0.1, s.beta1 = 0.9, s.beta2 = 0.99,
    s.eps = 1e-8;
    s.step_count = 3.0;
    return s;
}

std::vector<Settings> variants(Kernel kernel) {
    std::vector<Settings> all{example_settings()};
    Settings s = example_settings();
    s.check_finite = true;
    all.push_back(s);
    s.accumulates = false, s.zeroes = false, s.lags = true, s.is_nesterov = true, s.is_decoupled = true;
    all.push_back(s);
    s.from_step = 0.0, s.from_force = 1.0, s.maximizes = true, s.is_first = true, s.unscale = 0.25;
    all.push_back(s);
    s.skips = true;
    all.push_back(s);
    if (optimizer_of(kernel) == Optimizer::kNone && !may_begin(kernel)) all.resize(3);
    if (is_prediction(kernel)) all.back().updates = 3.0;
    return all;
}

// ---- tests
// -------------------------------------------------------------------------------------------------------------
void test_every_kernel_equals_the_cpu() {
    const std::vector<int64_t> counts{1, 0, 7, 8, 4096, 9001, 16};
    for (int k = 0; k <= static_cast<int>(Kernel::kCopy); ++k) {
        const auto kernel = static_cast<Kernel>(k);
        const bool has_replicas = is_round(kernel) || kernel == Kernel::kApply;
        for (const Format format : kFormats) {
            for (const Settings& settings : variants(kernel)) {
                for (const int64_t shift : {0, 1}) {
                    compare(kernel, format, settings, settings, counts, 1, shift, settings.check_finite);
                    if (has_replicas)
                        compare(kernel, format, settings, settings, {5, 5000}, 6, shift,
                                settings.check_finite);
                }
            }
        }
    }
}

void test_copies_between_all_dtypes() {
    for (int from = 0; from < 4; ++from) {
        for (int to = 0; to < 4; ++to) {
            std::vector<double> source(1003), on_cpu(1003), on_cuda(1003);
            for (int i = 0; i < 1003; ++i)
                put(source.data(), static_cast<DType>(from), i, std::exp(i * 0.05 - 20));
            Work work;
            work.count = 1003;
            work[Slot::kBefore] = {source.data(), static_cast<DType>(from)};
            work[Slot::kX] = {on_cpu.data(), static_cast<DType>(to)};
            Job job;
            job.kernel = Kernel::kCopy;
            job.works = &work;
            job.tensors = 1;
            baseline::run(job, 0, 0, work.count);
            work[Slot::kX].data = on_cuda.data();
            for_each_launch(job, nullptr, emulate);
            const bool is_equal = std::memcmp(on_cpu.data(), on_cuda.data(), sizeof(double) * 1003) == 0;
            expect(is_equal, "copy", from, to, 0, 0);
        }
    }
}

void test_values_in_device_memory_replace_the_hosts() {
    const float step_float = 3.0f, grad_scale = 3.0f, found = 1.0f, not_found = 0.0f;
    const double step_double = 3.0;
    for (const Format format : {Format::kFloat32, Format::kFloat64, Format::kBFloat16}) {
        for (const float* found_inf : {&found, &not_found}) {
            Settings resolved = example_settings();
            resolved.unscale = 1.0 / 3.0;
            resolved.skips = *found_inf != 0.0f;
            Settings given = example_settings();
            given.step_count = 1e6;
            given.grad_scale = &grad_scale;
            given.found_inf = found_inf;
            given.step = &step_float;
            compare(Kernel::kAdam, format, given, resolved, {1000}, 1, 0, false);
            given.step = &step_double;
            given.step_is_double = true;
            compare(Kernel::kAdamRound, format, given, resolved, {1000}, 2, 0, false);
            resolved.step_count = 4.0;
            compare(Kernel::kTrialAdam, format, given, resolved, {1000}, 1, 0, false);
            resolved.step_count = 3.0;
            given.updates = resolved.updates = 3.0;
            compare(Kernel::kPredictAdam, format, given, resolved, {1000}, 1, 0, false);
        }
    }
}

}  // namespace

int main() {
    test_every_kernel_equals_the_cpu();
    test_copies_between_all_dtypes();
    test_values_in_device_memory_replace_the_hosts();
    if (failures == 0) std::puts("emulated_cuda_test: every CUDA kernel equals the CPU's, bit for bit");
    return failures == 0 ? 0 : 1;
}
