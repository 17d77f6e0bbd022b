// Random numbers that belong to a place, not to a turn: the same on every machine and in every order of
// events.
#pragma once

#include <cstdint>

namespace avgpipe::simulate {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

// A step of SplitMix64 (Steele, Lea, Flood 2014).
inline uint64_t mix(uint64_t x) {
    x += kGolden;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

inline uint64_t draw(uint64_t seed, int64_t what, int64_t batch, int64_t micro_batch) {
    const uint64_t place = mix(mix(seed ^ static_cast<uint64_t>(what)) ^ static_cast<uint64_t>(batch));
    return mix(place ^ static_cast<uint64_t>(micro_batch));
}

// The sum of four uniform numbers: nearly normal, around 0, with a standard deviation of 37837.2 and no value
// beyond 131070.
inline int64_t bell(uint64_t bits) {
    int64_t sum = -131070;
    for (int part = 0; part < 4; ++part) sum += static_cast<int64_t>((bits >> (16 * part)) & 0xFFFF);
    return sum;
}

}  // namespace avgpipe::simulate
