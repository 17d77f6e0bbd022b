// What the C++ tests share: a count of failures, and arrays of any format. Free of torch.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "elastic/number.h"
#include "elastic/work.h"

namespace avgpipe::tests {

inline int failures = 0;

inline void expect(bool condition, const char* what, double seen, double wanted) {
    if (condition || ++failures > 20) return;
    std::fprintf(stderr, "%s: got %.9g, want %.9g\n", what, seen, wanted);
}

inline int report() {
    if (failures == 0) std::puts("ok");
    return failures == 0 ? 0 : 1;
}

inline bool is_same(float a, float b) {
    return (std::isnan(a) && std::isnan(b)) || bits_of(a) == bits_of(b);
}

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16};

// `count` elements of any format, misaligned for vectors, between guard bytes that must not change.
class Array {
  public:
    Array(DType dtype, int64_t count)
        : dtype_(dtype), count_(count), bytes_(2 * kMargin + (count + 1) * size_of(dtype), kUntouched) {}

    void set(int64_t i, double value) {
        const auto single = static_cast<float>(value);
        BFloat16 brain{};
        Float16 half{};
        narrow(single, brain);
        narrow(single, half);
        switch (dtype_) {
            case DType::kFloat32:
                return put(i, single);
            case DType::kFloat64:
                return put(i, value);
            case DType::kBFloat16:
                return put(i, brain);
            case DType::kFloat16:
                return put(i, half);
        }
    }

    double get(int64_t i) const {
        switch (dtype_) {
            case DType::kFloat32:
                return take<float>(i);
            case DType::kFloat64:
                return take<double>(i);
            case DType::kBFloat16:
                return widen(take<BFloat16>(i));
            case DType::kFloat16:
                return widen(take<Float16>(i));
        }
        return 0;
    }

    // The distance of neighbouring numbers around 1.
    double epsilon() const {
        switch (dtype_) {
            case DType::kFloat32:
                return 0x1p-23;
            case DType::kFloat64:
                return 0x1p-52;
            case DType::kBFloat16:
                return 0x1p-7;
            default:
                return 0x1p-10;
        }
    }

    bool has_margins() const {
        const int64_t end = begin() + count_ * size_of(dtype_);
        for (int64_t b = 0; b < static_cast<int64_t>(bytes_.size()); ++b) {
            if ((b < begin() || b >= end) && bytes_[b] != kUntouched) return false;
        }
        return true;
    }

    DType dtype() const { return dtype_; }
    int64_t count() const { return count_; }
    bool operator==(const Array& other) const { return bytes_ == other.bytes_; }
    Operand operand() { return {bytes_.data() + begin(), dtype_}; }

  private:
    static constexpr int64_t kMargin = 64;
    static constexpr unsigned char kUntouched = 0xA5;

    int64_t begin() const { return kMargin + size_of(dtype_); }

    template <class Stored>
    void put(int64_t i, Stored value) {
        std::memcpy(bytes_.data() + begin() + i * static_cast<int64_t>(sizeof value), &value, sizeof value);
    }

    template <class Stored>
    Stored take(int64_t i) const {
        Stored value;
        std::memcpy(&value, bytes_.data() + begin() + i * static_cast<int64_t>(sizeof value), sizeof value);
        return value;
    }

    DType dtype_;
    int64_t count_;
    std::vector<unsigned char> bytes_;
};

}  // namespace avgpipe::tests
