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

// Elements of a round that are done for all replicas before the next ones: the weights and z wait in the
// caches for the pull, while each operand is still read in pieces long enough for the prefetchers.
constexpr int64_t kRoundTile = 16384;

// Elements of one loop over operands that need no conversion; a counter of 32 bits holds as many.
constexpr int64_t kLongTile = int64_t{1} << 20;

// Updates added to z in one loop, at most; one after another the memory is read more slowly.
constexpr int kTogether = 8;

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

template <class A>
Limits<A> limits_of(const Work& work) {
    return {overflow_limit<A>(work[Slot::kX].dtype), overflow_limit<A>(work[Slot::kZ].dtype),
            overflow_limit<A>(work[Slot::kUpdate].dtype)};
}

template <Kernel kKernel, class A>
bool needs_buffers(const Work& work) {
    for (int slot = 0; slot < kSlots; ++slot) {
        if (uses(kKernel, static_cast<Slot>(slot)) && work.operands[slot].dtype != kOwn<A>) return true;
    }
    return false;
}

// One pass of one replica.
template <Kernel kKernel, bool kCheck, class A>
int64_t run_pass(const Work& work, const Scalars<A>& s, const Limits<A>& limits, bool streams, int64_t begin,
                 int64_t end) {
    const bool is_overwritten = writes(kKernel, Slot::kUpdate) && s.accumulates == 0;
    const bool is_streamed = is_overwritten && streams;
    const int64_t step = is_streamed || needs_buffers<kKernel, A>(work) ? kTile : kLongTile;
    alignas(64) A buffers[kSlots][kTile];
    alignas(64) A new_update[kTile];
    int64_t lost = 0;
    for (int64_t first = begin; first < end; first += step) {
        const int64_t count = end - first < step ? end - first : step;
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
            store(work[Slot::kUpdate], first, count, tile.new_update, is_streamed);
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

// z += scale update, for kCount updates in turn. See advance_tile for the pragma and the counter.
template <int kCount, bool kZeroes, bool kCheck, class A>
int64_t apply_tile(A* z, A* const* tiles, int64_t count, const Scalars<A>& all, const Limits<A>& limits) {
    A* updates[kCount];
    for (int r = 0; r < kCount; ++r) updates[r] = tiles[r];
    const Scalars<A> s = all;
    std::conditional_t<sizeof(A) == 4, int32_t, int64_t> lost = 0;
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
        Element<A> e{};
        e.z = z[i];
        for (int r = 0; r < kCount; ++r) {
            e.update = updates[r][i];
            if constexpr (kCheck) {
                lost += advance_checked<Kernel::kApply>(e, s, limits) ? 1 : 0;
            } else {
                advance<Kernel::kApply>(e, s);
            }
            if constexpr (kZeroes) updates[r][i] = e.update;
        }
        z[i] = e.z;
    }
    return lost;
}

// As many as there are, in loops over 8, 4, 2 or 1 of them.
template <int kCount, bool kZeroes, bool kCheck, class A>
int64_t apply_tiles(A* z, A* const* tiles, int64_t replicas, int64_t count, const Scalars<A>& s,
                    const Limits<A>& limits) {
    int64_t lost = 0, done = 0;
    for (; done + kCount <= replicas; done += kCount)
        lost += apply_tile<kCount, kZeroes, kCheck>(z, tiles + done, count, s, limits);
    if constexpr (kCount > 1)
        lost += apply_tiles<kCount / 2, kZeroes, kCheck>(z, tiles + done, replicas - done, count, s, limits);
    return lost;
}

// The updates of all replicas into z, in one pass over it.
template <bool kCheck, class A>
int64_t run_applies(const Job& job, int64_t tensor, const Scalars<A>& s, int64_t begin, int64_t end) {
    const Operand z = job.work(tensor, 0)[Slot::kZ];
    const Limits<A> limits = limits_of<A>(job.work(tensor, 0));
    bool in_place = job.replicas <= kTogether;
    for (int64_t r = 0; r < job.replicas; ++r)
        in_place = in_place && !needs_buffers<Kernel::kApply, A>(job.work(tensor, r));
    const int64_t step = in_place ? kLongTile : kTile;
    alignas(64) A sum[kTile], buffers[kTogether][kTile];
    int64_t lost = 0;
    for (int64_t first = begin; first < end; first += step) {
        const int64_t count = end - first < step ? end - first : step;
        A* z_tile = load(z, first, count, sum);
        for (int64_t r = 0; r < job.replicas; r += kTogether) {
            const int64_t together = job.replicas - r < kTogether ? job.replicas - r : kTogether;
            A* tiles[kTogether];
            for (int64_t n = 0; n < together; ++n)
                tiles[n] = load(job.work(tensor, r + n)[Slot::kUpdate], first, count, buffers[n]);
            lost += s.zeroes != 0
                        ? apply_tiles<kTogether, true, kCheck>(z_tile, tiles, together, count, s, limits)
                        : apply_tiles<kTogether, false, kCheck>(z_tile, tiles, together, count, s, limits);
            for (int64_t n = 0; n < together && s.zeroes != 0; ++n)
                store(job.work(tensor, r + n)[Slot::kUpdate], first, count, tiles[n]);
        }
        store(z, first, count, z_tile);
    }
    return lost;
}

// The steps of all replicas into one z and the pulls to it, piece by piece, so that z and the weights are
// fetched from memory once.
template <Kernel kKernel, bool kCheck, class A>
int64_t run_round(const Job& job, int64_t tensor, const Scalars<A>& s, int64_t begin, int64_t end) {
    const Operand z = job.work(tensor, 0)[Slot::kZ];
    const bool is_wide = z.dtype == kOwn<A>;
    alignas(64) A sum[kRoundTile];
    int64_t lost = 0;
    for (int64_t first = begin; first < end; first += kRoundTile) {
        const int64_t count = end - first < kRoundTile ? end - first : kRoundTile;
        if (!is_wide) load(z, first, count, sum);
        for (int64_t r = 0; r < job.replicas; ++r) {
            Work work = from(job.work(tensor, r), first);
            if (!is_wide) work[Slot::kZ] = {sum, kOwn<A>};
            lost += run_pass<kKernel, kCheck>(work, s, limits_of<A>(job.work(tensor, r)), false, 0, count);
        }
        if (!is_wide) store(z, first, count, sum);
        for (int64_t r = 0; r < job.replicas; ++r)
            run_pass<Kernel::kPull, false>(job.work(tensor, r), s, {}, false, first, first + count);
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
    if constexpr (kKernel == Kernel::kApply) {
        return checks ? run_applies<true>(job, tensor, s, begin, end)
                      : run_applies<false>(job, tensor, s, begin, end);
    } else if constexpr (is_round(kKernel)) {
        return checks ? run_round<kKernel, true>(job, tensor, s, begin, end)
                      : run_round<kKernel, false>(job, tensor, s, begin, end);
    } else {
        const Work& work = job.work(tensor, 0);
        const Limits<A> limits = limits_of<A>(work);
        return checks ? run_pass<kKernel, true>(work, s, limits, job.streams, begin, end)
                      : run_pass<kKernel, false>(work, s, limits, job.streams, begin, end);
    }
}

template <class A>
int64_t run_typed(const Job& job, int64_t tensor, int64_t begin, int64_t end) {
    switch (job.kernel) {
        case Kernel::kPull:
            return run_kernel<Kernel::kPull, A>(job, tensor, begin, end);
        case Kernel::kStep:
            return run_kernel<Kernel::kStep, A>(job, tensor, begin, end);
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
