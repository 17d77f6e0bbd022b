#include "transfer/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <limits>

#include "text.h"

namespace avgpipe::transfer {
namespace {

constexpr int64_t kLarge = int64_t{16} << 20;

// What can be had without pushing anything out, from /proc/meminfo; the largest number if that cannot be
// read.
int64_t available_bytes() {
    int64_t available = std::numeric_limits<int64_t>::max();
    if (std::FILE* facts = std::fopen("/proc/meminfo", "re")) {
        char line[256];
        long long kib = 0;
        while (std::fgets(line, sizeof line, facts) != nullptr) {
            if (std::sscanf(line, "MemAvailable: %lld kB", &kib) == 1) available = kib * 1024;
        }
        std::fclose(facts);
    }
    return available;
}

int new_file() {
#ifdef MFD_NOEXEC_SEAL
    // Some systems refuse memory that could be executed; kernels before 6.3 do not know the word.
    const int file = memfd_create("avgpipe", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (file >= 0 || errno != EINVAL) return file;
#endif
    return memfd_create("avgpipe", MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

// Of its size for ever: a page beyond a shorter end would kill whoever reads it, by SIGBUS.
bool seal(int file) {
    return fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0;
}

bool is_sealed(int file) {
    const int seals = fcntl(file, F_GET_SEALS);
    return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

bool allocate(int file, int64_t bytes) {
    int status = 0;
    do {
        status = fallocate(file, 0, 0, bytes);
    } while (status != 0 && errno == EINTR);
    return status == 0;
}

}  // namespace

Memory Memory::create(int64_t bytes) {
    if (bytes <= 0) {
        errno = EINVAL;
        return {};
    }
    // The kernel would take all there is and then kill a process.
    if (bytes >= kLarge && bytes > available_bytes()) {
        errno = ENOMEM;
        return {};
    }
    Memory memory;
    memory.file_ = new_file();
    if (memory.file_ < 0 || !allocate(memory.file_, bytes) || !seal(memory.file_) || !memory.map(bytes))
        return {};
    memory.path_ = text("/proc/", getpid(), "/fd/", memory.file_);
    return memory;
}

Memory Memory::open(const std::string& path, int64_t bytes) {
    Memory memory;
    memory.path_ = path;
    memory.file_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (memory.file_ < 0) return {};
    const bool keeps_its_size = is_sealed(memory.file_);  // asked before the size
    struct stat facts = {};
    if (fstat(memory.file_, &facts) != 0) return {};
    if (bytes <= 0 || !S_ISREG(facts.st_mode) || !keeps_its_size || facts.st_size < bytes) {
        errno = EINVAL;
        return {};
    }
    if (!memory.map(bytes)) return {};
    memory.close_file();
    return memory;
}

// Populated: a page fault costs more than copying the page.
bool Memory::map(int64_t bytes) {
    void* const data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_POPULATE, file_, 0);
    if (data == MAP_FAILED) return false;
    data_ = static_cast<std::byte*>(data);
    bytes_ = bytes;
    return true;
}

void Memory::close_file() {
    const int error = errno;
    if (file_ >= 0) ::close(std::exchange(file_, -1));
    errno = error;
}

Memory::~Memory() {
    const int error = errno;
    if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
    errno = error;
    close_file();
}

}  // namespace avgpipe::transfer
