#include "bindings.h"

#include <exception>
#include <memory>
#include <string>

#include "text.h"
#include "transfer/copy.h"
#include "transfer/ring.h"

namespace avgpipe::transfer {
namespace {

// For smaller copies, releasing the GIL would take longer than the copy.
constexpr size_t kSmall = size_t{64} << 10;

// ---- memory -----------------------------------------------------------------------------------------------
// A type whose objects are writable buffers: data() of bytes(). Without pybind11's own description of a
// buffer, which would be allocated for each message.
template <class T>
py::custom_type_setup as_buffer() {
    return py::custom_type_setup([](PyHeapTypeObject* type) {
        type->ht_type.tp_as_buffer = &type->as_buffer;
        type->as_buffer.bf_getbuffer = [](PyObject* self, Py_buffer* view, int flags) {
            try {
                const T& memory = py::cast<const T&>(py::handle(self));
                return PyBuffer_FillInfo(view, self, memory.data(), memory.bytes(), 0, flags);
            } catch (const std::exception& error) {
                PyErr_SetString(PyExc_BufferError, error.what());
                return -1;
            }
        };
    });
}

// A part of a memory at an offset, which keeps the memory alive.
template <class T>
std::shared_ptr<T> at(const std::shared_ptr<Memory>& memory, int64_t offset, const char* what) {
    const auto size = static_cast<int64_t>(sizeof(T));
    if (offset < 0 || offset % static_cast<int64_t>(kCacheLine) != 0 || offset + size > memory->bytes()) {
        throw py::value_error(text(what, " at offset ", offset, " of ", memory->bytes(),
                                   " bytes: use a multiple of ", kCacheLine, " with ", size,
                                   " bytes behind it"));
    }
    return {memory, reinterpret_cast<T*>(memory->data() + offset)};
}

// ---- both ends --------------------------------------------------------------------------------------------
// The GIL is released only to make or map memory: releasing it takes longer than the rest.
int64_t reserve(Sender& sender, int64_t bytes) {
    std::byte* slot = sender.reserve(bytes, false);
    if (slot == nullptr) {
        const py::gil_scoped_release others_may_run;
        slot = sender.reserve(bytes, true);
    }
    return reinterpret_cast<int64_t>(slot);
}

void publish(Sender& sender, int64_t bytes, int64_t a, int64_t b, int64_t c, int64_t d) {
    sender.publish(bytes, {a, b, c, d});
}

py::object take(Receiver& receiver) {
    Message message = {};
    Taken taken = receiver.take(message, false);
    if (taken == Taken::kNothing) return py::none();
    if (taken == Taken::kUnmapped) {
        const py::gil_scoped_release others_may_run;
        taken = receiver.take(message, true);
    }
    const int64_t* const words = message.words;
    return py::make_tuple(message.bytes, words[0], words[1], words[2], words[3], std::move(message.lease));
}

void copy_bytes(int64_t destination, int64_t source, int64_t bytes, bool past_caches) {
    const auto run = [=] {
        const int64_t stream_from = past_caches ? 0 : kStreamFrom;
        copy(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source), bytes, stream_from);
    };
    if (static_cast<size_t>(bytes) <= kSmall) return run();
    const py::gil_scoped_release others_may_run;
    run();
}

void translate(std::exception_ptr thrown) {
    try {
        std::rethrow_exception(thrown);
    } catch (const SystemError& refused) {  // OSError, or the subclass of it for the number
        PyErr_SetObject(PyExc_OSError, py::make_tuple(refused.error, refused.what()).ptr());
    } catch (const Full& full) {
        PyErr_SetString(PyExc_BufferError, full.what());
    }
}

}  // namespace

// See avgpipe_ext/_native.pyi for what each function does.
void bind(py::module_& module) {
    py::register_local_exception_translator(translate);
    const auto without_gil = py::release_gil_before_calling_cpp_dtor();
    py::class_<Memory, std::shared_ptr<Memory>>(module, "Memory", as_buffer<Memory>(), without_gil)
        .def_static("create", &Memory::create, py::arg("bytes"), py::call_guard<py::gil_scoped_release>())
        .def_static("open", &Memory::open, py::arg("path"), py::arg("bytes"),
                    py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("address", [](const Memory& m) { return reinterpret_cast<int64_t>(m.data()); })
        .def_property_readonly("bytes", &Memory::bytes)
        .def_property_readonly("path", &Memory::path)
        .def("close_file", &Memory::close_file);

    py::class_<Bell, std::shared_ptr<Bell>> bell(module, "Bell");
    bell.def(py::init([](const std::shared_ptr<Memory>& m, int64_t offset) {
                 return at<Bell>(m, offset, "a bell");
             }),
             py::arg("memory"), py::arg("offset"))
        .def_static("local", [] { return std::make_shared<Bell>(); })
        .def("count", &Bell::count)
        .def("ring", &Bell::ring)
        .def("wait", &Bell::wait, py::arg("seen"), py::arg("timeout_s"), py::arg("spin_s") = 0.0,
             py::call_guard<py::gil_scoped_release>());
    bell.attr("BYTES") = sizeof(Bell);

    py::class_<Sender> sender(module, "Sender", without_gil);
    sender
        .def(py::init(
                 [](const std::shared_ptr<Memory>& memory, int64_t offset, std::shared_ptr<Bell> own_bell) {
                     return std::make_unique<Sender>(at<Ring>(memory, offset, "a ring"), std::move(own_bell));
                 }),
             py::arg("memory"), py::arg("offset"), py::arg("bell"))
        .def("reserve", reserve, py::arg("bytes"))
        .def("publish", publish, py::arg("bytes"), py::arg("a"), py::arg("b"), py::arg("c"), py::arg("d"))
        .def("waiting", &Sender::waiting)
        .def("lent", &Sender::lent)
        .def("slots", [](const Sender& s) { return py::make_tuple(s.slots(), s.slot_bytes()); });
    sender.attr("RING_BYTES") = sizeof(Ring);

    py::class_<Lease>(module, "Lease", as_buffer<Lease>()).def("__len__", &Lease::bytes);
    py::class_<Receiver>(module, "Receiver", without_gil)
        .def(py::init([](const std::shared_ptr<Memory>& memory, int64_t offset, int64_t sender_pid) {
                 return std::make_unique<Receiver>(at<Ring>(memory, offset, "a ring"), sender_pid);
             }),
             py::arg("memory"), py::arg("offset"), py::arg("sender_pid"))
        .def("take", take);

    module.def("copy", copy_bytes, py::arg("destination"), py::arg("source"), py::arg("bytes"),
               py::arg("past_caches") = false);
}

}  // namespace avgpipe::transfer
