// A device's random numbers: those that the CPU's generator gives for the same seed.
//
// What an operator draws is settled when it is issued: a seed begins a chain, and an operator is a link of
// the chain that its generator has then. The chain's numbers are drawn when the links run, which they must do
// in order.
#pragma once

#include <ATen/core/Generator.h>

#include <functional>
#include <memory>

namespace simulated {

// Takes a place in the chain of a generator of a simulated device. Called when the operator runs, it returns
// the CPU's generator to draw from, and throws if an earlier link has not run.
std::function<at::Generator()> next_draw(const at::Generator& generator);

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// Back to the default seed, after Executor::reset.
void reset_generators();

}  // namespace simulated
