// What the runtime (../runtime, one shared library) offers to kernels; everything else in there is private.
#pragma once

#if defined(CUDA_ON_CPU_CHECKED)
#define CUDA_ON_CPU_UNSEEN __attribute__((no_sanitize("thread")))  // not watched by the checked build
#else
#define CUDA_ON_CPU_UNSEEN
#endif

namespace cuda_on_cpu {

#pragma GCC visibility push(default)

// What one CUDA thread may know of itself.
struct Thread {
    uint3 thread, block;
    unsigned lane;         // in its warp
    unsigned index;        // in its block
    unsigned char* input;  // its 64 bytes of the warp's mailbox, for warp_meet
    unsigned char* output;
};

struct Grid {
    dim3 grid, block;
};

extern Thread* current_thread;
extern Grid current_grid;

constexpr unsigned MAILBOX_BYTES = 64;
typedef unsigned char Mailbox[MAILBOX_BYTES];

void* static_shared_memory(void* identity, const char* name, size_t bytes, size_t element_bytes,
                           size_t alignment);
void* dynamic_shared_memory(const char* name, size_t element_bytes, size_t alignment);

// __syncthreads, with a vote over the block: each thread gives a value and gets the block's.
enum class Vote { none, count, all, any };
int block_meet(Vote vote, int value, int line);

// The lanes of `mask` meet; the last to come runs `compute` for all of them, from their inputs to their
// outputs. Without `compute` it is __syncwarp, which alone orders memory.
typedef void (*WarpCompute)(const Mailbox* inputs, Mailbox* outputs, unsigned mask);
void warp_meet(unsigned mask, WarpCompute compute);

void shuffle(const Mailbox*, Mailbox*, unsigned mask);
void ballot(const Mailbox*, Mailbox*, unsigned mask);
void mma_m16n8k16_float16(const Mailbox*, Mailbox*, unsigned mask);
void mma_m16n8k16_bfloat16(const Mailbox*, Mailbox*, unsigned mask);
void mma_m16n8k8_tf32(const Mailbox*, Mailbox*, unsigned mask);
void mma_m8n8k4_f64(const Mailbox*, Mailbox*, unsigned mask);
void ldmatrix(const Mailbox*, Mailbox*, unsigned mask);
void ldmatrix_trans(const Mailbox*, Mailbox*, unsigned mask);
void movmatrix_trans(const Mailbox*, Mailbox*, unsigned mask);

void asynchronous_copy(void* target, const void* source, unsigned bytes, int source_bytes);
void asynchronous_copy_commit();
void asynchronous_copy_wait(int groups_left);

// Checked builds: accesses that the compiler's instrumentation does not see.
enum class Access { read, write, atomic, copy_begin, copy_end };
void watch(const void* address, size_t bytes, Access access);

// Ends the launch with this message.
[[noreturn]] void fail(const char* message);

#pragma GCC visibility pop

#if defined(CUDA_ON_CPU_CHECKED)
constexpr bool CHECKED = true;
#else
constexpr bool CHECKED = false;
#endif

}  // namespace cuda_on_cpu

#define threadIdx (::cuda_on_cpu::current_thread->thread)
#define blockIdx (::cuda_on_cpu::current_thread->block)
#define blockDim (::cuda_on_cpu::current_grid.block)
#define gridDim (::cuda_on_cpu::current_grid.grid)
