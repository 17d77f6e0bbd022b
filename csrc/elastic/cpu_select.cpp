#include "elastic/cpu.h"

namespace avgpipe {

CpuKernel cpu_kernel() {
#ifdef AVGPIPE_X86_64
    // The flags cpu.cpp is compiled with, see CMakeLists.txt.
    static const CpuKernel kernel = [] {
        const bool has_avx2 = __builtin_cpu_supports("avx2");
        const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
        return has_avx2 && has_avx512 ? avx512::run : has_avx2 ? avx2::run : baseline::run;
    }();
    return kernel;
#else
    return baseline::run;
#endif
}

}  // namespace avgpipe
