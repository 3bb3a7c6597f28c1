// The portable backward of fused attention (mma.sync, sm_80 and later; also the CPU execution): d_qkv from
// d_out, qkv, out and lse, NCHW to NCHW.
//
// Layout: qkv, d_qkv (BH, 2 KEY_DIM + VALUE_DIM, tokens); out, d_out, d_v_branch (BH, VALUE_DIM, tokens);
//     lse (BH, tokens). Any number of tokens; loads are COPY_BYTES wide, which divides every row.
// Work: a head is cut into tiles of TILE (16 or 32) tokens, a warp each. A key task (KEYS) owns dK and dV of
//     its keys, a query task dQ of its queries, so S and dP are computed twice and no sum crosses warps:
//                 stationary   moving    per step of 16 moving tokens
//         keys    K, V         Q, dO     S^T = K Q^T, dP^T = V dO^T; dV += P^T dO, dK += dS^T Q
//         queries Q, dO        K, V      S = Q K^T, dP = dO V^T;     dQ += dS K
//     with P = exp2(S scale log2 e - lse log2 e), dS = P (dP - delta), delta = rowsum(d_out out). Score tiles
//     go from accumulators to operand A in registers.
// Grid: 1-D, bh * blocks_per_head + block; a block has tiles_per_block tiles. Block: 32 * WARPS.
// Shared memory (dynamic): STAGES chunks of CHUNK moving tokens, channel-major, channels padded with zeros;
//     STAGES * CHUNK pairs (lse log2 e, delta) in key tasks; per warp its stationary tile.
//     RESIDENT: the one chunk holds all tokens, loaded once, and each warp goes on to its next tile alone.
//     Otherwise the chunks pass by, all warps of the block together.
// Reads: everything but d_qkv. The query tasks come first, in a launch of their own: they need out, of which
//     they make the pairs that the key tasks read.
// Repeatable: every element of d_qkv is written once (ACCUMULATE: receives one addition), by the warp whose
//     tile holds its token: a key task for K and V channels, a query task for Q channels and the pair. Sums
//     run in a fixed order.
#include "common.cuh"
#include "tensor_core.cuh"
#include "vector.cuh"

using Sum = Accumulator<T>;

constexpr int THREADS = 32 * WARPS;
constexpr int HALVES = TILE / 16;  // products have 16 stationary tokens
constexpr int TILE_PITCH = TILE + (TILE > 16 ? 8 : 0);
constexpr int ROWS_UNIT = 32;                      // a head's pairs come in these
constexpr int STEP = 16;                           // moving tokens of a step: two accumulator tiles of 16 x 8
constexpr int CHANNEL_STEP = 32 / sizeof(T);       // channels of one product: 16, 8 or 4
constexpr int ROW_UNIT = sizeof(T) == 2 ? 16 : 8;  // channels in shared memory come in these
// Elements between channels: no bank conflicts. (The shortest chunks of float64 are for heads so wide that
// nothing is left for padding.)
constexpr int PITCH = CHUNK + (sizeof(T) < 8 ? 8 : CHUNK > 16 ? 4 : 0);
constexpr int COPY = COPY_BYTES / sizeof(T);  // elements of one copy

__host__ __device__ constexpr int round_up(int value, int unit) {
    return (value + unit - 1) / unit * unit;
}
constexpr int KEY_ROWS = round_up(KEY_DIM, ROW_UNIT), VALUE_ROWS = round_up(VALUE_DIM, ROW_UNIT);
constexpr int KEY_STEPS = (KEY_DIM + CHANNEL_STEP - 1) / CHANNEL_STEP;
constexpr int VALUE_STEPS = (VALUE_DIM + CHANNEL_STEP - 1) / CHANNEL_STEP;
constexpr int KEY_COLUMNS = (KEY_DIM + 7) / 8, VALUE_COLUMNS = (VALUE_DIM + 7) / 8;  // accumulator tiles
constexpr int HEAD_CHANNELS = 2 * KEY_DIM + VALUE_DIM;

constexpr int MOVING = (KEY_ROWS + VALUE_ROWS) * PITCH;           // elements of a chunk
constexpr int STATIONARY = (KEY_ROWS + VALUE_ROWS) * TILE_PITCH;  // elements of a warp's tile

constexpr double LOG2_E = 1.4426950408889634;
constexpr float NO_QUERY = 1e30f;  // lse of a query beyond the last: exp2 gives 0

// What a query's scores need beside d_out.
struct alignas(2 * sizeof(Sum)) Row {
    Sum lse_log2, delta;
};

__device__ __forceinline__ float exp2_of(float x) {
    return exp2_approx(x);
}
__device__ __forceinline__ double exp2_of(double x) {
    return exp2(x);
}
__device__ __forceinline__ double at_most_zero(double exponent) {
    return exponent > 0 ? 0 : exponent;
}
__device__ __forceinline__ float multiply_add(float a, float b, float c) {
    return fmaf(a, b, c);
}
__device__ __forceinline__ double multiply_add(double a, double b, double c) {
    return fma(a, b, c);
}

// The matrix products of one element type, on tiles in shared memory (rows are channels); what is read of the
// moving tokens serves all HALVES. An accumulator tile is 16 stationary tokens x 8; with g = lane / 4 and
// t = lane % 4, d[0], d[1] are at (g, 2 t), (g, 2 t + 1) and d[2], d[3] at (g + 8, 2 t), (g + 8, 2 t + 1).
//     Fragment      operand A: 16 stationary tokens x CHANNEL_STEP channels
//     multiply      d[.][2] (16 x 16 moving tokens) += the product over CHANNEL_STEP channels
//     update        d[.] (16 x channels) += the product of p[.][2] over 16 moving tokens
// float16 and bfloat16: m16n8k16.
template <class Element>
struct Product {
    struct Fragment {
        unsigned at[4];
    };

    static __device__ __forceinline__ Fragment load(const Element* tile, int lane) {
        Fragment a;
        ldmatrix_x4_trans(a.at, tile + (lane % 8 + lane / 16 * 8) * TILE_PITCH + lane / 8 % 2 * 8);
        return a;
    }

    static __device__ __forceinline__ void multiply(float (&d)[HALVES][2][4], const Fragment (&a)[HALVES],
                                                    const Element* moving, int lane) {
        unsigned b[4];
        ldmatrix_x4_trans(b, moving + lane % 16 * PITCH + lane / 16 * 8);
        const unsigned first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            mma_m16n8k16(d[h][0], a[h].at, first, d[h][0], Element());
            mma_m16n8k16(d[h][1], a[h].at, second, d[h][1], Element());
        }
    }

    template <int COLUMNS>
    static __device__ __forceinline__ void update(float (&d)[HALVES][COLUMNS][4],
                                                  const float (&p)[HALVES][2][4], const Element* moving,
                                                  int lane) {
        unsigned a[HALVES][4];
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a[h][i] = pack2(p[h][i / 2][i % 2 * 2], p[h][i / 2][i % 2 * 2 + 1], Element());
            }
        }
        const Element* row = moving + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 8;
#pragma unroll
        for (int i = 0; i < COLUMNS; i += 2) {
            unsigned b[4];
            ldmatrix_x4(b, row + i * 8 * PITCH);
            const unsigned first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                mma_m16n8k16(d[h][i], a[h], first, d[h][i], Element());
                if (i + 1 < COLUMNS) {
                    mma_m16n8k16(d[h][i + 1], a[h], second, d[h][i + 1], Element());
                }
            }
        }
    }
};

// float32: three TF32 products m16n8k8 of the high and low parts, 2^-21 of a factor being left out. Tensor
// cores truncate as they add, so long sums are added up outside them.
template <>
struct Product<float> {
    struct Fragment {
        unsigned high[4], low[4];
    };

    // cvt.rna.tf32 is four instructions (it minds infinities) for what integers do in two; where these lose a
    // not-a-number, `low` is one. What the tensor cores cut off of `low` is 2^-21 of it all, of either sign.
    static __device__ __forceinline__ void split(float value, unsigned& high, unsigned& low) {
        high = (__float_as_uint(value) + 0x1000u) & 0xffffe000u;
        low = __float_as_uint(value - __uint_as_float(high));
    }

    struct Moving {
        unsigned high[2], low[2];

        __device__ __forceinline__ Moving(float b0, float b1) {
            split(b0, high[0], low[0]);
            split(b1, high[1], low[1]);
        }
    };

    static __device__ __forceinline__ void multiply_split(float (&d)[4], const Fragment& a, const Moving& b) {
        mma_m16n8k8_tf32(d, a.low, b.high, d);
        mma_m16n8k8_tf32(d, a.high, b.low, d);
        mma_m16n8k8_tf32(d, a.high, b.high, d);
    }

    static __device__ __forceinline__ Fragment load(const float* tile, int lane) {
        Fragment a;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            split(tile[(lane % 4 + i / 2 * 4) * TILE_PITCH + lane / 4 + i % 2 * 8], a.high[i], a.low[i]);
        }
        return a;
    }

    static __device__ __forceinline__ void multiply(float (&d)[HALVES][2][4], const Fragment (&a)[HALVES],
                                                    const float* moving, int lane) {
        const float* at = moving + lane % 4 * PITCH + lane / 4;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const Moving b(at[8 * j], at[4 * PITCH + 8 * j]);
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                multiply_split(d[h][j], a[h], b);
            }
        }
    }

    // The eight moving tokens of an accumulator tile in the order 0, 2, 4, 6, 1, 3, 5, 7: this thread's own.
    template <int COLUMNS>
    static __device__ __forceinline__ void update(float (&d)[HALVES][COLUMNS][4],
                                                  const float (&p)[HALVES][2][4], const float* moving,
                                                  int lane) {
        Fragment a[HALVES][2];
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    split(p[h][j][i % 2 * 2 + i / 2], a[h][j].high[i], a[h][j].low[i]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            float sum[HALVES][4] = {};
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float2 two = *reinterpret_cast<const float2*>(moving + (8 * i + lane / 4) * PITCH +
                                                                    8 * j + lane % 4 * 2);
                const Moving b(two.x, two.y);
#pragma unroll
                for (int h = 0; h < HALVES; ++h) {
                    multiply_split(sum[h], a[h][j], b);
                }
            }
#pragma unroll
            for (int x = 0; x < 4 * HALVES; ++x) {
                d[x / 4][i][x % 4] += sum[x / 4][x % 4];
            }
        }
    }
};

// float64: m8n8k4, for the upper and the lower eight stationary tokens.
template <>
struct Product<double> {
    struct Fragment {
        double at[2];
    };

    static __device__ __forceinline__ void multiply_eights(double (&d)[4], double upper_a, double lower_a,
                                                           double b) {
        double upper[2] = {d[0], d[1]}, lower[2] = {d[2], d[3]};
        mma_m8n8k4_f64(upper, upper_a, b, upper);
        mma_m8n8k4_f64(lower, lower_a, b, lower);
        d[0] = upper[0];
        d[1] = upper[1];
        d[2] = lower[0];
        d[3] = lower[1];
    }

    static __device__ __forceinline__ Fragment load(const double* tile, int lane) {
        const double* at = tile + lane % 4 * TILE_PITCH + lane / 4;
        return {{at[0], at[8]}};
    }

    static __device__ __forceinline__ void multiply(double (&d)[HALVES][2][4], const Fragment (&a)[HALVES],
                                                    const double* moving, int lane) {
        const double* at = moving + lane % 4 * PITCH + lane / 4;
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            multiply_eights(d[h][0], a[h].at[0], a[h].at[1], at[0]);
            multiply_eights(d[h][1], a[h].at[0], a[h].at[1], at[8]);
        }
    }

    // The eight moving tokens of an accumulator tile as 0, 2, 4, 6 and 1, 3, 5, 7: this thread's own.
    template <int COLUMNS>
    static __device__ __forceinline__ void update(double (&d)[HALVES][COLUMNS][4],
                                                  const double (&p)[HALVES][2][4], const double* moving,
                                                  int lane) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const double* b = moving + (8 * i + lane / 4) * PITCH + 8 * j + lane % 4 * 2;
#pragma unroll
                for (int h = 0; h < HALVES; ++h) {
                    multiply_eights(d[h][i], p[h][j][0], p[h][j][2], b[0]);
                    multiply_eights(d[h][i], p[h][j][1], p[h][j][3], b[1]);
                }
            }
        }
    }
};

using Fragment = typename Product<T>::Fragment;

// COPY_BYTES from global to shared memory, or zeros.
template <int BYTES>
__device__ __forceinline__ void copy(T* to, const T* from, bool inside) {
    if constexpr (BYTES == 16) {
        cp_async_16(to, from, inside ? 16 : 0);
    } else if constexpr (BYTES == 8) {
        cp_async_8(to, from, inside ? 8 : 0);
    } else if constexpr (BYTES == 4) {
        cp_async_4(to, from, inside ? 4 : 0);
    } else {
        *to = inside ? *from : from_float<T>(0.f);
    }
}

// Tokens first ... first + COUNT of CHANNELS channels to rows PITCH_TO apart, by `threads` threads; channels
// up to ROWS and tokens beyond the last become zeros.
template <int CHANNELS, int ROWS, int COUNT, int PITCH_TO>
__device__ __forceinline__ void load_rows(T* to, const T* from, int first, int tokens, int thread,
                                          int threads) {
    constexpr int COPIES = COUNT / COPY;
    constexpr int AT_ONCE = COPY_BYTES > 2 ? 1 : 4;  // asynchronous copies do not wait for each other anyway
#pragma unroll AT_ONCE
    for (int i = thread; i < ROWS * COPIES; i += threads) {
        const int channel = i / COPIES, token = i % COPIES * COPY;
        const bool inside = (ROWS == CHANNELS || channel < CHANNELS) && first + token < tokens;
        const T* source = inside ? from + static_cast<long long>(channel) * tokens + first + token : from;
        copy<COPY_BYTES>(to + channel * PITCH_TO + token, source, inside);
    }
}

// The arrays of one head.
struct Head {
    const T *stationary_key, *stationary_value, *moving_key, *moving_value;
    const T* out;
    const Sum* lse;
    Row* rows;  // whole steps of them
    const T* d_v_branch;
    T* d_qkv;
    int tokens;
    Sum scale_log2, scale;
};

__device__ __forceinline__ void load_moving(T* chunk, Row* rows, const Head& head, int first) {
    load_rows<KEY_DIM, KEY_ROWS, CHUNK, PITCH>(chunk, head.moving_key, first, head.tokens, threadIdx.x,
                                               THREADS);
    load_rows<VALUE_DIM, VALUE_ROWS, CHUNK, PITCH>(chunk + KEY_ROWS * PITCH, head.moving_value, first,
                                                   head.tokens, threadIdx.x, THREADS);
    if (KEYS) {
        constexpr int ROWS_PER_COPY = 16 / sizeof(Row);
        const int count = min(CHUNK, round_up(head.tokens, STEP) - first);
        for (int i = threadIdx.x * ROWS_PER_COPY; i < count; i += THREADS * ROWS_PER_COPY) {
            cp_async_16(rows + i, head.rows + first + i);
        }
    }
}

__device__ __forceinline__ void load_stationary(T* tile, const Head& head, int first, int lane) {
    load_rows<KEY_DIM, KEY_ROWS, TILE, TILE_PITCH>(tile, head.stationary_key, first, head.tokens, lane, 32);
    load_rows<VALUE_DIM, VALUE_ROWS, TILE, TILE_PITCH>(tile + KEY_ROWS * TILE_PITCH, head.stationary_value,
                                                       first, head.tokens, lane, 32);
}

// The warp's next tile over the one it has read.
__device__ __forceinline__ void load_next(T* tile, const Head& head, int next, int last, int lane) {
    __syncwarp();
    if (next < last) {
        load_stationary(tile, head, next * TILE, lane);
        cp_async_commit();
    }
}

// rowsum(d_out out) of the tile's queries: sum[i] is that of query lane % (TILE / COPY) * COPY + i. Each lane
// adds up COPY queries in every so many channels, then lanes add up theirs.
__device__ __forceinline__ void sum_rows(Sum (&sum)[COPY], const T* tile, const Head& head, int first,
                                         int lane) {
    constexpr int COPIES = TILE / COPY, GROUPS = 32 / COPIES, ROUNDS = (VALUE_DIM + GROUPS - 1) / GROUPS;
    const int query = lane % COPIES * COPY, group = lane / COPIES;
    const long long tokens = head.tokens;
    const T *out = head.out + group * tokens + first + query,
            *d_out = tile + (KEY_ROWS + group) * TILE_PITCH + query;
#pragma unroll
    for (int i = 0; i < COPY; ++i) {
        sum[i] = 0;
    }
#pragma unroll 4
    for (int i = 0; i < ROUNDS; ++i) {
        if (first + query < head.tokens && (VALUE_DIM % GROUPS == 0 || i * GROUPS + group < VALUE_DIM)) {
            const auto x = load_vector<COPY>(out + i * GROUPS * tokens);
            const auto y = load_vector<COPY>(d_out + i * GROUPS * TILE_PITCH);
#pragma unroll
            for (int j = 0; j < COPY; ++j) {
                sum[j] = multiply_add(to_float(x.at[j]), to_float(y.at[j]), sum[j]);
            }
        }
    }
#pragma unroll
    for (int other = COPIES; other < 32; other *= 2) {
#pragma unroll
        for (int i = 0; i < COPY; ++i) {
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], other);
        }
    }
}

// The pairs of the tile's queries, computed and written by one warp: rows (BH, round_up(tokens, 32)). One
// score alone has P = 1 whatever it is: its lse is given as 0 (and its scale, too).
__device__ __forceinline__ void write_rows(const T* tile, const Head& head, int first, int lane) {
    Sum delta[COPY];
    sum_rows(delta, tile, head, first, lane);
    if (lane < TILE / COPY) {
#pragma unroll
        for (int i = 0; i < COPY; ++i) {
            const int token = first + lane * COPY + i;
            Row row = {NO_QUERY, 0};
            if (token < head.tokens) {
                row = {head.tokens == 1 ? Sum(0) : head.lse[token] * Sum(LOG2_E), delta[i]};
            }
            head.rows[token] = row;
        }
    }
    __syncwarp();
}

// d [+ branch] times factor to channels `to`, from token first on; the only writes to d_qkv.
template <int CHANNELS, bool WITH_BRANCH, int COLUMNS, class Element>
__device__ __forceinline__ void write(Element* to, const Element* branch, const Sum (&d)[COLUMNS][4],
                                      Sum factor, int first, int tokens, int lane) {
    constexpr bool IN_PAIRS = sizeof(Element) == 2 && COPY_BYTES > 2 && !ACCUMULATE;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = first + lane / 4 + 8 * half;
            Sum values[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int channel = 8 * i + lane % 4 * 2 + j;
                const bool inside = token < tokens && (CHANNELS % 8 == 0 || channel < CHANNELS);
                const long long at = static_cast<long long>(channel) * tokens + token;
                values[j] = d[i][2 * half + j] * factor;
                if (WITH_BRANCH && inside) {
                    values[j] += to_float(branch[at]);
                }
                if (!IN_PAIRS && inside) {
                    store<ACCUMULATE>(to + at, from_float<Element>(values[j]));
                }
            }
            if constexpr (IN_PAIRS) {
                // Two channels of one token become two tokens of one channel.
                const unsigned pair = movmatrix_trans(pack2(values[0], values[1], Element()));
                const int channel = 8 * i + lane / 4, pair_token = first + lane % 4 * 2 + 8 * half;
                if (pair_token < tokens && (CHANNELS % 8 == 0 || channel < CHANNELS)) {
                    Element* at = to + static_cast<long long>(channel) * tokens + pair_token;
                    *reinterpret_cast<unsigned*>(at) = pair;
                }
            }
        }
    }
}

// One tile of stationary tokens in a warp: operands and sums.
struct Task {
    const T* tile;  // in shared memory
    int first, lane;
    Fragment key[STATIONARY_IN_REGISTERS ? KEY_STEPS : 1][HALVES];
    Fragment value[STATIONARY_IN_REGISTERS ? VALUE_STEPS : 1][HALVES];
    Row row[HALVES][2] = {};  // a query task's rows of this thread
    Sum d_key[HALVES][KEY_COLUMNS][4], d_value[HALVES][KEYS ? VALUE_COLUMNS : 1][4];

    // The tile is in shared memory by now; `real` unless another warp has it, too.
    __device__ __forceinline__ Task(const T* tile_, int first_, const Head& head, bool real)
        : tile(tile_), first(first_), lane(threadIdx.x % 32), d_key{}, d_value{} {
        if (STATIONARY_IN_REGISTERS) {
#pragma unroll
            for (int k = 0; k < KEY_STEPS; ++k) {
                load_key(key[k], k);
            }
#pragma unroll
            for (int k = 0; k < VALUE_STEPS; ++k) {
                load_value(value[k], k);
            }
        }
        if (!KEYS && real) {
            write_rows(tile, head, first, lane);
#pragma unroll
            for (int i = 0; i < 2 * HALVES; ++i) {
                row[i / 2][i % 2] = head.rows[first + lane / 4 + 8 * i];
            }
        }
    }

    __device__ __forceinline__ void load_fragments(Fragment (&a)[HALVES], const T* from) const {
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            a[h] = Product<T>::load(from + 16 * h, lane);
        }
    }
    __device__ __forceinline__ void load_key(Fragment (&a)[HALVES], int k) const {
        load_fragments(a, tile + k * CHANNEL_STEP * TILE_PITCH);
    }
    __device__ __forceinline__ void load_value(Fragment (&a)[HALVES], int k) const {
        load_fragments(a, tile + (KEY_ROWS + k * CHANNEL_STEP) * TILE_PITCH);
    }

    // Scores to P, and dP to dS.
    __device__ __forceinline__ void weigh(Sum (&s)[2][4], Sum (&d_p)[2][4], const Row (&row_of_half)[2],
                                          const Row* rows, Sum scale_log2, int left) const {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int place = 8 * j + lane % 4 * 2 + x % 2;
                const Row& of = KEYS ? rows[place] : row_of_half[x / 2];
                s[j][x] = exp2_of(at_most_zero(multiply_add(s[j][x], scale_log2, -of.lse_log2)));
                d_p[j][x] = s[j][x] * (d_p[j][x] - of.delta);
            }
        }
        // Keys beyond the last have S = 0, hence any P up to 1. (Queries: lse makes their P zero.)
        if (!KEYS && left < STEP) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    d_p[j][x] = 8 * j + lane % 4 * 2 + x % 2 < left ? d_p[j][x] : 0;
                }
            }
        }
    }

    // One step over moving tokens at `moving` (their channels, in shared memory), `left` of them real.
    __device__ __forceinline__ void step(const T* moving, const Row* rows, Sum scale_log2, int left) {
        const T* moving_value = moving + KEY_ROWS * PITCH;
        Sum s[HALVES][2][4] = {}, d_p[HALVES][2][4] = {};
#pragma unroll
        for (int k = 0; k < KEY_STEPS; ++k) {
            Fragment(&a)[HALVES] = key[STATIONARY_IN_REGISTERS ? k : 0];
            if (!STATIONARY_IN_REGISTERS) {
                load_key(a, k);
            }
            Product<T>::multiply(s, a, moving + k * CHANNEL_STEP * PITCH, lane);
        }
#pragma unroll
        for (int k = 0; k < VALUE_STEPS; ++k) {
            Fragment(&a)[HALVES] = value[STATIONARY_IN_REGISTERS ? k : 0];
            if (!STATIONARY_IN_REGISTERS) {
                load_value(a, k);
            }
            Product<T>::multiply(d_p, a, moving_value + k * CHANNEL_STEP * PITCH, lane);
        }
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            weigh(s[h], d_p[h], row[h], rows, scale_log2, left);
        }
        if constexpr (KEYS) {
            Product<T>::update(d_value, s, moving_value, lane);
        }
        Product<T>::update(d_key, d_p, moving, lane);
    }

    __device__ __forceinline__ void steps(const T* chunk, const Row* rows, Sum scale_log2, int left) {
        const int count = min(CHUNK, left);
#pragma unroll 1
        for (int at = 0; at < count; at += STEP) {
            step(chunk + at, rows + at, scale_log2, left - at);
        }
    }

    // The one probability of one token is 1, and dV is dO: exactly, though float32 in parts of TF32 misses
    // its last bit. (A sum that is not a number comes from such scores, and stays.)
    __device__ __forceinline__ void take_single_value(const Head& head) {
#pragma unroll
        for (int i = 0; i < VALUE_COLUMNS; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int channel = 8 * i + lane % 4 * 2 + j;
                if (channel < VALUE_DIM && d_value[0][i][j] == d_value[0][i][j]) {
                    d_value[0][i][j] = to_float(head.moving_value[channel]);
                }
            }
        }
    }

    __device__ __forceinline__ void write_sums(const Head& head) {
        if constexpr (KEYS && sizeof(T) == sizeof(float)) {
            if (head.tokens == 1) {
                take_single_value(head);
            }
        }
        const long long tokens = head.tokens;
        T* to = head.d_qkv + (KEYS ? KEY_DIM * tokens : 0);
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            const int from = first + 16 * h;
            write<KEY_DIM, false>(to, to, d_key[h], head.scale, from, head.tokens, lane);
            if constexpr (KEYS) {
                write<VALUE_DIM, BRANCH>(head.d_qkv + 2 * KEY_DIM * tokens, head.d_v_branch, d_value[h],
                                         Sum(1), from, head.tokens, lane);
            }
        }
    }
};

// Reads d_out, qkv, d_v_branch (BRANCH; else any pointer) and, !KEYS, out and lse; writes d_qkv and, !KEYS,
// rows (BH, round_up(tokens, 32), 2), which KEYS reads.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR)
    psa_backward(const T* __restrict__ d_out, const T* __restrict__ qkv, const T* __restrict__ out,
                 const Sum* __restrict__ lse, Sum* rows, const T* __restrict__ d_v_branch,
                 T* __restrict__ d_qkv, int tokens, int blocks_per_head, int tiles_per_block, Sum scale_log2,
                 Sum scale) {
    extern __shared__ __align__(128) unsigned char shared[];
    T* chunks = reinterpret_cast<T*>(shared);
    Row* chunk_rows = reinterpret_cast<Row*>(chunks + STAGES * MOVING);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    T* tile = reinterpret_cast<T*>(chunk_rows + (KEYS ? STAGES * CHUNK : 0)) + warp * STATIONARY;

    const long long bh = blockIdx.x / blocks_per_head;
    const T* q = qkv + bh * HEAD_CHANNELS * tokens;
    const T *k = q + static_cast<long long>(KEY_DIM) * tokens,
            *v = k + static_cast<long long>(KEY_DIM) * tokens;
    const T* d_o = d_out + bh * VALUE_DIM * tokens;
    const Head head = {KEYS ? k : q,
                       KEYS ? v : d_o,
                       KEYS ? q : k,
                       KEYS ? d_o : v,
                       out + bh * VALUE_DIM * tokens,
                       lse + bh * tokens,
                       reinterpret_cast<Row*>(rows) + bh * round_up(tokens, ROWS_UNIT),
                       d_v_branch + (BRANCH ? bh * VALUE_DIM * tokens : 0),
                       d_qkv + bh * HEAD_CHANNELS * tokens,
                       tokens,
                       scale_log2,
                       scale};
    const int first_tile = static_cast<int>(blockIdx.x % blocks_per_head) * tiles_per_block;
    const int last_tile = min(first_tile + tiles_per_block, (tokens + TILE - 1) / TILE);
    int t = first_tile + warp;

    load_moving(chunks, chunk_rows, head, 0);
    if (t < last_tile) {
        load_stationary(tile, head, t * TILE, lane);
    }
    cp_async_commit();
    if constexpr (RESIDENT) {
        cp_async_wait<0>();
        __syncthreads();
        while (t < last_tile) {
            const int first = t * TILE;
            Task task(tile, first, head, true);
            t += WARPS;
            if (STATIONARY_IN_REGISTERS) {
                load_next(tile, head, t, last_tile, lane);
            }
            task.steps(chunks, chunk_rows, scale_log2, tokens);
            if (!STATIONARY_IN_REGISTERS) {
                load_next(tile, head, t, last_tile, lane);
            }
            task.write_sums(head);
            cp_async_wait<0>();
            __syncwarp();
        }
    } else {
        // Warps without a tile only help to load: their Task is of zeros and writes nothing.
        if (t >= last_tile) {
            t = first_tile;
            load_stationary(tile, head, t * TILE, lane);
            cp_async_commit();
        }
        cp_async_wait<0>();
        __syncthreads();
        Task task(tile, t * TILE, head, first_tile + warp < last_tile);
#pragma unroll 1
        for (int first = 0, stage = 0; first < tokens; first += CHUNK) {
            const int next = first + CHUNK, next_stage = (stage + 1) % STAGES;
            if (STAGES > 1 && next < tokens) {
                load_moving(chunks + next_stage * MOVING, chunk_rows + next_stage * CHUNK, head, next);
                cp_async_commit();
            }
            task.steps(chunks + stage * MOVING, chunk_rows + stage * CHUNK, scale_log2, tokens - first);
            __syncthreads();
            if (STAGES == 1 && next < tokens) {
                load_moving(chunks, chunk_rows, head, next);
                cp_async_commit();
            }
            cp_async_wait<0>();
            __syncthreads();
            stage = next_stage;
        }
        if (first_tile + warp < last_tile) {
            task.write_sums(head);
        }
    }
}
