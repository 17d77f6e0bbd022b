// The number formats against the compiler's own, and every CPU kernel against the formulas in double. Needs
// no torch.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "elastic/cpu.h"

namespace {

using namespace avgpipe;

int failures = 0;

void expect(bool condition, const char* what, double seen, double wanted) {
    if (condition || ++failures > 20) return;
    std::fprintf(stderr, "%s: got %.9g, want %.9g\n", what, seen, wanted);
}

bool is_same(float a, float b) {
    return (std::isnan(a) && std::isnan(b)) || bits_of(a) == bits_of(b);
}

void test_every_16_bit_pattern_survives() {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        const Float16 half{static_cast<uint16_t>(bits)};
        const BFloat16 brain{static_cast<uint16_t>(bits)};
        Float16 half_back{};
        BFloat16 brain_back{};
        narrow(widen(half), half_back);
        narrow(widen(brain), brain_back);
        expect(is_same(widen(half), widen(half_back)), "float16 round trip", widen(half_back), widen(half));
        expect(is_same(widen(brain), widen(brain_back)), "bfloat16 round trip", widen(brain_back),
               widen(brain));
#ifdef __FLT16_MANT_DIG__
        _Float16 native;
        std::memcpy(&native, &half, sizeof native);
        expect(is_same(widen(half), static_cast<float>(native)), "widen float16", widen(half), native);
#endif
    }
}

void test_narrow_rounds_to_nearest_even() {
    for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 4093) {
        const float value = float_of(static_cast<uint32_t>(bits));
        Float16 half{};
        BFloat16 brain{};
        narrow(value, half);
        narrow(value, brain);
#ifdef __FLT16_MANT_DIG__
        const float wanted = static_cast<float>(static_cast<_Float16>(value));
        expect(is_same(widen(half), wanted), "narrow to float16", widen(half), wanted);
#endif
        // The two neighbours of value in bfloat16; the nearer one, or the even one of a tie.
        const uint32_t low = static_cast<uint32_t>(bits) & 0xFFFF0000u;
        const uint32_t rest = static_cast<uint32_t>(bits) & 0xFFFFu;
        const bool up = rest > 0x8000u || (rest == 0x8000u && (low & 0x10000u) != 0);
        if (!std::isnan(value)) {
            const float nearest = float_of(up ? low + 0x10000u : low);
            expect(is_same(widen(brain), nearest), "narrow to bfloat16", widen(brain), nearest);
        }
        expect(std::isnan(value) == std::isnan(widen(brain)), "NaN in bfloat16", widen(brain), value);
    }
}

// An array of any format with double values in front.
struct Array {
    std::vector<unsigned char> bytes;
    DType dtype;

    Array(DType kind, int64_t count, std::mt19937& random) : bytes(count * size_of(kind)), dtype(kind) {
        std::normal_distribution<float> normal;
        for (int64_t i = 0; i < count; ++i) set(i, normal(random));
    }

    void set(int64_t i, float value) {
        if (dtype == DType::kFloat32) std::memcpy(&bytes[i * 4], &value, 4);
        if (dtype == DType::kFloat64) {
            const double wide = value;
            std::memcpy(&bytes[i * 8], &wide, 8);
        }
        BFloat16 brain{};
        Float16 half{};
        narrow(value, brain);
        narrow(value, half);
        if (dtype == DType::kBFloat16) std::memcpy(&bytes[i * 2], &brain, 2);
        if (dtype == DType::kFloat16) std::memcpy(&bytes[i * 2], &half, 2);
    }

    double get(int64_t i) const {
        uint16_t bits = 0;
        float single = 0;
        double wide = 0;
        if (size_of(dtype) == 2) std::memcpy(&bits, &bytes[i * 2], 2);
        if (size_of(dtype) == 4) std::memcpy(&single, &bytes[i * 4], 4);
        if (size_of(dtype) == 8) std::memcpy(&wide, &bytes[i * 8], 8);
        if (dtype == DType::kBFloat16) return widen(BFloat16{bits});
        if (dtype == DType::kFloat16) return widen(Float16{bits});
        return size_of(dtype) == 4 ? single : wide;
    }

    double epsilon() const {
        return dtype == DType::kFloat64    ? 0x1p-50
               : dtype == DType::kFloat32  ? 0x1p-21
               : dtype == DType::kBFloat16 ? 0x1p-8
                                           : 0x1p-11;
    }

    Operand operand() { return {bytes.data(), dtype}; }
};

void expect_near(const Array& array, int64_t i, double wanted, const char* what) {
    const double bound = array.epsilon() * (1 + std::fabs(wanted)) + 0x1p-20;
    expect(std::fabs(array.get(i) - wanted) <= bound, what, array.get(i), wanted);
}

void test_kernel(CpuKernel kernel, Rule rule, DType first, DType others, int64_t count) {
    std::mt19937 random(7);
    Array x(first, count, random), x_before(others, count, random), z(others, count, random),
        update(others, count, random);
    const Array x0 = x, z0 = z, update0 = update;
    Work work{x.operand(), x_before.operand(), z.operand(), update.operand(), count, 0.25, true};
    const int64_t cut = count / 3;  // as two threads would share it
    const int64_t lost = kernel(rule, work, 0, cut) + kernel(rule, work, cut, count);
    expect(lost == 0, "lost", static_cast<double>(lost), 0);
    for (int64_t i = 0; i < count; ++i) {
        const double xi = x0.get(i), bi = x_before.get(i), zi = z0.get(i), ui = update0.get(i);
        if (rule == Rule::kPull) expect_near(x, i, xi + 0.25 * (zi - xi), "pull");
        if (rule == Rule::kStep) expect_near(x, i, xi + 0.25 * (zi - xi), "step");
        if (rule == Rule::kStaleStep) expect_near(x, i, xi + 0.25 * (zi - bi), "stale step");
        if (rule == Rule::kStep || rule == Rule::kStaleStep)
            expect_near(update, i, ui + xi - bi, "step's update");
        if (rule == Rule::kEasgd) expect_near(x, i, xi - 0.25 * (xi - zi), "easgd");
        if (rule == Rule::kEasgd) expect_near(update, i, ui + 0.25 * (xi - zi), "easgd's update");
        if (rule == Rule::kApply) expect_near(z, i, zi + 0.25 * ui, "apply");
        if (rule == Rule::kApply) expect(update.get(i) == 0, "apply's update", update.get(i), 0);
    }
}

void test_kernels(CpuKernel kernel) {
    const DType pairs[][2] = {{DType::kFloat32, DType::kFloat32},   {DType::kFloat64, DType::kFloat64},
                              {DType::kBFloat16, DType::kBFloat16}, {DType::kBFloat16, DType::kFloat32},
                              {DType::kFloat16, DType::kFloat16},   {DType::kFloat16, DType::kFloat32}};
    for (const Rule rule : {Rule::kPull, Rule::kStep, Rule::kStaleStep, Rule::kEasgd, Rule::kApply}) {
        for (const auto& [first, others] : pairs) {
            for (const int64_t count : {0, 1, 31, 512, 1999}) test_kernel(kernel, rule, first, others, count);
        }
    }
}

}  // namespace

int main() {
    test_every_16_bit_pattern_survives();
    test_narrow_rounds_to_nearest_even();
    test_kernels(baseline::run);
    test_kernels(cpu_kernel());
#ifdef AVGPIPE_X86_64
    if (__builtin_cpu_supports("avx2")) test_kernels(avx2::run);
#endif
    if (failures == 0) std::puts("ok");
    return failures == 0 ? 0 : 1;
}
