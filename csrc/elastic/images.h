// Which devices the machine code of a build serves.
#pragma once

#include <charconv>
#include <string_view>

namespace avgpipe {

// Whether an entry of TORCH_CUDA_ARCH_LIST ("8.0", "9.0a", "12.0+PTX") serves a device of this compute
// capability. Machine code runs on its own and later minor versions (with a on its own alone), PTX on all
// later ones.
inline bool image_serves(std::string_view entry, int major, int minor) {
    int of_major = 0, of_minor = 0;
    const char* const end = entry.data() + entry.size();
    const char* const point = std::from_chars(entry.data(), end, of_major).ptr;
    if (point == end) return false;
    const char* const after = std::from_chars(point + 1, end, of_minor).ptr;
    const char suffix = after == end ? '\0' : *after;
    if (suffix == 'a') return major == of_major && minor == of_minor;
    if (major == of_major) return minor >= of_minor;
    return suffix == '+' && major > of_major;
}

// The same of a list, with commas between its entries.
inline bool images_serve(std::string_view list, int major, int minor) {
    while (!list.empty()) {
        const size_t length = list.find(',');
        if (image_serves(list.substr(0, length), major, minor)) return true;
        list.remove_prefix(length == std::string_view::npos ? list.size() : length + 1);
    }
    return false;
}

}  // namespace avgpipe
