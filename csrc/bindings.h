// Python bindings of everything other than tensor operators: the module avgpipe_ext._native, which loads
// without torch. Each part binds itself.
#pragma once

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace avgpipe {

namespace simulate {
void bind(py::module_& module);
}
namespace transfer {
void bind(py::module_& module);
}

}  // namespace avgpipe
