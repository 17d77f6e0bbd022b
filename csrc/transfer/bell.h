// A counter that any process rings and one sleeps on. It is in shared memory, which must be zero at first.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace avgpipe::transfer {

constexpr std::size_t kCacheLine = 64;

// Marks a spin loop for the processor.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class alignas(kCacheLine) Bell {
  public:
    uint32_t count() const { return count_.load(std::memory_order_acquire); }

    // All four accesses below have a total order: either the ringer sees the sleeper, or the sleeper sees the
    // new count.
    void ring() {
        count_.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) != 0) futex(FUTEX_WAKE, INT_MAX, nullptr);
    }

    // Waits until count() != seen, the timeout, or a signal; returns count(). Spins for spin_s at first.
    uint32_t wait(uint32_t seen, double timeout_s, double spin_s) {
        const auto begin = Clock::now();
        if (spin_s > 0 && !spin(seen, begin, std::min(spin_s, timeout_s))) return count();
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        while (count_.load(std::memory_order_seq_cst) == seen) {
            const double left_s = std::min(timeout_s - seconds_since(begin), kLongest);
            if (!(left_s > 0)) break;
            const timespec left = {
                static_cast<time_t>(left_s),
                static_cast<long>((left_s - static_cast<double>(static_cast<time_t>(left_s))) * 1e9)};
            if (futex(FUTEX_WAIT, seen, &left) != 0 && errno == EINTR) break;
        }
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        return count();
    }

  private:
    using Clock = std::chrono::steady_clock;
    static constexpr double kLongest = 1e6;

    static double seconds_since(Clock::time_point begin) {
        return std::chrono::duration<double>(Clock::now() - begin).count();
    }

    // Whether the bell has not rung. Yields this processor to other threads, above all to the ringer.
    bool spin(uint32_t seen, Clock::time_point begin, double spin_s) const {
        do {
            for (int i = 0; i < 16; ++i) {
                if (count() != seen) return false;
                relax();
            }
            sched_yield();
        } while (seconds_since(begin) < spin_s);
        return true;
    }

    // Not the private kind: sleeper and ringer may be in different processes.
    long futex(int operation, uint32_t value, const timespec* timeout) {
        return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&count_), operation, value, timeout, nullptr,
                       0);
    }

    std::atomic<uint32_t> count_ = 0;
    std::atomic<uint32_t> sleepers_ = 0;
};

static_assert(sizeof(Bell) == kCacheLine);
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

}  // namespace avgpipe::transfer
