// Atomic functions. All threads of a launch are fibers of one processor thread, so a plain read, combine and
// write is atomic already; checked builds only note that it was meant to be.
#pragma once

namespace cuda_on_cpu {
template <class T>
CUDA_ON_CPU_UNSEEN inline T load_unseen(const T* address) {
    return *address;
}
template <class T>
CUDA_ON_CPU_UNSEEN inline void store_unseen(T* address, T value) {
    *address = value;
}

// A value as an atomic unit gets it, rounded to T: without this the compiler may fuse the multiplication that
// made it with the addition.
template <class T>
__forceinline__ T finished(T value) {
    asm("" : "+m"(value));
    return value;
}

// Inlined, so that its calls of the runtime come from the kernel's line.
template <class T, class Combine>
__forceinline__ T read_modify_write(T* address, Combine combine) {
    if ((uintptr_t)address % sizeof(T)) fail("misaligned address of an atomic function");
    if (CHECKED) watch(address, sizeof(T), Access::atomic);
    const T old = load_unseen(address);
    store_unseen(address, combine(old));
    return old;
}
}  // namespace cuda_on_cpu

#define CUDA_ON_CPU_ATOMIC(NAME, T, EXPRESSION)                                                         \
    inline T NAME(T* address, T value) {                                                                \
        value = cuda_on_cpu::finished(value);                                                           \
        return cuda_on_cpu::read_modify_write(address,                                                  \
                                              [=]([[maybe_unused]] T old) -> T { return EXPRESSION; }); \
    }
#define CUDA_ON_CPU_INTEGER_ATOMICS(T)                                                               \
    CUDA_ON_CPU_ATOMIC(atomicAdd, T, old + value)                                                    \
    CUDA_ON_CPU_ATOMIC(atomicSub, T, old - value)                                                    \
    CUDA_ON_CPU_ATOMIC(atomicMin, T, value < old ? value : old)                                      \
    CUDA_ON_CPU_ATOMIC(atomicMax, T, old < value ? value : old)                                      \
    CUDA_ON_CPU_ATOMIC(atomicAnd, T, (old & value))                                                  \
    CUDA_ON_CPU_ATOMIC(atomicOr, T, old | value)                                                     \
    CUDA_ON_CPU_ATOMIC(atomicXor, T, old ^ value)                                                    \
    CUDA_ON_CPU_ATOMIC(atomicExch, T, value)                                                         \
    inline T atomicCAS(T* address, T expected, T value) {                                            \
        return cuda_on_cpu::read_modify_write(address,                                               \
                                              [=](T old) { return old == expected ? value : old; }); \
    }
CUDA_ON_CPU_INTEGER_ATOMICS(int)
CUDA_ON_CPU_INTEGER_ATOMICS(unsigned)
CUDA_ON_CPU_INTEGER_ATOMICS(unsigned long long)
CUDA_ON_CPU_ATOMIC(atomicAdd, float, old + value)
CUDA_ON_CPU_ATOMIC(atomicExch, float, value)
CUDA_ON_CPU_ATOMIC(atomicAdd, double, old + value)
CUDA_ON_CPU_ATOMIC(atomicAdd, __half, old + value)
CUDA_ON_CPU_ATOMIC(atomicAdd, __half2, __hadd2(old, value))
CUDA_ON_CPU_ATOMIC(atomicAdd, __nv_bfloat16, old + value)
CUDA_ON_CPU_ATOMIC(atomicAdd, __nv_bfloat162, __hadd2(old, value))
#undef CUDA_ON_CPU_INTEGER_ATOMICS
#undef CUDA_ON_CPU_ATOMIC

inline unsigned short atomicCAS(unsigned short* address, unsigned short expected, unsigned short value) {
    return cuda_on_cpu::read_modify_write(address,
                                          [=](unsigned short old) { return old == expected ? value : old; });
}
