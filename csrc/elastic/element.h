// The arithmetic of one element of every elastic update, once for host and device.
//
// Sources of the rules: avgpipe_ext/operators.py. Compiled without fused multiply-add on both sides,
// so every processor rounds alike and CPU and CUDA agree bit for bit.
#pragma once

#include "elastic/number.h"

namespace avgpipe {

enum class Rule : int32_t {
    kPull,       // x += alpha (z - x)
    kStep,       // update += x - x_before, then x += alpha (z - x)
    kStaleStep,  // update += x - x_before, then x += alpha (z - x_before)
    kEasgd,      // e = alpha (x - z); x -= e; update += e
    kApply,      // z += alpha update; update = 0
};

constexpr AVGPIPE_HD bool reads_x(Rule rule) {
    return rule != Rule::kApply;
}
constexpr AVGPIPE_HD bool reads_x_before(Rule rule) {
    return rule == Rule::kStep || rule == Rule::kStaleStep;
}
constexpr AVGPIPE_HD bool has_update(Rule rule) {
    return rule != Rule::kPull;
}
constexpr AVGPIPE_HD bool writes_z(Rule rule) {
    return rule == Rule::kApply;
}

// One element of every operand in the arithmetic type A (float or double); what a rule does not read is
// unset.
template <class A>
struct Element {
    A x, x_before, z, update;
};

// Magnitudes from which the stored x, z and update stop being finite (see overflow_limit).
template <class A>
struct Limits {
    A x, z, update;
};

template <class A>
AVGPIPE_HD bool is_below(A value, A limit) {
    return (value < limit) & (value > -limit);  // false for NaN; no branch, for vectorised loops
}

template <Rule kRule, class A>
AVGPIPE_HD void advance(Element<A>& e, A alpha) {
    if constexpr (kRule == Rule::kPull) {
        e.x += alpha * (e.z - e.x);
    } else if constexpr (kRule == Rule::kStep) {
        e.update += e.x - e.x_before;
        e.x += alpha * (e.z - e.x);
    } else if constexpr (kRule == Rule::kStaleStep) {
        e.update += e.x - e.x_before;
        e.x += alpha * (e.z - e.x_before);
    } else if constexpr (kRule == Rule::kEasgd) {
        const A pull = alpha * (e.x - e.z);
        e.x -= pull;
        e.update += pull;
    } else {
        e.z += alpha * e.update;
        e.update = A(0);
    }
}

// As advance; returns whether the element is lost: a value about to be stored would not be finite. kApply
// then leaves z as it was, so the reference stays finite.
template <Rule kRule, class A>
AVGPIPE_HD bool advance_checked(Element<A>& e, A alpha, const Limits<A>& limits) {
    const A old_z = e.z;
    advance<kRule>(e, alpha);
    bool finite = true;
    if constexpr (writes_z(kRule)) {
        finite = is_below(e.z, limits.z);
        e.z = finite ? e.z : old_z;
    } else {
        finite = is_below(e.x, limits.x);
        if constexpr (has_update(kRule)) finite = finite & is_below(e.update, limits.update);
    }
    return !finite;
}

}  // namespace avgpipe
