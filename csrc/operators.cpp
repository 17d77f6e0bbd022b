// The operators: one template each, checked arguments in front of a kernel, and at the end every schema in
// one block.
#include <cmath>
#include <optional>
#include <regex>

#include "checks.h"
#include "execute.h"
#include "library.h"
#include "torch_abi.h"

namespace avgpipe {
namespace {

// Where a call was dispatched to. kOther takes what no other kernel does: empty lists, and devices to refuse.
enum class Backend { kCpu, kCuda, kOther };

using OptionalTensor = std::optional<Tensor>;

// One tensor, or a list of them.
template <class T>
using Maybe = std::conditional_t<std::is_same_v<T, Tensor>, OptionalTensor, Tensors>;

Tensors as_list(Tensor tensor) {
    return {std::move(tensor)};
}
Tensors as_list(Tensors tensors) {
    return tensors;
}
Tensors as_list(OptionalTensor tensor) {
    return tensor ? Tensors{*std::move(tensor)} : Tensors{};
}

bool is_on_cuda(const Tensor& tensor) {
    return is_strided(tensor) && view_of(tensor).device_type == aoti_torch_device_type_cuda();
}

// Whether there is a kernel for what was dispatched to kBackend with this first tensor. To kOther come CUDA
// tensors of a library that was built without CUDA: the kernels may have been compiled at run time.
template <Backend kBackend>
bool can_run(const Tensors& first) {
    return !first.empty() &&
           (kBackend != Backend::kOther || (is_on_cuda(first.front()) && has_cuda_kernels()));
}

// No kernel exists for this device, or there is no tensor to tell the device.
Tensor run_nowhere(const CallSite& site, const Tensors& first, bool check_finite) {
    if (first.empty()) return check_finite ? new_counter() : new_placeholder();
    if (!is_strided(first.front())) refuse(site, "a sparse tensor was passed; pass dense tensors");
    const View view = view_of(first.front());
    refuse(site,
           text("no kernel for ", device_name(view.device_type, view.device_index),
                is_on_cuda(first.front())
                    ? ": built without CUDA; install CuPy (see avgpipe doctor) or rebuild with AVGPIPE_CUDA=1"
                    : "; move the tensors to cpu or cuda"));
}

template <Backend kBackend>
void execute(const Job& job, const Tensor& lost) {
    if constexpr (kBackend == Backend::kCpu) {
        execute_on_cpu(job, lost);
    } else {
        execute_on_cuda(job, lost);
    }
}

// Checks the tensors, then runs. The settings have been checked.
template <Backend kBackend>
Tensor run(const CallSite& site, Kernel kernel, const Settings& settings, std::span<const Argument> arguments,
           Mixing mixing = Mixing::kFloat32Master) {
    std::vector<Work> works = checked_work(site, arguments, mixing);
    const Tensors& first = *arguments.front().tensors;
    if (!can_run<kBackend>(first)) return run_nowhere(site, first, settings.check_finite);
    if (kernel == Kernel::kStep) {  // without x_before, x has made no step
        for (Work& work : works)
            if (work[Slot::kBefore].data == nullptr) work[Slot::kBefore] = work[Slot::kX];
    }
    Job job{kernel, settings, works.data(), static_cast<int64_t>(works.size())};
    for (const Argument& argument : arguments) {
        if (argument.is_shared) job.tensors = static_cast<int64_t>(argument.tensors->size());
    }
    job.replicas = static_cast<int64_t>(works.size()) / job.tensors;
    Tensor lost = settings.check_finite ? new_counter(first.front()) : new_placeholder(first.front());
    execute<kBackend>(job, lost);
    return lost;
}

// The averaging rule: see elastic_step_ in avgpipe_ext/operators.py.
void set_rule(const CallSite& site, Settings& settings, double alpha, int64_t staleness, double from_step,
              double from_force, bool accumulate) {
    check_finite_number(site, "alpha", alpha);
    check_finite_number(site, "from_step", from_step);
    check_finite_number(site, "from_force", from_force);
    if (staleness != 0 && staleness != 1) refuse(site, text("staleness is ", staleness, "; pass 0 or 1"));
    settings.alpha = alpha;
    settings.lags = staleness == 1;
    settings.from_step = from_step;
    settings.from_force = from_force;
    settings.accumulates = accumulate;
}

// The options of GradScaler; the first tensor tells the device.
void set_scaling(const CallSite& site, Settings& settings, const Tensors& first,
                 const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
    if (first.empty() || !is_strided(first.front())) return;
    const View view = view_of(first.front());
    if (grad_scale) {
        const Option option = checked_option(site, "grad_scale", *grad_scale, view, false, false);
        settings.grad_scale = option.value ? nullptr : static_cast<const float*>(option.view.data);
        if (option.value) settings.unscale = 1.0 / *option.value;
    }
    if (found_inf) {
        const Option option = checked_option(site, "found_inf", *found_inf, view, false, false);
        settings.found_inf = option.value ? nullptr : static_cast<const float*>(option.view.data);
        if (option.value) settings.skips = *option.value != 0.0;
    }
}

void set_sgd(const CallSite& site, Settings& settings, double lr, double mu, double dampening,
             double weight_decay, bool nesterov, bool maximize, bool first_step) {
    check_not_negative(site, "lr", lr);
    check_not_negative(site, "mu", mu);
    check_finite_number(site, "dampening", dampening);
    check_not_negative(site, "weight_decay", weight_decay);
    if (nesterov && (mu == 0.0 || dampening != 0.0)) {
        refuse(site, text("nesterov with mu ", mu, " and dampening ", dampening,
                          "; it needs a mu above 0 and no dampening"));
    }
    settings.lr = lr;
    settings.beta1 = mu;
    settings.dampening = dampening;
    settings.weight_decay = weight_decay;
    settings.is_nesterov = nesterov;
    settings.maximizes = maximize;
    settings.is_first = first_step;
}

void set_adam(const CallSite& site, Settings& settings, const Tensors& first, const Tensor& step, double lr,
              double beta1, double beta2, double eps, double weight_decay, bool decoupled, bool maximize) {
    check_not_negative(site, "lr", lr);
    check_not_negative(site, "eps", eps);
    check_not_negative(site, "weight_decay", weight_decay);
    for (const auto& [name, beta] : {std::pair("beta1", beta1), std::pair("beta2", beta2)}) {
        if (!(beta >= 0.0 && beta < 1.0))
            refuse(site, text(name, " is ", beta, "; pass a number from 0 to below 1"));
    }
    settings.lr = lr;
    settings.beta1 = beta1;
    settings.beta2 = beta2;
    settings.eps = eps;
    settings.weight_decay = weight_decay;
    settings.is_decoupled = decoupled;
    settings.maximizes = maximize;
    if (first.empty() || !is_strided(first.front())) return;
    const Option option = checked_option(site, "step", step, view_of(first.front()), true, true);
    if (!option.value) {
        settings.step = option.view.data;
        settings.step_is_double = option.view.dtype == ScalarType::Double;
    } else if (*option.value >= 1.0 && std::isfinite(*option.value)) {
        settings.step_count = *option.value;
    } else {
        refuse(site, text("step is ", *option.value, "; count steps from 1"));
    }
}

// One momentum buffer for each x, or none at all.
bool has_momentum(const CallSite& site, double mu, size_t buffers, size_t tensors) {
    if (buffers == 0 && mu != 0.0 && tensors > 0)
        refuse(site, text("mu is ", mu, " but there is no momentum; pass buffers like x"));
    if (buffers != 0 && mu == 0.0)
        refuse(site, text("mu is 0 but there are ", buffers, " momentum buffers; pass none"));
    return buffers != 0;
}

template <class T>
CallSite site_of(const char* name) {
    return {name, std::is_same_v<T, Tensors>};
}

// ---- the operators. Each returns the number of lost elements (int64, shape ()) with check_finite, else an
// int64 placeholder of shape (0,). T is Tensor, or Tensors for lists.
// --------------------------------------------------------

template <Backend kBackend, class T>
Tensor elastic_pull(T x, T z, double alpha, bool check_finite) {
    const CallSite site = site_of<T>("elastic_pull_");
    check_finite_number(site, "alpha", alpha);
    const Settings settings{.alpha = alpha, .check_finite = check_finite};
    const Tensors xs = as_list(std::move(x)), zs = as_list(std::move(z));
    const Argument arguments[] = {{"x", &xs, Slot::kX, true}, {"z", &zs, Slot::kZ, false}};
    return run<kBackend>(site, Kernel::kPull, settings, arguments);
}

template <Backend kBackend, class T>
Tensor elastic_step(T x, T x_before, T z, T update, double alpha, int64_t staleness, double from_step,
                    double from_force, bool accumulate, bool check_finite) {
    const CallSite site = site_of<T>("elastic_step_");
    Settings settings{.check_finite = check_finite};
    set_rule(site, settings, alpha, staleness, from_step, from_force, accumulate);
    const Tensors xs = as_list(std::move(x)), befores = as_list(std::move(x_before)),
                  zs = as_list(std::move(z)), updates = as_list(std::move(update));
    const Argument arguments[] = {{"x", &xs, Slot::kX, true},
                                  {"x_before", &befores, Slot::kBefore, false},
                                  {"z", &zs, Slot::kZ, false},
                                  {"update", &updates, Slot::kUpdate, true}};
    return run<kBackend>(site, Kernel::kStep, settings, arguments);
}

template <Backend kBackend, class T>
Tensor easgd_step(T x, T z, T update, double alpha, double from_force, bool accumulate, bool check_finite) {
    const CallSite site = site_of<T>("easgd_step_");
    Settings settings{.check_finite = check_finite};
    set_rule(site, settings, alpha, 0, 0.0, from_force, accumulate);
    const Tensors xs = as_list(std::move(x)), zs = as_list(std::move(z)),
                  updates = as_list(std::move(update));
    const Argument arguments[] = {
        {"x", &xs, Slot::kX, true}, {"z", &zs, Slot::kZ, false}, {"update", &updates, Slot::kUpdate, true}};
    return run<kBackend>(site, Kernel::kStep, settings, arguments);
}

template <Backend kBackend, class T>
Tensor elastic_sgd(T x, T grad, Maybe<T> momentum, T z, T update, double alpha, int64_t staleness, double lr,
                   double mu, double dampening, double weight_decay, bool nesterov, bool maximize,
                   bool first_step, double from_step, double from_force, bool accumulate,
                   OptionalTensor grad_scale, OptionalTensor found_inf, bool check_finite) {
    const CallSite site = site_of<T>("elastic_sgd_");
    const Tensors xs = as_list(std::move(x)), grads = as_list(std::move(grad)),
                  momenta = as_list(std::move(momentum)), zs = as_list(std::move(z)),
                  updates = as_list(std::move(update));
    Settings settings{.check_finite = check_finite};
    set_rule(site, settings, alpha, staleness, from_step, from_force, accumulate);
    set_sgd(site, settings, lr, mu, dampening, weight_decay, nesterov, maximize, first_step);
    set_scaling(site, settings, xs, grad_scale, found_inf);
    const bool has_buffers = has_momentum(site, mu, momenta.size(), xs.size());
    const Argument arguments[] = {{"x", &xs, Slot::kX, true},
                                  {"grad", &grads, Slot::kGrad, false},
                                  {"z", &zs, Slot::kZ, false},
                                  {"update", &updates, Slot::kUpdate, true},
                                  {"momentum", &momenta, Slot::kFirst, true}};
    return run<kBackend>(site, has_buffers ? Kernel::kMomentum : Kernel::kSgd, settings,
                         std::span(arguments, has_buffers ? 5 : 4));
}

template <Backend kBackend, class T>
Tensor elastic_adamw(T x, T grad, T exp_avg, T exp_avg_sq, T z, T update, double alpha, int64_t staleness,
                     Tensor step, double lr, double beta1, double beta2, double eps, double weight_decay,
                     bool decoupled, bool maximize, double from_step, double from_force, bool accumulate,
                     OptionalTensor grad_scale, OptionalTensor found_inf, bool check_finite) {
    const CallSite site = site_of<T>("elastic_adamw_");
    const Tensors xs = as_list(std::move(x)), grads = as_list(std::move(grad)),
                  firsts = as_list(std::move(exp_avg)), seconds = as_list(std::move(exp_avg_sq)),
                  zs = as_list(std::move(z)), updates = as_list(std::move(update));
    Settings settings{.check_finite = check_finite};
    set_rule(site, settings, alpha, staleness, from_step, from_force, accumulate);
    set_adam(site, settings, xs, step, lr, beta1, beta2, eps, weight_decay, decoupled, maximize);
    set_scaling(site, settings, xs, grad_scale, found_inf);
    const Argument arguments[] = {{"x", &xs, Slot::kX, true},
                                  {"grad", &grads, Slot::kGrad, false},
                                  {"exp_avg", &firsts, Slot::kFirst, true},
                                  {"exp_avg_sq", &seconds, Slot::kSecond, true},
                                  {"z", &zs, Slot::kZ, false},
                                  {"update", &updates, Slot::kUpdate, true}};
    return run<kBackend>(site, Kernel::kAdam, settings, arguments);
}

template <Backend kBackend, class T>
Tensor elastic_round(Tensors xs, Tensors grads, Tensors states, T z, double alpha, String optimizer_name,
                     double lr, Tensor step, double mu, double dampening, bool nesterov, bool first_step,
                     double beta1, double beta2, double eps, double weight_decay, bool maximize,
                     OptionalTensor grad_scale, OptionalTensor found_inf, bool check_finite) {
    const std::string optimizer = take(optimizer_name);
    const CallSite site{"elastic_round_", true};
    const Tensors zs = as_list(std::move(z));
    const bool is_sgd = optimizer == "sgd";
    if (!is_sgd && optimizer != "adam" && optimizer != "adamw")
        refuse(site, text("optimizer is '", optimizer, "'; pass 'sgd', 'adam' or 'adamw'"));
    check_finite_number(site, "alpha", alpha);
    Settings settings{.alpha = alpha, .check_finite = check_finite};
    if (is_sgd) {
        set_sgd(site, settings, lr, mu, dampening, weight_decay, nesterov, maximize, first_step);
    } else {
        set_adam(site, settings, xs, step, lr, beta1, beta2, eps, weight_decay, optimizer == "adamw",
                 maximize);
    }
    set_scaling(site, settings, xs, grad_scale, found_inf);
    settings.scale = xs.empty() ? 1.0 : static_cast<double>(zs.size()) / static_cast<double>(xs.size());
    const size_t kinds = is_sgd ? (has_momentum(site, mu, states.size(), xs.size()) ? 1 : 0) : 2;
    if (states.size() != kinds * xs.size()) {
        refuse(site, text("there are ", states.size(), " states for ", xs.size(), " xs; pass ", kinds,
                          " for each: all ", is_sgd ? "momentum buffers" : "exp_avg, then all exp_avg_sq"));
    }
    const auto middle = states.begin() + static_cast<std::ptrdiff_t>(kinds == 0 ? 0 : xs.size());
    const Tensors firsts(states.begin(), middle), seconds(middle, states.end());
    const Argument arguments[] = {{"xs", &xs, Slot::kX, true},
                                  {"grads", &grads, Slot::kGrad, false},
                                  {"z", &zs, Slot::kZ, true, true},
                                  {is_sgd ? "states" : "states' exp_avg", &firsts, Slot::kFirst, true},
                                  {"states' exp_avg_sq", &seconds, Slot::kSecond, true}};
    const Kernel kernel = kinds == 0   ? Kernel::kSgdRound
                          : kinds == 1 ? Kernel::kMomentumRound
                                       : Kernel::kAdamRound;
    return run<kBackend>(site, kernel, settings, std::span(arguments, 3 + kinds));
}

template <Backend kBackend, class T>
Tensor reference_apply(T z, T update, double scale, bool zero, bool check_finite) {
    const CallSite site = site_of<T>("reference_apply_");
    check_finite_number(site, "scale", scale);
    const Settings settings{.scale = scale, .zeroes = zero, .check_finite = check_finite};
    const Tensors zs = as_list(std::move(z)), updates = as_list(std::move(update));
    const Argument arguments[] = {{"z", &zs, Slot::kZ, true, true},
                                  {"update", &updates, Slot::kUpdate, zero}};
    return run<kBackend>(site, Kernel::kApply, settings, arguments, Mixing::kEitherFloat32);
}

int64_t total_count(const Tensors& tensors) {
    int64_t total = 0;
    for (const Tensor& tensor : tensors) total += tensor.numel();
    return total;
}

// After check_copies, for a buffer of the right size.
template <Backend kBackend>
void pack_into(const CallSite& site, Tensors tensors, const Tensor& buffer) {
    const DType to = checked_float(site, "the buffer", buffer.scalar_type());
    std::vector<Work> works(tensors.size());
    auto* place = static_cast<unsigned char*>(buffer.data_ptr());
    for (size_t t = 0; t < tensors.size(); ++t) {
        if (!tensors[t].is_contiguous()) tensors[t] = torch::stable::contiguous(tensors[t]);
        works[t][Slot::kBefore] = {tensors[t].data_ptr(),
                                   checked_float(site, "tensors", tensors[t].scalar_type())};
        works[t][Slot::kX] = {place, to};
        works[t].count = tensors[t].numel();
        place += works[t].count * size_of(to);
    }
    execute<kBackend>({Kernel::kCopy, {}, works.data(), static_cast<int64_t>(works.size())},
                      new_placeholder(buffer));
}

void check_buffer(const CallSite& site, const char* name, const Tensor& buffer, const Tensors& tensors) {
    const int64_t total = total_count(tensors);
    if (buffer.dim() == 1 && buffer.is_contiguous() && buffer.numel() == total) return;
    refuse(site, text(name, " has ", buffer.dim(), " dimensions and ", buffer.numel(),
                      " elements, the tensors together ", total,
                      "; pass a contiguous one of one dimension and as many elements"));
}

template <Backend kBackend>
Tensor pack(Tensors tensors, std::optional<ScalarType> dtype) {
    const CallSite site{"pack", true};
    if (tensors.empty()) refuse(site, "there are no tensors; pass at least one");
    if (!can_run<kBackend>(tensors)) return run_nowhere(site, tensors, false);
    const Argument arguments[] = {{"tensors", &tensors, Slot::kBefore, false}};
    check_copies(site, arguments);
    const ScalarType packed = dtype.value_or(tensors.front().scalar_type());
    checked_float(site, "dtype", packed);
    for (const Tensor& tensor : tensors) {
        if (!dtype && tensor.scalar_type() != packed)
            refuse(site, "the tensors have several dtypes; pass dtype=");
    }
    Tensor buffer = torch::stable::new_empty(tensors.front(), {total_count(tensors)}, packed);
    pack_into<kBackend>(site, std::move(tensors), buffer);
    return buffer;
}

template <Backend kBackend>
void pack_out(Tensors tensors, Tensor out) {
    const CallSite site{"pack", true};
    const Tensors outs{out};
    if (!can_run<kBackend>(outs)) {
        run_nowhere(site, outs, false);
        return;
    }
    const Argument arguments[] = {{"out", &outs, Slot::kX, true},
                                  {"tensors", &tensors, Slot::kBefore, false}};
    check_copies(site, arguments);
    check_buffer(site, "out", out, tensors);
    pack_into<kBackend>(site, std::move(tensors), out);
}

template <Backend kBackend>
void unpack(Tensor buffer, Tensors tensors) {
    const CallSite site{"unpack_", true};
    const Tensors buffers{buffer};
    if (!can_run<kBackend>(buffers)) {
        run_nowhere(site, buffers, false);
        return;
    }
    const Argument arguments[] = {{"buffer", &buffers, Slot::kBefore, false},
                                  {"tensors", &tensors, Slot::kX, true}};
    check_copies(site, arguments);
    check_buffer(site, "buffer", buffer, tensors);
    const DType from = checked_float(site, "buffer", buffer.scalar_type());
    std::vector<Work> works(tensors.size());
    std::vector<std::pair<Tensor, Tensor>> with_gaps;  // what to write, and its contiguous stand-in
    const auto* place = static_cast<const unsigned char*>(buffer.data_ptr());
    for (size_t t = 0; t < tensors.size(); ++t) {
        Tensor whole = tensors[t];
        if (!whole.is_contiguous()) {
            whole = torch::stable::new_empty(whole, {whole.numel()});
            with_gaps.emplace_back(tensors[t], whole);
        }
        works[t][Slot::kBefore] = {const_cast<unsigned char*>(place), from};
        works[t][Slot::kX] = {whole.data_ptr(), checked_float(site, "tensors", whole.scalar_type())};
        works[t].count = whole.numel();
        place += works[t].count * size_of(from);
    }
    execute<kBackend>({Kernel::kCopy, {}, works.data(), static_cast<int64_t>(works.size())},
                      new_placeholder(buffer));
    for (auto& [tensor, whole] : with_gaps) {
        torch::stable::copy_(tensor, torch::stable::view(whole, tensor.sizes()));
    }
}

// ---- registration
// ----------------------------------------------------------------------------------------------------

// Both overloads of one schema: T is a tensor, and in the overload .list a list of them.
template <class Library>
void define(Library& m, const std::string& name, const std::string& arguments) {
    static const std::regex kind(R"(\bT(\(\w!\))?(\?)? )");
    m.def((name + "(" + std::regex_replace(arguments, kind, "Tensor$1$2 ") + ") -> Tensor").c_str());
    m.def((name + ".list(" + std::regex_replace(arguments, kind, "Tensor$1[] ") + ") -> Tensor").c_str());
}

template <Backend kBackend, class T, class Library>
void implement(Library& m, const std::string& overload) {
    const auto name = [&](const char* base) { return base + overload; };
    m.impl(name("elastic_pull_").c_str(), AVGPIPE_KERNEL((&elastic_pull<kBackend, T>)));
    m.impl(name("elastic_step_").c_str(), AVGPIPE_KERNEL((&elastic_step<kBackend, T>)));
    m.impl(name("easgd_step_").c_str(), AVGPIPE_KERNEL((&easgd_step<kBackend, T>)));
    m.impl(name("elastic_sgd_").c_str(), AVGPIPE_KERNEL((&elastic_sgd<kBackend, T>)));
    m.impl(name("elastic_adamw_").c_str(), AVGPIPE_KERNEL((&elastic_adamw<kBackend, T>)));
    m.impl(name("elastic_round_").c_str(), AVGPIPE_KERNEL((&elastic_round<kBackend, T>)));
    m.impl(name("reference_apply_").c_str(), AVGPIPE_KERNEL((&reference_apply<kBackend, T>)));
}

template <Backend kBackend, class Library>
void implement_all(Library& m) {
    implement<kBackend, Tensor>(m, "");
    implement<kBackend, Tensors>(m, ".list");
    m.impl("pack", AVGPIPE_KERNEL(&pack<kBackend>));
    m.impl("pack.out", AVGPIPE_KERNEL(&pack_out<kBackend>));
    m.impl("unpack_", AVGPIPE_KERNEL(&unpack<kBackend>));
}

}  // namespace
}  // namespace avgpipe

AVGPIPE_SCHEMAS(m) {
    using avgpipe::define;
    const std::string check = ", bool check_finite=False";
    const std::string rule = ", float from_step=1.0, float from_force=0.0, bool accumulate=True";
    const std::string scaling = ", Tensor? grad_scale=None, Tensor? found_inf=None" + check;
    define(m, "elastic_pull_", "T(a!) x, T z, float alpha, *" + check);
    define(m, "elastic_step_",
           "T(a!) x, T x_before, T z, T(b!) update, float alpha, int staleness, *" + rule + check);
    define(m, "easgd_step_",
           "T(a!) x, T z, T(b!) update, float alpha, *, float from_force=1.0, bool accumulate=True" + check);
    define(m, "elastic_sgd_",
           "T(a!) x, T grad, T(b!)? momentum, T z, T(c!) update, float alpha, int staleness, *, float lr, "
           "float mu=0.0, float dampening=0.0, float weight_decay=0.0, bool nesterov=False, "
           "bool maximize=False, bool first_step=False" +
               rule + scaling);
    define(
        m, "elastic_adamw_",
        "T(a!) x, T grad, T(b!) exp_avg, T(c!) exp_avg_sq, T z, T(d!) update, float alpha, int staleness, *, "
        "Tensor step, float lr, float beta1=0.9, float beta2=0.999, float eps=1e-08, "
        "float weight_decay=0.01, bool decoupled=True, bool maximize=False" +
            rule + scaling);
    define(m, "elastic_round_",
           "Tensor(a!)[] xs, Tensor[] grads, Tensor(b!)[] states, T(c!) z, float alpha, *, str optimizer, "
           "float lr, Tensor step, float mu=0.0, float dampening=0.0, bool nesterov=False, "
           "bool first_step=False, float beta1=0.9, float beta2=0.999, float eps=1e-08, "
           "float weight_decay=0.0, bool maximize=False" +
               scaling);
    define(m, "reference_apply_", "T(a!) z, T(b!) update, float scale, *, bool zero=True" + check);
    m.def("pack(Tensor[] tensors, *, ScalarType? dtype=None) -> Tensor");
    m.def("pack.out(Tensor[] tensors, *, Tensor(a!) out) -> ()");
    m.def("unpack_(Tensor buffer, Tensor(a!)[] tensors) -> ()");
}

AVGPIPE_KERNELS(CPU, m) {
    avgpipe::implement_all<avgpipe::Backend::kCpu>(m);
}

#ifdef AVGPIPE_WITH_CUDA
AVGPIPE_KERNELS(CUDA, m) {
    avgpipe::implement_all<avgpipe::Backend::kCuda>(m);
}
#endif

// Called for devices without a kernel and for empty lists, which have no device.
AVGPIPE_KERNELS(CompositeExplicitAutograd, m) {
    avgpipe::implement_all<avgpipe::Backend::kOther>(m);
}
