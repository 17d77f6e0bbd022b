#include "bindings.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>

#include "text.h"
#include "transfer/copy.h"
#include "transfer/ring.h"

namespace avgpipe::transfer {
namespace {

// Of less, giving up the GIL would take longer than the copy.
constexpr size_t kSmall = size_t{64} << 10;

[[noreturn]] void raise(PyObject* kind, const std::string& message) {
    PyErr_SetString(kind, message.c_str());
    throw py::error_already_set();
}

// OSError, or the subclass of it that is for `error`.
[[noreturn]] void raise_os_error(int error, const std::string& message) {
    PyErr_SetObject(PyExc_OSError, py::make_tuple(error, message).ptr());
    throw py::error_already_set();
}

[[noreturn]] void raise_no_memory(int64_t bytes, int error) {
    const std::string what = text("no ", bytes, " bytes of shared memory");
    const char* const reason = std::strerror(error);
    if (error == ENOMEM || error == ENOSPC || error == EFBIG) {
        raise(PyExc_MemoryError,
              text(what, " (", reason,
                   "): use smaller or fewer micro-batches, or raise the memory or file size "
                   "limit (ulimit -f)"));
    }
    const char* const way_out = error == EMFILE ? "; raise the limit of open files (ulimit -n)" : "";
    raise_os_error(error, text(what, ": ", reason, way_out));
}

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

std::shared_ptr<Memory> create_memory(int64_t bytes) {
    if (bytes <= 0) throw py::value_error(text("a memory of ", bytes, " bytes: use at least 1"));
    Memory memory;
    int error = 0;
    {
        const py::gil_scoped_release others_may_run;
        memory = Memory::create(bytes);
        error = errno;
    }
    if (memory.data() == nullptr) raise_no_memory(bytes, error);
    return std::make_shared<Memory>(std::move(memory));
}

std::shared_ptr<Memory> open_memory(const std::string& path, int64_t bytes) {
    Memory memory;
    int error = 0;
    {
        const py::gil_scoped_release others_may_run;
        memory = Memory::open(path, bytes);
        error = errno;
    }
    if (memory.data() == nullptr) {
        PyErr_SetObject(PyExc_OSError, py::make_tuple(error, std::strerror(error), path).ptr());
        throw py::error_already_set();
    }
    return std::make_shared<Memory>(std::move(memory));
}

// What lies at an offset of a memory, and keeps it.
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
int64_t reserve(Sender& sender, int64_t bytes) {
    if (bytes <= 0) {
        throw py::value_error(
            text("a slot of ", bytes, " bytes: use at least 1, or publish 0 bytes without a slot"));
    }
    std::byte* slot = sender.reserve(bytes, false);
    int error = errno;
    if (slot == nullptr && error == EAGAIN) {
        const py::gil_scoped_release others_may_run;
        slot = sender.reserve(bytes, true);
        error = errno;
    }
    if (slot != nullptr) return reinterpret_cast<int64_t>(slot);
    if (error != ENOBUFS) raise_no_memory(bytes, error);
    raise(PyExc_BufferError,
          text("all ", kSlots,
               " slots are lent: the receiver keeps tensors of that many messages, or takes none; "
               "copy what is to be kept"));
}

void publish(Sender& sender, int64_t bytes, int64_t a, int64_t b, int64_t c, int64_t d) {
    const int error = sender.publish(bytes, {a, b, c, d});
    if (error == EAGAIN) {
        raise(PyExc_BufferError, "the queue is full: the receiver takes no messages; try again later");
    }
    if (error != 0)
        throw py::value_error(text(bytes, " bytes to publish: reserve a slot of that many first"));
}

py::object take(Receiver& receiver) {
    Message message = {};
    Taken taken = receiver.take(message, false);
    if (taken == Taken::kNothing) return py::none();
    int error = 0;
    if (taken == Taken::kUnmapped) {
        const py::gil_scoped_release others_may_run;
        taken = receiver.take(message, true);
        error = errno;
    }
    const Record& record = receiver.record();
    if (taken == Taken::kFailed) {
        raise_os_error(error, text("slot ", record.slot, " of ", record.capacity,
                                   " bytes cannot be mapped: ", std::strerror(error)));
    }
    if (taken != Taken::kMessage) {
        throw std::runtime_error(text("a broken ring: its next message has ", record.bytes, " bytes in slot ",
                                      record.slot, " of ", record.capacity,
                                      " bytes; do both processes run the same version of avgpipe?"));
    }
    const int64_t* const words = message.words;
    return py::make_tuple(message.bytes, words[0], words[1], words[2], words[3], std::move(message.lease));
}

void copy_bytes(int64_t destination, int64_t source, int64_t bytes) {
    const auto run = [=] {
        copy(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source),
             static_cast<size_t>(bytes));
    };
    if (static_cast<size_t>(bytes) <= kSmall) return run();
    const py::gil_scoped_release others_may_run;
    run();
}

double echo_messages(Sender& sender, Receiver& receiver, Bell& bell, int64_t rounds, int64_t bytes,
                     double spin_s, double timeout_s, bool is_first) {
    if (rounds < 1 || bytes < 1) {
        throw py::value_error(text(rounds, " rounds of ", bytes, " bytes: use at least 1 of both"));
    }
    double seconds = 0;
    int error = 0;
    {
        const py::gil_scoped_release others_may_run;
        seconds = echo(sender, receiver, bell, {rounds, bytes, spin_s, timeout_s, is_first});
        error = errno;
    }
    if (seconds < 0) {
        raise_os_error(error,
                       text("echo of ", rounds, " rounds of ", bytes, " bytes: ", std::strerror(error)));
    }
    return seconds / (2.0 * static_cast<double>(rounds));
}

}  // namespace

// What each does is told in avgpipe_ext/_native.pyi.
void bind(py::module_& module) {
    const auto without_gil = py::release_gil_before_calling_cpp_dtor();
    py::class_<Memory, std::shared_ptr<Memory>>(module, "Memory", as_buffer<Memory>(), without_gil)
        .def_static("create", create_memory, py::arg("bytes"))
        .def_static("open", open_memory, py::arg("path"), py::arg("bytes"))
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
        .def("slots", [](const Sender& s) { return py::make_tuple(s.slots(), s.slot_bytes()); });
    sender.attr("RING_BYTES") = sizeof(Ring);

    py::class_<Lease>(module, "Lease", as_buffer<Lease>()).def("__len__", &Lease::bytes);
    py::class_<Receiver>(module, "Receiver", without_gil)
        .def(py::init([](const std::shared_ptr<Memory>& memory, int64_t offset, int64_t sender_pid) {
                 return std::make_unique<Receiver>(at<Ring>(memory, offset, "a ring"), sender_pid);
             }),
             py::arg("memory"), py::arg("offset"), py::arg("sender_pid"))
        .def("take", take);

    module.def("copy", copy_bytes, py::arg("destination"), py::arg("source"), py::arg("bytes"));
    module.def("echo", echo_messages, py::arg("sender"), py::arg("receiver"), py::arg("bell"), py::kw_only(),
               py::arg("rounds"), py::arg("bytes"), py::arg("spin_s") = 0.0, py::arg("timeout_s") = 60.0,
               py::arg("is_first") = false);
}

}  // namespace avgpipe::transfer
