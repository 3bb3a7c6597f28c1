// Atomic additions of 8 or 16 bytes at once (sm_90 and later), each element rounded once; and a prefetch.
//
// With tensor_core.cuh and tensor_core_hopper.cuh the only place for PTX. The host asks for additions as wide
// as this only where the GPU has the instruction; the CPU execution, an sm_80, never does.
#pragma once

#ifndef CUDA_ON_CPU

template <int WORDS>
struct alignas(4 * WORDS) Words {
    unsigned at[WORDS];
};

// Two words of float, of pairs of float16 or of pairs of bfloat16, as the tag says.
__device__ __forceinline__ void atomic_add_words(float* address, const Words<2>& words) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(__uint_as_float(words.at[0])),
                 "f"(__uint_as_float(words.at[1]))
                 : "memory");
}
__device__ __forceinline__ void atomic_add_words(__half* address, const Words<2>& words) {
    asm volatile("red.global.add.noftz.v2.f16x2 [%0], {%1, %2};" ::"l"(address), "r"(words.at[0]),
                 "r"(words.at[1])
                 : "memory");
}
__device__ __forceinline__ void atomic_add_words(__nv_bfloat16* address, const Words<2>& words) {
    asm volatile("red.global.add.noftz.v2.bf16x2 [%0], {%1, %2};" ::"l"(address), "r"(words.at[0]),
                 "r"(words.at[1])
                 : "memory");
}

// Four of them.
__device__ __forceinline__ void atomic_add_words(float* address, const Words<4>& words) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
                 "f"(__uint_as_float(words.at[0])), "f"(__uint_as_float(words.at[1])),
                 "f"(__uint_as_float(words.at[2])), "f"(__uint_as_float(words.at[3]))
                 : "memory");
}
__device__ __forceinline__ void atomic_add_words(__half* address, const Words<4>& words) {
    asm volatile("red.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words.at[0]),
                 "r"(words.at[1]), "r"(words.at[2]), "r"(words.at[3])
                 : "memory");
}
__device__ __forceinline__ void atomic_add_words(__nv_bfloat16* address, const Words<4>& words) {
    asm volatile("red.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words.at[0]),
                 "r"(words.at[1]), "r"(words.at[2]), "r"(words.at[3])
                 : "memory");
}

// Brings what an addition will meet into the L2 while the addends are still on their way: without it the
// additions of a whole buffer reach 80 % of the copy rate, with it 90 to 97 % (H200).
__device__ __forceinline__ void prefetch_for_addition(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// COUNT neighbours of together 8 or 16 bytes, at a multiple of as many.
template <int COUNT, class T>
__device__ __forceinline__ void atomic_add_neighbours(T* address, const T (&values)[COUNT]) {
    Words<COUNT * sizeof(T) / 4> words;
    memcpy(&words, values, sizeof(words));
    atomic_add_words(address, words);
}

#else

__device__ __forceinline__ void prefetch_for_addition(const void*) {}

#endif
