// The device's memory, which streams share as CUDA's caching allocator lets them, and pinned memory of the
// host.
//
// A block that is freed belongs to its home stream again at once, and to nobody else: whoever reads it on
// another stream without having said so (record_stream) finds poison, or the next tensor. Poison is NaN in
// every float dtype; it comes right before the next operator of the home stream, the first that might use the
// block again, so that what that stream waits for in between still counts. Nothing goes back to the system,
// so that no mistake is a crash.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

namespace simulated {

c10::DeviceAllocator* device_memory();
at::HostAllocator* pinned_memory();

// Whether an address is in pinned memory that is in use. The pointer may be inside of a block.
bool is_pinned(const void* address);

// Keeps the pinned block of an address until the stream has come past what it holds now. False: no such
// block.
bool pinned_is_used_on(const void* address, c10::Stream stream);

// The device whose memory an address is in.
c10::Device device_of(const void* address);

// Poisons what was freed on a stream, before an operator is issued there.
void poison_freed(c10::Stream stream);

// Forgets all free blocks, after Executor::reset. Their memory serves again, as if it were fresh.
void reset_memory();

}  // namespace simulated
