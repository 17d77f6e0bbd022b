#include "library.h"

#include <atomic>
#include <string>

#include "elastic/cpu.h"

namespace avgpipe {
namespace {

std::atomic<Launcher> outside_launcher{nullptr};

std::string cpu_features() {
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
}

}  // namespace

bool has_cuda_kernels() {
#ifdef AVGPIPE_WITH_CUDA
    return true;
#else
    return outside_launcher.load() != nullptr;
#endif
}

bool launch_outside(const Launch& launch, int32_t device) {
    const Launcher run = outside_launcher.load();
    if (run != nullptr) run(launch, device);
    return run != nullptr;
}

}  // namespace avgpipe

const avgpipe::Library* avgpipe_library() {
    static const std::string features = avgpipe::cpu_features();
    // The constants come from CMakeLists.txt.
    static const avgpipe::Library library = {
        .version = AVGPIPE_VERSION,
        .torch = AVGPIPE_TORCH_VERSION,
        .cuda_arch_list = AVGPIPE_CUDA_ARCH_LIST,
        .cpu_features = features.c_str(),
        .cpu_path = avgpipe::cpu_kernel().name,
        .set_launcher = [](avgpipe::Launcher launcher) { avgpipe::outside_launcher.store(launcher); },
    };
    return &library;
}
