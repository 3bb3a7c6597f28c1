// Mathematical and bit functions of CUDA that C's library does not have, or has under another name.
#pragma once

// glibc declares functions of these names, so the fast versions have to be macros.
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __powf(x, y) powf(x, y)

inline float rsqrtf(float x) { return (float)(1.0 / sqrt((double)x)); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }

// Never contracted to a fused multiply-add: the optimiser may not look through the empty asm.
template <class T>
inline T cuda_on_cpu_rounded(T x) {
#if defined(__x86_64__)
    asm("" : "+x"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#else
    asm("" : "+m"(x));
#endif
    return x;
}
inline float __fadd_rn(float x, float y) { return cuda_on_cpu_rounded(x + y); }
inline float __fsub_rn(float x, float y) { return cuda_on_cpu_rounded(x - y); }
inline float __fmul_rn(float x, float y) { return cuda_on_cpu_rounded(x * y); }
inline double __dadd_rn(double x, double y) { return cuda_on_cpu_rounded(x + y); }
inline double __dsub_rn(double x, double y) { return cuda_on_cpu_rounded(x - y); }
inline double __dmul_rn(double x, double y) { return cuda_on_cpu_rounded(x * y); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

// The mixed pairs are CUDA's, too: the unsigned type wins.
#define CUDA_ON_CPU_MIN_MAX(RESULT, A, B)                                                 \
    inline RESULT min(A a, B b) { return (RESULT)b < (RESULT)a ? (RESULT)b : (RESULT)a; } \
    inline RESULT max(A a, B b) { return (RESULT)a < (RESULT)b ? (RESULT)b : (RESULT)a; }
#define CUDA_ON_CPU_INTEGER_MIN_MAX(T)                      \
    CUDA_ON_CPU_MIN_MAX(T, T, T)                            \
    CUDA_ON_CPU_MIN_MAX(unsigned T, unsigned T, unsigned T) \
    CUDA_ON_CPU_MIN_MAX(unsigned T, T, unsigned T)          \
    CUDA_ON_CPU_MIN_MAX(unsigned T, unsigned T, T)
CUDA_ON_CPU_INTEGER_MIN_MAX(int)
CUDA_ON_CPU_INTEGER_MIN_MAX(long)
CUDA_ON_CPU_INTEGER_MIN_MAX(long long)
#undef CUDA_ON_CPU_INTEGER_MIN_MAX
#undef CUDA_ON_CPU_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

template <class T>
inline T __ldg(const T* address) {
    return *address;
}
template <class T>
inline T __ldcs(const T* address) {
    return *address;
}
template <class T>
inline T __ldca(const T* address) {
    return *address;
}
template <class T>
inline T __ldcg(const T* address) {
    return *address;
}
template <class T>
inline void __stcs(T* address, T value) {
    *address = value;
}
template <class T>
inline void __stcg(T* address, T value) {
    *address = value;
}

namespace cuda_on_cpu {
template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits_as: types of one size");
    To to;
    memcpy((void*)&to, (const void*)&from, sizeof to);
    return to;
}
}  // namespace cuda_on_cpu

inline int __float_as_int(float x) { return cuda_on_cpu::bits_as<int>(x); }
inline unsigned __float_as_uint(float x) { return cuda_on_cpu::bits_as<unsigned>(x); }
inline float __int_as_float(int x) { return cuda_on_cpu::bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return cuda_on_cpu::bits_as<float>(x); }
inline long long __double_as_longlong(double x) { return cuda_on_cpu::bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return cuda_on_cpu::bits_as<double>(x); }
inline int __float2int_rn(float x) { return (int)rintf(x); }
inline int __float2int_rz(float x) { return (int)x; }
inline float __int2float_rn(int x) { return (float)x; }
inline float __double2float_rn(double x) { return (float)x; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((uint64_t)x * y >> 32); }
inline int __mul24(int x, int y) { return x * y; }
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; bit++)
        reversed |= (x >> bit & 1) << (31 - bit);
    return reversed;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++)
        result |= (unsigned)(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return result;
}

[[noreturn]] inline void __trap() { cuda_on_cpu::fail("__trap"); }
