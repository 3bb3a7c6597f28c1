// cp.async: the source is read at once, the target written at the wait, as late as CUDA allows. A kernel that
// forgets the wait therefore reads what lay there before: poison, or the last tile.

#include <cstring>

#include "state.h"

namespace cuda_on_cpu {

void asynchronous_copy(void* target, const void* source, unsigned bytes, int source_bytes) {
    CUDA_ON_CPU_NOTE_SITE();
    if (source_bytes < 0 || source_bytes > (int)bytes) fail("cp.async: more source bytes than it copies");
    if (reinterpret_cast<uintptr_t>(target) % bytes) fail("misaligned target address of cp.async");
    if (reinterpret_cast<uintptr_t>(source) % bytes) fail("misaligned source address of cp.async");
    AsynchronousCopy copy{static_cast<char*>(target), bytes, {}};
    if (launch.checked) {
        if (source_bytes) watch(source, source_bytes, Access::read);
        watch(target, bytes, Access::copy_begin);
    }
    memcpy(copy.data, source, source_bytes);
    (void)*(volatile char*)(copy.target + bytes - 1);  // out of bounds shows here, not at the wait
    current_fiber()->copies.push_back(copy);
}

void asynchronous_copy_commit() { current_fiber()->committed.push_back(current_fiber()->copies.size()); }

void asynchronous_copy_wait(int groups_left) {
    Fiber* fiber = current_fiber();
    CUDA_ON_CPU_NOTE_SITE();
    if ((int)fiber->committed.size() <= groups_left) return;
    const size_t groups = fiber->committed.size() - groups_left, landing = fiber->committed[groups - 1];
    for (size_t i = 0; i < landing; i++) {
        const AsynchronousCopy& copy = fiber->copies[i];
        if (launch.checked) watch(copy.target, copy.bytes, Access::copy_end);
        memcpy(copy.target, copy.data, copy.bytes);
    }
    fiber->copies.erase(fiber->copies.begin(), fiber->copies.begin() + landing);
    fiber->committed.erase(fiber->committed.begin(), fiber->committed.begin() + groups);
    for (size_t& end : fiber->committed)
        end -= landing;
}

// When a block is over, or given up, copies that nobody waited for have nowhere to land.
void abandon_copies() {
    for (unsigned i = 0; i < block.threads; i++) {
        block.fibers[i].copies.clear();
        block.fibers[i].committed.clear();
    }
}

}  // namespace cuda_on_cpu
