// What a warp computes when its lanes have met: shuffles, votes, matrix products and matrix loads.
//
// The layouts are those of the PTX manual: in a fragment, lane l holds row l/4 and the columns 2(l%4),
// 2(l%4)+1 of each 8x8 matrix.

#include <cmath>
#include <cstring>

#include "state.h"

namespace cuda_on_cpu {

namespace {

template <class T>
inline T read(const Mailbox& mailbox, int offset) {
    T value;
    memcpy(&value, mailbox + offset, sizeof value);
    return value;
}

template <class T>
inline void write(Mailbox& mailbox, int offset, T value) {
    memcpy(mailbox + offset, &value, sizeof value);
}

typedef float Row __attribute__((vector_size(8 * sizeof(float))));  // of B, in a vector register
typedef double WideRow __attribute__((vector_size(8 * sizeof(double))));

// D = A B + C of 16 x K times K x 8, lanes holding a[4], b[2] and c[4] of 4 bytes each. Products are exact in
// double, sums nearly so; the result is rounded to float once.
template <int K>
void multiply_and_add(const float (&a)[16][K], const Row (&b)[K], const Mailbox* inputs, Mailbox* outputs) {
    WideRow rows[K];
    for (int k = 0; k < K; k++)
        rows[k] = __builtin_convertvector(b[k], WideRow);
    for (int row = 0; row < 16; row++) {
        WideRow sums = {};
        for (int k = 0; k < K; k++)
            sums += (double)a[row][k] * rows[k];
        for (int column = 0; column < 8; column++) {
            const int lane = row % 8 * 4 + column / 2, offset = (row / 8 * 2 + column % 2) * 4;
            write(outputs[lane], offset, (float)(read<float>(inputs[lane], 24 + offset) + sums[column]));
        }
    }
}

template <float (*TO_FLOAT)(uint16_t)>
void mma_m16n8k16(const Mailbox* inputs, Mailbox* outputs) {
    float a[16][16];
    Row b[16];
    for (int lane = 0; lane < 32; lane++) {
        const int row = lane / 4, column = lane % 4 * 2;
        for (int half = 0; half < 2; half++) {
            for (int r = 0; r < 4; r++) {
                const uint16_t bits = read<uint16_t>(inputs[lane], r * 4 + half * 2);
                a[row + r % 2 * 8][column + half + r / 2 * 8] = TO_FLOAT(bits);
            }
            for (int r = 0; r < 2; r++) {
                const uint16_t bits = read<uint16_t>(inputs[lane], 16 + r * 4 + half * 2);
                b[column + half + r * 8][row] = TO_FLOAT(bits);
            }
        }
    }
    multiply_and_add(a, b, inputs, outputs);
}

template <bool TRANSPOSED>
void load_matrices(const Mailbox* inputs, Mailbox* outputs) {
    for (int lane = 0; lane < 32; lane++) {
        for (int matrix = 0; matrix < 4; matrix++) {
            for (int half = 0; half < 2; half++) {
                int row = lane / 4, column = lane % 4 * 2 + half;
                if (TRANSPOSED) std::swap(row, column);
                const char* address = read<const char*>(inputs[matrix * 8 + row], 0);
                memcpy(outputs[lane] + matrix * 4 + half * 2, address + column * 2, 2);
            }
        }
    }
}

// The matrix unit reads TF32 operands without their 13 low bits.
float tf32(uint32_t bits) { return bits_as<float>(bits & 0xffffe000u); }

void need_whole_warp(unsigned mask) {
    if (mask != 0xffffffffu) fail("a matrix function needs all 32 lanes of a warp");
}

}  // namespace

void shuffle(const Mailbox* inputs, Mailbox* outputs, unsigned mask) {
    for (unsigned lanes = mask; lanes; lanes &= lanes - 1) {
        const int lane = __builtin_ctz(lanes), source = read<ShuffleInput>(inputs[lane], 0).source_lane;
        if (!(mask >> source & 1)) fail("warp divergence: a shuffle reads a lane that is not in its mask");
        memcpy(outputs[lane], inputs[source] + offsetof(ShuffleInput, value), sizeof(ShuffleInput::value));
    }
}

void ballot(const Mailbox* inputs, Mailbox* outputs, unsigned mask) {
    unsigned yes = 0;
    for (unsigned lanes = mask; lanes; lanes &= lanes - 1) {
        if (inputs[__builtin_ctz(lanes)][0]) yes |= lanes & -lanes;
    }
    for (unsigned lanes = mask; lanes; lanes &= lanes - 1)
        write(outputs[__builtin_ctz(lanes)], 0, yes);
}

void mma_m16n8k16_float16(const Mailbox* inputs, Mailbox* outputs, unsigned mask) {
    need_whole_warp(mask);
    mma_m16n8k16<float_from_float16>(inputs, outputs);
}

void mma_m16n8k16_bfloat16(const Mailbox* inputs, Mailbox* outputs, unsigned mask) {
    need_whole_warp(mask);
    mma_m16n8k16<float_from_bfloat16>(inputs, outputs);
}

void mma_m16n8k8_tf32(const Mailbox* inputs, Mailbox* outputs, unsigned mask) {
    need_whole_warp(mask);
    float a[16][8];
    Row b[8];
    for (int lane = 0; lane < 32; lane++) {
        const int row = lane / 4, column = lane % 4;
        for (int r = 0; r < 4; r++)
            a[row + r % 2 * 8][column + r / 2 * 4] = tf32(read<uint32_t>(inputs[lane], r * 4));
        for (int r = 0; r < 2; r++)
            b[column + r * 4][row] = tf32(read<uint32_t>(inputs[lane], 16 + r * 4));
    }
    multiply_and_add(a, b, inputs, outputs);
}

void mma_m8n8k4_f64(const Mailbox* inputs, Mailbox* outputs, unsigned mask) {
    need_whole_warp(mask);
    for (int lane = 0; lane < 32; lane++) {
        for (int half = 0; half < 2; half++) {
            const int row = lane / 4, column = lane % 4 * 2 + half;
            double sum = read<double>(inputs[lane], 16 + half * 8);
            for (int k = 0; k < 4; k++) {
                sum = std::fma(read<double>(inputs[row * 4 + k], 0), read<double>(inputs[column * 4 + k], 8),
                               sum);
            }
            write(outputs[lane], half * 8, sum);
        }
    }
}

void ldmatrix(const Mailbox* inputs, Mailbox* outputs, unsigned mask) {
    need_whole_warp(mask);
    load_matrices<false>(inputs, outputs);
}

void ldmatrix_trans(const Mailbox* inputs, Mailbox* outputs, unsigned mask) {
    need_whole_warp(mask);
    load_matrices<true>(inputs, outputs);
}

void movmatrix_trans(const Mailbox* inputs, Mailbox* outputs, unsigned mask) {
    need_whole_warp(mask);
    for (int lane = 0; lane < 32; lane++) {
        for (int half = 0; half < 2; half++) {
            const int row = lane % 4 * 2 + half, column = lane / 4;
            write(outputs[lane], half * 2, read<uint16_t>(inputs[row * 4 + column / 2], column % 2 * 2));
        }
    }
}

}  // namespace cuda_on_cpu
