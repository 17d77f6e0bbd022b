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

void Executor::reset(Policy policy, uint64_t seed, bool keeps_log, Hardware hardware) {
    const std::lock_guard lock(mutex_);
    hardware_ = hardware;
    meetings_.clear();
    loaded_.clear();
    for (auto& pools : pools_) pools = {};
    taken_ = {};
    for (auto& streams : streams_) {
        for (auto& queue : streams) queue->tasks.clear();  // marks in them hold the queues
        streams.clear();
    }
    policy_ = policy;
    seed_ = random_ = mixed(seed + 1);
    keeps_log_ = keeps_log;
    counters_ = {};
    log_.clear();
    failure_.clear();
    ++epoch_;
    for (c10::DeviceIndex device = 0; device < kDevices; ++device) add_stream(device);
}

// Maps a new stream to a hardware queue. Which is the driver's affair: of as many streams as there are
// queues, made one after another, each gets one of its own, and the seed says which.
void Executor::add_stream(c10::DeviceIndex device) {
    const auto id = static_cast<int64_t>(streams_[device].size());
    uint64_t place = 0;
    if (const uint64_t queues = hardware_.queues; queues > 0) {
        const uint64_t own = id, first = own - own % queues;
        const auto key = [&](uint64_t of) { return mixed(seed_ ^ mixed(of)); };
        for (uint64_t other = first; other < first + queues; ++other) place += key(other) < key(own);
    }
    streams_[device].push_back(std::make_shared<Queue>(Queue{device, id, place}));
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

int64_t Executor::new_stream(c10::DeviceIndex device, bool is_urgent) {
    const std::lock_guard lock(mutex_);
    std::vector<int64_t>& pool = pools_.at(device)[is_urgent];
    const int64_t place = taken_[device][is_urgent]++ % kPool;
    if (hardware_.has_pool && place < static_cast<int64_t>(pool.size())) return pool[place];
    const auto id = static_cast<int64_t>(streams_[device].size());
    add_stream(device);
    pool.push_back(id);
    return id;
}

void Executor::enqueue(c10::DeviceIndex device, int64_t stream, Task task) {
    const std::lock_guard lock(mutex_);
    Queue& to = queue(device, stream);
    task.number = counters_.issued++;
    to.tasks.push_back(std::move(task));
    ++to.issued;
    after_call();
}

void Executor::meet(c10::DeviceIndex device, int64_t stream, const std::string& name, size_t member,
                    size_t size, std::function<void()> run) {
    const std::lock_guard lock(mutex_);
    MeetingPtr& found = meetings_[name];
    if (!found) {
        found = std::make_shared<Meeting>(Meeting{name, {}, {}, {}});
        found->queues.resize(size);
        found->here.resize(size);
    }
    const MeetingPtr meeting = found;
    TORCH_CHECK(member < size && meeting->here.size() == size && !meeting->queues[member], "member ", member,
                " of ", size, " is there already, or they are not ", size, ": ", name);
    Queue& to = queue(device, stream);
    meeting->queues[member] = streams_[device][stream];
    meeting->run = std::move(run);  // the last one's, which has all buffers
    const bool is_whole = std::all_of(meeting->queues.begin(), meeting->queues.end(),
                                      [](const auto& of_member) { return of_member != nullptr; });
    if (is_whole) meetings_.erase(name);
    to.tasks.push_back({"spin", {}, {}, {}, meeting, member, counters_.issued++});
    ++to.issued;
    after_call();
}

void Executor::load(c10::DeviceIndex device, const char* kernel) {
    {
        const std::lock_guard lock(mutex_);
        if (!hardware_.loads_late || !loaded_.emplace(device, kernel).second) return;
    }
    wait_for_device(device);
}

MarkPtr Executor::record(c10::DeviceIndex device, int64_t stream, const char* name) {
    const std::lock_guard lock(mutex_);
    Queue& in = queue(device, stream);
    auto mark = std::make_shared<Mark>(Mark{streams_[device][stream], in.issued++});
    in.tasks.push_back({name, {}, {}, mark, {}, 0, counters_.issued++});
    after_call();
    return mark;
}

void Executor::block(c10::DeviceIndex device, int64_t stream, MarkPtr mark) {
    enqueue(device, stream, {"wait", {}, std::move(mark), {}});
}

// ---- what runs next ---------------------------------------------------------------------------------

// Whether a stream's next task is the oldest one of its hardware queue.
bool Executor::is_first(const Queue& queue) const {
    return hardware_.queues == 0 ||
           &const_cast<Executor*>(this)->first_before(const_cast<Queue&>(queue)) == &queue;
}

// The stream whose next task is the oldest one of the hardware queue that `queue` is mapped to.
Queue& Executor::first_before(Queue& queue) {
    if (hardware_.queues == 0) return queue;
    Queue* first = &queue;
    for (const auto& other : streams_[queue.device]) {
        if (other->hardware != queue.hardware || other->tasks.empty()) continue;
        if (other->tasks.front().number < first->tasks.front().number) first = other.get();
    }
    return *first;
}

bool Executor::can_run(const Queue& queue) const {
    if (queue.tasks.empty() || !is_first(queue)) return false;
    const Task& head = queue.tasks.front();
    if (head.awaited && !head.awaited->is_reached()) return false;
    return !head.meeting || !head.meeting->here[head.member] || head.meeting->is_complete();
}

// A kernel begins to spin.
void Executor::come(Task& task) {
    task.meeting->here[task.member] = true;
    ++counters_.tasks;
    if (task.meeting->is_complete() && failure_.empty()) {
        const c10::impl::ForceDispatchKeyGuard guard = no_modes();
        task.meeting->run();
    }
}

void Executor::run_head(Queue& queue) {
    if (Task& head = queue.tasks.front(); head.meeting && !head.meeting->here[head.member]) {
        come(head);
        if (!head.meeting->is_complete()) return;
    }
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
    const std::string& name = task.meeting ? task.meeting->name : task.name;
    for (const char at : name)
        counters_.digest = (counters_.digest ^ static_cast<unsigned char>(at)) * 0x100000001B3u;
    if (keeps_log_)
        log_.push_back(std::to_string(queue.device) + "/" + std::to_string(queue.id) + " " + name);
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
            if (can_run(*queue) && (also_starved || !is_starved(*queue))) ready.push_back(queue.get());
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

bool Executor::run_some() {
    const std::lock_guard lock(mutex_);
    bool has_run = false;
    while (Queue* const next = choose(true)) {
        run_head(*next);
        has_run = true;
    }
    return has_run;
}

// Runs what a mark needs and nothing else: of its stream, all before it, and of others, what that waits for,
// or is held up by.
Executor::Led Executor::lead_to(const MarkPtr& mark) {
    Queue& queue = *mark->queue;
    while (!mark->is_reached()) {
        if (queue.tasks.empty()) return Led::kNotIssued;
        if (const Led led = lead_head(queue); led != Led::kThere) return led;
    }
    return Led::kThere;
}

// Runs the task that a stream's next one is behind, or that one itself.
Executor::Led Executor::lead_head(Queue& of) {
    Queue& queue = first_before(of);
    if (queue.is_led) return Led::kCircle;  // it is needed for itself
    queue.is_led = true;
    Led led = Led::kThere;
    const MarkPtr awaited = queue.tasks.front().awaited;
    const MeetingPtr meeting = queue.tasks.front().meeting;
    if (awaited) led = lead_to(awaited);
    if (meeting) {
        if (!meeting->here[queue.tasks.front().member]) come(queue.tasks.front());
        for (size_t m = 0; led == Led::kThere && m < meeting->here.size(); ++m) {
            while (led == Led::kThere && !meeting->here[m])
                led = meeting->queues[m] ? lead_head(*meeting->queues[m]) : Led::kNotIssued;
        }
    }
    queue.is_led = false;
    if (led == Led::kThere) run_head(queue);
    return led;
}

// What holds up the devices, in words: the kernels that spin, and the heads of queues that wait.
std::string Executor::waits() const {
    std::string found;
    for (const auto& streams : streams_) {
        for (const auto& queue : streams) {
            if (queue->tasks.empty() || !is_first(*queue)) continue;
            const Task& head = queue->tasks.front();
            if (!head.meeting || !head.meeting->here[head.member] || head.meeting->is_complete()) continue;
            found += "; device " + std::to_string(queue->device) + " spins in " + head.meeting->name + " for";
            for (size_t m = 0; m < head.meeting->here.size(); ++m) {
                if (head.meeting->here[m]) continue;
                const auto& other = head.meeting->queues[m];
                found += " member " + std::to_string(m);
                found += other ? " (behind others in its queue)" : " (not issued)";
            }
        }
    }
    return found.empty() ? "; no kernel spins" : found;
}

std::string Executor::stuck() {
    const std::lock_guard lock(mutex_);
    return waits().substr(2);
}

// ---- the host asks and waits ------------------------------------------------------------------------

bool Executor::is_reached(const MarkPtr& mark) {
    const std::lock_guard lock(mutex_);
    return mark->is_reached();
}

bool Executor::query(const MarkPtr& mark) {
    const std::lock_guard lock(mutex_);
    if (!mark->is_reached()) after_call();
    if (!mark->is_reached() && ++mark->asked > kPatience) {
        TORCH_CHECK(lead_to(mark) != Led::kCircle, "deadlock: a device waits for itself", waits());
    }
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
    TORCH_CHECK(lead_to(std::make_shared<Mark>(Mark{end->queue, of.executed})) != Led::kCircle,
                "deadlock: a device waits for itself", waits());
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
    std::unique_lock lock(mutex_);
    begin_host_wait();
    while (policy_ != Policy::kLate && mark != nullptr && !mark->is_reached()) {
        Queue* const next = choose(false);
        if (next == nullptr) break;  // what is left needs the starved stream
        run_head(*next);
    }
    if (mark != nullptr) wait_led(lock, {mark});
    TORCH_CHECK(failure_.empty(), "the device has failed: ", failure_);
}

// Until marks are reached. Meanwhile other hosts issue what these need, if there are any.
void Executor::wait_led(std::unique_lock<std::mutex>& lock, const std::vector<MarkPtr>& marks) {
    for (const MarkPtr& mark : marks) {
        Led led = lead_to(mark);
        while (led == Led::kNotIssued && give_way_) {
            lock.unlock();
            const bool goes_on = give_way_(mark->queue->device);
            lock.lock();
            if (!goes_on) break;
            led = lead_to(mark);
        }
        TORCH_CHECK(led != Led::kCircle, "deadlock: a device waits for itself", waits());
        TORCH_CHECK(led == Led::kThere, "deadlock: the host waits for an event of stream ", mark->queue->id,
                    " of device ", int(mark->queue->device), ", which nothing will record", waits());
    }
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
    std::unique_lock lock(mutex_);
    begin_host_wait();
    std::vector<MarkPtr> ends;
    for (size_t id = 0; id < streams_.at(device).size(); ++id) {
        if (MarkPtr end = end_of(device, static_cast<int64_t>(id))) ends.push_back(std::move(end));
    }
    wait_led(lock, ends);
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
