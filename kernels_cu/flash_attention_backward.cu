// FlashAttention-2 backward (Dao 2023), plain: multiply-adds only, any GPU, any dims, any lengths.
//
// With P = exp(scale * Q K^T - lse), delta = rowsum(dO * O) and dS = P * (dO V^T - delta), for every head:
//
//   dQ = scale * dS K        dK = scale * dS^T Q        dV = P^T dO
//
// Two kernels with separate owners, launched in this order. flash_attention_backward_q holds a block of
// queries and walks over the keys; it also computes delta. flash_attention_backward_kv holds a block of keys
// and walks over the queries. S and dO V^T are computed in both: that costs less than adding partial sums to
// dQ would, and it keeps the result repeatable.
//
// Layout   q, d_q (BH, queries, KEY_DIM), k, d_k (BH, keys, KEY_DIM), v, d_v (BH, keys, VALUE_DIM),
//          o, d_o (BH, queries, VALUE_DIM): packed, or with channels outside tokens (CHANNEL_MAJOR: inside an
//          NCHW array); heads *_stride elements apart, a gradient's as its operand's.
//          lse, delta (BH, queries), packed.
// Grid     BH * ceil(queries or keys / BLOCK_ROWS), 1-D: blocks of one head are neighbours
// Block    32 * WARPS threads; see fma_tile.cuh
// Shared   the block's two operands, one tile of the two others, the warps' weights, lse and delta
//          (flash_attention.py: _backward_shared)
// Writes   each address of d_q and delta (first kernel) and of d_k and d_v (second) once, by the block that
//          owns its token: a plain store, or one atomic addition where the target is given (ACCUMULATE_*).
//          The value is a finished sum, rounded once.
//
// Further constants: ACCUMULATE_Q, ACCUMULATE_K, ACCUMULATE_V; BRANCH: a second gradient of V, d_v_branch,
// laid out and strided as o, is added to d_v before it is rounded.
#include "fma_tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS<ROWS*(KEY_SUMS + 2 * COLUMNS)>)
    flash_attention_backward_q(const T* __restrict__ d_o, const T* __restrict__ q, const T* __restrict__ k,
                               const T* __restrict__ v, const T* __restrict__ o, const Real* __restrict__ lse,
                               T* __restrict__ d_q, Real* __restrict__ delta, int queries, int keys,
                               long long q_stride, long long k_stride, long long v_stride, long long o_stride,
                               Real scale) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Real* q_tile = reinterpret_cast<Real*>(shared_memory);
    Real* d_o_tile = q_tile + KEY_CHANNELS * ROW_PITCH;
    Real* k_tile = d_o_tile + VALUE_CHANNELS * ROW_PITCH;
    Real* v_tile = k_tile + KEY_CHANNELS * COLUMN_PITCH;
    Real* lse_tile = v_tile + VALUE_CHANNELS * COLUMN_PITCH;
    Real* delta_tile = lse_tile + BLOCK_ROWS;
    const int warp_row = threadIdx.x / 32 * WARP_ROWS;
    Real* weights = delta_tile + BLOCK_ROWS + warp_row * COLUMN_PITCH;

    const int tiles = (queries + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const long long head = blockIdx.x / tiles;
    const int first_query = static_cast<int>(blockIdx.x % tiles) * BLOCK_ROWS;
    const int rows = queries - first_query - warp_row;  // of this warp; may be more than it has, or none
    const Lane lane;

    load_tile<KEY_DIM, BLOCK_ROWS>(q_tile, q + head * q_stride, first_query, queries);
    load_tile<VALUE_DIM, BLOCK_ROWS>(d_o_tile, d_o + head * o_stride, first_query, queries);
    __syncthreads();
    if (threadIdx.x < BLOCK_ROWS) {
        const int query = first_query + threadIdx.x;
        Real row_lse = 0, sum = 0;
        if (query < queries) {
            row_lse = lse[head * queries + query];
            for (int channel = 0; channel < VALUE_DIM; channel++)
                sum = multiply_add(d_o_tile[channel * ROW_PITCH + threadIdx.x],
                                   to_float(o[head * o_stride + element<VALUE_DIM>(channel, query, queries)]),
                                   sum);
            delta[head * queries + query] = sum;
        }
        lse_tile[threadIdx.x] = row_lse;
        delta_tile[threadIdx.x] = sum;
    }

    Real sums[ROWS][KEY_SUMS] = {};
    for (int first_key = 0; first_key < keys; first_key += BLOCK_COLUMNS) {
        __syncthreads();
        load_tile<KEY_DIM, BLOCK_COLUMNS>(k_tile, k + head * k_stride, first_key, keys);
        load_tile<VALUE_DIM, BLOCK_COLUMNS>(v_tile, v + head * v_stride, first_key, keys);
        __syncthreads();
        if (rows <= 0) continue;

        Real scores[ROWS][COLUMNS], d_p[ROWS][COLUMNS];
        multiply<KEY_DIM>(scores, q_tile + warp_row, k_tile, lane);
        scale_scores(scores, scale, keys - first_key, lane);
        multiply<VALUE_DIM>(d_p, d_o_tile + warp_row, v_tile, lane);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int row = warp_row + lane.row_of(i);
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                scores[i][j] = probability(scores[i][j], lse_tile[row]) * (d_p[i][j] - delta_tile[row]);
        }
        share_weights(weights, scores, lane);
        accumulate<KEY_SUMS>(sums, weights, k_tile, lane);
    }
    if (rows <= 0) return;

    T* d_q_head = d_q + head * q_stride;
    store_rows<KEY_DIM>(weights, sums, rows, lane, [&](int channel, int row, Real value) {
        const int query = first_query + warp_row + row;
        store<ACCUMULATE_Q>(d_q_head + element<KEY_DIM>(channel, query, queries),
                            from_float<T>(value * scale));
    });
}

extern "C" __global__ void __launch_bounds__(
    THREADS, RESIDENT_BLOCKS<ROWS*(KEY_SUMS + VALUE_SUMS + COLUMNS) + COLUMNS>)
    flash_attention_backward_kv(const T* __restrict__ d_o, const T* __restrict__ q, const T* __restrict__ k,
                                const T* __restrict__ v, const Real* __restrict__ lse,
                                const Real* __restrict__ delta, const T* __restrict__ d_v_branch,
                                T* __restrict__ d_k, T* __restrict__ d_v, int queries, int keys,
                                long long q_stride, long long k_stride, long long v_stride,
                                long long o_stride, Real scale) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Real* k_tile = reinterpret_cast<Real*>(shared_memory);
    Real* v_tile = k_tile + KEY_CHANNELS * ROW_PITCH;
    Real* q_tile = v_tile + VALUE_CHANNELS * ROW_PITCH;
    Real* d_o_tile = q_tile + KEY_CHANNELS * COLUMN_PITCH;
    Real* lse_tile = d_o_tile + VALUE_CHANNELS * COLUMN_PITCH;
    Real* delta_tile = lse_tile + BLOCK_COLUMNS;
    const int warp_row = threadIdx.x / 32 * WARP_ROWS;
    Real* weights = delta_tile + BLOCK_COLUMNS + warp_row * COLUMN_PITCH;

    const int tiles = (keys + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const long long head = blockIdx.x / tiles;
    const int first_key = static_cast<int>(blockIdx.x % tiles) * BLOCK_ROWS;
    const int rows = keys - first_key - warp_row;  // of this warp; may be more than it has, or none
    const Lane lane;

    load_tile<KEY_DIM, BLOCK_ROWS>(k_tile, k + head * k_stride, first_key, keys);
    load_tile<VALUE_DIM, BLOCK_ROWS>(v_tile, v + head * v_stride, first_key, keys);

    Real d_k_sums[ROWS][KEY_SUMS] = {}, d_v_sums[ROWS][VALUE_SUMS] = {};
    for (int first_query = 0; first_query < queries; first_query += BLOCK_COLUMNS) {
        __syncthreads();
        load_tile<KEY_DIM, BLOCK_COLUMNS>(q_tile, q + head * q_stride, first_query, queries);
        load_tile<VALUE_DIM, BLOCK_COLUMNS>(d_o_tile, d_o + head * o_stride, first_query, queries);
        if (threadIdx.x < BLOCK_COLUMNS) {
            const int query = first_query + threadIdx.x;
            // Of a query that does not exist, d_o and q are zero: it adds nothing, whatever its P.
            lse_tile[threadIdx.x] = query < queries ? lse[head * queries + query] : 0;
            delta_tile[threadIdx.x] = query < queries ? delta[head * queries + query] : 0;
        }
        __syncthreads();
        if (rows <= 0) continue;

        Real scores[ROWS][COLUMNS], d_p[ROWS][COLUMNS];
        multiply<KEY_DIM>(scores, k_tile + warp_row, q_tile, lane);
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const Real row_lse = lse_tile[lane.column_of(j)];
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                scores[i][j] = probability(scaled(scores[i][j], scale), row_lse);
        }
        share_weights(weights, scores, lane);
        accumulate<VALUE_SUMS>(d_v_sums, weights, d_o_tile, lane);

        multiply<VALUE_DIM>(d_p, v_tile + warp_row, d_o_tile, lane);
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const Real row_delta = delta_tile[lane.column_of(j)];
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                scores[i][j] *= d_p[i][j] - row_delta;
        }
        share_weights(weights, scores, lane);
        accumulate<KEY_SUMS>(d_k_sums, weights, q_tile, lane);
    }
    if (rows <= 0) return;

    T* d_k_head = d_k + head * k_stride;
    store_rows<KEY_DIM>(weights, d_k_sums, rows, lane, [&](int channel, int row, Real value) {
        const int key = first_key + warp_row + row;
        store<ACCUMULATE_K>(d_k_head + element<KEY_DIM>(channel, key, keys), from_float<T>(value * scale));
    });
    T* d_v_head = d_v + head * v_stride;
    store_rows<VALUE_DIM>(weights, d_v_sums, rows, lane, [&](int channel, int row, Real value) {
        const long long offset = element<VALUE_DIM>(channel, first_key + warp_row + row, keys);
        if (BRANCH) value += to_float(d_v_branch[head * o_stride + offset]);
        store<ACCUMULATE_V>(d_v_head + offset, from_float<T>(value));
    });
}
