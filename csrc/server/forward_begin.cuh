// The beginning of a target's forward inside the server's own graph: rows and slots out of its attention backend's
// metadata.
#pragma once
#include "indices.cuh"

namespace server {

// table: page numbers, or slots where a page is one.
DEVICE int32_t slot_of(const Indices& table, int page_size, int position) {
    if (page_size == 1) return static_cast<int32_t>(at(table, position));
    return static_cast<int32_t>(at(table, position / page_size) * page_size + position % page_size);
}

// Whatever lies behind the committed positions and the step's rows is not read and not copied.
DEVICE void copy_table(const ForwardBegin& p, const Indices& table, int32_t* pages, int committed) {
    int end = smaller(committed + cfg::ROW_CAP, p.positions_held);
    if (end > static_cast<int64_t>(table.count) * p.page_size) end = table.count * p.page_size;
    for (int position = index(); position < end; position += TOTAL_THREADS) {
        global_store(pages + position, slot_of(table, p.page_size, position));
    }
}

// The window's slots alone: the first one belongs to position total - packed.
DEVICE void copy_window(const ForwardBegin& p) {
    const int64_t packed = at(p.window_ends, 1) - at(p.window_ends, 0);
    const int64_t first = at(p.ends, 1) - at(p.ends, 0) - packed;
    int count = smaller(p.window, p.sliding_table.count);
    if (count > packed) count = static_cast<int>(packed);
    for (int place = index(); place < count && first + place < p.positions_held; place += TOTAL_THREADS) {
        global_store(p.sliding_pages + first + place, static_cast<int32_t>(at(p.sliding_table, place)));
    }
}

DEVICE void begin_forward(const ForwardBegin& p) {
    open();
    const int committed = static_cast<int>(at(p.row_positions, 0));
    copy_table(p, p.full_table, p.full_pages, committed);
    if (present(p.window_ends)) {
        copy_window(p);
    } else if (present(p.sliding_table)) {
        copy_table(p, p.sliding_table, p.sliding_pages, committed);
    }
    const int row = thread_index();
    if (cta_index() != 0 || row >= p.rows) return;
    global_store(p.token_ids + row, at(p.ids, row));
    global_store(p.positions + row, at(p.row_positions, row));
    global_store(p.full_slots + row, at(p.row_slots, row));
    if (present(p.row_sliding_slots)) global_store(p.sliding_slots + row, at(p.row_sliding_slots, row));
    if (row == 0) global_store(p.length, committed);
}

}  // namespace server
