// psa_pack_qkv: qkv (BH, 4 sections, KEY_DIM, tokens) to packed (4 sections, BH, tokens, KEY_DIM), and back.
//
// 4 * BH transposes; grid, block and access pattern as in transpose.cuh, matrix = bh * 4 + section.
// Forward reads every element of qkv once and writes every element of packed once. Backward is the inverse:
// each address of d_qkv is written, or with ACCUMULATE added to atomically, by the one thread that moves its
// patch.
#include "transpose.cuh"

constexpr int SECTIONS = 4;

__device__ __forceinline__ long long packed_offset(const Tile& tile, long long tokens, long long bh_count) {
    return ((tile.matrix % SECTIONS) * bh_count + tile.matrix / SECTIONS) * tokens * KEY_DIM;
}

extern "C" __global__ void pack_qkv(const T* __restrict__ qkv, T* __restrict__ packed, long long tokens,
                                    long long bh_count, unsigned parts, int patches_per_part) {
    const Tile tile = tile_of_block(tokens, parts, patches_per_part);
    channels_to_tokens<false>(qkv + tile.matrix * KEY_DIM * tokens,
                              packed + packed_offset(tile, tokens, bh_count), tokens, tile);
}

extern "C" __global__ void pack_qkv_backward(const T* __restrict__ d_packed, T* __restrict__ d_qkv,
                                             long long tokens, long long bh_count, unsigned parts,
                                             int patches_per_part) {
    const Tile tile = tile_of_block(tokens, parts, patches_per_part);
    tokens_to_channels<ACCUMULATE>(d_packed + packed_offset(tile, tokens, bh_count),
                                   d_qkv + tile.matrix * KEY_DIM * tokens, tokens, tile);
}
