"""Conversions of the 16-bit types against NumPy's and ml_dtypes's: every pattern, and values that round."""

import ml_dtypes
import numpy as np
import pytest

from tests.launching.cpu.texts import needs_compiler, run_text

pytestmark = needs_compiler

TO_FLOAT = """
extern "C" __global__ void kernel(const T* x, float* y) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = FUNCTION;
}
"""
FROM_FLOAT = """
extern "C" __global__ void kernel(const float* x, T* y) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = FUNCTION;
}
"""

DTYPES = {"__half": np.dtype(np.float16), "__nv_bfloat16": np.dtype(ml_dtypes.bfloat16)}
READERS = [
    ("__half", "__half2float(x[i])"),
    ("__half", "cuda_on_cpu::float_from_float16_in_software(x[i].bits)"),
    ("__nv_bfloat16", "__bfloat162float(x[i])"),
]
WRITERS = [
    ("__half", "__float2half_rn(x[i])"),
    ("__half", "__ushort_as_half(cuda_on_cpu::float16_from_float_in_software(x[i]))"),
    ("__half", "__low2half(__floats2half2_rn(x[i], 0.0f))"),
    ("__half", "__ushort_as_half(pack2(0.0f, x[i], __half()) >> 16)"),
    ("__nv_bfloat16", "__float2bfloat16_rn(x[i])"),
    ("__nv_bfloat16", "__ushort_as_bfloat16(pack2(x[i], 0.0f, __nv_bfloat16()) & 0xffff)"),
]


def same(actual, expected):
    both_nan = np.isnan(actual) & np.isnan(expected)
    return (actual == expected) & (np.signbit(actual) == np.signbit(expected)) | both_nan


@pytest.mark.parametrize(("type_", "function"), READERS)
def test_every_pattern_to_float(type_, function):
    x = np.arange(65536, dtype=np.uint16).view(DTYPES[type_])
    y = np.full(65536, np.nan, np.float32)
    run_text(TO_FLOAT.replace("FUNCTION", function).replace("T*", f"{type_}*"), grid=256, block=256, x=x, y=y)
    assert same(y, x.astype(np.float32)).all()


@pytest.mark.parametrize(("type_", "function"), WRITERS)
def test_from_float_rounds_to_nearest_even(type_, function):
    dtype = DTYPES[type_]
    random = np.random.default_rng(1)
    with np.errstate(all="ignore"):
        values = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32)
        halfway = (values[:-1] + values[1:]) / 2  # ties, and their neighbours on both sides
        near = [np.nextafter(halfway, np.float32(sign * np.inf), dtype=np.float32) for sign in (-1, 1)]
        anything = random.integers(0, 2**32, 60000, dtype=np.uint32).view(np.float32)
        x = np.concatenate([values, halfway, *near, anything, [65519.996, 65520, 2**-25, 3e38, -0.0]]).astype(
            np.float32
        )
        x = np.concatenate([x, np.zeros(-len(x) % 256, np.float32)])
        expected = x.astype(dtype)
    y = np.zeros(len(x), dtype)
    run_text(
        FROM_FLOAT.replace("FUNCTION", function).replace("T*", f"{type_}*"),
        grid=len(x) // 256,
        block=256,
        x=x,
        y=y,
    )
    with np.errstate(all="ignore"):
        matches = same(y.astype(np.float32), expected.astype(np.float32))
    assert matches.all(), (x[~matches][:5], y[~matches][:5], expected[~matches][:5])


def test_arithmetic_rounds_once():
    random = np.random.default_rng(2)
    a, b = (random.standard_normal(512).astype(np.float16) for _ in "ab")
    text = """
    extern "C" __global__ void kernel(const __half* a, const __half* b, __half* c) {
        const int i = threadIdx.x;
        c[i] = a[i] + b[i];
        c[512 + i] = __hmul(a[i], b[i]);
        c[1024 + i] = __hfma(a[i], b[i], a[i]);
    }
    """
    c = np.zeros(3 * 512, np.float16)
    run_text(text, block=512, a=a, b=b, c=c)
    exact_a, exact_b = a.astype(np.float64), b.astype(np.float64)
    exact = np.concatenate([exact_a + exact_b, exact_a * exact_b, exact_a * exact_b + exact_a])
    assert np.array_equal(c, exact.astype(np.float16))
