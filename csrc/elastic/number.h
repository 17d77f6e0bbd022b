// Storage formats of a number and the rounding between them. Free of torch; for host and device. Device code
// includes no CUDA header, so that NVRTC, which has none, compiles it too.
#pragma once

#ifdef __CUDACC_RTC__
namespace avgpipe {
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
}  // namespace avgpipe
namespace std {
template <bool kCondition, class Yes, class No>
struct conditional {
    using type = Yes;
};
template <class Yes, class No>
struct conditional<false, Yes, No> {
    using type = No;
};
template <bool kCondition, class Yes, class No>
using conditional_t = typename conditional<kCondition, Yes, No>::type;
}  // namespace std
#define AVGPIPE_INFINITY __longlong_as_double(0x7FF0000000000000)
#else
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#define AVGPIPE_INFINITY __builtin_huge_val()
#endif

#ifdef __CUDACC__
// Host and device.
#define AVGPIPE_HD __host__ __device__ __forceinline__
#else
// Always inlined: files built for different instruction sets must never share one out-of-line copy.
#define AVGPIPE_HD inline __attribute__((always_inline))
#endif

namespace avgpipe {

enum class DType : int32_t { kFloat32, kFloat64, kBFloat16, kFloat16 };

// 16-bit values in memory; arithmetic happens in float.
struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

constexpr AVGPIPE_HD int64_t size_of(DType dtype) {
    return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

constexpr AVGPIPE_HD bool is_16_bit(DType dtype) {
    return size_of(dtype) == 2;
}

// The least magnitude that is no longer finite once rounded (to nearest, ties to even) to `dtype`: half a
// unit in the last place above the format's largest number. For a format as wide as A it is infinity.
template <class A>
AVGPIPE_HD A overflow_limit(DType dtype) {
    if (dtype == DType::kFloat16) return static_cast<A>(65520.0);
    if (dtype == DType::kBFloat16) return static_cast<A>(0x1.FFp127);
    return static_cast<A>(AVGPIPE_INFINITY);
}

template <class To, class From>
AVGPIPE_HD To same_bits(From value) {
    To same;
    memcpy(&same, &value, sizeof same);
    return same;
}
AVGPIPE_HD uint32_t bits_of(float value) {
    return same_bits<uint32_t>(value);
}
AVGPIPE_HD float float_of(uint32_t bits) {
    return same_bits<float>(bits);
}

AVGPIPE_HD float widen(float value) {
    return value;
}
AVGPIPE_HD double widen(double value) {
    return value;
}

AVGPIPE_HD float widen(BFloat16 value) {
    return float_of(static_cast<uint32_t>(value.bits) << 16);
}

AVGPIPE_HD float widen(Float16 value) {
#ifdef __CUDA_ARCH__
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
#else
    // Without branches, so that a loop over it is vectorised. Exponent and fraction land in a float whose
    // exponent is 112 too small; multiplying by 2^112 is exact and also normalises subnormal numbers.
    const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7FFFu) << 13;
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
    const uint32_t scaled = bits_of(float_of(magnitude) * 0x1p112f);
    const uint32_t special = magnitude | 0x7F800000u;  // infinity and NaN keep their fraction
    return float_of(sign | (magnitude >= 0x0F800000u ? special : scaled));
#endif
}

AVGPIPE_HD void narrow(float value, float& stored) {
    stored = value;
}
AVGPIPE_HD void narrow(double value, double& stored) {
    stored = value;
}

AVGPIPE_HD void narrow(float value, BFloat16& stored) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(stored.bits) : "f"(value));
#else
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;
    stored.bits = static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded);
#endif
}

AVGPIPE_HD void narrow(float value, Float16& stored) {
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(stored.bits) : "f"(value));
#else
    const uint32_t bits = bits_of(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    // Normal: rebias the exponent by -112 and round the 13 lost bits to nearest even.
    const uint32_t normal = (magnitude - 0x38000000u + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13;
    // Subnormal: adding 0.5 makes the float adder round at 2^-24, the unit of subnormal halves.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
    uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
    result = magnitude >= 0x477FF000u ? 0x7C00u : result;  // 65520 and more, infinity
    result = magnitude > 0x7F800000u ? 0x7E00u : result;   // NaN
    stored.bits = static_cast<uint16_t>(sign | result);
#endif
}

}  // namespace avgpipe
