// Copies that bypass the caches: the old content of the destination is not read first, and nothing is
// evicted.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace avgpipe {

// Always inlined, as it is compiled for several instruction sets. Its stores become visible to other threads
// in order with others after end_of_streaming.
inline __attribute__((always_inline)) void stream(void* to, const void* from, int64_t bytes) {
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

inline __attribute__((always_inline)) void end_of_streaming() {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

}  // namespace avgpipe
