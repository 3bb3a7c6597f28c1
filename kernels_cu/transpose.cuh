// Batches of small transposes between channel-major (KEY_DIM, tokens) and token-major (tokens, KEY_DIM)
// matrices.
//
// A thread moves *patches* of CHANNEL_VECTOR channels x TOKEN_VECTOR tokens: it loads one vector per row of
// the patch on one side, exchanges the elements among its own registers and stores one vector per row on the
// other side. Both sides see accesses of up to 16 bytes; there is no shared memory, hence no barrier and no
// bank conflict. GROUP_LANES consecutive threads take neighbouring groups of channels, the next ones the next
// tokens: the host chooses GROUP_LANES so that a warp touches runs of at least a 32-byte sector in either
// layout. UNROLL patches are loaded before the first is stored: the bytes in flight are what reaches the copy
// rate.
//
// Grid (1-D): matrix * SLICES * parts + slice * parts + part, where a slice is GROUP_LANES groups of channels
// and a part is patches_per_part patches along the tokens. Block: as many threads as make UNROLL rounds cover
// patches_per_part * GROUP_LANES patches. Constants from the host: T, KEY_DIM, TOKEN_VECTOR (divides the
// number of tokens), CHANNEL_VECTOR (divides KEY_DIM), GROUP_LANES (divides KEY_DIM / CHANNEL_VECTOR),
// UNROLL.
#pragma once
#include "vector.cuh"

// What this block moves of which matrix.
struct Tile {
    long long matrix;
    int first_channel;
    long long first_patch, patches;  // along the tokens
};

__device__ __forceinline__ Tile tile_of_block(long long tokens, unsigned parts, int patches_per_part) {
    constexpr int SLICES = KEY_DIM / (CHANNEL_VECTOR * GROUP_LANES);
    const unsigned part = blockIdx.x % parts, matrix_slice = blockIdx.x / parts;
    const long long first_patch = static_cast<long long>(part) * patches_per_part;
    const long long left = tokens / TOKEN_VECTOR - first_patch;
    return {matrix_slice / SLICES, static_cast<int>(matrix_slice % SLICES) * GROUP_LANES * CHANNEL_VECTOR,
            first_patch, left < patches_per_part ? left : patches_per_part};
}

// The patch this thread moves in a round; `inside` is false for threads beyond the tile.
struct Patch {
    int channel;
    long long token;
    bool inside;
};

__device__ __forceinline__ Patch patch_of_thread(const Tile& tile, int round) {
    const int index = threadIdx.x + round * blockDim.x;
    const int along_tokens = index / GROUP_LANES;
    return {tile.first_channel + index % GROUP_LANES * CHANNEL_VECTOR,
            (tile.first_patch + along_tokens) * TOKEN_VECTOR, along_tokens < tile.patches};
}

template <int ROWS, int COLUMNS>
__device__ __forceinline__ void load_patch(Vector<T, COLUMNS> (&rows)[ROWS], const T* source,
                                           long long stride) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
        rows[row] = load_vector<COLUMNS>(source + row * stride);
}

template <bool ACCUMULATE, int ROWS>
__device__ __forceinline__ void prefetch_target(const T* target, long long stride) {
#pragma unroll
    for (int row = 0; ACCUMULATE && row < ROWS; ++row)
        prefetch_for_addition(target + row * stride);
}

template <bool ACCUMULATE, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_transposed(T* target, long long stride,
                                                 const Vector<T, COLUMNS> (&rows)[ROWS]) {
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
        Vector<T, ROWS> vector;
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
            vector.at[row] = rows[row].at[column];
        store_vector<ACCUMULATE>(target + column * stride, vector);
    }
}

// One tile of a (KEY_DIM, tokens) matrix to a (tokens, KEY_DIM) matrix.
template <bool ACCUMULATE>
__device__ __forceinline__ void channels_to_tokens(const T* source, T* target, long long tokens,
                                                   const Tile& tile) {
    Vector<T, TOKEN_VECTOR> rows[UNROLL][CHANNEL_VECTOR];
#pragma unroll
    for (int round = 0; round < UNROLL; ++round) {
        const Patch patch = patch_of_thread(tile, round);
        if (!patch.inside) continue;
        load_patch(rows[round], source + patch.channel * tokens + patch.token, tokens);
        prefetch_target<ACCUMULATE, TOKEN_VECTOR>(target + patch.token * KEY_DIM + patch.channel, KEY_DIM);
    }
#pragma unroll
    for (int round = 0; round < UNROLL; ++round) {
        const Patch patch = patch_of_thread(tile, round);
        T* const address = target + patch.token * KEY_DIM + patch.channel;
        if (patch.inside) store_transposed<ACCUMULATE>(address, KEY_DIM, rows[round]);
    }
}

// One tile of a (tokens, KEY_DIM) matrix to a (KEY_DIM, tokens) matrix.
template <bool ACCUMULATE>
__device__ __forceinline__ void tokens_to_channels(const T* source, T* target, long long tokens,
                                                   const Tile& tile) {
    Vector<T, CHANNEL_VECTOR> rows[UNROLL][TOKEN_VECTOR];
#pragma unroll
    for (int round = 0; round < UNROLL; ++round) {
        const Patch patch = patch_of_thread(tile, round);
        if (!patch.inside) continue;
        load_patch(rows[round], source + patch.token * KEY_DIM + patch.channel, KEY_DIM);
        prefetch_target<ACCUMULATE, CHANNEL_VECTOR>(target + patch.channel * tokens + patch.token, tokens);
    }
#pragma unroll
    for (int round = 0; round < UNROLL; ++round) {
        const Patch patch = patch_of_thread(tile, round);
        T* const address = target + patch.channel * tokens + patch.token;
        if (patch.inside) store_transposed<ACCUMULATE>(address, tokens, rows[round]);
    }
}
