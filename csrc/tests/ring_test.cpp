// Two threads play two processes: each slot is mapped twice, as between processes.
#include "transfer/ring.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "tests/check.h"
#include "transfer/copy.h"

using namespace avgpipe::transfer;
using avgpipe::tests::expect;

namespace {

constexpr double kLong = 60;  // seconds; correct code never waits this long

void expect_equal(const char* what, int64_t seen, int64_t wanted) {
    expect(seen == wanted, what, static_cast<double>(seen), static_cast<double>(wanted));
}

// 0, or the number of the exception; a system error's own number.
template <class Call>
int error_of(const Call& call) {
    try {
        call();
    } catch (const SystemError& refused) {
        return refused.error;
    } catch (const NoMemory&) {
        return ENOMEM;
    } catch (const Full&) {
        return EAGAIN;
    } catch (const std::invalid_argument&) {
        return EINVAL;
    } catch (const std::runtime_error&) {
        return EPROTO;
    }
    return 0;
}

// A bell and a ring in shared memory, with both ends.
struct Pair {
    std::shared_ptr<Memory> memory = std::make_shared<Memory>(Memory::create(sizeof(Bell) + sizeof(Ring)));
    std::shared_ptr<Bell> shared_bell{memory, reinterpret_cast<Bell*>(memory->data())};
    std::shared_ptr<Ring> shared_ring{memory, reinterpret_cast<Ring*>(memory->data() + sizeof(Bell))};
    Bell& bell = *shared_bell;
    Ring& ring = *shared_ring;
    Sender sender{shared_ring, shared_bell};
    Receiver receiver{shared_ring, getpid()};

    // 0, or the reason: see error_of.
    int send(int64_t bytes, int64_t word = 0) {
        return error_of([&] {
            if (bytes > 0) sender.reserve(bytes, true);
            sender.publish(bytes, {word, 0, 0, 0});
        });
    }

    Taken take(Message& message) { return receiver.take(message, true); }
};

uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 31)) * 0x9E3779B97F4A7C15u;
    return x ^ (x >> 29);
}

// ---- memory -----------------------------------------------------------------------------------------------
void test_memory() {
    Memory memory = Memory::create(10000);
    expect_equal("bytes of a memory", memory.bytes(), 10000);
    expect_equal("its first byte", static_cast<int>(memory.data()[0]), 0);
    const std::string path = "/proc/self/fd/" + std::to_string(memory.file());
    const Memory other = Memory::open(path, 10000);
    memory.data()[9999] = std::byte{7};
    expect_equal("what another mapping sees", static_cast<int>(other.data()[9999]), 7);
    expect_equal("a memory too short", error_of([&] { Memory::open(path, 10001); }), EINVAL);
    expect_equal("a memory cut short", ftruncate(memory.file(), 1) == 0 ? 0 : errno, EPERM);
    const int unsealed = memfd_create("unsealed", MFD_CLOEXEC);
    expect_equal("a file of 10000 bytes", ftruncate(unsealed, 10000), 0);
    const std::string shrinking = "/proc/self/fd/" + std::to_string(unsealed);
    expect_equal("a memory that may be cut short", error_of([&] { Memory::open(shrinking, 10000); }), EINVAL);
    close(unsealed);
    expect_equal("no folder is a memory", error_of([&] { Memory::open("/proc/self", 1); }) != 0, 1);
    memory.close_file();
    expect_equal("a closed file", error_of([&] { Memory::open(path, 10000); }) != 0, 1);
    expect_equal("no bytes", error_of([&] { Memory::create(0); }), EINVAL);
    expect_equal("more than there is", error_of([&] { Memory::create(int64_t{1} << 55); }), ENOMEM);
}

// ---- bell -------------------------------------------------------------------------------------------------
void test_bell() {
    alignas(Bell) unsigned char memory[sizeof(Bell)] = {};
    std::memset(memory, 0xFF, 4);
    Bell& bell = *reinterpret_cast<Bell*>(memory);
    expect_equal("a count before it wraps", bell.count(), 0xFFFFFFFF);
    expect_equal("a wait that times out", bell.wait(0xFFFFFFFF, 0.001, 0.0005), 0xFFFFFFFF);
    bell.ring();
    expect_equal("a count that wrapped", bell.wait(0xFFFFFFFF, kLong, 0), 0);
    std::thread ringer([&bell] { bell.ring(); });
    expect_equal("a count after a wait", bell.wait(0, kLong, 0), 1);
    ringer.join();
}

// Two threads wake each other, and sleep in between: a lost wake shows as a wait that times out.
void test_no_wake_is_lost() {
    constexpr uint32_t kRounds = 20000;
    const Memory memory = Memory::create(2 * sizeof(Bell));
    Bell* const bells = reinterpret_cast<Bell*>(memory.data());
    uint32_t missed[2] = {};
    const auto run = [&](int self) {
        for (uint32_t round = 0; round < kRounds && missed[self] == 0; ++round) {
            if (self == 0) bells[1].ring();
            for (uint64_t i = mix(round) % 200; i > 0; --i) relax();
            if (bells[self].wait(round, kLong, 0) == round) ++missed[self];
            if (self == 1) bells[0].ring();
        }
    };
    std::thread other(run, 1);
    run(0);
    other.join();
    expect_equal("wakes lost", missed[0] + missed[1], 0);
}

// Many threads ring, one sleeps.
void test_every_ring_counts() {
    constexpr uint32_t kRings = 50000;
    const Memory memory = Memory::create(sizeof(Bell));
    Bell& bell = *reinterpret_cast<Bell*>(memory.data());
    std::vector<std::thread> ringers;
    for (int i = 0; i < 3; ++i) {
        ringers.emplace_back([&bell] {
            for (uint32_t ring = 0; ring < kRings; ++ring) bell.ring();
        });
    }
    uint32_t seen = 0;
    int missed = 0;
    while (seen != 3 * kRings && missed == 0) {
        const uint32_t count = bell.wait(seen, kLong, 0);
        if (count == seen) ++missed;
        seen = count;
    }
    for (std::thread& ringer : ringers) ringer.join();
    expect_equal("rings counted", bell.count(), 3 * kRings);
}

// ---- copies -----------------------------------------------------------------------------------------------
#ifdef __SSE2__
void test_a_stream_copies_from_anywhere_to_anywhere() {
    constexpr size_t kMost = 300;
    std::vector<std::byte> source(kMost + 64);
    for (size_t i = 0; i < source.size(); ++i) source[i] = std::byte(i * 7 + 1);
    for (size_t bytes = 0; bytes <= kMost; bytes += 1 + bytes / 16) {
        for (size_t from = 0; from < 64; from += 13) {
            for (size_t to = 1; to < 65; to += 9) {
                std::vector<std::byte> target(kMost + 128);
                std::vector<std::byte> wanted(kMost + 128);
                avgpipe::stream(target.data() + to, source.data() + from, bytes);
                std::memcpy(wanted.data() + to, source.data() + from, bytes);
                expect_equal("streamed", target == wanted, 1);
            }
        }
    }
}
#endif

// ---- ring -------------------------------------------------------------------------------------------------
constexpr int64_t kMessages = 1000000;

int64_t size_of_message(int64_t number) {
    const auto random = static_cast<int64_t>(mix(static_cast<uint64_t>(number)) % 64);
    return 8 * (random < 60 ? random : random * 20);
}

void send_all(Pair& pair) {
    for (int64_t number = 0; number < kMessages; ++number) {
        const int64_t bytes = size_of_message(number);
        uint64_t sum = 0;
        std::byte* slot = nullptr;
        while (bytes > 0 && error_of([&] { slot = pair.sender.reserve(bytes, true); }) != 0)
            std::this_thread::yield();
        for (int64_t at = 0; at < bytes; at += 8) {
            const uint64_t value = mix(static_cast<uint64_t>(number + at));
            std::memcpy(slot + at, &value, 8);
            sum += value;
        }
        const int64_t words[kWords] = {number, static_cast<int64_t>(sum), ~number, bytes};
        while (error_of([&] { pair.sender.publish(bytes, words); }) == EAGAIN) std::this_thread::yield();
    }
}

uint64_t sum_of(const Message& message) {
    uint64_t sum = 0;
    for (int64_t at = 0; at < message.bytes; at += 8) {
        uint64_t value = 0;
        std::memcpy(&value, message.lease->data() + at, 8);
        sum += value;
    }
    return sum;
}

// A million messages of many sizes; some are held for a while and read again then.
void test_stress() {
    Pair pair;
    std::thread sender([&pair] { send_all(pair); });
    std::deque<Message> held;
    int64_t wrong = 0;
    for (int64_t number = 0; number < kMessages; ++number) {
        Message message = {};
        Taken taken = Taken::kNothing;
        while (taken == Taken::kNothing) {
            const uint32_t seen = pair.bell.count();
            taken = pair.take(message);
            if (taken == Taken::kNothing) pair.bell.wait(seen, kLong, 1e-5);
        }
        wrong += taken != Taken::kMessage || message.words[0] != number || message.words[2] != ~number ||
                 message.bytes != size_of_message(number) || message.words[3] != message.bytes;
        if (number % 3 == 0) {
            held.push_back(std::move(message));
            if (held.size() <= 5) continue;
            message = std::move(held.front());
            held.pop_front();
        }
        wrong += message.bytes > 0 && static_cast<int64_t>(sum_of(message)) != message.words[1];
    }
    sender.join();
    expect_equal("wrong messages", wrong, 0);
    held.clear();
    for (const auto& lent : pair.ring.lent) expect_equal("a slot that did not come back", lent.load(), 0);
}

void test_queue_and_slots_fill() {
    Pair pair;
    Message message = {};
    expect_equal("an empty queue", static_cast<int>(pair.take(message)), static_cast<int>(Taken::kNothing));
    for (uint64_t i = 0; i < kRecords; ++i)
        expect_equal("a publish", pair.send(0, static_cast<int64_t>(i)), 0);
    expect_equal("one too many", pair.send(0), EAGAIN);
    for (uint64_t i = 0; i < kRecords; ++i) {
        pair.take(message);
        expect_equal("a word", message.words[0], static_cast<int64_t>(i));
    }
    std::vector<Message> held(kSlots);
    for (Message& one : held) {
        expect_equal("a slot", pair.send(8), 0);
        pair.take(one);
    }
    expect_equal("a slot too many", pair.send(8), EAGAIN);
    held[77].lease.reset();
    expect_equal("a slot that came back", pair.send(8), 0);
    expect_equal("slots", pair.sender.slots(), kSlots);
    expect_equal("more than was reserved", pair.send(0) | error_of([&] { pair.sender.publish(8, {}); }),
                 EINVAL);
}

void test_slots_grow() {
    Pair pair;
    Message first = {};
    Message second = {};
    pair.send(100);
    pair.take(first);
    std::memset(first.lease->data(), 3, 100);
    expect_equal("may not make", pair.sender.reserve(100, false) == nullptr, 1);
    pair.send(100);
    pair.take(second);
    second.lease.reset();
    pair.send(100000);
    expect_equal("may not map", static_cast<int>(pair.receiver.take(second, false)),
                 static_cast<int>(Taken::kUnmapped));
    pair.take(second);
    expect_equal("slots", pair.sender.slots(), 2);
    expect_equal("their bytes", pair.sender.slot_bytes(), 4096 + 102400);
    expect_equal("capacity", second.lease->bytes(), 102400);
    expect_equal("what is still held", static_cast<int>(first.lease->data()[99]), 3);
    expect_equal("bytes that nobody has", pair.send(int64_t{1} << 60), ENOMEM);
    second.lease.reset();
    expect_equal("after that", pair.send(int64_t{1} << 60), ENOMEM);
    expect_equal("and what fits", pair.send(5000), 0);
    pair.take(second);
    expect_equal("is there", second.bytes, 5000);
}

void test_broken_records_are_refused() {
    const auto error_with = [](void (*harm)(Pair&, Record&)) {
        Pair pair;
        pair.send(100);
        harm(pair, pair.ring.records[0]);
        Message message = {};
        const int error = error_of([&] { pair.take(message); });
        expect_equal("it stays", error_of([&] { pair.take(message); }), error);
        return error;
    };
    const int broken = EPROTO;
    expect_equal("slot", error_with([](Pair&, Record& r) { r.slot = kSlots; }), broken);
    expect_equal("negative slot", error_with([](Pair&, Record& r) { r.slot = -2; }), broken);
    expect_equal("bytes", error_with([](Pair&, Record& r) { r.bytes = r.capacity + 1; }), broken);
    expect_equal("no bytes", error_with([](Pair&, Record& r) { r.bytes = 0; }), broken);
    expect_equal("capacity", error_with([](Pair&, Record& r) { r.capacity = 8192; }), broken);
    expect_equal("no slot", error_with([](Pair&, Record& r) { r.slot = -1; }), broken);
    expect_equal("count", error_with([](Pair& p, Record&) { p.ring.sent.store(kRecords + 1); }), broken);
    expect_equal("file", error_with([](Pair&, Record& r) { r.file = -1; }), ENOENT);
}

void test_a_fork_gives_nothing_back() {
    Pair pair;
    Message message = {};
    pair.send(8);
    pair.take(message);
    const pid_t child = fork();
    if (child == 0) {
        message.lease.reset();
        _exit(0);
    }
    waitpid(child, nullptr, 0);
    expect_equal("lent", pair.ring.lent[0].load(), 1);
    message.lease.reset();
    expect_equal("given back", pair.ring.lent[0].load(), 0);
}

}  // namespace

int main() {
    test_memory();
    test_bell();
    test_no_wake_is_lost();
    test_every_ring_counts();
#ifdef __SSE2__
    test_a_stream_copies_from_anywhere_to_anywhere();
#endif
    test_stress();
    test_queue_and_slots_fill();
    test_slots_grow();
    test_broken_records_are_refused();
    test_a_fork_gives_nothing_back();
    return avgpipe::tests::report();
}
