// What the host issues waits here, stream by stream, and runs in an order that a policy and a seed decide.
//
// There are no threads: whoever enqueues, asks or waits runs tasks, under one mutex. So the order is a
// function of (policy, seed, order of calls), and a run can be replayed. Tasks are kernels of the CPU and
// never take Python's lock.
//
// As on a GPU, streams share some hardware queues. A queue is a FIFO: what waits at its head, for an event or
// in a kernel that spins for another device's, holds up all behind it, whatever its stream. And a kernel is
// loaded when it is first launched, for which the host waits for the whole device. So a device, or a host,
// may wait for itself: that is found, and said, where it happens.
#pragma once

#include <c10/core/Device.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace simulated {

constexpr int kDevices = 4;
constexpr int64_t kPool = 32;  // streams that torch has of each priority, if they are limited

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

// Kernels of several devices that end together: each spins until all of them run.
struct Meeting {
    std::string name;
    std::function<void()> run;                   // once, when all are there
    std::vector<std::shared_ptr<Queue>> queues;  // by member; null where its kernel is not issued yet
    std::vector<bool> here;                      // by member: whether its kernel spins

    bool is_complete() const { return std::find(here.begin(), here.end(), false) == here.end(); }
};

using MeetingPtr = std::shared_ptr<Meeting>;

struct Task {
    const char* name;  // must live as long as the process
    std::function<void()> run;
    MarkPtr awaited;  // of a wait: where another stream must have come
    MarkPtr reached;  // of a record
    MeetingPtr meeting = nullptr;
    size_t member = 0;    // of the meeting
    uint64_t number = 0;  // in the order of issue, of all streams
};

struct Queue {
    c10::DeviceIndex device;
    int64_t id;
    uint64_t hardware;  // the queue of the device that it is mapped to
    std::deque<Task> tasks = {};
    uint64_t issued = 0;
    uint64_t executed = 0;
    bool is_led = false;  // by lead_to, which finds a circle by this
};

enum class Policy {
    kEager,    // at once, wherever streams allow it
    kLate,     // only when the host waits, and then only what it waits for
    kRandom,   // some after every call, of any stream that is ready
    kStarved,  // at once, but for one stream per device, of which only what somebody waits for
};

// What a simulated GPU has less of than it could.
struct Hardware {
    int64_t queues = 0;       // of a device, shared by its streams in turn; 0: one for each stream
    bool has_pool = false;    // whether streams are some of kPool for each priority, used again in turn
    bool loads_late = false;  // whether a kernel's first launch on a device waits for the device
};

struct Counters {
    uint64_t tasks = 0;
    uint64_t issued = 0;
    uint64_t host_waits = 0;
    uint64_t digest = 0;  // of the order in which tasks ran
};

class Executor {
  public:
    static Executor& get();

    // Forgets all streams and what is left in them. Marks of before count as never reached.
    void reset(Policy policy, uint64_t seed, bool keeps_log, Hardware hardware = {});
    // Called where a host waits for what another host has not issued yet, with the waiting host's device:
    // gives way to other hosts, and returns whether anything has happened since. Without one there is a
    // single host.
    void give_way_by(std::function<bool(c10::DeviceIndex)> give_way) { give_way_ = std::move(give_way); }
    uint64_t epoch() const { return epoch_; }

    int64_t new_stream(c10::DeviceIndex device, bool is_urgent = false);
    void enqueue(c10::DeviceIndex device, int64_t stream, Task task);
    // Issues a member's kernel of the meeting with this name; the first one brings it about.
    void meet(c10::DeviceIndex device, int64_t stream, const std::string& name, size_t member, size_t size,
              std::function<void()> run);
    // Before the launch of a kernel: waits for the device if it is the first one and is loaded only now.
    void load(c10::DeviceIndex device, const char* kernel);
    // Runs what can run; whether there was anything.
    bool run_some();
    // What waits for what, in words.
    std::string stuck();
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
    enum class Led { kThere, kNotIssued, kCircle };

    void after_call();
    void add_stream(c10::DeviceIndex device);
    bool is_first(const Queue& queue) const;
    bool can_run(const Queue& queue) const;
    Queue& first_before(Queue& queue);
    void run_head(Queue& queue);
    void come(Task& task);
    Led lead_to(const MarkPtr& mark);
    Led lead_head(Queue& queue);
    void wait_led(std::unique_lock<std::mutex>& lock, const std::vector<MarkPtr>& marks);
    std::string waits() const;
    Queue* choose(bool also_starved);
    bool is_starved(const Queue& queue) const;
    void begin_host_wait();
    uint64_t draw(uint64_t below);

    std::mutex mutex_;
    Policy policy_ = Policy::kEager;
    uint64_t seed_ = 0, random_ = 0, epoch_ = 0;
    bool keeps_log_ = false, forbids_host_waits_ = false;
    Hardware hardware_;
    std::function<bool(c10::DeviceIndex)> give_way_;
    std::array<std::vector<std::shared_ptr<Queue>>, kDevices> streams_;
    std::array<std::array<std::vector<int64_t>, 2>, kDevices> pools_;  // by priority
    std::array<std::array<int64_t, 2>, kDevices> taken_ = {};
    std::map<std::string, MeetingPtr> meetings_;  // whose kernels are not all issued yet
    std::set<std::pair<c10::DeviceIndex, std::string>> loaded_;
    Counters counters_;
    std::vector<std::string> log_;
    std::string failure_;
};

}  // namespace simulated
