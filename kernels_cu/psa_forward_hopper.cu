// Fused attention on Hopper, straight from and to NCHW: wgmma on tiles that TMA brings. 16-bit types.
//
//   out[bh, c, n] = sum_k P[n, k] v[bh, c, k],  P = softmax over k of scale * q[bh, :, n] . k[bh, :, k]
//   lse[bh, n]    = natural log of the sum over k of exp(scale * q . k)
//
// Layout   q, k, v: tensor maps (tokens, channels, bh) over qkv (BH, 2 KEY_DIM + VALUE_DIM, N), one map each,
//          so that channels padded to what wgmma wants and tokens past N arrive as zeros. JOINED_BOX: nothing
//          is padded, and the map of k brings v, too. N % 8 == 0. out (BH, VALUE_DIM, N), lse (BH, N).
// Grid     One block for one bh and 64 * Q_TILES queries: blockIdx.x = bh * tiles + tile.
// Block    128 * WARPGROUPS threads. A warpgroup owns 64 queries, a warp 16, a thread two (lane / 4, 8 more).
//          SPLIT_KEYS: all warpgroups own the same 64 queries and take turns over the keys, 64 at a time (so
//          there must be as many boxes as warpgroups); their parts are put together at the end.
// Shared   A ring of STAGES boxes (SPLIT_KEYS: one for each warpgroup), each box 64 keys of K (KEY_ROWS x 64)
//          and V (VALUE_ROWS x 64); one tile of Q for each 64 queries (KEY_ROWS x 64); mbarriers. All tiles
//          with the 128-byte swizzle.
// Copies   One thread for each ring asks for every box; full[slot] counts its bytes. empty[slot] gets one
//          arrival of each warp when it has done with the box; two boxes later that thread refills it.
// Compute  S (64 x 32 keys) = Q^T K with Q in registers and K as it is, transposed by the descriptor; P goes
//          from the accumulators of S to the registers of operand A; O (64 x VALUE_ROWS) += P V^T. Two
//          buffers of S: while one is turned into P, the tensor cores make the other one and add the previous
//          P V^T.
// Softmax  In base 2, against a running reference of each query that is raised as soon as a weight could
//          exceed 2^8: what was summed is then scaled down, as in the exact online softmax (Milakov and
//          Gimelshein 2018). The reference is never above the running maximum, so no score is lost, however
//          large.
// Writes   Every element of out and lse is stored by one thread of one block: repeatable.
#include "common.cuh"
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
static_assert(STAGES >= 3, "a box is refilled two boxes after its use");

// Shared memory, in bytes from its start; the barriers of a ring: full[STAGES], empty[STAGES].
constexpr int Q_AT = RINGS * RING_BYTES;
constexpr int Q_FULL_AT = Q_AT + Q_TILES * K_BYTES;
constexpr int BARRIERS_AT = Q_FULL_AT + 8;
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

// Asks for box `box` of the keys into its slot of the ring; one thread of each ring calls it.
struct Copies {
    const TensorMap* k;
    const TensorMap* v;
    unsigned tiles_at, barriers;
    int bh, first_key;

    __device__ __forceinline__ void load(int slot, int box) const {
        const unsigned full = barriers + 8 * slot;
        const unsigned destination = tiles_at + slot * BOX_BYTES;
        const int key = first_key + box * RINGS * BOX_TOKENS;
        mbarrier_expect(full, BOX_BYTES);
        tensor_load(destination, k, key, 0, bh, full);
        if (!JOINED_BOX) tensor_load(destination + K_BYTES, v, key, 0, bh, full);
    }
};

// x / divisor; `inverse` is (2^32 - 1) / divisor, rounded down.
__device__ __forceinline__ int divide(unsigned x, int divisor, unsigned inverse) {
    const int quotient = __umulhi(x, inverse);  // or one less
    return quotient + (static_cast<int>(x) - quotient * divisor >= divisor);
}

// Asks for a block's head to be brought into L2: each of the head's blocks for its part.
__device__ __forceinline__ void fetch_ahead(const T* qkv, int block, int tokens, int tiles,
                                            unsigned tiles_inverse) {
    const int bh = divide(block, tiles, tiles_inverse), part = block - bh * tiles;
    const int head_units = (2 * KEY_DIM + VALUE_DIM) * (tokens / 8);  // of 16 bytes
    const int part_units = divide(head_units, tiles, tiles_inverse) + 1;
    const int units = min(part_units, head_units - part * part_units);
    if (units > 0)
        prefetch_to_l2(qkv + (static_cast<long long>(bh) * head_units + part * part_units) * 8, units * 16);
}

// The warp's 16 queries as operand A: a[h + 2 j] of step i = query (lane / 4 + 8 h), channel 16 i + 8 j + ...
// ldmatrix takes the row of channel 8 j + lane % 8 from lane, at the 16-byte unit 2 * band + h, swizzled.
// The sign of the scale goes into Q; so does a scale of 0, as a product: what is not a number stays so.
__device__ __forceinline__ void read_q(unsigned (&q)[KEY_STEPS][4], const unsigned char* tile, int band,
                                       float& scale) {
    const int lane = threadIdx.x % 32, row = lane % 8, h = lane / 8 % 2, j = lane / 16;
    const unsigned char* address = tile + (8 * j + row) * ROW_BYTES + (((2 * band + h) ^ row) * 16);
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step)
        ldmatrix_x4_trans(q[step], address + step * 16 * ROW_BYTES);
    if (scale > 0) return;
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step) {
        for (int i = 0; i < 4; ++i) {
            const float sign = scale < 0 ? -1.0f : 0.0f;
            const T* pair = reinterpret_cast<const T*>(&q[step][i]);
            q[step][i] = pack2(sign * to_float(pair[0]), sign * to_float(pair[1]), T());
        }
    }
    scale = scale < 0 ? -scale : 1.0f;
}

// Takes the keys from `keys` on, which do not exist, out of a step's scores; the thread's first key is 0.
__device__ __forceinline__ void remove_keys(float (&s)[16], int keys) {
#pragma unroll
    for (int i = 0; i < 16; ++i)
        s[i] = 8 * (i / 4) + i % 2 < keys ? s[i] : __uint_as_float(0xff800000u);
}

// P = 2^(scale S - reference) of a step's 32 keys, packed as operand A; `sums` of the thread's weights.
__device__ __forceinline__ void weigh(const float (&s)[16], unsigned (&p)[2][4], float (&sums)[2],
                                      const float (&reference)[2], float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float weight[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            weight[i] = exp2_approx(fmaf(s[8 * half + i], scale, -reference[i / 2 % 2]));
        // One pair after the other: little is left to add once the last weight is there.
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const float pair = weight[i] + weight[i + 1];
            sums[i / 2 % 2] = half == 0 && i < 4 ? pair : sums[i / 2 % 2] + pair;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            p[half][i] = pack2(weight[2 * i], weight[2 * i + 1], T());
    }
}

// The largest scaled score of a step, for each of the thread's two queries (not-a-number is passed over).
__device__ __forceinline__ void step_maximum(float (&maximum)[2], const float (&s)[16], float scale) {
    maximum[0] = maximum[1] = LOWEST;
#pragma unroll
    for (int i = 0; i < 16; ++i)
        maximum[i / 2 % 2] = fmaxf(maximum[i / 2 % 2], s[i] * scale);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        maximum[h] = fmaxf(maximum[h], __shfl_xor_sync(0xffffffffu, maximum[h], 1));
        maximum[h] = fmaxf(maximum[h], __shfl_xor_sync(0xffffffffu, maximum[h], 2));
    }
}

// Raises the references to a step's maximum and scales down what was summed.
__device__ __forceinline__ void raise(Softmax& softmax, float (&o)[VALUE_ROWS / 2], const float (&s)[16],
                                      float scale) {
    float maximum[2], factor[2];
    step_maximum(maximum, s, scale);
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

// One step's P. What is in flight meanwhile writes the other buffer of S and o. The branch at the end keeps
// the compiler from moving the exponentials behind the caller's wait for that; so they stand between its
// products.
__device__ __forceinline__ void softmax_step(Softmax& softmax, const float (&s)[16], unsigned (&p)[2][4],
                                             float (&o)[VALUE_ROWS / 2], float scale, bool has_queries) {
    float sums[2] = {0, 0};
    if (!SKIP_IDLE || has_queries) weigh(s, p, sums, softmax.reference, scale);
    // Not-a-number and infinity go this way, too. The warp decides as one: its lanes share the rows.
    if (__any_sync(0xffffffffu, !(sums[0] <= RAISE_ABOVE && sums[1] <= RAISE_ABOVE))) {
        wgmma_wait<0>();
        raise(softmax, o, s, scale);
        weigh(s, p, sums, softmax.reference, scale);
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
    if constexpr (IN_TURN) {
#pragma unroll
        for (int step = 0; step < (KEY_STEPS > 2 ? KEY_STEPS : 2); ++step) {
            if (step < KEY_STEPS) wgmma<1>(s, q[step], k + step * (16 * ROW_BYTES / 16), step > 0, T());
            if (step < 2) wgmma<0>(o, p[step], v + step * 2, true, T());
        }
    } else {
        scores(s, q, k);
        values(o, p, v);
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
        softmax.sum[h] = __fdividef(1.0f, sum);
        const int n = token + 8 * h + lane / 4;
        if (writes_lse && lane % 4 == 0 && n < tokens) {
            const float rest = fmaf(softmax.reference[h], LN2_LOW, log2_approx(sum) * LN2_HIGH);
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
                       const __grid_constant__ TensorMap v_map, const T* __restrict__ qkv,
                       T* __restrict__ out, float* __restrict__ lse, int tokens, unsigned tiles_inverse,
                       int blocks_at_once, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const int lane = threadIdx.x % 32;
    // Told to be the same in the whole warp.
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const int tiles = (tokens + ITEM_QUERIES - 1) / ITEM_QUERIES;
    const int bh = divide(blockIdx.x, tiles, tiles_inverse);
    const int first_token = (blockIdx.x - bh * tiles) * ITEM_QUERIES;
    const int all_boxes = (tokens + BOX_TOKENS - 1) / BOX_TOKENS;
    const int ring = SPLIT_KEYS ? group : 0;
    const int boxes = (all_boxes - ring + RINGS - 1) / RINGS;
    const unsigned ring_at = shared + ring * RING_BYTES;
    const unsigned barriers = shared + BARRIERS_AT + ring * 16 * STAGES;
    const bool copies_for_ring = threadIdx.x % RING_THREADS == 0;
    const Copies copies{&k_map, &v_map, ring_at, barriers, bh, ring * BOX_TOKENS};

    if (copies_for_ring) {
        tensor_map_prefetch(&q_map);
        tensor_map_prefetch(&k_map);
        if (!JOINED_BOX) tensor_map_prefetch(&v_map);
        for (int slot = 0; slot < STAGES; ++slot) {
            mbarrier_init(barriers + 8 * slot, 1);
            mbarrier_init(barriers + EMPTY_AT + 8 * slot, RING_THREADS / 32);
        }
        if (ring == 0) mbarrier_init(shared + Q_FULL_AT, 1);
        mbarrier_fence_init();
        if (ring == 0) {
            mbarrier_expect(shared + Q_FULL_AT, Q_TILES * K_BYTES);
            for (int tile = 0; tile < Q_TILES; ++tile) {
                tensor_load(shared + Q_AT + tile * K_BYTES, &q_map, first_token + 64 * tile, 0, bh,
                            shared + Q_FULL_AT);
            }
        }
#pragma unroll 1
        for (int box = 0; box < STAGES && box < boxes; ++box)
            copies.load(box, box);
        if (FETCH_AHEAD && ring == 0) {
            const int later = blockIdx.x + blocks_at_once;
            if (blockIdx.x < blocks_at_once) fetch_ahead(qkv, blockIdx.x, tokens, tiles, tiles_inverse);
            if (later < gridDim.x) fetch_ahead(qkv, later, tokens, tiles, tiles_inverse);
        }
    }
    __syncthreads();

    const unsigned char* q_tile = memory + Q_AT + (SPLIT_KEYS ? 0 : group) * K_BYTES;
    const unsigned long long k_tile = wgmma_descriptor(ring_at);
    const unsigned long long v_tile = wgmma_descriptor(ring_at + K_BYTES);
    constexpr int NEXT_BOX = BOX_BYTES / 16, SECOND_HALF = 32 * 2 / 16;  // in descriptors
    // Which 16 queries of its warpgroup's 64 a warp takes: another for each head, so that the warps with
    // queries in a last, partly filled tile are spread over the multiprocessor.
    const int band = (threadIdx.x / 32 + bh) % 4;
    const int token = first_token + (SPLIT_KEYS ? 0 : 64 * group) + 16 * band;
    const bool has_queries = token < tokens;

    unsigned q[KEY_STEPS][4], p0[2][4] = {}, p1[2][4] = {};
    float s0[16], s1[16], o[VALUE_ROWS / 2];
    Softmax softmax;
    for (int i = 0; i < 16; ++i)
        s0[i] = s1[i] = 0;
    for (int i = 0; i < VALUE_ROWS / 2; ++i)
        o[i] = 0;
    mbarrier_wait(shared + Q_FULL_AT, 0);
    read_q(q, q_tile, band, scale);
    mbarrier_wait(barriers, 0);
    wgmma_fence();
    scores(s0, q, k_tile);
    scores(s1, q, k_tile + SECOND_HALF);
    wgmma_commit();
    wgmma_wait<0>();
    const int last_keys = tokens - (ring + (boxes - 1) * RINGS) * BOX_TOKENS;  // 64 or more: all exist
    const int thread_keys = last_keys - lane % 4 * 2;
    if (boxes == 1 && last_keys < 32) remove_keys(s0, thread_keys);
    step_maximum(softmax.reference, s0, scale);
    weigh(s0, p0, softmax.sum, softmax.reference, scale);  // all at most 1

    int slot = 0, parity = 0;
#pragma unroll 1
    for (int box = 0; box + 1 < boxes; ++box) {
        // P of the first half is there; the scores of the second and the product with the previous box may be
        // in flight. Everything that branches stands before the wait for them: so the exponentials, which
        // need it, are in one block with the products, and the compiler mixes the two.
        const int this_slot = slot, left_parity = parity;
        if (++slot == STAGES) {
            slot = 0;
            parity ^= 1;
        }
        if (copies_for_ring && box > 1 && box - 2 + STAGES < boxes) {
            const int left = this_slot - 2 + (this_slot < 2 ? STAGES : 0);
            mbarrier_wait(barriers + EMPTY_AT + 8 * left, this_slot < 2 ? left_parity ^ 1 : left_parity);
            copies.load(left, box - 2 + STAGES);
        }
        __syncwarp();
        mbarrier_wait(barriers + 8 * slot, parity);
        wgmma_wait<0>();
        if (lane == 0 && box > 0) {
            mbarrier_arrive(barriers + EMPTY_AT + 8 * (this_slot == 0 ? STAGES - 1 : this_slot - 1));
        }
        const unsigned long long v = v_tile + this_slot * NEXT_BOX, k = k_tile + slot * NEXT_BOX;
        wgmma_fence();
        scores_and_values(s0, q, k, o, p0, v);
        wgmma_commit();
        softmax_step(softmax, s1, p1, o, scale, has_queries);
        wgmma_wait<0>();
        if (box + 2 == boxes && last_keys < 32) remove_keys(s0, thread_keys);
        wgmma_fence();
        scores_and_values(s1, q, k + SECOND_HALF, o, p1, v + SECOND_HALF);
        wgmma_commit();
        softmax_step(softmax, s0, p0, o, scale, has_queries);
    }

    const unsigned long long v = v_tile + slot * NEXT_BOX;
    wgmma_wait<0>();
    wgmma_fence();
    values(o, p0, v);
    wgmma_commit();
    if (last_keys > 32) {
        if (last_keys < 64) remove_keys(s1, thread_keys - 32);
        softmax_step(softmax, s1, p1, o, scale, has_queries);
        wgmma_wait<0>();
        wgmma_fence();
        values(o, p1, v + SECOND_HALF);
        wgmma_commit();
    }
    wgmma_wait<0>();
    if constexpr (SPLIT_KEYS) {
        merge_and_write(out, lse, softmax, memory, o, group, bh, token, tokens);
    } else {
        write_item(out, lse, softmax, o, bh, token, tokens);
    }
}
