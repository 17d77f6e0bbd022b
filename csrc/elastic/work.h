// What the kernels are told: flat operands of one length. Free of torch.
#pragma once

#include "elastic/element.h"

namespace avgpipe {

// `count` elements at `data`, one after another; data is null where a rule does not use the operand.
struct Operand {
    void* data = nullptr;
    DType dtype = DType::kFloat32;
};

// One update of `count` elements. Operands are all float64, or each float32, bfloat16 or float16. An operand
// that is written overlaps no other one.
struct Work {
    Operand x, x_before, z, update;
    int64_t count = 0;
    double alpha = 0.0;
    bool check_finite = false;
};

}  // namespace avgpipe
