#include "simulate/question.h"

#include <new>
#include <stdexcept>

#include "simulate/events.h"
#include "simulate/fixed_order.h"

namespace avgpipe::simulate {

namespace {

Status run(const Question& q, Answer& answer) {
    const bool is_alone = q.pipelines == 1 || q.batches == 1;
    if (is_alone && q.shared_channels == 0 && !q.has_replicas()) return FixedOrder(q, answer).run();
    if (q.slots == 1) return Events<OneSlot>(q, answer).run();
    return Events<Slots>(q, answer).run();
}

}  // namespace

Status simulate(const Question& q, Answer& answer) {
    try {
        return run(q, answer);
    } catch (const std::bad_alloc&) {
        return Status::kNoMemory;
    } catch (const std::length_error&) {  // more than any memory
        return Status::kNoMemory;
    }
}

}  // namespace avgpipe::simulate
