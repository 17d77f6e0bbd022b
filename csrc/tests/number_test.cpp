// The number formats against the compiler's own. Needs no torch.
#include <cmath>
#include <cstring>

#include "check.h"

namespace {

using namespace avgpipe;
using namespace avgpipe::tests;

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

template <class Stored>
void test_limit(DType dtype) {
    const auto limit = overflow_limit<float>(dtype);
    for (const float sign : {1.0f, -1.0f}) {
        Stored below{}, at{};
        narrow(sign * std::nextafter(limit, 0.0f), below);
        narrow(sign * limit, at);
        expect(std::isfinite(widen(below)), "below the limit", widen(below), limit);
        expect(!std::isfinite(widen(at)), "at the limit", widen(at), limit);
    }
}

}  // namespace

int main() {
    test_every_16_bit_pattern_survives();
    test_narrow_rounds_to_nearest_even();
    test_limit<Float16>(DType::kFloat16);
    test_limit<BFloat16>(DType::kBFloat16);
    test_limit<float>(DType::kFloat32);
    return report();
}
