// Called by avgpipe_ext/ring.py through ctypes. Results below zero are -errno.
#include <cerrno>
#include <cstdint>
#include <cstring>

#define AVGPIPE_EXPORT extern "C" __attribute__((visibility("default")))

#ifdef __linux__

#include <iterator>
#include <map>
#include <memory>
#include <mutex>

#include "transfer/copy.h"
#include "transfer/ring.h"

namespace t = avgpipe::transfer;

AVGPIPE_EXPORT int32_t avgpipe_ring_is_supported() {
    return 1;
}

AVGPIPE_EXPORT int64_t avgpipe_ring_bytes() {
    return sizeof(t::Ring);
}

AVGPIPE_EXPORT int64_t avgpipe_ring_slots() {
    return t::kSlots;
}

AVGPIPE_EXPORT void avgpipe_copy(void* destination, const void* source, int64_t bytes) {
    t::copy(destination, source, static_cast<size_t>(bytes));
}

// ---- memory: out receives address and file ----------------------------------------------------------------
// A handle shares the mapping with the leases of rings that lie in it: Python's garbage collector may end a
// cycle of objects in any order, and a lease writes to its ring at the end.
namespace {

using Handle = std::shared_ptr<t::Memory>;

std::mutex mappings_mutex;
std::map<const std::byte*, Handle*> mappings;  // by their first address

Handle* keep(t::Memory memory, int64_t* out) {
    if (memory.data() == nullptr) {
        out[0] = -errno;
        return nullptr;
    }
    out[0] = reinterpret_cast<int64_t>(memory.data());
    out[1] = memory.file();
    auto* const handle = new Handle(std::make_shared<t::Memory>(std::move(memory)));
    const std::lock_guard lock(mappings_mutex);
    return mappings[(*handle)->data()] = handle;
}

// The mapping that a ring lies in, if it is one of ours.
Handle mapping_of(const void* address) {
    const std::lock_guard lock(mappings_mutex);
    auto next = mappings.upper_bound(static_cast<const std::byte*>(address));
    if (next == mappings.begin()) return nullptr;
    const Handle& found = *std::prev(next)->second;
    return address < found->data() + found->bytes() ? found : nullptr;
}

}  // namespace

AVGPIPE_EXPORT Handle* avgpipe_memory_create(int64_t bytes, int64_t* out) {
    return keep(t::Memory::create(bytes), out);
}

AVGPIPE_EXPORT Handle* avgpipe_memory_open(const char* path, int64_t bytes, int64_t* out) {
    return keep(t::Memory::open(path, bytes), out);
}

AVGPIPE_EXPORT void avgpipe_memory_close_file(Handle* handle) {
    (*handle)->close_file();
}

AVGPIPE_EXPORT void avgpipe_memory_delete(Handle* handle) {
    {
        const std::lock_guard lock(mappings_mutex);
        mappings.erase((*handle)->data());
    }
    (*handle)->close_file();
    delete handle;
}

// ---- bell -------------------------------------------------------------------------------------------------
AVGPIPE_EXPORT int64_t avgpipe_bell_bytes() {
    return sizeof(t::Bell);
}

AVGPIPE_EXPORT uint32_t avgpipe_bell_count(const t::Bell* bell) {
    return bell->count();
}

AVGPIPE_EXPORT void avgpipe_bell_ring(t::Bell* bell) {
    bell->ring();
}

AVGPIPE_EXPORT uint32_t avgpipe_bell_wait(t::Bell* bell, uint32_t seen, double timeout_s, double spin_s) {
    return bell->wait(seen, timeout_s, spin_s);
}

// ---- sender -----------------------------------------------------------------------------------------------
AVGPIPE_EXPORT t::Sender* avgpipe_sender_create(t::Ring* ring, t::Bell* bell) {
    return new t::Sender(*ring, *bell);
}

AVGPIPE_EXPORT void avgpipe_sender_delete(t::Sender* sender) {
    delete sender;
}

AVGPIPE_EXPORT int64_t avgpipe_sender_reserve(t::Sender* sender, int64_t bytes, int32_t may_make) {
    std::byte* const slot = sender->reserve(bytes, may_make != 0);
    return slot != nullptr ? reinterpret_cast<int64_t>(slot) : -errno;
}

AVGPIPE_EXPORT int32_t avgpipe_sender_publish(t::Sender* sender, int64_t bytes, int64_t a, int64_t b,
                                              int64_t c, int64_t d) {
    return -sender->publish(bytes, {a, b, c, d});
}

AVGPIPE_EXPORT int64_t avgpipe_sender_slots(const t::Sender* sender) {
    return sender->slots();
}

AVGPIPE_EXPORT int64_t avgpipe_sender_slot_bytes(const t::Sender* sender) {
    return sender->slot_bytes();
}

// ---- receiver ---------------------------------------------------------------------------------------------
AVGPIPE_EXPORT t::Receiver* avgpipe_receiver_create(t::Ring* ring, int64_t sender) {
    return new t::Receiver(*ring, sender, mapping_of(ring));
}

AVGPIPE_EXPORT void avgpipe_receiver_delete(t::Receiver* receiver) {
    delete receiver;
}

// out receives bytes, the four words, and of the lease (if any) address, capacity and handle; of a message
// that cannot be taken the record's bytes, slot, capacity, and errno. Gives the number in `Taken`.
AVGPIPE_EXPORT int32_t avgpipe_receiver_take(t::Receiver* receiver, int32_t may_map, int64_t* out) {
    t::Message message = {};
    const t::Taken taken = receiver->take(message, may_map != 0);
    if (taken == t::Taken::kMessage) {
        out[0] = message.bytes;
        std::memcpy(out + 1, message.words, sizeof message.words);
        if (message.lease != nullptr) {
            out[5] = reinterpret_cast<int64_t>(message.lease->data());
            out[6] = message.lease->capacity();
        }
        out[7] = reinterpret_cast<int64_t>(message.lease.release());
    } else if (taken != t::Taken::kNothing) {
        const t::Record& record = receiver->record();
        out[0] = record.bytes;
        out[1] = record.slot;
        out[2] = record.capacity;
        out[3] = errno;
    }
    return static_cast<int32_t>(taken);
}

AVGPIPE_EXPORT void avgpipe_lease_delete(t::Lease* lease) {
    delete lease;
}

// Seconds, or -errno.
AVGPIPE_EXPORT double avgpipe_echo(t::Sender* sender, t::Receiver* receiver, t::Bell* bell, int64_t rounds,
                                   int64_t bytes, double spin_s, double timeout_s, int32_t is_first) {
    const t::Echo how = {rounds, bytes, spin_s, timeout_s, is_first != 0};
    const double seconds = t::echo(*sender, *receiver, *bell, how);
    return seconds < 0 ? -errno : seconds;
}

#else

AVGPIPE_EXPORT int32_t avgpipe_ring_is_supported() {
    return 0;
}

#endif
