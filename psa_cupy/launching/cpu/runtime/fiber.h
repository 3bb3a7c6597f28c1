// Switching between fibers: a few nanoseconds on x86-64, where it is written out; by ucontext elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_on_cpu {

constexpr size_t STACK_BYTES = 128 << 10;

#if defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)  // a test defines it

typedef void* Context;  // the stack pointer; what must survive a call lies on the stack

extern "C" void cuda_on_cpu_switch(Context* from, Context to);

inline void switch_context(Context& from, Context& to) { cuda_on_cpu_switch(&from, to); }

inline void make_context(Context& context, char* stack, size_t bytes, void (*start)()) {
    void** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t(15));
    *--top = nullptr;  // where a return address would be: `start` finds the stack as after a call
    *--top = reinterpret_cast<void*>(start);
    for (int saved_register = 0; saved_register < 6; saved_register++)
        *--top = nullptr;
    context = top;
}

#else

}  // namespace cuda_on_cpu
#include <ucontext.h>
namespace cuda_on_cpu {

typedef ucontext_t Context;

inline void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }

inline void make_context(Context& context, char* stack, size_t bytes, void (*start)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, start, 0);
}

#endif

}  // namespace cuda_on_cpu
