// Compiled once per instruction set, with AVGPIPE_ISA naming the namespace. Only headers whose functions are
// always inlined are included: a shared inline function compiled here for a newer processor could be the copy
// the linker keeps.
#include "elastic/cpu.h"

#include <utility>

#include "stream.h"

namespace avgpipe::AVGPIPE_ISA {
namespace {

// Elements converted at a time: a float buffer of 2 KiB for each operand stays in the first-level cache.
constexpr int64_t kTile = 512;

// Elements of a round that are processed for all replicas before the next ones: the weights and z stay in the
// caches for the pull, while each operand is still read in pieces long enough for the prefetchers.
constexpr int64_t kRoundTile = 16384;

// Elements of one loop over operands that need no conversion; a counter of 32 bits can hold this number.
constexpr int64_t kLongTile = int64_t{1} << 20;

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

// The operand's elements as A: in place if they are stored as A, otherwise in `buffer`.
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

template <class Stored, class A>
void store_as(const Operand& operand, int64_t first, int64_t count, const A* values, bool streams) {
    Stored* stored = static_cast<Stored*>(operand.data) + first;
    if (!streams) return narrow_all(values, count, stored);
    Stored narrowed[kTile];
    narrow_all(values, count, narrowed);
    stream(stored, narrowed, count * static_cast<int64_t>(sizeof(Stored)));
}

// Rounds a buffer back into the operand; elements in place are already there.
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

// Where new elements are made: in place if allowed and stored as A, otherwise in `buffer`.
template <class A>
A* place(const Operand& operand, int64_t first, bool may_be_in_place, A* buffer) {
    const bool is_in_place = may_be_in_place && operand.dtype == kOwn<A>;
    return is_in_place ? static_cast<A*>(operand.data) + first : buffer;
}

// The addresses of a tile's elements, by slot. The update has two: it may be read from one and written to
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
    // Addresses are equal or disjoint, so no iteration depends on another one.
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
        Element<A> e{};
        if constexpr (reads(kKernel, Slot::kX)) e.x = x[i];
        if constexpr (uses(kKernel, Slot::kBefore)) e.before = before[i];
        if constexpr (uses(kKernel, Slot::kZ)) e.z = z[i];
        if constexpr (reads(kKernel, Slot::kUpdate)) e.update = update[i];
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
    constexpr bool kApplies = kKernel == Kernel::kApply;
    const bool is_overwritten = writes(kKernel, Slot::kUpdate) &&
                                (!reads(kKernel, Slot::kUpdate) || (!kApplies && s.accumulates == 0));
    const bool is_streamed = is_overwritten && streams;
    const bool is_left = kApplies && s.zeroes == 0;  // the update, as it was
    const int64_t step = is_streamed || is_left || needs_buffers<kKernel, A>(work) ? kTile : kLongTile;
    alignas(64) A buffers[kSlots][kTile];
    alignas(64) A new_update[kTile];
    int64_t lost = 0;
    for (int64_t first = begin; first < end; first += step) {
        const int64_t count = end - first < step ? end - first : step;
        Tile<A> tile;
        for (int slot = 0; slot < kSlots; ++slot) {
            const auto which = static_cast<Slot>(slot);
            if (!uses(kKernel, which)) continue;
            if (which == Slot::kUpdate && is_overwritten) {
                tile[which] = tile[Slot::kX];  // unread operands may hold anything: x replaces them, unused
            } else if (reads(kKernel, which)) {
                tile[which] = load(work[which], first, count, buffers[slot]);
            } else {
                tile[which] = place(work[which], first, !is_streamed, buffers[slot]);
            }
        }
        if constexpr (writes(kKernel, Slot::kUpdate))
            tile.new_update = place(work[Slot::kUpdate], first, !is_streamed && !is_left, new_update);
        lost += advance_tile<kKernel, kCheck>(tile, count, s, limits);
        for (int slot = 0; slot < kSlots; ++slot) {
            const auto which = static_cast<Slot>(slot);
            if (!writes(kKernel, which) || which == Slot::kUpdate) continue;
            store(work[which], first, count, tile[which], is_streamed && !reads(kKernel, which));
        }
        if (writes(kKernel, Slot::kUpdate) && !is_left)
            store(work[Slot::kUpdate], first, count, tile.new_update, is_streamed);
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

// The updates or steps of all replicas into one z, and the pulls to it, piece by piece, so that z and the
// weights are fetched from memory once.
template <Kernel kKernel, bool kCheck, class A>
int64_t run_replicas(const Job& job, int64_t tensor, const Scalars<A>& s, int64_t begin, int64_t end) {
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
        for (int64_t r = 0; r < job.replicas && is_round(kKernel); ++r)
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

template <Kernel kKernel, bool kCheck, class A>
int64_t run_checked(const Job& job, int64_t tensor, int64_t begin, int64_t end) {
    const Work& work = job.work(tensor, 0);
    const Scalars<A> s = scalars_of<A>(job.settings, optimizer_of(kKernel));
    if constexpr (kKernel == Kernel::kCopy) return copy<A>(work, job.streams, begin, end);
    if constexpr (writes(kKernel, Slot::kZ)) return run_replicas<kKernel, kCheck>(job, tensor, s, begin, end);
    return run_pass<kKernel, kCheck>(work, s, limits_of<A>(work), job.streams, begin, end);
}

// A table of all kernels: those with the check after those without.
template <class A, int... kKernels>
int64_t run_typed(std::integer_sequence<int, kKernels...>, const Job& job, int64_t tensor, int64_t begin,
                  int64_t end) {
    constexpr CpuKernel kRuns[2][sizeof...(kKernels)] = {
        {run_checked<static_cast<Kernel>(kKernels), false, A>...},
        {run_checked<static_cast<Kernel>(kKernels), true, A>...}};
    return kRuns[job.settings.check_finite][static_cast<int>(job.kernel)](job, tensor, begin, end);
}

}  // namespace

int64_t run(const Job& job, int64_t tensor, int64_t begin, int64_t end) {
    constexpr std::make_integer_sequence<int, static_cast<int>(Kernel::kCopy) + 1> kernels;
    return is_double(job.kernel, job.work(tensor, 0)) ? run_typed<double>(kernels, job, tensor, begin, end)
                                                      : run_typed<float>(kernels, job, tensor, begin, end);
}

}  // namespace avgpipe::AVGPIPE_ISA
