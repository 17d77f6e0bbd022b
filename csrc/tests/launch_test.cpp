// The launches of a job, walked on the host: every element of every tensor once, with the operands of the
// job.
#include "elastic/launch.h"

#include <cstdio>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "elastic/images.h"
#include "library.h"

namespace {

using namespace avgpipe;

int failures = 0;

void expect(bool condition, const char* what, long long seen, long long wanted) {
    if (condition || ++failures > 20) return;
    std::fprintf(stderr, "%s: got %lld, want %lld\n", what, seen, wanted);
}

// A job on addresses that are never read: operand `slot` of tensor t and replica r begins at a unique number.
struct Example {
    std::vector<Work> works;
    Job job;

    Example(Kernel kernel, const std::vector<int64_t>& counts, int64_t replicas = 1,
            DType dtype = DType::kFloat32) {
        const auto tensors = static_cast<int64_t>(counts.size());
        for (int64_t r = 0; r < replicas; ++r) {
            for (int64_t t = 0; t < tensors; ++t) {
                Work work;
                work.count = counts[t];
                for (int slot = 0; slot < kSlots; ++slot) {
                    const bool is_shared = static_cast<Slot>(slot) == Slot::kZ;
                    const int64_t index = (is_shared ? 0 : r) * tensors * kSlots + t * kSlots + slot;
                    if (uses(kernel, static_cast<Slot>(slot)))
                        work.operands[slot] = {reinterpret_cast<void*>((index + 1) << 32), dtype};
                }
                works.push_back(work);
            }
        }
        job.kernel = kernel;
        job.works = works.data();
        job.tensors = tensors;
        job.replicas = replicas;
    }
};

// The content of a launch for one tensor.
struct Seen {
    int kernel;
    int64_t count, chunks;
    bool is_aligned;
    std::vector<std::vector<Operand>> operands;  // [replica][slot]
};

Seen read_tensor(const Launch& launch, const Job& job, int64_t tensor) {
    const BlockHead& head = launch.block.head;
    const uint64_t* words = launch.block.words + tensor * words_of_tensor(job.kernel, head.replicas);
    const int64_t before =
        tensor == 0 ? 0 : static_cast<int64_t>((words - words_of_tensor(job.kernel, head.replicas))[1]);
    Seen seen{launch.kernel,
              static_cast<int64_t>(words[0]),
              static_cast<int64_t>(words[1]) - before,
              (words[kTensorWords] & kAlignedFlag) != 0,
              {}};
    for (int32_t r = 0; r < head.replicas; ++r) {
        const uint64_t* flags = words + kTensorWords + r * (1 + pointer_words(job.kernel));
        seen.operands.emplace_back(kSlots);
        for (int slot = 0; slot < kSlots; ++slot) {
            if (!uses(job.kernel, static_cast<Slot>(slot))) continue;
            const uint64_t address = flags[1 + pointer_index(job.kernel, static_cast<Slot>(slot))];
            seen.operands[r][slot] = {reinterpret_cast<void*>(address),
                                      static_cast<DType>(*flags >> (kDTypeBits * slot) & 15)};
        }
    }
    return seen;
}

// By the address of the first operand used, which no two tensors share.
std::map<void*, Seen> walk(const Job& job, int64_t* launches) {
    std::map<void*, Seen> all;
    *launches = 0;
    for_each_launch(job, nullptr, [&](const Launch& launch) {
        ++*launches;
        const BlockHead& head = launch.block.head;
        expect(head.tensors > 0, "tensors of a launch", head.tensors, 1);
        expect(head.replicas == job.replicas, "replicas", head.replicas, job.replicas);
        const int64_t words = head.tensors * words_of_tensor(job.kernel, job.replicas);
        expect(words <= kBlockWords, "words", words, kBlockWords);
        int64_t chunks = 0;
        for (int32_t t = 0; t < head.tensors; ++t) {
            const Seen seen = read_tensor(launch, job, t);
            chunks += seen.chunks;
            const Slot key = job.kernel == Kernel::kApply ? Slot::kZ : Slot::kX;
            const bool is_new = all.emplace(seen.operands[0][static_cast<int>(key)].data, seen).second;
            expect(is_new, "tensor seen again", t, -1);
        }
        expect(chunks == head.chunks, "chunks", head.chunks, chunks);
    });
    return all;
}

void check(const Job& job, int64_t most_launches) {
    int64_t launches = 0;
    const std::map<void*, Seen> all = walk(job, &launches);
    expect(launches <= most_launches, "launches", launches, most_launches);
    int64_t wanted = 0;
    for (int64_t t = 0; t < job.tensors; ++t) {
        const Work& first = job.work(t, 0);
        if (first.count == 0) continue;
        ++wanted;
        const auto found = all.find(first[job.kernel == Kernel::kApply ? Slot::kZ : Slot::kX].data);
        expect(found != all.end(), "tensor left out", t, t);
        if (found == all.end()) continue;
        const Seen& seen = found->second;
        expect(seen.count == first.count, "count", seen.count, first.count);
        expect(seen.chunks == (first.count + kChunk - 1) / kChunk, "chunks of a tensor", seen.chunks,
               first.count);
        bool is_aligned = true;
        for (int64_t r = 0; r < job.replicas; ++r) {
            for (int slot = 0; slot < kSlots; ++slot) {
                const Operand& want = job.work(t, r).operands[slot];
                if (!uses(job.kernel, static_cast<Slot>(slot))) continue;
                const Operand& got = seen.operands[r][slot];
                expect(got.data == want.data, "address", reinterpret_cast<intptr_t>(got.data),
                       reinterpret_cast<intptr_t>(want.data));
                expect(got.dtype == want.dtype, "dtype", static_cast<int>(got.dtype),
                       static_cast<int>(want.dtype));
                is_aligned &= reinterpret_cast<uintptr_t>(want.data) % 16 == 0;
            }
        }
        expect(seen.is_aligned == is_aligned, "alignment", seen.is_aligned, is_aligned);
    }
    expect(static_cast<int64_t>(all.size()) == wanted, "tensors", static_cast<long long>(all.size()), wanted);
}

void test_lists_of_any_length() {
    for (int kernel = 0; kernel <= static_cast<int>(Kernel::kCopy); ++kernel) {
        check(Example(static_cast<Kernel>(kernel), {}).job, 0);
        check(Example(static_cast<Kernel>(kernel), {0, 0}).job, 0);
        check(Example(static_cast<Kernel>(kernel), {1}).job, 1);
        check(Example(static_cast<Kernel>(kernel), {(int64_t{1} << 33) + 5}).job, 1);
        check(Example(static_cast<Kernel>(kernel), {kChunk, 0, kChunk + 1, kChunk - 1, 0}).job, 1);
        check(Example(static_cast<Kernel>(kernel), std::vector<int64_t>(400, 62500)).job, 2);
        check(Example(static_cast<Kernel>(kernel), std::vector<int64_t>(5000, 3)).job, 30);
    }
}

void test_replicas() {
    for (const Kernel kernel :
         {Kernel::kApply, Kernel::kSgdRound, Kernel::kMomentumRound, Kernel::kAdamRound}) {
        check(Example(kernel, {5, 0, 10000}, 2).job, 1);
        check(Example(kernel, std::vector<int64_t>(400, 100), 8).job, 12);
        check(Example(kernel, {7, 8}, 300).job, 2);
    }
}

void test_more_replicas_than_fit_are_refused_before_any_launch() {
    const Example example(Kernel::kAdamRound, {7, 8}, 1000);
    int launches = 0;
    bool is_refused = false;
    try {
        for_each_launch(example.job, nullptr, [&](const Launch&) { ++launches; });
    } catch (const std::invalid_argument&) {
        is_refused = true;
    }
    expect(is_refused && launches == 0, "launches of a refused job", launches, 0);
}

void test_misaligned_tensors_are_marked() {
    Example example(Kernel::kAdam, {100, 100, 100});
    Operand& grad = example.works[1][Slot::kGrad];
    grad.data = static_cast<unsigned char*>(grad.data) + 4;
    check(example.job, 1);
    Example round(Kernel::kAdamRound, {100, 100}, 3);
    Operand& weights = round.works[2 * 2 + 1][Slot::kX];  // tensor 1 of the last replica
    weights.data = static_cast<unsigned char*>(weights.data) + 8;
    check(round.job, 1);
}

void test_each_tensor_gets_the_kernel_of_its_dtypes() {
    Example example(Kernel::kCopy, {5, 6, 7, 8});
    const DType dtypes[4][2] = {{DType::kFloat32, DType::kFloat32},
                                {DType::kFloat64, DType::kFloat64},
                                {DType::kFloat16, DType::kFloat32},
                                {DType::kBFloat16, DType::kFloat64}};
    for (int t = 0; t < 4; ++t) {
        example.works[t][Slot::kX].dtype = dtypes[t][0];
        example.works[t][Slot::kBefore].dtype = dtypes[t][1];
    }
    check(example.job, 4);
    int64_t launches = 0;
    for (const auto& [address, seen] : walk(example.job, &launches)) {
        const int wanted = kernel_count() - 4 + static_cast<int>(seen.count - 5);
        expect(seen.kernel == wanted, "kernel", seen.kernel, wanted);
    }
}

// The arguments that a launcher set from outside received.
std::vector<int64_t> outside_numbers;

void record(const Launch& launch, int32_t device) {
    outside_numbers = {launch.kernel, launch.block.head.tensors, launch.block.head.chunks, device};
    if (device == 7) throw std::runtime_error("device 7 is lost");
}

void test_a_launcher_from_outside_is_told_all_and_its_failure_is_thrown() {
    const Example example(Kernel::kAdam, {kChunk + 1, 5});
    std::string failure, definition;
    for_each_launch(example.job, nullptr, [&](const Launch& launch) {
        definition = kernel_definition(launch.kernel);
        expect(outside_launcher(false) == nullptr, "launcher before any was set", 1, 0);
        avgpipe_library()->set_launcher(record, false);
        expect(outside_launcher(true) == nullptr, "launcher of a device with an image", 1, 0);
        outside_launcher(false)(launch, 3);
        expect(outside_numbers == std::vector<int64_t>{launch.kernel, 2, 3, 3}, "numbers", 0, 1);
        try {
            avgpipe_library()->set_launcher(record, true);
            outside_launcher(true)(launch, 7);
        } catch (const std::runtime_error& error) {
            failure = error.what();
        }
        avgpipe_library()->set_launcher(nullptr, true);
        expect(outside_launcher(true) == nullptr, "launcher after it was removed", 1, 0);
    });
    expect(definition == "adam_float, kAdam, float, false", "definition", 0, 1);
    expect(failure == "device 7 is lost", "message", 0, 1);
}

void test_machine_code_serves_its_major_version_and_ptx_all_later_ones() {
    const std::string_view list = "7.5,8.0,9.0a,10.0,12.0+PTX";
    const int served[] = {75, 80, 86, 89, 90, 100, 103, 120, 121, 130, 210};
    for (const int device : served) expect(images_serve(list, device / 10, device % 10), "served", device, 1);
    for (const int device : {70, 72, 60, 91, 110, 20})
        expect(!images_serve(list, device / 10, device % 10), "served", device, 0);
    expect(!images_serve("", 9, 0), "served by no images", 90, 0);
    expect(images_serve("8.6", 8, 9) && !images_serve("8.6", 8, 0), "later minor versions only", 86, 80);
}

void test_grid_size() {
    expect(grid_size(1, 132) == 1, "blocks of one chunk", grid_size(1, 132), 1);
    expect(grid_size(1 << 30, 132) == 132 * 32, "blocks of many chunks", grid_size(1 << 30, 132), 132 * 32);
}

}  // namespace

int main() {
    test_lists_of_any_length();
    test_replicas();
    test_more_replicas_than_fit_are_refused_before_any_launch();
    test_misaligned_tensors_are_marked();
    test_each_tensor_gets_the_kernel_of_its_dtypes();
    test_a_launcher_from_outside_is_told_all_and_its_failure_is_thrown();
    test_machine_code_serves_its_major_version_and_ptx_all_later_ones();
    test_grid_size();
    if (failures == 0) std::puts("launch_test: every element once, operands and kernels as the job has them");
    return failures == 0 ? 0 : 1;
}
