// Compiled once per instruction set, with AVGPIPE_ISA naming the namespace. Only headers whose functions are
// always inlined are included: a shared inline function compiled here for a newer processor could be the copy
// the linker keeps.
#include "elastic/cpu.h"

namespace avgpipe::AVGPIPE_ISA {
namespace {

// Elements converted at a time: four float buffers of 2 KiB stay in the first-level cache.
constexpr int64_t kTile = 512;

template <class Stored>
void widen_all(const Operand& operand, int64_t first, int64_t count, float* __restrict__ values) {
    const Stored* __restrict__ stored = static_cast<const Stored*>(operand.data) + first;
    for (int64_t i = 0; i < count; ++i) values[i] = widen(stored[i]);
}

template <class Stored>
void narrow_all(const Operand& operand, int64_t first, int64_t count, const float* __restrict__ values) {
    Stored* __restrict__ stored = static_cast<Stored*>(operand.data) + first;
    for (int64_t i = 0; i < count; ++i) narrow(values[i], stored[i]);
}

// The operand's elements as A: in place where they are stored so, otherwise in `buffer`.
template <class A>
A* load(const Operand& operand, int64_t first, int64_t count, A* buffer) {
    if constexpr (sizeof(A) == sizeof(float)) {
        if (operand.dtype == DType::kBFloat16) {
            widen_all<BFloat16>(operand, first, count, buffer);
            return buffer;
        }
        if (operand.dtype == DType::kFloat16) {
            widen_all<Float16>(operand, first, count, buffer);
            return buffer;
        }
    }
    return static_cast<A*>(operand.data) + first;
}

// Rounds a buffer back; what load() gave in place is there already.
template <class A>
void store(const Operand& operand, int64_t first, int64_t count, const A* values) {
    if constexpr (sizeof(A) == sizeof(float)) {
        if (operand.dtype == DType::kBFloat16) narrow_all<BFloat16>(operand, first, count, values);
        if (operand.dtype == DType::kFloat16) narrow_all<Float16>(operand, first, count, values);
    }
}

// Pointers that a rule does not use are never read. x_before and z may be one array: nothing writes either
// then.
template <Rule kRule, bool kCheck, class A>
int64_t advance_tile(A* __restrict__ x, const A* __restrict__ x_before, A* __restrict__ z,
                     A* __restrict__ update, int64_t count, A alpha, const Limits<A>& limits) {
    // A counter as wide as A keeps the loop's lanes of one width.
    std::conditional_t<sizeof(A) == 4, int32_t, int64_t> lost = 0;
    for (int64_t i = 0; i < count; ++i) {
        Element<A> e{};
        if constexpr (reads_x(kRule)) e.x = x[i];
        if constexpr (reads_x_before(kRule)) e.x_before = x_before[i];
        e.z = z[i];
        if constexpr (has_update(kRule)) e.update = update[i];
        if constexpr (kCheck) {
            lost += advance_checked<kRule>(e, alpha, limits) ? 1 : 0;
        } else {
            advance<kRule>(e, alpha);
        }
        if constexpr (reads_x(kRule)) x[i] = e.x;
        if constexpr (has_update(kRule)) update[i] = e.update;
        if constexpr (writes_z(kRule)) z[i] = e.z;
    }
    return lost;
}

template <Rule kRule, class A>
int64_t run_rule(const Work& work, int64_t begin, int64_t end) {
    const Limits<A> limits{overflow_limit<A>(work.x.dtype), overflow_limit<A>(work.z.dtype),
                           overflow_limit<A>(work.update.dtype)};
    const A alpha = static_cast<A>(work.alpha);
    alignas(64) A buffers[4][kTile];
    int64_t lost = 0;
    for (int64_t first = begin; first < end; first += kTile) {
        const int64_t count = end - first < kTile ? end - first : kTile;
        A *x = nullptr, *x_before = nullptr, *update = nullptr;
        if constexpr (reads_x(kRule)) x = load(work.x, first, count, buffers[0]);
        if constexpr (reads_x_before(kRule)) x_before = load(work.x_before, first, count, buffers[1]);
        if constexpr (has_update(kRule)) update = load(work.update, first, count, buffers[2]);
        A* z = load(work.z, first, count, buffers[3]);
        lost += work.check_finite ? advance_tile<kRule, true>(x, x_before, z, update, count, alpha, limits)
                                  : advance_tile<kRule, false>(x, x_before, z, update, count, alpha, limits);
        if constexpr (reads_x(kRule)) store(work.x, first, count, x);
        if constexpr (has_update(kRule)) store(work.update, first, count, update);
        if constexpr (writes_z(kRule)) store(work.z, first, count, z);
    }
    return lost;
}

template <class A>
int64_t run_typed(Rule rule, const Work& work, int64_t begin, int64_t end) {
    switch (rule) {
        case Rule::kPull:
            return run_rule<Rule::kPull, A>(work, begin, end);
        case Rule::kStep:
            return run_rule<Rule::kStep, A>(work, begin, end);
        case Rule::kStaleStep:
            return run_rule<Rule::kStaleStep, A>(work, begin, end);
        case Rule::kEasgd:
            return run_rule<Rule::kEasgd, A>(work, begin, end);
        case Rule::kApply:
            return run_rule<Rule::kApply, A>(work, begin, end);
    }
    return 0;
}

}  // namespace

int64_t run(Rule rule, const Work& work, int64_t begin, int64_t end) {
    return work.z.dtype == DType::kFloat64 ? run_typed<double>(rule, work, begin, end)
                                           : run_typed<float>(rule, work, begin, end);
}

}  // namespace avgpipe::AVGPIPE_ISA
