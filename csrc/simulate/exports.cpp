// Called by avgpipe/simulation/native.py through ctypes.
#include "simulate/simulate.h"

#define AVGPIPE_EXPORT extern "C" __attribute__((visibility("default")))

namespace s = avgpipe::simulate;

// Changes whenever the structs do: a library of another checkout is refused by its number.
AVGPIPE_EXPORT int32_t avgpipe_simulate_layout() {
    return 1;
}

AVGPIPE_EXPORT int32_t avgpipe_simulate(const s::Question* question, s::Answer* answer) {
    return static_cast<int32_t>(s::simulate(*question, *answer));
}
