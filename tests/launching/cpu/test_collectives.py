"""Barriers, shuffles, votes, atomics: against what the CUDA manual says they give."""

import ml_dtypes
import numpy as np
import pytest

from tests.launching.cpu.texts import floats, ints, needs_compiler, run_text

pytestmark = [needs_compiler, pytest.mark.parametrize("checked", [False, True])]

LANES = np.arange(32)

SHUFFLES = {
    "__shfl_sync(~0u, lane, 5)": np.full(32, 5),
    "__shfl_sync(~0u, lane, lane + 1)": (LANES + 1) % 32,
    "__shfl_sync(~0u, lane, 9, 8)": LANES // 8 * 8 + 1,
    "__shfl_xor_sync(~0u, lane, 3)": LANES ^ 3,
    "__shfl_xor_sync(~0u, lane, 8, 8)": np.where(LANES % 16 < 8, LANES, LANES ^ 8),
    "__shfl_down_sync(~0u, lane, 4)": np.where(LANES + 4 < 32, LANES + 4, LANES),
    "__shfl_up_sync(~0u, lane, 4, 16)": np.where(LANES % 16 >= 4, LANES - 4, LANES),
    "lane < 16 ? __shfl_xor_sync(0xffffu, lane, 1) : __shfl_xor_sync(0xffff0000u, lane, 2)": np.where(
        LANES < 16, LANES ^ 1, LANES ^ 2
    ),
    "(int)__shfl_xor_sync(~0u, (double)lane, 1)": LANES ^ 1,
    "(int)(float)__shfl_xor_sync(~0u, __half(lane), 1)": LANES ^ 1,
    "(int)__ballot_sync(~0u, lane % 3 == 0)": np.full(32, 0x49249249),
    "lane < 8 ? __ballot_sync(0xffu, lane > 5) : 7": np.where(LANES < 8, 0xC0, 7),
    "__any_sync(~0u, lane == 31) + __any_sync(~0u, lane == 32)": np.full(32, 1),
    "__all_sync(~0u, lane < 32) + __all_sync(~0u, lane < 31)": np.full(32, 1),
}


def test_warp_functions(checked):
    # Two full warps, which must not hear of each other.
    lines = "".join(f"y[{64 * i} + threadIdx.x] = {expression};" for i, expression in enumerate(SHUFFLES))
    text = f"""
    extern "C" __global__ void kernel(int* y) {{
        const int lane = threadIdx.x % 32;
        {lines}
    }}
    """
    y = run_text(text, block=64, checked=checked, y=ints(len(SHUFFLES), 2, 32))
    wrong = [e for e, of_warps in zip(SHUFFLES, y, strict=True) if not (of_warps == SHUFFLES[e]).all()]
    assert not wrong, wrong


def test_the_last_warp_may_be_short(checked):
    text = """
    extern "C" __global__ void kernel(int* y) {
        y[threadIdx.x] = (int)__ballot_sync(~0u, 1);
        __syncwarp();
    }
    """
    y = run_text(text, block=40, checked=checked, y=ints(40))
    assert np.array_equal(y.view(np.uint32), [0xFFFFFFFF] * 32 + [0xFF] * 8)


def test_votes_of_the_block(checked):
    text = """
    extern "C" __global__ void kernel(int* y) {
        const int i = threadIdx.x;
        y[4 * i + 0] = __syncthreads_count(i < 40);
        y[4 * i + 1] = __syncthreads_or(i == 63) + 2 * __syncthreads_or(0);
        y[4 * i + 2] = __syncthreads_and(i < 64) + 2 * __syncthreads_and(i < 63);
        y[4 * i + 3] = 7;
    }
    """
    assert np.array_equal(run_text(text, block=64, checked=checked, y=ints(64, 4)), [[40, 1, 1, 7]] * 64)


def test_barriers_order_a_reduction_in_shared_memory(checked):
    text = """
    extern "C" __global__ void kernel(const float* x, float* sum) {
        __shared__ float partial[256];
        const int i = threadIdx.x;
        partial[i] = x[blockIdx.x * 256 + i];
        for (int width = 128; width > 0; width /= 2) {
            __syncthreads();
            if (i < width) partial[i] += partial[i + width];
        }
        if (i == 0) sum[blockIdx.x] = partial[0];
    }
    """
    x = np.arange(1024, dtype=np.float32)
    _, total = run_text(text, grid=4, block=256, checked=checked, x=x, sum=floats(4))
    assert np.array_equal(total, x.reshape(4, 256).sum(1))


ATOMIC_TYPES = {
    "float": np.float32,
    "double": np.float64,
    "__half": np.float16,
    "__nv_bfloat16": ml_dtypes.bfloat16,
    "int": np.int32,
}


@pytest.mark.parametrize("type_", ATOMIC_TYPES)
def test_atomic_add_between_threads_and_blocks(type_, checked):
    text = f"""
    extern "C" __global__ void kernel({type_}* y) {{ atomicAdd(y + threadIdx.x % 2, {type_}(1)); }}
    """
    y = run_text(text, grid=4, block=50, checked=checked, y=np.array([5, 0], ATOMIC_TYPES[type_]))
    assert np.array_equal(y.astype(np.float32), [105, 100])


@pytest.mark.parametrize(("type_", "dtype", "bits"), [("float", np.float32, 12), ("double", np.float64, 27)])
def test_a_product_is_rounded_before_it_is_added(type_, dtype, bits, checked):
    """As an atomic unit does; a fused multiply-add would leave x * x's last bit."""
    text = f"""
    extern "C" __global__ void kernel({type_}* y, const {type_}* x, int count) {{
        const {type_} product = x[threadIdx.x] * x[0];
        if (threadIdx.x < count) atomicAdd(y + threadIdx.x, product);
    }}
    """
    x = np.full(4, 1 + 2.0**-bits, dtype)
    y, _ = run_text(text, np.int32(4), block=4, checked=checked, y=-(x * x), x=x)
    assert not y.any()


def test_other_atomics(checked):
    text = """
    extern "C" __global__ void kernel(int* y) {
        const int i = threadIdx.x;
        atomicMax(y, i);
        atomicMin(y + 1, -i);
        atomicOr((unsigned*)y + 2, 1u << i);
        atomicCAS(y + 3, 0, 5 + i);
        atomicExch(y + 4, 9);
        atomicSub(y + 5, 2);
    }
    """
    y = run_text(text, block=10, checked=checked, y=ints(6))
    assert y.tolist() == [9, -9, 1023, 5, 9, -20]
