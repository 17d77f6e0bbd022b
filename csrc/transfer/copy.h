// Copies into a slot.
#pragma once

#include "stream.h"

namespace avgpipe::transfer {

// Of a copy of this size the reader would find little in a cache anyway. The size of the caches is no guide:
// virtual machines report that of the whole host.
constexpr int64_t kStreamFrom = int64_t{16} << 20;

inline void copy(void* destination, const void* source, int64_t bytes, int64_t stream_from = kStreamFrom) {
    if (bytes < stream_from) {
        std::memcpy(destination, source, static_cast<size_t>(bytes));
    } else {
        stream(destination, source, bytes);
        end_of_streaming();
    }
}

}  // namespace avgpipe::transfer
