#include "elastic/cpu.h"

namespace avgpipe {

CpuChoice cpu_kernel() {
#ifdef AVGPIPE_X86_64
    // The flags that cpu.cpp is compiled with, see CMakeLists.txt.
    static const CpuChoice choice = [] {
        const bool has_avx2 = __builtin_cpu_supports("avx2");
        const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
        if (has_avx2 && has_avx512) return CpuChoice{avx512::run, "avx512"};
        return has_avx2 ? CpuChoice{avx2::run, "avx2"} : CpuChoice{baseline::run, "baseline"};
    }();
    return choice;
#else
    return {baseline::run, "baseline"};
#endif
}

}  // namespace avgpipe
