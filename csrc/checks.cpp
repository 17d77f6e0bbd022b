#include "checks.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace avgpipe {
namespace {

// A tensor of a call: its name in the call and its properties.
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

struct Known {
    ScalarType dtype;
    const char* name;
    std::optional<DType> ours = std::nullopt;
};
constexpr Known kKnown[] = {
    {ScalarType::Float, "float32", DType::kFloat32},
    {ScalarType::Double, "float64", DType::kFloat64},
    {ScalarType::BFloat16, "bfloat16", DType::kBFloat16},
    {ScalarType::Half, "float16", DType::kFloat16},
    {ScalarType::Long, "int64"},
    {ScalarType::Int, "int32"},
    {ScalarType::Bool, "bool"},
    {ScalarType::ComplexFloat, "complex64"},
    {ScalarType::ComplexDouble, "complex128"},
};

const Known* known(ScalarType dtype) {
    const auto* found = std::find_if(std::begin(kKnown), std::end(kKnown),
                                     [dtype](const Known& each) { return each.dtype == dtype; });
    return found == std::end(kKnown) ? nullptr : found;
}

std::string dtype_name(ScalarType dtype) {
    const Known* const found = known(dtype);
    return found != nullptr ? found->name : torch::headeronly::toString(dtype);
}

DType checked_dtype(const CallSite& site, const Seen& seen) {
    const Known* const found = known(seen.view.dtype);
    if (found != nullptr && found->ours) return *found->ours;
    return checked_float(site, name_of(site, seen), seen.view.dtype);
}

// Whether the tensor fills its memory exactly, in any order of dimensions.
bool is_dense(const Seen& seen) {
    const View& view = seen.view;
    if (seen.argument->tensors[seen.index].is_contiguous()) return true;  // as most are
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

// "z has shape (3,) but x has (4,); ..."
[[noreturn]] void refuse_pair(const CallSite& site, const Seen& first, const Seen& other, const char* what,
                              const std::string& a, const std::string& b, const char* way_out) {
    refuse(site, text(name_of(site, other), " has ", what, " ", b, " but ", name_of(site, first), " has ", a,
                      "; ", way_out));
}

void check_devices(const CallSite& site, const Seen& first, const Seen& other) {
    const View &a = first.view, &b = other.view;
    if (a.device_type == b.device_type && a.device_index == b.device_index) return;
    refuse(site, text(name_of(site, other), " is on ", device_of(b), " but ", name_of(site, first), " is on ",
                      device_of(a), "; move all tensors to one device"));
}

void check_pair(const CallSite& site, const Seen& first, const Seen& other, bool either_way) {
    const View &a = first.view, &b = other.view;
    if (a.dim != b.dim || !std::equal(a.sizes, a.sizes + a.dim, b.sizes)) {
        refuse_pair(site, first, other, "shape", list_of(a.sizes, a.dim), list_of(b.sizes, b.dim),
                    "pass tensors of one shape");
    }
    const DType own = checked_dtype(site, first), dtype = checked_dtype(site, other);
    const bool is_master = is_16_bit(own) && dtype == DType::kFloat32;
    const bool is_narrow = is_16_bit(dtype) && own == DType::kFloat32;
    if (own != dtype && !is_master && !(is_narrow && either_way)) {
        refuse_pair(site, first, other, "dtype", dtype_name(a.dtype), dtype_name(b.dtype),
                    either_way ? "pass one dtype, or float32 and a 16-bit one"
                               : "pass one dtype, or float32 beside a 16-bit one that is first");
    }
    if (a.count == 0) return;
    if (!is_dense(other)) {
        refuse(site,
               text(name_of(site, other), " of shape ", list_of(b.sizes, b.dim), " has strides ",
                    list_of(b.strides, b.dim), ", which leave gaps or overlap; pass .contiguous() tensors"));
    }
    for (int64_t d = 0; d < a.dim; ++d) {
        if (a.sizes[d] == 1 || a.strides[d] == b.strides[d]) continue;
        refuse_pair(site, first, other, "strides", list_of(a.strides, a.dim), list_of(b.strides, b.dim),
                    "give all tensors one memory format");
    }
}

// The bytes of a dense tensor.
struct Span {
    uintptr_t begin, end;
    const Seen* seen;
};

// Sorted by begin, a span that overlaps an earlier one overlaps the one that ends last, among all or among
// the written ones.
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
            const Seen *a = rival->seen, *b = span.seen;  // in the order of the call: tuple by tuple
            if (std::pair(b->index, b->argument) < std::pair(a->index, a->argument)) std::swap(a, b);
            refuse(site,
                   text(name_of(site, *b), " shares ", std::min(rival->end, span.end) - span.begin,
                        " bytes of memory with ", name_of(site, *a), "; pass a .clone() of one of them"));
        }
        if (last == nullptr || span.end > last->end) last = &span;
        if (is_written && (last_written == nullptr || span.end > last_written->end)) last_written = &span;
    }
}

// The number of tuples: the length of the arguments that are not shared.
size_t checked_length(const CallSite& site, std::span<const Argument> arguments) {
    const Argument& first = *std::find_if(arguments.begin(), arguments.end(),
                                          [](const Argument& argument) { return !argument.is_shared; });
    const size_t length = first.tensors.size();
    for (const Argument& other : arguments) {
        const size_t size = other.tensors.size();
        if (size == length || (other.is_shared && size > 0 && length > 0 && length % size == 0)) continue;
        if (other.is_shared) {
            refuse(site, text(first.name, " has ", length, " tensors but ", other.name, " has ", size,
                              "; pass as many, or a multiple: one for each replica"));
        }
        refuse(site, text(other.name, " has ", size, " tensors but ", first.name, " has ", length,
                          "; pass lists of one length"));
    }
    return length;
}

// Every tensor of the call, each once.
std::vector<std::vector<Seen>> see(const CallSite& site, std::span<const Argument> arguments) {
    std::vector<std::vector<Seen>> tensors(arguments.size());
    for (size_t a = 0; a < arguments.size(); ++a) {
        tensors[a].reserve(arguments[a].tensors.size());
        for (const Tensor& tensor : arguments[a].tensors) {
            Seen& seen = tensors[a].emplace_back(Seen{&arguments[a], tensors[a].size(), {}});
            if (!is_strided(tensor))
                refuse(site, text(name_of(site, seen), " is not strided; pass dense tensors"));
            seen.view = view_of(tensor);
        }
    }
    return tensors;
}

}  // namespace

void refuse(const CallSite& site, const std::string& message) {
    throw std::invalid_argument(text("avgpipe::", site.operator_name, ": ", message));
}

std::vector<Work> checked_work(const CallSite& site, std::span<const Argument> arguments, bool either_way) {
    std::vector<Work> works(checked_length(site, arguments));
    const std::vector<std::vector<Seen>> tensors = see(site, arguments);
    for (size_t w = 0; w < works.size(); ++w) {
        const Seen& first = tensors[0][w % tensors[0].size()];
        works[w].count = first.view.count;
        for (size_t a = 0; a < arguments.size(); ++a) {
            const Seen& seen = tensors[a][w % tensors[a].size()];
            check_devices(site, tensors[0][0], seen);
            check_pair(site, first, seen, either_way);
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
            const View& view = seen.view;
            check_devices(site, tensors[0][0], seen);
            checked_dtype(site, seen);
            for (int64_t d = 0; d < view.dim && seen.argument->is_written; ++d) {
                if (view.count == 0 || view.sizes[d] == 1 || view.strides[d] != 0) continue;
                refuse(site, text(name_of(site, seen), " of shape ", list_of(view.sizes, view.dim),
                                  " has strides ", list_of(view.strides, view.dim),
                                  ", by which elements share memory; pass a .contiguous() tensor"));
            }
        }
        // The gaps of a tensor may contain another one's bytes; torch's own copy writes it.
        std::erase_if(list, [](const Seen& seen) { return !is_dense(seen); });
    }
    check_overlap(site, tensors);
}

Option checked_option(const CallSite& site, const char* name, const Tensor& option, const View& first,
                      bool is_counter) {
    if (!is_strided(option)) refuse(site, text(name, " is not strided; pass a dense tensor"));
    const View view = view_of(option);
    const bool is_double = view.dtype == ScalarType::Double && is_counter;
    if (view.count != 1 || (view.dtype != ScalarType::Float && !is_double)) {
        refuse(site, text(name, " has ", view.count, " elements of dtype ", dtype_name(view.dtype),
                          "; pass one float32", is_counter ? " or float64" : ""));
    }
    const bool is_beside = view.device_type == first.device_type && view.device_index == first.device_index;
    const bool is_on_cpu = view.device_type == aoti_torch_device_type_cpu();
    if (!is_beside && !(is_on_cpu && is_counter)) {
        refuse(site, text(name, " is on ", device_of(view), " but the tensors are on ", device_of(first),
                          "; move it there"));
    }
    if (!is_on_cpu) return {view, std::nullopt};
    return {view, is_double ? *static_cast<const double*>(view.data) : *static_cast<const float*>(view.data)};
}

DType checked_float(const CallSite& site, const std::string& name, ScalarType dtype) {
    const Known* const found = known(dtype);
    if (found != nullptr && found->ours) return *found->ours;
    refuse(site,
           text(name, " has dtype ", dtype_name(dtype), "; pass float32, float64, bfloat16 or float16"));
}

void check_number(const CallSite& site, const std::string& name, double value, Demand demand) {
    if (demand == Demand::kBelowOne && !(value >= 0.0 && value < 1.0))
        refuse(site, text(name, " is ", value, "; pass a number from 0 to below 1"));
    if (!std::isfinite(value)) refuse(site, text(name, " is ", value, "; pass a finite number"));
    if (demand == Demand::kNotNegative && value < 0.0)
        refuse(site, text(name, " is ", value, "; pass a finite number of at least 0"));
}

}  // namespace avgpipe
