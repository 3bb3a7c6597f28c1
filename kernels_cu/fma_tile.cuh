// Tiles of attention for plain multiply-add code: operands in shared memory, products in registers.
//
// A block owns BLOCK_ROWS tokens (queries, or keys where those are stationary) and walks over tiles of
// BLOCK_COLUMNS tokens of the other kind. A warp owns WARP_ROWS of the block's rows; its lanes form a grid of
// 4 x 8 (row_lane x column_lane), and a thread holds ROWS x COLUMNS scores. Every operand tile lies in shared
// memory as [channel][token], whatever its layout in global memory: one text serves both layouts.
//
//   multiply     products[row][column] = sum over channels of a[channel][row] * b[channel][column]
//   accumulate   sums[row][channel]  += sum over columns of weights[row][column] * b[channel][column]
//
// The weights pass through shared memory, in a part that belongs to one warp: __syncwarp suffices.
//
// Bank conflicts: a row of a tile is an odd number of 16-byte units long, so the 8 units that a quarter of a
// warp touches at once lie in different banks. The lanes' grid is numbered so that neighbouring lanes read
// the same b and lanes at distance 2 read the same a: with that, the hardware serves a 16-byte read of half a
// warp in one pass.
//
// Compile-time constants, from passes/flash_attention.py:
//   T                    element type in global memory
//   KEY_DIM, VALUE_DIM   channels of Q and K, and of V
//   CHANNEL_MAJOR        element (channel, token) stands at channel * N + token (NCHW);
//                        else at token * D + channel
//   WIDE                 16-byte copies are possible: bases and rows are multiples of 16 bytes
//   WARPS, ROWS, COLUMNS the tile
#pragma once
#include "common.cuh"
#include "online_softmax.cuh"

// The type of everything inside: float, or double for double.
using Real = Accumulator<T>;

constexpr int THREADS = 32 * WARPS;
constexpr int ROW_LANES = 4, COLUMN_LANES = 8;
constexpr int WARP_ROWS = ROW_LANES * ROWS, BLOCK_ROWS = WARPS * WARP_ROWS;
constexpr int BLOCK_COLUMNS = COLUMN_LANES * COLUMNS;
constexpr int UNIT = 16 / sizeof(Real);  // accumulators in 16 bytes
constexpr int ROW_PITCH = BLOCK_ROWS + UNIT, COLUMN_PITCH = BLOCK_COLUMNS + UNIT;
// Channels in shared memory and sums per thread: rounded up to the 8 column lanes, the rest is zero.
constexpr int KEY_SUMS = (KEY_DIM + 7) / 8, VALUE_SUMS = (VALUE_DIM + 7) / 8;
constexpr int KEY_CHANNELS = 8 * KEY_SUMS, VALUE_CHANNELS = 8 * VALUE_SUMS;

// Blocks that shall fit a multiprocessor at once, from the sums and scores that a thread keeps through a
// product: with it the compiler limits the registers to 128, 168 or 255, as few as it can do with unspilled.
template <int VALUES>
constexpr int RESIDENT_BLOCKS = sizeof(Real) == 8 || VALUES > 100 ? 2 : 3 + (VALUES <= 64);

template <int LENGTH>
struct alignas(LENGTH * sizeof(Real)) Vector {
    Real at[LENGTH];
};
template <int LENGTH>
__device__ __forceinline__ Vector<LENGTH> read(const Real* address) {
    return *reinterpret_cast<const Vector<LENGTH>*>(address);
}
template <int LENGTH>
__device__ __forceinline__ void write(Real* address, const Vector<LENGTH>& vector) {
    *reinterpret_cast<Vector<LENGTH>*>(address) = vector;
}

// Where a thread stands, and which rows and columns are its own: runs of a vector, as wide as 16 bytes.
constexpr int ROW_RUN = ROWS < UNIT ? ROWS : UNIT, COLUMN_RUN = COLUMNS < UNIT ? COLUMNS : UNIT;

struct Lane {
    int row, column;
    __device__ __forceinline__ Lane() {
        const int lane = threadIdx.x % 32;
        row = (lane & 1) | (lane >> 1 & 2);
        column = (lane >> 1 & 1) | (lane >> 2 & 6);
    }
    // Row i of ROWS within the warp's rows, column j of COLUMNS within the tile.
    __device__ __forceinline__ int row_of(int i) const {
        return i / ROW_RUN * (ROW_LANES * ROW_RUN) + row * ROW_RUN + i % ROW_RUN;
    }
    __device__ __forceinline__ int column_of(int j) const {
        return j / COLUMN_RUN * (COLUMN_LANES * COLUMN_RUN) + column * COLUMN_RUN + j % COLUMN_RUN;
    }
    // Over the 8 lanes that share the rows; every one of them gets the result.
    __device__ __forceinline__ Real largest_of_row(Real value) const {
        const int distances[] = {2, 8, 16};
#pragma unroll
        for (int distance : distances)
            value = larger(value, __shfl_xor_sync(0xffffffffu, value, distance));
        return value;
    }
    __device__ __forceinline__ Real sum_of_row(Real value) const {
        const int distances[] = {2, 8, 16};
#pragma unroll
        for (int distance : distances)
            value += __shfl_xor_sync(0xffffffffu, value, distance);
        return value;
    }
    // Where row i's weights stand in the warp's part: rows of one i, two units apart, miss each other's
    // banks.
    __device__ __forceinline__ int weights_of(int i) const {
        return ROWS == 1 ? row * COLUMN_PITCH : (i / 2 * 2 * ROW_LANES + row * 2 + i % 2) * COLUMN_PITCH;
    }
};

// The offset of an element within its head.
template <int CHANNELS>
__device__ __forceinline__ long long element(int channel, int token, int tokens) {
    return CHANNEL_MAJOR ? static_cast<long long>(channel) * tokens + token
                         : static_cast<long long>(token) * CHANNELS + channel;
}

// Copies tokens first ... first + TOKENS - 1 of one head into tile[channel][token]; all threads of the
// block take part. Tokens past the end and channels past CHANNELS become zero.
template <int CHANNELS, int TOKENS>
__device__ __forceinline__ void load_tile(Real* tile, const T* __restrict__ head, int first, int tokens) {
    constexpr int PITCH = TOKENS + UNIT, PADDED = (CHANNELS + 7) / 8 * 8;
    constexpr int WIDTH = WIDE && (CHANNEL_MAJOR || CHANNELS % (16 / sizeof(T)) == 0) ? 16 / sizeof(T) : 1;
    struct alignas(WIDTH * sizeof(T)) Piece {
        T at[WIDTH];
    };
    // Channel-major: neighbouring threads take neighbouring pieces of a channel's row. Token-major: a warp
    // takes 32 bytes (one memory sector) of several tokens, which scatter into different banks.
    constexpr int TOKEN_STEP = CHANNEL_MAJOR ? WIDTH : 1, CHANNEL_STEP = CHANNEL_MAJOR ? 1 : WIDTH;
    constexpr int TOKEN_PIECES = TOKENS / TOKEN_STEP, CHANNEL_PIECES = PADDED / CHANNEL_STEP;
    constexpr int TOKEN_LANES = WIDTH == 1 ? 4 : TOKENS < 16 ? TOKENS : 16, CHANNEL_LANES = 32 / TOKEN_LANES;
    constexpr int CHANNEL_GROUPS = (CHANNEL_PIECES + CHANNEL_LANES - 1) / CHANNEL_LANES;
    constexpr int PIECES =
        CHANNEL_MAJOR ? TOKEN_PIECES * CHANNEL_PIECES : CHANNEL_GROUPS * TOKENS * CHANNEL_LANES;
    constexpr int STEPS = (PIECES + THREADS - 1) / THREADS;
#pragma unroll 4
    for (int step = 0; step < STEPS; step++) {
        const unsigned piece = step * THREADS + threadIdx.x;
        if (PIECES % THREADS != 0 && piece >= PIECES) break;
        int token, channel;
        if (CHANNEL_MAJOR) {
            token = piece % TOKEN_PIECES * TOKEN_STEP;
            channel = piece / TOKEN_PIECES;
        } else {
            const unsigned lane = piece % 32, group = piece / 32;
            token = group / CHANNEL_GROUPS * TOKEN_LANES + lane / CHANNEL_LANES;
            channel = (group % CHANNEL_GROUPS * CHANNEL_LANES + lane % CHANNEL_LANES) * CHANNEL_STEP;
            if (CHANNEL_PIECES % CHANNEL_LANES != 0 && channel >= PADDED) continue;
        }
        Real values[WIDTH] = {};
        if (first + token < tokens && channel < CHANNELS) {
            const T* source = head + element<CHANNELS>(channel, first + token, tokens);
            const Piece loaded = *reinterpret_cast<const Piece*>(source);
#pragma unroll
            for (int i = 0; i < WIDTH; i++)
                values[i] = to_float(loaded.at[i]);
        }
        Real* target = tile + channel * PITCH + token;
        if constexpr (CHANNEL_MAJOR && WIDTH > 1) {
#pragma unroll
            for (int i = 0; i < WIDTH; i += UNIT) {
                Vector<UNIT> unit;
#pragma unroll
                for (int j = 0; j < UNIT; j++)
                    unit.at[j] = values[i + j];
                write<UNIT>(target + i, unit);
            }
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH; i++)
                target[i * PITCH] = values[i];
        }
    }
}

// products[row][column] = sum over CHANNELS of rows[channel][row] * columns[channel][column], in the order of
// the channels. `rows` points at the warp's first row.
template <int CHANNELS>
__device__ __forceinline__ void multiply(Real (&products)[ROWS][COLUMNS], const Real* rows,
                                         const Real* columns, const Lane& lane) {
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            products[i][j] = 0;
#pragma unroll 4
    for (int channel = 0; channel < CHANNELS; channel++) {
        Real a[ROWS], b[COLUMNS];
#pragma unroll
        for (int i = 0; i < ROWS; i += ROW_RUN) {
            const auto run = read<ROW_RUN>(rows + channel * ROW_PITCH + lane.row_of(i));
#pragma unroll
            for (int e = 0; e < ROW_RUN; e++)
                a[i + e] = run.at[e];
        }
#pragma unroll
        for (int j = 0; j < COLUMNS; j += COLUMN_RUN) {
            const auto run = read<COLUMN_RUN>(columns + channel * COLUMN_PITCH + lane.column_of(j));
#pragma unroll
            for (int e = 0; e < COLUMN_RUN; e++)
                b[j + e] = run.at[e];
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                products[i][j] = multiply_add(a[i], b[j], products[i][j]);
    }
}

// Turns products into scores. Columns from `left` on do not exist: minus infinity there, whose weight is
// exactly zero.
__device__ __forceinline__ void scale_scores(Real (&scores)[ROWS][COLUMNS], Real scale, int left,
                                             const Lane& lane) {
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            scores[i][j] = scaled(scores[i][j], scale);
    if (left >= BLOCK_COLUMNS) return;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            if (lane.column_of(j) >= left) scores[i][j] = negative_infinity<Real>();
}

// The thread's weights into the warp's part of shared memory, for `accumulate`. Waits for the warp before
// (others may still read what stood there) and after.
__device__ __forceinline__ void share_weights(Real* part, const Real (&weights)[ROWS][COLUMNS],
                                              const Lane& lane) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j += COLUMN_RUN) {
            Vector<COLUMN_RUN> run;
#pragma unroll
            for (int e = 0; e < COLUMN_RUN; e++)
                run.at[e] = weights[i][j + e];
            write<COLUMN_RUN>(part + lane.weights_of(i) + lane.column_of(j), run);
        }
    __syncwarp();
}

// sums[row][k] += sum over columns of weights[row][column] * columns[8 * k + column_lane][column].
template <int SUMS>
__device__ __forceinline__ void accumulate(Real (&sums)[ROWS][SUMS], const Real* part, const Real* columns,
                                           const Lane& lane) {
#pragma unroll 1
    for (int column = 0; column < BLOCK_COLUMNS; column += UNIT) {
        Vector<UNIT> weights[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            weights[i] = read<UNIT>(part + lane.weights_of(i) + column);
#pragma unroll
        for (int k = 0; k < SUMS; k++) {
            const int channel = COLUMN_LANES * k + lane.column;
            const auto values = read<UNIT>(columns + channel * COLUMN_PITCH + column);
#pragma unroll
            for (int e = 0; e < UNIT; e++)
#pragma unroll
                for (int i = 0; i < ROWS; i++)
                    sums[i][k] = multiply_add(weights[i].at[e], values.at[e], sums[i][k]);
        }
    }
}

// Hands every sum of the warp's rows once to write(channel, row, value), in the order in which neighbouring
// lanes meet neighbouring addresses; 8 channels at a time go through the warp's part of shared memory.
template <int CHANNELS, int SUMS, class Write>
__device__ __forceinline__ void store_rows(Real* part, const Real (&sums)[ROWS][SUMS], int rows,
                                           const Lane& lane, Write write_one) {
    constexpr int PITCH = WARP_ROWS + 1;
#pragma unroll
    for (int k = 0; k < SUMS; k++) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            part[lane.column * PITCH + lane.row_of(i)] = sums[i][k];
        __syncwarp();
        for (int e = threadIdx.x % 32; e < COLUMN_LANES * WARP_ROWS; e += 32) {
            const int low = CHANNEL_MAJOR ? e / WARP_ROWS : e % COLUMN_LANES;
            const int row = CHANNEL_MAJOR ? e % WARP_ROWS : e / COLUMN_LANES;
            const int channel = COLUMN_LANES * k + low;
            if (channel < CHANNELS && row < rows) write_one(channel, row, part[low * PITCH + row]);
        }
    }
}
