// The backward of fused attention on wgmma and TMA (sm_90a): d_qkv from d_out, qkv, out and lse.
//
// Layout: qkv, d_qkv (BH, 2 KEY_DIM + VALUE_DIM, tokens); out, d_out, d_v_branch (BH, VALUE_DIM, tokens);
//     lse (BH, tokens) float32. tokens % 8 == 0, bases 16-byte aligned. The copy engine reads q, k, v and
//     d_out through 3-D maps (tokens, channels, BH) in boxes of 64 tokens by all channels, the channels
//     rounded up to whole steps of 16: what is missing in tokens or channels arrives as zeros.
// Work: a head is cut into tiles of 64 tokens. A key task owns dK and dV of a tile of keys, a query task dQ
//     of a tile of queries, so S and dP are computed twice and no sum ever crosses a task. One warpgroup
//     runs a task: its tile is stationary (operand A), all tokens of the other side move past (operand B):
//                 stationary   moving    per step of 32 moving tokens
//         keys    K, V         Q, dO     S^T = K Q^T, dP^T = V dO^T; dV += P^T dO, dK += dS^T Q
//         queries Q, dO        K, V      S = Q K^T, dP = dO V^T;     dQ += dS K
//     with P = exp2(S scale log2 e - lse log2 e), dS = P (dP - delta), delta = rowsum(d_out out). P and dS
//     go from accumulators to operand A in registers.
// Order: a step's S and dP are started before the updates by the step before it. The exponentials of S run
//     while dP and those updates are still multiplied, and dS while the updates are.
// Grid: 1-D: waves of heads_per_wave heads, in a wave first all key blocks, then all query blocks; a block
//     has tiles_per_block tiles of one head and kind. Block: WARPGROUPS * 128; warpgroup w takes every
//     WARPGROUPS-th tile from the w-th.
// Shared memory: a box per warpgroup (its tile), STAGES boxes (moving), STAGES * 64 pairs (lse log2 e and
//     delta), barriers. RESIDENT: STAGES boxes hold the whole head, loaded once for all tiles of the block.
//     A key block then computes the pairs of all queries, a warp per box, with d_out from the box; a warp of
//     a query task those of its own 16 queries, in registers. Otherwise the boxes are a ring, a block has at
//     most WARPGROUPS tiles, and psa_backward_hopper_rows has written the pairs.
// Repeatable: every element of d_qkv is written once (ACCUMULATE: receives one addition), by the warpgroup
//     whose tile holds its token: a key task for K and V channels, a query task for Q channels. All sums run
//     in a fixed order.
#include "common.cuh"
#include "tensor_core.cuh"
#include "tensor_core_hopper.cuh"

constexpr int THREADS = 128 * WARPGROUPS;
constexpr int TILE = 64;  // tokens of a tile and of a box: one row of 128 bytes
constexpr int STEP = 32;  // moving tokens per step of the inner loop: half a box
constexpr int ROW_BYTES = 128;
constexpr int KEY_STEPS = (KEY_DIM + 15) / 16, VALUE_STEPS = (VALUE_DIM + 15) / 16;  // k16 steps of S and dP
constexpr int KEY_COLUMNS = (KEY_DIM + 7) / 8 * 8, VALUE_COLUMNS = (VALUE_DIM + 7) / 8 * 8;
constexpr int KEY_BYTES = 16 * KEY_STEPS * ROW_BYTES, VALUE_BYTES = 16 * VALUE_STEPS * ROW_BYTES;
constexpr int BOX_BYTES = KEY_BYTES + VALUE_BYTES;  // KEY_DIM channels (q or k), then VALUE_DIM channels
constexpr int PAIR_BYTES = TILE * 8;
constexpr int MOVING = WARPGROUPS * BOX_BYTES;  // offsets in shared memory
constexpr int PAIRS = MOVING + STAGES * BOX_BYTES;
constexpr int BARRIERS = PAIRS + STAGES * PAIR_BYTES;
constexpr int HEAD_CHANNELS = 2 * KEY_DIM + VALUE_DIM;

// In 16-byte units, as descriptors count.
constexpr int STEP_UNITS = STEP * 2 / 16, BOX_UNITS = BOX_BYTES / 16, VALUE_UNITS = KEY_BYTES / 16;
constexpr int CHANNELS_UNITS = 16 * ROW_BYTES / 16;  // 16 channels

// A ring slot is filled again once all warpgroups are done with it; the one that waits for them asks this
// many boxes after it was done itself, so that a small lead costs no waiting.
constexpr int REFILL_LAG = 2;

constexpr float NO_QUERY = 1e30f;  // lse of a query beyond the last: exp2 gives 0

// The compiler may not move uses of these accumulators above this point, nor their definitions below it.
template <int N>
__device__ __forceinline__ void pin(float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        asm volatile("" : "+f"(values[i])::"memory");
    }
}

__device__ __forceinline__ float2 unpack(unsigned pair, __nv_bfloat16) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

__device__ __forceinline__ float2 unpack(unsigned pair, __half) {
    return __half22float2(*reinterpret_cast<__half2*>(&pair));
}

// A value that is the same for the whole warp: by a shuffle, after which the compiler knows, too.
__device__ __forceinline__ int warp_uniform(int value) {
    return __shfl_sync(0xffffffffu, value, 0);
}

// Addresses in shared memory.
struct Shared {
    unsigned base;
    __device__ unsigned tile(int warpgroup) const { return base + warpgroup * BOX_BYTES; }
    __device__ unsigned box(int stage) const { return base + MOVING + stage * BOX_BYTES; }
    __device__ unsigned pairs(int stage) const { return base + PAIRS + stage * PAIR_BYTES; }
    __device__ unsigned full(int stage) const { return base + BARRIERS + 8 * stage; }
    __device__ unsigned empty(int stage) const { return base + BARRIERS + 8 * (STAGES + stage); }
    __device__ unsigned tile_full(int warpgroup) const {
        return base + BARRIERS + 8 * (2 * STAGES + warpgroup);
    }
};

// What a block works on. The maps are of the operands with KEY_DIM and with VALUE_DIM channels.
struct Work {
    const TensorMap *stationary_key, *stationary_value, *moving_key, *moving_value;
    const T *out, *d_v_branch;
    const float* lse;
    const float2* rows;  // of all heads, whole boxes each
    T* d_qkv;
    int bh, tokens, first_tile, last_tile;
    float scale, scale_log2;
    float2 log2_e;  // in two words
};

__device__ __forceinline__ void load_tile(const Shared& shared, const Work& work, int warpgroup, int tile) {
    const unsigned to = shared.tile(warpgroup), barrier = shared.tile_full(warpgroup);
    mbarrier_expect(barrier, BOX_BYTES);
    tensor_load(to, work.stationary_key, tile * TILE, 0, work.bh, barrier);
    tensor_load(to + KEY_BYTES, work.stationary_value, tile * TILE, 0, work.bh, barrier);
}

template <bool KEYS>
__device__ __forceinline__ void load_moving(const Shared& shared, const Work& work, int box, int stage) {
    constexpr bool WITH_PAIRS = KEYS && !RESIDENT;
    const unsigned to = shared.box(stage), barrier = shared.full(stage);
    mbarrier_expect(barrier, BOX_BYTES + (WITH_PAIRS ? PAIR_BYTES : 0));
    tensor_load(to, work.moving_key, box * TILE, 0, work.bh, barrier);
    tensor_load(to + KEY_BYTES, work.moving_value, box * TILE, 0, work.bh, barrier);
    if (WITH_PAIRS) {
        const long long boxes = (work.tokens + TILE - 1) / TILE;
        bulk_load(shared.pairs(stage), work.rows + (work.bh * boxes + box) * TILE, PAIR_BYTES, barrier);
    }
}

// sum[i] += the products of out and d_out at token i of four, over the channels group, group + GROUPS, ...
template <int GROUPS>
__device__ __forceinline__ void add_products(float (&sum)[4], const T* out, const T* d_out, int tokens,
                                             int group) {
#pragma unroll 16
    for (int first = 0; first < VALUE_DIM; first += GROUPS) {
        const int channel = first + group;
        if (VALUE_DIM % GROUPS == 0 || channel < VALUE_DIM) {
            const long long at = static_cast<long long>(channel) * tokens;
            const uint2 x = *reinterpret_cast<const uint2*>(out + at);
            const uint2 y = *reinterpret_cast<const uint2*>(d_out + at);
            const float2 x01 = unpack(x.x, T()), x23 = unpack(x.y, T());
            const float2 y01 = unpack(y.x, T()), y23 = unpack(y.y, T());
            sum[0] += x01.x * y01.x;
            sum[1] += x01.y * y01.y;
            sum[2] += x23.x * y23.x;
            sum[3] += x23.y * y23.y;
        }
    }
}

// The pair of a token, and of a token beyond the last. log2_e is scale_log2 / scale: scores and lse are
// multiplied by the same number, so that its rounding cancels where they are large.
__device__ __forceinline__ float2 make_pair(float lse, float2 log2_e, float delta, bool inside) {
    return inside ? make_float2(fmaf(lse, log2_e.x, lse * log2_e.y), delta) : make_float2(NO_QUERY, 0.f);
}

// sum[i] += the products of out and d_out at token i of eight, over every CHANNEL_STEP-th channel from
// `channel` on. out is in registers, d_out in a box: its rows are channels, the tokens the unit-th in a row.
template <int CHANNEL_STEP, int CHANNELS>
__device__ __forceinline__ void add_products_of_box(float (&sum)[8], const uint4 (&out)[CHANNELS],
                                                    const unsigned char* rows, int channel, int unit) {
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) {
        const int at = channel + i * CHANNEL_STEP;
        const uint4 d_out = *reinterpret_cast<const uint4*>(rows + at * ROW_BYTES + (unit ^ (at % 8)) * 16);
        const unsigned x[4] = {out[i].x, out[i].y, out[i].z, out[i].w};
        const unsigned y[4] = {d_out.x, d_out.y, d_out.z, d_out.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 a = unpack(x[j], T()), b = unpack(y[j], T());
            sum[2 * j] += a.x * b.x;
            sum[2 * j + 1] += a.y * b.y;
        }
    }
}

// Eight tokens of out for every CHANNEL_STEP-th channel from `channel` on; zeros beyond the last of either.
template <int CHANNEL_STEP, int CHANNELS>
__device__ __forceinline__ void load_out(uint4 (&values)[CHANNELS], const Work& work, int channel,
                                         int token) {
    const T* out = work.out + (static_cast<long long>(work.bh) * VALUE_DIM + channel) * work.tokens + token;
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) {
        values[i] = make_uint4(0, 0, 0, 0);
        if (token < work.tokens && channel + i * CHANNEL_STEP < VALUE_DIM) {
            values[i] =
                *reinterpret_cast<const uint4*>(out + static_cast<long long>(i) * CHANNEL_STEP * work.tokens);
        }
    }
}

// Sums over the lanes that differ in the lane bits FIRST, 2 FIRST, ... 16: they all receive them.
template <int FIRST>
__device__ __forceinline__ void sum_over_lanes(float (&sum)[8]) {
#pragma unroll
    for (int bit = FIRST; bit < 32; bit *= 2) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], bit);
        }
    }
}

__device__ constexpr int largest_divisor(int value, int most) {
    return value % most == 0 ? most : largest_divisor(value, most - 1);
}

// The pairs of all queries for a key block, a warp per box: lane % 8 is the unit of eight tokens, lane / 8
// the first of every fourth channel. out is on its way while the box, with d_out, is waited for.
__device__ __forceinline__ void fill_pairs(const Shared& shared, const unsigned char* memory, float2* pairs,
                                           const Work& work) {
    constexpr int ALL = 16 * VALUE_STEPS / 4, MOST = THREADS * BLOCKS_PER_SM > 384 ? 8 : 16;  // for registers
    constexpr int CHANNELS = largest_divisor(ALL, MOST);
    const int lane = threadIdx.x % 32, unit = lane % 8, group = lane / 8;
#pragma unroll 1
    for (int box = warp_uniform(threadIdx.x / 32); box < STAGES; box += THREADS / 32) {
        const int token = box * TILE + unit * 8;
        const bool inside = token < work.tokens;
        const unsigned char* rows = memory + MOVING + box * BOX_BYTES + KEY_BYTES;
        const int mine = token + 2 * group;  // the two tokens whose pairs this lane makes
        float2 lse = make_float2(0.f, 0.f), delta = lse;
        if (inside) {
            lse = *reinterpret_cast<const float2*>(work.lse + static_cast<long long>(work.bh) * work.tokens +
                                                   mine);
        }
        float sum[8] = {};
#pragma unroll
        for (int first = 0; first < ALL; first += CHANNELS) {
            uint4 out[CHANNELS];
            load_out<4>(out, work, 4 * first + group, token);
            mbarrier_wait(shared.full(box), 0);
            add_products_of_box<4>(sum, out, rows, 4 * first + group, unit);
        }
        sum_over_lanes<8>(sum);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            delta = group == i ? make_float2(sum[2 * i], sum[2 * i + 1]) : delta;
        }
        const float2 first = make_pair(lse.x, work.log2_e, delta.x, inside);
        const float2 second = make_pair(lse.y, work.log2_e, delta.y, inside);
        *reinterpret_cast<float4*>(pairs + mine) = make_float4(first.x, first.y, second.x, second.y);
    }
    __syncthreads();
}

// What a query task's pairs are made of, on its way: lane % 2 is the unit of eight tokens among the warp's
// 16, lane / 2 the first of every 16th channel; lse is of the two rows of this lane in the accumulators.
struct TileRows {
    uint4 out[VALUE_STEPS];
    float lse[2];

    // From the warp's first token on.
    __device__ void load(const Work& work, int token, int lane) {
        load_out<16>(out, work, lane / 2, token + lane % 2 * 8);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = token + lane / 4 + 8 * half;
            lse[half] =
                row < work.tokens ? work.lse[static_cast<long long>(work.bh) * work.tokens + row] : 0.f;
        }
    }

    __device__ void make_pairs(float2 (&pairs)[2], const unsigned char* d_out_rows, const Work& work,
                               int token, int warp, int lane) const {
        float sum[8] = {};
        add_products_of_box<16>(sum, out, d_out_rows, lane / 2, 2 * warp + lane % 2);
        sum_over_lanes<2>(sum);  // now even lanes have tokens 0 to 7, odd ones 8 to 15
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float delta = 0.f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float other = __shfl_sync(0xffffffffu, sum[i], half);
                delta = lane / 4 == i ? other : delta;
            }
            pairs[half] = make_pair(lse[half], work.log2_e, delta, token + lane / 4 + 8 * half < work.tokens);
        }
    }
};

// Operand A of a warp: its 16 tokens of a stationary tile, channels in steps of 16. The tile's rows are
// channels, so matrices are transposed as they are loaded: 0 and 1 are the first eight channels of the first
// and of the next eight tokens, 2 and 3 the next eight channels.
template <int STEPS>
__device__ __forceinline__ void load_fragments(unsigned (&a)[STEPS][4], const unsigned char* rows, int warp,
                                               int lane) {
    const int channel = lane % 8 + lane / 16 * 8;
    const int unit = 2 * warp + lane / 8 % 2;
    const unsigned char* row = rows + channel * ROW_BYTES + ((unit ^ (channel % 8)) * 16);
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        ldmatrix_x4_trans(a[k], row + k * 16 * ROW_BYTES);
    }
}

// d (64 tokens x 32 moving tokens) = the product over channels with A in registers, or in shared memory.
template <int STEPS>
__device__ __forceinline__ void multiply(float (&d)[16], const unsigned (&a)[STEPS][4],
                                         unsigned long long b) {
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        wgmma<1>(d, a[k], b + k * CHANNELS_UNITS, k > 0, T());
    }
}

template <int STEPS>
__device__ __forceinline__ void multiply(float (&d)[16], unsigned long long a, unsigned long long b) {
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        wgmma<1, 1>(d, a + k * CHANNELS_UNITS, b + k * CHANNELS_UNITS, k > 0, T());
    }
}

// d (64 tokens x channels) += the product over 32 moving tokens.
template <int N>
__device__ __forceinline__ void update(float (&d)[N], const unsigned (&a)[2][4], unsigned long long b) {
    wgmma<0>(d, a[0], b, true, T());
    wgmma<0>(d, a[1], b + STEP_UNITS / 2, true, T());
}

// Accumulators of 64 x 32 as operand A: the same thread holds the same places.
__device__ __forceinline__ void pack_fragments(unsigned (&a)[2][4], const float (&values)[16]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        a[i / 4][i % 4] = pack2(values[2 * i], values[2 * i + 1], T());
    }
}

// factor * d [+ branch] to channel-major memory, from the warp's first token on. movmatrix turns a thread's
// two channels of one token into two tokens of one channel, and the branch's two tokens the other way.
template <bool WITH_BRANCH, int CHANNELS, int N>
__device__ __forceinline__ void write(T* to, const T* branch, const float (&d)[N], float factor, int token,
                                      int tokens) {
    const int lane = threadIdx.x % 32;
    const int first = token + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
        const int channel = 8 * i + lane / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int n = first + 8 * half;
            const bool inside = n < tokens && (CHANNELS % 8 == 0 || channel < CHANNELS);
            const long long at = static_cast<long long>(channel) * tokens + n;
            float low = d[4 * i + 2 * half] * factor, high = d[4 * i + 2 * half + 1] * factor;
            if (WITH_BRANCH) {
                const unsigned pair = inside ? *reinterpret_cast<const unsigned*>(branch + at) : 0u;
                const float2 other = unpack(movmatrix_trans(pair), T());
                low += other.x;
                high += other.y;
            }
            const unsigned pair = movmatrix_trans(pack2(low, high, T()));
            if (inside && ACCUMULATE) {
                atomic_add_pair(to + at, pair);
            } else if (inside) {
                *reinterpret_cast<unsigned*>(to + at) = pair;
            }
        }
    }
}

// The gradients of a warp's tokens: dK and dV, or dQ.
template <bool KEYS>
__device__ __forceinline__ void write_task(const Work& work, const float (&d_key)[KEY_COLUMNS / 2],
                                           const float (&d_value)[VALUE_COLUMNS / 2], int token) {
    const long long bh = work.bh, tokens = work.tokens;
    T* d_head = work.d_qkv + bh * HEAD_CHANNELS * tokens;
    if (KEYS) {
        const T* branch = work.d_v_branch + bh * VALUE_DIM * tokens;
        write<false, KEY_DIM>(d_head + KEY_DIM * tokens, nullptr, d_key, work.scale, token, work.tokens);
        write<BRANCH, VALUE_DIM>(d_head + 2 * KEY_DIM * tokens, branch, d_value, 1.f, token, work.tokens);
    } else {
        write<false, KEY_DIM>(d_head, nullptr, d_key, work.scale, token, work.tokens);
    }
}

// The pairs of a thread's columns 8 j + 2 (lane % 4) + {0, 1} of a step.
__device__ __forceinline__ void load_columns(float2 (&column)[8], const float2* pairs, int lane) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float4 two = *reinterpret_cast<const float4*>(pairs + 8 * j + 2 * (lane % 4));
        column[2 * j] = make_float2(two.x, two.y);
        column[2 * j + 1] = make_float2(two.z, two.w);
    }
}

// Zeros in the columns of a step from the count-th on.
__device__ __forceinline__ void clear_columns(float (&values)[16], int count, int lane) {
    const int limit = count - 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        values[i] = i / 4 * 8 + i % 2 < limit ? values[i] : 0.f;
    }
    pin(values);  // keeps the caller's condition a branch
}

// A place in the ring, and the parity of the barrier phase that its visitor waits for.
struct Slot {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// All tasks of a block.
template <bool KEYS>
__device__ __forceinline__ void run(const Shared& shared, unsigned char* memory, const Work& work) {
    const int warpgroup = warp_uniform(threadIdx.x / 128);
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int boxes = (work.tokens + TILE - 1) / TILE, steps = (work.tokens + STEP - 1) / STEP;
    float2* pairs = reinterpret_cast<float2*>(memory + PAIRS);

    if (threadIdx.x == 0) {
        for (int i = 0; i < min(WARPGROUPS, work.last_tile - work.first_tile); ++i) {
            load_tile(shared, work, i, work.first_tile + i);
        }
        for (int i = 0; i < min(STAGES, boxes); ++i) {
            load_moving<KEYS>(shared, work, i, i);
        }
    }
    TileRows tile_rows;
    if (RESIDENT && !KEYS) {
        tile_rows.load(work, (work.first_tile + warpgroup) * TILE + 16 * warp, lane);
    }
    if (RESIDENT && KEYS) {
        fill_pairs(shared, memory, pairs, work);
    }

    const unsigned long long stationary = wgmma_descriptor(shared.tile(warpgroup));
    const unsigned long long moving = wgmma_descriptor(shared.box(0));
#pragma unroll 1
    for (int tile = work.first_tile + warpgroup; tile < work.last_tile; tile += WARPGROUPS) {
        constexpr bool IN_REGISTERS = !KEYS || KEYS_IN_REGISTERS;
        unsigned key_a[KEY_STEPS][4], value_a[VALUE_STEPS][4];
        float s[16], d_p[16];
        float d_key[KEY_COLUMNS / 2] = {}, d_value[VALUE_COLUMNS / 2] = {};  // a query task's d_key is dQ
        unsigned p_a[2][4], d_s_a[2][4];
        float2 row[2];  // the pairs of a query task's two rows in this thread

        mbarrier_wait(shared.tile_full(warpgroup), (tile - work.first_tile) / WARPGROUPS % 2);
        if (IN_REGISTERS) {
            load_fragments(key_a, memory + warpgroup * BOX_BYTES, warp, lane);
            load_fragments(value_a, memory + warpgroup * BOX_BYTES + KEY_BYTES, warp, lane);
        }
        if (!KEYS && RESIDENT) {
            const unsigned char* d_out_rows = memory + warpgroup * BOX_BYTES + KEY_BYTES;
            tile_rows.make_pairs(row, d_out_rows, work, tile * TILE + 16 * warp, warp, lane);
        } else if (!KEYS) {
            const float2* rows = work.rows + static_cast<long long>(work.bh) * boxes * TILE;
            rows += tile * TILE + 16 * warp + lane / 4;
            row[0] = rows[0];
            row[1] = rows[8];
        }
        pin(d_key);
        if (KEYS) {
            pin(d_value);
        }

        // S and dP of a step, in groups of their own: S is there first.
        const auto start_scores = [&](unsigned long long b) {
            wgmma_fence();
            if (IN_REGISTERS) {
                multiply(s, key_a, b);
                wgmma_commit();
                multiply(d_p, value_a, b + VALUE_UNITS);
            } else {
                multiply<KEY_STEPS>(s, stationary, b);
                wgmma_commit();
                multiply<VALUE_STEPS>(d_p, stationary + VALUE_UNITS, b + VALUE_UNITS);
            }
            wgmma_commit();
        };
        const auto start_updates = [&](unsigned long long b) {
            if (KEYS) {
                update(d_value, p_a, b + VALUE_UNITS);
            }
            update(d_key, d_s_a, b);
            wgmma_commit();
        };
        // P and dS of a step, in place, then packed. In flight before: S, dP, the updates by the step before.
        const auto finish_scores = [&](const float2* columns, bool last) {
            wgmma_wait<2>();
            pin(s);
            float2 column[8];  // a key task's columns are queries
            if (KEYS) {
                load_columns(column, columns, lane);
            }
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float2 pair = KEYS ? column[i / 4 * 2 + i % 2] : row[i / 2 % 2];
                s[i] = exp2_approx(at_most_zero(fmaf(s[i], work.scale_log2, -pair.x)));
            }
            wgmma_wait<1>();
            pin(s);
            pin(d_p);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float2 pair = KEYS ? column[i / 4 * 2 + i % 2] : row[i / 2 % 2];
                d_p[i] = s[i] * (d_p[i] - pair.y);
            }
            if (!KEYS && last) {  // keys beyond the last have a score of 0: their P is not 0
                clear_columns(d_p, work.tokens - (steps - 1) * STEP, lane);
            }
            wgmma_wait<0>();
            pin(d_key);
            if (KEYS) {
                pin(d_value);
                pack_fragments(p_a, s);
            }
            pack_fragments(d_s_a, d_p);
        };

        Slot slot, refill_slot;
        // The slot before is free: it was last read by the updates that have just ended.
        const auto pass_on_slot = [&](int box) {
            if (lane == 0) {
                mbarrier_arrive(shared.empty(slot.stage ? slot.stage - 1 : STAGES - 1));
            }
            if (box >= REFILL_LAG) {
                if (threadIdx.x == 0 && box - REFILL_LAG + STAGES < boxes) {
                    mbarrier_wait(shared.empty(refill_slot.stage), refill_slot.parity);
                    load_moving<KEYS>(shared, work, box - REFILL_LAG + STAGES, refill_slot.stage);
                }
                refill_slot.advance();
                __syncwarp();
            }
        };

        mbarrier_wait(shared.full(0), 0);
        unsigned long long b = moving;  // the step at hand
        start_scores(b);
        wgmma_commit();  // no updates yet: an empty group in their place
#pragma unroll 1
        for (int box = 0;; ++box) {
            const float2* columns = pairs + slot.stage * TILE;
            finish_scores(columns, 2 * box + 1 == steps);
            if (!RESIDENT && box > 0) {
                pass_on_slot(box);
            }
            if (2 * box + 1 == steps) {
                break;
            }
            start_scores(b + STEP_UNITS);
            start_updates(b);
            b += STEP_UNITS;

            finish_scores(columns + STEP, 2 * box + 2 == steps);
            if (2 * box + 2 == steps) {
                break;
            }
            slot.advance();
            mbarrier_wait(shared.full(slot.stage), slot.parity);
            const unsigned long long next = moving + static_cast<unsigned long long>(slot.stage * BOX_UNITS);
            start_scores(next);
            start_updates(b);
            b = next;
        }
        wgmma_fence();
        start_updates(b);
        wgmma_wait<0>();
        pin(d_key);
        if (KEYS) {
            pin(d_value);
        }

        if (RESIDENT) {  // all four warps are done with the tile
            warpgroup_sync(warpgroup + 1);
            if (threadIdx.x % 128 == 0 && tile + WARPGROUPS < work.last_tile) {
                load_tile(shared, work, warpgroup, tile + WARPGROUPS);
            }
            __syncwarp();
            if (!KEYS) {
                tile_rows.load(work, (tile + WARPGROUPS) * TILE + 16 * warp, lane);
            }
        }
        write_task<KEYS>(work, d_key, d_value, tile * TILE + 16 * warp);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    psa_backward_hopper(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                        const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap d_out_map,
                        const T* __restrict__ out, const float* __restrict__ lse,
                        const float2* __restrict__ rows, const T* __restrict__ d_v_branch,
                        T* __restrict__ d_qkv, int heads, int heads_per_wave, int tiles_per_block, int tokens,
                        float scale, float scale_log2, float log2_e, float log2_e_low) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Shared shared{shared_address(memory)};

    const int tiles = (tokens + TILE - 1) / TILE;
    const int blocks_per_head = (tiles + tiles_per_block - 1) / tiles_per_block;
    const int wave = blockIdx.x / (2 * heads_per_wave * blocks_per_head);
    const int first_head = wave * heads_per_wave;
    const int key_blocks = min(heads_per_wave, heads - first_head) * blocks_per_head;
    const int block_of_wave = blockIdx.x - wave * (2 * heads_per_wave * blocks_per_head);
    const bool is_keys = block_of_wave < key_blocks;
    const int block = is_keys ? block_of_wave : block_of_wave - key_blocks;
    const int bh = warp_uniform(first_head + block / blocks_per_head);
    const int first_tile = warp_uniform(block % blocks_per_head * tiles_per_block);
    const int last_tile = min(first_tile + tiles_per_block, tiles);

    if (threadIdx.x == 0) {
        const int warpgroups = min(WARPGROUPS, last_tile - first_tile);
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(shared.full(i), 1);
            mbarrier_init(shared.empty(i), 4 * warpgroups);
        }
        for (int i = 0; i < WARPGROUPS; ++i) {
            mbarrier_init(shared.tile_full(i), 1);
        }
        mbarrier_fence_init();
    }
    __syncthreads();

    const float2 both_log2_e = make_float2(log2_e, log2_e_low);
    if (is_keys) {
        run<true>(shared, memory,
                  Work{&k_map, &v_map, &q_map, &d_out_map, out, d_v_branch, lse, rows, d_qkv, bh, tokens,
                       first_tile, last_tile, scale, scale_log2, both_log2_e});
    } else {
        run<false>(shared, memory,
                   Work{&q_map, &d_out_map, &k_map, &v_map, out, d_v_branch, lse, rows, d_qkv, bh, tokens,
                        first_tile, last_tile, scale, scale_log2, both_log2_e});
    }
}

// The pairs (lse log2 e, delta) of every query, whole boxes per head, for heads that are not resident.
// Grid: BH * boxes. Block: 128: thread t takes tokens 4 (t % 16) ... of the box, and every eighth channel
// from the t / 16-th. Reads out, d_out, lse; every element of rows is written by one thread.
extern "C" __global__ void __launch_bounds__(128)
    psa_backward_hopper_rows(const T* __restrict__ out, const T* __restrict__ d_out,
                             const float* __restrict__ lse, float2* __restrict__ rows, int tokens,
                             float log2_e, float log2_e_low) {
    constexpr int GROUPS = 8;
    __shared__ float partial[GROUPS][TILE];
    const int boxes = (tokens + TILE - 1) / TILE;
    const long long bh = blockIdx.x / boxes;
    const int first_token = blockIdx.x % boxes * TILE;
    const int quad = threadIdx.x % 16 * 4, group = threadIdx.x / 16;
    float sum[4] = {};
    if (first_token + quad < tokens) {
        const long long at = bh * VALUE_DIM * tokens + first_token + quad;
        add_products<GROUPS>(sum, out + at, d_out + at, tokens, group);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        partial[group][quad + i] = sum[i];
    }
    __syncthreads();
    if (threadIdx.x < TILE) {
        float delta = 0.f;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            delta += partial[i][threadIdx.x];
        }
        const int token = first_token + threadIdx.x;
        const bool inside = token < tokens;
        rows[static_cast<long long>(blockIdx.x) * TILE + threadIdx.x] = make_pair(
            inside ? lse[bh * tokens + token] : 0.f, make_float2(log2_e, log2_e_low), delta, inside);
    }
}
