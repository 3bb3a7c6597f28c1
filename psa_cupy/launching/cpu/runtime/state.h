// What the parts of the runtime share: the launch that is under way, its block and that block's threads.
//
// One launch runs at a time (the loader holds a lock), its blocks one after the other, and the threads of a
// block as fibers of the one processor thread that called `cuda_on_cpu_launch`. So nothing here is atomic.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda_on_cpu.h"
#include "fiber.h"

namespace cuda_on_cpu {

constexpr unsigned MAX_THREADS = 1024, WARP = 32, MAX_WARPS = MAX_THREADS / WARP;

enum class State : uint8_t { ready, at_block_barrier, at_warp_meeting, finished };

// An asynchronous copy under way: the bytes have been read, and land at the wait, as late as CUDA allows.
struct AsynchronousCopy {
    char* target;
    unsigned bytes;
    unsigned char data[16];
};

struct Fiber : Thread {
    Context context;
    char* stack;
    State state;
    const void* site;  // where in the kernel it last called the runtime
    unsigned mask;     // of the warp function it waits at
    WarpCompute compute;
    int vote;
    std::vector<AsynchronousCopy> copies;
    std::vector<size_t> committed;  // how many of the copies each group, and those before it, hold
};

struct Warp {
    // Lanes, as bits: those the block has, able to go on, not finished, at a meeting.
    unsigned existing, ready, running, waiting;
    alignas(16) Mailbox inputs[WARP], outputs[WARP];
    // Checked builds: how many times __syncwarp has completed since the last block barrier, and for each
    // lane, up to which of these it knows what each other lane did.
    uint16_t syncs, known[WARP][WARP];
};

struct Cell;  // checked.cpp

// A stretch of memory that kernels may touch: an operand, or a shared memory array.
struct Region {
    char* base;
    size_t bytes, element_bytes;
    const char* name;
    bool shared;
    void* identity;  // of a shared memory declaration
    Cell* cells;     // checked builds

    bool holds(const char* address) const { return address >= base && address < base + bytes; }
};

struct Launch {
    void (*entry)(void**);
    void** arguments;
    size_t dynamic_shared_bytes;
    bool checked;
    std::vector<Region> operands, shared;
    uintptr_t module_begin, module_end;  // the kernel's shared library in memory
    std::string report;                  // empty: no fault so far
    sigjmp_buf give_up;
};

struct Block {
    Fiber fibers[MAX_THREADS];
    Warp warps[MAX_WARPS];
    Context scheduler;  // where to go when every thread has finished
    unsigned threads, warp_count, unfinished, arrived;
    int barrier_line;
    const void* barrier_site;
    // Checked builds: counts block barriers over the whole launch, and its value when this block began.
    uint32_t clock, first_clock;
    long number;
};

extern Launch launch;
extern Block block;

inline Fiber* current_fiber() { return static_cast<Fiber*>(current_thread); }
inline bool in_kernel(const void* code) {
    const uintptr_t number = reinterpret_cast<uintptr_t>(code);
    return number >= launch.module_begin && number < launch.module_end;
}
inline Warp& warp_of(const Fiber* fiber) { return block.warps[fiber->index / WARP]; }

// The exported functions of the runtime note where they were called from: faults name it.
#define CUDA_ON_CPU_NOTE_SITE() (current_fiber()->site = __builtin_return_address(0))

// memory.cpp
char* allocate_guarded(size_t bytes, size_t alignment, size_t shift);
void release_guarded(char* base, size_t bytes);
bool padding_is_intact(const Region& region);
bool in_guard_pages(const Region& region, const char* address);
char* allocate_stack();
bool is_stack_overflow(const Fiber* fiber, const char* address);
void poison(const Region& region);

// asynchronous_copy.cpp
void abandon_copies();

// checked.cpp
void begin_watching(Region& region);
void end_watching(Region& region);
void begin_block_watching();
void barrier_passed();
void warp_sync_passed(Warp& warp, unsigned mask);

// faults.cpp
class SignalHandlers {
   public:
    SignalHandlers();
    ~SignalHandlers();
};
std::string describe(const Fiber* fiber);
std::string place(const void* code);  // of an instruction: the loader makes it file:line
std::string place_of_call(const void* return_address);
std::string element(const Region& region, const char* address);  // "element 5 of qkv, which has 130"
[[noreturn]] void give_up(const std::string& report);

}  // namespace cuda_on_cpu
