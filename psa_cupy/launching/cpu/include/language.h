// Qualifiers, vector types and shared memory declarations of CUDA C.
#pragma once

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))

// The loader rewrites shared memory declarations to the two macros below, with `T` last because a type may
// hold commas. A declaration that it cannot read stops here.
#define __shared__ static_assert(false, "expected: __shared__ type name[size]; without an initialiser");

// `__shared__ T name[a][b];`: one array per block, behind guard pages, so that running past it is seen.
#define CUDA_ON_CPU_SHARED(ALIGNMENT, NAME, DIMENSIONS, ...)                                    \
    typedef __VA_ARGS__ NAME##_element;                                                         \
    typedef NAME##_element NAME##_array DIMENSIONS;                                             \
    static char NAME##_identity;                                                                \
    NAME##_array& NAME = *static_cast<NAME##_array*>(::cuda_on_cpu::static_shared_memory(       \
        &NAME##_identity, "shared memory " #NAME, sizeof(NAME##_array), sizeof(NAME##_element), \
        alignof(NAME##_element) > (ALIGNMENT) ? alignof(NAME##_element) : (ALIGNMENT)))

// `extern __shared__ T name[];`: the launch's dynamic shared memory.
#define CUDA_ON_CPU_DYNAMIC_SHARED(ALIGNMENT, NAME, ...)                                            \
    typedef __VA_ARGS__ NAME##_element;                                                             \
    NAME##_element* const NAME = static_cast<NAME##_element*>(::cuda_on_cpu::dynamic_shared_memory( \
        "shared memory " #NAME, sizeof(NAME##_element),                                             \
        alignof(NAME##_element) > (ALIGNMENT) ? alignof(NAME##_element) : (ALIGNMENT)))

// CUDA aligns vectors of 2 and 4 to their size, up to 16 bytes, and vectors of 3 to their element.
#define CUDA_ON_CPU_VECTORS(T, NAME)                                              \
    struct alignas(2 * sizeof(T)) NAME##2 { T x, y; };                            \
    struct NAME##3 { T x, y, z; };                                                \
    struct alignas(sizeof(T) < 4 ? 4 * sizeof(T) : 16) NAME##4 { T x, y, z, w; }; \
    inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                    \
    inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }            \
    inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }

CUDA_ON_CPU_VECTORS(signed char, char)
CUDA_ON_CPU_VECTORS(unsigned char, uchar)
CUDA_ON_CPU_VECTORS(short, short)
CUDA_ON_CPU_VECTORS(unsigned short, ushort)
CUDA_ON_CPU_VECTORS(int, int)
CUDA_ON_CPU_VECTORS(unsigned, uint)
CUDA_ON_CPU_VECTORS(long long, longlong)
CUDA_ON_CPU_VECTORS(unsigned long long, ulonglong)
CUDA_ON_CPU_VECTORS(float, float)
CUDA_ON_CPU_VECTORS(double, double)
#undef CUDA_ON_CPU_VECTORS

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

constexpr int warpSize = 32;
