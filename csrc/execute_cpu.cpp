#include <algorithm>
#include <atomic>
#include <vector>

#include "elastic/cpu.h"
#include "execute.h"

namespace avgpipe {
namespace {

// Threads share a job block by block, whatever the tensors' sizes. A block's start is a vector's.
constexpr int64_t kBlock = 4096;
// Blocks per thread worth the waking of it: some ten microseconds of work.
constexpr int64_t kGrain = 8;
// From this size on, what is written does not stay in the caches anyway.
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

// Of the operand that may be streamed.
int64_t streamable_bytes(const Job& job) {
    const Slot slot = job.kernel == Kernel::kCopy ? Slot::kX : Slot::kUpdate;
    int64_t bytes = 0;
    for (int64_t t = 0; t < job.tensors; ++t)
        bytes += job.work(t, 0).count * size_of(job.work(t, 0)[slot].dtype);
    return bytes;
}

}  // namespace

void execute_on_cpu(Job job, const Tensor& lost) {
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
    if (lost.numel() == 1) *static_cast<int64_t*>(lost.data_ptr()) = total.load();
}

}  // namespace avgpipe
