#include "simulate/events.h"
#include "simulate/fixed_order.h"
#include "simulate/question.h"

namespace avgpipe::simulate {

void simulate(const Question& q, Answer& answer) {
    const bool is_alone = q.pipelines == 1 || q.batches == 1;
    if (is_alone && q.shared_channels == 0 && !q.has_replicas()) {
        FixedOrder(q, answer).run();
    } else if (q.slots == 1) {
        Events<OneSlot>(q, answer).run();
    } else {
        Events<Slots>(q, answer).run();
    }
}

}  // namespace avgpipe::simulate
