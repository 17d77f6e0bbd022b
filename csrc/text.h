#pragma once

#include <sstream>
#include <string>

namespace avgpipe {

// All parts, printed one after another.
template <class... Parts>
std::string text(const Parts&... parts) {
    std::ostringstream stream;
    (stream << ... << parts);
    return stream.str();
}

}  // namespace avgpipe
