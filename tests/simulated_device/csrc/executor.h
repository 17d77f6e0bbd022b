// What the host issues waits here, stream by stream, and runs in an order that a policy and a seed decide.
//
// There are no threads: whoever enqueues, asks or waits runs tasks, under one mutex. So the order is a
// function of (policy, seed, order of calls), and a run can be replayed. Tasks are kernels of the CPU and
// never take Python's lock.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace simulated {

constexpr int kDevices = 2;

struct Queue;

// A place in a stream: everything up to task number `position`. What an event holds, and what anybody waits
// for.
struct Mark {
    std::shared_ptr<Queue> queue;
    uint64_t position;
    double reached_ms = 0.0;
    int asked = 0;

    bool is_reached() const;
};

using MarkPtr = std::shared_ptr<Mark>;

struct Task {
    const char* name;  // must live as long as the process
    std::function<void()> run;
    MarkPtr awaited;  // of a wait: where another stream must have come
    MarkPtr reached;  // of a record
};

struct Queue {
    c10::DeviceIndex device;
    int64_t id;
    std::deque<Task> tasks = {};
    uint64_t issued = 0;
    uint64_t executed = 0;

    bool is_ready() const {
        return !tasks.empty() && (!tasks.front().awaited || tasks.front().awaited->is_reached());
    }
};

enum class Policy {
    kEager,    // at once, wherever streams allow it
    kLate,     // only when the host waits, and then only what it waits for
    kRandom,   // some after every call, of any stream that is ready
    kStarved,  // at once, but for one stream per device, of which only what somebody waits for
};

struct Counters {
    uint64_t tasks = 0;
    uint64_t host_waits = 0;
    uint64_t digest = 0;  // of the order in which tasks ran
};

class Executor {
  public:
    static Executor& get();

    // Forgets all streams and what is left in them. Marks of before count as never reached.
    void reset(Policy policy, uint64_t seed, bool keeps_log);
    uint64_t epoch() const { return epoch_; }

    int64_t new_stream(c10::DeviceIndex device);
    void enqueue(c10::DeviceIndex device, int64_t stream, Task task);
    MarkPtr record(c10::DeviceIndex device, int64_t stream, const char* name = "record");
    void block(c10::DeviceIndex device, int64_t stream, MarkPtr mark);

    // Whether a mark is reached, as somebody finds who must not disturb the order.
    bool is_reached(const MarkPtr& mark);
    // The same, asked by the host. It may be asked in a loop, which must end: the fourth question about a
    // mark that is not reached runs what leads there. Until then nothing runs that would not run after any
    // other call.
    bool query(const MarkPtr& mark);
    bool query_stream(c10::DeviceIndex device, int64_t stream);

    // The host waits. They throw what a task has thrown, which fails the device until the next reset.
    void wait(const MarkPtr& mark);
    void wait_for_stream(c10::DeviceIndex device, int64_t stream);
    void wait_for_device(c10::DeviceIndex device);
    // Throws where the host may not wait. Asked before a task is issued that writes what only a wait keeps
    // alive.
    void require_host_waits() const;
    void forbid_host_waits(bool forbids) { forbids_host_waits_ = forbids; }

    Counters counters();
    std::vector<std::string> log();

  private:
    Queue& queue(c10::DeviceIndex device, int64_t stream);
    MarkPtr end_of(c10::DeviceIndex device, int64_t stream);
    void after_call();
    void run_head(Queue& queue);
    void lead_to(const MarkPtr& mark);
    Queue* choose(bool also_starved);
    bool is_starved(const Queue& queue) const;
    void begin_host_wait();
    uint64_t draw(uint64_t below);

    std::mutex mutex_;
    Policy policy_ = Policy::kEager;
    uint64_t seed_ = 0, random_ = 0, epoch_ = 0;
    bool keeps_log_ = false, forbids_host_waits_ = false;
    std::array<std::vector<std::shared_ptr<Queue>>, kDevices> streams_;
    Counters counters_;
    std::vector<std::string> log_;
    std::string failure_;
};

}  // namespace simulated
