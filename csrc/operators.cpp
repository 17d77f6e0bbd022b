// The operators. Each is declared once, by its schema: the name of an argument decides which operand of the
// kernel or which setting it is, and its requirements.
#include <algorithm>
#include <cmath>
#include <optional>
#include <regex>
#include <string_view>

#include "checks.h"
#include "execute.h"
#include "torch_abi.h"

namespace avgpipe {
namespace {

using OptionalTensor = std::optional<Tensor>;

// ---- schemas ----------------------------------------------------------------------------------------
struct Operator {
    const char* name;
    Kernel kernel;  // of optimizers: that of Adam, or of SGD with momentum
    std::string arguments;

    std::string overload(bool is_list) const { return text(name, is_list ? ".list" : ""); }

    // T is a tensor, and in the overload .list a list of them.
    std::string schema(bool is_list) const {
        static const std::regex kind(R"(\bT(\(\w!\))?(\?)? )");
        const char* const type = is_list ? "Tensor$1[] " : "Tensor$1$2 ";
        return text(overload(is_list), "(", std::regex_replace(arguments, kind, type), ") -> Tensor");
    }
};

const std::string kCheck = ", bool check_finite=False";
const std::string kRule = ", float from_step=1.0, float from_force=0.0, bool accumulate=True";
const std::string kScaling = ", Tensor? grad_scale=None, Tensor? found_inf=None" + kCheck;
const Operator kOperators[] = {
    {"elastic_pull_", Kernel::kPull, "T(a!) x, T z, float alpha, *" + kCheck},
    {"elastic_step_", Kernel::kStep,
     "T(a!) x, T x_before, T z, T(b!) update, float alpha, int staleness, *" + kRule + kCheck},
    {"easgd_step_", Kernel::kStep,
     "T(a!) x, T z, T(b!) update, float alpha, *, float from_force=1.0, bool accumulate=True" + kCheck},
    {"elastic_sgd_", Kernel::kMomentum,
     "T(a!) x, T grad, T(b!)? momentum, T z, T(c!) update, float alpha, int staleness, *, float lr, "
     "float mu=0.0, float dampening=0.0, float weight_decay=0.0, bool nesterov=False, "
     "bool maximize=False, bool first_step=False" +
         kRule + kScaling},
    {"elastic_adamw_", Kernel::kAdam,
     "T(a!) x, T grad, T(b!) exp_avg, T(c!) exp_avg_sq, T z, T(d!) update, float alpha, int staleness, *, "
     "Tensor step, float lr, float beta1=0.9, float beta2=0.999, float eps=1e-08, "
     "float weight_decay=0.01, bool decoupled=True, bool maximize=False" +
         kRule + kScaling},
    {"elastic_round_", Kernel::kAdamRound,
     "Tensor(a!)[] xs, Tensor[] grads, Tensor(b!)[] states, T(c!) z, float alpha, *, str optimizer, "
     "float lr, Tensor step, float mu=0.0, float dampening=0.0, bool nesterov=False, "
     "bool first_step=False, float beta1=0.9, float beta2=0.999, float eps=1e-08, "
     "float weight_decay=0.0, bool maximize=False" +
         kScaling},
    {"reference_apply_", Kernel::kApply, "T(a!) z, T(b!) update, float scale, *, bool zero=True" + kCheck},
    {"trial_sgd_", Kernel::kTrialMomentum,
     "T(a!) x, T z, T grad, T? momentum, T(b!) update, *, float lr, float mu=0.0, float dampening=0.0, "
     "bool nesterov=False, float weight_decay=0.0, bool maximize=False, bool first_step=False" +
         kCheck},
    {"trial_adam_", Kernel::kTrialAdam,
     "T(a!) x, T z, T grad, T exp_avg, T exp_avg_sq, T(b!) update, *, Tensor step, float lr, "
     "float beta1=0.9, float beta2=0.999, float eps=1e-08, float weight_decay=0.0, bool decoupled=True, "
     "bool maximize=False" +
         kCheck},
    {"predict_sgd_", Kernel::kPredictSgd, "T(a!) out, T x, T momentum, float scale, *" + kCheck},
    {"predict_adam_", Kernel::kPredictAdam,
     "T(a!) out, T x, T exp_avg, T exp_avg_sq, *, float updates, Tensor step, float lr, float beta1=0.9, "
     "float beta2=0.999, float eps=1e-08, float weight_decay=0.0" +
         kCheck},
    {"correct_update_", Kernel::kCorrect,
     "T(a!) x, T before, T(b!) last, float momentum, float gain, bool first=False, *" + kCheck},
};

// ---- meaning of argument names ----------------------------------------------------------------------
template <class Value>
struct Named {
    std::string_view name;
    Value value;
};

struct Number {
    double Settings::* place;
    Demand demand;
    Optimizer optimizer = Optimizer::kNone;  // the only one that takes it
};

constexpr Named<Slot> kOperands[] = {
    {"x", Slot::kX},
    {"xs", Slot::kX},
    {"x_before", Slot::kBefore},
    {"before", Slot::kBefore},
    {"z", Slot::kZ},
    {"update", Slot::kUpdate},
    {"out", Slot::kUpdate},
    {"grad", Slot::kGrad},
    {"grads", Slot::kGrad},
    {"momentum", Slot::kFirst},
    {"last", Slot::kFirst},
    {"exp_avg", Slot::kFirst},
    {"states", Slot::kFirst},
    {"exp_avg_sq", Slot::kSecond},
};
constexpr Named<Number> kNumbers[] = {
    {"alpha", {&Settings::alpha, Demand::kFinite}},
    {"gain", {&Settings::alpha, Demand::kFinite}},
    {"from_step", {&Settings::from_step, Demand::kFinite}},
    {"from_force", {&Settings::from_force, Demand::kFinite}},
    {"scale", {&Settings::scale, Demand::kFinite}},
    {"lr", {&Settings::lr, Demand::kNotNegative}},
    {"weight_decay", {&Settings::weight_decay, Demand::kNotNegative}},
    {"updates", {&Settings::updates, Demand::kNotNegative}},
    {"momentum", {&Settings::beta1, Demand::kBelowOne}},
    {"mu", {&Settings::beta1, Demand::kNotNegative, Optimizer::kMomentum}},
    {"dampening", {&Settings::dampening, Demand::kFinite, Optimizer::kMomentum}},
    {"beta1", {&Settings::beta1, Demand::kBelowOne, Optimizer::kAdam}},
    {"beta2", {&Settings::beta2, Demand::kBelowOne, Optimizer::kAdam}},
    {"eps", {&Settings::eps, Demand::kNotNegative, Optimizer::kAdam}},
};
constexpr Named<bool Settings::*> kFlags[] = {
    {"accumulate", &Settings::accumulates},    {"zero", &Settings::zeroes},
    {"check_finite", &Settings::check_finite}, {"decoupled", &Settings::is_decoupled},
    {"nesterov", &Settings::is_nesterov},      {"maximize", &Settings::maximizes},
    {"first_step", &Settings::is_first},       {"first", &Settings::is_first},
};

template <class Table>
auto find(const Table& table, const std::string& name) {
    const auto is_it = [&](const auto& entry) { return entry.name == name; };
    const auto found = std::find_if(std::begin(table), std::end(table), is_it);
    return found == std::end(table) ? nullptr : &found->value;
}

struct Parameter {
    std::string kind, name;
    bool is_number = kind == "float";  // momentum may be one, or an operand
    const Slot* operand = is_number ? nullptr : find(kOperands, name);
    const Number* number = is_number ? find(kNumbers, name) : nullptr;
    bool Settings::* const* flag = find(kFlags, name);
};

std::vector<Parameter> parameters_of(const std::string& schema) {
    static const std::regex parameter(R"([(,] ?([A-Za-z]\S*) (\w+))");
    std::vector<Parameter> found;
    for (std::sregex_iterator at(schema.begin(), schema.end(), parameter), end; at != end; ++at)
        found.push_back({(*at)[1], (*at)[2]});
    return found;
}

// ---- a call -----------------------------------------------------------------------------------------
struct Call {
    CallSite site;
    Kernel kernel;
    Optimizer optimizer = optimizer_of(kernel);  // kMomentum: SGD, with or without
    Settings settings = {};
    std::vector<Argument> arguments = {};
    int64_t staleness = 0;
    OptionalTensor step = {}, grad_scale = {}, found_inf = {};
    std::optional<std::string> name = {};  // of a round's optimizer

    bool takes(const Number& number) const {
        return number.optimizer == Optimizer::kNone || number.optimizer == optimizer;
    }
};

// Takes over the dispatcher's arguments, without checking them: all must be taken.
void accept(Call& call, const Parameter& p, StableIValue value) {
    using torch::stable::detail::to;
    if (p.operand != nullptr) {
        Tensors tensors;
        if (p.kind.ends_with("[]")) {
            tensors = to<Tensors>(value);
        } else if (const auto tensor =
                       p.kind.ends_with("?") ? to<OptionalTensor>(value) : to<Tensor>(value)) {
            tensors.push_back(*tensor);
        }
        call.arguments.push_back({p.name.c_str(), std::move(tensors), *p.operand});
    } else if (p.number != nullptr) {
        if (call.takes(*p.number)) call.settings.*p.number->place = to<double>(value);
    } else if (p.flag != nullptr) {
        call.settings.** p.flag = to<bool>(value);
    } else if (p.name == "staleness") {
        call.staleness = to<int64_t>(value);
    } else if (p.name == "optimizer") {
        call.name = take(to<String>(value));
        const bool is_adam = *call.name == "adam" || *call.name == "adamw";
        call.optimizer = is_adam               ? Optimizer::kAdam
                         : *call.name == "sgd" ? Optimizer::kMomentum
                                               : Optimizer::kNone;
        call.settings.is_decoupled = *call.name == "adamw";
    } else if (p.name == "step") {
        call.step = to<Tensor>(value);
    } else {
        (p.name == "grad_scale" ? call.grad_scale : call.found_inf) = to<OptionalTensor>(value);
    }
}

void check_numbers(Call& call, const std::vector<Parameter>& parameters) {
    Settings& s = call.settings;
    if (call.name && call.optimizer == Optimizer::kNone)
        refuse(call.site, text("optimizer is '", *call.name, "'; pass 'sgd', 'adam' or 'adamw'"));
    for (const Parameter& p : parameters) {
        if (p.number != nullptr && call.takes(*p.number))
            check_number(call.site, p.name, s.*p.number->place, p.number->demand);
    }
    if (call.staleness != 0 && call.staleness != 1)
        refuse(call.site, text("staleness is ", call.staleness, "; pass 0 or 1"));
    s.lags = call.staleness == 1;
    s.is_decoupled |= is_prediction(call.kernel);  // other decay is in the state
    // Without momentum, the first of all steps is like one without a step before it.
    if (call.kernel == Kernel::kCorrect && s.is_first && s.beta1 == 0.0) s.alpha = 0.0;
    if (call.optimizer == Optimizer::kMomentum && s.is_nesterov && (s.beta1 == 0.0 || s.dampening != 0.0)) {
        refuse(call.site, text("nesterov with mu ", s.beta1, " and dampening ", s.dampening,
                               "; it needs a mu above 0 and no dampening"));
    }
}

// Finds the kernel by the number of states for each x: Adam has two, SGD a momentum buffer or none. A round
// has them in one list, kind after kind.
void choose_kernel(Call& call) {
    std::vector<Argument>& arguments = call.arguments;
    const auto states = std::find_if(arguments.begin(), arguments.end(),
                                     [](const Argument& argument) { return argument.slot == Slot::kFirst; });
    const size_t xs = arguments.front().tensors.size(), given = states->tensors.size();
    size_t kinds = 2;
    if (call.optimizer == Optimizer::kMomentum) {
        const double mu = call.settings.beta1;
        if (given == 0 && mu != 0.0 && xs > 0)
            refuse(call.site, text("mu is ", mu, " but there is no momentum; pass buffers like x"));
        if (given != 0 && mu == 0.0)
            refuse(call.site, text("mu is 0 but there are ", given, " momentum buffers; pass none"));
        kinds = given != 0 ? 1 : 0;
    }
    call.kernel = with_optimizer(call.kernel, static_cast<Optimizer>(1 + kinds));
    if (call.name && given != kinds * xs) {
        refuse(call.site,
               text("there are ", given, " states for ", xs, " xs; pass ", kinds, " for each: all ",
                    kinds < 2 ? "momentum buffers" : "exp_avg, then all exp_avg_sq"));
    }
    if (kinds == 0) {
        arguments.erase(states);
    } else if (call.name && kinds == 2) {
        const auto middle = states->tensors.begin() + static_cast<std::ptrdiff_t>(xs);
        Argument second{"states' exp_avg_sq", {middle, states->tensors.end()}, Slot::kSecond};
        states->tensors.erase(middle, states->tensors.end());
        states->name = "states' exp_avg";
        arguments.push_back(std::move(second));
    }
}

void read_options(Call& call, const View& first) {
    Settings& s = call.settings;
    if (call.optimizer == Optimizer::kAdam) {
        const Option step = checked_option(call.site, "step", *call.step, first, true);
        const int uncounted = uncounted_steps(call.kernel), least = 1 - uncounted;
        if (step.value && !(*step.value >= least && std::isfinite(*step.value)))
            refuse(call.site, text("step is ", *step.value, "; count steps from ", least));
        s.step_count = step.value.value_or(1.0) + uncounted;
        s.step = step.value ? nullptr : step.view.data;
        s.step_is_double = step.view.dtype == ScalarType::Double;
    }
    if (call.grad_scale) {
        const Option scale = checked_option(call.site, "grad_scale", *call.grad_scale, first, false);
        s.grad_scale = scale.value ? nullptr : static_cast<const float*>(scale.view.data);
        s.unscale = 1.0 / scale.value.value_or(1.0);
    }
    if (call.found_inf) {
        const Option found = checked_option(call.site, "found_inf", *call.found_inf, first, false);
        s.found_inf = found.value ? nullptr : static_cast<const float*>(found.view.data);
        s.skips = found.value.value_or(0.0) != 0.0;
    }
}

// The number of lost elements (int64, shape ()) with check_finite, else an int64 placeholder of shape (0,).
Tensor run(Call& call, const std::vector<Parameter>& parameters) {
    Settings& s = call.settings;
    check_numbers(call, parameters);
    if (call.optimizer != Optimizer::kNone && !is_prediction(call.kernel)) choose_kernel(call);
    size_t references = 0;
    for (Argument& argument : call.arguments) {
        argument.is_written =
            writes(call.kernel, argument.slot) && (argument.slot != Slot::kUpdate || s.zeroes);
        argument.is_shared = argument.slot == Slot::kZ && argument.is_written;
        if (argument.is_shared) references = argument.tensors.size();
    }
    std::vector<Work> works = checked_work(call.site, call.arguments, call.kernel == Kernel::kApply);
    const Tensors& first = call.arguments.front().tensors;
    Tensor lost = new_count(first, s.check_finite);
    if (first.empty()) return lost;
    require_kernel(call.site, first.front());
    const View view = view_of(first.front());
    read_options(call, view);
    for (Work& work : works) {  // without x_before, x has made no step
        if (call.kernel == Kernel::kStep && work[Slot::kBefore].data == nullptr)
            work[Slot::kBefore] = work[Slot::kX];
    }
    const auto tensors = static_cast<int64_t>(references == 0 ? works.size() : references);
    const auto replicas = static_cast<int64_t>(works.size()) / tensors;
    if (call.name) s.scale = 1.0 / static_cast<double>(replicas);
    const Job job{call.kernel, s, works.data(), tensors, replicas};
    execute(job, view, s.check_finite ? lost.data_ptr() : nullptr);
    return lost;
}

template <size_t kIndex, bool kIsList>
void kernel(StableIValue* stack, uint64_t count, uint64_t) {
    const Operator& self = kOperators[kIndex];
    static const std::vector<Parameter> parameters = parameters_of(self.schema(kIsList));
    Call call{{self.name, kIsList || is_round(self.kernel)}, self.kernel};
    for (uint64_t i = 0; i < count; ++i) accept(call, parameters[i], stack[i]);
    stack[0] = torch::stable::detail::from(run(call, parameters));
}

// ---- one buffer for many tensors --------------------------------------------------------------------
int64_t total_count(const Tensors& tensors) {
    int64_t total = 0;
    for (const Tensor& tensor : tensors) total += tensor.numel();
    return total;
}

// Copies between a buffer and the consecutive tensors in it. All have been checked.
void copy_between(const CallSite& site, const Tensor& buffer, const Tensors& tensors, bool packs) {
    const DType dtype = checked_float(site, "the buffer", buffer.scalar_type());
    std::vector<Work> works(tensors.size());
    std::vector<std::pair<Tensor, Tensor>> with_gaps;  // and their contiguous stand-ins
    auto* place = static_cast<unsigned char*>(buffer.data_ptr());
    for (size_t t = 0; t < tensors.size(); ++t) {
        const Tensor& tensor = tensors[t];
        const Tensor* whole = &tensor;
        if (!tensor.is_contiguous()) {
            whole = &with_gaps
                         .emplace_back(tensor, packs ? torch::stable::contiguous(tensor)
                                                     : torch::stable::new_empty(tensor, tensor.sizes()))
                         .second;
        }
        const Operand outside{whole->data_ptr(), checked_float(site, "tensors", tensor.scalar_type())};
        works[t][packs ? Slot::kBefore : Slot::kX] = outside;
        works[t][packs ? Slot::kX : Slot::kBefore] = {place, dtype};
        works[t].count = tensor.numel();
        place += works[t].count * size_of(dtype);
    }
    execute({Kernel::kCopy, {}, works.data(), static_cast<int64_t>(works.size())}, view_of(buffer));
    if (packs) return;
    for (auto& [tensor, whole] : with_gaps) torch::stable::copy_(tensor, whole);
}

void copy_checked(const char* operator_name, const char* buffer_name, const Tensor& buffer, Tensors given,
                  bool packs) {
    const CallSite site{operator_name, true};
    require_kernel(site, buffer);
    const Argument arguments[] = {{buffer_name, {buffer}, Slot::kX, packs},
                                  {"tensors", std::move(given), Slot::kX, !packs}};
    const Tensors& tensors = arguments[1].tensors;
    check_copies(site, arguments);
    const int64_t total = total_count(tensors);
    if (buffer.dim() != 1 || !buffer.is_contiguous() || buffer.numel() != total) {
        refuse(site, text(buffer_name, " has ", buffer.dim(), " dimensions and ", buffer.numel(),
                          " elements, the tensors together ", total,
                          "; pass a contiguous one of one dimension and as many elements"));
    }
    copy_between(site, buffer, tensors, packs);
}

Tensor pack(Tensors given, std::optional<ScalarType> dtype) {
    const CallSite site{"pack", true};
    const Argument arguments[] = {{"tensors", std::move(given), Slot::kX}};
    const Tensors& tensors = arguments[0].tensors;
    if (tensors.empty()) refuse(site, "there are no tensors; pass at least one");
    require_kernel(site, tensors.front());
    check_copies(site, arguments);
    const ScalarType packed = dtype.value_or(tensors.front().scalar_type());
    checked_float(site, "dtype", packed);
    for (const Tensor& tensor : tensors) {
        if (!dtype && tensor.scalar_type() != packed)
            refuse(site, "the tensors have several dtypes; pass dtype=");
    }
    Tensor buffer = torch::stable::new_empty(tensors.front(), {total_count(tensors)}, packed);
    copy_between(site, buffer, tensors, true);
    return buffer;
}

void pack_out(Tensors tensors, Tensor out) {
    copy_checked("pack", "out", out, std::move(tensors), true);
}

void unpack(Tensor buffer, Tensors tensors) {
    copy_checked("unpack_", "buffer", buffer, std::move(tensors), false);
}

// ---- registration -----------------------------------------------------------------------------------
template <class Library, size_t... kIndices>
void implement(Library& m, std::index_sequence<kIndices...>) {
    (m.impl(kOperators[kIndices].overload(false).c_str(), &kernel<kIndices, false>), ...);
    (m.impl(kOperators[kIndices].overload(true).c_str(), &kernel<kIndices, true>), ...);
    m.impl("pack", AVGPIPE_KERNEL(&pack));
    m.impl("pack.out", AVGPIPE_KERNEL(&pack_out));
    m.impl("unpack_", AVGPIPE_KERNEL(&unpack));
}

using Indices = std::make_index_sequence<std::size(kOperators)>;

}  // namespace
}  // namespace avgpipe

AVGPIPE_SCHEMAS(m) {
    for (const avgpipe::Operator& each : avgpipe::kOperators) {
        for (const bool is_list : {false, true}) m.def(each.schema(is_list).c_str());
    }
    m.def("pack(Tensor[] tensors, *, ScalarType? dtype=None) -> Tensor");
    m.def("pack.out(Tensor[] tensors, *, Tensor(a!) out) -> ()");
    m.def("unpack_(Tensor buffer, Tensor(a!)[] tensors) -> ()");
}

AVGPIPE_KERNELS(CPU, m) {
    avgpipe::implement(m, avgpipe::Indices());
}

#ifdef AVGPIPE_WITH_CUDA
AVGPIPE_KERNELS(CUDA, m) {
    avgpipe::implement(m, avgpipe::Indices());
}
#endif

// Called for devices without a separate kernel and for empty lists, which have no device.
AVGPIPE_KERNELS(CompositeExplicitAutograd, m) {
    avgpipe::implement(m, avgpipe::Indices());
}
