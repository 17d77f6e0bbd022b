#include "memory.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "executor.h"

namespace simulated {
namespace {

constexpr size_t kAlignment = 64;  // as torch's memory of the CPU
constexpr unsigned char kPoison = 0xFF;
constexpr c10::DeviceIndex kHost = -1;

struct Block {
    unsigned char* data;
    size_t size;
    size_t asked = 0;
    c10::DeviceIndex device = kHost;
    int64_t home = 0;
    uint64_t epoch = 0;
    bool in_use = false;
    bool is_dirty = false;                // with what its last user left in it, where poison belongs
    std::vector<c10::Stream> users = {};  // other streams
    std::vector<MarkPtr> awaited = {};    // of a freed block: where its users must have come

    void poison() { std::memset(data, kPoison, size); }
};

c10::Stream current_stream() {
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
    return guard.getStream(guard.getDevice());
}

// Blocks of powers of two, the last one freed first, so that it is soon somebody else's.
class Pool {
  public:
    Block* take(size_t asked, c10::DeviceIndex device, int64_t home) {
        const std::lock_guard lock(mutex_);
        settle();
        const size_t size = std::bit_ceil(std::max(asked, kAlignment));
        auto& free = free_[{device, home, size}];
        Block* block = nullptr;
        if (!free.empty()) {
            block = free.back();
            free.pop_back();
            if (std::exchange(block->is_dirty, false)) enqueue_poison(device, home, {block});
        } else {
            block = unused(size, device < 0);
            block->is_dirty = false;
            block->poison();
        }
        block->device = device;
        block->home = home;
        block->asked = asked;
        block->epoch = Executor::get().epoch();
        block->in_use = true;
        if (device >= 0) stats_[device].allocated_bytes[0].increase(asked);
        return block;
    }

    void give_back(Block* block) {
        const std::lock_guard lock(mutex_);
        block->in_use = false;
        if (block->device >= 0) stats_[block->device].allocated_bytes[0].decrease(block->asked);
        auto users = std::exchange(block->users, {});
        if (block->epoch != Executor::get().epoch()) {
            unused_[block->device < 0][block->size].push_back(block);
            return;
        }
        for (const c10::Stream& user : users)
            block->awaited.push_back(
                Executor::get().record(user.device_index(), user.id(), "record of free"));
        if (block->awaited.empty()) {
            make_free(block);
        } else {
            pending_.push_back(block);
        }
    }

    void poison_freed(c10::DeviceIndex device, int64_t home) {
        const std::lock_guard lock(mutex_);
        const auto found = dirty_.find({device, home});
        if (found == dirty_.end() || found->second.empty()) return;
        std::vector<Block*> blocks;
        for (Block* block : std::exchange(found->second, {})) {
            if (std::exchange(block->is_dirty, false)) blocks.push_back(block);
        }
        if (!blocks.empty()) enqueue_poison(device, home, std::move(blocks));
    }

    bool used_on(const void* address, c10::Stream stream, bool is_host) {
        const std::lock_guard lock(mutex_);
        Block* const block = find(address, is_host);
        if (block == nullptr) return false;
        const bool at_home = !is_host && stream.id() == block->home && stream.device_index() == block->device;
        const bool known = std::find(block->users.begin(), block->users.end(), stream) != block->users.end();
        if (!at_home && !known) block->users.push_back(stream);
        return true;
    }

    Block* find_in_use(const void* address, bool is_host) {
        const std::lock_guard lock(mutex_);
        return find(address, is_host);
    }

    void reset() {
        const std::lock_guard lock(mutex_);
        for (auto& [key, blocks] : free_) {
            for (Block* block : blocks) unused_[block->device < 0][block->size].push_back(block);
        }
        for (Block* block : pending_) {
            block->awaited.clear();
            unused_[block->device < 0][block->size].push_back(block);
        }
        free_.clear();
        pending_.clear();
        dirty_.clear();
        for (auto& stats : stats_) stats.allocated_bytes[0].reset_peak();
    }

    c10::CachingDeviceAllocator::DeviceStats& stats(c10::DeviceIndex device) { return stats_[device]; }

  private:
    struct Key {
        c10::DeviceIndex device;
        int64_t home;
        size_t size;
        auto operator<=>(const Key&) const = default;
    };

    Block* unused(size_t size, bool is_host) {
        auto& blocks = unused_[is_host][size];
        if (!blocks.empty()) {
            Block* const block = blocks.back();
            blocks.pop_back();
            return block;
        }
        auto* const data = static_cast<unsigned char*>(std::aligned_alloc(kAlignment, size));
        TORCH_CHECK(data != nullptr, "no memory for ", size, " bytes");
        auto* const block = new Block{data, size};
        all_[is_host].emplace(data, block);
        return block;
    }

    // The host is nobody's stream: what it frees, it may write at once.
    void make_free(Block* block) {
        block->awaited.clear();
        free_[{block->device, block->home, block->size}].push_back(block);
        if (block->device < 0) {
            block->poison();
        } else {
            block->is_dirty = true;
            dirty_[{block->device, block->home}].push_back(block);
        }
    }

    void enqueue_poison(c10::DeviceIndex device, int64_t home, std::vector<Block*> blocks) {
        const auto run = [blocks = std::move(blocks)] {
            for (Block* block : blocks) block->poison();
        };
        Executor::get().enqueue(device, home, {"poison", run, {}, {}});
    }

    // Looks, without waiting, which freed blocks nobody uses any more.
    void settle() {
        std::vector<Block*> left;
        for (Block* block : std::exchange(pending_, {})) {
            const auto is_reached = [](const MarkPtr& mark) { return Executor::get().is_reached(mark); };
            if (std::all_of(block->awaited.begin(), block->awaited.end(), is_reached)) {
                make_free(block);
            } else {
                left.push_back(block);
            }
        }
        pending_ = std::move(left);
    }

    Block* find(const void* address, bool is_host) const {
        const auto after = all_[is_host].upper_bound(static_cast<const unsigned char*>(address));
        if (after == all_[is_host].begin()) return nullptr;
        Block* const block = std::prev(after)->second;
        return block->in_use && address < block->data + block->size ? block : nullptr;
    }

    std::mutex mutex_;
    std::map<Key, std::vector<Block*>> free_;
    std::vector<Block*> pending_;
    std::map<std::pair<c10::DeviceIndex, int64_t>, std::vector<Block*>> dirty_;
    std::map<size_t, std::vector<Block*>> unused_[2];
    std::map<const unsigned char*, Block*> all_[2];
    c10::CachingDeviceAllocator::DeviceStats stats_[kDevices];
};

Pool& pool() {
    static auto* const only = new Pool();
    return *only;
}

void free_block(void* block) {
    if (block != nullptr) pool().give_back(static_cast<Block*>(block));
}

struct DeviceMemory final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t bytes) override {
        const c10::Stream stream = current_stream();
        if (bytes == 0) return {nullptr, nullptr, &free_block, stream.device()};
        Block* const block = pool().take(bytes, stream.device_index(), stream.id());
        return {block->data, block, &free_block, stream.device()};
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {}
    void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
        pool().used_on(data.get(), stream, false);
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
        return pool().stats(device);
    }
    void resetAccumulatedStats(c10::DeviceIndex device) override {
        pool().stats(device).allocated_bytes[0].reset_accumulated();
    }
    void resetPeakStats(c10::DeviceIndex device) override {
        pool().stats(device).allocated_bytes[0].reset_peak();
    }
};

struct PinnedMemory final : at::HostAllocator {
    c10::DataPtr allocate(size_t bytes) override {
        if (bytes == 0) return {nullptr, nullptr, &free_block, c10::DeviceType::CPU};
        Block* const block = pool().take(bytes, kHost, 0);
        return {block->data, block, &free_block, c10::DeviceType::CPU};
    }
    void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
    bool record_event(void* data, void*, c10::Stream stream) override {
        return pool().used_on(data, stream, true);
    }
    void empty_cache() override {}
    at::HostStats get_stats() override { return {}; }
    void reset_accumulated_stats() override {}
    void reset_peak_stats() override {}
};

}  // namespace

c10::DeviceAllocator* device_memory() {
    static auto* const memory = new DeviceMemory();
    return memory;
}

at::HostAllocator* pinned_memory() {
    static auto* const memory = new PinnedMemory();
    return memory;
}

bool is_pinned(const void* address) {
    return pool().find_in_use(address, true) != nullptr;
}

bool pinned_is_used_on(const void* address, c10::Stream stream) {
    return pool().used_on(address, stream, true);
}

c10::Device device_of(const void* address) {
    const Block* const block = pool().find_in_use(address, false);
    TORCH_CHECK(block != nullptr, "an address that is not in a device's memory");
    return {c10::DeviceType::PrivateUse1, block->device};
}

void poison_freed(c10::Stream stream) {
    pool().poison_freed(stream.device_index(), stream.id());
}

void reset_memory() {
    pool().reset();
}

}  // namespace simulated
