#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>
#include <map>
#include <vector>

#include "executor.h"

namespace simulated {
namespace {

struct Chain;

// The state of a chain after some of its links. It is known once they have run; until then it is a promise.
struct Snapshot {
    std::shared_ptr<Chain> chain;
    uint64_t links;
    at::Generator state = {};
};

struct Chain {
    uint64_t seed = 0;
    at::Generator numbers = {};
    std::shared_ptr<Snapshot> origin = nullptr;  // whose numbers it goes on with
    uint64_t issued = 0, executed = 0;
    std::vector<std::shared_ptr<Snapshot>> snapshots = {};

    // All links up to here have run, and no other one.
    void keep_snapshots() {
        for (const auto& snapshot : snapshots) {
            if (snapshot->links == executed && !snapshot->state.defined()) snapshot->state = numbers.clone();
        }
        std::erase_if(snapshots, [](const auto& snapshot) { return snapshot->state.defined(); });
    }

    void begin() {
        if (numbers.defined()) return;
        Chain& before = *origin->chain;
        before.begin();
        before.keep_snapshots();
        TORCH_CHECK(origin->state.defined(), "a generator goes on from a state that is not reached yet");
        numbers = origin->state.clone();
    }

    at::Generator link(uint64_t index) {
        TORCH_CHECK(index == executed, "operators that draw from one generator run out of order: number ",
                    index, " of a seed after ", executed, "; order their streams");
        begin();
        keep_snapshots();
        ++executed;
        return numbers;
    }
};

// States that somebody holds as a tensor, by number: a state may not be known when it is asked for.
std::map<int64_t, std::shared_ptr<Snapshot>>& states() {
    static auto* const held = new std::map<int64_t, std::shared_ptr<Snapshot>>();
    return *held;
}

class Generator final : public c10::GeneratorImpl {
  public:
    explicit Generator(c10::DeviceIndex device)
        : GeneratorImpl({c10::DeviceType::PrivateUse1, device},
                        c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {
        set_current_seed(c10::detail::getNonDeterministicRandom());
    }

    static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

    void set_current_seed(uint64_t seed) override {
        chain_ = std::make_shared<Chain>(Chain{seed, at::make_generator<at::CPUGeneratorImpl>(seed)});
    }
    uint64_t current_seed() const override { return chain_->seed; }
    uint64_t seed() override {
        set_current_seed(c10::detail::getNonDeterministicRandom());
        return current_seed();
    }
    void set_offset(uint64_t) override {
        TORCH_CHECK(false, "the numbers are the CPU's, which have no offset");
    }
    uint64_t get_offset() const override {
        TORCH_CHECK(false, "the numbers are the CPU's, which have no offset");
    }

    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        const int64_t number = static_cast<int64_t>(states().size());
        auto snapshot = std::make_shared<Snapshot>(Snapshot{chain_, chain_->issued});
        chain_->snapshots.push_back(snapshot);
        states()[number] = std::move(snapshot);
        const at::Tensor told = at::empty({sizeof(number)}, at::TensorOptions().dtype(at::kByte));
        std::memcpy(told.mutable_data_ptr(), &number, sizeof(number));
        return told.getIntrusivePtr();
    }

    void set_state(const c10::TensorImpl& state) override {
        int64_t number = -1;
        TORCH_CHECK(state.is_cpu() && state.numel() == sizeof(number) && state.itemsize() == 1,
                    "this is no state of a simulated device's generator");
        std::memcpy(&number, state.data(), sizeof(number));
        const auto found = states().find(number);
        TORCH_CHECK(found != states().end(), "a state of another simulation");
        chain_ = following(found->second);
    }

    Generator* clone_impl() const override {
        auto* const other = new Generator(device_.index());
        auto snapshot = std::make_shared<Snapshot>(Snapshot{chain_, chain_->issued});
        chain_->snapshots.push_back(snapshot);
        other->chain_ = following(snapshot);
        return other;
    }

    const std::shared_ptr<Chain>& chain() const { return chain_; }

  private:
    static std::shared_ptr<Chain> following(const std::shared_ptr<Snapshot>& snapshot) {
        auto next = std::make_shared<Chain>();
        next->seed = snapshot->chain->seed;
        next->origin = snapshot;
        return next;
    }

    std::shared_ptr<Chain> chain_;
};

}  // namespace

std::function<at::Generator()> next_draw(const at::Generator& generator) {
    auto* const found = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
    TORCH_CHECK(found != nullptr, "expected a generator of the simulated device, not one of ",
                generator.device());
    const std::lock_guard lock(found->mutex_);
    return [chain = found->chain(), index = found->chain()->issued++] { return chain->link(index); };
}

const at::Generator& default_generator(c10::DeviceIndex device) {
    static auto* const all = [] {
        auto* const made = new std::vector<at::Generator>();
        for (c10::DeviceIndex device = 0; device < kDevices; ++device) made->push_back(new_generator(device));
        return made;
    }();
    return all->at(device < 0 ? 0 : device);
}

at::Generator new_generator(c10::DeviceIndex device) {
    at::Generator made = at::make_generator<Generator>(device < 0 ? 0 : device);
    made.set_current_seed(c10::default_rng_seed_val);
    return made;
}

void reset_generators() {
    states().clear();
    for (c10::DeviceIndex device = 0; device < kDevices; ++device)
        at::Generator(default_generator(device)).set_current_seed(c10::default_rng_seed_val);
}

}  // namespace simulated
