// Fused attention on Hopper, straight from and to NCHW: wgmma on tiles that TMA brings. 16-bit types.
//
//   out[bh, c, n] = sum_k P[n, k] v[bh, c, k],  P = softmax over k of scale * q[bh, :, n] . k[bh, :, k]
//   lse[bh, n]    = natural log of the sum over k of exp(scale * q . k)
//
// Layout   q, k, v: tensor maps (tokens, channels, bh) over qkv (BH, 2 KEY_DIM + VALUE_DIM, N), one map each,
//          so that channels padded to what wgmma wants and tokens past N arrive as zeros. JOINED_BOX: nothing
//          is padded, and the map of k brings v, too. N % 8 == 0. out (BH, VALUE_DIM, N), lse (BH, N).
// Grid     One block for one bh and 64 queries: blockIdx.x = bh * tiles + tile.
// Block    128 * WARPGROUPS threads: a warp owns 16 queries, a thread two (lane / 4, 8 more). All warpgroups
//          own the same 64 queries and take turns over the keys, 64 at a time (so there must be as many boxes
//          as warpgroups); their parts are put together at the end.
// Shared   For each warpgroup a ring of STAGES boxes, each box 64 keys of K (KEY_ROWS x 64) and V (VALUE_ROWS
//          x 64); one tile of Q (KEY_ROWS x 64); mbarriers. All tiles with the 128-byte swizzle.
// Copies   One thread of each warpgroup asks for every box; full[slot] counts its bytes. empty[slot] gets one
//          arrival of each warp when it has done with the box; two boxes later that thread refills it.
// Compute  S (64 x 32 keys) = Q^T K with Q in registers and K as it is, transposed by the descriptor; P goes
//          from the accumulators of S to the registers of operand A; O (64 x VALUE_ROWS) += P V^T. Two
//          buffers of S: while one is turned into P, the tensor cores make the other one and add the previous
//          P V^T.
// Softmax  In base 2. The first pass subtracts a fixed reference from each query's scores, the maximum over
//          its first 32 keys, and asks at the end whether all that was summed stayed in range. Where it did
//          not, the block does its queries again with the exact online softmax (Milakov and Gimelshein 2018).
//          Asking, and raising the reference, inside the loop cost up to 9 % on an H200.
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
constexpr int RING_BYTES = STAGES * BOX_BYTES;
static_assert(STAGES >= 3, "a box is refilled two boxes after its use");

// Shared memory, in bytes from its start; the barriers of a ring: full[STAGES], empty[STAGES].
constexpr int Q_AT = WARPGROUPS * RING_BYTES;
constexpr int Q_FULL_AT = Q_AT + K_BYTES;
constexpr int BARRIERS_AT = Q_FULL_AT + 8;
constexpr int EMPTY_AT = 8 * STAGES;
// In descriptors: from one box to the next, and from a box's first 32 keys to its others.
constexpr int NEXT_BOX = BOX_BYTES / 16, SECOND_HALF = 32 * 2 / 16;

// What a thread's weights of a query may add up to in the first pass. Modest sums are of the size that exact
// ones have. Larger ones do where nothing became infinite on the way: neither a weight in 16 bits, nor the
// output, whose values may be large, too. The logarithm of still larger ones is not exact enough. And all of
// a query's weights together are 1 or more, but where the scores are so large that rounding moved the
// reference.
constexpr float MODEST_SUM = 32.0f, LARGEST_SUM = 1099511627776.0f, LEAST_SUM = 0.5f;
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

// A warpgroup's part of the keys and the ring they come through.
struct Ring {
    const TensorMap* k_map;
    const TensorMap* v_map;
    unsigned tiles_at, barriers;
    unsigned long long k, v;  // descriptors of the first slot's
    int bh, first_key;
    int boxes;
    int last_keys;  // of the last box: 64 or more where all of them exist
    bool copies;    // whether this thread asks for the boxes

    __device__ __forceinline__ unsigned full(int slot) const { return barriers + 8 * slot; }
    __device__ __forceinline__ unsigned empty(int slot) const { return barriers + EMPTY_AT + 8 * slot; }

    // Asks for a box into its slot; the thread that copies calls it.
    __device__ __forceinline__ void load(int slot, int box) const {
        const unsigned destination = tiles_at + slot * BOX_BYTES;
        const int key = first_key + box * WARPGROUPS * BOX_TOKENS;
        mbarrier_expect(full(slot), BOX_BYTES);
        tensor_load(destination, k_map, key, 0, bh, full(slot));
        if (!JOINED_BOX) tensor_load(destination + K_BYTES, v_map, key, 0, bh, full(slot));
    }

    // Asks for box `box` - 2 + STAGES where there is such a box; its slot is the one left two boxes ago.
    __device__ __forceinline__ void refill(int box, int slot, int parity) const {
        if (!copies || box < 2 || box - 2 + STAGES >= boxes) return;
        const int left = slot - 2 + (slot < 2 ? STAGES : 0);
        mbarrier_wait(empty(left), slot < 2 ? parity ^ 1 : parity);
        load(left, box - 2 + STAGES);
    }

    // How many of the thread's keys of a step of the last box exist, counting from its first key.
    __device__ __forceinline__ int thread_keys(int step) const {
        return last_keys - 32 * step - threadIdx.x % 4 * 2;
    }
};

// x / divisor; `inverse` is (2^32 - 1) / divisor, rounded down.
__device__ __forceinline__ int divide(unsigned x, int divisor, unsigned inverse) {
    const int quotient = __umulhi(x, inverse);  // or one less
    return quotient + (static_cast<int>(x) - quotient * divisor >= divisor);
}

// The warp's 16 queries as operand A: a[h + 2 j] of step i = query (lane / 4 + 8 h), channel 16 i + 8 j + ...
// ldmatrix takes the row of channel 8 j + lane % 8 from lane, at the 16-byte unit 2 * warp + h, swizzled.
__device__ __forceinline__ void read_q(unsigned (&q)[KEY_STEPS][4], const unsigned char* tile) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int row = lane % 8, h = lane / 8 % 2, j = lane / 16;
    const unsigned char* address = tile + (8 * j + row) * ROW_BYTES + (((2 * warp + h) ^ row) * 16);
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step)
        ldmatrix_x4_trans(q[step], address + step * 16 * ROW_BYTES);
}

// Whether the i-th of a thread's scores of a step belongs to one of the first `keys` keys, where `keys`
// counts from the thread's own first key.
__device__ __forceinline__ bool exists(int i, int keys) {
    return 8 * (i / 4) + i % 2 < keys;
}

// P = 2^(scale S - reference) of a step's 32 keys, packed as operand A; 0 for keys that do not exist. Adds
// the thread's weights to its sums.
template <bool ALL_EXIST>
__device__ __forceinline__ void weigh(const float (&s)[16], unsigned (&p)[2][4], Softmax& softmax,
                                      float scale, int keys) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float weight[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float score = s[8 * half + i], subtracted = softmax.reference[i / 2 % 2];
            // Of huge scores what rounding leaves is a large number itself: rounded as the reference was.
            weight[i] = exp2_approx(ALL_EXIST ? fmaf(score, scale, -subtracted)
                                              : __fmul_rn(score, scale) - subtracted);
            if (!ALL_EXIST && !exists(8 * half + i, keys)) weight[i] = 0;
        }
        // One pair after the other: little is left to add once the last weight is there.
#pragma unroll
        for (int i = 0; i < 8; i += 2)
            softmax.sum[i / 2 % 2] += weight[i] + weight[i + 1];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            p[half][i] = pack2(weight[2 * i], weight[2 * i + 1], T());
    }
}

__device__ __forceinline__ void weigh_all(const float (&s)[16], unsigned (&p)[2][4], Softmax& softmax,
                                          float scale) {
    weigh<true>(s, p, softmax, scale, 32);
}

// The largest scaled score of a step, for each of the thread's two queries (not-a-number is passed over).
__device__ __forceinline__ void step_maximum(float (&maximum)[2], const float (&s)[16], float scale,
                                             int keys) {
    maximum[0] = maximum[1] = LOWEST;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float score = exists(i, keys) ? s[i] * scale : LOWEST;
        maximum[i / 2 % 2] = fmaxf(maximum[i / 2 % 2], score);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        maximum[h] = fmaxf(maximum[h], __shfl_xor_sync(0xffffffffu, maximum[h], 1));
        maximum[h] = fmaxf(maximum[h], __shfl_xor_sync(0xffffffffu, maximum[h], 2));
    }
}

// Raises the references to a step's maximum and scales down what was summed.
__device__ __forceinline__ void raise(Softmax& softmax, float (&o)[VALUE_ROWS / 2], const float (&s)[16],
                                      float scale, int keys) {
    float maximum[2], factor[2];
    step_maximum(maximum, s, scale, keys);
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

// One 16-channel step of S = Q^T K for 32 keys: K's rows are channels, its keys run along them (transposed).
__device__ __forceinline__ void scores_step(float (&s)[16], const unsigned (&q)[KEY_STEPS][4],
                                            unsigned long long k, int step) {
    wgmma<1>(s, q[step], k + step * (16 * ROW_BYTES / 16), step > 0, T());
}

__device__ __forceinline__ void scores(float (&s)[16], const unsigned (&q)[KEY_STEPS][4],
                                       unsigned long long k) {
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step)
        scores_step(s, q, k, step);
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
        if (step < KEY_STEPS) scores_step(s, q, k, step);
        if (step < 2) wgmma<0>(o, p[step], v + step * 2, true, T());
    }
}

// The first pass's reference: the maximum of the first keys.
__device__ __forceinline__ void start(Softmax& softmax, const float (&s)[16], float scale, int keys) {
    step_maximum(softmax.reference, s, scale, keys);
#pragma unroll
    for (int h = 0; h < 2; ++h)
        softmax.sum[h] = 0;
}

// All keys of the ring against a reference that stays as it is. At the end every box was brought and waited
// for, and nothing is in flight.
__device__ __forceinline__ void first_pass(const Ring& ring, const unsigned (&q)[KEY_STEPS][4], float scale,
                                           Softmax& softmax, float (&o)[VALUE_ROWS / 2]) {
    unsigned p0[2][4], p1[2][4];
    float s0[16], s1[16];
    for (int i = 0; i < 16; ++i)
        s0[i] = s1[i] = 0;
    for (int i = 0; i < VALUE_ROWS / 2; ++i)
        o[i] = 0;
    mbarrier_wait(ring.full(0), 0);
    wgmma_fence();
    scores(s0, q, ring.k);
    scores(s1, q, ring.k + SECOND_HALF);
    wgmma_commit();
    wgmma_wait<0>();
    start(softmax, s0, scale, ring.boxes == 1 ? ring.thread_keys(0) : 32);

    int slot = 0, parity = 0;
#pragma unroll 1
    for (int box = 0; box + 1 < ring.boxes; ++box) {
        // In flight: the scores of the second half and the product with the previous box. What branches
        // stands before the wait for them: so the exponentials that need it are in one block with the
        // products, and the compiler mixes the two.
        weigh_all(s0, p0, softmax, scale);
        const int this_slot = slot;
        ring.refill(box, slot, parity);
        if (++slot == STAGES) {
            slot = 0;
            parity ^= 1;
        }
        __syncwarp();
        mbarrier_wait(ring.full(slot), parity);
        wgmma_wait<0>();
        if (threadIdx.x % 32 == 0 && box > 0)
            mbarrier_arrive(ring.empty(this_slot == 0 ? STAGES - 1 : this_slot - 1));
        const unsigned long long v = ring.v + this_slot * NEXT_BOX, k = ring.k + slot * NEXT_BOX;
        wgmma_fence();
        scores_and_values(s0, q, k, o, p0, v);
        wgmma_commit();
        weigh_all(s1, p1, softmax, scale);
        wgmma_wait<0>();
        wgmma_fence();
        scores_and_values(s1, q, k + SECOND_HALF, o, p1, v + SECOND_HALF);
        wgmma_commit();
    }

    const unsigned long long v = ring.v + slot * NEXT_BOX;
    weigh<false>(s0, p0, softmax, scale, ring.thread_keys(0));
    wgmma_wait<0>();
    wgmma_fence();
    values(o, p0, v);
    wgmma_commit();
    if (ring.last_keys > 32) {
        weigh<false>(s1, p1, softmax, scale, ring.thread_keys(1));
        wgmma_wait<0>();
        wgmma_fence();
        values(o, p1, v + SECOND_HALF);
        wgmma_commit();
    }
    wgmma_wait<0>();
}

// Whether the first pass may have left the range of a type; so it has where anything is not a number.
__device__ __forceinline__ bool left_range(const Softmax& softmax, const float (&o)[VALUE_ROWS / 2]) {
    bool vanished = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float two = softmax.sum[h] + __shfl_xor_sync(0xffffffffu, softmax.sum[h], 1);
        vanished |= !(two + __shfl_xor_sync(0xffffffffu, two, 2) >= LEAST_SUM);
    }
    if (vanished) return true;
    if (softmax.sum[0] < MODEST_SUM && softmax.sum[1] < MODEST_SUM) return false;
    float total =
        softmax.sum[0] < LARGEST_SUM && softmax.sum[1] < LARGEST_SUM ? 0 : __uint_as_float(0x7f800000u);
#pragma unroll
    for (int i = 0; i < VALUE_ROWS / 2; ++i)
        total += fabsf(o[i]);
    return !(total < 1e38f);
}

// The same again with the exact online softmax, one step after the other. The ring goes on where the first
// pass left it, as if the boxes came again after the last one.
__device__ __forceinline__ void exact_pass(const Ring& ring, const unsigned (&q)[KEY_STEPS][4], float scale,
                                           Softmax& softmax, float (&o)[VALUE_ROWS / 2]) {
    unsigned p[2][4];
    float s[16];
    for (int i = 0; i < 16; ++i)
        s[i] = 0;
    for (int i = 0; i < VALUE_ROWS / 2; ++i)
        o[i] = 0;
    for (int h = 0; h < 2; ++h) {
        softmax.reference[h] = LOWEST;
        softmax.sum[h] = 0;
    }
    if (ring.copies) {
#pragma unroll 1
        for (int box = 0; box < STAGES && box < ring.boxes; ++box)
            ring.load((ring.boxes + box) % STAGES, box);
    }
#pragma unroll 1
    for (int step = 0; step < 2 * ring.boxes; ++step) {
        const int box = step / 2, second = step % 2, turn = ring.boxes + box, slot = turn % STAGES;
        const int keys = box + 1 == ring.boxes ? ring.thread_keys(second) : 32;
        const int at = slot * NEXT_BOX + second * SECOND_HALF;
        mbarrier_wait(ring.full(slot), turn / STAGES % 2);
        wgmma_fence();
        scores(s, q, ring.k + at);
        wgmma_commit();
        wgmma_wait<0>();
        raise(softmax, o, s, scale, keys);
        weigh<false>(s, p, softmax, scale, keys);
        wgmma_fence();
        values(o, p, ring.v + at);
        wgmma_commit();
        wgmma_wait<0>();
        if (second == 0) continue;
        warpgroup_sync(1 + threadIdx.x / 128);  // all warps of the ring have done with the box
        if (ring.copies && box + STAGES < ring.boxes) ring.load(slot, box + STAGES);
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
    for (int block = 0; block < VALUE_ROWS / 8; ++block)
        write_block(out, softmax.sum, o + 4 * block, block, bh, token, tokens);
}

// Puts the warpgroups' parts of the keys together, each brought to the largest reference, and stores: the
// warpgroups take turns over blocks of 8 channels. The parts meet in the rings, which no warp uses any more.
__device__ __forceinline__ void merge_and_write(T* out, float* lse, const Softmax& part,
                                                unsigned char* memory, const float (&o)[VALUE_ROWS / 2],
                                                int group, int bh, int token, int tokens) {
    constexpr int REFERENCE = VALUE_ROWS / 2, SUM = REFERENCE + 2;
    float* parts = reinterpret_cast<float*>(memory) + threadIdx.x % 128;
    constexpr int NEXT_GROUP = RING_BYTES / sizeof(float), NEXT = 128;
    float* mine = parts + group * NEXT_GROUP;
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
                       int tokens, unsigned tiles_inverse, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    // Told to be the same in the whole warp.
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const int tiles = (tokens + 63) / 64;
    const int bh = divide(blockIdx.x, tiles, tiles_inverse);
    const int first_token = (blockIdx.x - bh * tiles) * 64;
    const int all_boxes = (tokens + BOX_TOKENS - 1) / BOX_TOKENS;
    Ring ring;
    ring.k_map = &k_map;
    ring.v_map = &v_map;
    ring.tiles_at = shared + group * RING_BYTES;
    ring.barriers = shared + BARRIERS_AT + group * 16 * STAGES;
    ring.k = wgmma_descriptor(ring.tiles_at);
    ring.v = wgmma_descriptor(ring.tiles_at + K_BYTES);
    ring.bh = bh;
    ring.first_key = group * BOX_TOKENS;
    ring.boxes = (all_boxes - group + WARPGROUPS - 1) / WARPGROUPS;
    ring.last_keys = tokens - (group + (ring.boxes - 1) * WARPGROUPS) * BOX_TOKENS;
    ring.copies = threadIdx.x % 128 == 0;

    if (ring.copies) {
        tensor_map_prefetch(&q_map);
        tensor_map_prefetch(&k_map);
        if (!JOINED_BOX) tensor_map_prefetch(&v_map);
        for (int slot = 0; slot < STAGES; ++slot) {
            mbarrier_init(ring.full(slot), 1);
            mbarrier_init(ring.empty(slot), 4);
        }
        if (group == 0) mbarrier_init(shared + Q_FULL_AT, 1);
        mbarrier_fence_init();
        if (group == 0) {
            mbarrier_expect(shared + Q_FULL_AT, K_BYTES);
            tensor_load(shared + Q_AT, &q_map, first_token, 0, bh, shared + Q_FULL_AT);
        }
#pragma unroll 1
        for (int box = 0; box < STAGES && box < ring.boxes; ++box)
            ring.load(box, box);
    }
    __syncthreads();

    const int token = first_token + threadIdx.x / 32 % 4 * 16;
    unsigned q[KEY_STEPS][4];
    float o[VALUE_ROWS / 2];
    Softmax softmax;
    mbarrier_wait(shared + Q_FULL_AT, 0);
    read_q(q, memory + Q_AT);
    first_pass(ring, q, scale, softmax, o);
    if (__syncthreads_or(left_range(softmax, o))) exact_pass(ring, q, scale, softmax, o);
    if constexpr (WARPGROUPS > 1) {
        merge_and_write(out, lse, softmax, memory, o, group, bh, token, tokens);
    } else {
        write_item(out, lse, softmax, o, bh, token, tokens);
    }
}
