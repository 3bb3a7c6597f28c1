// Tensor core instructions of every GPU from sm_80 on, as functions: mma.sync, ldmatrix, cp.async.
//
// Together with tensor_core_hopper.cuh and vector_add.cuh the only place for PTX. The CPU execution has the
// same functions in psa_cupy/launching/cpu/include/tensor_core.h.
//
// Fragments (PTX ISA, "Matrix Fragments for mma"), with row = lane / 4 and column = lane % 4:
//   m16n8k16  a: rows row and row + 8, columns 2*column + {0, 1} and 8 more; registers (row, column),
//             (row + 8, column), (row, column + 8), (row + 8, column + 8)
//             b: rows (k) 2*column + {0, 1}, then 8 more; column (n) row
//             c, d: (row, 2*column + {0, 1}), then (row + 8, the same)
//   ldmatrix  four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8;
//             register m of a lane holds elements 2*column + {0, 1} of row `row` of matrix m (trans: of
//             column `row`)
#pragma once

#ifndef CUDA_ON_CPU

// The 32-bit address of something in shared memory.
__device__ __forceinline__ unsigned within_shared(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// ---- d = a * b + c over a warp; the last argument only tells the element type ----

__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                             const float (&c)[4], __half) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
}
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                             const float (&c)[4], __nv_bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
}
// Elements are floats of which the 13 lowest bits do not count. a: (row, column), (row + 8, column),
// (row, column + 4), (row + 8, column + 4); b: k = column and column + 4, n = row.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4],
                                                 const unsigned (&b)[2], const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
}
// a: (row, column); b: k = column, n = row; c and d: row `row`, columns 2*column + {0, 1}.
__device__ __forceinline__ void mma_m8n8k4_f64(double (&d)[2], double a, double b, const double (&c)[2]) {
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%4, %5};"
        : "=d"(d[0]), "=d"(d[1])
        : "d"(a), "d"(b), "d"(c[0]), "d"(c[1]));
}

// ---- fragments from shared memory, and transposed between lanes ----
// volatile keeps a load on its side of a barrier.

__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(within_shared(row)));
}
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(within_shared(row)));
}
// The transpose of one 8x8 matrix of 16-bit elements.
__device__ __forceinline__ unsigned movmatrix_trans(unsigned fragment) {
    unsigned transposed;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(fragment));
    return transposed;
}

// ---- asynchronous copies to shared memory: the first source_bytes, then zeros ----

__device__ __forceinline__ void cp_async_16(void* target, const void* source, int source_bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(within_shared(target)), "l"(source),
                 "r"(source_bytes)
                 : "memory");
}
__device__ __forceinline__ void cp_async_8(void* target, const void* source, int source_bytes = 8) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(within_shared(target)), "l"(source),
                 "r"(source_bytes)
                 : "memory");
}
__device__ __forceinline__ void cp_async_4(void* target, const void* source, int source_bytes = 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(within_shared(target)), "l"(source),
                 "r"(source_bytes)
                 : "memory");
}
// Ends a group: the copies since the last commit.
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits for all groups of this thread but the KEEP latest.
template <int KEEP>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(KEEP) : "memory");
}

// ---- numbers ----

// To nearest, ties away from zero, as the bits of a float.
__device__ __forceinline__ unsigned round_to_tf32(float value) {
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
    return rounded;
}
// At most 0: a probability's exponent, which a rounded lse may lift above. Not a number stays (fminf hides
// it).
__device__ __forceinline__ float at_most_zero(float exponent) {
    float result;
    asm("min.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(exponent));
    return result;
}
// 2^x and log2(x) within about 2^-22; 2^-infinity is 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
__device__ __forceinline__ float log2_approx(float x) {
    float result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
// Two floats rounded to a pair of elements, `low` in the lower half.
__device__ __forceinline__ unsigned pack2(float low, float high, __half) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ unsigned pack2(float low, float high, __nv_bfloat16) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// ---- an address in shared memory that stays in a register ----
// From a pointer, compilers derive it anew at each use, and wait for what tells where shared memory begins.

struct SharedAddress {
    unsigned address;
    __device__ __forceinline__ explicit SharedAddress(const void* pointer) {
        asm volatile("mov.u32 %0, %1;" : "=r"(address) : "r"(within_shared(pointer)));
    }
    __device__ __forceinline__ SharedAddress operator+(int bytes) const {
        SharedAddress sum = *this;
        sum.address += bytes;
        return sum;
    }
};
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row.address));
}
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row.address));
}

// The same number, of which the compiler knows nothing: what is derived from it is derived here, and takes no
// register in the loops around.
__device__ __forceinline__ int derived_here(int number) {
    asm volatile("" : "+r"(number));
    return number;
}

#endif
