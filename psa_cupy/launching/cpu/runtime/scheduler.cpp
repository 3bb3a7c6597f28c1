// Launches: blocks one after the other, a block's threads in turn, each until it must wait for others.
//
// The order is fixed (thread 0 first), so a launch gives the same bits every time.

#include <cstring>
#include <dlfcn.h>
#include <link.h>

#include "state.h"

namespace cuda_on_cpu {

Thread* current_thread;
Grid current_grid;
Launch launch;
Block block;

#if defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)
__asm__(
    ".text\n"
    ".globl cuda_on_cpu_switch\n"
    ".type cuda_on_cpu_switch, @function\n"
    "cuda_on_cpu_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  popq %rcx\n"
    "  jmpq *%rcx\n"  // not ret: the processor's prediction of returns would be wrong each time
    ".size cuda_on_cpu_switch, .-cuda_on_cpu_switch\n");
#endif

// What Python hands over: see launch.py, which holds the same structures.
struct OperandRequest {
    const char* name;
    char* base;
    size_t bytes, element_bytes;
};
struct LaunchRequest {
    void (*entry)(void**);
    void** arguments;
    unsigned grid[3], block[3];
    size_t dynamic_shared_bytes;
    const OperandRequest* operands;
    size_t operand_count;
    int checked;
};

namespace {

constexpr unsigned lanes_from(unsigned lane) { return lane >= WARP ? 0 : ~0u << lane; }

Fiber* first_ready(unsigned warp, unsigned lanes) {
    const unsigned ready = block.warps[warp].ready & lanes;
    return ready ? &block.fibers[warp * WARP + __builtin_ctz(ready)] : nullptr;
}

// The next thread that can go on: later lanes of this warp, then the other warps in turn, then earlier lanes.
Fiber* next_ready(const Fiber* after) {
    const unsigned warp = after->index / WARP;
    if (Fiber* fiber = first_ready(warp, lanes_from(after->lane + 1))) return fiber;
    for (unsigned step = 1; step <= block.warp_count; step++) {
        const unsigned other = warp + step < block.warp_count ? warp + step : warp + step - block.warp_count;
        if (Fiber* fiber = first_ready(other, ~0u)) return fiber;
    }
    return nullptr;
}

[[noreturn]] void report_deadlock() {
    unsigned at_barrier = 0, finished = 0;
    const Fiber *waiting = nullptr, *elsewhere = nullptr, *gone = nullptr;
    for (unsigned i = 0; i < block.threads; i++) {
        const Fiber& fiber = block.fibers[i];
        if (fiber.state == State::at_block_barrier) at_barrier++, waiting = waiting ? waiting : &fiber;
        if (fiber.state == State::at_warp_meeting) elsewhere = elsewhere ? elsewhere : &fiber;
        if (fiber.state == State::finished) finished++, gone = gone ? gone : &fiber;
    }
    std::string report;
    if (waiting) {
        report = "barrier divergence: " + std::to_string(at_barrier) + " of " +
                 std::to_string(block.threads) + " threads wait at the barrier " +
                 place_of_call(waiting->site);
    } else {
        char mask[16];
        snprintf(mask, sizeof mask, "%08x", elsewhere->mask);
        report = "warp divergence: " + describe(elsewhere) + " waits for the lanes " + mask +
                 " of its warp " + place_of_call(elsewhere->site);
    }
    if (waiting && elsewhere) {
        report += "; " + describe(elsewhere) + " waits for its warp " + place_of_call(elsewhere->site);
    }
    if (finished) {
        report += "; " + std::to_string(finished) + " have finished, the first is " + describe(gone);
    }
    give_up(report);
}

[[noreturn]] void report_two_barriers(const Fiber* fiber) {
    give_up("barrier divergence: " + describe(fiber) + " is at the barrier " + place_of_call(fiber->site) +
            ", while " + std::to_string(block.arrived) + " threads wait at the one " +
            place_of_call(block.barrier_site));
}

[[noreturn]] void report_two_meetings(const Fiber* fiber, const Fiber* other) {
    char masks[80];
    snprintf(masks, sizeof masks, " (mask %08x) meets lane %u (mask %08x) ", fiber->mask, other->lane,
             other->mask);
    give_up("warp divergence: " + describe(fiber) + " " + place_of_call(fiber->site) + masks +
            place_of_call(other->site));
}

// Leaves this thread for the next one; returns when it is this thread's turn again.
void wait_for_turn() {
    Fiber* self = current_fiber();
    Fiber* next = next_ready(self);
    if (!next) {
        if (block.unfinished) report_deadlock();
        switch_context(self->context, block.scheduler);
    }
    if (next == self) return;
    current_thread = next;
    switch_context(self->context, next->context);
}

void open_block_barrier(Vote vote) {
    int result = 0;
    if (vote != Vote::none) {
        int yes = 0;
        for (unsigned i = 0; i < block.threads; i++)
            yes += block.fibers[i].vote;
        result = vote == Vote::count ? yes : vote == Vote::all ? yes == (int)block.threads : yes > 0;
    }
    for (unsigned i = 0; i < block.threads; i++) {
        block.fibers[i].state = State::ready;
        block.fibers[i].vote = result;
    }
    for (unsigned w = 0; w < block.warp_count; w++)
        block.warps[w].ready = block.warps[w].running;
    block.arrived = 0;
    if (launch.checked) barrier_passed();
}

// The last lane of a mask has come.
void open_warp_meeting(const Fiber* last) {
    Warp& warp = warp_of(last);
    Fiber* first = &block.fibers[last->index - last->lane];
    for (unsigned lanes = last->mask; lanes; lanes &= lanes - 1) {
        const Fiber& other = first[__builtin_ctz(lanes)];
        if (other.mask != last->mask || other.compute != last->compute) report_two_meetings(last, &other);
    }
    if (last->compute) {
        last->compute(warp.inputs, warp.outputs, last->mask);
    } else if (launch.checked) {
        warp_sync_passed(warp, last->mask);
    }
    for (unsigned lanes = last->mask; lanes; lanes &= lanes - 1)
        first[__builtin_ctz(lanes)].state = State::ready;
    warp.waiting &= ~last->mask;
    warp.ready |= last->mask;
}

void run_thread() {
    launch.entry(launch.arguments);
    Fiber* fiber = current_fiber();
    fiber->state = State::finished;
    block.unfinished--;
    Warp& warp = warp_of(fiber);
    warp.running &= ~(1u << fiber->lane);
    warp.ready &= ~(1u << fiber->lane);
    wait_for_turn();
}

void prepare_threads(const dim3& shape) {
    block.threads = shape.x * shape.y * shape.z;
    block.warp_count = (block.threads + WARP - 1) / WARP;
    for (unsigned i = 0; i < block.threads; i++) {
        Fiber& fiber = block.fibers[i];
        if (!fiber.stack) fiber.stack = allocate_stack();
        fiber.index = i;
        fiber.lane = i % WARP;
        fiber.thread = make_uint3(i % shape.x, i / shape.x % shape.y, i / shape.x / shape.y);
        fiber.input = warp_of(&fiber).inputs[fiber.lane];
        fiber.output = warp_of(&fiber).outputs[fiber.lane];
    }
}

void prepare_block(long number, const dim3& grid) {
    block.number = number;
    for (unsigned w = 0; w < block.warp_count; w++) {
        Warp& warp = block.warps[w];
        const unsigned lanes = block.threads - w * WARP;
        warp.existing = warp.running = warp.ready = lanes >= WARP ? ~0u : (1u << lanes) - 1;
        warp.waiting = 0;
    }
    const unsigned x = number % grid.x, y = number / grid.x % grid.y, z = number / grid.x / grid.y;
    for (unsigned i = 0; i < block.threads; i++) {
        Fiber& fiber = block.fibers[i];
        fiber.block = make_uint3(x, y, z);
        fiber.state = State::ready;
        fiber.site = reinterpret_cast<const char*>(launch.entry) + 1;
        // Stacks that all began at the same offset of a page would share the same few lines of the cache.
        make_context(fiber.context, fiber.stack, STACK_BYTES - i * 13 % 32 * 128, run_thread);
    }
    block.unfinished = block.threads;
    block.arrived = 0;
    for (Region& region : launch.shared)
        poison(region);
    if (launch.checked) begin_block_watching();
}

void check_padding(const std::vector<Region>& regions) {
    for (const Region& region : regions) {
        if (padding_is_intact(region)) continue;
        give_up(std::string("write out of bounds, just before or after ") + region.name + ", in block " +
                std::to_string(block.number) + " (run it with checked=True to see where)");
    }
}

void run_blocks(const Grid& grid) {
    prepare_threads(grid.block);
    const long blocks = (long)grid.grid.x * grid.grid.y * grid.grid.z;
    for (long number = 0; number < blocks; number++) {
        prepare_block(number, grid.grid);
        current_thread = &block.fibers[0];
        switch_context(block.scheduler, block.fibers[0].context);
        current_thread = nullptr;
        abandon_copies();
        check_padding(launch.shared);
    }
    check_padding(launch.operands);
}

void take_operands(const LaunchRequest& request) {
    for (size_t i = 0; i < request.operand_count; i++) {
        const OperandRequest& operand = request.operands[i];
        launch.operands.push_back(
            {operand.base, operand.bytes, operand.element_bytes, operand.name, false, nullptr, nullptr});
        if (launch.checked) begin_watching(launch.operands.back());
    }
}

int find_module(dl_phdr_info* info, size_t, void*) {
    const uintptr_t entry = reinterpret_cast<uintptr_t>(launch.entry);
    uintptr_t end = 0;
    bool found = false;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto& segment = info->dlpi_phdr[i];
        if (segment.p_type != PT_LOAD) continue;
        const uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
        found |= entry >= begin && entry < begin + segment.p_memsz;
        end = begin + segment.p_memsz > end ? begin + segment.p_memsz : end;
    }
    if (found) launch.module_begin = info->dlpi_addr, launch.module_end = end;
    return found;
}

}  // namespace

int block_meet(Vote vote, int value, int line) {
    Fiber* fiber = current_fiber();
    CUDA_ON_CPU_NOTE_SITE();
    fiber->vote = value;
    if (block.arrived == 0) {
        block.barrier_line = line;
        block.barrier_site = fiber->site;
    } else if (block.barrier_line != line) {
        report_two_barriers(fiber);
    }
    fiber->state = State::at_block_barrier;
    warp_of(fiber).ready &= ~(1u << fiber->lane);
    // A thread that has finished never arrives: CUDA leaves undefined what a barrier then does.
    if (++block.arrived == block.threads) {
        open_block_barrier(vote);
    } else {
        wait_for_turn();
    }
    return fiber->vote;
}

void warp_meet(unsigned mask, WarpCompute compute) {
    Fiber* fiber = current_fiber();
    Warp& warp = warp_of(fiber);
    CUDA_ON_CPU_NOTE_SITE();
    mask &= warp.existing;
    fiber->mask = mask;
    fiber->compute = compute;
    if (!(mask >> fiber->lane & 1)) fail("warp divergence: the calling lane is not in the mask it gives");
    warp.waiting |= 1u << fiber->lane;
    if ((warp.waiting & mask) == mask) {
        open_warp_meeting(fiber);
    } else {
        fiber->state = State::at_warp_meeting;
        warp.ready &= ~(1u << fiber->lane);
        wait_for_turn();
    }
}

extern "C" __attribute__((visibility("default"))) const char* cuda_on_cpu_launch(
    const LaunchRequest* request) {
    launch.entry = request->entry;
    launch.arguments = request->arguments;
    launch.dynamic_shared_bytes = request->dynamic_shared_bytes;
    launch.checked = request->checked;
    launch.report.clear();
    current_grid.grid = dim3(request->grid[0], request->grid[1], request->grid[2]);
    current_grid.block = dim3(request->block[0], request->block[1], request->block[2]);
    dl_iterate_phdr(find_module, nullptr);
    block.clock = 0;
    {
        SignalHandlers handlers;
        if (sigsetjmp(launch.give_up, 1) == 0) {
            take_operands(*request);
            run_blocks(current_grid);
        }
    }
    current_thread = nullptr;
    abandon_copies();
    for (auto* regions : {&launch.operands, &launch.shared}) {
        for (Region& region : *regions)
            end_watching(region);
    }
    for (Region& region : launch.shared)
        release_guarded(region.base, region.bytes);
    launch.operands.clear();
    launch.shared.clear();
    return launch.report.c_str();
}

}  // namespace cuda_on_cpu
