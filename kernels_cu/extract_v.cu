// psa_extract_v_nchw: the V channels of qkv (BH, 4 * KEY_DIM, tokens) to v (BH, 2 * KEY_DIM, tokens), and
// back.
//
// The V channels of a head are one run of 2 * KEY_DIM * tokens elements in both arrays, the second half of
// the head's elements in qkv: a copy of runs, no transpose. A thread loads UNROLL vectors of VECTOR elements
// before it stores the first. Grid (1-D): bh * parts + part, a part being vectors_per_part vectors; block: as
// many threads as make UNROLL rounds cover a part; no shared memory. VECTOR divides the length of a run.
//
// Forward writes every element of v once. Backward writes every element of d_qkv once: zeros to the Q and K
// channels, d_v to the V channels; with ACCUMULATE it adds d_v to the V channels atomically, one addition per
// address, and leaves the others alone.
#include "vector.cuh"

// The part of a run this block moves, in vectors.
struct Part {
    long long bh, first, count;
};

__device__ __forceinline__ Part part_of_block(long long vectors, unsigned parts, int vectors_per_part) {
    const long long first = static_cast<long long>(blockIdx.x % parts) * vectors_per_part;
    const long long left = vectors - first;
    return {blockIdx.x / parts, first, left < vectors_per_part ? left : vectors_per_part};
}

// What this thread moves of a part, loaded at once.
struct Moved {
    Vector<T, VECTOR> vectors[UNROLL];

    __device__ __forceinline__ void load(const T* source, const Part& part) {
#pragma unroll
        for (int round = 0; round < UNROLL; ++round) {
            const int index = threadIdx.x + round * blockDim.x;
            if (index < part.count)
                vectors[round] = load_vector<VECTOR>(source + (part.first + index) * VECTOR);
        }
    }

    template <bool ADD>
    __device__ __forceinline__ void store(T* target, const Part& part) const {
#pragma unroll
        for (int round = 0; round < UNROLL; ++round) {
            const int index = threadIdx.x + round * blockDim.x;
            if (index < part.count) store_vector<ADD>(target + (part.first + index) * VECTOR, vectors[round]);
        }
    }
};

__device__ __forceinline__ void prefetch_part_for_addition(const T* target, const Part& part) {
#pragma unroll
    for (int round = 0; round < UNROLL; ++round) {
        const int index = threadIdx.x + round * blockDim.x;
        if (index < part.count) prefetch_for_addition(target + (part.first + index) * VECTOR);
    }
}

// vectors: of one run.
extern "C" __global__ void extract_v(const T* __restrict__ qkv, T* __restrict__ v, long long vectors,
                                     unsigned parts, int vectors_per_part) {
    const Part part = part_of_block(vectors, parts, vectors_per_part);
    const long long run = vectors * VECTOR;
    Moved moved;
    moved.load(qkv + (2 * part.bh + 1) * run, part);
    moved.store<false>(v + part.bh * run, part);
}

extern "C" __global__ void extract_v_backward(const T* __restrict__ d_v, T* __restrict__ d_qkv,
                                              long long vectors, unsigned parts, int vectors_per_part) {
    const Part part = part_of_block(vectors, parts, vectors_per_part);
    const long long run = vectors * VECTOR;
    T* const head = d_qkv + 2 * part.bh * run;
    Moved moved;
    moved.load(d_v + part.bh * run, part);
    if constexpr (ACCUMULATE) {
        prefetch_part_for_addition(head + run, part);
    } else {
        const Moved zeros = {};
        zeros.store<false>(head, part);
    }
    moved.store<ACCUMULATE>(head + run, part);
}
