#include <atomic>

#include "elastic/cpu.h"
#include "execute.h"

namespace avgpipe {
namespace {

// Elements per thread worth the waking of it: some ten microseconds of work.
constexpr int64_t kGrain = 32768;

}  // namespace

void execute_on_cpu(Rule rule, std::span<const Work> works, const Tensor& lost) {
    const CpuKernel kernel = cpu_kernel();
    std::atomic<int64_t> total{0};
    for (const Work& work : works) {
        parallel_for(work.count, kGrain, [&](int64_t begin, int64_t end) {
            total.fetch_add(kernel(rule, work, begin, end), std::memory_order_relaxed);
        });
    }
    if (lost.numel() == 1) *static_cast<int64_t*>(lost.data_ptr()) = total.load();
}

}  // namespace avgpipe
