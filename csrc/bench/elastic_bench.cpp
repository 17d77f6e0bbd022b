// Every CPU kernel on one thread, per instruction set and size, compared with the limits of this memory:
// memcpy and multiplying an array in place. bytes_per_second counts the bytes that an update must move:
// operands read and operands written, each once. float32; --benchmark_filter=avx512/adamw selects some.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "elastic/cpu.h"

namespace {

using namespace avgpipe;

struct Free {
    void operator()(float* data) const { std::free(data); }
};
using Array = std::unique_ptr<float, Free>;

// Small numbers, far from subnormal ones.
Array make_array(int64_t count) {
    const int64_t bytes = (count * static_cast<int64_t>(sizeof(float)) + 63) / 64 * 64;
    Array array(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(bytes))));
    for (int64_t i = 0; i < count; ++i)
        array.get()[i] = 0.005f + 0.01f * static_cast<float>(i % 1000) / 1000.0f;
    return array;
}

struct Case {
    const char* name;
    Kernel kernel;
    int64_t replicas;
    bool accumulates;  // update += ..., and kApply leaves zeros; else update = ..., and kApply leaves them
};

constexpr Case kCases[] = {
    {"pull", Kernel::kPull, 1, true},
    {"step", Kernel::kStep, 1, true},
    {"apply/8", Kernel::kApply, 8, true},
    {"apply_keep/8", Kernel::kApply, 8, false},
    {"sgd", Kernel::kSgd, 1, true},
    {"momentum", Kernel::kMomentum, 1, true},
    {"adamw", Kernel::kAdam, 1, true},
    {"adamw_overwrite", Kernel::kAdam, 1, false},
    {"momentum_round/2", Kernel::kMomentumRound, 2, true},
    {"adamw_round/2", Kernel::kAdamRound, 2, true},
    {"adamw_round/4", Kernel::kAdamRound, 4, true},
    {"trial_momentum", Kernel::kTrialMomentum, 1, true},
    {"trial_adam", Kernel::kTrialAdam, 1, true},
    {"predict_sgd", Kernel::kPredictSgd, 1, true},
    {"predict_adam", Kernel::kPredictAdam, 1, true},
    {"correct", Kernel::kCorrect, 1, true},
    {"copy", Kernel::kCopy, 1, true},
};

Settings settings_of(const Case& c) {
    Settings s;
    s.alpha = 0.25;
    s.scale = 1.0 / static_cast<double>(c.replicas);
    s.lr = 1e-5;
    s.beta1 = 0.9;
    s.beta2 = 0.999;
    s.eps = 1e-8;
    s.weight_decay = optimizer_of(c.kernel) == Optimizer::kAdam ? 0.01 : 0.0;
    s.is_decoupled = true;
    s.step_count = 100;
    s.lags = true;
    s.accumulates = s.zeroes = c.accumulates;
    return s;
}

// Replicas share z.
bool is_shared(const Case& c, Slot slot) {
    return c.replicas > 1 && slot == Slot::kZ;
}

int64_t bytes_per_element(const Case& c) {
    int64_t values = 0;
    for (int i = 0; i < kSlots; ++i) {
        const Slot slot = static_cast<Slot>(i);
        const bool is_overwritten = slot == Slot::kUpdate && c.kernel != Kernel::kApply && !c.accumulates;
        const bool is_kept = slot == Slot::kUpdate && c.kernel == Kernel::kApply && !c.accumulates;
        const int64_t once =
            (reads(c.kernel, slot) && !is_overwritten) + (writes(c.kernel, slot) && !is_kept);
        values += is_shared(c, slot) ? once : once * c.replicas;
    }
    return values * static_cast<int64_t>(sizeof(float));
}

void run_case(benchmark::State& state, CpuKernel kernel, const Case& c) {
    const int64_t count = state.range(0);
    std::vector<Array> arrays;
    std::vector<Work> works(static_cast<size_t>(c.replicas));
    for (Work& work : works) {
        work.count = count;
        for (int i = 0; i < kSlots; ++i) {
            const Slot slot = static_cast<Slot>(i);
            if (!uses(c.kernel, slot)) continue;
            if (is_shared(c, slot) && &work != &works.front()) {
                work[slot] = works.front()[slot];
                continue;
            }
            arrays.push_back(make_array(count));
            work[slot] = {arrays.back().get(), DType::kFloat32};
        }
    }
    Job job{c.kernel, settings_of(c)};
    job.works = works.data();
    job.tensors = 1;
    job.replicas = c.replicas;
    for (auto _ : state) benchmark::DoNotOptimize(kernel(job, 0, 0, count));
    state.SetBytesProcessed(state.iterations() * count * bytes_per_element(c));
}

void run_memcpy(benchmark::State& state) {
    const int64_t count = state.range(0);
    const Array source = make_array(count), target = make_array(count);
    for (auto _ : state) {
        std::memcpy(target.get(), source.get(), static_cast<size_t>(count) * sizeof(float));
        benchmark::ClobberMemory();
    }
    state.SetBytesProcessed(state.iterations() * count * 2 * static_cast<int64_t>(sizeof(float)));
}

#ifdef AVGPIPE_X86_64
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void multiply(float* data, int64_t count, float factor) {
    for (int64_t i = 0; i < count; ++i) data[i] *= factor;
}

void run_multiply(benchmark::State& state) {
    const int64_t count = state.range(0);
    const Array array = make_array(count);
    float factor = 1.0f;
    benchmark::DoNotOptimize(factor);
    for (auto _ : state) {
        multiply(array.get(), count, factor);
        benchmark::ClobberMemory();
    }
    state.SetBytesProcessed(state.iterations() * count * 2 * static_cast<int64_t>(sizeof(float)));
}

// In the first-level cache, in the last-level cache, and far beyond.
void sizes(benchmark::internal::Benchmark* one) {
    one->Arg(1 << 10)->Arg(1 << 18)->Arg(1 << 24)->Unit(benchmark::kMicrosecond);
}

void register_kernels(const char* name, CpuKernel kernel) {
    for (const Case& c : kCases) {
        const std::string full = std::string(name) + "/" + c.name;
        benchmark::RegisterBenchmark(full.c_str(), [kernel, &c](benchmark::State& state) {
            run_case(state, kernel, c);
        })->Apply(sizes);
    }
}

}  // namespace

int main(int argc, char** argv) {
    benchmark::RegisterBenchmark("limit/multiply_in_place", run_multiply)->Apply(sizes);
    benchmark::RegisterBenchmark("limit/memcpy", run_memcpy)->Apply(sizes);
    register_kernels("baseline", baseline::run);
#ifdef AVGPIPE_X86_64
    if (__builtin_cpu_supports("avx2")) register_kernels("avx2", avx2::run);
    if (cpu_kernel().run == avx512::run) register_kernels("avx512", avx512::run);
#endif
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
    return 0;
}
