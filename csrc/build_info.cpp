// Read by avgpipe_ext through ctypes. The constants come from CMakeLists.txt.
#include <string>

#include "elastic/cpu.h"

#define AVGPIPE_EXPORT extern "C" __attribute__((visibility("default")))

// One line "name=value" per fact; lists are separated by commas.
AVGPIPE_EXPORT const char* avgpipe_build_info() {
    return "version=" AVGPIPE_VERSION "\ntorch=" AVGPIPE_TORCH_VERSION
           "\ncuda_arch_list=" AVGPIPE_CUDA_ARCH_LIST;
}

// The instruction sets, among those that kernels are built for, that this processor has; separated by commas.
AVGPIPE_EXPORT const char* avgpipe_cpu_features() {
    static const std::string features = [] {
        std::string list;
#ifdef AVGPIPE_X86_64
        const auto append = [&list](bool is_there, const char* name) {
            if (is_there) list.append(list.empty() ? "" : ",").append(name);
        };
        append(__builtin_cpu_supports("avx2"), "avx2");
        append(__builtin_cpu_supports("avx512f"), "avx512f");
        append(__builtin_cpu_supports("avx512bw"), "avx512bw");
        append(__builtin_cpu_supports("avx512dq"), "avx512dq");
        append(__builtin_cpu_supports("avx512vl"), "avx512vl");
#endif
        return list;
    }();
    return features.c_str();
}

// The instruction set of the CPU kernels in use.
AVGPIPE_EXPORT const char* avgpipe_cpu_path() {
    return avgpipe::cpu_kernel().name;
}
