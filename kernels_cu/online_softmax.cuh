// The exact online softmax of one query (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1).
//
// Scores are natural: score = q.k * scale, rounded by itself (scaled, below), so that the forward and the
// backward pass form the very same number and exp(score - lse) is exactly 1 where there is one key.
// The maximum starts at minus infinity, which is a value here and not a sentinel: as soon as one key has been
// seen the maximum is finite, so (-inf) - (-inf) is never formed. Not-a-number in a score reaches the sum.
#pragma once
#include "common.cuh"

__device__ __forceinline__ float larger(float a, float b) {
    return fmaxf(a, b);
}
__device__ __forceinline__ double larger(double a, double b) {
    return fmax(a, b);
}
__device__ __forceinline__ float multiply_add(float a, float b, float c) {
    return fmaf(a, b, c);
}
__device__ __forceinline__ double multiply_add(double a, double b, double c) {
    return fma(a, b, c);
}
__device__ __forceinline__ float natural_log(float x) {
    return logf(x);
}
__device__ __forceinline__ double natural_log(double x) {
    return log(x);
}
// e^x for x <= 0 or not much above: one multiplication and the hardware's power of two. Its relative error
// is about 2^-22, and x * 2^-24 where x is large: below what a score's own rounding brings.
__device__ __forceinline__ float exponential(float x) {
    return exp2f(x * 1.44269504f);
}
__device__ __forceinline__ double exponential(double x) {
    return exp(x);
}
// A probability from its lse, which may have been rounded below the score: at most 1. (Not a number stays.)
template <class A>
__device__ __forceinline__ A probability(A score, A lse) {
    const A exponent = score - lse;
    return exponential(exponent > 0 ? A(0) : exponent);
}
// product * scale with a rounding of its own: the compiler must not fuse it with a subtraction.
__device__ __forceinline__ float scaled(float product, float scale) {
    return __fmul_rn(product, scale);
}
__device__ __forceinline__ double scaled(double product, double scale) {
    return __dmul_rn(product, scale);
}

// Maximum, and sum of exp(score - maximum), over the keys seen so far. `sum` may be a lane's own part of it,
// as long as every lane of the query follows the same maxima; add the parts up before log_sum_exp.
template <class A>
struct OnlineSoftmax {
    A maximum = negative_infinity<A>();
    A sum = 0;

    // Takes the largest score of the next keys. Returns the factor that what was summed under the old maximum
    // must be multiplied by: 0 at first, 1 if the maximum stays.
    __device__ __forceinline__ A raise(A largest) {
        const A raised = larger(maximum, largest);
        const A factor = exponential(maximum - raised);
        maximum = raised;
        sum *= factor;
        return factor;
    }

    // The weight of one key, counted into the sum.
    __device__ __forceinline__ A weigh(A score) {
        const A weight = exponential(score - maximum);
        sum += weight;
        return weight;
    }

    // Natural log-sum-exp of the scores; minus infinity if there was no key.
    __device__ __forceinline__ A log_sum_exp() const { return maximum + natural_log(sum); }
};
