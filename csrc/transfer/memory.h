// Anonymous memory that several processes of one host map. It has no name in any file system, so nothing can
// be left behind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace avgpipe::transfer {

// An error of the system, with its error number.
struct SystemError : std::runtime_error {
    SystemError(int number, const std::string& what) : std::runtime_error(what), error(number) {}
    int error;
};

// There is not enough memory.
struct NoMemory : std::bad_alloc {
    explicit NoMemory(std::string message) : what_(std::move(message)) {}
    const char* what() const noexcept override { return what_.c_str(); }

  private:
    std::string what_;
};

// Owns a mapping, and the file of a memory made here until close_file(). An empty one has data() == nullptr.
class Memory {
  public:
    // Both throw the errors above. create: every page is allocated and stays, so a full memory is an error
    // now and no signal later; the memory is zero. open: EINVAL if the file is shorter than `bytes`, or may
    // shrink.
    static Memory create(int64_t bytes);
    static Memory open(const std::string& path, int64_t bytes);

    Memory() = default;
    Memory(Memory&& other) noexcept { swap(other); }
    Memory& operator=(Memory&& other) noexcept {
        Memory old(std::move(*this));
        swap(other);
        return *this;
    }
    ~Memory();

    std::byte* data() const { return data_; }
    int64_t bytes() const { return bytes_; }
    int file() const { return file_; }  // -1 when closed
    const std::string& path() const {
        return path_;
    }  // where others open it, as long as the file is open here
    void close_file();

  private:
    void swap(Memory& other) {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        std::swap(file_, other.file_);
        std::swap(path_, other.path_);
    }
    bool map(int64_t bytes);

    std::byte* data_ = nullptr;
    int64_t bytes_ = 0;
    int file_ = -1;
    std::string path_;
};

}  // namespace avgpipe::transfer
