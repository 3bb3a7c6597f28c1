// The portable forward: attention of whole heads from and to NCHW on mma.sync, for 16-bit types, sm_80 and later.
//
//   out = V softmax(scale * Q^T K)^T and lse = log of the sum of exp(scale * Q^T K), for every head
//
// Layout   qkv (BH, KEY_DIM + KEY_DIM + VALUE_DIM, tokens); out (BH, VALUE_DIM, tokens); lse (BH, tokens).
// Grid     BH * splits, 1-D: the blocks of a head are neighbours, each takes a run of its query tiles
// Block    32 * WARPS threads. A warp owns one tile of QUERIES queries at a time, tile by tile, and walks
//          over all keys, CHUNK at a time, in groups of 16
// Shared   SLOTS chunks of K and V, then each warp's tile of Q (psa_forward.py: shared_bytes). RESIDENT: a
//          slot for every chunk of the head; the block waits for the chunks one by one during its warps' first
//          tiles, after which no warp waits for another. Otherwise a ring: a block has one tile for each warp
// Writes   each address of out and lse once, by the warp that owns its query: repeatable
//
// Channel-major operands are what the fragments want. S = Q^T K with Q (ldmatrix.trans) as operand a and K
// (ldmatrix.trans) as b; then O^T = V P^T with V (ldmatrix) as a and the scores' own accumulators, made
// weights and packed, as b: nothing moves between lanes.
//
// Softmax: weights are 2^(score - reference), with scores in units of log 2. A row's reference is its largest
// score seen so far plus HEADROOM, set at the first group and raised only when a weight reaches 2, which is
// one bit of the packed weight: any row is right, and most are never rescaled.
//
// Compile-time constants, from passes/psa_forward.py:
//   T                    __half or __nv_bfloat16
//   KEY_DIM, VALUE_DIM   channels; rounded up to 16 by zeros in shared memory
//   WARPS, QUERY_TILES   of a block, of a warp (16 queries each)
//   CHUNK, LOOKAHEAD     keys of a slot; chunks on their way while one is worked on
//   RESIDENT             see above
//   MIN_BLOCKS           blocks that a multiprocessor shall hold: bounds the registers
//   WIDTH                tokens of the widest copy that all rows' alignment allows: 8, 4, 2 or 1
#include "common.cuh"
#include "tensor_core.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int QUERIES = 16 * QUERY_TILES;
constexpr int KEY_STEPS = (KEY_DIM + 15) / 16, VALUE_STEPS = (VALUE_DIM + 15) / 16;
constexpr int KEY_ROWS = 16 * KEY_STEPS, ROWS = KEY_ROWS + 16 * VALUE_STEPS;
// Rows are an odd number of 16-byte units long: the eight rows of a matrix lie in different banks.
constexpr int PITCH = CHUNK + 8, QUERY_PITCH = QUERIES + 8;
constexpr int RING = LOOKAHEAD + 1;
constexpr int SLOT = ROWS * PITCH;
constexpr float HEADROOM = 6.0f;
constexpr unsigned REACHED_TWO = 0x40004000u;  // the highest exponent bit of both halves of a pair
constexpr unsigned WARP = 0xffffffffu;

struct alignas(16) Eight {
    unsigned pairs[4];
};

// ---- copies from rows of tokens ----

__device__ __forceinline__ unsigned bits(T value) {
    return *reinterpret_cast<const unsigned short*>(&value);
}

// `count` (1 to 8) elements from any address, then zeros.
__device__ __forceinline__ Eight read_some(const T* source, int count) {
    Eight result;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned low = 2 * i < count ? bits(source[2 * i]) : 0;
        const unsigned high = 2 * i + 1 < count ? bits(source[2 * i + 1]) : 0;
        result.pairs[i] = low | high << 16;
    }
    return result;
}

// Eight elements from any address, by aligned words: the element behind them is read, too, and where the
// address is odd the one in front of them.
__device__ __forceinline__ Eight read_eight(const T* source) {
    const unsigned long long address = reinterpret_cast<unsigned long long>(source);
    const bool odd = address & 2;
    const unsigned* words = reinterpret_cast<const unsigned*>(address & ~3ull);
    unsigned word[5];
#pragma unroll
    for (int i = 0; i < 4; i++)
        word[i] = words[i];
    word[4] = odd ? words[4] : 0;
    Eight result;
#pragma unroll
    for (int i = 0; i < 4; i++)
        result.pairs[i] = odd ? word[i] >> 16 | word[i + 1] << 16 : word[i];
    return result;
}

// Starts the copy of up to WIDTH tokens (8 if WIDTH is 1: then it is finished, too), zeros behind `left`.
__device__ __forceinline__ void copy_piece(T* target, const T* source, int left, const T* qkv) {
    if constexpr (WIDTH == 1) {
        const bool inside = left > 8 && (source > qkv);
        const Eight piece = inside ? read_eight(source) : read_some(source, left);
        *reinterpret_cast<Eight*>(target) = piece;
    } else {
        const int count = max(0, min(WIDTH, left));
        const T* from = count == 0 ? qkv : source;
        if constexpr (WIDTH == 8) cp_async_16(target, from, 2 * count);
        if constexpr (WIDTH == 4) cp_async_8(target, from, 2 * count);
        if constexpr (WIDTH == 2) cp_async_4(target, from, 2 * count);
    }
}

constexpr int PIECE = WIDTH == 1 ? 8 : WIDTH;

// K and V of CHUNK keys from `first` on, into rows of PITCH; all threads of the block take part.
__device__ __forceinline__ void copy_chunk(T* slot, const T* keys, int first, int tokens, const T* qkv) {
    constexpr int PER_ROW = CHUNK / PIECE, PIECES = ROWS * PER_ROW;
#pragma unroll 1
    for (int piece = threadIdx.x; piece < PIECES; piece += THREADS) {
        const int row = piece / PER_ROW, token = piece % PER_ROW * PIECE;
        // The rows that round K's channels up stand between K and V, and not in global memory.
        const int channel = row < KEY_ROWS ? row : row - (KEY_ROWS - KEY_DIM);
        const bool exists = row < KEY_ROWS ? channel < KEY_DIM : channel < KEY_DIM + VALUE_DIM;
        const T* source = keys + static_cast<long long>(channel) * tokens + first + token;
        copy_piece(slot + row * PITCH + token, source, exists ? tokens - first - token : 0, qkv);
    }
}

// Q of a warp's tile from query `first` on, into rows of QUERY_PITCH; one warp.
__device__ __forceinline__ void copy_queries(T* tile, const T* queries, int first, int tokens, const T* qkv) {
    constexpr int PER_ROW = QUERIES / PIECE, PIECES = KEY_ROWS * PER_ROW;
#pragma unroll
    for (int piece = threadIdx.x % 32; piece < PIECES; piece += 32) {
        const int row = piece / PER_ROW, token = piece % PER_ROW * PIECE;
        const T* source = queries + static_cast<long long>(row) * tokens + first + token;
        copy_piece(tile + row * QUERY_PITCH + token, source, row < KEY_DIM ? tokens - first - token : 0, qkv);
    }
}

// ---- one warp's tile of queries ----

// Scores of 16 queries and 16 keys: of keys 0 to 7, then 8 to 15, as m16n8k16 leaves them.
using Scores = float[QUERY_TILES][2][4];

struct QueryTile {
    unsigned q[QUERY_TILES][KEY_STEPS][4];
    float o[QUERY_TILES][VALUE_STEPS][2][4];  // transposed: rows are channels; queries 0 to 7, then 8 to 15
    float reference[QUERY_TILES][2], sum[QUERY_TILES][2];  // of queries lane / 4 and 8 more; sum: the lane's part

    __device__ __forceinline__ void start(const T* tile) {
        const int lane = threadIdx.x % 32;
        const T* row = tile + (lane / 16 * 8 + lane % 8) * QUERY_PITCH + lane / 8 % 2 * 8;
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++) {
#pragma unroll
            for (int step = 0; step < KEY_STEPS; step++)
                ldmatrix_x4_trans(q[t][step], row + step * 16 * QUERY_PITCH + t * 16);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                reference[t][half] = negative_infinity<float>();
                sum[t][half] = 0;
#pragma unroll
                for (int step = 0; step < VALUE_STEPS; step++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        o[t][step][half][i] = 0;
            }
        }
    }

    __device__ __forceinline__ void multiply(Scores& s, const T* keys) const {
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {
            unsigned k[4];
            ldmatrix_x4_trans(k, keys + step * 16 * PITCH);
            const unsigned low[2] = {k[0], k[1]}, high[2] = {k[2], k[3]};
#pragma unroll
            for (int t = 0; t < QUERY_TILES; t++) {
                if (step == 0) {
                    const float zero[4] = {};
                    mma_m16n8k16(s[t][0], q[t][step], low, zero, T());
                    mma_m16n8k16(s[t][1], q[t][step], high, zero, T());
                } else {
                    mma_m16n8k16(s[t][0], q[t][step], low, s[t][0], T());
                    mma_m16n8k16(s[t][1], q[t][step], high, s[t][1], T());
                }
            }
        }
    }

    // Scores to packed weights p[half] = {keys 0 to 7, keys 8 to 15}. TAIL: keys from `left` on (counted from
    // the lane's first) do not exist. Returns whether one of the lane's weights reached 2 (or is no number).
    template <bool TAIL>
    __device__ __forceinline__ bool weigh(unsigned (&p)[QUERY_TILES][2][2], float (&part)[QUERY_TILES][2],
                                          const Scores& s, float scale, int left) const {
        unsigned any = 0;
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float weight[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    weight[i] = exp2_approx(fmaf(s[t][i / 2][2 * half + i % 2], scale, -reference[t][half]));
                    if (TAIL && i / 2 * 8 + i % 2 >= left) weight[i] = 0;
                }
                part[t][half] = (weight[0] + weight[1]) + (weight[2] + weight[3]);
                p[t][half][0] = pack2(weight[0], weight[1], T());
                p[t][half][1] = pack2(weight[2], weight[3], T());
                any |= p[t][half][0] | p[t][half][1];
            }
        return any & REACHED_TWO;
    }

    // Raises the references to what the scores ask for, and brings o and sum to them.
    template <bool TAIL>
    __device__ __forceinline__ void raise(const Scores& s, float scale, int left) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float largest = negative_infinity<float>();
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (!TAIL || i / 2 * 8 + i % 2 < left)
                        largest = fmaxf(largest, s[t][i / 2][2 * half + i % 2] * scale);
                largest = fmaxf(largest, __shfl_xor_sync(WARP, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(WARP, largest, 2));
                const float raised = fmaxf(reference[t][half], largest + HEADROOM);
                const float factor = exp2_approx(reference[t][half] - raised);
                reference[t][half] = raised;
                sum[t][half] *= factor;
                scale_columns(t, half, factor, lane);
            }
    }

    // Multiplies each query's column of o by the factor that the lanes of its row hold.
    __device__ __forceinline__ void scale_columns(int t, int half, float factor, int lane) {
        const float even = __shfl_sync(WARP, factor, lane % 4 * 8);
        const float odd = __shfl_sync(WARP, factor, lane % 4 * 8 + 4);
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; step++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                o[t][step][half][i] *= i % 2 ? odd : even;
    }

    // 16 keys; `keys` is the lane's row of the first matrix, `left` as in weigh.
    template <bool TAIL>
    __device__ __forceinline__ void attend(const T* keys, float scale, int left) {
        unsigned p[QUERY_TILES][2][2];
        float part[QUERY_TILES][2];
        bool reached;
        {
            Scores s;
            multiply(s, keys);
            reached = weigh<TAIL>(p, part, s, scale, left);
        }
        if (__any_sync(WARP, reached)) {  // rare: so the products are made again rather than kept
            Scores s;
            multiply(s, keys);
            raise<TAIL>(s, scale, left);
            weigh<TAIL>(p, part, s, scale, left);
        }
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                sum[t][half] += part[t][half];
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; step++) {
            unsigned v[4];
            ldmatrix_x4(v, keys + (KEY_ROWS + step * 16) * PITCH);
#pragma unroll
            for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    mma_m16n8k16(o[t][step][half], v, p[t][half], o[t][step][half], T());
        }
    }

    // The groups of one chunk, of which `left` keys exist (more where others follow).
    __device__ __forceinline__ void attend_chunk(const T* slot, float scale, int left) {
        const int lane = threadIdx.x % 32;
        const T* keys = slot + lane % 16 * PITCH + lane / 16 * 8;
        const int whole = min(left, CHUNK) & ~15;
#pragma unroll 1
        for (int first = 0; first < whole; first += 16)
            attend<false>(keys + first, scale, 16);
        if (whole < CHUNK && whole < left) attend<true>(keys + whole, scale, left - whole - lane % 4 * 2);
    }

    __device__ __forceinline__ void store(T* out, float* lse, int first, int tokens) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float total = sum[t][half];
                total += __shfl_xor_sync(WARP, total, 1);
                total += __shfl_xor_sync(WARP, total, 2);
                const int row_query = first + t * 16 + half * 8 + lane / 4;
                // HEADROOM is taken back where it is exact, before the logarithm.
                if (lane % 4 == 0 && row_query < tokens)
                    lse[row_query] = fmaf(reference[t][half] - HEADROOM, 0.693147181f,
                                          logf(total * static_cast<float>(1 << static_cast<int>(HEADROOM))));
                scale_columns(t, half, 1.0f / total, lane);

                const int query = first + t * 16 + half * 8 + lane % 4 * 2;
#pragma unroll
                for (int step = 0; step < VALUE_STEPS; step++) {
                    const int channel = step * 16 + lane / 4;
                    const float(&x)[4] = o[t][step][half];
                    store_pair(out, channel, query, tokens, pack2(x[0], x[1], T()));
                    store_pair(out, channel + 8, query, tokens, pack2(x[2], x[3], T()));
                }
            }
    }

    __device__ __forceinline__ void store_pair(T* out, int channel, int query, int tokens, unsigned pair) {
        if ((VALUE_DIM % 16 != 0 && channel >= VALUE_DIM) || query >= tokens) return;
        T* target = out + static_cast<long long>(channel) * tokens + query;
        if constexpr (WIDTH > 1) {
            *reinterpret_cast<unsigned*>(target) = pair;
        } else {
            unsigned short* halves = reinterpret_cast<unsigned short*>(target);
            halves[0] = static_cast<unsigned short>(pair);
            if (query + 1 < tokens) halves[1] = static_cast<unsigned short>(pair >> 16);
        }
    }
};

// The block's head, and where its arrays begin: derived anew where they are needed, which saves registers.
struct Head {
    long long index;
    __device__ __forceinline__ explicit Head(int splits) : index(blockIdx.x / splits) {}
    __device__ __forceinline__ const T* queries(const T* qkv, int tokens) const {
        return qkv + index * (2 * KEY_DIM + VALUE_DIM) * tokens;
    }
    __device__ __forceinline__ const T* keys(const T* qkv, int tokens) const {
        return queries(qkv, tokens) + static_cast<long long>(KEY_DIM) * tokens;
    }
};

// scale: of the scores, times log2(e).
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    psa_forward(const T* __restrict__ qkv, T* __restrict__ out, float* __restrict__ lse, int tokens, int splits,
                float scale) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    T* slots = reinterpret_cast<T*>(shared_memory);
    const int chunks = (tokens + CHUNK - 1) / CHUNK;
    const int warp = __shfl_sync(WARP, threadIdx.x / 32, 0);  // tells the compiler that it is one number
    T* query_tile = slots + (RESIDENT ? chunks : RING) * SLOT + warp * (KEY_ROWS * QUERY_PITCH);

    // The block's tiles are `tile` to `end`; the warps take them in turn.
    const int tiles = (tokens + QUERIES - 1) / QUERIES, split = blockIdx.x % splits;
    const int end = static_cast<int>(static_cast<long long>(tiles) * (split + 1) / splits);
    int tile = static_cast<int>(static_cast<long long>(tiles) * split / splits) + warp;

    if (tile < end) copy_queries(query_tile, Head(splits).queries(qkv, tokens), tile * QUERIES, tokens, qkv);
#pragma unroll
    for (int chunk = 0; chunk < LOOKAHEAD; chunk++) {
        if (chunk < chunks)
            copy_chunk(slots + chunk * SLOT, Head(splits).keys(qkv, tokens), chunk * CHUNK, tokens, qkv);
        cp_async_commit();  // group number `chunk`, possibly empty; the first brings Q, too
    }

    for (bool loading = true; loading || tile < end; loading = false, tile += WARPS) {
        QueryTile work;
        if (!loading) {
            __syncwarp();  // all lanes have read the tile before
            copy_queries(query_tile, Head(splits).queries(qkv, tokens), tile * QUERIES, tokens, qkv);
            cp_async_commit();
            cp_async_wait<0>();
            __syncwarp();
            work.start(query_tile);
        }
        int slot = 0;
        for (int chunk = 0; chunk < chunks; chunk++) {
            if (loading) {
                cp_async_wait<LOOKAHEAD - 1>();
                __syncthreads();  // the chunk has come for every thread; no warp still reads the one before
                if (chunk == 0 && tile < end) work.start(query_tile);
                const int next = chunk + LOOKAHEAD;
                if (next < chunks) {
                    const int next_slot = RESIDENT ? next : (slot + LOOKAHEAD) % RING;
                    copy_chunk(slots + next_slot * SLOT, Head(splits).keys(qkv, tokens), next * CHUNK, tokens, qkv);
                }
                cp_async_commit();
            }
            if (tile < end) work.attend_chunk(slots + slot * SLOT, scale, tokens - chunk * CHUNK);
            slot = RESIDENT ? slot + 1 : (slot + 1) % RING;
        }
        if (tile < end) {
            const long long head = Head(splits).index;
            work.store(out + head * VALUE_DIM * tokens, lse + head * tokens, tile * QUERIES, tokens);
        }
        if constexpr (!RESIDENT) break;
    }
}
