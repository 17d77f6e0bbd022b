#include "collectives.h"

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "executor.h"
#include "issue.h"
#include "memory.h"

namespace simulated {
namespace {

using Buffers = std::vector<at::Tensor>;  // by member; they keep nothing alive

std::mutex mutex;
std::map<std::string, std::pair<std::shared_ptr<Buffers>, size_t>>& begun() {
    static auto* const found = new std::map<std::string, std::pair<std::shared_ptr<Buffers>, size_t>>();
    return *found;
}

std::shared_ptr<Buffers> joined(const std::string& name, size_t member, size_t size,
                                const at::Tensor& tensor) {
    const std::lock_guard lock(mutex);
    auto& [buffers, count] = begun()[name];
    if (!buffers) buffers = std::make_shared<Buffers>(size);
    const auto found = buffers;
    found->at(member) = alias_of(tensor);
    if (++count == size) begun().erase(name);
    return found;
}

void add_up(const Buffers& buffers) {
    at::Tensor total = buffers[0].clone();
    for (size_t m = 1; m < buffers.size(); ++m) total.add_(buffers[m]);
    for (const at::Tensor& buffer : buffers) buffer.copy_(total);
}

}  // namespace

void meet(const std::string& name, size_t member, size_t size, const at::Tensor& tensor, bool sums) {
    const auto buffers = joined(name, member, size, tensor);
    const c10::Stream stream = current_stream_of(tensor.device());
    poison_freed(stream);
    const auto run = [buffers, sums] {
        if (sums) {
            add_up(*buffers);
        } else {
            buffers->at(1).copy_(buffers->at(0));
        }
    };
    Executor::get().meet(stream.device_index(), stream.id(), name, member, size, run);
}

void reset_collectives() {
    const std::lock_guard lock(mutex);
    begun().clear();
}

}  // namespace simulated
