// CPU kernels. Free of torch.
#pragma once

#include "elastic/work.h"

namespace avgpipe {

// Runs the job, for all its replicas, on the elements begin <= index < end of a tensor, on the calling
// thread; returns how many were lost (see advance_checked), 0 without check_finite. Results do not depend on
// how a range is cut. `step`, `grad_scale` and `found_inf` of the settings must be null.
using CpuKernel = int64_t (*)(const Job& job, int64_t tensor, int64_t begin, int64_t end);

// cpu.cpp is compiled once per instruction set.
namespace baseline {
int64_t run(const Job& job, int64_t tensor, int64_t begin, int64_t end);
}
#ifdef AVGPIPE_X86_64
namespace avx2 {
int64_t run(const Job& job, int64_t tensor, int64_t begin, int64_t end);
}
namespace avx512 {
int64_t run(const Job& job, int64_t tensor, int64_t begin, int64_t end);
}
#endif

// The best kernel that this processor can run, and its instruction set's name; chosen once.
struct CpuChoice {
    CpuKernel run;
    const char* name;
};
CpuChoice cpu_kernel();

}  // namespace avgpipe
