// Barriers, shuffles and votes. `line` is the caller's: two barriers in different lines are not the same one.
#pragma once

inline void __syncthreads(int line = __builtin_LINE()) {
    cuda_on_cpu::block_meet(cuda_on_cpu::Vote::none, 0, line);
}
inline int __syncthreads_count(int predicate, int line = __builtin_LINE()) {
    return cuda_on_cpu::block_meet(cuda_on_cpu::Vote::count, predicate != 0, line);
}
inline int __syncthreads_and(int predicate, int line = __builtin_LINE()) {
    return cuda_on_cpu::block_meet(cuda_on_cpu::Vote::all, predicate != 0, line);
}
inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
    return cuda_on_cpu::block_meet(cuda_on_cpu::Vote::any, predicate != 0, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) { cuda_on_cpu::warp_meet(mask, nullptr); }

// Fences order one thread's own accesses; the fibers of a launch share one processor thread, which does so
// anyway.
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

namespace cuda_on_cpu {

struct ShuffleInput {
    int source_lane;
    alignas(8) unsigned char value[8];
};

template <class T>
inline T shuffle_from(unsigned mask, T value, int source_lane) {
    static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
    ShuffleInput input;
    input.source_lane = source_lane;
    memcpy(input.value, (const void*)&value, sizeof(T));
    memcpy(current_thread->input, &input, sizeof input);
    warp_meet(mask, shuffle);
    memcpy((void*)&value, current_thread->output, sizeof(T));
    return value;
}

// The first lane of the group of `width` lanes that holds `lane`.
inline int group_start(int lane, int width) { return lane & ~(width - 1); }

inline unsigned existing_lanes() {
    const unsigned threads = current_grid.block.x * current_grid.block.y * current_grid.block.z;
    const unsigned left = threads - (current_thread->index - current_thread->lane);
    return left >= 32 ? 0xffffffffu : (1u << left) - 1;
}

}  // namespace cuda_on_cpu

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const int lane = cuda_on_cpu::current_thread->lane;
    return cuda_on_cpu::shuffle_from(mask, value,
                                     cuda_on_cpu::group_start(lane, width) | (source & (width - 1)));
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    const int lane = cuda_on_cpu::current_thread->lane, source = lane ^ bits;
    const bool inside = source < cuda_on_cpu::group_start(lane, width) + width;
    return cuda_on_cpu::shuffle_from(mask, value, inside ? source : lane);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = cuda_on_cpu::current_thread->lane, source = lane + (int)delta;
    const bool inside = source < cuda_on_cpu::group_start(lane, width) + width;
    return cuda_on_cpu::shuffle_from(mask, value, inside ? source : lane);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = cuda_on_cpu::current_thread->lane, source = lane - (int)delta;
    const bool inside = source >= cuda_on_cpu::group_start(lane, width);
    return cuda_on_cpu::shuffle_from(mask, value, inside ? source : lane);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    *cuda_on_cpu::current_thread->input = predicate != 0;
    cuda_on_cpu::warp_meet(mask, cuda_on_cpu::ballot);
    unsigned lanes;
    memcpy(&lanes, cuda_on_cpu::current_thread->output, sizeof lanes);
    return lanes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
inline unsigned __activemask() { return cuda_on_cpu::existing_lanes(); }
