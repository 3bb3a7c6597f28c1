// FlashAttention-2 forward (Dao 2023), plain: multiply-adds only, any GPU, any key_dim, value_dim and length.
//
//   o = softmax(scale * Q K^T) V and lse = log of the sum of exp(scale * Q K^T), for every head
//
// Layout   q (BH, queries, KEY_DIM), k (BH, keys, KEY_DIM), v (BH, keys, VALUE_DIM),
//          o (BH, queries, VALUE_DIM): packed, or with channels outside tokens (CHANNEL_MAJOR: inside an NCHW
//          array); heads *_stride elements apart. lse (BH, queries), packed.
// Grid     BH * ceil(queries / BLOCK_ROWS), 1-D: blocks of one head are neighbours, since they share K and V
// Block    32 * WARPS threads; see fma_tile.cuh
// Shared   Q of the block, one tile of K and of V, the warps' weights (flash_attention.py: _forward_shared)
// Writes   each address of o and lse once, by the block that owns its query: repeatable
#include "fma_tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS<ROWS*(VALUE_SUMS + COLUMNS)>)
    flash_attention_forward(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                            T* __restrict__ o, Real* __restrict__ lse, int queries, int keys,
                            long long q_stride, long long k_stride, long long v_stride, long long o_stride,
                            Real scale) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Real* q_tile = reinterpret_cast<Real*>(shared_memory);
    Real* k_tile = q_tile + KEY_CHANNELS * ROW_PITCH;
    Real* v_tile = k_tile + KEY_CHANNELS * COLUMN_PITCH;
    const int warp_row = threadIdx.x / 32 * WARP_ROWS;
    Real* weights = v_tile + VALUE_CHANNELS * COLUMN_PITCH + warp_row * COLUMN_PITCH;

    const int tiles = (queries + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const long long head = blockIdx.x / tiles;
    const int first_query = static_cast<int>(blockIdx.x % tiles) * BLOCK_ROWS;
    const int rows = queries - first_query - warp_row;  // of this warp; may be more than it has, or none
    const Lane lane;

    load_tile<KEY_DIM, BLOCK_ROWS>(q_tile, q + head * q_stride, first_query, queries);

    OnlineSoftmax<Real> softmax[ROWS];
    Real sums[ROWS][VALUE_SUMS] = {};
    for (int first_key = 0; first_key < keys; first_key += BLOCK_COLUMNS) {
        __syncthreads();
        load_tile<KEY_DIM, BLOCK_COLUMNS>(k_tile, k + head * k_stride, first_key, keys);
        load_tile<VALUE_DIM, BLOCK_COLUMNS>(v_tile, v + head * v_stride, first_key, keys);
        __syncthreads();
        if (rows <= 0) continue;

        Real scores[ROWS][COLUMNS];
        multiply<KEY_DIM>(scores, q_tile + warp_row, k_tile, lane);
        scale_scores(scores, scale, keys - first_key, lane);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            Real largest = scores[i][0];
#pragma unroll
            for (int j = 1; j < COLUMNS; j++)
                largest = larger(largest, scores[i][j]);
            const Real factor = softmax[i].raise(lane.largest_of_row(largest));
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                scores[i][j] = softmax[i].weigh(scores[i][j]);
#pragma unroll
            for (int n = 0; n < VALUE_SUMS; n++)
                sums[i][n] *= factor;
        }
        share_weights(weights, scores, lane);
        accumulate<VALUE_SUMS>(sums, weights, v_tile, lane);
    }
    if (rows <= 0) return;

#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        softmax[i].sum = lane.sum_of_row(softmax[i].sum);
        const Real divisor = keys == 0 ? 1 : softmax[i].sum;
#pragma unroll
        for (int n = 0; n < VALUE_SUMS; n++)
            sums[i][n] /= divisor;
        const int row = lane.row_of(i);
        if (lane.column == 0 && row < rows)
            lse[head * queries + first_query + warp_row + row] = softmax[i].log_sum_exp();
    }
    T* o_head = o + head * o_stride;
    store_rows<VALUE_DIM>(weights, sums, rows, lane, [&](int channel, int row, Real value) {
        o_head[element<VALUE_DIM>(channel, first_query + warp_row + row, queries)] = from_float<T>(value);
    });
}
