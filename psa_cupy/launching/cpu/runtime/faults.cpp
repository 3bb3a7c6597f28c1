// Faults: from a signal or a failed check to one sentence, and out of the launch.
//
// Code addresses go into the sentence as "{hex}", relative to the kernel's library; the loader turns them
// into "psa_forward.cu:123".

#include <cstdio>
#include <pthread.h>
#include <signal.h>
#include <ucontext.h>

#include "state.h"

namespace cuda_on_cpu {

namespace {

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
constexpr int SIGNAL_COUNT = sizeof SIGNALS / sizeof *SIGNALS;

pthread_t launching_thread;
struct sigaction previous_actions[SIGNAL_COUNT];
stack_t previous_stack;
char signal_stack[64 << 10];

const char* instruction_of(const ucontext_t* context) {
#if defined(__x86_64__)
    return reinterpret_cast<const char*>(context->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
    return reinterpret_cast<const char*>(context->uc_mcontext.pc);
#else
    return nullptr;
#endif
}

const char* access_word(const ucontext_t* context) {
#if defined(__x86_64__)
    return context->uc_mcontext.gregs[REG_ERR] & 2 ? "write" : "read";
#else
    (void)context;
    return "access";
#endif
}

std::string describe_memory_fault(const siginfo_t* info, const ucontext_t* context) {
    const char* address = static_cast<const char*>(info->si_addr);
    if (is_stack_overflow(current_fiber(), address)) return "stack overflow";
#if defined(__x86_64__)
    // The processor gives no address for a vector instruction whose address is misaligned.
    if (!address && info->si_code == SI_KERNEL) return "misaligned address of a vector access";
#endif
    const std::string word = access_word(context);
    for (const auto* regions : {&launch.operands, &launch.shared}) {
        for (const Region& region : *regions) {
            if (in_guard_pages(region, address)) return word + " out of bounds: " + element(region, address);
        }
    }
    return word + " out of bounds: an address near no array";
}

void on_signal(int number, siginfo_t* info, void* context_pointer) {
    const auto* context = static_cast<const ucontext_t*>(context_pointer);
    if (!current_thread || !pthread_equal(pthread_self(), launching_thread)) {
        // Not ours: put back what was there, and let it happen again.
        for (int i = 0; i < SIGNAL_COUNT; i++)
            sigaction(SIGNALS[i], &previous_actions[i], nullptr);
        return;
    }
    std::string what;
    if (number == SIGSEGV) what = describe_memory_fault(info, context);
    if (number == SIGBUS) what = "misaligned address, or memory that is not there";
    if (number == SIGFPE) what = "integer division by zero";
    if (number == SIGILL) what = "code that the kernel says is never reached";
    const char* instruction = instruction_of(context);
    const Fiber* fiber = current_fiber();
    const std::string where = in_kernel(instruction) ? place(instruction) : place_of_call(fiber->site);
    give_up(what + ", by " + describe(fiber) + " " + where);
}

}  // namespace

SignalHandlers::SignalHandlers() {
    launching_thread = pthread_self();
    stack_t stack{};
    stack.ss_sp = signal_stack;
    stack.ss_size = sizeof signal_stack;
    sigaltstack(&stack, &previous_stack);
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < SIGNAL_COUNT; i++)
        sigaction(SIGNALS[i], &action, &previous_actions[i]);
}

SignalHandlers::~SignalHandlers() {
    for (int i = 0; i < SIGNAL_COUNT; i++)
        sigaction(SIGNALS[i], &previous_actions[i], nullptr);
    sigaltstack(&previous_stack, nullptr);
}

std::string describe(const Fiber* fiber) {
    char text[120];
    snprintf(text, sizeof text, "thread (%u, %u, %u) of block (%u, %u, %u)", fiber->thread.x, fiber->thread.y,
             fiber->thread.z, fiber->block.x, fiber->block.y, fiber->block.z);
    return text;
}

std::string place(const void* code) {
    char text[40];
    snprintf(text, sizeof text, "at {%lx}",
             (unsigned long)(reinterpret_cast<uintptr_t>(code) - launch.module_begin));
    return text;
}

// A return address is behind the call, perhaps on the next line already.
std::string place_of_call(const void* return_address) {
    return place(static_cast<const char*>(return_address) - 1);
}

std::string element(const Region& region, const char* address) {
    const long size = region.element_bytes, offset = address - region.base;
    const long index = offset >= 0 ? offset / size : -((-offset + size - 1) / size);
    return "element " + std::to_string(index) + " of " + region.name + ", which has " +
           std::to_string(region.bytes / region.element_bytes);
}

void give_up(const std::string& report) {
    launch.report = report;
    siglongjmp(launch.give_up, 1);
}

// Called by a kernel's own code (the header's functions) or by a function of the runtime that noted its site.
void fail(const char* message) {
    Fiber* fiber = current_fiber();
    const void* caller = __builtin_return_address(0);
    if (in_kernel(caller)) fiber->site = caller;
    give_up(std::string(message) + ", by " + describe(fiber) + " " + place_of_call(fiber->site));
}

}  // namespace cuda_on_cpu
