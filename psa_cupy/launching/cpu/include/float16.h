// __half and __nv_bfloat16: two bytes in memory, float in arithmetic, rounded to nearest even.
#pragma once

namespace cuda_on_cpu {

inline uint16_t bfloat16_from_float(float value) {
    const uint32_t bits = bits_as<uint32_t>(value);
    if (value != value) return 0x7fff;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float float_from_bfloat16(uint16_t bits) { return bits_as<float>((uint32_t)bits << 16); }

inline uint16_t float16_from_float_in_software(float value) {
    const uint32_t bits = bits_as<uint32_t>(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and more round to infinity
    if (magnitude < 0x38800000) {                       // subnormal: adding 0.5 rounds to units of 2^-24
        return sign | (uint16_t)(bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000);
    }
    return sign | (uint16_t)((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}
inline float float_from_float16_in_software(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31,
                   fraction = bits & 0x3ff;
    if (exponent == 31) return bits_as<float>(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) return (sign ? -5.9604644775390625e-8f : 5.9604644775390625e-8f) * (float)fraction;
    return bits_as<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

// The compiler's own type, where it has one: conversions are an instruction then. (On x86-64 since GCC 12.)
#if defined(__aarch64__)
#define CUDA_ON_CPU_NATIVE_FLOAT16 __fp16
#elif defined(__x86_64__) && defined(__FLT16_MAX__)
#define CUDA_ON_CPU_NATIVE_FLOAT16 _Float16
#endif

#ifdef CUDA_ON_CPU_NATIVE_FLOAT16
inline uint16_t float16_from_float(float value) {
    return value != value ? 0x7fff : bits_as<uint16_t>((CUDA_ON_CPU_NATIVE_FLOAT16)value);
}
inline float float_from_float16(uint16_t bits) { return (float)bits_as<CUDA_ON_CPU_NATIVE_FLOAT16>(bits); }
#else
inline uint16_t float16_from_float(float value) { return float16_from_float_in_software(value); }
inline float float_from_float16(uint16_t bits) { return float_from_float16_in_software(bits); }
#endif

}  // namespace cuda_on_cpu

#define CUDA_ON_CPU_FLOAT16(T, PAIR, TO_FLOAT, FROM_FLOAT)                                        \
    struct alignas(2) T {                                                                         \
        uint16_t bits;                                                                            \
        T() = default;                                                                            \
        T(float value) : bits(FROM_FLOAT(value)) {}                                               \
        T(double value) : T((float)value) {}                                                      \
        T(int value) : T((float)value) {}                                                         \
        T(unsigned value) : T((float)value) {}                                                    \
        operator float() const { return TO_FLOAT(bits); }                                         \
    };                                                                                            \
    inline T operator+(T a, T b) { return T((float)a + (float)b); }                               \
    inline T operator-(T a, T b) { return T((float)a - (float)b); }                               \
    inline T operator*(T a, T b) { return T((float)a * (float)b); }                               \
    inline T operator/(T a, T b) { return T((float)a / (float)b); }                               \
    inline T operator-(T a) {                                                                     \
        a.bits ^= 0x8000;                                                                         \
        return a;                                                                                 \
    }                                                                                             \
    inline T& operator+=(T& a, T b) { return a = a + b; }                                         \
    inline T& operator-=(T& a, T b) { return a = a - b; }                                         \
    inline T& operator*=(T& a, T b) { return a = a * b; }                                         \
    inline T& operator/=(T& a, T b) { return a = a / b; }                                         \
    inline bool operator<(T a, T b) { return (float)a < (float)b; }                               \
    inline bool operator>(T a, T b) { return (float)a > (float)b; }                               \
    inline bool operator<=(T a, T b) { return (float)a <= (float)b; }                             \
    inline bool operator>=(T a, T b) { return (float)a >= (float)b; }                             \
    inline bool operator==(T a, T b) { return (float)a == (float)b; }                             \
    inline bool operator!=(T a, T b) { return (float)a != (float)b; }                             \
    struct alignas(4) PAIR {                                                                      \
        T x, y;                                                                                   \
        PAIR() = default;                                                                         \
        PAIR(T x, T y) : x(x), y(y) {}                                                            \
    };                                                                                            \
    inline T __hadd(T a, T b) { return a + b; }                                                   \
    inline T __hsub(T a, T b) { return a - b; }                                                   \
    inline T __hmul(T a, T b) { return a * b; }                                                   \
    inline T __hfma(T a, T b, T c) { return T((float)((double)(float)a * (float)b + (float)c)); } \
    inline T __hmax(T a, T b) { return T(fmaxf(a, b)); }                                          \
    inline T __hmin(T a, T b) { return T(fminf(a, b)); }                                          \
    inline PAIR __hadd2(PAIR a, PAIR b) { return PAIR(a.x + b.x, a.y + b.y); }                    \
    inline PAIR __hmul2(PAIR a, PAIR b) { return PAIR(a.x * b.x, a.y * b.y); }                    \
    inline PAIR __hfma2(PAIR a, PAIR b, PAIR c) {                                                 \
        return PAIR(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));                                \
    }                                                                                             \
    inline float __low2float(PAIR a) { return a.x; }                                              \
    inline float __high2float(PAIR a) { return a.y; }

CUDA_ON_CPU_FLOAT16(__half, __half2, cuda_on_cpu::float_from_float16, cuda_on_cpu::float16_from_float)
CUDA_ON_CPU_FLOAT16(__nv_bfloat16, __nv_bfloat162, cuda_on_cpu::float_from_bfloat16,
                    cuda_on_cpu::bfloat16_from_float)
#undef CUDA_ON_CPU_FLOAT16

typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

inline __half __float2half(float value) { return value; }
inline __half __float2half_rn(float value) { return value; }
inline __half __double2half(double value) { return value; }
inline float __half2float(__half value) { return value; }
inline __half2 __floats2half2_rn(float x, float y) { return __half2(x, y); }
inline __half2 __float22half2_rn(float2 pair) { return __half2(pair.x, pair.y); }
inline __half2 __halves2half2(__half x, __half y) { return __half2(x, y); }
inline float2 __half22float2(__half2 pair) { return make_float2(pair.x, pair.y); }
inline __half __low2half(__half2 pair) { return pair.x; }
inline __half __high2half(__half2 pair) { return pair.y; }
inline unsigned short __half_as_ushort(__half value) { return value.bits; }
inline __half __ushort_as_half(unsigned short bits) { return cuda_on_cpu::bits_as<__half>(bits); }

inline __nv_bfloat16 __float2bfloat16(float value) { return value; }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return value; }
inline __nv_bfloat16 __double2bfloat16(double value) { return value; }
inline float __bfloat162float(__nv_bfloat16 value) { return value; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return __nv_bfloat162(x, y); }
inline __nv_bfloat162 __float22bfloat162_rn(float2 pair) { return __nv_bfloat162(pair.x, pair.y); }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return __nv_bfloat162(x, y); }
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return make_float2(pair.x, pair.y); }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 pair) { return pair.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 pair) { return pair.y; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    return cuda_on_cpu::bits_as<__nv_bfloat16>(bits);
}
