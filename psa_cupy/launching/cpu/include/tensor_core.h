// The wrappers of kernels_cu/tensor_core.cuh, which holds the same functions as PTX: warp-wide matrix
// products and matrix loads in PTX's fragment layouts, and asynchronous copies.
#pragma once

namespace cuda_on_cpu {

inline void mma_float_accumulator(WarpCompute compute, float (&d)[4], const unsigned (&a)[4],
                                  const unsigned (&b)[2], const float (&c)[4]) {
    unsigned char* input = current_thread->input;
    memcpy(input, a, sizeof a);
    memcpy(input + 16, b, sizeof b);
    memcpy(input + 24, c, sizeof c);
    warp_meet(0xffffffffu, compute);
    memcpy(d, current_thread->output, sizeof d);
}

inline void load_matrices(WarpCompute compute, unsigned (&r)[4], const void* row) {
    if ((uintptr_t)row % 16) fail("misaligned row address of ldmatrix, which needs 16 bytes");
    if (CHECKED) watch(row, 16, Access::read);
    memcpy(current_thread->input, &row, sizeof row);
    warp_meet(0xffffffffu, compute);
    memcpy(r, current_thread->output, sizeof r);
}

}  // namespace cuda_on_cpu

inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&c)[4],
                         __half) {
    cuda_on_cpu::mma_float_accumulator(cuda_on_cpu::mma_m16n8k16_float16, d, a, b, c);
}
inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&c)[4],
                         __nv_bfloat16) {
    cuda_on_cpu::mma_float_accumulator(cuda_on_cpu::mma_m16n8k16_bfloat16, d, a, b, c);
}
inline void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                             const float (&c)[4]) {
    cuda_on_cpu::mma_float_accumulator(cuda_on_cpu::mma_m16n8k8_tf32, d, a, b, c);
}
inline void mma_m8n8k4_f64(double (&d)[2], double a, double b, const double (&c)[2]) {
    const double operands[4] = {a, b, c[0], c[1]};
    memcpy(cuda_on_cpu::current_thread->input, operands, sizeof operands);
    cuda_on_cpu::warp_meet(0xffffffffu, cuda_on_cpu::mma_m8n8k4_f64);
    memcpy(d, cuda_on_cpu::current_thread->output, sizeof d);
}

inline void ldmatrix_x4(unsigned (&r)[4], const void* row) {
    cuda_on_cpu::load_matrices(cuda_on_cpu::ldmatrix, r, row);
}
inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) {
    cuda_on_cpu::load_matrices(cuda_on_cpu::ldmatrix_trans, r, row);
}
inline unsigned movmatrix_trans(unsigned fragment) {
    memcpy(cuda_on_cpu::current_thread->input, &fragment, sizeof fragment);
    cuda_on_cpu::warp_meet(0xffffffffu, cuda_on_cpu::movmatrix_trans);
    memcpy(&fragment, cuda_on_cpu::current_thread->output, sizeof fragment);
    return fragment;
}

inline void cp_async_16(void* target, const void* source, int source_bytes = 16) {
    cuda_on_cpu::asynchronous_copy(target, source, 16, source_bytes);
}
inline void cp_async_8(void* target, const void* source, int source_bytes = 8) {
    cuda_on_cpu::asynchronous_copy(target, source, 8, source_bytes);
}
inline void cp_async_4(void* target, const void* source, int source_bytes = 4) {
    cuda_on_cpu::asynchronous_copy(target, source, 4, source_bytes);
}
inline void cp_async_commit() { cuda_on_cpu::asynchronous_copy_commit(); }
template <int KEEP>
inline void cp_async_wait() {
    cuda_on_cpu::asynchronous_copy_wait(KEEP);
}

// cvt.rna.tf32: half of the unit in the last of TF32's 10 fraction bits is added to the magnitude.
inline unsigned round_to_tf32(float value) {
    const unsigned bits = __float_as_uint(value);
    const bool finite = (bits & 0x7f800000) != 0x7f800000;
    return finite ? (bits + 0x1000) & 0xffffe000u : bits;
}
inline float at_most_zero(float exponent) { return exponent > 0 ? 0 : exponent; }
inline float exp2_approx(float x) { return exp2f(x); }
inline float log2_approx(float x) { return log2f(x); }

inline unsigned pack2(float low, float high, __half) {
    return cuda_on_cpu::float16_from_float(low) | (unsigned)cuda_on_cpu::float16_from_float(high) << 16;
}
inline unsigned pack2(float low, float high, __nv_bfloat16) {
    return cuda_on_cpu::bfloat16_from_float(low) | (unsigned)cuda_on_cpu::bfloat16_from_float(high) << 16;
}

struct SharedAddress {
    const char* address;
    explicit SharedAddress(const void* pointer) : address(static_cast<const char*>(pointer)) {}
    SharedAddress operator+(int bytes) const { return SharedAddress(address + bytes); }
};
inline void ldmatrix_x4(unsigned (&r)[4], SharedAddress row) { ldmatrix_x4(r, row.address); }
inline void ldmatrix_x4_trans(unsigned (&r)[4], SharedAddress row) { ldmatrix_x4_trans(r, row.address); }
inline int derived_here(int number) { return number; }
