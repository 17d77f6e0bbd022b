// The requirements of an operator on its arguments.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "elastic/work.h"
#include "torch_abi.h"

namespace avgpipe {

// One tensor-list argument of an operator, whose t-th tensor goes into the slot of the t-th Work. A shared
// one has its tensors once for all replicas: the t-th of T serves every Work whose index is t modulo T.
struct Argument {
    const char* name;
    Tensors tensors;
    Slot slot;
    bool is_written = false;
    bool is_shared = false;
};

// Names the operator in messages; a list argument's tensors are called x[0], x[1], ...
struct CallSite {
    const char* operator_name;
    bool is_list;
};

// One Work per tuple of tensors. Throws std::invalid_argument, naming the argument, both values and the
// remedy, unless the lists have one length (a shared one a divisor of it) and the tensors of a tuple one
// shape, one dense stride order and one dtype (or float32 with a 16-bit first one, `either_way` also the
// reverse), all tensors one device, and no written tensor shares memory with another.
std::vector<Work> checked_work(const CallSite& site, std::span<const Argument> arguments, bool either_way);

// For pack and unpack_: one-to-one copies whose shapes, strides and dtypes may differ. The tensors must be
// strided, float, on one device, and no written one may share memory with another.
void check_copies(const CallSite& site, std::span<const Argument> arguments);

// An option of one element: its value if it is on the CPU, else nothing. A counter may be float64, and on the
// CPU for any device of the tensors. Throws as checked_work does.
struct Option {
    View view;
    std::optional<double> value;
};
Option checked_option(const CallSite& site, const char* name, const Tensor& option, const View& first,
                      bool is_counter);

DType checked_float(const CallSite& site, const std::string& name, ScalarType dtype);

enum class Demand { kFinite, kNotNegative, kBelowOne };
void check_number(const CallSite& site, const std::string& name, double value, Demand demand);

[[noreturn]] void refuse(const CallSite& site, const std::string& message);

}  // namespace avgpipe
