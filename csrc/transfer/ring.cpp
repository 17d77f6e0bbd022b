#include "transfer/ring.h"

#include <pthread.h>

#include <cerrno>
#include <cstring>

#include "text.h"

namespace avgpipe::transfer {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kLargest = int64_t{1} << 46;

// Counts the forks between the first process and this one.
uint32_t& generation() {
    static uint32_t forks = [] {
        pthread_atfork(nullptr, nullptr, [] { ++generation(); });
        return 0;
    }();
    return forks;
}

}  // namespace

// ---- sender -----------------------------------------------------------------------------------------------
bool Sender::is_free(size_t index) {
    if (ring_->lent[index].load(std::memory_order_acquire) != 0) return false;
    Slot& slot = slots_[index];
    if (slot.sent != 0) slot.memory.close_file();  // it was returned, so the receiver has mapped it
    return true;
}

std::byte* Sender::reserve(int64_t bytes, bool may_make) {
    if (bytes <= 0) {
        throw std::invalid_argument(
            text("a slot of ", bytes, " bytes: use at least 1, or publish 0 bytes without a slot"));
    }
    reserved_ = -1;
    size_t small = slots_.size();
    for (size_t i = 0; i < slots_.size(); ++i) {
        if (!is_free(i)) continue;
        if (slots_[i].memory.bytes() >= bytes) {
            reserved_ = static_cast<int64_t>(i);
            return slots_[i].memory.data();
        }
        small = std::min(small, i);
    }
    if (small == kSlots)
        throw Full(text("all ", kSlots,
                        " slots are lent: the receiver keeps tensors of that many messages, or takes none; "
                        "copy what is to be kept"));
    return may_make ? make(small, bytes) : nullptr;
}

// Only slots whose first message was taken, so are mapped: then many slots do not need many files.
void Sender::close_files() {
    taken_ = ring_->taken.load(std::memory_order_acquire);
    for (Slot& slot : slots_) {
        if (slot.sent != 0 && slot.sent <= taken_) slot.memory.close_file();
    }
}

std::byte* Sender::make(size_t index, int64_t bytes) {
    close_files();
    if (index == slots_.size()) slots_.emplace_back();
    Slot& slot = slots_[index];
    slot.memory = Memory();  // first, so that old and new do not exist together
    slot.memory = Memory::create(bytes > kLargest ? bytes : (bytes + kPage - 1) / kPage * kPage);
    slot.serial = ++serials_;
    slot.sent = 0;
    reserved_ = static_cast<int64_t>(index);
    return slot.memory.data();
}

void Sender::publish(int64_t bytes, const int64_t (&words)[kWords]) {
    if (bytes < 0 || (bytes > 0 && (reserved_ < 0 || bytes > slots_[reserved_].memory.bytes()))) {
        throw std::invalid_argument(text(bytes, " bytes to publish: reserve a slot of that many first"));
    }
    if (sent_ - taken_ >= kRecords) {
        taken_ = ring_->taken.load(std::memory_order_acquire);
        if (sent_ - taken_ >= kRecords) {
            throw Full("the queue is full: the receiver takes no messages; try again later");
        }
    }
    Record& record = ring_->records[sent_ % kRecords];
    record = {.bytes = bytes, .slot = -1, .file = -1, .serial = 0, .capacity = 0, .words = {}};
    std::memcpy(record.words, words, sizeof words);
    if (bytes > 0) {
        Slot& slot = slots_[reserved_];
        record.slot = static_cast<int32_t>(reserved_);
        record.file = slot.memory.file();
        record.serial = slot.serial;
        record.capacity = slot.memory.bytes();
        if (slot.sent == 0) slot.sent = sent_ + 1;
        ring_->lent[reserved_].store(1, std::memory_order_relaxed);  // published with the record
        reserved_ = -1;
    }
    ring_->sent.store(++sent_, std::memory_order_release);
    bell_->ring();
}

uint64_t Sender::waiting() const {
    return sent_ - ring_->taken.load(std::memory_order_acquire);
}

int64_t Sender::lent() const {
    int64_t count = 0;
    for (size_t i = 0; i < slots_.size(); ++i) count += ring_->lent[i].load(std::memory_order_acquire) != 0;
    return count;
}

int64_t Sender::slot_bytes() const {
    int64_t total = 0;
    for (const Slot& slot : slots_) total += slot.memory.bytes();
    return total;
}

// ---- receiver ---------------------------------------------------------------------------------------------
Lease::Lease(std::shared_ptr<Memory> memory, std::shared_ptr<std::atomic<uint32_t>> lent)
    : memory_(std::move(memory)), lent_(std::move(lent)), generation_(generation()) {}

Lease::~Lease() {
    if (generation_ == generation()) lent_->store(0, std::memory_order_release);
}

// Makes sure that slots_ has the record's slot, unless it may not map it.
bool Receiver::find(bool may_map) {
    const Record& r = record_;
    if (r.slot < 0 || r.slot >= kSlots || r.bytes <= 0 || r.bytes > r.capacity) refuse_record();
    const auto index = static_cast<size_t>(r.slot);
    if (index >= slots_.size()) slots_.resize(index + 1);
    Slot& slot = slots_[index];
    if (slot.memory == nullptr || slot.serial != r.serial) {
        if (!may_map) return false;
        slot.memory.reset();
        try {
            const std::string path = text("/proc/", sender_, "/fd/", r.file);
            slot = {std::make_shared<Memory>(Memory::open(path, r.capacity)), r.serial};
        } catch (const SystemError& refused) {
            if (refused.error == EINVAL) refuse_record();
            throw SystemError(refused.error, text("slot ", r.slot, " of ", r.capacity,
                                                  " bytes cannot be mapped: ", std::strerror(refused.error)));
        }
    }
    if (slot.memory->bytes() != r.capacity) refuse_record();
    return true;
}

void Receiver::refuse_record() const {
    throw std::runtime_error(text("a broken ring: its next message has ", record_.bytes, " bytes in slot ",
                                  record_.slot, " of ", record_.capacity,
                                  " bytes; do both processes run the same version of avgpipe?"));
}

Taken Receiver::take(Message& message, bool may_map) {
    const uint64_t waiting = ring_->sent.load(std::memory_order_acquire) - taken_;
    if (waiting == 0) return Taken::kNothing;
    record_ = ring_->records[taken_ % kRecords];
    if (waiting > kRecords || (record_.slot == -1 && record_.bytes != 0)) refuse_record();
    message.lease.reset();
    if (record_.slot != -1) {
        if (!find(may_map)) return Taken::kUnmapped;
        std::shared_ptr<std::atomic<uint32_t>> lent(ring_, &ring_->lent[record_.slot]);
        message.lease = std::make_unique<Lease>(slots_[record_.slot].memory, std::move(lent));
    }
    message.bytes = record_.bytes;
    std::memcpy(message.words, record_.words, sizeof message.words);
    ring_->taken.store(++taken_, std::memory_order_release);
    return Taken::kMessage;
}

}  // namespace avgpipe::transfer
