#include "transfer/ring.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <thread>

#include "tests/check.h"

int main() {
    return avgpipe::tests::report();
}
