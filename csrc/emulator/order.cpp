// Who knows what: releases, acquires, groups that meet.
#include "machine.h"

namespace emulator {

// What the current thread has done and knows, for others to acquire; what it does next is not part of it.
View Machine::release(Lane& lane) {
    View published = lane.view.copy();
    published.raise(lane.component, lane.epoch++);
    return published;
}

void Machine::acquire(Lane& lane, const View& published) {
    if (published.empty() || lane.view.same(published)) return;
    if (lane.view.same(join_left_) && published.same(join_right_)) {  // the other lanes of a warp did the same
        lane.view = join_result_;
        return;
    }
    join_left_ = lane.view;
    join_right_ = published;
    if (!lane.view.includes(published)) {
        View joined = lane.view.copy();
        joined.raise(published);
        lane.view = joined;
    }
    join_result_ = lane.view;
}

// Threads that met at a barrier know all that any of them knew or did.
void Machine::order_group(Lane* const* lanes, size_t count) {
    View joined = lanes[0]->view.copy();
    const View* last = &lanes[0]->view;
    for (size_t i = 1; i < count; ++i) {
        if (lanes[i]->view.same(*last)) continue;
        last = &lanes[i]->view;
        joined.raise(*last);
    }
    for (size_t i = 0; i < count; ++i) joined.raise(lanes[i]->component, lanes[i]->epoch++);
    for (size_t i = 0; i < count; ++i) lanes[i]->view = joined;
}

}  // namespace emulator
