// The operators, one template per schema; register.cpp lists them.
#pragma once

#include <optional>

#include "torch_abi.h"

namespace avgpipe {

// Where a call was dispatched to. kOther takes what no other kernel does: empty lists, and devices to refuse.
enum class Backend { kCpu, kCuda, kOther };

// One tensor, or a list of them.
template <class T>
using Maybe = std::conditional_t<std::is_same_v<T, Tensor>, std::optional<Tensor>, Tensors>;
using OptionalTensor = std::optional<Tensor>;

// Each returns the number of lost elements (int64, shape ()) with check_finite, else an int64 placeholder of
// shape (0,). T is Tensor, or Tensors for lists.

template <Backend kBackend, class T>
Tensor elastic_pull(T x, T z, double alpha, bool check_finite);

template <Backend kBackend, class T>
Tensor elastic_step(T x, T x_before, T z, T update, double alpha, int64_t staleness, bool accumulate,
                    bool check_finite);

template <Backend kBackend, class T>
Tensor easgd_step(T x, T z, T update, double alpha, bool accumulate, bool check_finite);

template <Backend kBackend, class T>
Tensor elastic_sgd(T x, T grad, Maybe<T> momentum, T z, T update, double alpha, int64_t staleness, double lr,
                   double mu, double dampening, double weight_decay, bool nesterov, bool maximize,
                   bool first_step, String rule_name, bool accumulate, OptionalTensor grad_scale,
                   OptionalTensor found_inf, bool check_finite);

template <Backend kBackend, class T>
Tensor elastic_adamw(T x, T grad, T exp_avg, T exp_avg_sq, T z, T update, double alpha, int64_t staleness,
                     Tensor step, double lr, double beta1, double beta2, double eps, double weight_decay,
                     bool decoupled, bool maximize, String rule_name, bool accumulate,
                     OptionalTensor grad_scale, OptionalTensor found_inf, bool check_finite);

template <Backend kBackend, class T>
Tensor elastic_round(Tensors xs, Tensors grads, Tensors states, T z, double alpha, String optimizer_name,
                     double lr, Tensor step, double mu, double dampening, bool nesterov, bool first_step,
                     double beta1, double beta2, double eps, double weight_decay, bool maximize,
                     OptionalTensor grad_scale, OptionalTensor found_inf, bool check_finite);

template <Backend kBackend, class T>
Tensor reference_apply(T z, T update, double scale, bool zero, bool check_finite);

template <Backend kBackend>
Tensor pack(Tensors tensors, std::optional<ScalarType> dtype);
template <Backend kBackend>
void pack_out(Tensors tensors, Tensor out);
template <Backend kBackend>
void unpack(Tensor buffer, Tensors tensors);

}  // namespace avgpipe
