// Guarded memory. An array ends at a page that no one may touch, and begins after one; what is left of its
// first and last page is poison, looked at after the launch. So running past an array is seen in unchecked
// builds too.

#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

#include "state.h"

namespace cuda_on_cpu {

namespace {

constexpr size_t GUARD_BYTES = 1 << 20;  // it costs addresses only, and catches strides as well as steps
constexpr unsigned char POISON = 0xff;   // a NaN in every floating type

const size_t PAGE = sysconf(_SC_PAGESIZE);

size_t round_up(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

char* first_page(const char* base) {
    return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(base) / PAGE * PAGE);
}

char* end_of_pages(const char* base, size_t bytes) {
    return reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(base) + bytes, PAGE));
}

char* map_between_guards(size_t usable) {
    void* all = mmap(nullptr, usable + 2 * GUARD_BYTES, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) return nullptr;
    char* inner = static_cast<char*>(all) + GUARD_BYTES;
    if (mprotect(inner, usable, PROT_READ | PROT_WRITE) == 0) return inner;
    munmap(all, usable + 2 * GUARD_BYTES);
    return nullptr;
}

bool all_poison(const char* begin, const char* end) {
    for (const char* byte = begin; byte < end; byte++) {
        if ((unsigned char)*byte != POISON) return false;
    }
    return true;
}

}  // namespace

// At least a byte, so that every array has an address of its own; `shift` bytes behind a multiple of
// `alignment`. Null if there is no memory left.
char* allocate_guarded(size_t bytes, size_t alignment, size_t shift) {
    const size_t used = round_up(shift + (bytes ? bytes : 1), alignment), usable = round_up(used, PAGE);
    char* pages = map_between_guards(usable);
    if (!pages) return nullptr;
    memset(pages, POISON, usable);
    return pages + usable - used + shift;
}

void release_guarded(char* base, size_t bytes) {
    char* begin = first_page(base) - GUARD_BYTES;
    munmap(begin, end_of_pages(base, bytes ? bytes : 1) + GUARD_BYTES - begin);
}

bool padding_is_intact(const Region& region) {
    return all_poison(first_page(region.base), region.base) &&
           all_poison(region.base + region.bytes, end_of_pages(region.base, region.bytes ? region.bytes : 1));
}

bool in_guard_pages(const Region& region, const char* address) {
    return address >= first_page(region.base) - GUARD_BYTES &&
           address < end_of_pages(region.base, region.bytes) + GUARD_BYTES;
}

void poison(const Region& region) { memset(region.base, POISON, region.bytes); }

char* allocate_stack() {
    char* stack = map_between_guards(STACK_BYTES);
    if (!stack) give_up("no memory left for the stacks of the threads");
    return stack;
}

bool is_stack_overflow(const Fiber* fiber, const char* address) {
    return address < fiber->stack && address >= fiber->stack - GUARD_BYTES;
}

namespace {

char* add_shared_memory(void* identity, const char* name, size_t bytes, size_t element_bytes,
                        size_t alignment) {
    char* base = allocate_guarded(bytes, alignment < 16 ? 16 : alignment, 0);
    if (!base) give_up(std::string("no memory left for ") + name);
    launch.shared.push_back({base, bytes, element_bytes, name, true, identity, nullptr});
    if (launch.checked) begin_watching(launch.shared.back());
    return base;
}

}  // namespace

void* static_shared_memory(void* identity, const char* name, size_t bytes, size_t element_bytes,
                           size_t alignment) {
    for (const Region& region : launch.shared) {
        if (region.identity == identity) return region.base;
    }
    return add_shared_memory(identity, name, bytes, element_bytes, alignment);
}

// All `extern __shared__` declarations of a kernel are the same memory; the first one names it.
void* dynamic_shared_memory(const char* name, size_t element_bytes, size_t alignment) {
    static char identity;
    return static_shared_memory(&identity, name, launch.dynamic_shared_bytes, element_bytes, alignment);
}

extern "C" __attribute__((visibility("default"))) char* cuda_on_cpu_allocate(size_t bytes, size_t shift) {
    return allocate_guarded(bytes, 16, shift);
}
extern "C" __attribute__((visibility("default"))) void cuda_on_cpu_release(char* base, size_t bytes) {
    release_guarded(base, bytes);
}

}  // namespace cuda_on_cpu
