// The parameter of one launch on a CUDA device: the operands of many tensors, cut into chunks. Its bytes are
// the kernel's only parameter, passed by value, so a launch needs no copy to the device and can be captured
// in a graph.
#pragma once

#include "elastic/work.h"

namespace avgpipe {

// How a kernel computes and stores.
enum class Precision : int32_t {
    kFloat,        // all operands float32
    kDouble,       // all float64
    kMixed,        // each float32, bfloat16 or float16; computed in float
    kMixedDouble,  // each any; computed in double; kCopy only
};

constexpr int kThreads = 256;  // of a thread block
// Elements of a chunk, except for the last one of a tensor. A multiple of 16 bytes for every dtype, so that
// an aligned tensor's chunks are aligned too.
constexpr int64_t kChunk = 4096;
// Large enough for Adam over some 200 tensors. Parameters beyond 4 KiB need CUDA 12.1 and sm_70.
constexpr int kBlockBytes = 16384;

// Words of a tensor: its count; the chunks of the tensors up to and with it; then for each replica a word of
// flags (4 bits of DType for each slot, and above them kAlignedFlag in the first replica's) and a pointer for
// each operand that the kernel uses, in the order of the slots.
constexpr int kTensorWords = 2;
constexpr int kDTypeBits = 4;
constexpr uint64_t kAlignedFlag = uint64_t{1}
                                  << 32;  // all pointers of all replicas are multiples of 16 bytes

constexpr AVGPIPE_HD int pointer_words(Kernel kernel) {
    int words = 0;
    for (int slot = 0; slot < kSlots; ++slot) words += uses(kernel, static_cast<Slot>(slot)) ? 1 : 0;
    return words;
}

// The index of the operand's pointer among those of its replica.
constexpr AVGPIPE_HD int pointer_index(Kernel kernel, Slot slot) {
    int index = 0;
    for (int before = 0; before < static_cast<int>(slot); ++before)
        index += uses(kernel, static_cast<Slot>(before)) ? 1 : 0;
    return index;
}

constexpr AVGPIPE_HD int64_t words_of_tensor(Kernel kernel, int64_t replicas) {
    return kTensorWords + replicas * (1 + pointer_words(kernel));
}

// Every kernel: X(name, Kernel, type of the arithmetic, whether operands' formats differ from it), in the
// order of Kernel and Precision.
#define AVGPIPE_PRECISIONS(X, name, kernel) \
    X(name##_float, kernel, float, false)   \
    X(name##_double, kernel, double, false) X(name##_mixed, kernel, float, true)
#define AVGPIPE_CUDA_KERNELS(X)                           \
    AVGPIPE_PRECISIONS(X, pull, kPull)                    \
    AVGPIPE_PRECISIONS(X, step, kStep)                    \
    AVGPIPE_PRECISIONS(X, apply, kApply)                  \
    AVGPIPE_PRECISIONS(X, sgd, kSgd)                      \
    AVGPIPE_PRECISIONS(X, momentum, kMomentum)            \
    AVGPIPE_PRECISIONS(X, adam, kAdam)                    \
    AVGPIPE_PRECISIONS(X, sgd_round, kSgdRound)           \
    AVGPIPE_PRECISIONS(X, momentum_round, kMomentumRound) \
    AVGPIPE_PRECISIONS(X, adam_round, kAdamRound)         \
    AVGPIPE_PRECISIONS(X, trial_sgd, kTrialSgd)           \
    AVGPIPE_PRECISIONS(X, trial_momentum, kTrialMomentum) \
    AVGPIPE_PRECISIONS(X, trial_adam, kTrialAdam)         \
    AVGPIPE_PRECISIONS(X, predict_sgd, kPredictSgd)       \
    AVGPIPE_PRECISIONS(X, predict_adam, kPredictAdam)     \
    AVGPIPE_PRECISIONS(X, correct, kCorrect)              \
    AVGPIPE_PRECISIONS(X, copy, kCopy)                    \
    X(copy_mixed_double, kCopy, double, true)

struct BlockHead {
    Settings settings;  // needed if it points to values in device memory; else one of these holds:
    Scalars<float> floats;
    Scalars<double> doubles;
    unsigned long long* lost = nullptr;  // the counter of check_finite, in device memory
    int64_t chunks = 0;
    int32_t tensors = 0;
    int32_t replicas = 0;
};

constexpr int kBlockWords = (kBlockBytes - static_cast<int>(sizeof(BlockHead))) / 8;

struct LaunchBlock {
    BlockHead head;
    uint64_t words[kBlockWords];
};
static_assert(sizeof(LaunchBlock) == kBlockBytes);

}  // namespace avgpipe
