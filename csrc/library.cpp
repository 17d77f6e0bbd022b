#include "library.h"

#include <atomic>
#include <string>

#include "elastic/cpu.h"

namespace avgpipe {
namespace {

std::atomic<Launcher> launcher_set{nullptr};
std::atomic<bool> is_for_all{false};

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

Launcher outside_launcher(bool has_image) {
    return has_image && !is_for_all.load() ? nullptr : launcher_set.load();
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
        .set_launcher =
            [](avgpipe::Launcher launcher, bool for_all) {
                avgpipe::launcher_set.store(launcher);
                avgpipe::is_for_all.store(for_all);
            },
    };
    return &library;
}
