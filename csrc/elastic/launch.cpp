#include "elastic/launch.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <stdexcept>

#include "text.h"

namespace avgpipe {
namespace {

constexpr int64_t kBlocksPerProcessor = 32;
constexpr uintptr_t kAlignment = 16;
constexpr Precision kPrecisions[] = {Precision::kFloat, Precision::kDouble, Precision::kMixed,
                                     Precision::kMixedDouble};

#define AVGPIPE_AS_TEXT(name, kernel, type, is_mixed) #name ", " #kernel ", " #type ", " #is_mixed,
constexpr const char* kDefinitions[] = {AVGPIPE_CUDA_KERNELS(AVGPIPE_AS_TEXT)};
static_assert(std::size(kDefinitions) == 3 * (static_cast<int>(Kernel::kCopy) + 1) + 1);

int kernel_number(Kernel kernel, Precision precision) {
    return 3 * static_cast<int>(kernel) + static_cast<int>(precision);
}

// Calls body(operand, slot) for each operand that the kernel uses.
template <class Body>
void for_each_operand(Kernel kernel, const Work& work, const Body& body) {
    for (int slot = 0; slot < kSlots; ++slot) {
        if (uses(kernel, static_cast<Slot>(slot))) body(work.operands[slot], slot);
    }
}

Precision precision_of(const Job& job, int64_t tensor) {
    bool has_double = false, has_other = false, has_16_bit = false;
    for (int64_t r = 0; r < job.replicas; ++r) {
        for_each_operand(job.kernel, job.work(tensor, r), [&](const Operand& operand, int) {
            const bool is_double = operand.dtype == DType::kFloat64;
            has_double |= is_double;
            has_other |= !is_double;
            has_16_bit |= is_16_bit(operand.dtype);
        });
    }
    if (has_double) return has_other ? Precision::kMixedDouble : Precision::kDouble;
    return has_16_bit ? Precision::kMixed : Precision::kFloat;
}

// A block that tensors are appended to until it is full.
class Filler {
  public:
    Filler(const Job& job, unsigned long long* lost)
        : job_(job), tensor_words_(words_of_tensor(job.kernel, job.replicas)) {
        const Optimizer optimizer = optimizer_of(job.kernel);
        block_.head.settings = job.settings;
        block_.head.floats = scalars_of<float>(job.settings, optimizer);
        block_.head.doubles = scalars_of<double>(job.settings, optimizer);
        block_.head.lost = lost;
        block_.head.replicas = static_cast<int32_t>(job.replicas);
    }

    bool is_full() const { return (block_.head.tensors + 1) * tensor_words_ > kBlockWords; }

    void append(int64_t tensor) {
        uint64_t* words = block_.words + block_.head.tensors * tensor_words_;
        const int64_t count = job_.work(tensor, 0).count;
        block_.head.chunks += (count + kChunk - 1) / kChunk;
        ++block_.head.tensors;
        words[0] = static_cast<uint64_t>(count);
        words[1] = static_cast<uint64_t>(block_.head.chunks);
        uint64_t* flags = words + kTensorWords;
        uint64_t* next = flags;
        bool is_aligned = true;
        for (int64_t r = 0; r < job_.replicas; ++r) {
            uint64_t& dtypes = *next++ = 0;
            for_each_operand(job_.kernel, job_.work(tensor, r), [&](const Operand& operand, int slot) {
                const auto address = reinterpret_cast<uintptr_t>(operand.data);
                is_aligned &= address % kAlignment == 0;
                dtypes |= static_cast<uint64_t>(operand.dtype) << (kDTypeBits * slot);
                *next++ = address;
            });
        }
        if (is_aligned) *flags |= kAlignedFlag;
    }

    void launch(Precision precision, const std::function<void(const Launch&)>& run) {
        run({kernel_number(job_.kernel, precision), block_});
        block_.head.chunks = 0;
        block_.head.tensors = 0;
    }

  private:
    const Job& job_;
    int64_t tensor_words_;
    LaunchBlock block_;
};

void check_replicas(const Job& job) {
    const int64_t most = (kBlockWords - kTensorWords) / (1 + pointer_words(job.kernel));
    if (job.replicas > most) {
        throw std::invalid_argument(text("avgpipe: ", job.replicas, " replicas in one call on CUDA; at most ",
                                         most, " fit into a launch, so average fewer"));
    }
}

}  // namespace

void for_each_launch(const Job& job, unsigned long long* lost,
                     const std::function<void(const Launch&)>& run) {
    check_replicas(job);
    for (const Precision precision : kPrecisions) {
        std::optional<Filler> filler;
        for (int64_t t = 0; t < job.tensors; ++t) {
            if (job.work(t, 0).count == 0 || precision_of(job, t) != precision) continue;
            if (!filler) filler.emplace(job, lost);
            if (filler->is_full()) filler->launch(precision, run);
            filler->append(t);
        }
        if (filler) filler->launch(precision, run);
    }
}

const char* kernel_definition(int kernel) {
    return kDefinitions[kernel];
}

int kernel_count() {
    return static_cast<int>(std::size(kDefinitions));
}

int64_t grid_size(int64_t chunks, int64_t processors) {
    return std::min(chunks, processors * kBlocksPerProcessor);
}

}  // namespace avgpipe
