// The only file that uses torch's ABI: the LibTorch stable ABI, target 2.11 (TORCH_TARGET_VERSION, see
// CMakeLists.txt).
//
// Everything used here exists in torch 2.11 and stays in later ones, so a library built with any of them
// loads with all of them. CUDA needs one more symbol, see cuda_stream().
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "text.h"

// Blocks that register schemas and kernels. A schema that torch cannot parse raises at load; a kernel whose
// name has no schema stays silently unused, so tests list every operator.
#define AVGPIPE_SCHEMAS(m) STABLE_TORCH_LIBRARY(avgpipe, m)
#define AVGPIPE_KERNELS(key, m) STABLE_TORCH_LIBRARY_IMPL(avgpipe, key, m)
#define AVGPIPE_KERNEL(function) TORCH_BOX(function)

namespace avgpipe {

using Tensor = torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using ScalarType = torch::headeronly::ScalarType;
using DeviceGuard = torch::stable::accelerator::DeviceGuard;

// A kernel's string argument, for `take`. Not std::string: torch's conversion to it, in the headers of 2.13
// and before, leaks a string at every call (pytorch/pytorch#191340).
using String = StringHandle;

// Returns its text. The argument is deleted: call once for each argument, and before anything can throw.
inline std::string take(String argument) {
    size_t length = 0;
    const char* characters = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(argument, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(argument, &characters));
    std::string taken(characters, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(argument));
    return taken;
}

// The properties of a tensor that an operator needs, read once. Sizes and strides are borrowed from it.
struct View {
    void* data = nullptr;
    ScalarType dtype = ScalarType::Undefined;
    int32_t device_type = 0;
    int32_t device_index = 0;
    int64_t dim = 0;
    int64_t count = 0;
    const int64_t* sizes = nullptr;
    const int64_t* strides = nullptr;
};

// Whether sizes, strides and memory have their usual meaning: not sparse, not an opaque layout.
inline bool is_strided(const Tensor& tensor) {
    int32_t layout = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
    return layout == aoti_torch_layout_strided();
}

// For a strided tensor.
inline View view_of(const Tensor& tensor) {
    View view;
    view.data = tensor.data_ptr();
    view.dtype = tensor.scalar_type();
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &view.device_type));
    view.device_index = tensor.get_device_index();
    view.dim = tensor.dim();
    view.count = tensor.numel();
    view.sizes = tensor.sizes().data();
    view.strides = tensor.strides().data();
    return view;
}

inline std::string device_of(const View& view) {
    const int32_t type = view.device_type, index = view.device_index;
    if (type == aoti_torch_device_type_cpu()) return "cpu";
    const std::string suffix = index < 0 ? "" : text(":", index);
    if (type == aoti_torch_device_type_cuda()) return text("cuda", suffix);
    if (type == aoti_torch_device_type_meta()) return "meta";
    if (type == aoti_torch_device_type_mps()) return text("mps", suffix);
    if (type == aoti_torch_device_type_xpu()) return text("xpu", suffix);
    return text("device type ", type, suffix);
}

// An int64 tensor on the device of `like`, or on the CPU without any: shape () and zero, if it counts, or the
// placeholder of shape (0,).
inline Tensor new_count(const Tensors& like, bool counts) {
    if (like.empty()) {
        return counts ? torch::stable::full({}, 0.0, ScalarType::Long)
                      : torch::stable::empty({0}, ScalarType::Long);
    }
    return counts ? torch::stable::new_zeros(like.front(), {}, ScalarType::Long)
                  : torch::stable::new_empty(like.front(), {0}, ScalarType::Long);
}

// Runs body(begin, end) over disjoint pieces of 0 <= index < count on torch's own threads; a piece has at
// least `grain` elements unless the whole has fewer. The body must not throw.
template <class Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
    torch::stable::parallel_for(0, count, grain, body);
}

}  // namespace avgpipe
