// Fused attention on Hopper, straight from and to NCHW: wgmma on tiles that TMA brings. 16-bit types.
//
//   out[bh, c, n] = sum_k P[n, k] v[bh, c, k],  P = softmax over k of scale * q[bh, :, n] . k[bh, :, k]
//   lse[bh, n]    = natural log of the sum over k of exp(scale * q . k)
//
// Layout   q, k, v: tensor maps (tokens, channels, bh) over qkv (BH, 2 KEY_DIM + VALUE_DIM, N), one map each,
// so
//          that channels padded to what wgmma wants and tokens past N arrive as zeros. N % 8 == 0.
//          out (BH, VALUE_DIM, N), lse (BH, N).
// Items    One item = one bh and 64 * Q_TILES queries; item = bh * tiles + tile. Block b takes the items b,
//          b + gridDim.x, ... : with as many blocks as items each takes one; PERSISTENT, there may be fewer,
//          and their copies run ahead into the next item.
// Block    128 * WARPGROUPS threads. A warpgroup owns 64 queries, a warp 16, a thread two (lane / 4, 8 more).
//          SPLIT_KEYS: all warpgroups own the same 64 queries and take turns over the keys, 64 at a time (so
//          there must be as many boxes as warpgroups); their parts are put together at the end.
// Shared   A ring of STAGES boxes (SPLIT_KEYS: one for each warpgroup), each box 64 keys of K (KEY_ROWS x 64)
//          and V (VALUE_ROWS x 64); one tile of Q for each 64 queries (KEY_ROWS x 64); mbarriers. All tiles
//          with the 128-byte swizzle.
// Copies   One thread for each ring asks for every box; full[slot] counts its bytes. empty[slot] gets one
//          arrival of each warp when it has done with the box; REFILL_LAG boxes later that thread refills it.
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
constexpr int RINGS = SPLIT_KEYS ? WARPGROUPS : 1;
constexpr int RING_THREADS = 128 * WARPGROUPS / RINGS;
constexpr int RING_BYTES = STAGES * BOX_BYTES;
constexpr int Q_TILES = SPLIT_KEYS ? 1 : WARPGROUPS;
constexpr int ITEM_QUERIES = 64 * Q_TILES;

// Shared memory, in bytes from its start; the barriers of a ring: full[STAGES], empty[STAGES].
constexpr int Q_AT = RINGS * RING_BYTES;
constexpr int Q_FULL_AT = Q_AT + Q_TILES * K_BYTES;
constexpr int Q_EMPTY_AT = Q_FULL_AT + 8;
constexpr int BARRIERS_AT = Q_EMPTY_AT + 8;
constexpr int EMPTY_AT = 8 * STAGES;

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

// One thread's part for a ring: it asks for the ring's boxes of all the block's items in order, as slots come
// free. Rings take turns over the boxes.
struct Copies {
    const TensorMap* k;
    const TensorMap* v;
    unsigned tiles_at, barriers;
    int first_box, boxes;
    int item, items, tiles;
    int bh = item / tiles;
    int box = first_box;
    Place place = {};

    __device__ __forceinline__ void load_next() {
        const unsigned full = barriers + 8 * place.slot;
        const unsigned destination = tiles_at + place.slot * BOX_BYTES;
        mbarrier_expect(full, BOX_BYTES);
        tensor_load(destination, k, box * BOX_TOKENS, 0, bh, full);
        tensor_load(destination + K_BYTES, v, box * BOX_TOKENS, 0, bh, full);
        place.advance();
        box += RINGS;
        if (box >= boxes) {
            box = first_box;
            item += gridDim.x;
            if (PERSISTENT) bh = item / tiles;
        }
    }

    __device__ __forceinline__ void start() {
        for (int slot = 0; slot < STAGES; ++slot) {
            mbarrier_init(barriers + 8 * slot, 1);
            mbarrier_init(barriers + EMPTY_AT + 8 * slot, RING_THREADS / 32);
        }
        mbarrier_fence_init();
        for (int slot = 0; slot < STAGES && item < items; ++slot)
            load_next();
    }

    // Refills the next slot once every warp has left it.
    __device__ __forceinline__ void refill() {
        if (item >= items) return;
        mbarrier_wait(barriers + EMPTY_AT + 8 * place.slot, place.parity ^ 1);
        load_next();
    }
};

__device__ __forceinline__ void load_q(unsigned shared, const TensorMap* q, int item, int tiles) {
    const int bh = item / tiles, first = (item - bh * tiles) * ITEM_QUERIES;
    mbarrier_expect(shared + Q_FULL_AT, Q_TILES * K_BYTES);
    for (int tile = 0; tile < Q_TILES; ++tile) {
        tensor_load(shared + Q_AT + tile * K_BYTES, q, first + 64 * tile, 0, bh, shared + Q_FULL_AT);
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

// Adds the four lanes' sums of each query and turns them into their inverses; stores lse where asked to.
__device__ __forceinline__ void finish_sums(Softmax& softmax, float* lse, bool writes_lse, int bh, int token,
                                            int tokens) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float sum = softmax.sum[h] + __shfl_xor_sync(0xffffffffu, softmax.sum[h], 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        softmax.sum[h] = 1.0f / sum;
        const int n = token + 8 * h + lane / 4;
        if (writes_lse && lane % 4 == 0 && n < tokens) {
            const float rest = fmaf(softmax.reference[h], LN2_LOW, logf(sum));
            lse[static_cast<long long>(bh) * tokens + n] = fmaf(softmax.reference[h], LN2_HIGH, rest);
        }
    }
}

// Divides by the sums and stores 8 channels of the warp's 16 queries from `token` on. The two 8 x 8 blocks
// are turned over so that a lane has two neighbouring tokens of one channel.
__device__ __forceinline__ void write_block(T* out, const float (&inverse)[2], const float* x, int block,
                                            int bh, int token, int tokens) {
    const int lane = threadIdx.x % 32;
    const unsigned low = movmatrix_trans(pack2(x[0] * inverse[0], x[1] * inverse[0], T()));
    const unsigned high = movmatrix_trans(pack2(x[2] * inverse[1], x[3] * inverse[1], T()));
    const int channel = 8 * block + lane / 4, n = token + lane % 4 * 2;
    if (VALUE_DIM % 8 != 0 && channel >= VALUE_DIM) return;
    T* row = out + (static_cast<long long>(bh) * VALUE_DIM + channel) * tokens + n;
    if (n < tokens) *reinterpret_cast<unsigned*>(row) = low;
    if (n + 8 < tokens) *reinterpret_cast<unsigned*>(row + 8) = high;
}

__device__ __forceinline__ void write_item(T* out, float* lse, Softmax& softmax,
                                           const float (&o)[VALUE_ROWS / 2], int bh, int token, int tokens) {
    finish_sums(softmax, lse, true, bh, token, tokens);
#pragma unroll
    for (int block = 0; block < VALUE_ROWS / 8; ++block) {
        write_block(out, softmax.sum, o + 4 * block, block, bh, token, tokens);
    }
}

// Puts the warpgroups' parts of the keys together, each brought to the largest reference, and stores: the
// warpgroups take turns over blocks of 8 channels. The parts meet in the rings, which are no longer in use.
__device__ __forceinline__ void merge_and_write(T* out, float* lse, const Softmax& part,
                                                unsigned char* memory, const float (&o)[VALUE_ROWS / 2],
                                                int group, int bh, int token, int tokens) {
    constexpr int REFERENCE = VALUE_ROWS / 2, SUM = REFERENCE + 2;
    float* parts = reinterpret_cast<float*>(memory) + threadIdx.x % 128;
    constexpr int NEXT_GROUP = RING_BYTES / sizeof(float), NEXT = 128;
    float* mine = parts + group * NEXT_GROUP;
    __syncthreads();  // no warp's wgmma reads a ring any more
#pragma unroll
    for (int i = 0; i < VALUE_ROWS / 2; ++i)
        mine[i * NEXT] = o[i];
    for (int h = 0; h < 2; ++h) {
        mine[(REFERENCE + h) * NEXT] = part.reference[h];
        mine[(SUM + h) * NEXT] = part.sum[h];
    }
    __syncthreads();

    Softmax whole = {{LOWEST, LOWEST}, {0, 0}};
    float factor[WARPGROUPS][2];
    for (int h = 0; h < 2; ++h) {
        for (int g = 0; g < WARPGROUPS; ++g) {
            whole.reference[h] = fmaxf(whole.reference[h], parts[g * NEXT_GROUP + (REFERENCE + h) * NEXT]);
        }
        for (int g = 0; g < WARPGROUPS; ++g) {
            factor[g][h] = exp2_approx(parts[g * NEXT_GROUP + (REFERENCE + h) * NEXT] - whole.reference[h]);
            whole.sum[h] += factor[g][h] * parts[g * NEXT_GROUP + (SUM + h) * NEXT];
        }
    }
    finish_sums(whole, lse, group == 0, bh, token, tokens);
    for (int block = group; block < VALUE_ROWS / 8; block += WARPGROUPS) {
        float x[4] = {0, 0, 0, 0};
        for (int g = 0; g < WARPGROUPS; ++g) {
            for (int i = 0; i < 4; ++i) {
                x[i] += factor[g][i / 2] * parts[g * NEXT_GROUP + (4 * block + i) * NEXT];
            }
        }
        write_block(out, whole.sum, x, block, bh, token, tokens);
    }
}

extern "C" __global__ void __launch_bounds__(128 * WARPGROUPS, BLOCKS_PER_MULTIPROCESSOR)
    psa_forward_hopper(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                       const __grid_constant__ TensorMap v_map, T* __restrict__ out, float* __restrict__ lse,
                       int tokens, int items, float scale_log2) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const int lane = threadIdx.x % 32;
    const int group =
        __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // told to be the same in the whole warp
    const int tiles = (tokens + ITEM_QUERIES - 1) / ITEM_QUERIES;
    const int all_boxes = (tokens + BOX_TOKENS - 1) / BOX_TOKENS;
    const int ring = SPLIT_KEYS ? group : 0;
    const int boxes = (all_boxes - ring + RINGS - 1) / RINGS;
    const unsigned ring_at = shared + ring * RING_BYTES;
    const unsigned barriers = shared + BARRIERS_AT + ring * 16 * STAGES;
    const bool copies_for_ring = threadIdx.x % RING_THREADS == 0;
    const bool negate = scale_log2 < 0;
    scale_log2 = fabsf(scale_log2);

    int item = blockIdx.x;
    if (threadIdx.x == 0) {
        mbarrier_init(shared + Q_FULL_AT, 1);
        mbarrier_init(shared + Q_EMPTY_AT, 4 * WARPGROUPS);
        mbarrier_fence_init();
        load_q(shared, &q_map, item, tiles);
    }
    Copies copies{&k_map, &v_map, ring_at, barriers, ring, all_boxes, item, items, tiles};
    if (copies_for_ring) copies.start();
    __syncthreads();

    const unsigned char* q_tile = memory + Q_AT + (SPLIT_KEYS ? 0 : group) * K_BYTES;
    const unsigned long long k_tile = wgmma_descriptor(ring_at);
    const unsigned long long v_tile = wgmma_descriptor(ring_at + K_BYTES);
    constexpr int NEXT_BOX = BOX_BYTES / 16, SECOND_HALF = 32 * 2 / 16;  // in descriptors

    unsigned q[KEY_STEPS][4], p0[2][4] = {}, p1[2][4] = {};
    float s0[16], s1[16], o[VALUE_ROWS / 2];
    Softmax softmax;
    Place place;
    int q_parity = 0;

    auto leave = [&](int slot) {
        if (lane == 0) mbarrier_arrive(barriers + EMPTY_AT + 8 * slot);
    };
    // Which 16 queries of its warpgroup's 64 a warp takes: another for each head, so that the warps with
    // queries in a last, partly filled tile are spread over the multiprocessor.
    auto band_of = [&](int bh) { return (threadIdx.x / 32 + bh) % 4; };
    auto first_scores = [&](int bh) {
        read_q(q, q_tile, band_of(bh), negate);
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
    mbarrier_wait(barriers, 0);
    first_scores(item / tiles);
    int seen = 0;  // boxes begun
    while (true) {
        const int next_item = item + gridDim.x;
        const bool more = PERSISTENT && next_item < items;
        if (PERSISTENT && threadIdx.x == 0 && more) {
            mbarrier_wait(shared + Q_EMPTY_AT, q_parity);
            load_q(shared, &q_map, next_item, tiles);
        }
        __syncwarp();
        const int bh = item / tiles;
        const int token =
            (item - bh * tiles) * ITEM_QUERIES + (SPLIT_KEYS ? 0 : 64 * group) + 16 * band_of(bh);
        const bool has_queries = token < tokens;
        for (int i = 0; i < VALUE_ROWS / 2; ++i)
            o[i] = 0;
        for (int h = 0; h < 2; ++h) {
            softmax.reference[h] = LOWEST;
            softmax.sum[h] = 0;
        }
        wgmma_wait<0>();
        if (!EVERY_MAXIMUM && has_queries) {
            step_maximum<true>(softmax.reference, s0, scale_log2, tokens - ring * BOX_TOKENS - lane % 4 * 2);
        }

#pragma unroll 1
        for (int box = 0; box + 1 < boxes; ++box) {
            softmax_step<false>(softmax, s0, p0, o, scale_log2, 0, has_queries);
            if (box > 0) leave(place.slot == 0 ? STAGES - 1 : place.slot - 1);
            if (copies_for_ring && seen++ >= REFILL_LAG) copies.refill();
            __syncwarp();
            Place next = place;
            next.advance();
            mbarrier_wait(barriers + 8 * next.slot, next.parity);
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

        const int keys_left = tokens - (ring + (boxes - 1) * RINGS) * BOX_TOKENS;  // 64 or more: all exist
        const int keys = keys_left - lane % 4 * 2;
        const unsigned long long v = v_tile + place.slot * NEXT_BOX;
        softmax_step<true>(softmax, s0, p0, o, scale_log2, keys, has_queries);
        if (boxes > 1) leave(place.slot == 0 ? STAGES - 1 : place.slot - 1);
        if (copies_for_ring && seen++ >= REFILL_LAG) copies.refill();
        __syncwarp();
        wgmma_fence();
        values(o, p0, v);
        wgmma_commit();
        if (keys_left > 32) {
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
            mbarrier_wait(barriers + 8 * place.slot, place.parity);
        }
        // Without a next item the product is of what lies there, and nobody reads it: a wgmma under a
        // condition would be waited for before the results are written.
        if (PERSISTENT) first_scores(next_item / tiles);
        if constexpr (SPLIT_KEYS) {
            merge_and_write(out, lse, softmax, memory, o, group, bh, token, tokens);
        } else {
            write_item(out, lse, softmax, o, bh, token, tokens);
        }
        if (!more) break;
        item = next_item;
    }
    wgmma_wait<0>();
}
