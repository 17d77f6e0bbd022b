#include "bindings.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "elastic/images.h"
#include "elastic/launch.h"
#include "kernel_source.h"
#include "library.h"
#include "text.h"

namespace avgpipe {
namespace {

// Kept forever: Python may be finalized when this module's own objects end.
py::handle python_launcher;

void launch_by_python(const Launch& launch, int32_t device) {
    const py::gil_scoped_acquire gil;
    try {
        const auto launcher =
            py::reinterpret_borrow<py::object>(python_launcher);  // it may be replaced meanwhile
        launcher(kernel_definition(launch.kernel),
                 py::memoryview::from_memory(const_cast<LaunchBlock*>(&launch.block), sizeof(LaunchBlock)),
                 launch.block.head.chunks, device);
    } catch (const py::error_already_set& error) {
        const std::string kind = py::str(error.type().attr("__name__"));
        throw std::runtime_error(text("avgpipe: ", kind, ": ", std::string(py::str(error.value()))));
    }
}

// The library that torch has loaded from there.
const Library& library_at(const std::string& path) {
    void* const loaded = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    void* const entry = loaded != nullptr ? dlsym(loaded, "avgpipe_library") : nullptr;
    if (entry == nullptr) {
        throw py::import_error(text(path, " is not loaded, or not of this version of avgpipe"));
    }
    return *reinterpret_cast<const Library* (*)()>(entry)();
}

py::list entries(const char* list) {
    return *list == '\0' ? py::list() : py::list(py::str(list).attr("split")(","));
}

py::dict build_info(const std::string& path) {
    const Library& library = library_at(path);
    py::dict facts;
    facts["version"] = library.version;
    facts["torch"] = library.torch;
    facts["cpu_features"] = entries(library.cpu_features);
    facts["cuda"] = *library.cuda_arch_list != '\0';
    facts["cuda_arch_list"] = entries(library.cuda_arch_list);
    return facts;
}

void set_launcher(const std::string& path, const py::object& launcher, bool for_all) {
    library_at(path).set_launcher(launcher.is_none() ? nullptr : launch_by_python, for_all);
    std::exchange(python_launcher, launcher.inc_ref()).dec_ref();
}

}  // namespace
}  // namespace avgpipe

// See avgpipe_ext/_native.pyi for what each function does.
PYBIND11_MODULE(_native, module) {
    module.doc() = "Compiled code of avgpipe that is no tensor operator; it needs no torch.";
    avgpipe::simulate::bind(module);
    avgpipe::transfer::bind(module);
    module.def("build_info", avgpipe::build_info, py::arg("path"));
    module.def(
        "cpu_path", [](const std::string& path) { return avgpipe::library_at(path).cpu_path; },
        py::arg("path"));
    module.def("set_launcher", avgpipe::set_launcher, py::arg("path"), py::arg("launcher").none(true),
               py::arg("for_all"));
    module.def("images_serve", avgpipe::images_serve, py::arg("images"), py::arg("major"), py::arg("minor"));
    module.attr("KERNEL_SOURCE") = avgpipe::kKernelSource;
    module.attr("KERNEL_THREADS") = avgpipe::kThreads;
    py::list definitions;
    for (int kernel = 0; kernel < avgpipe::kernel_count(); ++kernel)
        definitions.append(avgpipe::kernel_definition(kernel));
    module.attr("KERNEL_DEFINITIONS") = py::tuple(definitions);
    module.def("grid_size", avgpipe::grid_size, py::arg("chunks"), py::arg("processors"));
}
