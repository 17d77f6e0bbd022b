// The input of the kernels: flat operands of one length, and the work to do on them. Free of torch.
#pragma once

#include "elastic/element.h"

namespace avgpipe {

// Consecutive elements at `data`; data is null if a kernel does not use the operand.
struct Operand {
    void* data = nullptr;
    DType dtype = DType::kFloat32;
};

// Operands of `count` elements. All are float64, or each is float32, bfloat16 or float16; those of kCopy have
// any type. A written operand overlaps no other one.
struct Work {
    Operand operands[kSlots];
    int64_t count = 0;

    AVGPIPE_HD const Operand& operator[](Slot slot) const { return operands[static_cast<int>(slot)]; }
    AVGPIPE_HD Operand& operator[](Slot slot) { return operands[static_cast<int>(slot)]; }
};

// Whether the arithmetic is done in double.
AVGPIPE_HD bool is_double(Kernel kernel, const Work& work) {
    return work[uses(kernel, Slot::kZ) ? Slot::kZ : Slot::kX].dtype == DType::kFloat64 ||
           (kernel == Kernel::kCopy && work[Slot::kBefore].dtype == DType::kFloat64);
}

// One call of an operator. works[r * tensors + t] is tensor t of replica r; with more than one replica
// (kApply and rounds) those of one t share z. z is written once: with several replicas the sum is made in
// float or wider and rounded at the end, one replica after another. After a round's steps every x is pulled
// to the new z.
struct Job {
    Kernel kernel;
    Settings settings;
    const Work* works = nullptr;
    int64_t tensors = 0;
    int64_t replicas = 1;
    // CPU: operands that are written without being read bypass the caches, as they would not stay in them.
    bool streams = false;

    const Work& work(int64_t tensor, int64_t replica) const { return works[replica * tensors + tensor]; }
};

}  // namespace avgpipe
