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

DType checked_dtype(const CallSite& site, const Seen& seen) {
    switch (seen.view.dtype) {
        case ScalarType::Float:
            return DType::kFloat32;
        case ScalarType::Double:
            return DType::kFloat64;
        case ScalarType::BFloat16:
            return DType::kBFloat16;
        case ScalarType::Half:
            return DType::kFloat16;
        default:
            refuse(site, text(name_of(site, seen), " has dtype ", dtype_name(seen.view.dtype),
                              "; pass float32, float64, bfloat16 or float16"));
    }
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

// Whether the tensor fills its memory exactly, in whatever order of dimensions.
bool is_dense(const View& view) {
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

// Sorted by begin, a span that meets an earlier one meets the one that ends last, among all or among the
// written ones.
void check_overlap(const CallSite& site, const std::vector<Seen>& tensors) {
    std::vector<Span> spans;
    for (const Seen& seen : tensors) {
        if (seen.view.count == 0) continue;
        const auto begin = reinterpret_cast<uintptr_t>(seen.view.data);
        const auto bytes = static_cast<uintptr_t>(seen.view.count * size_of(checked_dtype(site, seen)));
        spans.push_back({begin, begin + bytes, &seen});
    }
    std::stable_sort(spans.begin(), spans.end(),
                     [](const Span& a, const Span& b) { return a.begin < b.begin; });
    const Span *last = nullptr, *last_written = nullptr;
    for (const Span& span : spans) {
        const bool is_written = span.seen->argument->is_written;
        const Span* rival = is_written ? last : last_written;
        if (rival != nullptr && span.begin < rival->end) {
            const Seen &a = *std::min(rival->seen, span.seen), &b = *std::max(rival->seen, span.seen);
            refuse(site,
                   text(name_of(site, b), " shares ", std::min(rival->end, span.end) - span.begin,
                        " bytes of memory with ", name_of(site, a), "; pass a .clone() of one of them"));
        }
        if (last == nullptr || span.end > last->end) last = &span;
        if (is_written && (last_written == nullptr || span.end > last_written->end)) last_written = &span;
    }
}

void check_lengths(const CallSite& site, std::span<const Argument> arguments) {
    const Argument& first = arguments.front();
    for (const Argument& other : arguments) {
        if (other.tensors->size() == first.tensors->size()) continue;
        refuse(site, text(other.name, " has ", other.tensors->size(), " tensors but ", first.name, " has ",
                          first.tensors->size(), "; pass lists of one length"));
    }
}

// Every tensor of the call, tuple by tuple.
std::vector<Seen> see(const CallSite& site, std::span<const Argument> arguments) {
    std::vector<Seen> tensors;
    tensors.reserve(arguments.size() * arguments.front().tensors->size());
    for (size_t t = 0; t < arguments.front().tensors->size(); ++t) {
        for (const Argument& argument : arguments) {
            Seen seen{&argument, t, {}};
            const Tensor& tensor = (*argument.tensors)[t];
            if (!is_strided(tensor))
                refuse(site, text(name_of(site, seen), " is not strided; pass dense tensors"));
            seen.view = view_of(tensor);
            tensors.push_back(seen);
        }
    }
    return tensors;
}

}  // namespace

void refuse(const CallSite& site, const std::string& message) {
    throw std::invalid_argument(text("avgpipe::", site.operator_name, ": ", message));
}

std::vector<Work> checked_work(const CallSite& site, std::span<const Argument> arguments, Mixing mixing) {
    check_lengths(site, arguments);
    const std::vector<Seen> tensors = see(site, arguments);
    std::vector<Work> works(arguments.front().tensors->size());
    for (size_t i = 0; i < tensors.size(); ++i) {
        const Seen& seen = tensors[i];
        const Seen& first = tensors[i - i % arguments.size()];  // of its tuple
        check_devices(site, tensors.front(), seen);
        check_shapes(site, first, seen);
        check_dtypes(site, first, seen, mixing);
        check_strides(site, first, seen);
        Work& work = works[seen.index];
        work.*(seen.argument->operand) = {seen.view.data, checked_dtype(site, seen)};
        work.count = seen.view.count;
    }
    check_overlap(site, tensors);
    return works;
}

void check_finite_number(const CallSite& site, const char* name, double value) {
    if (std::isfinite(value)) return;
    refuse(site, text(name, " is ", value, "; pass a finite number"));
}

void check_staleness(const CallSite& site, int64_t staleness) {
    if (staleness == 0 || staleness == 1) return;
    refuse(site, text("staleness is ", staleness, "; pass 0 or 1"));
}

}  // namespace avgpipe
