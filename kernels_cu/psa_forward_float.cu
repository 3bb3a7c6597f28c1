// The portable forward of float32 and float64: attention of whole heads from and to NCHW on mma.sync at full
// accuracy, sm_80 and later; also the CPU execution.
//
//   out = V softmax(scale * Q^T K)^T and lse = log of the sum of exp(scale * Q^T K), for every head
//
// Layout   qkv (BH, KEY_DIM + KEY_DIM + VALUE_DIM, tokens); out (BH, VALUE_DIM, tokens); lse (BH, tokens).
// Grid     BH * PARTS * splits, 1-D, splits running fastest. A block takes WARPS neighbouring tiles of
//          QUERIES queries, and of V one part of VALUE_PART channels (PARTS > 1 where a warp's registers
//          cannot hold the sums of all channels: the scores are then made again for each part)
// Block    32 * WARPS threads. A warp owns one tile of queries and walks over all keys, CHUNK at a time, in
//          groups of 16. Warps without a tile only help to load
// Shared   two slots for a chunk of K and V, used in turn, and for float32 the chunk on its way, as it comes
//          (psa_forward_float.py: shared_bytes). Only the thread that copied an element there reads it
// Writes   each address of out and lse once, by the warp that owns its query (lse: for the first part of V):
//          repeatable
//
// float32 is made of products of 16-bit parts, m16n8k16. Tensor cores truncate as they add, so small products
// are added up apart from the large ones, and sums over groups of keys outside.
//     Q, K      three bfloat16 (8 bits each: nothing is lost, at any magnitude) and the six products of them
//               that are not 2^-26 and less
//     P, V      two float16 (11 bits each: 2^-24 is lost) and three products, half the work. Their range is
//               narrow: weights are scaled by the choice of the reference, each channel of V by the power
//               of two that its largest value in the chunk asks for, which is taken back as sums are added
//               up. A weight is exact to 2^-24 of itself or 2^-44 of its row's largest, a value to 2^-24 of
//               itself or 2^-50 of the channel's largest in the chunk
// K and V are split once per block, on their way into the slots, Q once per warp, weights as they are made.
// float64 needs none of this: m8n8k4.
//
// Softmax: weights are 2^(score - reference), with scores in units of log 2. A row's reference is its largest
// score seen so far minus LARGEST_WEIGHT, set at the first group and raised only when a weight would reach
// 2^WEIGHT_LIMIT: any row is right, and most are never rescaled.
//
// Compile-time constants, from passes/psa_forward_float.py:
//   T                    float or double
//   KEY_DIM, VALUE_DIM   channels; rounded up to whole products by zeros in shared memory
//   VALUE_PART           see above; a multiple of 16 (float) or 8 (double)
//   WARPS, QUERY_TILES   of a block, of a warp (16 queries each)
//   CHUNK                keys of a slot, a power of two from 16 on
//   MIN_BLOCKS           blocks that a multiprocessor shall hold: bounds the registers
//   WIDTH                elements of the widest copy that all rows' alignment allows: 4 (float), 2 or 1
#include "online_softmax.cuh"
#include "tensor_core.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int QUERIES = 16 * QUERY_TILES;
constexpr int GROUP = 16;  // keys
constexpr int HEAD_CHANNELS = 2 * KEY_DIM + VALUE_DIM;
constexpr int PARTS = (VALUE_DIM + VALUE_PART - 1) / VALUE_PART;
// Powers of two: of a row's largest weight when its reference is set, and of where it is raised (float16 ends
// at 2^16).
constexpr int LARGEST_WEIGHT = 8, WEIGHT_LIMIT = 15;
constexpr unsigned WARP = 0xffffffffu;

__host__ __device__ constexpr int round_up(int value, int unit) {
    return (value + unit - 1) / unit * unit;
}
// Accumulator tiles of 16 queries x 8 channels.
constexpr int COLUMNS = (PARTS == 1 ? round_up(VALUE_DIM, 8) : VALUE_PART) / 8;

__device__ __forceinline__ float power_of_two(float x) {
    return exp2_approx(x);
}
__device__ __forceinline__ double power_of_two(double x) {
    return exp2(x);
}

// The matrix products of one element type on chunks in shared memory, whose rows are channels. Scores of 16
// queries x 16 keys are two accumulator tiles of 16 x 8; with g = lane / 4, c = lane % 4, elements 0 and 1 of
// a tile are at (g, 2 c), (g, 2 c + 1) and elements 2 and 3 at (g + 8, 2 c), (g + 8, 2 c + 1).
//     Queries    operand A: 16 queries x CHANNEL_STEP channels; made of element(row, channel), both relative
//     multiply   s = Q^T K of the 16 keys from `first` on in the slot
//     update     o (16 queries x VALUE_PART channels) += the product of the weights p over these keys and V;
//                for float32 times 2^-WEIGHT_LIMIT, which keeps o as small as V
template <class Element>
struct Product;

template <>
struct Product<float> {
    using Stored = unsigned short;  // the bits of a part
    static constexpr int CHANNEL_STEP = 16;
    static constexpr bool SPLIT = true;
    // Rows are an odd number of 16-byte units long: the eight rows of a matrix lie in different banks.
    static constexpr int KEY_PITCH = CHUNK + 8, VALUE_PITCH = CHUNK + 8;
    static constexpr int KEY_ROWS = round_up(KEY_DIM, 16);
    // A slot: K's high, middle and low parts, V's high and low parts, and V's scales as floats.
    static constexpr int KEY_PLANE = KEY_ROWS * KEY_PITCH, VALUE_PLANE = VALUE_PART * VALUE_PITCH;
    static constexpr int VALUES = 3 * KEY_PLANE, SCALES = VALUES + 2 * VALUE_PLANE;
    static constexpr int SLOT = SCALES + 2 * VALUE_PART;
    static constexpr int STEPS = KEY_ROWS / CHANNEL_STEP;

    struct Queries {
        unsigned part[3][4];
    };

    // Two numbers into three pairs of bfloat16, high parts first.
    static __device__ __forceinline__ void split(unsigned (&part)[3], float first, float second) {
#pragma unroll
        for (int i = 0; i < 3; i++) {
            part[i] = pack2(first, second, __nv_bfloat16());
            first -= __uint_as_float(part[i] << 16);
            second -= __uint_as_float(part[i] & 0xffff0000u);
        }
    }

    static __device__ __forceinline__ float half_to_float(unsigned bits) {
        const unsigned short low = static_cast<unsigned short>(bits);
        __half half;
        memcpy(&half, &low, sizeof(half));
        return __half2float(half);
    }
    // Two numbers into two pairs of float16: high parts, and low parts times LOW, so that they are as large.
    static constexpr float LOW = 2048;
    static __device__ __forceinline__ void split(unsigned (&part)[2], float first, float second) {
        part[0] = pack2(first, second, __half());
        const float first_low = first - half_to_float(part[0]),
                    second_low = second - half_to_float(part[0] >> 16);
        part[1] = pack2(first_low * LOW, second_low * LOW, __half());
    }

    template <class Read>
    static __device__ __forceinline__ void load(Queries& a, Read element) {
        const int row = threadIdx.x % 32 / 4, channel = threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            unsigned part[3];
            const int at_row = row + i % 2 * 8, at_channel = channel + i / 2 * 8;
            split(part, element(at_row, at_channel), element(at_row, at_channel + 1));
#pragma unroll
            for (int plane = 0; plane < 3; plane++)
                a.part[plane][i] = part[plane];
        }
    }

    static __device__ __forceinline__ void multiply(float (&s)[QUERY_TILES][2][4],
                                                    const Queries (&q)[QUERY_TILES][STEPS],
                                                    const Stored* slot, int first) {
        constexpr __nv_bfloat16 TYPE = {};
        float small[QUERY_TILES][2][4] = {}, large[QUERY_TILES][2][4] = {};
        const Stored* row = slot + first + threadIdx.x % 16 * KEY_PITCH + threadIdx.x % 32 / 16 * 8;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            unsigned k[3][4];
#pragma unroll
            for (int plane = 0; plane < 3; plane++)
                ldmatrix_x4_trans(k[plane], row + plane * KEY_PLANE + step * 16 * KEY_PITCH);
#pragma unroll
            for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const unsigned (&a)[3][4] = q[t][step].part;
                    const unsigned b[3][2] = {{k[0][2 * j], k[0][2 * j + 1]},
                                              {k[1][2 * j], k[1][2 * j + 1]},
                                              {k[2][2 * j], k[2][2 * j + 1]}};
                    mma_m16n8k16(small[t][j], a[2], b[0], small[t][j], TYPE);
                    mma_m16n8k16(small[t][j], a[0], b[2], small[t][j], TYPE);
                    mma_m16n8k16(small[t][j], a[1], b[1], small[t][j], TYPE);
                    mma_m16n8k16(small[t][j], a[1], b[0], small[t][j], TYPE);
                    mma_m16n8k16(small[t][j], a[0], b[1], small[t][j], TYPE);
                    mma_m16n8k16(large[t][j], a[0], b[0], large[t][j], TYPE);
                }
        }
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int x = 0; x < 4; x++)
                    s[t][j][x] = small[t][j][x] + large[t][j][x];
    }

    static __device__ __forceinline__ void update(float (&o)[QUERY_TILES][COLUMNS][4],
                                                  const float (&p)[QUERY_TILES][2][4], const Stored* slot,
                                                  int first) {
        unsigned a[QUERY_TILES][2][4];  // accumulator tiles are operand A as they stand
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                unsigned part[2];
                split(part, p[t][i / 2][i % 2 * 2], p[t][i / 2][i % 2 * 2 + 1]);
                a[t][0][i] = part[0];
                a[t][1][i] = part[1];
            }
        const int lane = threadIdx.x % 32;
        const Stored* row =
            slot + VALUES + first + (lane % 8 + lane / 16 * 8) * VALUE_PITCH + lane / 8 % 2 * 8;
        const float2* scales = reinterpret_cast<const float2*>(slot + SCALES) + lane % 4;
#pragma unroll
        for (int i = 0; i < COLUMNS; i += 2) {
            unsigned v[2][4];
#pragma unroll
            for (int plane = 0; plane < 2; plane++)
                ldmatrix_x4(v[plane], row + plane * VALUE_PLANE + i * 8 * VALUE_PITCH);
#pragma unroll
            for (int j = 0; j < 2 && i + j < COLUMNS; j++) {
                const unsigned high[2] = {v[0][2 * j], v[0][2 * j + 1]},
                               low[2] = {v[1][2 * j], v[1][2 * j + 1]};
                const float2 scale = scales[(i + j) * 4];
#pragma unroll
                for (int t = 0; t < QUERY_TILES; t++) {
                    float small[4] = {}, large[4] = {};
                    mma_m16n8k16(small, a[t][1], high, small, __half());
                    mma_m16n8k16(small, a[t][0], low, small, __half());
                    mma_m16n8k16(large, a[t][0], high, large, __half());
#pragma unroll
                    for (int x = 0; x < 4; x++) {
                        const float sum = fmaf(small[x], 1 / LOW, large[x]);
                        o[t][i + j][x] = fmaf(sum, x % 2 ? scale.y : scale.x, o[t][i + j][x]);
                    }
                }
            }
        }
    }
};

template <>
struct Product<double> {
    using Stored = double;
    static constexpr int CHANNEL_STEP = 4;
    static constexpr bool SPLIT = false;
    // A load of K is of 4 rows x 4 keys for half a warp, one of V of 2 rows x 4 pairs of keys for a quarter:
    // in different banks.
    static constexpr int KEY_PITCH = CHUNK + 4, VALUE_PITCH = CHUNK + 8;
    static constexpr int KEY_ROWS = round_up(KEY_DIM, 4);
    static constexpr int SLOT = KEY_ROWS * KEY_PITCH + VALUE_PART * VALUE_PITCH;
    static constexpr int STEPS = KEY_ROWS / CHANNEL_STEP;

    struct Queries {
        double half[2];  // of queries 0 to 7, and 8 to 15
    };

    template <class Read>
    static __device__ __forceinline__ void load(Queries& a, Read element) {
        const int row = threadIdx.x % 32 / 4, channel = threadIdx.x % 4;
        a.half[0] = element(row, channel);
        a.half[1] = element(row + 8, channel);
    }

    // d (16 x 8) += the product of a, of its upper and its lower 8 rows, and b.
    static __device__ __forceinline__ void add(double (&d)[4], double upper, double lower, double b) {
        double halves[2][2] = {{d[0], d[1]}, {d[2], d[3]}};
        mma_m8n8k4_f64(halves[0], upper, b, halves[0]);
        mma_m8n8k4_f64(halves[1], lower, b, halves[1]);
#pragma unroll
        for (int x = 0; x < 4; x++)
            d[x] = halves[x / 2][x % 2];
    }

    static __device__ __forceinline__ void multiply(double (&s)[QUERY_TILES][2][4],
                                                    const Queries (&q)[QUERY_TILES][STEPS],
                                                    const double* slot, int first) {
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int x = 0; x < 4; x++)
                    s[t][j][x] = 0;
        const double* at = slot + first + threadIdx.x % 4 * KEY_PITCH + threadIdx.x % 32 / 4;
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const double b = at[step * 4 * KEY_PITCH + j * 8];
#pragma unroll
                for (int t = 0; t < QUERY_TILES; t++)
                    add(s[t][j], q[t][step].half[0], q[t][step].half[1], b);
            }
    }

    // The eight keys of an accumulator tile as 0, 2, 4, 6 and 1, 3, 5, 7: this thread's own.
    static __device__ __forceinline__ void update(double (&o)[QUERY_TILES][COLUMNS][4],
                                                  const double (&p)[QUERY_TILES][2][4], const double* slot,
                                                  int first) {
        const int lane = threadIdx.x % 32;
        const double* at = slot + first + KEY_ROWS * KEY_PITCH + lane / 4 * VALUE_PITCH + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < COLUMNS; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const double2 b = *reinterpret_cast<const double2*>(at + i * 8 * VALUE_PITCH + j * 8);
#pragma unroll
                for (int t = 0; t < QUERY_TILES; t++) {
                    add(o[t][i], p[t][j][0], p[t][j][2], b.x);
                    add(o[t][i], p[t][j][1], p[t][j][3], b.y);
                }
            }
    }
};

using Products = Product<T>;
using Stored = Products::Stored;
constexpr bool SPLIT = Products::SPLIT;

// The block's place in the grid.
struct Place {
    long long head;
    int part, split;
    __device__ __forceinline__ explicit Place(int splits)
        : head(blockIdx.x / splits / PARTS),
          part(static_cast<int>(blockIdx.x / splits % PARTS)),
          split(static_cast<int>(blockIdx.x % splits)) {}
};

// ---- K and V from global to shared memory ----
// A thread copies, and then splits, the same UNIT neighbouring tokens of every ROW_STEP-th row.

constexpr int UNIT = 16 / sizeof(T), UNITS = CHUNK / UNIT, ROW_STEP = THREADS / UNITS;
static_assert(THREADS % UNITS == 0, "a thread's tokens are the same in every row");

// Starts the copies of a thread's units of `channels` channels, which lie `tokens` apart from `source` on, to
// COUNT rows, PITCH apart from `target` on. WHOLE: there are COUNT channels, or else rows of zeros follow. Of
// each unit `left` tokens exist, zeros follow.
template <int COUNT, int PITCH, bool WHOLE>
__device__ __forceinline__ void copy_rows(T* target, const T* source, int channels, int left, int tokens,
                                          const T* anywhere) {
    constexpr int BYTES = WIDTH * sizeof(T);
    const int first_row = threadIdx.x / UNITS;
    const long long step = left > 0 ? static_cast<long long>(ROW_STEP) * tokens : 0;
    const T* unit = left > 0 ? source + static_cast<long long>(first_row) * tokens : anywhere;
#pragma unroll
    for (int i = 0; i < (COUNT + ROW_STEP - 1) / ROW_STEP; i++, unit += step) {
        const int row = first_row + i * ROW_STEP;
        if (COUNT % ROW_STEP != 0 && row >= COUNT) break;
        const bool exists = WHOLE || row < channels;
#pragma unroll
        for (int part = 0; part < UNIT; part += WIDTH) {
            const int bytes = exists ? max(0, min(BYTES, (left - part) * static_cast<int>(sizeof(T)))) : 0;
            const T* from = (WHOLE && WIDTH == UNIT) || bytes > 0 ? unit + part : anywhere;
            T* to = target + row * PITCH + part;
            if constexpr (BYTES == 16) cp_async_16(to, from, bytes);
            if constexpr (BYTES == 8) cp_async_8(to, from, bytes);
            if constexpr (BYTES == 4) cp_async_4(to, from, bytes);
        }
    }
}

// Starts the copies of CHUNK keys from `first` on: float64 to a slot, float32 to an array of its own.
__device__ __forceinline__ void copy_chunk(T* arriving, const T* keys, int first_value, int first,
                                           int tokens) {
    constexpr int KEY_ROWS = Products::KEY_ROWS;
    constexpr int KEY_PITCH = SPLIT ? CHUNK : Products::KEY_PITCH;
    constexpr int VALUE_PITCH = SPLIT ? CHUNK : Products::VALUE_PITCH;
    const int token = threadIdx.x % UNITS * UNIT, left = tokens - first - token;
    const T* k = keys + first + token;
    const T* v = k + static_cast<long long>(KEY_DIM + first_value) * tokens;
    copy_rows<KEY_ROWS, KEY_PITCH, KEY_DIM == KEY_ROWS>(arriving + token, k, KEY_DIM, left, tokens, keys);
    copy_rows<VALUE_PART, VALUE_PITCH, VALUE_DIM % VALUE_PART == 0>(
        arriving + KEY_ROWS * KEY_PITCH + token, v, VALUE_DIM - first_value, left, tokens, keys);
}

// Calls take(row, token, its four values) for this thread's units of COUNT rows.
template <int COUNT, class Take>
__device__ __forceinline__ void for_units(const T* arrived, Take take) {
    const int first_row = threadIdx.x / UNITS, token = threadIdx.x % UNITS * UNIT;
#pragma unroll 4
    for (int i = 0; i < (COUNT + ROW_STEP - 1) / ROW_STEP; i++) {
        const int row = first_row + i * ROW_STEP;
        if (COUNT % ROW_STEP != 0 && row >= COUNT) break;  // whole warps: COUNT is a multiple of 16
        take(row, token, *reinterpret_cast<const float4*>(arrived + row * CHUNK + token));
    }
}

// The power of two that brings the largest value of a channel, of which this thread has x, below 2^14. Its
// inverse, and the weights' 2^WEIGHT_LIMIT taken back, is `scale`.
__device__ __forceinline__ float fitting_factor(const float4& x, float& scale) {
    float largest = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
#pragma unroll
    for (int distance = 1; distance < UNITS; distance *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(WARP, largest, distance));
    const int exponent = max(static_cast<int>(__float_as_uint(largest) >> 23), 14 + WEIGHT_LIMIT);
    scale = __uint_as_float(static_cast<unsigned>(exponent - 13 - WEIGHT_LIMIT) << 23);
    return __uint_as_float(static_cast<unsigned>(254 + 13 - exponent) << 23);
}

// What this thread has copied of K and of V, in parts, into a slot.
__device__ __forceinline__ void split_chunk(unsigned short* slot, const T* arrived) {
    using Floats = Product<float>;
    for_units<Floats::KEY_ROWS>(arrived, [&](int row, int token, const float4& x) {
        unsigned first[3], second[3];
        Floats::split(first, x.x, x.y);
        Floats::split(second, x.z, x.w);
#pragma unroll
        for (int plane = 0; plane < 3; plane++)
            *reinterpret_cast<uint2*>(slot + plane * Floats::KEY_PLANE + row * Floats::KEY_PITCH + token) =
                make_uint2(first[plane], second[plane]);
    });
    for_units<VALUE_PART>(arrived + Floats::KEY_ROWS * CHUNK, [&](int row, int token, const float4& x) {
        float scale;
        const float factor = fitting_factor(x, scale);
        if (token == 0) reinterpret_cast<float*>(slot + Floats::SCALES)[row] = scale;
        unsigned first[2], second[2];
        Floats::split(first, x.x * factor, x.y * factor);
        Floats::split(second, x.z * factor, x.w * factor);
        unsigned short* target = slot + Floats::VALUES + row * Floats::VALUE_PITCH + token;
#pragma unroll
        for (int plane = 0; plane < 2; plane++)
            *reinterpret_cast<uint2*>(target + plane * Floats::VALUE_PLANE) =
                make_uint2(first[plane], second[plane]);
    });
}

// ---- one warp's tile of queries ----

struct QueryTile {
    typename Products::Queries q[QUERY_TILES][Products::STEPS];
    T o[QUERY_TILES][COLUMNS][4];
    T reference[QUERY_TILES][2], sum[QUERY_TILES][2];  // of queries lane / 4 and 8 more; sum: the lane's part

    // `queries`: the head's Q; from query `first` on.
    __device__ __forceinline__ QueryTile(const T* queries, int first, int tokens) : o{}, sum{} {
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++) {
#pragma unroll
            for (int step = 0; step < Products::STEPS; step++)
                Products::load(q[t][step], [&](int row, int channel) {
                    const int query = first + 16 * t + row, at = step * Products::CHANNEL_STEP + channel;
                    const bool exists = query < tokens && at < KEY_DIM;
                    return exists ? queries[static_cast<long long>(at) * tokens + query] : T(0);
                });
#pragma unroll
            for (int half = 0; half < 2; half++)
                reference[t][half] = negative_infinity<T>();
        }
    }

    // Whether a weight of the lane would reach the limit (or a score is no number).
    __device__ __forceinline__ bool reaches_limit(const T (&s)[QUERY_TILES][2][4]) const {
        bool any = false;
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int x = 0; x < 4; x++)
                    any |= !(s[t][j][x] < reference[t][x / 2] + WEIGHT_LIMIT);
        return any;
    }

    // Raises the references to what the scores ask for, and brings o and sum to them.
    __device__ __forceinline__ void raise(const T (&s)[QUERY_TILES][2][4]) {
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int x = 2 * half;
                T largest = larger(larger(s[t][0][x], s[t][0][x + 1]), larger(s[t][1][x], s[t][1][x + 1]));
                largest = larger(largest, __shfl_xor_sync(WARP, largest, 1));
                largest = larger(largest, __shfl_xor_sync(WARP, largest, 2));
                const T raised = larger(reference[t][half], largest - LARGEST_WEIGHT);
                const T factor = power_of_two(reference[t][half] - raised);
                reference[t][half] = raised;
                sum[t][half] *= factor;
#pragma unroll
                for (int i = 0; i < COLUMNS; i++) {
                    o[t][i][x] *= factor;
                    o[t][i][x + 1] *= factor;
                }
            }
    }

    // A group of keys, from `first` on in the slot, of which `left` exist (more where others follow).
    __device__ __forceinline__ void attend(const Stored* slot, int first, T scale, int left) {
        T s[QUERY_TILES][2][4];  // scores, then weights
        Products::multiply(s, q, slot, first);
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int x = 0; x < 4; x++) {
                    s[t][j][x] = scaled(s[t][j][x], scale);
                    const int key = 8 * j + threadIdx.x % 4 * 2 + x % 2;
                    if (left < GROUP && key >= left) s[t][j][x] = negative_infinity<T>();
                }
        if (__any_sync(WARP, reaches_limit(s))) raise(s);  // rare
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                T part[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    T(&pair)[2] = reinterpret_cast<T(&)[2]>(s[t][j][2 * half]);
                    pair[0] = power_of_two(pair[0] - reference[t][half]);
                    pair[1] = power_of_two(pair[1] - reference[t][half]);
                    part[j] = pair[0] + pair[1];
                }
                sum[t][half] += part[0] + part[1];
            }
        Products::update(o, s, slot, first);
    }

    // The groups of one chunk, of which `left` keys exist (more where others follow).
    __device__ __forceinline__ void attend_chunk(const Stored* slot, T scale, int left) {
        const int count = min(left, CHUNK);
#pragma unroll 1
        for (int first = 0; first < count; first += GROUP)
            attend(slot, first, scale, left - first);
    }

    // `values`: the head's V.
    __device__ __forceinline__ void store(T* out, T* lse, const T* values, int first, int first_value,
                                          int tokens) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                T total = sum[t][half];
                total += __shfl_xor_sync(WARP, total, 1);
                total += __shfl_xor_sync(WARP, total, 2);
                const int query = first + 16 * t + 8 * half + lane / 4;
                if (query >= tokens) continue;
                // LARGEST_WEIGHT is taken back where it is exact, before the logarithm.
                if (lane % 4 == 0 && first_value == 0)
                    lse[query] = multiply_add(reference[t][half] + LARGEST_WEIGHT, T(0.69314718055994530942),
                                              natural_log(total / (1 << LARGEST_WEIGHT)));
                const T factor = (SPLIT ? 1 << WEIGHT_LIMIT : 1) / total;
#pragma unroll
                for (int i = 0; i < COLUMNS; i++)
#pragma unroll
                    for (int x = 0; x < 2; x++) {
                        const int channel = first_value + 8 * i + lane % 4 * 2 + x;
                        if (VALUE_DIM % VALUE_PART != 0 && channel >= VALUE_DIM) continue;
                        T value = o[t][i][2 * half + x] * factor;
                        // The one weight of one token is 1, exactly. (What is not a number comes from scores
                        // that are not, and stays.)
                        if (tokens == 1 && value == value) value = values[channel];
                        out[static_cast<long long>(channel) * tokens + query] = value;
                    }
            }
    }
};

// scale: of the scores, times log2(e).
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    psa_forward_float(const T* __restrict__ qkv, T* __restrict__ out, T* __restrict__ lse, int tokens,
                      int splits, T scale) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Stored* slots = reinterpret_cast<Stored*>(shared_memory);
    T* on_its_way = reinterpret_cast<T*>(slots + 2 * Products::SLOT);  // float32 only

    const Place place(splits);
    const T* queries = qkv + place.head * HEAD_CHANNELS * tokens;
    const T* keys = queries + static_cast<long long>(KEY_DIM) * tokens;
    const int first_value = PARTS == 1 ? 0 : place.part * VALUE_PART;
    const int warp = __shfl_sync(WARP, threadIdx.x / 32, 0);  // tells the compiler that it is one number
    const int first = (place.split * WARPS + warp) * QUERIES;

    copy_chunk(SPLIT ? on_its_way : reinterpret_cast<T*>(slots), keys, first_value, 0, tokens);
    cp_async_commit();
    QueryTile tile(queries, first, tokens);
#pragma unroll 1
    for (int first_key = 0, slot = 0; first_key < tokens; first_key += CHUNK, slot ^= 1) {
        Stored* chunk = slots + slot * Products::SLOT;
        cp_async_wait<0>();
        if constexpr (SPLIT) split_chunk(reinterpret_cast<unsigned short*>(chunk), on_its_way);
        __syncthreads();  // the chunk has come for every thread; no warp still reads the one before
        if (first_key + CHUNK < tokens) {
            T* next = SPLIT ? on_its_way : reinterpret_cast<T*>(slots + (slot ^ 1) * Products::SLOT);
            copy_chunk(next, keys, first_value, first_key + CHUNK, tokens);
        }
        cp_async_commit();
        if (first < tokens) tile.attend_chunk(chunk, scale, tokens - first_key);
    }
    if (first < tokens) {
        const T* values = keys + static_cast<long long>(KEY_DIM) * tokens;
        tile.store(out + place.head * VALUE_DIM * tokens, lse + place.head * tokens, values, first,
                   first_value, tokens);
    }
}
