"""Matrix products, matrix loads and asynchronous copies, in the layouts of the PTX manual."""

import ml_dtypes
import numpy as np
import pytest

from tests.launching.cpu.texts import floats, needs_compiler, run_text

pytestmark = [needs_compiler, pytest.mark.parametrize("checked", [False, True])]

MMA_16 = """
extern "C" __global__ void kernel(const T* a, const T* b_transposed, const float* c, float* d) {
    const int lane = threadIdx.x, row = lane / 4, pair = lane % 4;
    const unsigned* wide_a = (const unsigned*)a;
    const unsigned* wide_b = (const unsigned*)b_transposed;
    const unsigned fragment_a[4] = {wide_a[row * 8 + pair], wide_a[(row + 8) * 8 + pair],
                                    wide_a[row * 8 + pair + 4], wide_a[(row + 8) * 8 + pair + 4]};
    const unsigned fragment_b[2] = {wide_b[row * 8 + pair], wide_b[row * 8 + pair + 4]};
    const int upper = row * 8 + pair * 2, lower = (row + 8) * 8 + pair * 2;
    const float sum[4] = {c[upper], c[upper + 1], c[lower], c[lower + 1]};
    float result[4];
    mma_m16n8k16(result, fragment_a, fragment_b, sum, T());
    d[upper] = result[0];
    d[upper + 1] = result[1];
    d[lower] = result[2];
    d[lower + 1] = result[3];
}
"""


@pytest.mark.parametrize(("type_", "dtype"), [("__half", np.float16), ("__nv_bfloat16", ml_dtypes.bfloat16)])
def test_mma_m16n8k16(type_, dtype, checked):
    random = np.random.default_rng(3)
    a, b = random.standard_normal((16, 16)).astype(dtype), random.standard_normal((16, 8)).astype(dtype)
    c = random.standard_normal((16, 8)).astype(np.float32)
    arrays = dict(a=a, b_transposed=np.ascontiguousarray(b.T), c=c, d=floats(16, 8))
    *_, d = run_text(f"using T = {type_};{MMA_16}", block=32, checked=checked, **arrays)
    exact = a.astype(np.float64) @ b.astype(np.float64) + c
    assert np.abs(d - exact).max() <= 2**-24 * np.abs(exact).max() * 2


def test_mma_m16n8k8_tf32(checked):
    text = """
    extern "C" __global__ void kernel(const float* a, const float* b_transposed, float* d) {
        const int lane = threadIdx.x, row = lane / 4, column = lane % 4;
        const float* upper = a + row * 8 + column;
        const float* lower = upper + 64;
        const float* right = b_transposed + row * 8 + column;
        const unsigned fragment_a[4] = {round_to_tf32(upper[0]), round_to_tf32(lower[0]),
                                        round_to_tf32(upper[4]), round_to_tf32(lower[4])};
        const unsigned fragment_b[2] = {round_to_tf32(right[0]), round_to_tf32(right[4])};
        float sum[4] = {};
        mma_m16n8k8_tf32(sum, fragment_a, fragment_b, sum);
        for (int i = 0; i < 4; i++) d[(row + i / 2 * 8) * 8 + column * 2 + i % 2] = sum[i];
    }
    """
    random = np.random.default_rng(4)
    a, b = (
        random.standard_normal((16, 8)).astype(np.float32),
        random.standard_normal((8, 8)).astype(np.float32),
    )
    *_, d = run_text(
        text, block=32, checked=checked, a=a, b_transposed=np.ascontiguousarray(b.T), d=floats(16, 8)
    )
    exact = rounded_to_tf32(a).astype(np.float64) @ rounded_to_tf32(b)
    assert np.abs(d - exact).max() <= 2**-24 * np.abs(exact).max()
    assert np.abs(d - a.astype(np.float64) @ b).max() > 2**-14  # it did round


def rounded_to_tf32(x):
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def test_mma_m8n8k4_f64(checked):
    text = """
    extern "C" __global__ void kernel(const double* a, const double* b_transposed, const double* c,
                                      double* d) {
        const int lane = threadIdx.x, first = lane / 4 * 8 + lane % 4 * 2;
        const double sum[2] = {c[first], c[first + 1]};
        double result[2];
        mma_m8n8k4_f64(result, a[lane], b_transposed[lane], sum);
        d[first] = result[0];
        d[first + 1] = result[1];
    }
    """
    random = np.random.default_rng(5)
    a, b, c = random.standard_normal((8, 4)), random.standard_normal((4, 8)), random.standard_normal((8, 8))
    arrays = dict(a=a, b_transposed=np.ascontiguousarray(b.T), c=c, d=np.full((8, 8), np.nan))
    *_, d = run_text(text, block=32, checked=checked, **arrays)
    assert np.abs(d - (a @ b + c)).max() < 1e-14


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(transposed, checked):
    text = """
    extern "C" __global__ void kernel(const unsigned short* x, unsigned short* y) {
        __shared__ __align__(16) unsigned short tile[16 * 24];
        const int lane = threadIdx.x;
        for (int i = lane; i < 256; i += 32) tile[i / 16 * 24 + i % 16] = x[i];
        __syncwarp();
        unsigned fragments[4];
        LDMATRIX(fragments, &tile[lane % 16 * 24 + lane / 16 * 8]);
        for (int i = 0; i < 8; i++) y[lane * 8 + i] = fragments[i / 2] >> i % 2 * 16;
    }
    """
    function = "ldmatrix_x4_trans" if transposed else "ldmatrix_x4"
    x = np.arange(256, dtype=np.uint16).reshape(16, 16)
    _, y = run_text(
        text.replace("LDMATRIX", function), block=32, checked=checked, x=x, y=np.zeros((32, 4, 2), np.uint16)
    )
    for i, matrix in enumerate([x[:8, :8], x[8:, :8], x[:8, 8:], x[8:, 8:]]):
        seen = y[:, i].reshape(8, 8)  # lane l holds row l / 4 and two columns
        assert np.array_equal(seen, matrix.T if transposed else matrix)


def test_movmatrix(checked):
    text = """
    extern "C" __global__ void kernel(const unsigned short* x, unsigned short* y) {
        const unsigned pair = x[2 * threadIdx.x] | (unsigned)x[2 * threadIdx.x + 1] << 16;
        const unsigned moved = movmatrix_trans(pair);
        y[2 * threadIdx.x] = moved & 0xffff;
        y[2 * threadIdx.x + 1] = moved >> 16;
    }
    """
    x = np.arange(64, dtype=np.uint16).reshape(8, 8)
    _, y = run_text(text, block=32, checked=checked, x=x, y=np.zeros((8, 8), np.uint16))
    assert np.array_equal(y, x.T)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_asynchronous_copies_land_at_the_wait_and_fill_with_zeros(size, checked):
    text = f"""
    extern "C" __global__ void kernel(const unsigned char* x, unsigned char* y) {{
        __shared__ __align__(16) unsigned char tile[2][{size}];
        cp_async_{size}(tile[0], x);
        cp_async_commit();
        cp_async_{size}(tile[1], x, {size // 4});
        cp_async_commit();
        cp_async_wait<1>();
        for (int i = 0; i < {size}; i++) y[i] = tile[0][i];
        cp_async_wait<0>();
        for (int i = 0; i < {size}; i++) y[{size} + i] = tile[1][i];
    }}
    """
    x = np.arange(1, size + 1, dtype=np.uint8)
    _, y = run_text(text, checked=checked, x=x, y=np.full((2, size), 255, np.uint8))
    assert np.array_equal(y, [x, np.where(np.arange(size) < size // 4, x, 0)])
