// The door of a kernel: a function that takes its arguments as an array of addresses (as cuLaunchKernel
// does), and its parameter types, against which the loader checks them.
#pragma once

#include <type_traits>
#include <utility>

namespace cuda_on_cpu {

// NumPy's name of a parameter type; "*" in front for a pointer, "*" alone for a pointer to anything else.
template <class T>
constexpr const char* parameter_type() {
    typedef std::remove_cv_t<T> U;
    if constexpr (std::is_pointer_v<U>) {
        typedef std::remove_cv_t<std::remove_pointer_t<U>> Element;
        if (std::is_same_v<Element, __half>) return "*float16";
        if (std::is_same_v<Element, __nv_bfloat16>) return "*bfloat16";
        if (std::is_same_v<Element, float>) return "*float32";
        if (std::is_same_v<Element, double>) return "*float64";
        if (std::is_same_v<Element, int>) return "*int32";
        return "*";
    } else {
        if (std::is_same_v<U, bool>) return "bool";
        if (std::is_same_v<U, float>) return "float32";
        if (std::is_same_v<U, double>) return "float64";
        if (std::is_integral_v<U> && sizeof(U) == 4) return std::is_signed_v<U> ? "int32" : "uint32";
        if (std::is_integral_v<U> && sizeof(U) == 8) return std::is_signed_v<U> ? "int64" : "uint64";
        return "unknown";
    }
}

template <class... T>
const char* const* parameter_types(void (*)(T...)) {
    static const char* const names[] = {parameter_type<T>()..., nullptr};
    return names;
}

template <class... T, size_t... I>
CUDA_ON_CPU_UNSEEN inline void call(void (*kernel)(T...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<T>*>(arguments[I])...);
}
template <class... T>
CUDA_ON_CPU_UNSEEN inline void call(void (*kernel)(T...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<T...>());
}

}  // namespace cuda_on_cpu

#define CUDA_ON_CPU_ENTRY(NAME)                                                    \
    extern "C" CUDA_ON_CPU_UNSEEN void cuda_on_cpu_call_##NAME(void** arguments) { \
        ::cuda_on_cpu::call(&NAME, arguments);                                     \
    }                                                                              \
    extern "C" const char* const* cuda_on_cpu_types_##NAME() { return ::cuda_on_cpu::parameter_types(&NAME); }
