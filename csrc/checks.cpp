#include "checks.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace avgpipe {
namespace {

// A tensor of a call: where it came from and what it is.
struct Seen {
    const Argument* argument;
    size_t index;
    View view;
};

std::string name_of(const CallSite& site, const Seen& seen) {
    return site.is_list ? text(seen.argument->name, "[", seen.index, "]") : seen.argument->name;
}

std::string list_of(const int64_t* values, int64_t count) {
    std::string list;
    for (int64_t i = 0; i < count; ++i) list += text(i > 0 ? ", " : "", values[i]);
    return text("(", list, count == 1 ? ",)" : ")");
}

std::string dtype_name(ScalarType dtype) {
    switch (dtype) {
        case ScalarType::Float:
            return "float32";
        case ScalarType::Double:
            return "float64";
        case ScalarType::BFloat16:
            return "bfloat16";
        case ScalarType::Half:
            return "float16";
        case ScalarType::Long:
            return "int64";
        case ScalarType::Int:
            return "int32";
        case ScalarType::Bool:
            return "bool";
        case ScalarType::ComplexFloat:
            return "complex64";
        case ScalarType::ComplexDouble:
            return "complex128";
        default:
            return torch::headeronly::toString(dtype);
    }
}

std::optional<DType> float_dtype(ScalarType dtype) {
    switch (dtype) {
        case ScalarType::Float:
            return DType::kFloat32;
        case ScalarType::Double:
            return DType::kFloat64;
        case ScalarType::BFloat16:
            return DType::kBFloat16;
        case ScalarType::Half:
            return DType::kFloat16;
        default:
            return std::nullopt;
    }
}

[[noreturn]] void refuse_dtype(const CallSite& site, const std::string& name, ScalarType dtype) {
    refuse(site,
           text(name, " has dtype ", dtype_name(dtype), "; pass float32, float64, bfloat16 or float16"));
}

DType checked_dtype(const CallSite& site, const Seen& seen) {
    if (const auto dtype = float_dtype(seen.view.dtype)) return *dtype;
    refuse_dtype(site, name_of(site, seen), seen.view.dtype);
}

bool may_mix(DType first, DType other, Mixing mixing) {
    if (first == other || (is_16_bit(first) && other == DType::kFloat32)) return true;
    return mixing == Mixing::kEitherFloat32 && first == DType::kFloat32 && is_16_bit(other);
}

void check_dtypes(const CallSite& site, const Seen& first, const Seen& other, Mixing mixing) {
    if (may_mix(checked_dtype(site, first), checked_dtype(site, other), mixing)) return;
    refuse(site,
           text(name_of(site, other), " has dtype ", dtype_name(other.view.dtype), " but ",
                name_of(site, first), " has ", dtype_name(first.view.dtype), "; pass one dtype, or float32 ",
                mixing == Mixing::kEitherFloat32 ? "and a 16-bit one" : "beside a 16-bit one that is first"));
}

void check_shapes(const CallSite& site, const Seen& first, const Seen& other) {
    const View &a = first.view, &b = other.view;
    if (a.dim == b.dim && std::equal(a.sizes, a.sizes + a.dim, b.sizes)) return;
    refuse(site, text(name_of(site, other), " has shape ", list_of(b.sizes, b.dim), " but ",
                      name_of(site, first), " has ", list_of(a.sizes, a.dim), "; pass tensors of one shape"));
}

void check_devices(const CallSite& site, const Seen& first, const Seen& other) {
    const View &a = first.view, &b = other.view;
    if (a.device_type == b.device_type && a.device_index == b.device_index) return;
    refuse(site, text(name_of(site, other), " is on ", device_name(b.device_type, b.device_index), " but ",
                      name_of(site, first), " is on ", device_name(a.device_type, a.device_index),
                      "; move all tensors to one device"));
}

bool is_contiguous(const View& view) {
    int64_t expected = 1;
    for (int64_t d = view.dim - 1; d >= 0; --d) {
        if (view.sizes[d] == 1) continue;
        if (view.strides[d] != expected) return false;
        expected *= view.sizes[d];
    }
    return true;
}

// Whether the tensor fills its memory exactly, in whatever order of dimensions.
bool is_dense(const View& view) {
    if (is_contiguous(view)) return true;            // as most are
    std::vector<std::pair<int64_t, int64_t>> steps;  // (stride, size) of the dimensions that are walked
    for (int64_t d = 0; d < view.dim; ++d) {
        if (view.sizes[d] != 1) steps.emplace_back(view.strides[d], view.sizes[d]);
    }
    std::sort(steps.begin(), steps.end());
    int64_t expected = 1;
    for (const auto& [stride, size] : steps) {
        if (stride != expected) return false;
        expected *= size;
    }
    return true;
}

// Whether two elements surely share memory.
bool has_repeats(const View& view) {
    for (int64_t d = 0; d < view.dim; ++d) {
        if (view.sizes[d] > 1 && view.strides[d] == 0) return true;
    }
    return false;
}

bool have_equal_strides(const View& a, const View& b) {
    for (int64_t d = 0; d < a.dim; ++d) {
        if (a.sizes[d] != 1 && a.strides[d] != b.strides[d]) return false;
    }
    return true;
}

// After check_shapes.
void check_strides(const CallSite& site, const Seen& first, const Seen& other) {
    const View &a = first.view, &b = other.view;
    if (a.count == 0) return;
    if (!is_dense(b)) {
        refuse(site,
               text(name_of(site, other), " of shape ", list_of(b.sizes, b.dim), " has strides ",
                    list_of(b.strides, b.dim), ", which leave gaps or overlap; pass .contiguous() tensors"));
    }
    if (have_equal_strides(a, b)) return;
    refuse(site, text(name_of(site, other), " has strides ", list_of(b.strides, b.dim), " but ",
                      name_of(site, first), " has ", list_of(a.strides, a.dim),
                      "; give all tensors one memory format"));
}

// The bytes of a dense tensor.
struct Span {
    uintptr_t begin, end;
    const Seen* seen;
};

// In the order of the call: tuple by tuple.
bool is_before(const Seen& a, const Seen& b) {
    return a.index != b.index ? a.index < b.index : a.argument < b.argument;
}

// Sorted by begin, a span that meets an earlier one meets the one that ends last, among all or among the
// written ones.
void check_overlap(const CallSite& site, const std::vector<std::vector<Seen>>& tensors) {
    std::vector<Span> spans;
    for (const std::vector<Seen>& list : tensors) {
        for (const Seen& seen : list) {
            if (seen.view.count == 0) continue;
            const auto begin = reinterpret_cast<uintptr_t>(seen.view.data);
            const auto bytes = static_cast<uintptr_t>(seen.view.count * size_of(checked_dtype(site, seen)));
            spans.push_back({begin, begin + bytes, &seen});
        }
    }
    std::stable_sort(spans.begin(), spans.end(),
                     [](const Span& a, const Span& b) { return a.begin < b.begin; });
    const Span *last = nullptr, *last_written = nullptr;
    for (const Span& span : spans) {
        const bool is_written = span.seen->argument->is_written;
        const Span* rival = is_written ? last : last_written;
        if (rival != nullptr && span.begin < rival->end) {
            const bool is_rival_first = is_before(*rival->seen, *span.seen);
            const Seen& a = is_rival_first ? *rival->seen : *span.seen;
            const Seen& b = is_rival_first ? *span.seen : *rival->seen;
            refuse(site,
                   text(name_of(site, b), " shares ", std::min(rival->end, span.end) - span.begin,
                        " bytes of memory with ", name_of(site, a), "; pass a .clone() of one of them"));
        }
        if (last == nullptr || span.end > last->end) last = &span;
        if (is_written && (last_written == nullptr || span.end > last_written->end)) last_written = &span;
    }
}

// The number of tuples: the length of the arguments that are not shared.
size_t checked_length(const CallSite& site, std::span<const Argument> arguments) {
    const Argument* first = nullptr;
    for (const Argument& other : arguments) {
        if (other.is_shared) continue;
        if (first == nullptr) first = &other;
        if (other.tensors->size() == first->tensors->size()) continue;
        refuse(site, text(other.name, " has ", other.tensors->size(), " tensors but ", first->name, " has ",
                          first->tensors->size(), "; pass lists of one length"));
    }
    const size_t length = first->tensors->size();
    for (const Argument& shared : arguments) {
        const size_t size = shared.tensors->size();
        if (!shared.is_shared || size == length || (size > 0 && length > 0 && length % size == 0)) continue;
        refuse(site, text(first->name, " has ", length, " tensors but ", shared.name, " has ", size,
                          "; pass as many, or a multiple: one for each replica"));
    }
    return length;
}

Seen see(const CallSite& site, const Argument& argument, size_t index) {
    Seen seen{&argument, index, {}};
    const Tensor& tensor = (*argument.tensors)[index];
    if (!is_strided(tensor)) refuse(site, text(name_of(site, seen), " is not strided; pass dense tensors"));
    seen.view = view_of(tensor);
    return seen;
}

// Every tensor of the call, each once.
std::vector<std::vector<Seen>> see(const CallSite& site, std::span<const Argument> arguments) {
    std::vector<std::vector<Seen>> tensors(arguments.size());
    for (size_t a = 0; a < arguments.size(); ++a) {
        tensors[a].reserve(arguments[a].tensors->size());
        for (size_t t = 0; t < arguments[a].tensors->size(); ++t)
            tensors[a].push_back(see(site, arguments[a], t));
    }
    return tensors;
}

}  // namespace

void refuse(const CallSite& site, const std::string& message) {
    throw std::invalid_argument(text("avgpipe::", site.operator_name, ": ", message));
}

std::vector<Work> checked_work(const CallSite& site, std::span<const Argument> arguments, Mixing mixing) {
    std::vector<Work> works(checked_length(site, arguments));
    const std::vector<std::vector<Seen>> tensors = see(site, arguments);
    for (size_t w = 0; w < works.size(); ++w) {
        const Seen& first = tensors[0][w % tensors[0].size()];
        works[w].count = first.view.count;
        for (size_t a = 0; a < arguments.size(); ++a) {
            const Seen& seen = tensors[a][w % tensors[a].size()];
            check_devices(site, tensors[0][0], seen);
            check_shapes(site, first, seen);
            check_dtypes(site, first, seen, mixing);
            check_strides(site, first, seen);
            works[w][arguments[a].slot] = {seen.view.data, checked_dtype(site, seen)};
        }
    }
    check_overlap(site, tensors);
    return works;
}

void check_copies(const CallSite& site, std::span<const Argument> arguments) {
    std::vector<std::vector<Seen>> tensors = see(site, arguments);
    for (std::vector<Seen>& list : tensors) {
        for (const Seen& seen : list) {
            check_devices(site, tensors[0][0], seen);
            checked_dtype(site, seen);
            if (seen.argument->is_written && !is_dense(seen.view) && has_repeats(seen.view)) {
                refuse(site, text(name_of(site, seen), " of shape ", list_of(seen.view.sizes, seen.view.dim),
                                  " has strides ", list_of(seen.view.strides, seen.view.dim),
                                  ", by which elements share memory; pass a .contiguous() tensor"));
            }
        }
        // The bytes of a tensor with gaps may be another's; torch's own copy writes it.
        std::erase_if(list, [](const Seen& seen) { return !is_dense(seen.view); });
    }
    check_overlap(site, tensors);
}

Option checked_option(const CallSite& site, const char* name, const Tensor& option, const View& first,
                      bool may_be_double, bool may_be_on_cpu) {
    if (!is_strided(option)) refuse(site, text(name, " is not strided; pass a dense tensor"));
    const View view = view_of(option);
    const bool is_double = view.dtype == ScalarType::Double && may_be_double;
    if (view.count != 1 || (view.dtype != ScalarType::Float && !is_double)) {
        refuse(site, text(name, " has ", view.count, " elements of dtype ", dtype_name(view.dtype),
                          "; pass one float32", may_be_double ? " or float64" : ""));
    }
    const bool is_beside = view.device_type == first.device_type && view.device_index == first.device_index;
    const bool is_on_cpu = view.device_type == aoti_torch_device_type_cpu();
    if (!is_beside && !(is_on_cpu && may_be_on_cpu)) {
        refuse(site, text(name, " is on ", device_name(view.device_type, view.device_index),
                          " but the tensors are on ", device_name(first.device_type, first.device_index),
                          "; move it there"));
    }
    if (!is_on_cpu) return {view, std::nullopt};
    return {view, is_double ? *static_cast<const double*>(view.data) : *static_cast<const float*>(view.data)};
}

DType checked_float(const CallSite& site, const char* name, ScalarType dtype) {
    if (const auto known = float_dtype(dtype)) return *known;
    refuse_dtype(site, name, dtype);
}

void check_finite_number(const CallSite& site, const char* name, double value) {
    if (std::isfinite(value)) return;
    refuse(site, text(name, " is ", value, "; pass a finite number"));
}

void check_not_negative(const CallSite& site, const char* name, double value) {
    if (std::isfinite(value) && value >= 0.0) return;
    refuse(site, text(name, " is ", value, "; pass a finite number of at least 0"));
}

}  // namespace avgpipe
