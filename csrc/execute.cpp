// References no CUDA symbol of libtorch at link time, so that the library also loads with a CPU-only torch.
#include "execute.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "elastic/cpu.h"
#include "library.h"

#ifdef AVGPIPE_WITH_CUDA
#include <dlfcn.h>
#endif

namespace avgpipe {
namespace {

// Threads share a job block by block, for any sizes of tensors. A block starts at a vector boundary.
constexpr int64_t kBlock = 4096;
// Blocks per thread that justify waking it: some ten microseconds of work.
constexpr int64_t kGrain = 8;
// From this size on, written data does not stay in the caches anyway.
constexpr int64_t kStreamBytes = int64_t{8} << 20;

// ends[t]: blocks of the tensors up to and with t.
std::vector<int64_t> block_ends(const Job& job) {
    std::vector<int64_t> ends(job.tensors);
    int64_t blocks = 0;
    for (int64_t t = 0; t < job.tensors; ++t) {
        blocks += (job.work(t, 0).count + kBlock - 1) / kBlock;
        ends[t] = blocks;
    }
    return ends;
}

// For the operand that may be streamed.
int64_t streamable_bytes(const Job& job) {
    const Slot slot = job.kernel == Kernel::kCopy ? Slot::kX : Slot::kUpdate;
    int64_t bytes = 0;
    for (int64_t t = 0; t < job.tensors; ++t)
        bytes += job.work(t, 0).count * size_of(job.work(t, 0)[slot].dtype);
    return bytes;
}

int64_t execute_on_cpu(Job job) {
    const CpuKernel kernel = cpu_kernel().run;
    const std::vector<int64_t> ends = block_ends(job);
    job.streams = streamable_bytes(job) >= kStreamBytes;
    std::atomic<int64_t> total{0};
    parallel_for(ends.empty() ? 0 : ends.back(), kGrain, [&](int64_t begin, int64_t end) {
        int64_t mine = 0;
        auto t = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
        for (int64_t block = begin; block < end; ++t) {
            const int64_t start = t == 0 ? 0 : ends[t - 1];
            const int64_t last = std::min(end, ends[t]);
            const int64_t stop = std::min((last - start) * kBlock, job.work(t, 0).count);
            if (last > block) mine += kernel(job, t, (block - start) * kBlock, stop);
            block = last;
        }
        total.fetch_add(mine, std::memory_order_relaxed);
    });
    return total.load();
}

#ifdef AVGPIPE_WITH_CUDA
using CurrentStream = decltype(&aoti_torch_get_current_cuda_stream);

// The Python module loads libtorch_cuda privately, so it is not in the global scope: find the loaded library
// by its name. The global scope is for a statically linked torch.
CurrentStream find_current_stream() {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = dlsym(library != nullptr ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<CurrentStream>(symbol);
}

void launch_inside(const Launch& launch, int32_t device) {
    static const CurrentStream get = find_current_stream();
    if (get == nullptr) {
        throw std::runtime_error("avgpipe: this torch has no CUDA streams; install a CUDA build of torch");
    }
    const DeviceGuard guard(device);
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(get(device, &stream));
    launch_kernel(launch, device, stream);
}

bool is_compiled_for(int32_t device) {
    return has_image(device);
}
#else
bool is_compiled_for(int32_t) {
    return false;
}

void launch_inside(const Launch&, int32_t) {
    throw std::logic_error("a CUDA operator without kernels; see require_kernel");
}
#endif

std::string why_none(const View& view) {
    if (view.device_type != aoti_torch_device_type_cuda()) return "; move the tensors to cpu or cuda";
    const std::string_view list = avgpipe_library()->cuda_arch_list;
    const std::string compiled =
        list.empty() ? "built without CUDA" : text("the kernels are compiled for ", list);
    return text(": ", compiled,
                "; pip install 'avgpipe[cupy]' to compile them at first use, or rebuild with ",
                list.empty() ? "AVGPIPE_CUDA=1" : "TORCH_CUDA_ARCH_LIST", "; see avgpipe doctor");
}

}  // namespace

void require_kernel(const CallSite& site, const Tensor& tensor) {
    if (!is_strided(tensor)) refuse(site, "a sparse tensor was passed; pass dense tensors");
    const View view = view_of(tensor);
    if (view.device_type == aoti_torch_device_type_cpu()) return;
    if (view.device_type == aoti_torch_device_type_cuda()) {
        const bool is_compiled = is_compiled_for(view.device_index);
        if (is_compiled || outside_launcher(is_compiled) != nullptr) return;
    }
    refuse(site, text("no kernel for ", device_of(view), why_none(view)));
}

void execute(const Job& job, const View& where, void* lost) {
    if (where.device_type == aoti_torch_device_type_cpu()) {
        const int64_t count = execute_on_cpu(job);
        if (lost != nullptr) *static_cast<int64_t*>(lost) = count;
        return;
    }
    const Launcher outside = outside_launcher(is_compiled_for(where.device_index));
    for_each_launch(job, static_cast<unsigned long long*>(lost), [&](const Launch& launch) {
        (outside != nullptr ? outside : launch_inside)(launch, where.device_index);
    });
}

}  // namespace avgpipe
