// What every kernel needs of the four element types: conversions, stores and additions.
//
// T is the element type of a kernel (__half, __nv_bfloat16, float or double). Arithmetic is done in
// Accumulator<T>; what is stored was rounded to T once. No PTX: this text also runs on the CPU.
#pragma once

// The type sums are formed in: float, and double for double.
template <class T>
struct AccumulatorOf {
    using Type = float;
};
template <>
struct AccumulatorOf<double> {
    using Type = double;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::Type;

// Element to accumulator: exact.
__device__ __forceinline__ float to_float(__half value) {
    return __half2float(value);
}
__device__ __forceinline__ float to_float(__nv_bfloat16 value) {
    return __bfloat162float(value);
}
__device__ __forceinline__ float to_float(float value) {
    return value;
}
__device__ __forceinline__ double to_float(double value) {
    return value;
}

// Accumulator to element, from_float<T>(value): to nearest, ties to even.
template <class T>
__device__ __forceinline__ T from_float(Accumulator<T> value) {
    return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
    return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}

// Minus infinity in an accumulator (NVRTC has no INFINITY).
template <class A>
__device__ __forceinline__ A negative_infinity() {
    return __uint_as_float(0xff800000u);
}

// *address += value as one indivisible step, rounded once to T. Where the hardware cannot add a 16-bit type
// (bfloat16 before sm_90) CUDA's own header adds by compare-and-swap.
template <class T>
__device__ __forceinline__ void atomic_add(T* address, T value) {
    atomicAdd(address, value);
}

// How a kernel writes a result: added to what the caller gave (ACCUMULATE), or stored over nothing.
template <bool ACCUMULATE, class T>
__device__ __forceinline__ void store(T* address, T value) {
    if constexpr (ACCUMULATE) {
        atomic_add(address, value);
    } else {
        *address = value;
    }
}
