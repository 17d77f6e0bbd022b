#include "transfer/ring.h"

#include <pthread.h>

#include <cerrno>
#include <cstring>

#include "text.h"
#include "transfer/copy.h"

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
    if (slot.sent != 0) slot.memory.close_file();  // it came back, so the receiver has mapped it
    return true;
}

std::byte* Sender::reserve(int64_t bytes, bool may_make) {
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
    if (small == kSlots || !may_make) {
        errno = small == kSlots ? ENOBUFS : EAGAIN;
        return nullptr;
    }
    return make(small, bytes);
}

// Of the slots whose first message was taken, and mapped so: many slots need no many files.
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
    slot.memory = Memory();  // first, so that old and new need not be there together
    slot.memory = Memory::create(bytes > kLargest ? bytes : (bytes + kPage - 1) / kPage * kPage);
    if (slot.memory.data() == nullptr) return nullptr;
    slot.serial = ++serials_;
    slot.sent = 0;
    reserved_ = static_cast<int64_t>(index);
    return slot.memory.data();
}

int Sender::publish(int64_t bytes, const int64_t (&words)[kWords]) {
    if (bytes < 0 || (bytes > 0 && (reserved_ < 0 || bytes > slots_[reserved_].memory.bytes())))
        return EINVAL;
    if (sent_ - taken_ >= kRecords) {
        taken_ = ring_->taken.load(std::memory_order_acquire);
        if (sent_ - taken_ >= kRecords) return EAGAIN;
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
    return 0;
}

uint64_t Sender::waiting() const {
    return sent_ - ring_->taken.load(std::memory_order_acquire);
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

// Has the record's slot in slots_ afterwards.
Taken Receiver::find(bool may_map) {
    const Record& r = record_;
    if (r.slot < 0 || r.slot >= kSlots || r.bytes <= 0 || r.bytes > r.capacity) return Taken::kBroken;
    const auto index = static_cast<size_t>(r.slot);
    if (index >= slots_.size()) slots_.resize(index + 1);
    Slot& slot = slots_[index];
    if (slot.memory == nullptr || slot.serial != r.serial) {
        if (!may_map) return Taken::kUnmapped;
        slot.memory.reset();
        Memory memory = Memory::open(text("/proc/", sender_, "/fd/", r.file), r.capacity);
        if (memory.data() == nullptr) return errno == EINVAL ? Taken::kBroken : Taken::kFailed;
        slot = {std::make_shared<Memory>(std::move(memory)), r.serial};
    }
    return slot.memory->bytes() == r.capacity ? Taken::kMessage : Taken::kBroken;
}

Taken Receiver::take(Message& message, bool may_map) {
    const uint64_t waiting = ring_->sent.load(std::memory_order_acquire) - taken_;
    if (waiting == 0) return Taken::kNothing;
    record_ = ring_->records[taken_ % kRecords];
    if (waiting > kRecords) return Taken::kBroken;
    message.lease.reset();
    if (record_.slot != -1) {
        const Taken found = find(may_map);
        if (found != Taken::kMessage) return found;
        std::shared_ptr<std::atomic<uint32_t>> lent(ring_, &ring_->lent[record_.slot]);
        message.lease = std::make_unique<Lease>(slots_[record_.slot].memory, std::move(lent));
    } else if (record_.bytes != 0) {
        return Taken::kBroken;
    }
    message.bytes = record_.bytes;
    std::memcpy(message.words, record_.words, sizeof message.words);
    ring_->taken.store(++taken_, std::memory_order_release);
    return Taken::kMessage;
}

// ---- echo -------------------------------------------------------------------------------------------------
namespace {

bool send(Sender& sender, const void* source, int64_t bytes) {
    std::byte* const slot = sender.reserve(bytes, true);
    if (slot == nullptr) return false;
    if (source != nullptr) copy(slot, source, static_cast<size_t>(bytes));
    errno = sender.publish(bytes, {});
    return errno == 0;
}

bool receive(Receiver& receiver, Bell& bell, const Echo& how, Message& message) {
    for (;;) {
        const uint32_t seen = bell.count();
        const Taken taken = receiver.take(message, true);
        if (taken == Taken::kMessage) return true;
        if (taken != Taken::kNothing) {
            if (taken == Taken::kBroken) errno = EPROTO;
            return false;
        }
        if (bell.wait(seen, how.timeout_s, how.spin_s) == seen) {
            errno = ETIMEDOUT;
            return false;
        }
    }
}

}  // namespace

double echo(Sender& sender, Receiver& receiver, Bell& bell, const Echo& how) {
    Message message = {};
    const auto begin = std::chrono::steady_clock::now();
    if (how.is_first && !send(sender, nullptr, how.bytes)) return -1;
    for (int64_t round = 0; round < how.rounds; ++round) {
        if (!receive(receiver, bell, how, message)) return -1;
        const bool is_last = how.is_first && round + 1 == how.rounds;
        if (!is_last && !send(sender, message.lease->data(), how.bytes)) return -1;
        message.lease.reset();
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace avgpipe::transfer
