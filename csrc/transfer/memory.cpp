#include "transfer/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>

#include "text.h"

namespace avgpipe::transfer {
namespace {

constexpr int64_t kLarge = int64_t{16} << 20;

// Memory available without evicting anything, from /proc/meminfo; the largest number if that cannot be read.
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
    // Some systems refuse executable memory; kernels before 6.3 do not know the flag.
    const int file = memfd_create("avgpipe", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (file >= 0 || errno != EINVAL) return file;
#endif
    return memfd_create("avgpipe", MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

// The size is final: a page beyond a shorter end would kill the reader, by SIGBUS.
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

[[noreturn]] void refuse(int64_t bytes, int error) {
    const std::string what = text("no ", bytes, " bytes of shared memory");
    const char* const reason = std::strerror(error);
    if (error == ENOMEM || error == ENOSPC || error == EFBIG) {
        throw NoMemory(text(
            what, " (", reason,
            "): use smaller or fewer micro-batches, or raise the memory or file size limit (ulimit -f)"));
    }
    const char* const way_out = error == EMFILE ? "; raise the limit of open files (ulimit -n)" : "";
    throw SystemError(error, text(what, ": ", reason, way_out));
}

[[noreturn]] void refuse(const std::string& path, int error) {
    throw SystemError(error, text(std::strerror(error), ": '", path, "'"));
}

}  // namespace

Memory Memory::create(int64_t bytes) {
    if (bytes <= 0) throw std::invalid_argument(text("a memory of ", bytes, " bytes: use at least 1"));
    // The kernel would grant all memory and then kill a process.
    if (bytes >= kLarge && bytes > available_bytes()) refuse(bytes, ENOMEM);
    Memory memory;
    memory.file_ = new_file();
    if (memory.file_ < 0 || !allocate(memory.file_, bytes) || !seal(memory.file_) || !memory.map(bytes)) {
        refuse(bytes, errno);
    }
    memory.path_ = text("/proc/", getpid(), "/fd/", memory.file_);
    return memory;
}

Memory Memory::open(const std::string& path, int64_t bytes) {
    Memory memory;
    memory.path_ = path;
    memory.file_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
    const bool keeps_its_size = memory.file_ >= 0 && is_sealed(memory.file_);  // checked before the size
    struct stat facts = {};
    if (memory.file_ < 0 || fstat(memory.file_, &facts) != 0) refuse(path, errno);
    if (bytes <= 0 || !S_ISREG(facts.st_mode) || !keeps_its_size || facts.st_size < bytes)
        refuse(path, EINVAL);
    if (!memory.map(bytes)) refuse(path, errno);
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
    if (file_ >= 0) ::close(std::exchange(file_, -1));
}

Memory::~Memory() {
    if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
    close_file();
}

}  // namespace avgpipe::transfer
