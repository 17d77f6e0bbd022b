// The arithmetic of one element of every elastic update, once for host and device.
//
// Sources of the rules: avgpipe_ext/operators.py. Compiled without fused multiply-add on both sides, so every
// processor rounds alike and CPU and CUDA agree bit for bit.
#pragma once

#include "elastic/number.h"

namespace avgpipe {

// The work of one pass over the operands. An optimizer's pass continues with the averaging rule, whose
// coefficients are in Scalars; in a round the optimizer's step goes directly into z, and pulls follow. A
// trial leaves the optimizer's state unchanged. The three optimizers' kernels of a kind are in the order of
// Optimizer.
enum class Kernel : int32_t {
    kPull,           // x += alpha (z - x)
    kStep,           // the rule, after a step from x_before to x
    kApply,          // z += scale update; update = 0
    kSgd,            // SGD without momentum, then the rule
    kMomentum,       // SGD with momentum, then the rule
    kAdam,           // Adam or AdamW, then the rule
    kSgdRound,       // the optimizer's step d of one replica; z += scale d
    kMomentumRound,  // the same
    kAdamRound,      // the same
    kTrialSgd,       // x = where the optimizer's step leads from z; update = -grad
    kTrialMomentum,  // the same
    kTrialAdam,      // the same
    kPredictSgd,     // update = x, moved on along SGD's momentum
    kPredictAdam,    // update = x, moved on by Adam's steps
    kCorrect,        // after a step from x_before to x, which becomes x_before + a corrected one
    kCopy,           // x = x_before, converted
};

enum class Optimizer : int32_t { kNone, kSgd, kMomentum, kAdam };

// Passes of several replicas that share one z.
constexpr AVGPIPE_HD bool is_round(Kernel kernel) {
    return kernel >= Kernel::kSgdRound && kernel <= Kernel::kAdamRound;
}

// One step from the reference z, which changes neither z nor the optimizer's state.
constexpr AVGPIPE_HD bool is_trial(Kernel kernel) {
    return kernel >= Kernel::kTrialSgd && kernel <= Kernel::kTrialAdam;
}

// Passes that use an optimizer's state, without a gradient.
constexpr AVGPIPE_HD bool is_prediction(Kernel kernel) {
    return kernel == Kernel::kPredictSgd || kernel == Kernel::kPredictAdam;
}

// The optimizer whose step is made, or predicted.
constexpr AVGPIPE_HD Optimizer optimizer_of(Kernel kernel) {
    if (is_prediction(kernel)) return kernel == Kernel::kPredictSgd ? Optimizer::kMomentum : Optimizer::kAdam;
    if (kernel < Kernel::kSgd || kernel > Kernel::kTrialAdam) return Optimizer::kNone;
    return static_cast<Optimizer>(1 +
                                  (static_cast<int32_t>(kernel) - static_cast<int32_t>(Kernel::kSgd)) % 3);
}

// The kernel of the same kind (of a pass, a round or a trial) for another optimizer.
constexpr AVGPIPE_HD Kernel with_optimizer(Kernel kernel, Optimizer optimizer) {
    const int32_t further = static_cast<int32_t>(optimizer) - static_cast<int32_t>(optimizer_of(kernel));
    return static_cast<Kernel>(static_cast<int32_t>(kernel) + further);
}

// Steps that the caller's counter does not include yet: a trial is one step ahead of it.
constexpr AVGPIPE_HD int32_t uncounted_steps(Kernel kernel) {
    return is_trial(kernel) ? 1 : 0;
}

// The operands. `first` is SGD's momentum, Adam's exp_avg or the last corrected step, `second` Adam's
// exp_avg_sq; `update` takes a prediction.
enum class Slot : int32_t { kX, kBefore, kZ, kUpdate, kGrad, kFirst, kSecond };
constexpr int kSlots = 7;

// Whether a kernel uses the operand at all.
constexpr AVGPIPE_HD bool uses(Kernel kernel, Slot slot) {
    const Optimizer optimizer = optimizer_of(kernel);
    const bool is_copy = kernel == Kernel::kCopy, is_correction = kernel == Kernel::kCorrect;
    if (slot == Slot::kX) return kernel != Kernel::kApply;
    if (slot == Slot::kBefore) return kernel == Kernel::kStep || is_correction || is_copy;
    if (slot == Slot::kZ) return !is_prediction(kernel) && !is_correction && !is_copy;
    if (slot == Slot::kUpdate)
        return kernel != Kernel::kPull && !is_round(kernel) && !is_correction && !is_copy;
    if (slot == Slot::kGrad) return optimizer != Optimizer::kNone && !is_prediction(kernel);
    if (slot == Slot::kFirst) return optimizer >= Optimizer::kMomentum || is_correction;
    return optimizer == Optimizer::kAdam;
}

constexpr AVGPIPE_HD bool writes(Kernel kernel, Slot slot) {
    if (is_prediction(kernel)) return slot == Slot::kUpdate;
    if (is_trial(kernel)) return slot == Slot::kX || slot == Slot::kUpdate;
    const bool writes_z = kernel == Kernel::kApply || is_round(kernel);
    const bool is_read_only = slot == Slot::kBefore || slot == Slot::kGrad || (slot == Slot::kZ && !writes_z);
    return uses(kernel, slot) && !is_read_only;
}

// Whether the operand's old values are needed; an update's only if it accumulates.
constexpr AVGPIPE_HD bool reads(Kernel kernel, Slot slot) {
    if (slot == Slot::kX) return uses(kernel, slot) && !is_trial(kernel) && kernel != Kernel::kCopy;
    if (slot == Slot::kUpdate) return uses(kernel, slot) && !is_trial(kernel) && !is_prediction(kernel);
    return uses(kernel, slot);
}

// Whether `first` may be uninitialized (Settings::is_first).
constexpr AVGPIPE_HD bool may_begin(Kernel kernel) {
    return uses(kernel, Slot::kFirst) && optimizer_of(kernel) != Optimizer::kAdam && !is_prediction(kernel);
}

// One element of every operand in the arithmetic type A (float or double); operands that a kernel does not
// use are unset.
template <class A>
struct Element {
    A x, before, z, update, grad, first, second;
};

// Magnitudes from which the stored x, z and update stop being finite (see overflow_limit).
template <class A>
struct Limits {
    A x, z, update;
};

// Values that are the same for every element, from the host (see Scalars for the meanings). `step`,
// `grad_scale` and `found_inf` are read on the device if they are not null, and replace the values.
struct Settings {
    double alpha = 0.0, from_step = 1.0, from_force = 0.0, scale = 1.0;
    double lr = 0.0, weight_decay = 0.0, beta1 = 0.0, beta2 = 0.0, eps = 0.0, dampening = 0.0;
    double step_count = 1.0, unscale = 1.0, updates = 1.0;
    bool lags = false, accumulates = true, zeroes = true, check_finite = false;
    bool is_decoupled = false, is_nesterov = false, maximizes = false, is_first = false, skips = false;
    bool step_is_double = false;
    const void* step = nullptr;
    const float* grad_scale = nullptr;
    const float* found_inf = nullptr;
};

// A condition that is the same for all elements, as a mask of A's width: all ones or zero.
template <class A>
using Mask = std::conditional_t<sizeof(A) == sizeof(uint64_t), uint64_t, uint32_t>;

template <class A>
struct Scalars {
    A alpha;         // elasticity; kCorrect: gain
    A from_step;     // factor of the step in the update
    A from_force;    // factor of the force in the update, negated
    A scale;         // factor of an update added to z, or of a momentum added to a prediction
    A unscale;       // factor of gradients
    A decay;         // Adam: factor (1 - lr weight_decay)^updates of x, else 1
    A weight_decay;  // added to gradients as weight_decay x, if decays
    A lr;            // SGD: learning rate; Adam: updates lr / (1 - beta1^step)
    A beta1;         // SGD: momentum factor mu; kCorrect: momentum
    A new1;          // weight of the new value in `first`: SGD: 1 - dampening, else 1 - beta1
    A beta2, new2;   // Adam: weights of the old and the new value in `second`
    A unbias2;       // Adam: 1 / sqrt(1 - beta2^step)
    A eps;
    Mask<A> lags;         // the force is alpha (z - x_before), else alpha (z - x)
    Mask<A> accumulates;  // update += ..., else update = ...
    Mask<A> zeroes;       // kApply sets update = 0, else leaves it unchanged
    Mask<A> decays, is_nesterov, is_first, skips;
};

template <class A>
AVGPIPE_HD Mask<A> mask_of(bool condition) {
    return condition ? ~Mask<A>{0} : Mask<A>{0};
}

template <class A>
AVGPIPE_HD Scalars<A> scalars_of(const Settings& s, Optimizer optimizer) {
    const bool is_adam = optimizer == Optimizer::kAdam;
    const bool decays_x = is_adam && s.is_decoupled;
    const double bias1 = is_adam ? 1.0 - pow(s.beta1, s.step_count) : 1.0;
    const double bias2 = is_adam ? 1.0 - pow(s.beta2, s.step_count) : 1.0;
    const double kept = decays_x ? 1.0 - s.lr * s.weight_decay : 1.0;
    Scalars<A> t;
    t.alpha = static_cast<A>(s.alpha);
    t.from_step = static_cast<A>(s.from_step);
    t.from_force = static_cast<A>(s.from_force);
    t.scale = static_cast<A>(s.scale);
    t.unscale = static_cast<A>(s.maximizes ? -s.unscale : s.unscale);
    t.decay = static_cast<A>(s.updates == 1.0 ? kept : pow(kept, s.updates));
    t.weight_decay = static_cast<A>(s.weight_decay);
    t.lr = static_cast<A>(s.lr * s.updates / bias1);
    t.beta1 = static_cast<A>(s.beta1);
    t.new1 = static_cast<A>(1.0 - (optimizer == Optimizer::kMomentum ? s.dampening : s.beta1));
    t.beta2 = static_cast<A>(s.beta2);
    t.new2 = static_cast<A>(1.0 - s.beta2);
    t.unbias2 = static_cast<A>(1.0 / sqrt(bias2));
    t.eps = static_cast<A>(s.eps);
    t.lags = mask_of<A>(s.lags);
    t.accumulates = mask_of<A>(s.accumulates);
    t.zeroes = mask_of<A>(s.zeroes);
    t.decays = mask_of<A>(!decays_x && s.weight_decay != 0.0);
    t.is_nesterov = mask_of<A>(s.is_nesterov);
    t.is_first = mask_of<A>(s.is_first);
    t.skips = mask_of<A>(s.skips);
    return t;
}

AVGPIPE_HD float root(float value) {
    return sqrtf(value);
}
AVGPIPE_HD double root(double value) {
    return sqrt(value);
}

// Without branches: a compiler would make a loop for every combination of conditions, and not vectorise all
// of them.
template <class A>
AVGPIPE_HD A select(Mask<A> mask, A yes, A no) {
    return same_bits<A>((same_bits<Mask<A>>(yes) & mask) | (same_bits<Mask<A>>(no) & ~mask));
}

// The step of Adam, from its state.
template <class A>
AVGPIPE_HD A adam_moved(A x, A first, A second, const Scalars<A>& s) {
    return s.decay * x - s.lr * (first / (root(second) * s.unbias2 + s.eps));
}

// The optimizer's step, as torch.optim does it; a skipped step leaves everything unchanged.
template <Optimizer kOptimizer, class A>
AVGPIPE_HD void optimize(Element<A>& e, const Scalars<A>& s) {
    A grad = e.grad * s.unscale;
    grad = select(s.decays, grad + s.weight_decay * e.x, grad);
    A x = e.x;
    if constexpr (kOptimizer == Optimizer::kAdam) {
        const A first = e.first + s.new1 * (grad - e.first);
        const A second = s.beta2 * e.second + s.new2 * grad * grad;
        x = adam_moved(x, first, second, s);
        e.first = select(s.skips, e.first, first);
        e.second = select(s.skips, e.second, second);
    } else {
        if constexpr (kOptimizer == Optimizer::kMomentum) {
            const A first = select(s.is_first, grad, s.beta1 * e.first + s.new1 * grad);
            grad = select(s.is_nesterov, grad + s.beta1 * first, first);
            e.first = select(s.skips, e.first, first);
        }
        x -= s.lr * grad;
    }
    e.x = select(s.skips, e.x, x);
}

// The weights after the optimizer's next steps with an unchanged state.
template <Optimizer kOptimizer, class A>
AVGPIPE_HD A predicted(const Element<A>& e, const Scalars<A>& s) {
    if constexpr (kOptimizer == Optimizer::kAdam) return adam_moved(e.x, e.first, e.second, s);
    return e.x - s.scale * e.first;
}

// The step from x_before to x, averaged with the last ones and extrapolated by their difference. The term
// added to x is exactly 0 without momentum and gain, and is subtracted so that a zero keeps its sign.
template <class A>
AVGPIPE_HD void correct(Element<A>& e, const Scalars<A>& s) {
    const A step = e.x - e.before;
    const A last = select(s.is_first, A(0), e.first);
    e.first = s.beta1 * last + s.new1 * step;
    e.x -= (step - e.first) + s.alpha * (last - e.first);
}

// One element of one pass.
template <Kernel kKernel, class A>
AVGPIPE_HD void advance(Element<A>& e, const Scalars<A>& s) {
    constexpr Optimizer kOptimizer = optimizer_of(kKernel);
    if constexpr (kKernel == Kernel::kApply) {
        e.z += s.scale * e.update;
        e.update = select(s.zeroes, A(0), e.update);
        return;
    }
    if constexpr (kKernel == Kernel::kCopy) {
        e.x = e.before;
        return;
    }
    if constexpr (is_prediction(kKernel)) {
        e.update = predicted<kOptimizer>(e, s);
        return;
    }
    if constexpr (kKernel == Kernel::kCorrect) return correct(e, s);
    if constexpr (is_trial(kKernel)) {
        e.x = e.z;
        optimize<kOptimizer>(e, s);
        e.update = -e.grad;
        return;
    }
    if constexpr (kOptimizer != Optimizer::kNone) {
        e.before = e.x;
        optimize<kOptimizer>(e, s);
    }
    if constexpr (is_round(kKernel)) {
        e.z += s.scale * (e.x - e.before);
    } else if constexpr (kKernel == Kernel::kPull) {
        e.x += s.alpha * (e.z - e.x);
    } else {
        const A step = e.x - e.before;
        const A force = s.alpha * (e.z - select(s.lags, e.before, e.x));
        e.update = select(s.accumulates, e.update, A(0)) + (s.from_step * step - s.from_force * force);
        e.x += force;
    }
}

template <class A>
AVGPIPE_HD bool is_below(A value, A limit) {
    return (value < limit) & (value > -limit);  // false for NaN; no branch, for vectorised loops
}

// As advance; returns whether the element is lost: an x, z or update to be stored would not be finite. A
// kernel that writes z then leaves it unchanged, so the reference stays finite.
template <Kernel kKernel, class A>
AVGPIPE_HD bool advance_checked(Element<A>& e, const Scalars<A>& s, const Limits<A>& limits) {
    const A old_z = e.z;
    advance<kKernel>(e, s);
    bool finite = true;
    if constexpr (writes(kKernel, Slot::kX)) finite = finite & is_below(e.x, limits.x);
    if constexpr (writes(kKernel, Slot::kUpdate) && kKernel != Kernel::kApply)
        finite = finite & is_below(e.update, limits.update);
    if constexpr (writes(kKernel, Slot::kZ)) {
        const bool keeps = is_below(e.z, limits.z);
        finite = finite & keeps;
        e.z = keeps ? e.z : old_z;
    }
    return !finite;
}

}  // namespace avgpipe
