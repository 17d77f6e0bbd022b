// Messages from one process to another of the same host, read in place.
//
// The receiver owns the control block, a Ring: a queue of records, and for each slot whether it is lent. The
// sender owns the slots, each in separate memory, and makes them on demand. A message is written to a slot,
// announced by a record, and lends the slot to the receiver until its lease ends. The receiver maps a slot at
// its first message. One thread at a time sends, one receives, any thread ends a lease.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "transfer/bell.h"
#include "transfer/memory.h"

namespace avgpipe::transfer {

constexpr int32_t kSlots = 1024;
constexpr uint64_t kRecords = 1024;
constexpr int kWords = 4;

struct Record {
    int64_t bytes;
    int32_t slot;     // -1: words only
    int32_t file;     // of the slot, in the sender
    uint64_t serial;  // of the slot's memory, from 1
    int64_t capacity;
    int64_t words[kWords];
};
static_assert(sizeof(Record) == kCacheLine && (kRecords & (kRecords - 1)) == 0);

// All zero at first.
struct Ring {
    alignas(kCacheLine) std::atomic<uint64_t> sent;   // records written; written by the sender
    alignas(kCacheLine) std::atomic<uint64_t> taken;  // records read; written by the receiver
    alignas(kCacheLine) Record records[kRecords];
    alignas(kCacheLine) std::atomic<uint32_t> lent[kSlots];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint64_t>) == 8);

// No slot, or no place in the queue, is free.
struct Full : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Sender {
  public:
    // Both are in the receiver's memory, which they keep alive.
    Sender(std::shared_ptr<Ring> ring, std::shared_ptr<Bell> bell)
        : ring_(std::move(ring)), bell_(std::move(bell)) {}

    // Where to write `bytes`; null if there is no such slot, and it may not make one. It takes the first free
    // slot that is large enough, so few stay warm. Throws Full, or like Memory::create.
    std::byte* reserve(int64_t bytes, bool may_make);

    // Announces the content of the reserved slot; 0 bytes: only the words. Throws Full, and the slot stays
    // reserved; std::invalid_argument for more bytes than were reserved.
    void publish(int64_t bytes, const int64_t (&words)[kWords]);

    // Messages that the receiver has not taken. It cannot take them once this process has ended.
    uint64_t waiting() const;
    // Slots that the receiver has not given back, with messages taken or not.
    int64_t lent() const;
    int64_t slots() const { return static_cast<int64_t>(slots_.size()); }
    int64_t slot_bytes() const;

  private:
    struct Slot {
        Memory memory;
        uint64_t serial = 0;
        uint64_t sent = 0;  // messages up to the first in this memory; 0: none yet
    };

    bool is_free(size_t index);
    void close_files();
    std::byte* make(size_t index, int64_t bytes);

    std::shared_ptr<Ring> ring_;
    std::shared_ptr<Bell> bell_;
    std::vector<Slot> slots_;
    uint64_t sent_ = 0;
    uint64_t taken_ = 0;  // at least
    uint64_t serials_ = 0;
    int64_t reserved_ = -1;
};

// A slot that is being read. Its end gives the slot back. A fork copies it into a process that does not own
// it: there its end does nothing.
class Lease {
  public:
    Lease(std::shared_ptr<Memory> memory, std::shared_ptr<std::atomic<uint32_t>> lent);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    std::byte* data() const { return memory_->data(); }
    int64_t bytes() const { return memory_->bytes(); }  // of the slot, at least those of the message

  private:
    std::shared_ptr<Memory> memory_;
    std::shared_ptr<std::atomic<uint32_t>> lent_;
    uint32_t generation_;
};

struct Message {
    int64_t bytes;
    int64_t words[kWords];
    std::unique_ptr<Lease> lease;  // null: words only
};

enum class Taken {
    kNothing,
    kMessage,
    kUnmapped,  // the slot is new here, and mapping was not allowed
};

class Receiver {
  public:
    // The ring keeps its memory alive, and leases keep the ring.
    Receiver(std::shared_ptr<Ring> ring, int64_t sender) : ring_(std::move(ring)), sender_(sender) {}

    // Throws SystemError if the slot cannot be mapped, std::runtime_error if the record has impossible
    // numbers; the message stays then.
    Taken take(Message& message, bool may_map);

  private:
    struct Slot {
        std::shared_ptr<Memory> memory;
        uint64_t serial = 0;
    };

    bool find(bool may_map);
    [[noreturn]] void refuse_record() const;

    std::shared_ptr<Ring> ring_;
    int64_t sender_;  // process id
    std::vector<Slot> slots_;
    Record record_ = {};
    uint64_t taken_ = 0;
};

}  // namespace avgpipe::transfer
