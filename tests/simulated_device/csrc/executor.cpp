#include "executor.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <exception>

namespace simulated {
namespace {

constexpr double kTaskMs = 1e-3;  // what a task takes on the clock of events
constexpr int kPatience = 3;      // questions that an unreached mark answers with no before it makes progress

uint64_t mixed(uint64_t x) {  // the finaliser of SplitMix64
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// Whatever modes the thread that happens to run a task is in, a kernel sees none of them. Keys alone are set:
// other state of the thread may hold Python objects, which cannot be copied without Python's lock.
c10::impl::ForceDispatchKeyGuard no_modes() {
    const c10::DispatchKeySet views(c10::DispatchKey::ADInplaceOrView);
    return {c10::default_included_set - views, c10::default_excluded_set | c10::autograd_dispatch_keyset |
                                                   c10::autocast_dispatch_keyset | views};
}

}  // namespace

bool Mark::is_reached() const {
    return queue->executed > position;
}

Executor& Executor::get() {
    static auto* const executor = new Executor();  // outlives whatever frees memory at exit
    return *executor;
}

void Executor::reset(Policy policy, uint64_t seed, bool keeps_log) {
    const std::lock_guard lock(mutex_);
    for (auto& streams : streams_) {
        for (auto& queue : streams) queue->tasks.clear();  // marks in them hold the queues
        streams.clear();
    }
    for (c10::DeviceIndex device = 0; device < kDevices; ++device)
        streams_[device].push_back(std::make_shared<Queue>(Queue{device, 0}));
    policy_ = policy;
    seed_ = random_ = mixed(seed + 1);
    keeps_log_ = keeps_log;
    counters_ = {};
    log_.clear();
    failure_.clear();
    ++epoch_;
}

uint64_t Executor::draw(uint64_t below) {
    return mixed(random_++) % below;
}

Queue& Executor::queue(c10::DeviceIndex device, int64_t stream) {
    auto& streams = streams_.at(device);
    TORCH_CHECK(stream < static_cast<int64_t>(streams.size()), "stream ", stream, " of device ", int(device),
                " is of an earlier simulation");
    return *streams[stream];
}

int64_t Executor::new_stream(c10::DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    const auto id = static_cast<int64_t>(streams_.at(device).size());
    streams_[device].push_back(std::make_shared<Queue>(Queue{device, id}));
    return id;
}

void Executor::enqueue(c10::DeviceIndex device, int64_t stream, Task task) {
    const std::lock_guard lock(mutex_);
    Queue& to = queue(device, stream);
    to.tasks.push_back(std::move(task));
    ++to.issued;
    after_call();
}

MarkPtr Executor::record(c10::DeviceIndex device, int64_t stream, const char* name) {
    const std::lock_guard lock(mutex_);
    Queue& in = queue(device, stream);
    auto mark = std::make_shared<Mark>(Mark{streams_[device][stream], in.issued++});
    in.tasks.push_back({name, {}, {}, mark});
    after_call();
    return mark;
}

void Executor::block(c10::DeviceIndex device, int64_t stream, MarkPtr mark) {
    enqueue(device, stream, {"wait", {}, std::move(mark), {}});
}

// ---- what runs next ---------------------------------------------------------------------------------

void Executor::run_head(Queue& queue) {
    const Task task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    if (task.run && failure_.empty()) {
        const c10::impl::ForceDispatchKeyGuard guard = no_modes();
        try {
            task.run();
        } catch (const c10::Error& error) {
            failure_ = std::string(task.name) + ": " + error.what_without_backtrace();
        } catch (const std::exception& error) {
            failure_ = std::string(task.name) + ": " + error.what();
        }
    }
    ++queue.executed;
    ++counters_.tasks;
    if (task.reached) task.reached->reached_ms = static_cast<double>(counters_.tasks) * kTaskMs;
    const auto place = static_cast<uint64_t>(queue.device) << 32 | static_cast<uint64_t>(queue.id);
    counters_.digest = mixed(counters_.digest ^ place);
    for (const char* at = task.name; *at != '\0'; ++at)
        counters_.digest = (counters_.digest ^ static_cast<unsigned char>(*at)) * 0x100000001B3u;
    if (keeps_log_) {
        log_.push_back(std::to_string(queue.device) + "/" + std::to_string(queue.id) + " " + task.name);
    }
}

bool Executor::is_starved(const Queue& queue) const {
    if (policy_ != Policy::kStarved) return false;
    const auto& streams = streams_[queue.device];
    const auto key = [&](int64_t id) { return mixed(seed_ ^ mixed(static_cast<uint64_t>(id))); };
    for (const auto& other : streams) {
        if (key(other->id) > key(queue.id)) return false;
    }
    return true;
}

Queue* Executor::choose(bool also_starved) {
    std::vector<Queue*> ready;
    for (const auto& streams : streams_) {
        for (const auto& queue : streams) {
            if (queue->is_ready() && (also_starved || !is_starved(*queue))) ready.push_back(queue.get());
        }
    }
    if (ready.empty()) return nullptr;
    return ready.size() == 1 ? ready.front() : ready[draw(ready.size())];
}

void Executor::after_call() {
    uint64_t most = 0;
    if (policy_ == Policy::kEager || policy_ == Policy::kStarved) {
        most = UINT64_MAX;
    } else if (policy_ == Policy::kRandom) {
        // Seeds differ in how far the device is behind: most often nothing runs, then some tasks at a time.
        const uint64_t luck = draw(256), laziness = seed_ % 4;
        if (luck < uint64_t{64} >> laziness) most = 1 + draw(6);
        if (luck >= 248) most = 1 + draw(64);
    }
    for (; most > 0; --most) {
        Queue* const next = choose(false);
        if (next == nullptr) return;
        run_head(*next);
    }
}

// Runs what a mark needs and nothing else: of its stream, all before it, and of others, what that waits for.
void Executor::lead_to(const MarkPtr& mark) {
    Queue& queue = *mark->queue;
    while (!mark->is_reached()) {
        TORCH_CHECK(!queue.tasks.empty(), "deadlock: the host waits for an event of stream ", queue.id,
                    " of device ", int(queue.device), ", which nothing will record");
        const MarkPtr awaited = queue.tasks.front().awaited;
        if (awaited) lead_to(awaited);
        run_head(queue);
    }
}

// ---- the host asks and waits ------------------------------------------------------------------------

bool Executor::is_reached(const MarkPtr& mark) {
    const std::lock_guard lock(mutex_);
    return mark->is_reached();
}

bool Executor::query(const MarkPtr& mark) {
    const std::lock_guard lock(mutex_);
    if (!mark->is_reached()) after_call();
    if (!mark->is_reached() && ++mark->asked > kPatience) lead_to(mark);
    return mark->is_reached();
}

MarkPtr Executor::end_of(c10::DeviceIndex device, int64_t stream) {
    const Queue& of = queue(device, stream);
    return of.issued == 0 ? nullptr : std::make_shared<Mark>(Mark{streams_[device][stream], of.issued - 1});
}

bool Executor::query_stream(c10::DeviceIndex device, int64_t stream) {
    const std::lock_guard lock(mutex_);
    const MarkPtr end = end_of(device, stream);
    if (end == nullptr || end->is_reached()) return true;
    // No event remembers how often it was asked for, so every question makes progress.
    const Queue& of = *end->queue;
    lead_to(std::make_shared<Mark>(Mark{end->queue, of.executed}));
    return end->is_reached();
}

void Executor::require_host_waits() const {
    TORCH_CHECK(!forbids_host_waits_, "the host waits for the device where that is forbidden");
}

void Executor::begin_host_wait() {
    require_host_waits();
    ++counters_.host_waits;
}

void Executor::wait(const MarkPtr& mark) {
    const std::lock_guard lock(mutex_);
    begin_host_wait();
    while (policy_ != Policy::kLate && mark != nullptr && !mark->is_reached()) {
        Queue* const next = choose(false);
        if (next == nullptr) break;  // what is left needs the starved stream
        run_head(*next);
    }
    if (mark != nullptr) lead_to(mark);
    TORCH_CHECK(failure_.empty(), "the device has failed: ", failure_);
}

void Executor::wait_for_stream(c10::DeviceIndex device, int64_t stream) {
    MarkPtr end;
    {
        const std::lock_guard lock(mutex_);
        end = end_of(device, stream);
    }
    wait(end);
}

void Executor::wait_for_device(c10::DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    begin_host_wait();
    for (size_t id = 0; id < streams_.at(device).size(); ++id) {
        if (const MarkPtr end = end_of(device, static_cast<int64_t>(id))) lead_to(end);
    }
    TORCH_CHECK(failure_.empty(), "the device has failed: ", failure_);
}

Counters Executor::counters() {
    const std::lock_guard lock(mutex_);
    return counters_;
}

std::vector<std::string> Executor::log() {
    const std::lock_guard lock(mutex_);
    return log_;
}

}  // namespace simulated
