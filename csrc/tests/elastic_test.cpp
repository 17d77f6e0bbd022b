// Every CPU kernel on every instruction set of this processor: near the formulas in double, and equal bit for
// bit among instruction sets, for any cuts of a range. Needs no torch.
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "elastic/cpu.h"

namespace {

using namespace avgpipe;
using namespace avgpipe::tests;

constexpr Kernel kKernels[] = {Kernel::kPull,       Kernel::kStep,          Kernel::kApply,
                               Kernel::kSgd,        Kernel::kMomentum,      Kernel::kAdam,
                               Kernel::kSgdRound,   Kernel::kMomentumRound, Kernel::kAdamRound,
                               Kernel::kTrialSgd,   Kernel::kTrialMomentum, Kernel::kTrialAdam,
                               Kernel::kPredictSgd, Kernel::kPredictAdam,   Kernel::kCorrect};

std::vector<CpuKernel> instruction_sets() {
    std::vector<CpuKernel> sets{baseline::run};
#ifdef AVGPIPE_X86_64
    if (__builtin_cpu_supports("avx2")) sets.push_back(avx2::run);
    if (cpu_kernel().run == avx512::run) sets.push_back(avx512::run);
#endif
    return sets;
}

constexpr bool is_shared(Kernel kernel) {
    return kernel == Kernel::kApply || is_round(kernel);
}

// Formats of x, of z, and of the others.
struct Formats {
    DType x, z, others;
};

// The operands of a call on one tensor.
struct Call {
    Kernel kernel;
    Settings settings;
    int64_t replicas;
    std::vector<std::vector<Array>> arrays;  // by replica and slot; replicas that share z use the first one's

    Call(Kernel which, const Settings& told, int64_t count, Formats formats, int64_t several, unsigned seed)
        : kernel(which), settings(told), replicas(several) {
        std::mt19937 random(seed);
        std::normal_distribution<double> normal;
        for (int64_t r = 0; r < replicas; ++r) {
            arrays.emplace_back();
            for (int slot = 0; slot < kSlots; ++slot) {
                const bool is_x = static_cast<Slot>(slot) == Slot::kX;
                const bool is_z = static_cast<Slot>(slot) == Slot::kZ;
                arrays[r].emplace_back(is_x ? formats.x : is_z ? formats.z : formats.others, count);
                for (int64_t i = 0; i < count; ++i) {
                    const double value = normal(random);
                    const bool is_square = static_cast<Slot>(slot) == Slot::kSecond;
                    arrays[r][slot].set(i, is_square ? 0.1 + std::fabs(value) : value);
                }
            }
        }
    }

    Array& at(int64_t r, Slot slot) {
        return arrays[slot == Slot::kZ && is_shared(kernel) ? 0 : r][static_cast<int>(slot)];
    }
    const Array& at(int64_t r, Slot slot) const { return const_cast<Call*>(this)->at(r, slot); }

    // Runs it piece by piece, from cut to cut; returns the lost elements.
    int64_t run(CpuKernel kernel_of_set, const std::vector<int64_t>& cuts, bool streams) {
        std::vector<Work> works(replicas);
        for (int64_t r = 0; r < replicas; ++r) {
            works[r].count = at(0, Slot::kX).count();
            for (int slot = 0; slot < kSlots; ++slot) {
                const auto which = static_cast<Slot>(slot);
                if (uses(kernel, which)) works[r][which] = at(r, which).operand();
            }
        }
        const Job job{kernel, settings, works.data(), 1, replicas, streams};
        int64_t lost = 0;
        for (size_t c = 0; c + 1 < cuts.size(); ++c) lost += kernel_of_set(job, 0, cuts[c], cuts[c + 1]);
        return lost;
    }

    bool operator==(const Call& other) const { return arrays == other.arrays; }
};

// ---- the formulas
// -----------------------------------------------------------------------------------------------------

struct Row {
    double x, before, update, grad, first, second;
};

double predicted(Kernel kernel, const Settings& s, const Row& r) {
    if (kernel == Kernel::kPredictSgd) return r.x - s.scale * r.first;
    const double first = r.first / (1 - std::pow(s.beta1, s.step_count));
    const double second = r.second / (1 - std::pow(s.beta2, s.step_count));
    const double kept = s.is_decoupled ? std::pow(1 - s.lr * s.weight_decay, s.updates) : 1;
    return kept * r.x - s.updates * s.lr * first / (std::sqrt(second) + s.eps);
}

void correct(const Settings& s, Row& r) {
    const double last = s.is_first ? 0 : r.first;
    r.first = s.beta1 * last + (1 - s.beta1) * (r.x - r.before);
    r.x = r.before + r.first + s.alpha * (r.first - last);
}

// The optimizer's step as torch documents it.
void optimize(Kernel kernel, const Settings& s, Row& r) {
    if (s.skips) return;
    double g = (s.maximizes ? -1 : 1) * r.grad * s.unscale;
    if (optimizer_of(kernel) == Optimizer::kAdam) {
        if (!s.is_decoupled) g += s.weight_decay * r.x;
        if (s.is_decoupled) r.x -= s.lr * s.weight_decay * r.x;
        r.first = s.beta1 * r.first + (1 - s.beta1) * g;
        r.second = s.beta2 * r.second + (1 - s.beta2) * g * g;
        const double first = r.first / (1 - std::pow(s.beta1, s.step_count));
        const double second = r.second / (1 - std::pow(s.beta2, s.step_count));
        r.x -= s.lr * first / (std::sqrt(second) + s.eps);
        return;
    }
    g += s.weight_decay * r.x;
    if (optimizer_of(kernel) == Optimizer::kMomentum) {
        r.first = s.is_first ? g : s.beta1 * r.first + (1 - s.dampening) * g;
        g = s.is_nesterov ? g + s.beta1 * r.first : r.first;
    }
    r.x -= s.lr * g;
}

void follow(Kernel kernel, const Settings& s, Row& r, double& z) {
    if (is_prediction(kernel)) return static_cast<void>(r.update = predicted(kernel, s, r));
    if (kernel == Kernel::kCorrect) return correct(s, r);
    if (is_trial(kernel)) {
        Row moved{z, 0, 0, r.grad, r.first, r.second};
        optimize(kernel, s, moved);
        r.x = moved.x, r.update = -r.grad;
        return;
    }
    const double before = kernel == Kernel::kStep ? r.before : r.x;
    if (optimizer_of(kernel) != Optimizer::kNone) optimize(kernel, s, r);
    const double old_update = s.accumulates ? r.update : 0;
    if (kernel == Kernel::kPull) {
        r.x += s.alpha * (z - r.x);
    } else if (kernel == Kernel::kApply) {
        z += s.scale * r.update;
        r.update = s.zeroes ? 0 : r.update;
    } else if (is_round(kernel)) {
        z += s.scale * (r.x - before);
    } else {
        const double force = s.alpha * (z - (s.lags ? before : r.x));
        r.update = old_update + s.from_step * (r.x - before) - s.from_force * force;
        r.x += force;
    }
}

void expect_near(const Array& array, int64_t i, double wanted, double arithmetic, const char* what) {
    const double bound = (array.epsilon() + 64 * arithmetic) * (1 + std::fabs(wanted));
    expect(std::fabs(array.get(i) - wanted) <= bound, what, array.get(i), wanted);
}

void expect_formula(const Call& before, const Call& after) {
    const Kernel kernel = before.kernel;
    const double arithmetic = before.at(0, Slot::kZ).dtype() == DType::kFloat64 ? 0x1p-52 : 0x1p-23;
    for (int64_t i = 0; i < before.at(0, Slot::kX).count(); ++i) {
        double z = before.at(0, Slot::kZ).get(i);
        std::vector<Row> rows;
        for (int64_t r = 0; r < before.replicas; ++r) {
            const auto get = [&](Slot slot) { return before.at(r, slot).get(i); };
            rows.push_back({get(Slot::kX), get(Slot::kBefore), get(Slot::kUpdate), get(Slot::kGrad),
                            get(Slot::kFirst), get(Slot::kSecond)});
            follow(kernel, before.settings, rows.back(), z);
        }
        expect_near(after.at(0, Slot::kZ), i, z, arithmetic, "z");
        for (int64_t r = 0; r < before.replicas; ++r) {
            Row& row = rows[r];
            if (is_round(kernel)) row.x += before.settings.alpha * (z - row.x);
            expect_near(after.at(r, Slot::kX), i, row.x, arithmetic, "x");
            expect_near(after.at(r, Slot::kUpdate), i, row.update, arithmetic, "update");
            expect_near(after.at(r, Slot::kFirst), i, row.first, arithmetic, "first");
            expect_near(after.at(r, Slot::kSecond), i, row.second, arithmetic, "second");
        }
    }
}

// Only outputs of the kernel have changed, and nothing next to them.
void expect_untouched(const Call& before, const Call& after) {
    for (int64_t r = 0; r < before.replicas; ++r) {
        for (int slot = 0; slot < kSlots; ++slot) {
            const bool is_written = writes(before.kernel, static_cast<Slot>(slot));
            const Array& array = after.arrays[r][slot];
            expect(array.has_margins(), "bytes beside an operand", slot, 0);
            expect(is_written || array == before.arrays[r][slot], "an operand that is only read", slot, 0);
        }
    }
}

// ---- tests
// ------------------------------------------------------------------------------------------------------------

// All instruction sets, whole and cut, streaming or not, do the same.
void expect_equal_everywhere(const Call& before, const Call& after, int64_t lost) {
    const int64_t count = before.at(0, Slot::kX).count();
    for (const CpuKernel set : instruction_sets()) {
        for (const bool streams : {false, true}) {
            for (const auto& cuts : std::vector<std::vector<int64_t>>{
                     {0, count}, {0, count / 3, count / 3, count / 3 + (count > 0 ? 1 : 0), count}}) {
                Call again = before;
                const int64_t again_lost = again.run(set, cuts, streams);
                expect(again_lost == lost, "lost", static_cast<double>(again_lost),
                       static_cast<double>(lost));
                expect(again == after, "equal bit for bit; kernel", static_cast<double>(before.kernel), 0);
            }
        }
    }
}

void test(Kernel kernel, const Settings& settings, int64_t count, Formats formats, int64_t replicas) {
    const Call before(kernel, settings, count, formats, replicas, 7);
    Call after = before;
    const int64_t lost = after.run(baseline::run, {0, count}, false);
    expect(lost == 0, "lost", static_cast<double>(lost), 0);
    expect_formula(before, after);
    expect_untouched(before, after);
    expect_equal_everywhere(before, after, lost);
}

Settings usual() {
    Settings s;
    s.alpha = 0.3;
    s.scale = 0.4;
    s.lr = 0.12;
    s.weight_decay = 0.01;
    s.beta1 = 0.9;
    s.beta2 = 0.99;
    s.eps = 1e-8;
    s.dampening = 0.1;
    s.step_count = 3;
    s.unscale = 0.7;
    return s;
}

// The usual settings, and with each flag set.
std::vector<Settings> all_settings() {
    std::vector<Settings> all(10, usual());
    all[1].lags = true;
    all[2].from_step = 0.25, all[2].from_force = 0.75;
    all[3].accumulates = false;
    all[4].zeroes = false;
    all[5].check_finite = true;
    all[6].is_decoupled = true;
    all[7].is_nesterov = all[7].maximizes = true;
    all[8].is_first = all[8].is_nesterov = true;
    all[9].skips = all[9].check_finite = true;
    return all;
}

constexpr Formats kFormats[] = {
    {DType::kFloat32, DType::kFloat32, DType::kFloat32},
    {DType::kFloat64, DType::kFloat64, DType::kFloat64},
    {DType::kBFloat16, DType::kBFloat16, DType::kBFloat16},
    {DType::kFloat16, DType::kFloat16, DType::kFloat16},
    {DType::kBFloat16, DType::kFloat32, DType::kFloat32},
    {DType::kFloat16, DType::kFloat32, DType::kFloat16},
    {DType::kBFloat16, DType::kBFloat16, DType::kFloat32},
};

void test_every_kernel() {
    for (const Kernel kernel : kKernels) {
        const int64_t replicas = is_shared(kernel) ? 3 : 1;
        for (const Settings& settings : all_settings()) test(kernel, settings, 1031, kFormats[0], replicas);
        for (const Formats& formats : kFormats) {
            for (const int64_t count : {0, 1, 31, 512, 1031}) test(kernel, usual(), count, formats, replicas);
            Settings overwriting = usual();
            overwriting.accumulates = overwriting.zeroes = false;
            overwriting.check_finite = true;
            test(kernel, overwriting, 1031, formats, replicas);
        }
    }
}

void test_predictions_of_several_updates() {
    for (const double updates : {0.0, 1.0, 3.0, 2.5}) {
        Settings settings = usual();
        settings.is_decoupled = true;
        settings.updates = updates;
        for (const Formats& formats : kFormats) test(Kernel::kPredictAdam, settings, 1031, formats, 1);
    }
}

// Bit for bit, also the sign of a zero.
void test_a_step_without_momentum_and_gain_stays() {
    for (const Formats& formats : kFormats) {
        Call before(Kernel::kCorrect, {}, 1031, formats, 1, 7);
        for (int64_t i = 0; i < 1031; i += 3) before.at(0, Slot::kX).set(i, i % 2 == 0 ? 0.0 : -0.0);
        before.settings.alpha = before.settings.beta1 = 0.0;
        Call after = before;
        after.run(baseline::run, {0, 1031}, false);
        expect(after.at(0, Slot::kX) == before.at(0, Slot::kX), "x stays", 0, 0);
        expect(!(after.at(0, Slot::kFirst) == before.at(0, Slot::kFirst)), "last", 0, 1);
        expect_equal_everywhere(before, after, 0);
    }
}

// A trial is the step of the optimizer's own pass, bit for bit.
void test_trials_are_steps() {
    for (const Kernel kernel : {Kernel::kTrialSgd, Kernel::kTrialMomentum, Kernel::kTrialAdam}) {
        for (const Formats& formats : {kFormats[0], kFormats[1]}) {
            Settings settings = usual();
            settings.is_nesterov = true;
            Call trial(kernel, settings, 1031, formats, 1, 7);
            settings.alpha = 0.0;
            Call step(with_optimizer(Kernel::kSgd, optimizer_of(kernel)), settings, 1031, formats, 1, 7);
            step.at(0, Slot::kX) = trial.at(0, Slot::kZ);
            trial.run(baseline::run, {0, 1031}, false);
            step.run(baseline::run, {0, 1031}, false);
            expect(trial.at(0, Slot::kX) == step.at(0, Slot::kX), "trial", static_cast<double>(kernel), 0);
        }
    }
}

// Replicas in ones and fours, and pieces longer than a round's tile.
void test_replicas() {
    for (const Kernel kernel : {Kernel::kApply, Kernel::kSgdRound, Kernel::kAdamRound}) {
        for (const int64_t replicas : {1, 2, 4, 5, 9}) test(kernel, usual(), 700, kFormats[0], replicas);
        for (const Formats& formats : kFormats) test(kernel, usual(), 17001, formats, 2);
    }
}

// Values that are not finite count equally everywhere, and z stays finite.
void test_lost_elements() {
    const double bad[] = {INFINITY, -INFINITY, NAN, 3e38, -3e38, 1e-40, 6e4};
    for (const Kernel kernel : kKernels) {
        for (const Formats& formats : kFormats) {
            Settings settings = usual();
            settings.check_finite = true;
            Call before(kernel, settings, 1031, formats, is_shared(kernel) ? 3 : 1, 11);
            for (int64_t i = 0; i < 1031; i += 5) {
                const auto slot = static_cast<Slot>(i % kSlots);
                const bool keeps_z = slot == Slot::kZ || slot == Slot::kSecond;
                if (!keeps_z) before.at(i % before.replicas, slot).set(i, bad[i / kSlots % 7]);
            }
            Call after = before;
            const int64_t lost = after.run(baseline::run, {0, 1031}, false);
            expect(lost > 0, "lost", static_cast<double>(lost), 1);
            for (int64_t i = 0; i < 1031; ++i)
                expect(std::isfinite(after.at(0, Slot::kZ).get(i)), "z", after.at(0, Slot::kZ).get(i), 0);
            expect_equal_everywhere(before, after, lost);
        }
    }
}

void test_copies() {
    for (const DType from : kDTypes) {
        for (const DType to : kDTypes) {
            for (const int64_t count : {0, 1, 31, 512, 1031}) {
                const Call before(Kernel::kCopy, {}, count, {to, to, from}, 1, 5);
                Call after = before;
                after.run(baseline::run, {0, count}, false);
                Array wanted = before.at(0, Slot::kX);
                for (int64_t i = 0; i < count; ++i) wanted.set(i, before.at(0, Slot::kBefore).get(i));
                expect(after.at(0, Slot::kX) == wanted, "copy of format", static_cast<double>(from), 0);
                expect_untouched(before, after);
                expect_equal_everywhere(before, after, 0);
            }
        }
    }
}

}  // namespace

int main() {
    test_every_kernel();
    test_predictions_of_several_updates();
    test_a_step_without_momentum_and_gain_stays();
    test_trials_are_steps();
    test_replicas();
    test_lost_elements();
    test_copies();
    return report();
}
