// Hopper's own instructions (sm_90a): wgmma, the tensor copy engine (TMA) and its mbarriers.
//
// Together with tensor_core.cuh and vector_add.cuh the only place for PTX. None of this is emulated on the
// CPU: a kernel that uses it has a twin built on mma.sync.
//
// Shared memory tiles are what TMA writes with a 128-byte swizzle: rows of 128 bytes (64 16-bit elements) in
// groups of eight rows (1024 bytes, aligned to 1024); the 16-byte unit u of row r is at place u ^ (r % 8).
#pragma once

// The driver's CUtensorMap, taken by kernels as `const __grid_constant__ TensorMap`: cuda.h is not there
// under NVRTC.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

// A shared memory address as the instructions want it.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// ---- mbarriers: 8 bytes of shared memory; a phase ends when all arrivals and all expected bytes came ----

__device__ __forceinline__ void mbarrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine. Then __syncthreads() shows them to the block.
__device__ __forceinline__ void mbarrier_fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival that also announces `bytes` of copies to this barrier.
__device__ __forceinline__ void mbarrier_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase of this parity has ended: 0 for a barrier's first phase, then 1, 0, ... A fresh
// barrier counts as having ended a phase of parity 1.
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "retry:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra retry;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// ---- TMA ----

// Fetches the map itself ahead of its first use.
__device__ __forceinline__ void tensor_map_prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the box at (x, y, z), innermost coordinate first, to shared memory (1024-byte aligned). The whole
// box is written, with zeros where it lies outside the map's dims, and the whole box counts as bytes at the
// barrier. One thread calls it.
__device__ __forceinline__ void tensor_load(unsigned destination, const TensorMap* map, int x, int y, int z,
                                            unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
        "%4}], [%5];" ::"r"(destination),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}

// Copies `bytes` contiguous bytes to shared memory; all three are multiples of 16. One thread calls it.
__device__ __forceinline__ void bulk_load(unsigned destination, const void* source, int bytes,
                                          unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            destination),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// Orders this thread's ordinary writes to shared memory before later reads by wgmma or TMA (then a barrier).
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- additions to global memory ----

// Adds two adjacent elements (4-byte aligned, the first one low) to memory, each rounded once. Not atomicAdd:
// where the compiler cannot tell that an address is global, that one has a second path, for shared memory.
__device__ __forceinline__ void atomic_add_pair(__half* address, unsigned pair) {
    asm volatile("red.relaxed.gpu.global.add.noftz.f16x2 [%0], %1;" ::"l"(__cvta_generic_to_global(address)),
                 "r"(pair)
                 : "memory");
}

__device__ __forceinline__ void atomic_add_pair(__nv_bfloat16* address, unsigned pair) {
    asm volatile("red.relaxed.gpu.global.add.noftz.bf16x2 [%0], %1;" ::"l"(__cvta_generic_to_global(address)),
                 "r"(pair)
                 : "memory");
}

// ---- wgmma: D (64 x N, float32) = A (64 x 16) B (16 x N) [+ D], by the 128 threads of a warpgroup ----
//
// Thread t of the warpgroup holds, of D, d[4 j + 2 h + x] at row 16 (t / 32) + (t % 32) / 4 + 8 h and column
// 8 j + 2 (t % 4) + x; of A in registers, the same places of a 64 x 16 matrix in pairs: a[h + 2 j], x = 0
// low.

// A barrier for the 128 threads of one warpgroup; ids 1 to 15, one for each warpgroup (0 is __syncthreads).
__device__ __forceinline__ void warpgroup_sync(int id) {
    asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

// Before the first wgmma and whenever registers of D or A were touched since the last one.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most KEEP committed groups are still running.
template <int KEEP>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(KEEP) : "memory");
}

// Describes an operand in shared memory, in tiles with the 128-byte swizzle; `address` may be moved inside a
// row by whole 16-byte units. Adding b / 16 to a descriptor moves it by b bytes.
//
// Rows are M or N, K runs along the row (TRANSPOSE 0): `group_bytes` = distance of 8-row groups, normally
//   1024; the 16 of K are 32 bytes of each row.
// Rows are K, M or N runs along the row (TRANSPOSE 1): `group_bytes` = distance of 8-row groups along K;
//   `next_64_bytes` = distance of the next 64 elements of M or N, of no effect while they fit one row.
__device__ __forceinline__ unsigned long long wgmma_descriptor(unsigned address, int group_bytes = 1024,
                                                               int next_64_bytes = 0) {
    constexpr unsigned long long SWIZZLE_128_BYTES = 1ull << 62;
    return ((address & 0x3ffff) >> 4) | (static_cast<unsigned long long>(next_64_bytes >> 4) << 16) |
           (static_cast<unsigned long long>(group_bytes >> 4) << 32) | SWIZZLE_128_BYTES;
}

// wgmma<TRANSPOSE_B>(d, a, b, accumulate, T()): A in registers.
// wgmma<TRANSPOSE_A, TRANSPOSE_B>(d, a, b, accumulate, T()): A by descriptor, too.
// N is twice the length of d: 8, 16, ... 128. Without `accumulate` what d held before is ignored.
//
// The instruction spells out every register, so the overloads are made by macros: WGMMA_NAMES_n names the
// n / 2 accumulators, WGMMA_OPERANDS_n binds them, and the numbers given to WGMMA_SIZE are the names of the
// operands that follow.
#define WGMMA_NAMES_8 "%0, %1, %2, %3"
#define WGMMA_NAMES_16 WGMMA_NAMES_8 ", %4, %5, %6, %7"
#define WGMMA_NAMES_24 WGMMA_NAMES_16 ", %8, %9, %10, %11"
#define WGMMA_NAMES_32 WGMMA_NAMES_24 ", %12, %13, %14, %15"
#define WGMMA_NAMES_40 WGMMA_NAMES_32 ", %16, %17, %18, %19"
#define WGMMA_NAMES_48 WGMMA_NAMES_40 ", %20, %21, %22, %23"
#define WGMMA_NAMES_56 WGMMA_NAMES_48 ", %24, %25, %26, %27"
#define WGMMA_NAMES_64 WGMMA_NAMES_56 ", %28, %29, %30, %31"
#define WGMMA_NAMES_72 WGMMA_NAMES_64 ", %32, %33, %34, %35"
#define WGMMA_NAMES_80 WGMMA_NAMES_72 ", %36, %37, %38, %39"
#define WGMMA_NAMES_88 WGMMA_NAMES_80 ", %40, %41, %42, %43"
#define WGMMA_NAMES_96 WGMMA_NAMES_88 ", %44, %45, %46, %47"
#define WGMMA_NAMES_104 WGMMA_NAMES_96 ", %48, %49, %50, %51"
#define WGMMA_NAMES_112 WGMMA_NAMES_104 ", %52, %53, %54, %55"
#define WGMMA_NAMES_120 WGMMA_NAMES_112 ", %56, %57, %58, %59"
#define WGMMA_NAMES_128 WGMMA_NAMES_120 ", %60, %61, %62, %63"

#define WGMMA_OPERANDS_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define WGMMA_OPERANDS_16 WGMMA_OPERANDS_8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define WGMMA_OPERANDS_24 WGMMA_OPERANDS_16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define WGMMA_OPERANDS_32 WGMMA_OPERANDS_24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define WGMMA_OPERANDS_40 WGMMA_OPERANDS_32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define WGMMA_OPERANDS_48 WGMMA_OPERANDS_40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define WGMMA_OPERANDS_56 WGMMA_OPERANDS_48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define WGMMA_OPERANDS_64 WGMMA_OPERANDS_56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define WGMMA_OPERANDS_72 WGMMA_OPERANDS_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define WGMMA_OPERANDS_80 WGMMA_OPERANDS_72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define WGMMA_OPERANDS_88 WGMMA_OPERANDS_80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define WGMMA_OPERANDS_96 WGMMA_OPERANDS_88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define WGMMA_OPERANDS_104 WGMMA_OPERANDS_96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define WGMMA_OPERANDS_112 WGMMA_OPERANDS_104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define WGMMA_OPERANDS_120 WGMMA_OPERANDS_112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define WGMMA_OPERANDS_128 WGMMA_OPERANDS_120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

#define WGMMA_TYPE(T, TYPE, N, A0, A1, A2, A3, B, ACCUMULATE, TRANSPOSE)                                   \
    template <int TRANSPOSE_B>                                                                             \
    __device__ __forceinline__ void wgmma(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b, \
                                          bool accumulate, T) {                                            \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ACCUMULATE                                      \
                     ", 0;\n"                                                                              \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" WGMMA_NAMES_##N  \
                     "}, "                                                                                 \
                     "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, %" #TRANSPOSE ";\n}\n"   \
                     : WGMMA_OPERANDS_##N                                                                  \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                                 \
                       "r"(static_cast<int>(accumulate)), "n"(TRANSPOSE_B));                               \
    }                                                                                                      \
    template <int TRANSPOSE_A, int TRANSPOSE_B>                                                            \
    __device__ __forceinline__ void wgmma(float (&d)[N / 2], unsigned long long a, unsigned long long b,   \
                                          bool accumulate, T) {                                            \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #A2                                              \
                     ", 0;\n"                                                                              \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" WGMMA_NAMES_##N  \
                     "}, "                                                                                 \
                     "%" #A0 ", %" #A1 ", p, 1, 1, %" #A3 ", %" #B ";\n}\n"                                \
                     : WGMMA_OPERANDS_##N                                                                  \
                     : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(TRANSPOSE_A),                \
                       "n"(TRANSPOSE_B));                                                                  \
    }

#define WGMMA_SIZE(...)                    \
    WGMMA_TYPE(__half, "f16", __VA_ARGS__) \
    WGMMA_TYPE(__nv_bfloat16, "bf16", __VA_ARGS__)

WGMMA_SIZE(8, 4, 5, 6, 7, 8, 9, 10)
WGMMA_SIZE(16, 8, 9, 10, 11, 12, 13, 14)
WGMMA_SIZE(24, 12, 13, 14, 15, 16, 17, 18)
WGMMA_SIZE(32, 16, 17, 18, 19, 20, 21, 22)
WGMMA_SIZE(40, 20, 21, 22, 23, 24, 25, 26)
WGMMA_SIZE(48, 24, 25, 26, 27, 28, 29, 30)
WGMMA_SIZE(56, 28, 29, 30, 31, 32, 33, 34)
WGMMA_SIZE(64, 32, 33, 34, 35, 36, 37, 38)
WGMMA_SIZE(72, 36, 37, 38, 39, 40, 41, 42)
WGMMA_SIZE(80, 40, 41, 42, 43, 44, 45, 46)
WGMMA_SIZE(88, 44, 45, 46, 47, 48, 49, 50)
WGMMA_SIZE(96, 48, 49, 50, 51, 52, 53, 54)
WGMMA_SIZE(104, 52, 53, 54, 55, 56, 57, 58)
WGMMA_SIZE(112, 56, 57, 58, 59, 60, 61, 62)
WGMMA_SIZE(120, 60, 61, 62, 63, 64, 65, 66)
WGMMA_SIZE(128, 64, 65, 66, 67, 68, 69, 70)
#undef WGMMA_SIZE
#undef WGMMA_TYPE
