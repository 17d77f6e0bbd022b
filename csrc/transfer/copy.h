// Copies into a slot.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace avgpipe::transfer {

#ifdef __SSE2__
// Writes past the caches: the old content of the destination is not read first, and nothing is pushed out for
// it.
inline void stream(std::byte* destination, const std::byte* source, size_t bytes) {
    constexpr size_t kLine = 64;
    const size_t head = std::min(-reinterpret_cast<uintptr_t>(destination) % kLine, bytes);
    std::memcpy(destination, source, head);
    size_t at = head;
    for (; at + kLine <= bytes; at += kLine) {
        __m128i line[4];
        std::memcpy(line, source + at, kLine);
        for (int i = 0; i < 4; ++i)
            _mm_stream_si128(reinterpret_cast<__m128i*>(destination + at) + i, line[i]);
    }
    std::memcpy(destination + at, source + at, bytes - at);
    _mm_sfence();  // these stores are ordered by nothing else
}

// Of so much the reader would find little in a cache anyway. The size of the caches is no guide: virtual
// machines report that of the whole host.
constexpr size_t kStreamFrom = size_t{16} << 20;
#endif

inline void copy(void* destination, const void* source, size_t bytes) {
#ifdef __SSE2__
    if (bytes >= kStreamFrom) {
        return stream(static_cast<std::byte*>(destination), static_cast<const std::byte*>(source), bytes);
    }
#endif
    std::memcpy(destination, source, bytes);
}

}  // namespace avgpipe::transfer
