// What torch asks of an accelerator: devices and streams of the calling thread, events, and the hooks beside
// them.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <cstring>

#include "executor.h"
#include "generator.h"
#include "memory.h"

namespace simulated {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// Of a thread. A new simulation puts the streams back to the default ones.
struct Current {
    c10::DeviceIndex device = 0;
    std::array<int64_t, kDevices> streams = {};
    uint64_t epoch = 0;
};

Current& current() {
    thread_local Current of_this_thread;
    if (of_this_thread.epoch != Executor::get().epoch()) {
        of_this_thread.streams = {};
        of_this_thread.epoch = Executor::get().epoch();
    }
    return of_this_thread;
}

c10::DeviceIndex index_of(c10::Device device) {
    TORCH_CHECK(device.type() == kType, "expected a simulated device, not ", device);
    const c10::DeviceIndex index = device.has_index() ? device.index() : current().device;
    TORCH_CHECK(index >= 0 && index < kDevices, "there are ", kDevices, " simulated devices, and no ",
                int(index));
    return index;
}

c10::Stream stream_of(c10::DeviceIndex device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}

// An event is its last record. A wait means the record that is the last one then.
struct Event {
    MarkPtr mark;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kType; }
    c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

    c10::Device exchangeDevice(c10::Device device) const override {
        return {kType, std::exchange(current().device, index_of(device))};
    }
    c10::Device getDevice() const override { return {kType, current().device}; }
    void setDevice(c10::Device device) const override { current().device = index_of(device); }
    void uncheckedSetDevice(c10::Device device) const noexcept override { current().device = device.index(); }

    c10::Stream getStream(c10::Device device) const override {
        const c10::DeviceIndex index = index_of(device);
        return stream_of(index, current().streams[index]);
    }
    c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), 0); }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_urgent) const override {
        return getNewStream(device, is_urgent ? -1 : 0);
    }
    c10::Stream getNewStream(c10::Device device, int priority = 0) const override {
        const c10::DeviceIndex index = index_of(device);
        return stream_of(index, Executor::get().new_stream(index, priority < 0));
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        const c10::DeviceIndex index = index_of(stream.device());
        return stream_of(index, std::exchange(current().streams[index], stream.id()));
    }

    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
                const c10::EventFlag) const override {
        if (*event == nullptr) *event = new Event();
        static_cast<Event*>(*event)->mark = Executor::get().record(stream.device_index(), stream.id());
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (const MarkPtr mark = mark_of(event))
            Executor::get().block(stream.device_index(), stream.id(), mark);
    }
    bool queryEvent(void* event) const override {
        const MarkPtr mark = mark_of(event);
        return mark == nullptr || Executor::get().query(mark);
    }
    void synchronizeEvent(void* event) const override { Executor::get().wait(mark_of(event)); }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<Event*>(event);
    }
    double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
        for (void* event : {start, end}) {
            const MarkPtr mark = mark_of(event);
            TORCH_CHECK(mark != nullptr && Executor::get().is_reached(mark),
                        "both events must have happened before the time between them is asked for");
        }
        return mark_of(end)->reached_ms - mark_of(start)->reached_ms;
    }

    bool queryStream(const c10::Stream& stream) const override {
        return Executor::get().query_stream(stream.device_index(), stream.id());
    }
    void synchronizeStream(const c10::Stream& stream) const override {
        Executor::get().wait_for_stream(stream.device_index(), stream.id());
    }
    void synchronizeDevice(const c10::DeviceIndex device) const override {
        Executor::get().wait_for_device(device);
    }
    void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
        device_memory()->recordStream(data, stream);
    }

  private:
    static MarkPtr mark_of(void* event) {
        return event == nullptr ? nullptr : static_cast<Event*>(event)->mark;
    }
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    void init() const override {}

    c10::DeviceIndex deviceCount() const override { return kDevices; }
    void setCurrentDevice(c10::DeviceIndex device) const override {
        current().device = index_of({kType, device});
    }
    c10::DeviceIndex getCurrentDevice() const override { return current().device; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        return device < 0 ? current().device : std::exchange(current().device, index_of({kType, device}));
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
        return exchangeDevice(device);
    }

    bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
    at::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
    c10::Device getDeviceFromPtr(void* data) const override { return device_of(data); }

    const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
        return default_generator(device < 0 ? current().device : device);
    }
    at::Generator getNewGenerator(c10::DeviceIndex device) const override {
        return new_generator(device < 0 ? current().device : device);
    }

    // The storage grows, and keeps what it holds, in the order of the current stream.
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
        c10::DataPtr larger = device_memory()->allocate(bytes);
        if (const size_t kept = std::min(bytes, storage.nbytes())) {
            const c10::Stream stream = Guard().getStream(storage.device());
            const auto copy = [to = larger.get(), from = storage.data(), kept] {
                std::memcpy(to, from, kept);
            };
            Executor::get().enqueue(stream.device_index(), stream.id(), {"resize", copy, {}, {}});
        }
        storage.set_data_ptr_noswap(std::move(larger));
        storage.set_nbytes(bytes);
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

const bool is_registered = [] {
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    c10::SetAllocator(kType, device_memory());
    at::setHostAllocator(kType, pinned_memory());
    Executor::get().reset(Policy::kEager, 0, false);
    return true;
}();

}  // namespace
}  // namespace simulated
