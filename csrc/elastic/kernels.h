// The CUDA kernels, for nvcc and for NVRTC: they include no header of the system or of CUDA. Every operand is
// read and written once, 16 bytes at a time if the tensor's addresses allow it; one kernel serves a flat
// arena and lists of tensors.
#pragma once

#include "elastic/access.h"

namespace avgpipe {

// A tensor's words in the block.
template <Kernel kKernel>
struct Entry {
    static constexpr int kReplicaWords = 1 + pointer_words(kKernel);
    const LaunchBlock& block;
    int64_t base;

    __device__ __forceinline__ Entry(const LaunchBlock& block, int64_t tensor)
        : block(block), base(tensor * (kTensorWords + int64_t{block.head.replicas} * kReplicaWords)) {}

    __device__ __forceinline__ int64_t count() const { return static_cast<int64_t>(block.words[base]); }
    __device__ __forceinline__ int64_t end_chunk() const {
        return static_cast<int64_t>(block.words[base + 1]);
    }
    __device__ __forceinline__ uint64_t flags(int replica) const {
        return block.words[base + kTensorWords + replica * kReplicaWords];
    }
    template <Slot kSlot>
    __device__ __forceinline__ Operand operand(int replica) const {
        constexpr int kIndex = pointer_index(kKernel, kSlot);
        const int64_t word = base + kTensorWords + replica * kReplicaWords;
        const uint64_t dtypes = block.words[word] >> (kDTypeBits * static_cast<int>(kSlot));
        const uint64_t address = block.words[word + 1 + kIndex];
        return {reinterpret_cast<void*>(address), static_cast<DType>(dtypes & ((1u << kDTypeBits) - 1))};
    }
};

// The first tensor whose chunks end after `chunk`.
template <Kernel kKernel>
__device__ __forceinline__ int find_tensor(const LaunchBlock& block, int64_t chunk) {
    int low = 0;
    for (int high = block.head.tensors - 1; low < high;) {
        const int middle = (low + high) / 2;
        if (Entry<kKernel>(block, middle).end_chunk() > chunk) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

// The inputs of elements that are not operands in memory.
template <class A>
struct Constants {
    const Scalars<A>& scalars;
    bool checks;  // count lost elements
};

// The operands of one replica.
template <Kernel kKernel, bool kMixed>
struct Operands {
    Operand slots[kSlots];

    __device__ __forceinline__ Operands(const Entry<kKernel>& entry, int replica) {
        set<Slot::kX>(entry, replica);
        set<Slot::kBefore>(entry, replica);
        set<Slot::kZ>(entry, replica);
        set<Slot::kUpdate>(entry, replica);
        set<Slot::kGrad>(entry, replica);
        set<Slot::kFirst>(entry, replica);
        set<Slot::kSecond>(entry, replica);
    }
    template <Slot kSlot>
    __device__ __forceinline__ void set(const Entry<kKernel>& entry, int replica) {
        if constexpr (uses(kKernel, kSlot))
            slots[static_cast<int>(kSlot)] = entry.template operand<kSlot>(replica);
    }
    __device__ __forceinline__ const Operand& operator[](Slot slot) const {
        return slots[static_cast<int>(slot)];
    }
};

template <class A, bool kMixed>
__device__ __forceinline__ A limit_of(const Operand& operand) {
    return overflow_limit<A>(kMixed ? operand.dtype : DType::kFloat64);
}

// One pass over kCount elements from `first` of one replica; z stays with the caller. Returns how many
// elements were lost.
template <Kernel kKernel, bool kMixed, int kCount, class A>
__device__ __forceinline__ int advance_group(const Operands<kKernel, kMixed>& operands, int64_t first,
                                             const Constants<A>& constants, A (&z)[kCount]) {
    const Scalars<A>& s = constants.scalars;
    A x[kCount] = {}, before[kCount] = {}, update[kCount] = {}, grad[kCount] = {}, old1[kCount] = {},
      old2[kCount] = {};
    if constexpr (reads(kKernel, Slot::kX)) load<kMixed>(operands[Slot::kX], first, x);
    if constexpr (reads(kKernel, Slot::kBefore)) load<kMixed>(operands[Slot::kBefore], first, before);
    if constexpr (reads(kKernel, Slot::kGrad)) load<kMixed>(operands[Slot::kGrad], first, grad);
    if constexpr (reads(kKernel, Slot::kSecond)) load<kMixed>(operands[Slot::kSecond], first, old2);
    // Overwritten operands are not read: an update that does not accumulate, a momentum that begins.
    if constexpr (reads(kKernel, Slot::kFirst))
        if (!may_begin(kKernel) || !s.is_first || s.skips) load<kMixed>(operands[Slot::kFirst], first, old1);
    if constexpr (reads(kKernel, Slot::kUpdate))
        if (s.accumulates) load<kMixed>(operands[Slot::kUpdate], first, update);

    const Limits<A> limits{limit_of<A, kMixed>(operands[Slot::kX]), limit_of<A, kMixed>(operands[Slot::kZ]),
                           limit_of<A, kMixed>(operands[Slot::kUpdate])};
    int lost = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        Element<A> e{x[i], before[i], z[i], update[i], grad[i], old1[i], old2[i]};
        if (constants.checks) {
            lost += advance_checked<kKernel>(e, s, limits) ? 1 : 0;
        } else {
            advance<kKernel>(e, s);
        }
        x[i] = e.x, z[i] = e.z, update[i] = e.update, old1[i] = e.first, old2[i] = e.second;
    }
    if constexpr (writes(kKernel, Slot::kX)) store<kMixed>(operands[Slot::kX], first, x);
    if constexpr (writes(kKernel, Slot::kFirst)) store<kMixed>(operands[Slot::kFirst], first, old1);
    if constexpr (writes(kKernel, Slot::kSecond)) store<kMixed>(operands[Slot::kSecond], first, old2);
    if constexpr (writes(kKernel, Slot::kUpdate)) store<kMixed>(operands[Slot::kUpdate], first, update);
    return lost;
}

// Replicas whose operands a thread requests at once: one after another, latency would dominate.
constexpr int kTogether = 4;

// The operands' elements of the replicas from `replica` on, `count` of them.
template <Slot kSlot, bool kMixed, Kernel kKernel, int kCount, class A>
__device__ __forceinline__ void load_together(const Entry<kKernel>& entry, int replica, int count,
                                              int64_t first, A (&values)[kTogether][kCount]) {
#pragma unroll
    for (int j = 0; j < kTogether; ++j)
        if (j < count) load<kMixed>(entry.template operand<kSlot>(replica + j), first, values[j]);
}

// z += scale update of the replicas from `replica` on, `count` of them.
template <bool kMixed, int kCount, class A>
__device__ __forceinline__ int apply_together(const Entry<Kernel::kApply>& entry, int replica, int count,
                                              int64_t first, const Constants<A>& constants, A (&z)[kCount]) {
    const Limits<A> limits{A(0), limit_of<A, kMixed>(entry.template operand<Slot::kZ>(0)), A(0)};
    A updates[kTogether][kCount] = {};
    load_together<Slot::kUpdate, kMixed>(entry, replica, count, first, updates);
    int lost = 0;
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
        if (j >= count) break;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            Element<A> e{};
            e.z = z[i], e.update = updates[j][i];
            if (constants.checks) {
                lost += advance_checked<Kernel::kApply>(e, constants.scalars, limits) ? 1 : 0;
            } else {
                advance<Kernel::kApply>(e, constants.scalars);
            }
            z[i] = e.z;
        }
        constexpr A kZeros[kCount] = {};
        if (constants.scalars.zeroes)
            store<kMixed>(entry.template operand<Slot::kUpdate>(replica + j), first, kZeros);
    }
    return lost;
}

// x += alpha (z - x) of the replicas from `replica` on, `count` of them.
template <Kernel kKernel, bool kMixed, int kCount, class A>
__device__ __forceinline__ void pull_together(const Entry<kKernel>& entry, int replica, int count,
                                              int64_t first, const Constants<A>& constants,
                                              const A (&z)[kCount]) {
    A x[kTogether][kCount] = {};
    load_together<Slot::kX, kMixed>(entry, replica, count, first, x);
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
        if (j >= count) break;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            Element<A> e{};
            e.x = x[j][i], e.z = z[i];
            advance<Kernel::kPull>(e, constants.scalars);
            x[j][i] = e.x;
        }
        store<kMixed>(entry.template operand<Slot::kX>(replica + j), first, x[j]);
    }
}

// All replicas' passes over kCount elements: z is read and written once, and each x is pulled to it in a
// round. A thread reads again only the x that it stored itself.
template <Kernel kKernel, bool kMixed, int kCount, class A>
__device__ __forceinline__ int advance_replicas(const Entry<kKernel>& entry, int64_t first,
                                                const Constants<A>& constants) {
    const int replicas = entry.block.head.replicas;
    const Operand reference = entry.template operand<Slot::kZ>(0);
    A z[kCount];
    load<kMixed>(reference, first, z);
    int lost = 0;
    if constexpr (kKernel == Kernel::kApply) {
#pragma unroll 1
        for (int r = 0; r < replicas; r += kTogether)
            lost += apply_together<kMixed>(entry, r, replicas - r, first, constants, z);
    } else {
#pragma unroll 1
        for (int r = 0; r < replicas; ++r) {
            const Operands<kKernel, kMixed> operands(entry, r);
            lost += advance_group<kKernel, kMixed, kCount>(operands, first, constants, z);
        }
    }
    store<kMixed>(reference, first, z);
    if constexpr (is_round(kKernel)) {
        round_to<kMixed>(reference.dtype, z);
#pragma unroll 1
        for (int r = 0; r < replicas; r += kTogether)
            pull_together<kKernel, kMixed>(entry, r, replicas - r, first, constants, z);
    }
    return lost;
}

// The elements begin <= index < end of a tensor, kCount at a time; their number is a multiple of kCount.
template <Kernel kKernel, bool kMixed, int kCount, class A>
__device__ __forceinline__ int advance_range(const Entry<kKernel>& entry, int64_t begin, int64_t end,
                                             const Constants<A>& constants) {
    int lost = 0;
    const int64_t start = begin + static_cast<int64_t>(threadIdx.x) * kCount;
    if constexpr (writes(kKernel, Slot::kZ)) {
#pragma unroll 1
        for (int64_t first = start; first < end; first += kThreads * kCount)
            lost += advance_replicas<kKernel, kMixed, kCount>(entry, first, constants);
    } else {
        const Operands<kKernel, kMixed> operands(entry, 0);
#pragma unroll 1
        for (int64_t first = start; first < end; first += kThreads * kCount) {
            A z[kCount] = {};
            if constexpr (uses(kKernel, Slot::kZ)) load<kMixed>(operands[Slot::kZ], first, z);
            lost += advance_group<kKernel, kMixed, kCount>(operands, first, constants, z);
        }
    }
    return lost;
}

__device__ __forceinline__ const Scalars<float>& host_scalars(const BlockHead& head, float) {
    return head.floats;
}
__device__ __forceinline__ const Scalars<double>& host_scalars(const BlockHead& head, double) {
    return head.doubles;
}

// With the values that are in device memory; the reciprocal in double, as on the host.
template <Kernel kKernel, class A>
__device__ __forceinline__ Scalars<A> device_scalars(Settings s) {
    if (s.step != nullptr) {
        const double count =
            s.step_is_double ? *static_cast<const double*>(s.step) : *static_cast<const float*>(s.step);
        s.step_count = count + uncounted_steps(kKernel);
    }
    if (s.grad_scale != nullptr) s.unscale = 1.0 / static_cast<double>(*s.grad_scale);
    if (s.found_inf != nullptr) s.skips = *s.found_inf != 0.0f;
    return scalars_of<A>(s, optimizer_of(kKernel));
}

// One atomic addition per warp that lost something: rare, and integer sums do not depend on their order.
__device__ __forceinline__ void add_lost(int mine, unsigned long long* total) {
    for (int offset = 16; offset > 0; offset /= 2) mine += __shfl_down_sync(0xFFFFFFFFu, mine, offset);
    if (threadIdx.x % 32 == 0 && mine != 0) atomicAdd(total, static_cast<unsigned long long>(mine));
}

// A block of threads takes every gridDim.x-th chunk.
template <Kernel kKernel, class A, bool kMixed>
__device__ __forceinline__ void run_block(const LaunchBlock& block) {
    const Settings& settings = block.head.settings;
    __shared__ Scalars<A> shared;
    if (threadIdx.x == 0) {
        shared = host_scalars(block.head, A());
        if constexpr (optimizer_of(kKernel) != Optimizer::kNone) {
            if (settings.step != nullptr || settings.grad_scale != nullptr || settings.found_inf != nullptr)
                shared = device_scalars<kKernel, A>(settings);
        }
    }
    __syncthreads();
    const Constants<A> constants{shared, kKernel != Kernel::kCopy && settings.check_finite};
    constexpr int kCount = kGroup<A, kMixed>;
    int lost = 0;  // a thread's share of 2^31 lost elements is far beyond any memory
#pragma unroll 1
    for (int64_t chunk = blockIdx.x; chunk < block.head.chunks; chunk += gridDim.x) {
        const int tensor = find_tensor<kKernel>(block, chunk);
        const Entry<kKernel> entry(block, tensor);
        const int64_t before = tensor == 0 ? 0 : Entry<kKernel>(block, tensor - 1).end_chunk();
        const int64_t begin = (chunk - before) * kChunk;
        const int64_t count = entry.count() - begin < kChunk ? entry.count() - begin : kChunk;
        const bool is_aligned = (entry.flags(0) & kAlignedFlag) != 0;
        const int64_t middle = begin + (is_aligned ? count / kCount * kCount : 0);
        lost += advance_range<kKernel, kMixed, kCount>(entry, begin, middle, constants);
        lost += advance_range<kKernel, kMixed, 1>(entry, middle, begin + count, constants);
    }
    if (constants.checks) add_lost(lost, block.head.lost);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kMostResident = 4;  // of 1,024 threads
#else
constexpr int kMostResident = 5;
#endif

// Blocks that a multiprocessor holds at once: as many as leave the kernel the registers that it needs.
constexpr AVGPIPE_HD int resident_blocks(Optimizer optimizer, bool is_double, bool is_mixed) {
    if (optimizer == Optimizer::kNone) return is_mixed ? 3 : is_double ? 4 : kMostResident;
    if (is_mixed || is_double) return 2;
    return optimizer == Optimizer::kAdam ? 3 : 4;
}

}  // namespace avgpipe

// A kernel that can be found by its name.
#define AVGPIPE_DEFINE_KERNEL(name, kernel, type, is_mixed)                                         \
    extern "C" __global__ void __launch_bounds__(                                                   \
        avgpipe::kThreads, avgpipe::resident_blocks(avgpipe::optimizer_of(avgpipe::Kernel::kernel), \
                                                    sizeof(type) == 8, is_mixed))                   \
        avgpipe_##name(const __grid_constant__ avgpipe::LaunchBlock block) {                        \
        avgpipe::run_block<avgpipe::Kernel::kernel, type, is_mixed>(block);                         \
    }
