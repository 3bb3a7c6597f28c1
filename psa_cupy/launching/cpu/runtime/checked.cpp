// Checked builds. The compiler instruments every load and store as for its thread sanitizer, and every cast,
// index and division as for its undefined-behaviour sanitizer; both arrive here instead of in their
// libraries.
//
// For every two bytes of an operand or of shared memory a cell remembers the last write and the reads since
// then: when, by which thread, and where in the kernel. An access is a race unless a barrier, __syncwarp or
// the program order of one thread lies between it and what the cell remembers. (Two bytes: no kernel type is
// smaller.)
//
// Time is a counter of block barriers over the launch. What happened before the block's first moment was done
// by another block, and nothing orders two blocks of a launch.

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace cuda_on_cpu {

namespace {

// Who accessed: a thread's index, or one of these where several threads read (or added atomically) unordered.
constexpr uint16_t SEVERAL_LANES = 0x8000;  // of the warp in the low bits
constexpr uint16_t SEVERAL_WARPS = 0xffff;

struct Mark {
    uint32_t time;  // of the block barriers; 0: never
    uint32_t site;  // in the kernel's library
    uint16_t who;
    uint16_t syncs;  // how often its warp had passed __syncwarp since the barrier
};

constexpr size_t CELL_BYTES = 2;

}  // namespace

struct Cell {
    Mark write;            // the last plain store
    Mark added, read;      // the atomic functions and the reads since then
    uint32_t copy_time;    // like a mark's time
    uint16_t copying;      // a thread's index + 1: its asynchronous copy to here is under way
    bool added_elsewhere;  // also by a block before the one of `added`
    bool read_elsewhere;   // also by a block before the one of `read`
};

namespace {

Region* last_region;  // most accesses go where the last one went

size_t cell_count(const Region& region) { return (region.bytes + CELL_BYTES - 1) / CELL_BYTES; }

Region* find_region(const char* address) {
    if (last_region && last_region->holds(address)) return last_region;
    for (auto* regions : {&launch.shared, &launch.operands}) {
        for (Region& region : *regions) {
            if (region.holds(address)) return last_region = &region;
        }
    }
    return nullptr;
}

bool by_another_block(const Mark& mark) { return mark.time && mark.time < block.first_clock; }

// Whether this access comes after the marked one for sure.
bool is_ordered(const Mark& mark, const Fiber* fiber) {
    if (mark.time == 0) return true;
    if (by_another_block(mark)) return false;
    if (mark.time < block.clock || mark.who == fiber->index) return true;
    if (mark.who == SEVERAL_WARPS) return false;
    const bool several = mark.who & SEVERAL_LANES;
    const unsigned warp_index = several ? mark.who & ~SEVERAL_LANES : mark.who / WARP;
    if (warp_index != fiber->index / WARP) return false;
    // Of several lanes it is not known which they were: their sync is taken to be with all of them.
    const unsigned lane = several ? fiber->lane : mark.who % WARP;
    return block.warps[warp_index].known[fiber->lane][lane] > mark.syncs;
}

Mark mark_of(const Fiber* fiber, uint32_t site) {
    return {block.clock, site, (uint16_t)fiber->index, warp_of(fiber).syncs};
}

// Adds an access to those that a later write must come after. An ordered one stands for all before it.
void add(Mark& mark, const Fiber* fiber, uint32_t site) {
    Mark added = mark_of(fiber, site);
    if (!by_another_block(mark) && !is_ordered(mark, fiber)) {
        const uint16_t warp_index = fiber->index / WARP;
        const bool same_warp =
            mark.who != SEVERAL_WARPS && (mark.who & SEVERAL_LANES ? (mark.who & ~SEVERAL_LANES) == warp_index
                                                                   : mark.who / WARP == warp_index);
        added.who = same_warp ? SEVERAL_LANES | warp_index : SEVERAL_WARPS;
    }
    mark = added;
}

std::string describe_author(const Mark& mark) {
    std::string author;
    if (by_another_block(mark))
        author = "another block";
    else if (mark.who == SEVERAL_WARPS)
        author = "threads of several warps";
    else if (mark.who & SEVERAL_LANES)
        author = "lanes of warp " + std::to_string(mark.who & ~SEVERAL_LANES);
    else
        author = describe(&block.fibers[mark.who]);
    return author + " " + place(reinterpret_cast<const void*>(launch.module_begin + mark.site));
}

struct Accessing {
    const char* address;
    const Region& region;
    const Fiber* fiber;
    uint32_t site;
};

[[noreturn]] void report(const std::string& what, const Accessing& at, const Mark* other = nullptr) {
    std::string text = what + ": " + element(at.region, at.address) + ", by " + describe(at.fiber) + " " +
                       place(reinterpret_cast<const void*>(launch.module_begin + at.site));
    if (other) text += ", after " + describe_author(*other);
    give_up(text);
}

void forget_other_blocks(Cell& cell) {
    for (Mark* mark : {&cell.write, &cell.added, &cell.read}) {
        if (mark->time < block.first_clock) mark->time = 0;
    }
    if (cell.copy_time < block.first_clock) cell.copying = 0;
}

void check_not_copying(const Cell& cell, const char* what, const Accessing& at) {
    if (!cell.copying) return;
    report(std::string("race: ") + what + " the target of an asynchronous copy before the wait for it (" +
               describe(&block.fibers[cell.copying - 1]) + " began it)",
           at);
}

void check_after(const Mark& mark, bool elsewhere, const char* what, const char* did, const Accessing& at) {
    const bool between_blocks = elsewhere || by_another_block(mark);
    if (!between_blocks && is_ordered(mark, at.fiber)) return;
    report((between_blocks ? "race between blocks: " : "race: ") + std::string(what) + " what another " +
               (between_blocks ? "block of the launch " : "thread ") + did +
               (between_blocks ? "" : ", with no barrier between"),
           at, &mark);
}

void check_after_write(const Cell& cell, const char* what, const Accessing& at) {
    check_after(cell.write, false, what, "wrote", at);
}

void check_after_atomics(const Cell& cell, const char* what, const Accessing& at) {
    check_after(cell.added, cell.added_elsewhere, what, "changed by an atomic function", at);
}

void check_after_reads(const Cell& cell, const char* what, const Accessing& at) {
    check_after(cell.read, cell.read_elsewhere, what, "read", at);
}

void on_read(Cell& cell, const Accessing& at) {
    check_not_copying(cell, "read of", at);
    if (at.region.shared && !cell.write.time)
        report("read of shared memory that this block has not written", at);
    check_after_write(cell, "read of", at);
    check_after_atomics(cell, "read of", at);
    if (by_another_block(cell.read)) cell.read_elsewhere = true;
    add(cell.read, at.fiber, at.site);
}

void on_write(Cell& cell, const Accessing& at) {
    check_not_copying(cell, "write to", at);
    check_after_write(cell, "write over", at);
    check_after_atomics(cell, "write over", at);
    check_after_reads(cell, "write over", at);
    cell.write = mark_of(at.fiber, at.site);
    cell.added.time = cell.read.time = 0;
}

void on_atomic(Cell& cell, const Accessing& at) {
    check_not_copying(cell, "atomic function on", at);
    if (at.region.shared && !cell.write.time)
        report("atomic function on shared memory that this block has not written", at);
    check_after_write(cell, "atomic function on", at);
    check_after_reads(cell, "atomic function on", at);
    if (by_another_block(cell.added)) cell.added_elsewhere = true;
    add(cell.added, at.fiber, at.site);
}

// The copy writes some time between here and the wait, so whoever used these bytes must be done with them.
void on_copy_begin(Cell& cell, const Accessing& at) {
    check_not_copying(cell, "second asynchronous copy to", at);
    check_after_write(cell, "asynchronous copy over", at);
    check_after_atomics(cell, "asynchronous copy over", at);
    check_after_reads(cell, "asynchronous copy over", at);
    cell.read.time = 0;
    cell.copy_time = block.clock;
    cell.copying = (uint16_t)(at.fiber->index + 1);
}

void on_copy_end(Cell& cell, const Accessing& at) {
    cell.copying = 0;
    on_write(cell, at);
}

// Whether the cell already holds all that this access would check and note: most do. A write, an atomic
// function or a copy since then would have taken the mark away or been a race.
bool is_repeated(const Cell& cell, Access access, const Fiber* fiber) {
    const uint16_t self = fiber->index, syncs = warp_of(fiber).syncs;
    if (access == Access::read) {
        const Mark& mark = cell.read;
        return mark.time == block.clock &&
               (mark.who == SEVERAL_WARPS || (mark.who == self && mark.syncs == syncs));
    }
    const Mark& mark = cell.write;
    return access == Access::write && mark.time == block.clock && mark.who == self && mark.syncs == syncs &&
           !cell.read.time && !cell.added.time && !cell.copying;
}

void check_cell(Cell& cell, Access access, const Accessing& at) {
    if (is_repeated(cell, access, at.fiber)) return;
    if (at.region.shared) forget_other_blocks(cell);
    switch (access) {
        case Access::read:
            return on_read(cell, at);
        case Access::write:
            return on_write(cell, at);
        case Access::atomic:
            return on_atomic(cell, at);
        case Access::copy_begin:
            return on_copy_begin(cell, at);
        case Access::copy_end:
            return on_copy_end(cell, at);
    }
}

template <class Object>
bool lies_in(const char* address, const Object& object) {
    const char* begin = reinterpret_cast<const char*>(&object);
    return address >= begin && address < begin + sizeof object;
}

// Instrumented code also touches a thread's own variables, what the runtime shows it, and constants.
bool is_no_array(const char* address, const Fiber* fiber) {
    const uintptr_t number = reinterpret_cast<uintptr_t>(address);
    return (address >= fiber->stack && address < fiber->stack + STACK_BYTES) || lies_in(address, block) ||
           lies_in(address, current_grid) || lies_in(address, current_thread) ||
           (number >= launch.module_begin && number < launch.module_end);
}

const Region* nearest_region(const char* address) {
    for (auto* regions : {&launch.operands, &launch.shared}) {
        for (const Region& region : *regions) {
            if (in_guard_pages(region, address)) return &region;
        }
    }
    return nullptr;
}

void check(const char* address, size_t bytes, Access access, const void* return_address) {
    if (!current_thread) return;
    const Fiber* fiber = current_fiber();
    if (address >= fiber->stack && address < fiber->stack + STACK_BYTES) return;
    Region* region = find_region(address);
    if (!region && is_no_array(address, fiber)) return;
    const uint32_t site = (uint32_t)(reinterpret_cast<uintptr_t>(return_address) - 1 - launch.module_begin);
    const char* word = access == Access::read ? "read" : "write";
    if (!region) {
        if (const Region* nearest = nearest_region(address)) {
            report(std::string(word) + " out of bounds", {address, *nearest, fiber, site});
        }
        give_up(std::string(word) + " out of bounds: an address near no array, by " + describe(fiber) + " " +
                place_of_call(return_address));
    }
    const char* end = region->base + region->bytes;
    if (address + bytes > end) report(std::string(word) + " out of bounds", {end, *region, fiber, site});
    const size_t first = (address - region->base) / CELL_BYTES,
                 last = (address + bytes - 1 - region->base) / CELL_BYTES;
    for (size_t i = first; i <= last; i++) {
        check_cell(region->cells[i], access, {region->base + i * CELL_BYTES, *region, fiber, site});
    }
}

}  // namespace

void begin_watching(Region& region) {
    region.cells = static_cast<Cell*>(calloc(cell_count(region) + 1, sizeof(Cell)));
    if (!region.cells) give_up(std::string("no memory left to watch ") + region.name);
    last_region = nullptr;
}

void end_watching(Region& region) {
    free(region.cells);
    last_region = nullptr;
}

void barrier_passed() {
    block.clock++;
    for (unsigned w = 0; w < block.warp_count; w++) {
        block.warps[w].syncs = 0;
        memset(block.warps[w].known, 0, sizeof block.warps[w].known);
    }
}

void begin_block_watching() {
    barrier_passed();
    block.first_clock = block.clock;
}

void warp_sync_passed(Warp& warp, unsigned mask) {
    warp.syncs++;
    uint16_t together[WARP] = {};
    for (unsigned lanes = mask; lanes; lanes &= lanes - 1) {
        const unsigned lane = __builtin_ctz(lanes);
        warp.known[lane][lane] = warp.syncs;
        for (unsigned i = 0; i < WARP; i++)
            together[i] = std::max(together[i], warp.known[lane][i]);
    }
    for (unsigned lanes = mask; lanes; lanes &= lanes - 1) {
        memcpy(warp.known[__builtin_ctz(lanes)], together, sizeof together);
    }
}

void watch(const void* address, size_t bytes, Access access) {
    if (!current_thread) return;
    const void* caller = __builtin_return_address(0);
    check(static_cast<const char*>(address), bytes, access,
          in_kernel(caller) ? caller : current_fiber()->site);
}

}  // namespace cuda_on_cpu

// ---- The thread sanitizer's calls.

using cuda_on_cpu::Access;

#define EXPORT extern "C" __attribute__((visibility("default")))
#define WATCH(BYTES, ACCESS) \
    cuda_on_cpu::check(static_cast<const char*>(address), BYTES, ACCESS, __builtin_return_address(0))
#define LOADS_AND_STORES(BYTES)                                                             \
    EXPORT void __tsan_read##BYTES(void* address) { WATCH(BYTES, Access::read); }           \
    EXPORT void __tsan_write##BYTES(void* address) { WATCH(BYTES, Access::write); }         \
    EXPORT void __tsan_unaligned_read##BYTES(void* address) { WATCH(BYTES, Access::read); } \
    EXPORT void __tsan_unaligned_write##BYTES(void* address) { WATCH(BYTES, Access::write); }
LOADS_AND_STORES(1)
LOADS_AND_STORES(2)
LOADS_AND_STORES(4)
LOADS_AND_STORES(8)
LOADS_AND_STORES(16)
EXPORT void __tsan_read_range(void* address, size_t bytes) { WATCH(bytes, Access::read); }
EXPORT void __tsan_write_range(void* address, size_t bytes) { WATCH(bytes, Access::write); }
EXPORT void __tsan_init() {}
EXPORT void __tsan_func_entry(void*) {}
EXPORT void __tsan_func_exit() {}

// ---- The undefined-behaviour sanitizer's calls.

namespace {

// The compiler's description of a cast or access, as far as it is read here.
struct TypeMismatch {
    struct {
        const char* file;
        uint32_t line, column;
    } source;
    const void* type;
    unsigned char log2_alignment;
    unsigned char kind;
};

[[noreturn]] void report_undefined(const std::string& what, const void* return_address) {
    const auto* fiber = cuda_on_cpu::current_fiber();
    cuda_on_cpu::give_up(what + ", by " + cuda_on_cpu::describe(fiber) + " " +
                         cuda_on_cpu::place_of_call(return_address));
}

}  // namespace

EXPORT void __ubsan_handle_type_mismatch_v1(const TypeMismatch* data, const char* address) {
    if (!address) report_undefined("access through a null pointer", __builtin_return_address(0));
    std::string where = "an address";
    if (const cuda_on_cpu::Region* region = cuda_on_cpu::nearest_region(address))
        where = element(*region, address);
    report_undefined("misaligned access: " + where + ", as a type that needs " +
                         std::to_string(1u << data->log2_alignment) + " bytes of alignment",
                     __builtin_return_address(0));
}
EXPORT void __ubsan_handle_out_of_bounds(const void*, size_t index) {
    report_undefined("index " + std::to_string((long)index) + " out of an array's bounds",
                     __builtin_return_address(0));
}
EXPORT void __ubsan_handle_divrem_overflow(const void*, size_t, size_t) {
    report_undefined("integer division by zero", __builtin_return_address(0));
}
EXPORT void __ubsan_handle_shift_out_of_bounds(const void*, size_t, size_t) {
    report_undefined("shift by more bits than the type has", __builtin_return_address(0));
}
