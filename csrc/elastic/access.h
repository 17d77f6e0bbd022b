// Device code that reads and writes operands, as many elements at once as fill 16-byte accesses.
#pragma once

#include "elastic/block.h"

namespace avgpipe {

// Elements a thread moves at a time, so that the narrowest operand is one 16-byte access.
template <class A, bool kMixed>
constexpr int kGroup = kMixed ? 8 : static_cast<int>(16 / sizeof(A));

// 16 bytes, in memory aligned to them.
struct alignas(16) Vector {
    uint32_t words[4];
};

// One instruction: plain code may become several stores, depending on how the compiler arranges the
// addresses.
__device__ __forceinline__ void store_vector(Vector* to, const Vector& vector) {
#ifdef __CUDA_ARCH__
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
                 "r"(vector.words[0]), "r"(vector.words[1]), "r"(vector.words[2]), "r"(vector.words[3])
                 : "memory");
#else
    *to = vector;
#endif
}

template <class Stored, int kCount>
struct alignas(16) Pack {
    Stored values[kCount];
};

__device__ __forceinline__ void narrow(double value, float& stored) {
    stored = static_cast<float>(value);
}
// Rounded twice, as torch does.
template <class Stored>
__device__ __forceinline__ void narrow(double value, Stored& stored) {
    narrow(static_cast<float>(value), stored);
}

template <class Stored, int kCount, class A>
__device__ __forceinline__ void load_as(const void* data, int64_t first, A (&values)[kCount]) {
    const Stored* stored = static_cast<const Stored*>(data) + first;
    if constexpr (kCount == 1) {
        values[0] = static_cast<A>(widen(*stored));
    } else {
        const auto pack = *reinterpret_cast<const Pack<Stored, kCount>*>(stored);
#pragma unroll
        for (int i = 0; i < kCount; ++i) values[i] = static_cast<A>(widen(pack.values[i]));
    }
}

template <class Stored, int kCount, class A>
__device__ __forceinline__ void store_as(void* data, int64_t first, const A (&values)[kCount]) {
    Stored* stored = static_cast<Stored*>(data) + first;
    if constexpr (kCount == 1) {
        narrow(values[0], *stored);
    } else {
        Pack<Stored, kCount> pack;
#pragma unroll
        for (int i = 0; i < kCount; ++i) narrow(values[i], pack.values[i]);
        constexpr int kVectors = static_cast<int>(sizeof pack / sizeof(Vector));
        Vector vectors[kVectors];
        memcpy(vectors, &pack, sizeof pack);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) store_vector(reinterpret_cast<Vector*>(stored) + i, vectors[i]);
    }
}

// A mixed kernel checks the operand's format each time: all threads take the same branch, and memory is the
// limit.
template <bool kMixed, int kCount, class A>
__device__ __forceinline__ void load(const Operand& operand, int64_t first, A (&values)[kCount]) {
    if constexpr (!kMixed) {
        load_as<A>(operand.data, first, values);
    } else if (operand.dtype == DType::kBFloat16) {
        load_as<BFloat16>(operand.data, first, values);
    } else if (operand.dtype == DType::kFloat16) {
        load_as<Float16>(operand.data, first, values);
    } else if (sizeof(A) == 8 && operand.dtype == DType::kFloat64) {
        load_as<double>(operand.data, first, values);
    } else {
        load_as<float>(operand.data, first, values);
    }
}

template <bool kMixed, int kCount, class A>
__device__ __forceinline__ void store(const Operand& operand, int64_t first, const A (&values)[kCount]) {
    if constexpr (!kMixed) {
        store_as<A>(operand.data, first, values);
    } else if (operand.dtype == DType::kBFloat16) {
        store_as<BFloat16>(operand.data, first, values);
    } else if (operand.dtype == DType::kFloat16) {
        store_as<Float16>(operand.data, first, values);
    } else if constexpr (sizeof(A) == 8) {
        if (operand.dtype == DType::kFloat64) {
            store_as<double>(operand.data, first, values);
        } else {
            store_as<float>(operand.data, first, values);
        }
    } else {
        store_as<float>(operand.data, first, values);
    }
}

// The values as they are read back from the operand.
template <bool kMixed, int kCount, class A>
__device__ __forceinline__ void round_to(DType dtype, A (&values)[kCount]) {
    if constexpr (kMixed) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            BFloat16 brain;
            Float16 half;
            narrow(values[i], brain);
            narrow(values[i], half);
            values[i] = dtype == DType::kBFloat16  ? static_cast<A>(widen(brain))
                        : dtype == DType::kFloat16 ? static_cast<A>(widen(half))
                                                   : values[i];
        }
    }
}

}  // namespace avgpipe
