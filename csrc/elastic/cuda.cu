#include <stdexcept>
#include <string>

#include "elastic/cuda.h"

namespace avgpipe {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 8;  // 2048 threads: a full multiprocessor of sm_80 and sm_90
constexpr int64_t kVectorBytes = 16;

// Elements a thread moves at a time, so that its narrowest operand is one 16-byte access.
template <class A, bool kMixed>
constexpr int kGroup = kMixed ? 8 : static_cast<int>(kVectorBytes / sizeof(A));

template <class Stored, int kCount>
struct alignas(kVectorBytes) Pack {
    Stored values[kCount];
};

template <class Stored, int kCount, class A>
__device__ __forceinline__ void load_as(const Operand& operand, int64_t first, A (&values)[kCount]) {
    if constexpr (kCount == 1) {
        values[0] = widen(static_cast<const Stored*>(operand.data)[first]);
    } else {
        const auto pack =
            *reinterpret_cast<const Pack<Stored, kCount>*>(static_cast<const Stored*>(operand.data) + first);
#pragma unroll
        for (int i = 0; i < kCount; ++i) values[i] = widen(pack.values[i]);
    }
}

template <class Stored, int kCount, class A>
__device__ __forceinline__ void store_as(const Operand& operand, int64_t first, const A (&values)[kCount]) {
    if constexpr (kCount == 1) {
        narrow(values[0], static_cast<Stored*>(operand.data)[first]);
    } else {
        Pack<Stored, kCount> pack;
#pragma unroll
        for (int i = 0; i < kCount; ++i) narrow(values[i], pack.values[i]);
        *reinterpret_cast<Pack<Stored, kCount>*>(static_cast<Stored*>(operand.data) + first) = pack;
    }
}

// A mixed kernel asks for the operand's format each time: all threads take the same branch, and memory is the
// limit.
template <bool kMixed, int kCount, class A>
__device__ __forceinline__ void load(const Operand& operand, int64_t first, A (&values)[kCount]) {
    if constexpr (!kMixed) {
        load_as<A>(operand, first, values);
    } else if (operand.dtype == DType::kBFloat16) {
        load_as<BFloat16>(operand, first, values);
    } else if (operand.dtype == DType::kFloat16) {
        load_as<Float16>(operand, first, values);
    } else {
        load_as<float>(operand, first, values);
    }
}

template <bool kMixed, int kCount, class A>
__device__ __forceinline__ void store(const Operand& operand, int64_t first, const A (&values)[kCount]) {
    if constexpr (!kMixed) {
        store_as<A>(operand, first, values);
    } else if (operand.dtype == DType::kBFloat16) {
        store_as<BFloat16>(operand, first, values);
    } else if (operand.dtype == DType::kFloat16) {
        store_as<Float16>(operand, first, values);
    } else {
        store_as<float>(operand, first, values);
    }
}

// Advances kCount elements from `first`; returns how many were lost, 0 without check_finite.
template <Rule kRule, bool kMixed, int kCount, class A>
__device__ __forceinline__ int advance_group(const Work& work, int64_t first, A alpha,
                                             const Limits<A>& limits) {
    A x[kCount], x_before[kCount], z[kCount], update[kCount];
    if constexpr (reads_x(kRule)) load<kMixed>(work.x, first, x);
    if constexpr (reads_x_before(kRule)) load<kMixed>(work.x_before, first, x_before);
    if constexpr (has_update(kRule)) load<kMixed>(work.update, first, update);
    load<kMixed>(work.z, first, z);
    int lost = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        Element<A> e{};
        if constexpr (reads_x(kRule)) e.x = x[i];
        if constexpr (reads_x_before(kRule)) e.x_before = x_before[i];
        if constexpr (has_update(kRule)) e.update = update[i];
        e.z = z[i];
        if (work.check_finite) {
            lost += advance_checked<kRule>(e, alpha, limits) ? 1 : 0;
        } else {
            advance<kRule>(e, alpha);
        }
        if constexpr (reads_x(kRule)) x[i] = e.x;
        if constexpr (has_update(kRule)) update[i] = e.update;
        if constexpr (writes_z(kRule)) z[i] = e.z;
    }
    if constexpr (reads_x(kRule)) store<kMixed>(work.x, first, x);
    if constexpr (has_update(kRule)) store<kMixed>(work.update, first, update);
    if constexpr (writes_z(kRule)) store<kMixed>(work.z, first, z);
    return lost;
}

// One atomic addition per warp that lost something: rare, and integer sums do not depend on their order.
__device__ __forceinline__ void add_lost(int64_t mine, unsigned long long* total) {
    for (int offset = 16; offset > 0; offset /= 2) mine += __shfl_down_sync(0xFFFFFFFFu, mine, offset);
    if (threadIdx.x % 32 == 0 && mine != 0) atomicAdd(total, static_cast<unsigned long long>(mine));
}

// `groups` whole groups by 16-byte accesses, the elements after them one by one.
template <Rule kRule, class A, bool kMixed>
__global__ void __launch_bounds__(kThreads)
    elastic_kernel(Work work, int64_t groups, unsigned long long* total) {
    const Limits<A> limits{overflow_limit<A>(work.x.dtype), overflow_limit<A>(work.z.dtype),
                           overflow_limit<A>(work.update.dtype)};
    const A alpha = static_cast<A>(work.alpha);
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
    constexpr int kCount = kGroup<A, kMixed>;
    int64_t lost = 0;
    for (int64_t group = thread; group < groups; group += threads) {
        lost += advance_group<kRule, kMixed, kCount>(work, group * kCount, alpha, limits);
    }
    for (int64_t i = groups * kCount + thread; i < work.count; i += threads) {
        lost += advance_group<kRule, kMixed, 1>(work, i, alpha, limits);
    }
    if (work.check_finite) add_lost(lost, total);
}

void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess) {
        throw std::runtime_error(std::string("avgpipe: ") + what + ": " + cudaGetErrorString(status));
    }
}

bool is_aligned(const Operand& operand) {
    return reinterpret_cast<uintptr_t>(operand.data) % kVectorBytes == 0;
}

bool is_aligned(const Work& work) {
    return is_aligned(work.x) && is_aligned(work.x_before) && is_aligned(work.z) && is_aligned(work.update);
}

// A grid that fills the device once; the grid-stride loop does the rest.
unsigned int grid_size(int64_t threads, int device) {
    int processors = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "device attribute");
    const int64_t wanted = (threads + kThreads - 1) / kThreads;
    const int64_t most = static_cast<int64_t>(processors) * kBlocksPerProcessor;
    return static_cast<unsigned int>(wanted < most ? wanted : most);
}

template <Rule kRule, class A, bool kMixed>
void launch(const Work& work, unsigned long long* lost, int device, cudaStream_t stream) {
    constexpr int kCount = kGroup<A, kMixed>;
    const int64_t groups = is_aligned(work) ? work.count / kCount : 0;
    const int64_t threads = groups > 0 ? groups : work.count;
    elastic_kernel<kRule, A, kMixed><<<grid_size(threads, device), kThreads, 0, stream>>>(work, groups, lost);
    check(cudaGetLastError(), "launch of an elastic kernel");
}

template <class A, bool kMixed>
void launch_typed(Rule rule, const Work& work, unsigned long long* lost, int device, cudaStream_t stream) {
    switch (rule) {
        case Rule::kPull:
            return launch<Rule::kPull, A, kMixed>(work, lost, device, stream);
        case Rule::kStep:
            return launch<Rule::kStep, A, kMixed>(work, lost, device, stream);
        case Rule::kStaleStep:
            return launch<Rule::kStaleStep, A, kMixed>(work, lost, device, stream);
        case Rule::kEasgd:
            return launch<Rule::kEasgd, A, kMixed>(work, lost, device, stream);
        case Rule::kApply:
            return launch<Rule::kApply, A, kMixed>(work, lost, device, stream);
    }
}

bool uses_16_bit(const Work& work) {
    return is_16_bit(work.x.dtype) || is_16_bit(work.x_before.dtype) || is_16_bit(work.z.dtype) ||
           is_16_bit(work.update.dtype);
}

}  // namespace

void launch_elastic(Rule rule, const Work& work, unsigned long long* lost, int device, void* stream) {
    if (work.count == 0) return;  // an empty grid is a launch error
    // The runtime linked in here is not torch's: it learns the device of its own.
    check(cudaSetDevice(device), "choice of the device");
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    if (work.z.dtype == DType::kFloat64)
        return launch_typed<double, false>(rule, work, lost, device, cuda_stream);
    if (uses_16_bit(work)) return launch_typed<float, true>(rule, work, lost, device, cuda_stream);
    launch_typed<float, false>(rule, work, lost, device, cuda_stream);
}

}  // namespace avgpipe
