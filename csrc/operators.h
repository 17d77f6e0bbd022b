// The operators, one template per schema; register.cpp lists them.
#pragma once

#include "torch_abi.h"

namespace avgpipe {

// Where a call was dispatched to. kOther takes what no other kernel does: empty lists, and devices to refuse.
enum class Backend { kCpu, kCuda, kOther };

// Each returns the number of lost elements (int64, shape ()) with check_finite, else an int64 placeholder of
// shape (0,).

template <Backend kBackend>
Tensor elastic_pull_list(Tensors x, Tensors z, double alpha, bool check_finite);
template <Backend kBackend>
Tensor elastic_pull(Tensor x, Tensor z, double alpha, bool check_finite);

template <Backend kBackend>
Tensor elastic_step_list(Tensors x, Tensors x_before, Tensors z, Tensors update, double alpha,
                         int64_t staleness, bool check_finite);
template <Backend kBackend>
Tensor elastic_step(Tensor x, Tensor x_before, Tensor z, Tensor update, double alpha, int64_t staleness,
                    bool check_finite);

template <Backend kBackend>
Tensor easgd_step_list(Tensors x, Tensors z, Tensors update, double alpha, bool check_finite);
template <Backend kBackend>
Tensor easgd_step(Tensor x, Tensor z, Tensor update, double alpha, bool check_finite);

template <Backend kBackend>
Tensor reference_apply_list(Tensors z, Tensors update, double scale, bool check_finite);
template <Backend kBackend>
Tensor reference_apply(Tensor z, Tensor update, double scale, bool check_finite);

}  // namespace avgpipe
