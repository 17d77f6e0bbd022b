// Compiled once per instruction set, with AVGPIPE_ISA naming the namespace. Only headers whose functions are
// always inlined are included: a shared inline function compiled here for a newer processor could be the copy
// the linker keeps.
#include "elastic/cpu.h"

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace avgpipe::AVGPIPE_ISA {
namespace {

// Elements converted at a time: a float buffer of 2 KiB for each operand stays in the first-level cache.
constexpr int64_t kTile = 512;

// Elements of a round that are done for all replicas before the next ones. The weights and z of these wait in
// the second-level cache for the pull, while each operand is still read in pieces that the prefetchers
// follow.
constexpr int64_t kMostRoundTile = 8192;
int64_t round_tile(int64_t replicas) {
    const int64_t tile = 32768 / replicas / kTile * kTile;
    return tile < kTile ? kTile : tile > kMostRoundTile ? kMostRoundTile : tile;
}

template <class A, class Stored>
void widen_all(const Operand& operand, int64_t first, int64_t count, A* __restrict__ values) {
    const Stored* __restrict__ stored = static_cast<const Stored*>(operand.data) + first;
    for (int64_t i = 0; i < count; ++i) values[i] = static_cast<A>(widen(stored[i]));
}

template <class A, class Stored>
void narrow_all(const A* __restrict__ values, int64_t count, Stored* __restrict__ stored) {
    for (int64_t i = 0; i < count; ++i) narrow(static_cast<float>(values[i]), stored[i]);
}

template <class A>
constexpr DType kOwn = sizeof(A) == sizeof(double) ? DType::kFloat64 : DType::kFloat32;

// The operand's elements as A: in place where they are stored so, otherwise in `buffer`.
template <class A>
A* load(const Operand& operand, int64_t first, int64_t count, A* buffer) {
    switch (operand.dtype) {
        case kOwn<A>:
            return static_cast<A*>(operand.data) + first;
        case DType::kBFloat16:
            widen_all<A, BFloat16>(operand, first, count, buffer);
            break;
        case DType::kFloat16:
            widen_all<A, Float16>(operand, first, count, buffer);
            break;
        default:
            widen_all<A, float>(operand, first, count, buffer);
    }
    return buffer;
}

// Copies without bringing the destination into the caches: it is not read first, and nothing is evicted for
// it.
void stream(void* to, const void* from, int64_t bytes) {
#ifdef __SSE2__
#ifdef __AVX512F__
    using Line = __m512i;
#else
    using Line = __m128i;
#endif
    constexpr int64_t kLine = sizeof(Line);
    auto* out = static_cast<unsigned char*>(to);
    const auto* in = static_cast<const unsigned char*>(from);
    int64_t head = -static_cast<int64_t>(reinterpret_cast<uintptr_t>(to)) & (kLine - 1);
    if (head > bytes) head = bytes;
    memcpy(out, in, head);
    int64_t i = head;
    for (; i + kLine <= bytes; i += kLine) {
#ifdef __AVX512F__
        _mm512_stream_si512(reinterpret_cast<Line*>(out + i), _mm512_loadu_si512(in + i));
#else
        _mm_stream_si128(reinterpret_cast<Line*>(out + i),
                         _mm_loadu_si128(reinterpret_cast<const Line*>(in + i)));
#endif
    }
    memcpy(out + i, in + i, bytes - i);
#else
    memcpy(to, from, bytes);
#endif
}

// Streamed stores become visible to other threads in order with the ones after this.
void end_of_streaming() {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

template <class Stored, class A>
void store_as(const Operand& operand, int64_t first, int64_t count, const A* values, bool streams) {
    Stored* stored = static_cast<Stored*>(operand.data) + first;
    if (!streams) return narrow_all(values, count, stored);
    Stored narrowed[kTile];
    narrow_all(values, count, narrowed);
    stream(stored, narrowed, count * static_cast<int64_t>(sizeof(Stored)));
}

// Rounds a buffer back into the operand; what is in place is there already.
template <class A>
void store(const Operand& operand, int64_t first, int64_t count, const A* values, bool streams = false) {
    A* own = static_cast<A*>(operand.data) + first;
    switch (operand.dtype) {
        case kOwn<A>:
            if (values == own) return;
            return streams ? stream(own, values, count * static_cast<int64_t>(sizeof(A)))
                           : static_cast<void>(memcpy(own, values, count * sizeof(A)));
        case DType::kBFloat16:
            return store_as<BFloat16>(operand, first, count, values, streams);
        case DType::kFloat16:
            return store_as<Float16>(operand, first, count, values, streams);
        default:
            return store_as<float>(operand, first, count, values, streams);
    }
}

// Where the elements of a tile are, by slot. The update has two places: it may be read in one and left in
// another.
template <class A>
struct Tile {
    A* slots[kSlots] = {};
    A* new_update = nullptr;

    A*& operator[](Slot slot) { return slots[static_cast<int>(slot)]; }
    A* operator[](Slot slot) const { return slots[static_cast<int>(slot)]; }
};

template <Kernel kKernel, bool kCheck, class A>
int64_t advance_tile(const Tile<A>& tile, int64_t count, const Scalars<A>& all, const Limits<A>& limits) {
    A *x = tile[Slot::kX], *z = tile[Slot::kZ], *first = tile[Slot::kFirst], *second = tile[Slot::kSecond];
    const A *before = tile[Slot::kBefore], *grad = tile[Slot::kGrad], *update = tile[Slot::kUpdate];
    A* new_update = tile.new_update;
    const Scalars<A> s = all;  // a copy that no store below can change
    // A counter as wide as A keeps the loop's lanes of one width.
    std::conditional_t<sizeof(A) == 4, int32_t, int64_t> lost = 0;
    // Places are equal or apart, so no iteration depends on another one.
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
        Element<A> e{};
        if constexpr (uses(kKernel, Slot::kX)) e.x = x[i];
        if constexpr (uses(kKernel, Slot::kBefore)) e.before = before[i];
        if constexpr (uses(kKernel, Slot::kZ)) e.z = z[i];
        if constexpr (uses(kKernel, Slot::kUpdate)) e.update = update[i];
        if constexpr (uses(kKernel, Slot::kGrad)) e.grad = grad[i];
        if constexpr (uses(kKernel, Slot::kFirst)) e.first = first[i];
        if constexpr (uses(kKernel, Slot::kSecond)) e.second = second[i];
        if constexpr (kCheck) {
            lost += advance_checked<kKernel>(e, s, limits) ? 1 : 0;
        } else {
            advance<kKernel>(e, s);
        }
        if constexpr (writes(kKernel, Slot::kX)) x[i] = e.x;
        if constexpr (writes(kKernel, Slot::kZ)) z[i] = e.z;
        if constexpr (writes(kKernel, Slot::kUpdate)) new_update[i] = e.update;
        if constexpr (writes(kKernel, Slot::kFirst)) first[i] = e.first;
        if constexpr (writes(kKernel, Slot::kSecond)) second[i] = e.second;
    }
    return lost;
}

// One pass of one replica.
template <Kernel kKernel, bool kCheck, class A>
int64_t run_pass(const Work& work, const Scalars<A>& s, bool streams, int64_t begin, int64_t end) {
    const Limits<A> limits{overflow_limit<A>(work[Slot::kX].dtype), overflow_limit<A>(work[Slot::kZ].dtype),
                           overflow_limit<A>(work[Slot::kUpdate].dtype)};
    constexpr bool kGathers = writes(kKernel, Slot::kUpdate) && kKernel != Kernel::kApply;
    const bool is_overwritten = kGathers && !s.accumulates;
    const bool is_streamed = is_overwritten && streams;
    alignas(64) A buffers[kSlots][kTile];
    alignas(64) A new_update[kTile];
    int64_t lost = 0;
    for (int64_t first = begin; first < end; first += kTile) {
        const int64_t count = end - first < kTile ? end - first : kTile;
        Tile<A> tile;
        for (int slot = 0; slot < kSlots; ++slot) {
            if (!uses(kKernel, static_cast<Slot>(slot))) continue;
            const bool is_read = static_cast<Slot>(slot) != Slot::kUpdate || !is_overwritten;
            // What is not read may hold anything: x stands for it, unused.
            tile.slots[slot] =
                is_read ? load(work.operands[slot], first, count, buffers[slot]) : tile[Slot::kX];
        }
        if constexpr (writes(kKernel, Slot::kUpdate)) {
            const Operand& update = work[Slot::kUpdate];
            const bool is_own = update.dtype == kOwn<A>;
            tile.new_update = is_own && !is_streamed ? static_cast<A*>(update.data) + first : new_update;
        }
        lost += advance_tile<kKernel, kCheck>(tile, count, s, limits);
        for (int slot = 0; slot < kSlots; ++slot) {
            if (!writes(kKernel, static_cast<Slot>(slot)) || static_cast<Slot>(slot) == Slot::kUpdate)
                continue;
            store(work.operands[slot], first, count, tile.slots[slot]);
        }
        if constexpr (writes(kKernel, Slot::kUpdate)) {
            const bool is_left = kKernel == Kernel::kApply && !s.zeroes;
            if (!is_left) store(work[Slot::kUpdate], first, count, tile.new_update, is_streamed);
        }
    }
    if (is_streamed) end_of_streaming();
    return lost;
}

// The work on the elements from `first` on.
Work from(const Work& work, int64_t first) {
    Work rest = work;
    for (Operand& operand : rest.operands) {
        if (operand.data != nullptr)
            operand.data = static_cast<unsigned char*>(operand.data) + first * size_of(operand.dtype);
    }
    return rest;
}

// The passes of all replicas over one z, piece by piece, so that z and the weights are fetched from memory
// once.
template <Kernel kKernel, bool kCheck, class A>
int64_t run_replicas(const Job& job, int64_t tensor, const Scalars<A>& s, int64_t begin, int64_t end) {
    const Operand z = job.work(tensor, 0)[Slot::kZ];
    const bool is_wide = z.dtype == kOwn<A>;
    const int64_t tile = round_tile(job.replicas);
    alignas(64) A sum[kMostRoundTile];
    int64_t lost = 0;
    for (int64_t first = begin; first < end; first += tile) {
        const int64_t count = end - first < tile ? end - first : tile;
        if (!is_wide) load(z, first, count, sum);
        for (int64_t r = 0; r < job.replicas; ++r) {
            Work work = from(job.work(tensor, r), first);
            if (!is_wide) work[Slot::kZ] = {sum, kOwn<A>};
            lost += run_pass<kKernel, kCheck>(work, s, job.streams, 0, count);
        }
        if (!is_wide) {
            for (int64_t i = 0; i < count; i += kTile)
                store(z, first + i, count - i < kTile ? count - i : kTile, sum + i);
        }
        if constexpr (is_round(kKernel)) {
            for (int64_t r = 0; r < job.replicas; ++r)
                run_pass<Kernel::kPull, false>(job.work(tensor, r), s, false, first, first + count);
        }
    }
    return lost;
}

template <class A>
int64_t copy(const Work& work, bool streams, int64_t begin, int64_t end) {
    alignas(64) A buffer[kTile];
    for (int64_t first = begin; first < end; first += kTile) {
        const int64_t count = end - first < kTile ? end - first : kTile;
        store(work[Slot::kX], first, count, load(work[Slot::kBefore], first, count, buffer), streams);
    }
    if (streams) end_of_streaming();
    return 0;
}

template <Kernel kKernel, class A>
int64_t run_kernel(const Job& job, int64_t tensor, int64_t begin, int64_t end) {
    const Scalars<A> s = scalars_of<A>(job.settings, optimizer_of(kKernel));
    const bool checks = job.settings.check_finite;
    if (job.replicas > 1 || is_round(kKernel)) {
        if constexpr (is_round(kKernel) || kKernel == Kernel::kApply) {
            return checks ? run_replicas<kKernel, true>(job, tensor, s, begin, end)
                          : run_replicas<kKernel, false>(job, tensor, s, begin, end);
        }
    }
    const Work& work = job.work(tensor, 0);
    return checks ? run_pass<kKernel, true>(work, s, job.streams, begin, end)
                  : run_pass<kKernel, false>(work, s, job.streams, begin, end);
}

template <class A>
int64_t run_typed(const Job& job, int64_t tensor, int64_t begin, int64_t end) {
    switch (job.kernel) {
        case Kernel::kPull:
            return run_kernel<Kernel::kPull, A>(job, tensor, begin, end);
        case Kernel::kStep:
            return run_kernel<Kernel::kStep, A>(job, tensor, begin, end);
        case Kernel::kEasgd:
            return run_kernel<Kernel::kEasgd, A>(job, tensor, begin, end);
        case Kernel::kApply:
            return run_kernel<Kernel::kApply, A>(job, tensor, begin, end);
        case Kernel::kSgd:
            return run_kernel<Kernel::kSgd, A>(job, tensor, begin, end);
        case Kernel::kMomentum:
            return run_kernel<Kernel::kMomentum, A>(job, tensor, begin, end);
        case Kernel::kAdam:
            return run_kernel<Kernel::kAdam, A>(job, tensor, begin, end);
        case Kernel::kSgdRound:
            return run_kernel<Kernel::kSgdRound, A>(job, tensor, begin, end);
        case Kernel::kMomentumRound:
            return run_kernel<Kernel::kMomentumRound, A>(job, tensor, begin, end);
        case Kernel::kAdamRound:
            return run_kernel<Kernel::kAdamRound, A>(job, tensor, begin, end);
        case Kernel::kCopy:
            return copy<A>(job.work(tensor, 0), job.streams, begin, end);
    }
    return 0;
}

}  // namespace

int64_t run(const Job& job, int64_t tensor, int64_t begin, int64_t end) {
    return is_double(job.kernel, job.work(tensor, 0)) ? run_typed<double>(job, tensor, begin, end)
                                                      : run_typed<float>(job, tensor, begin, end);
}

}  // namespace avgpipe::AVGPIPE_ISA
