// The portable forward: attention of whole heads from and to NCHW on mma.sync, for 16-bit types, sm_80 and
// later.
//
//   out = V softmax(scale * Q^T K)^T and lse = log of the sum of exp(scale * Q^T K), for every head
//
// Layout   qkv (BH, KEY_DIM + KEY_DIM + VALUE_DIM, tokens); out (BH, VALUE_DIM, tokens); lse (BH, tokens).
// Grid     BH * splits, 1-D: the blocks of a head are neighbours, each takes a run of its query tiles
// Block    32 * WARPS threads. A warp owns one tile of QUERIES queries at a time, tile by tile, and walks
//          over all keys, CHUNK at a time, in groups of 16
// Shared   SLOTS chunks of K and V, then each warp's tile of Q (psa_forward.py: shared_bytes). RESIDENT: a
//          slot for every chunk of the head; the block waits for the chunks one by one during its warps'
//          first tiles, after which no warp waits for another. Otherwise a ring: a block has one tile for
//          each warp
// Writes   each address of out and lse once, by the warp that owns its query: repeatable
//
// Channel-major operands are what the fragments want. S = Q^T K with Q (ldmatrix.trans) as operand a and K
// (ldmatrix.trans) as b; then O^T = V P^T with V (ldmatrix) as a and the scores' own accumulators, made
// weights and packed, as b: nothing moves between lanes.
//
// Softmax: weights are 2^(score - reference), with scores in units of log 2. A row's reference is its largest
// score seen so far plus HEADROOM, set at the first group and raised only when a weight outgrows a limit,
// which is one bit of the packed weight: any row is right, and most are never rescaled.
//
// Compile-time constants, from passes/psa_forward.py:
//   T                    __half or __nv_bfloat16
//   KEY_DIM, VALUE_DIM   channels; rounded up to 16 by zeros in shared memory
//   WARPS, QUERY_TILES   of a block, of a warp (16 queries each)
//   CHUNK, LOOKAHEAD     keys of a slot; chunks on their way while one is worked on
//   RESIDENT             see above
//   MIN_BLOCKS           blocks that a multiprocessor shall hold: bounds the registers
//   WIDTH                tokens of the widest access that the alignment of all rows allows: 8, 2 or 1
#include "common.cuh"
#include "tensor_core.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int QUERIES = 16 * QUERY_TILES;
constexpr int KEY_STEPS = (KEY_DIM + 15) / 16, VALUE_STEPS = (VALUE_DIM + 15) / 16;
constexpr int KEY_ROWS = 16 * KEY_STEPS, ROWS = KEY_ROWS + 16 * VALUE_STEPS;
// Rows are an odd number of 16-byte units long: the eight rows of a matrix lie in different banks.
constexpr int PITCH = CHUNK + 8, QUERY_PITCH = QUERIES + 8;
constexpr int ELEMENT = sizeof(T), ROW_BYTES = PITCH * ELEMENT;
constexpr int RING = LOOKAHEAD + 1;
constexpr int SLOT = ROWS * PITCH;

// How far above the largest score the reference is, and what tells of a pair of weights that one has outgrown
// its limit: the highest bit of a half, after an addition. bfloat16's weights may begin at 2^-6 and grow to
// 2, which the highest exponent bit tells. float16's begin at 1, since the smallest ones need every bit there
// is (2^-24 is the last), and grow to 2^9: that is 0x6000, to which 0x2000 more gives the highest bit of all.
template <class Element>
struct Range;
template <>
struct Range<__nv_bfloat16> {
    static constexpr int HEADROOM = 6;
    static constexpr unsigned ADDED = 0, OUTGROWN = 0x40004000u;
};
template <>
struct Range<__half> {
    static constexpr int HEADROOM = 0;
    static constexpr unsigned ADDED = 0x20002000u, OUTGROWN = 0x80008000u;
};
constexpr float HEADROOM = Range<T>::HEADROOM;
constexpr unsigned WARP = 0xffffffffu;

// Tells the compiler that all lanes have the same number: it takes no register of theirs.
__device__ __forceinline__ int uniform(int number) {
    return __shfl_sync(WARP, number, 0);
}

struct alignas(16) Unit {  // eight tokens
    unsigned pairs[4];
};

// ---- copies from rows of tokens ----
//
// Rows that start at multiples of 16 bytes (WIDTH 8) come unit by unit. Of others the aligned units that hold
// their tokens come, one more than the row has: there is room for it, as rows are padded by one unit. Once
// they have come, the warp that copied a row moves its tokens to the front (realign).

// The channel, counted from the first of K (or of Q), of a row of shared memory; -1 for rows of zeros.
__device__ __forceinline__ int channel_of(int row) {
    if (KEY_ROWS == KEY_DIM && ROWS == KEY_DIM + VALUE_DIM) return row;
    if (row < KEY_ROWS) return row < KEY_DIM ? row : -1;
    return row - KEY_ROWS < VALUE_DIM ? row - (KEY_ROWS - KEY_DIM) : -1;
}

// Tokens between a multiple of 16 bytes and a channel's first token behind it, or every eighth token of it.
__device__ __forceinline__ int misalignment(const T* head, int channel, int tokens) {
    const unsigned start = static_cast<unsigned>(reinterpret_cast<unsigned long long>(head)) / ELEMENT;
    return WIDTH == 8 ? 0 : (start + static_cast<unsigned>(channel) * static_cast<unsigned>(tokens)) % 8;
}

// Starts the copy of the first `count` tokens of an aligned unit, zeros behind them.
__device__ __forceinline__ void copy_unit(T* target, const T* source, int count, const T* qkv) {
    if (WIDTH == 8 || (count > 0 && source >= qkv)) {
        cp_async_16(target, count > 0 ? source : qkv, 2 * max(count, 0));
    } else if (count > 0) {  // it begins in front of the array
        for (int i = 0; i < 8; i++)
            target[i] = i < count && source + i >= qkv ? source[i] : from_float<T>(0.0f);
    }
}

// Eight tokens from `shift` on, of sixteen.
__device__ __forceinline__ Unit shifted(const Unit& low, const Unit& high, int shift) {
    unsigned word[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        word[i] = low.pairs[i];
        word[i + 4] = high.pairs[i];
    }
#pragma unroll
    for (int i = 0; i < 6; i++)
        word[i] = shift & 4 ? word[i + 2] : word[i];
#pragma unroll
    for (int i = 0; i < 5; i++)
        word[i] = shift & 2 ? word[i + 1] : word[i];
    Unit result;
#pragma unroll
    for (int i = 0; i < 4; i++)
        result.pairs[i] = shift & 1 ? word[i] >> 16 | word[i + 1] << 16 : word[i];
    return result;
}

// Who copies what of COUNT rows of TOKENS, from a head's channel CHANNEL on, shared by SHARERS warps: a lane
// always the same unit, of every (AT_ONCE * SHARERS)-th row.
template <int TOKENS, int COUNT, int CHANNEL, int SHARERS>
struct Rows {
    static constexpr int UNITS = TOKENS / 8 + (WIDTH == 8 ? 0 : 1), AT_ONCE = UNITS <= 32 ? 32 / UNITS : 1;
    static constexpr int STRIDE = AT_ONCE * SHARERS, PITCH = TOKENS + 8;
    static_assert(UNITS <= 32, "a warp copies whole rows");

    // Starts the copy of tokens from `first` on.
    static __device__ __forceinline__ void copy(T* rows, int sharer, const T* head, int first, int tokens,
                                                const T* qkv) {
        const int lane = derived_here(threadIdx.x % 32), unit = lane % UNITS;
        if (lane >= AT_ONCE * UNITS) return;
#pragma unroll WIDTH != 8 ? 1 : QUERY_TILES * KEY_STEPS == 4 ? 2 : 4  // as far as registers allow
        for (int step = 0; step < COUNT; step += STRIDE) {
            const int row = step + sharer * AT_ONCE + lane / UNITS, channel = channel_of(row);
            if (step + STRIDE > COUNT && row >= COUNT) return;
            const T* start = head + static_cast<long long>(CHANNEL + channel) * tokens + first;
            const int shift = misalignment(head, CHANNEL + channel, tokens);
            const int count = channel < 0 ? 0 : min(8, tokens - first + shift - 8 * unit);
            copy_unit(rows + row * PITCH + 8 * unit, start - shift + 8 * unit, count, qkv);
        }
    }

    // What copy brought, to where it belongs, in place; the warps and the rows as there. All lanes read a
    // unit and the next before one of them writes.
    static __device__ __forceinline__ void realign(T* rows, int sharer, const T* head, int first,
                                                   int tokens) {
        sharer = derived_here(sharer);
        const int lane = derived_here(threadIdx.x % 32), unit = lane % UNITS;
        const Unit zeros = {};
#pragma unroll 1
        for (int step = 0; step < COUNT; step += STRIDE) {
            const int row = step + sharer * AT_ONCE + lane / UNITS, channel = channel_of(row);
            const bool exists = lane < AT_ONCE * UNITS && row < COUNT && unit < TOKENS / 8;
            const int shift = misalignment(head, CHANNEL + channel, tokens);
            const int count = exists && channel >= 0 ? tokens - first + shift - 8 * unit : 0;
            Unit* place = reinterpret_cast<Unit*>(rows + row * PITCH + 8 * unit);
            const Unit low = count > 0 ? place[0] : zeros;
            const Unit high = count > 8 ? place[1] : zeros;
            __syncwarp();
            if (exists) *place = shifted(low, high, shift);
        }
    }
};
using Chunk = Rows<CHUNK, ROWS, KEY_DIM, WARPS>;  // of K and V
using Queries = Rows<QUERIES, KEY_ROWS, 0, 1>;

// K and V of CHUNK keys from `first` on; every warp of the block copies its share of the rows.
__device__ __forceinline__ void copy_chunk(T* slot, int warp, const T* head, int first, int tokens,
                                           const T* qkv) {
    Chunk::copy(slot, warp, head, first, tokens, qkv);
}

// To be called between a thread's wait for its copies and the barrier that shows them to others.
__device__ __forceinline__ void finish_chunk(T* slot, int warp, const T* head, int first, int tokens) {
    if constexpr (WIDTH != 8) {
        __syncwarp();
        Chunk::realign(slot, warp, head, first, tokens);
    }
}

// Q of a warp's tile from query `first` on; one warp.
__device__ __forceinline__ void copy_queries(T* tile, const T* head, int first, int tokens, const T* qkv) {
    Queries::copy(tile, 0, head, first, tokens, qkv);
}

__device__ __forceinline__ void finish_queries(T* tile, const T* head, int first, int tokens) {
    __syncwarp();
    if constexpr (WIDTH != 8) {
        Queries::realign(tile, 0, head, first, tokens);
        __syncwarp();
    }
}

// ---- one warp's tile of queries ----

// Scores of 16 queries and 16 keys: of keys 0 to 7, then 8 to 15, as m16n8k16 leaves them.
using Scores = float[QUERY_TILES][2][4];

// A number for each of the lane's rows: queries lane / 4 and 8 more.
struct RowValues {
    float of[QUERY_TILES][2];
};

struct QueryTile {
    unsigned q[QUERY_TILES][KEY_STEPS][4];
    float o[QUERY_TILES][VALUE_STEPS][2][4];  // transposed: rows are channels; queries 0 to 7, then 8 to 15
    RowValues reference, sum;                 // sum: of the keys that the lane holds

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
                reference.of[t][half] = negative_infinity<float>();
                sum.of[t][half] = 0;
#pragma unroll
                for (int step = 0; step < VALUE_STEPS; step++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        o[t][step][half][i] = 0;
            }
        }
    }

    __device__ __forceinline__ void multiply(Scores& s, SharedAddress keys) const {
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {
            unsigned k[4];
            ldmatrix_x4_trans(k, keys + step * 16 * ROW_BYTES);
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

    // Scores to packed weights p[half] = {keys 0 to 7, keys 8 to 15}, which are added to total. CAREFUL:
    // scores are scaled already, and keys from `left` on (counted from the lane's first) do not exist.
    // Returns whether one of the lane's weights has outgrown the limit (or is no number).
    template <bool CAREFUL>
    __device__ __forceinline__ bool weigh(unsigned (&p)[QUERY_TILES][2][2], RowValues& total, const Scores& s,
                                          float scale, int left) const {
        unsigned any = 0;
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float weight[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float score = s[t][i / 2][2 * half + i % 2], subtracted = reference.of[t][half];
                    weight[i] = exp2_approx(CAREFUL ? score - subtracted : fmaf(score, scale, -subtracted));
                    if (CAREFUL && i / 2 * 8 + i % 2 >= left) weight[i] = 0;
                }
                total.of[t][half] += (weight[0] + weight[1]) + (weight[2] + weight[3]);
                p[t][half][0] = pack2(weight[0], weight[1], T());
                p[t][half][1] = pack2(weight[2], weight[3], T());
                // Masked early on one side: so written, no compiler spills.
                any = any | (p[t][half][0] + Range<T>::ADDED) |
                      ((p[t][half][1] + Range<T>::ADDED) & Range<T>::OUTGROWN);
            }
        return any & Range<T>::OUTGROWN;
    }

    // Raises the references to what the scaled scores ask for, and brings o and sum to them.
    __device__ __forceinline__ void raise(const Scores& s, int left) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float largest = negative_infinity<float>();
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (i / 2 * 8 + i % 2 < left) largest = fmaxf(largest, s[t][i / 2][2 * half + i % 2]);
                largest = fmaxf(largest, __shfl_xor_sync(WARP, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(WARP, largest, 2));
                const float raised = fmaxf(reference.of[t][half], largest + HEADROOM);
                const float factor = exp2_approx(reference.of[t][half] - raised);
                reference.of[t][half] = raised;
                sum.of[t][half] *= factor;
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

    // The matrix of V of 16 channels and 16 keys.
    static __device__ __forceinline__ void load_values(unsigned (&v)[4], SharedAddress keys, int step) {
        ldmatrix_x4(v, keys + (KEY_ROWS + step * 16) * ROW_BYTES);
    }

    // o += V P^T for 16 keys; v: the first matrix of V.
    __device__ __forceinline__ void accumulate(const unsigned (&p)[QUERY_TILES][2][2], unsigned (&v)[4],
                                               SharedAddress keys) {
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; step++) {
            if (step > 0) load_values(v, keys, step);
#pragma unroll
            for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    mma_m16n8k16(o[t][step][half], v, p[t][half], o[t][step][half], T());
        }
    }

    // 16 keys; `keys` is the lane's row of the first matrix. False, and nothing done, if the references have
    // to be raised first.
    __device__ __forceinline__ bool attend(SharedAddress keys, float scale) {
        Scores s;
        multiply(s, keys);
        unsigned v[4];
        load_values(v, keys, 0);  // early: the vote is waited for
        unsigned p[QUERY_TILES][2][2];
        RowValues total = sum;
        if (__any_sync(WARP, weigh<false>(p, total, s, scale, 16))) return false;
        sum = total;
        accumulate(p, v, keys);
        return true;
    }

    // The same for any references, and any number of keys; `left` as in weigh.
    __device__ __forceinline__ void attend_with_care(SharedAddress keys, float scale, int left) {
        Scores s;
        multiply(s, keys);
        // Rounded first: of a huge score what rounding leaves is a large number itself, and no exponent.
#pragma unroll
        for (int i = 0; i < QUERY_TILES * 8; i++) {
            float& score = s[i / 8][i / 4 % 2][i % 4];
            score = __fmul_rn(score, scale);
        }
        raise(s, left);
        unsigned p[QUERY_TILES][2][2];
        weigh<true>(p, sum, s, scale, left);
        unsigned v[4];
        load_values(v, keys, 0);
        accumulate(p, v, keys);
    }

    // The groups of one chunk, of which `left` keys exist (more where others follow).
    __device__ __forceinline__ void attend_chunk(const T* slot, float scale, int left) {
        const int lane = threadIdx.x % 32;
        const SharedAddress keys(slot + lane % 16 * PITCH + lane / 16 * 8);
        left = min(left, CHUNK);
        for (int first = 0;; first += 16) {
#pragma unroll 1
            while (first + 16 <= left && attend(keys + first * ELEMENT, scale))
                first += 16;
            if (left <= first) break;
            attend_with_care(keys + first * ELEMENT, scale, left - first - lane % 4 * 2);
        }
    }

    __device__ __forceinline__ void store(T* out, float* lse, int first, int tokens) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float total = sum.of[t][half];
                total += __shfl_xor_sync(WARP, total, 1);
                total += __shfl_xor_sync(WARP, total, 2);
                const int row_query = first + t * 16 + half * 8 + lane / 4;
                // HEADROOM is taken back where it is exact, before the logarithm.
                if (lane % 4 == 0 && row_query < tokens)
                    lse[row_query] = fmaf(reference.of[t][half] - HEADROOM, 0.693147181f,
                                          logf(total * static_cast<float>(1 << Range<T>::HEADROOM)));
                scale_columns(t, half, 1.0f / total, lane);
            }
            const int query = first + t * 16 + lane % 4 * 2;
            T* target = out + static_cast<long long>(lane / 4) * tokens + query;
#pragma unroll
            for (int step = 0; step < VALUE_STEPS; step++)
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const float (&x)[2][4] = o[t][step];
                    const bool exists = VALUE_DIM % 16 == 0 || step * 16 + i * 4 + lane / 4 < VALUE_DIM;
                    const unsigned low = pack2(x[0][i], x[0][i + 1], T());
                    const unsigned high = pack2(x[1][i], x[1][i + 1], T());
                    if (WIDTH == 1 && first + t * 16 + 16 <= tokens) {
                        store_tokens(target, exists, low, high);
                    } else if (exists) {
                        store_pair(target, tokens - query, low);
                        store_pair(target + 8, tokens - query - 8, high);
                    }
                    target += 8 * static_cast<long long>(tokens);
                }
        }
    }

    // 16 tokens of a channel, of a row at any address, from four lanes that hold two pairs each. Where a pair
    // is not aligned, each lane stores its second token and the next lane's first; two are left, one at each
    // end. (Token by token, each store moves half as much.)
    static __device__ __forceinline__ void store_tokens(T* target, bool exists, unsigned low, unsigned high) {
        const int lane = threadIdx.x % 32, place = lane % 4, next = lane - place + (place + 1) % 4;
        const unsigned behind_low = __shfl_sync(WARP, place == 0 ? high : low, next);
        const unsigned behind_high = __shfl_sync(WARP, high, next);
        const bool shifts = reinterpret_cast<unsigned long long>(target) & 2;
        if (!exists) return;
        T* const pairs = target + shifts;
        *reinterpret_cast<unsigned*>(pairs) = shifts ? low >> 16 | behind_low << 16 : low;
        if (!shifts || place != 3)
            *reinterpret_cast<unsigned*>(pairs + 8) = shifts ? high >> 16 | behind_high << 16 : high;
        if (shifts && (place == 0 || place == 3))
            *reinterpret_cast<unsigned short*>(place == 0 ? target : target + 9) =
                static_cast<unsigned short>(place == 0 ? low : high >> 16);
    }

    // Of a pair of tokens those that exist: `left` from the first on.
    __device__ __forceinline__ void store_pair(T* target, int left, unsigned pair) {
        if constexpr (WIDTH > 1) {
            if (left > 0) *reinterpret_cast<unsigned*>(target) = pair;
        } else {
            unsigned short* halves = reinterpret_cast<unsigned short*>(target);
            if (left > 0) halves[0] = static_cast<unsigned short>(pair);
            if (left > 1) halves[1] = static_cast<unsigned short>(pair >> 16);
        }
    }
};

// scale: of the scores, times log2(e).
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    psa_forward(const T* __restrict__ qkv, T* __restrict__ out, float* __restrict__ lse, int tokens,
                int splits, float scale) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    T* slots = reinterpret_cast<T*>(shared_memory);
    const int chunks = (tokens + CHUNK - 1) / CHUNK, warp = uniform(threadIdx.x / 32);
    T* const query_tile = slots + (RESIDENT ? chunks : RING) * SLOT + warp * (KEY_ROWS * QUERY_PITCH);
    const int head_index = uniform(blockIdx.x / splits), split = blockIdx.x - head_index * splits;
    const T* const head = qkv + static_cast<long long>(head_index) * (2 * KEY_DIM + VALUE_DIM) * tokens;

    // The block's tiles are `tile` to `end`; the warps take them in turn.
    const int tiles = (tokens + QUERIES - 1) / QUERIES, share = tiles / splits, left_over = tiles % splits;
    int tile = share * split + min(split, left_over);
    const int end = uniform(tile + share + (split < left_over));
    tile = uniform(tile + warp);

    if (tile < end) copy_queries(query_tile, head, tile * QUERIES, tokens, qkv);
#pragma unroll
    for (int chunk = 0; chunk < LOOKAHEAD; chunk++) {
        if (chunk < chunks) copy_chunk(slots + chunk * SLOT, warp, head, chunk * CHUNK, tokens, qkv);
        cp_async_commit();  // group number `chunk`, possibly empty; the first brings Q, too
    }

    for (bool loading = true; loading || tile < end; loading = false, tile += WARPS) {
        QueryTile work;
        if (!loading) {
            __syncwarp();  // all lanes have read the tile before
            copy_queries(query_tile, head, tile * QUERIES, tokens, qkv);
            cp_async_commit();
            cp_async_wait<0>();
            finish_queries(query_tile, head, tile * QUERIES, tokens);
            work.start(query_tile);
        }
        int slot = 0;
        for (int chunk = 0; chunk < chunks; chunk++) {
            if (loading) {
                cp_async_wait<LOOKAHEAD - 1>();
                finish_chunk(slots + slot * SLOT, warp, head, chunk * CHUNK, tokens);
                __syncthreads();  // the chunk has come for every thread; no warp still reads the one before
                if (chunk == 0 && tile < end) {
                    finish_queries(query_tile, head, tile * QUERIES, tokens);
                    work.start(query_tile);
                }
                const int next = chunk + LOOKAHEAD;
                if (next < chunks) {
                    const int next_slot = RESIDENT ? next : (slot + LOOKAHEAD) % RING;
                    copy_chunk(slots + next_slot * SLOT, warp, head, next * CHUNK, tokens, qkv);
                }
                cp_async_commit();
            }
            if (tile < end) work.attend_chunk(slots + slot * SLOT, scale, tokens - chunk * CHUNK);
            slot = RESIDENT ? slot + 1 : (slot + 1) % RING;
        }
        if (tile < end) {
            const long long row = static_cast<long long>(head_index) * tokens;
            work.store(out + row * VALUE_DIM, lse + row, tile * QUERIES, tokens);
        }
        if constexpr (!RESIDENT) break;
    }
}
