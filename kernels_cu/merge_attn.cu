// psa_merge_attn_nchw: o_lo, o_hi (BH, tokens, KEY_DIM) to out (BH, 2 halves, KEY_DIM, tokens), and back.
//
// 2 * BH transposes; grid, block and access pattern as in transpose.cuh, matrix = bh * 2 + half.
// Forward reads every element of o_lo and o_hi once and writes every element of out once. Backward is the
// inverse: each address of d_o_lo and d_o_hi is written, or with ACCUMULATE_LO / ACCUMULATE_HI added to
// atomically, by the one thread that moves its patch.
#include "transpose.cuh"

constexpr int HALVES = 2;

extern "C" __global__ void merge_attn(const T* __restrict__ o_lo, const T* __restrict__ o_hi,
                                      T* __restrict__ out, long long tokens, unsigned parts,
                                      int patches_per_part) {
    const Tile tile = tile_of_block(tokens, parts, patches_per_part);
    const T* const half = tile.matrix % HALVES ? o_hi : o_lo;
    tokens_to_channels<false>(half + tile.matrix / HALVES * tokens * KEY_DIM,
                              out + tile.matrix * KEY_DIM * tokens, tokens, tile);
}

extern "C" __global__ void merge_attn_backward(const T* __restrict__ d_out, T* __restrict__ d_o_lo,
                                               T* __restrict__ d_o_hi, long long tokens, unsigned parts,
                                               int patches_per_part) {
    const Tile tile = tile_of_block(tokens, parts, patches_per_part);
    const T* const source = d_out + tile.matrix * KEY_DIM * tokens;
    const long long offset = tile.matrix / HALVES * tokens * KEY_DIM;
    if (tile.matrix % HALVES) {
        channels_to_tokens<ACCUMULATE_HI>(source, d_o_hi + offset, tokens, tile);
    } else {
        channels_to_tokens<ACCUMULATE_LO>(source, d_o_lo + offset, tokens, tile);
    }
}
