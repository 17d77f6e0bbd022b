// Checks of operator arguments, all made before anything is written.
#pragma once

#include <span>
#include <string>

#include "elastic/work.h"
#include "torch_abi.h"

namespace avgpipe {

// One tensor-list argument of an operator. `operand` says where its t-th tensor goes in the t-th Work.
struct Argument {
    const char* name;
    const Tensors* tensors;
    Operand Work::* operand;
    bool is_written;
};

// Names the operator in messages; a list argument's tensors are called x[0], x[1], ...
struct CallSite {
    const char* operator_name;
    bool is_list;
};

// Which dtype a later argument may have beside the first one's.
enum class Mixing {
    kFloat32Master,  // the same, or float32 beside a 16-bit first
    kEitherFloat32,  // the same, or float32 on either side of a 16-bit one
};

// One Work per tuple of tensors (operands and count only). Throws std::invalid_argument, naming the argument,
// both values and the way out, unless the lists have one length and the tensors of a tuple one shape, one
// dense stride order and allowed dtypes, all tensors one device, and no written tensor shares memory with
// another.
std::vector<Work> checked_work(const CallSite& site, std::span<const Argument> arguments, Mixing mixing);

void check_finite_number(const CallSite& site, const char* name, double value);
void check_staleness(const CallSite& site, int64_t staleness);

[[noreturn]] void refuse(const CallSite& site, const std::string& message);

}  // namespace avgpipe
