#include "bindings.h"

PYBIND11_MODULE(_native, module) {
    module.doc() = "Compiled code of avgpipe that is no tensor operator; it needs no torch.";
    avgpipe::simulate::bind(module);
    avgpipe::transfer::bind(module);
}
