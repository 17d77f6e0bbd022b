// CPU kernels. Free of torch.
#pragma once

#include "elastic/work.h"

namespace avgpipe {

// Advances the elements begin <= index < end on the calling thread; returns how many were lost (see
// advance_checked), 0 without check_finite. Results do not depend on how a range is cut.
using CpuKernel = int64_t (*)(Rule rule, const Work& work, int64_t begin, int64_t end);

// cpu.cpp is compiled once per instruction set.
namespace baseline {
int64_t run(Rule rule, const Work& work, int64_t begin, int64_t end);
}
#ifdef AVGPIPE_X86_64
namespace avx2 {
int64_t run(Rule rule, const Work& work, int64_t begin, int64_t end);
}
namespace avx512 {
int64_t run(Rule rule, const Work& work, int64_t begin, int64_t end);
}
#endif

// The best kernel this processor can run; decided once.
CpuKernel cpu_kernel();

}  // namespace avgpipe
