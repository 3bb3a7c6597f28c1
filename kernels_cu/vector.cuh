// COUNT neighbouring elements as one aligned access of up to 16 bytes. Values are moved, never computed with:
// every bit pattern survives, payloads of not-a-number too.
#pragma once
#include "common.cuh"
#include "vector_add.cuh"

template <class T, int COUNT>
struct alignas(sizeof(T) * COUNT) Vector {
    T at[COUNT];
};

// The plain type of so many bytes: the compiler splits accesses to a Vector itself.
template <int BYTES>
struct WordOf;
template <>
struct WordOf<2> {
    using Type = unsigned short;
};
template <>
struct WordOf<4> {
    using Type = unsigned;
};
template <>
struct WordOf<8> {
    using Type = uint2;
};
template <>
struct WordOf<16> {
    using Type = uint4;
};

template <int COUNT, class T>
__device__ __forceinline__ Vector<T, COUNT> load_vector(const T* address) {
    const auto word = *reinterpret_cast<const typename WordOf<sizeof(T) * COUNT>::Type*>(address);
    Vector<T, COUNT> vector;
    memcpy(&vector, &word, sizeof(word));
    return vector;
}

// Two 16-bit neighbours at a multiple of 4 bytes are added to by one instruction (sm_90; float16 everywhere),
// each of them rounded once; a lone one costs a loop of compare-and-swap.
__device__ __forceinline__ void atomic_add_pair(__half* address, __half first, __half second) {
    atomicAdd(reinterpret_cast<__half2*>(address), __halves2half2(first, second));
}
__device__ __forceinline__ void atomic_add_pair(__nv_bfloat16* address, __nv_bfloat16 first,
                                                __nv_bfloat16 second) {
    atomicAdd(reinterpret_cast<__nv_bfloat162*>(address), __halves2bfloat162(first, second));
}

template <bool ACCUMULATE, class T, int COUNT>
__device__ __forceinline__ void store_vector(T* address, const Vector<T, COUNT>& vector) {
    if constexpr (!ACCUMULATE) {
        typename WordOf<sizeof(T) * COUNT>::Type word;
        memcpy(&word, &vector, sizeof(word));
        __stcg(reinterpret_cast<decltype(word)*>(address), word);  // a plain store may be split again
    } else if constexpr (sizeof(T) <= 4 && sizeof(T) * COUNT > 4) {
        atomic_add_neighbours(address, vector.at);
    } else if constexpr (sizeof(T) == 2 && COUNT == 2) {
        atomic_add_pair(address, vector.at[0], vector.at[1]);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            atomic_add(address + i, vector.at[i]);
    }
}
