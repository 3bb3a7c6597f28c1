// Fused attention on Hopper, straight from and to NCHW: wgmma on tiles that TMA brings. 16-bit types.
//
//   out[bh, c, n] = sum_k P[n, k] v[bh, c, k],  P = softmax over k of scale * q[bh, :, n] . k[bh, :, k]
//   lse[bh, n]    = natural log of the sum over k of exp(scale * q . k)
//
// Layout   q, k, v: tensor maps (tokens, channels, bh) over qkv (BH, 2 KEY_DIM + VALUE_DIM, N), one map each,
// so
//          that channels padded to what wgmma wants and tokens past N arrive as zeros. N % 8 == 0.
//          out (BH, VALUE_DIM, N), lse (BH, N).
// Items    One item = one bh and 64 * WARPGROUPS queries; item = bh * tiles + tile. Block b takes the items
// b,
//          b + gridDim.x, ... : with as many blocks as items each takes one; with fewer, blocks stay and
//          their copies run ahead into the next item.
// Block    128 * WARPGROUPS threads. A warpgroup owns 64 queries, a warp 16, a thread two (lane / 4 and 8
// more). Shared   A ring of STAGES boxes, each 64 keys of K (KEY_ROWS x 64) and V (VALUE_ROWS x 64); one tile
// of Q for
//          each warpgroup (KEY_ROWS x 64); mbarriers. All tiles with the 128-byte swizzle.
// Copies   Thread 0 asks for every box; full[slot] counts its bytes. empty[slot] gets one arrival of each
// warp
//          when it has done with the box; REFILL_LAG boxes later thread 0 refills the slot.
// Compute  S (64 x 32 keys) = Q^T K with Q in registers and K as it is, transposed by the descriptor; P goes
//          from the accumulators of S to the registers of operand A; O (64 x VALUE_ROWS) += P V^T. Two
//          buffers of S: while one is turned into P, the tensor cores make the other one and add the previous
//          P V^T.
// Softmax  In base 2, against a running reference of each query that is raised as soon as a weight could
// exceed
//          2^8: what was summed is then scaled down, as in the exact online softmax (Milakov and Gimelshein
//          2018). The reference is never above the running maximum, so no score is lost, however large.
// Writes   Every element of out and lse is stored by one thread of one block: repeatable.
#include "tensor_core.cuh"
#include "tensor_core_hopper.cuh"

constexpr int KEY_STEPS = (KEY_DIM + 15) / 16;
constexpr int KEY_ROWS = 16 * KEY_STEPS;
constexpr int VALUE_ROWS = (VALUE_DIM + 7) / 8 * 8;
constexpr int ROW_BYTES = 128;
constexpr int BOX_TOKENS = 64;
constexpr int K_BYTES = KEY_ROWS * ROW_BYTES;
constexpr int BOX_BYTES = K_BYTES + VALUE_ROWS * ROW_BYTES;
constexpr int ITEM_QUERIES = 64 * WARPGROUPS;

// Shared memory, in bytes from its start.
constexpr int Q_AT = STAGES * BOX_BYTES;
constexpr int FULL_AT = Q_AT + WARPGROUPS * K_BYTES;
constexpr int EMPTY_AT = FULL_AT + 8 * STAGES;
constexpr int Q_FULL_AT = EMPTY_AT + 8 * STAGES;
constexpr int Q_EMPTY_AT = Q_FULL_AT + 8;

// A sum of a thread's 8 weights of a step above this raises the reference. P is stored in 16 bits: 2^8 leaves
// room above, and below it the smallest weights are lost no sooner than with the maximum as reference.
constexpr float RAISE_ABOVE = 256.0f;
// The reference before the first key: below any score that the contract allows, and finite.
constexpr float LOWEST = -3.0e38f;

// ln 2 in two words: the reference may be so large that lse is allowed an error of few units in its last
// place.
constexpr float LN2_HIGH = 0.693147182464599609375f, LN2_LOW = -1.9046542121259336e-9f;

// What a thread knows of its two queries; `sum` over the thread's own keys only.
struct Softmax {
    float reference[2];
    float sum[2];
};

// A place in the ring, and the parity of the barriers' phase there.
struct Place {
    int slot = 0;
    int parity = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == STAGES) {
            slot = 0;
            parity ^= 1;
        }
    }
};

// Thread 0's part: it asks for the boxes of all the block's items in order, as slots come free.
struct Copies {
    const TensorMap* k;
    const TensorMap* v;
    unsigned shared;
    int boxes, tiles, items;
    int item, bh;
    int box = 0;
    Place place;

    __device__ __forceinline__ void load_next() {
        const unsigned barrier = shared + FULL_AT + 8 * place.slot;
        const unsigned destination = shared + place.slot * BOX_BYTES;
        mbarrier_expect(barrier, BOX_BYTES);
        tensor_load(destination, k, box * BOX_TOKENS, 0, bh, barrier);
        tensor_load(destination + K_BYTES, v, box * BOX_TOKENS, 0, bh, barrier);
        place.advance();
        if (++box == boxes) {
            box = 0;
            item += gridDim.x;
            if (PERSISTENT) bh = item / tiles;
        }
    }

    __device__ __forceinline__ void fill_ring() {
        for (int slot = 0; slot < STAGES && item < items; ++slot)
            load_next();
    }

    // Refills the next slot once every warp has left it.
    __device__ __forceinline__ void refill() {
        if (item >= items) return;
        mbarrier_wait(shared + EMPTY_AT + 8 * place.slot, place.parity ^ 1);
        load_next();
    }
};

__device__ __forceinline__ void load_q(unsigned shared, const TensorMap* q, int item, int tiles) {
    const int bh = item / tiles, first = (item - bh * tiles) * ITEM_QUERIES;
    mbarrier_expect(shared + Q_FULL_AT, WARPGROUPS * K_BYTES);
    for (int group = 0; group < WARPGROUPS; ++group) {
        tensor_load(shared + Q_AT + group * K_BYTES, q, first + 64 * group, 0, bh, shared + Q_FULL_AT);
    }
}

// The warp's 16 queries as operand A: a[h + 2 j] of step i = query (lane / 4 + 8 h), channel 16 i + 8 j + ...
// ldmatrix takes the row of channel 8 j + lane % 8 from lane, at the 16-byte unit 2 * band + h, swizzled.
__device__ __forceinline__ void read_q(unsigned (&q)[KEY_STEPS][4], const unsigned char* tile, int band,
                                       bool negate) {
    const int lane = threadIdx.x % 32, row = lane % 8, h = lane / 8 % 2, j = lane / 16;
    const unsigned char* address = tile + (8 * j + row) * ROW_BYTES + (((2 * band + h) ^ row) * 16);
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step) {
        ldmatrix_x4_trans(q[step], address + step * 16 * ROW_BYTES);
        for (int i = 0; i < 4; ++i)
            q[step][i] ^= negate ? 0x80008000u : 0u;
    }
}

// P = 2^(scale S - reference) of a step's 32 keys, packed as operand A; `sums` of the thread's weights.
// MASKED: keys from `keys` on do not exist; this thread's first key is 0.
template <bool MASKED>
__device__ __forceinline__ void weigh(const float (&s)[16], unsigned (&p)[2][4], float (&sums)[2],
                                      const float (&reference)[2], float scale_log2, int keys) {
    sums[0] = sums[1] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float weight[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            weight[i] = exp2_approx(fmaf(s[8 * half + i], scale_log2, -reference[i / 2 % 2]));
            if (MASKED && 16 * half + 8 * (i / 4) + i % 2 >= keys) weight[i] = 0;
        }
        sums[0] += (weight[0] + weight[1]) + (weight[4] + weight[5]);
        sums[1] += (weight[2] + weight[3]) + (weight[6] + weight[7]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            p[half][i] = pack2(weight[2 * i], weight[2 * i + 1], T());
    }
}

// The largest scaled score of a step, for each of the thread's two queries (not-a-number is passed over).
template <bool MASKED>
__device__ __forceinline__ void step_maximum(float (&maximum)[2], const float (&s)[16], float scale_log2,
                                             int keys) {
    maximum[0] = maximum[1] = LOWEST;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const bool exists = !MASKED || 8 * (i / 4) + i % 2 < keys;
        maximum[i / 2 % 2] = fmaxf(maximum[i / 2 % 2], exists ? s[i] * scale_log2 : LOWEST);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        maximum[h] = fmaxf(maximum[h], __shfl_xor_sync(0xffffffffu, maximum[h], 1));
        maximum[h] = fmaxf(maximum[h], __shfl_xor_sync(0xffffffffu, maximum[h], 2));
    }
}

// Raises the references to `maximum` and scales down what was summed.
__device__ __forceinline__ void raise(Softmax& softmax, float (&o)[VALUE_ROWS / 2],
                                      const float (&maximum)[2]) {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float raised = fmaxf(softmax.reference[h], maximum[h]);
        factor[h] = exp2_approx(softmax.reference[h] - raised);
        softmax.reference[h] = raised;
        softmax.sum[h] *= factor[h];
    }
#pragma unroll
    for (int i = 0; i < VALUE_ROWS / 2; ++i)
        o[i] *= factor[i / 2 % 2];
}

// One step's P, after which every wgmma of the warpgroup has finished. What is in flight meanwhile writes the
// other buffer of S and o: so o is touched only after the wait. A warp without queries only waits; the branch
// also keeps the compiler from moving the exponentials away from between the products and the wait.
template <bool MASKED>
__device__ __forceinline__ void softmax_step(Softmax& softmax, const float (&s)[16], unsigned (&p)[2][4],
                                             float (&o)[VALUE_ROWS / 2], float scale_log2, int keys,
                                             bool has_queries) {
    float sums[2] = {0, 0}, maximum[2];
    if constexpr (EVERY_MAXIMUM) {
        if (has_queries) {
            step_maximum<MASKED>(maximum, s, scale_log2, keys);
            const float reference[2] = {fmaxf(softmax.reference[0], maximum[0]),
                                        fmaxf(softmax.reference[1], maximum[1])};
            weigh<MASKED>(s, p, sums, reference, scale_log2, keys);
        }
        wgmma_wait<0>();
        if (has_queries) raise(softmax, o, maximum);
    } else {
        if (has_queries) weigh<MASKED>(s, p, sums, softmax.reference, scale_log2, keys);
        wgmma_wait<0>();
        // Not-a-number and infinity go this way, too. The warp decides as one: its lanes share the rows.
        if (__any_sync(0xffffffffu, !(sums[0] + sums[1] <= RAISE_ABOVE))) {
            step_maximum<MASKED>(maximum, s, scale_log2, keys);
            raise(softmax, o, maximum);
            weigh<MASKED>(s, p, sums, softmax.reference, scale_log2, keys);
        }
    }
    softmax.sum[0] += sums[0];
    softmax.sum[1] += sums[1];
}

// S = Q^T K for 32 keys: K's rows are channels, its keys run along them (transposed), 16 channels a step.
__device__ __forceinline__ void scores(float (&s)[16], const unsigned (&q)[KEY_STEPS][4],
                                       unsigned long long k) {
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step) {
        wgmma<1>(s, q[step], k + step * (16 * ROW_BYTES / 16), step > 0, T());
    }
}

// O += P V^T for 32 keys: V's rows are channels and its keys run along them, 16 keys (32 bytes) a step.
__device__ __forceinline__ void values(float (&o)[VALUE_ROWS / 2], const unsigned (&p)[2][4],
                                       unsigned long long v) {
#pragma unroll
    for (int step = 0; step < 2; ++step)
        wgmma<0>(o, p[step], v + step * 2, true, T());
}

// Both, taking turns: neither waits for its own previous product.
__device__ __forceinline__ void scores_and_values(float (&s)[16], const unsigned (&q)[KEY_STEPS][4],
                                                  unsigned long long k, float (&o)[VALUE_ROWS / 2],
                                                  const unsigned (&p)[2][4], unsigned long long v) {
#pragma unroll
    for (int step = 0; step < (KEY_STEPS > 2 ? KEY_STEPS : 2); ++step) {
        if (step < KEY_STEPS) wgmma<1>(s, q[step], k + step * (16 * ROW_BYTES / 16), step > 0, T());
        if (step < 2) wgmma<0>(o, p[step], v + step * 2, true, T());
    }
}

// Divides by the sums and stores the warp's 16 queries from `token` on; 8 x 8 blocks are turned over so that
// a lane has two neighbouring tokens of one channel.
__device__ __forceinline__ void write_item(T* out, float* lse, const Softmax& softmax,
                                           const float (&o)[VALUE_ROWS / 2], int bh, int token, int tokens) {
    const int lane = threadIdx.x % 32;
    float sum[2], inverse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        sum[h] = softmax.sum[h] + __shfl_xor_sync(0xffffffffu, softmax.sum[h], 1);
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
        inverse[h] = 1.0f / sum[h];
        const int n = token + 8 * h + lane / 4;
        if (lane % 4 == 0 && n < tokens) {
            const float rest = fmaf(softmax.reference[h], LN2_LOW, logf(sum[h]));
            lse[static_cast<long long>(bh) * tokens + n] = fmaf(softmax.reference[h], LN2_HIGH, rest);
        }
    }
    const int n = token + lane % 4 * 2;
    T* row = out + (static_cast<long long>(bh) * VALUE_DIM + lane / 4) * tokens + n;
#pragma unroll
    for (int block = 0; block < VALUE_ROWS / 8; ++block) {
        const float* x = o + 4 * block;
        const unsigned low = movmatrix_trans(pack2(x[0] * inverse[0], x[1] * inverse[0], T()));
        const unsigned high = movmatrix_trans(pack2(x[2] * inverse[1], x[3] * inverse[1], T()));
        if (VALUE_DIM % 8 == 0 || 8 * block + lane / 4 < VALUE_DIM) {
            if (n < tokens) *reinterpret_cast<unsigned*>(row) = low;
            if (n + 8 < tokens) *reinterpret_cast<unsigned*>(row + 8) = high;
        }
        row += 8LL * tokens;
    }
}

extern "C" __global__ void __launch_bounds__(128 * WARPGROUPS, BLOCKS_PER_MULTIPROCESSOR)
    psa_forward_hopper(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                       const __grid_constant__ TensorMap v_map, T* __restrict__ out, float* __restrict__ lse,
                       int tokens, int items, float scale_log2) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const int lane = threadIdx.x % 32, band = threadIdx.x / 32 % 4;
    const int group =
        __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // told to be the same in the whole warp
    const int tiles = (tokens + ITEM_QUERIES - 1) / ITEM_QUERIES;
    const int boxes = (tokens + BOX_TOKENS - 1) / BOX_TOKENS;
    const bool copies_for_all = threadIdx.x == 0;
    const bool negate = scale_log2 < 0;
    scale_log2 = fabsf(scale_log2);

    int item = blockIdx.x;
    Copies copies{&k_map, &v_map, shared, boxes, tiles, items, item, item / tiles};
    if (copies_for_all) {
        for (int slot = 0; slot < STAGES; ++slot) {
            mbarrier_init(shared + FULL_AT + 8 * slot, 1);
            mbarrier_init(shared + EMPTY_AT + 8 * slot, 4 * WARPGROUPS);
        }
        mbarrier_init(shared + Q_FULL_AT, 1);
        mbarrier_init(shared + Q_EMPTY_AT, 4 * WARPGROUPS);
        mbarrier_fence_init();
        load_q(shared, &q_map, item, tiles);
        copies.fill_ring();
    }
    __syncthreads();

    const unsigned char* q_tile = memory + Q_AT + group * K_BYTES;
    const unsigned long long k_tile = wgmma_descriptor(shared);
    const unsigned long long v_tile = wgmma_descriptor(shared + K_BYTES);
    constexpr int NEXT_BOX = BOX_BYTES / 16, SECOND_HALF = 32 * 2 / 16;  // in descriptors

    unsigned q[KEY_STEPS][4], p0[2][4] = {}, p1[2][4] = {};
    float s0[16], s1[16], o[VALUE_ROWS / 2];
    Softmax softmax;
    Place place;
    int q_parity = 0;

    auto leave = [&](int slot) {
        if (lane == 0) mbarrier_arrive(shared + EMPTY_AT + 8 * slot);
    };
    auto first_scores = [&]() {
        read_q(q, q_tile, band, negate);
        if (lane == 0) mbarrier_arrive(shared + Q_EMPTY_AT);
        __syncwarp();
        const unsigned long long k = k_tile + place.slot * NEXT_BOX;
        wgmma_fence();
        scores(s0, q, k);
        scores(s1, q, k + SECOND_HALF);
        wgmma_commit();
    };

    for (int i = 0; i < 16; ++i)
        s0[i] = s1[i] = 0;
    mbarrier_wait(shared + Q_FULL_AT, 0);
    mbarrier_wait(shared + FULL_AT, 0);
    first_scores();
    int seen = 0;  // boxes begun
    while (true) {
        const int next_item = item + gridDim.x;
        const bool more = PERSISTENT && next_item < items;
        if (copies_for_all && more) {
            mbarrier_wait(shared + Q_EMPTY_AT, q_parity);
            load_q(shared, &q_map, next_item, tiles);
        }
        __syncwarp();
        const int bh = item / tiles;
        const int token = (item - bh * tiles) * ITEM_QUERIES + 64 * group + 16 * band;
        const bool has_queries = token < tokens;
        for (int i = 0; i < VALUE_ROWS / 2; ++i)
            o[i] = 0;
        for (int h = 0; h < 2; ++h) {
            softmax.reference[h] = LOWEST;
            softmax.sum[h] = 0;
        }
        wgmma_wait<0>();

#pragma unroll 1
        for (int box = 0; box + 1 < boxes; ++box) {
            softmax_step<false>(softmax, s0, p0, o, scale_log2, 0, has_queries);
            if (box > 0) leave(place.slot == 0 ? STAGES - 1 : place.slot - 1);
            if (copies_for_all && seen++ >= REFILL_LAG) copies.refill();
            __syncwarp();
            Place next = place;
            next.advance();
            mbarrier_wait(shared + FULL_AT + 8 * next.slot, next.parity);
            const unsigned long long k = k_tile + next.slot * NEXT_BOX, v = v_tile + place.slot * NEXT_BOX;
            wgmma_fence();
            scores_and_values(s0, q, k, o, p0, v);
            wgmma_commit();
            softmax_step<false>(softmax, s1, p1, o, scale_log2, 0, has_queries);
            wgmma_fence();
            scores_and_values(s1, q, k + SECOND_HALF, o, p1, v + SECOND_HALF);
            wgmma_commit();
            place = next;
        }

        const int keys = tokens - (boxes - 1) * BOX_TOKENS - lane % 4 * 2;
        const unsigned long long v = v_tile + place.slot * NEXT_BOX;
        softmax_step<true>(softmax, s0, p0, o, scale_log2, keys, has_queries);
        if (boxes > 1) leave(place.slot == 0 ? STAGES - 1 : place.slot - 1);
        if (copies_for_all && seen++ >= REFILL_LAG) copies.refill();
        __syncwarp();
        wgmma_fence();
        values(o, p0, v);
        wgmma_commit();
        if (tokens - (boxes - 1) * BOX_TOKENS > 32) {
            softmax_step<true>(softmax, s1, p1, o, scale_log2, keys - 32, has_queries);
            wgmma_fence();
            values(o, p1, v + SECOND_HALF);
            wgmma_commit();
        }
        wgmma_wait<0>();
        leave(place.slot);
        place.advance();

        if (more) {
            q_parity ^= 1;
            mbarrier_wait(shared + Q_FULL_AT, q_parity);
            mbarrier_wait(shared + FULL_AT + 8 * place.slot, place.parity);
        }
        // Without a next item the product is of what lies there, and nobody reads it: a wgmma under a
        // condition would be waited for before the results are written.
        if (PERSISTENT) first_scores();
        write_item(out, lse, softmax, o, bh, token, tokens);
        if (!more) break;
        item = next_item;
    }
    wgmma_wait<0>();
}
