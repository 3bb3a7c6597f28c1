"""CUDA C as the kernels write it: declarations, qualifiers, types, templates, integer functions."""

import numpy as np
import pytest

from psa_cupy.launching.cpu.compile import as_cpp, kernel_names
from tests.launching.cpu.texts import floats, ints, needs_compiler, run_text

SHARED = {
    "__shared__ float a[32][33];": "CUDA_ON_CPU_SHARED(1, a, [32][33], float);",
    "__shared__ int next;": "CUDA_ON_CPU_SHARED(1, next, , int);",
    "__shared__ __align__(16) T a[2][N * (M + 8)];": "CUDA_ON_CPU_SHARED(16, a, [2][N * (M + 8)], T);",
    "__shared__ alignas(128) unsigned char a[BYTES];": "CUDA_ON_CPU_SHARED(128, a, [BYTES], unsigned char);",
    "alignas(16) __shared__ T a[N];": "CUDA_ON_CPU_SHARED(16, a, [N], T);",
    "__shared__ A<int, 2> a[4], b;": (
        "CUDA_ON_CPU_SHARED(1, a, [4], A<int, 2>); CUDA_ON_CPU_SHARED(1, b, , A<int, 2>);"
    ),
    "extern __shared__ float4 tiles[];": "CUDA_ON_CPU_DYNAMIC_SHARED(1, tiles, float4);",
    "extern __shared__ __align__(1024) uint4 all[];": "CUDA_ON_CPU_DYNAMIC_SHARED(1024, all, uint4);",
    "// __shared__ float a[32];": "// __shared__ float a[32];",
    "/* in __shared__ memory; */": "/* in __shared__ memory; */",
}


@pytest.mark.parametrize("declaration", SHARED)
def test_shared_memory_declarations(declaration):
    assert as_cpp(declaration).split("\n")[0] == SHARED[declaration]


def test_lines_keep_their_numbers():
    text = "int a;\n__shared__ float\n    tile[4],\n    other[5];\nint b;  // line 5\n"
    assert as_cpp(text).split("\n")[4] == "int b;  // line 5"


def test_kernel_names():
    text = """
    // __global__ void not_this(int);
    extern "C" __global__ void plain(int n) {}
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT<(A + B)>) bounded(int n) {}
    extern "C" __global__ __launch_bounds__(128) void other_order(int n) {}
    """
    assert kernel_names(text) == ["plain", "bounded", "other_order"]


@needs_compiler
@pytest.mark.parametrize("checked", [False, True])
class TestRun:
    def test_threads_know_where_they_are(self, checked):
        text = """
        extern "C" __global__ void kernel(int* y) {
            const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
            const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
            y[block * 30 + thread] = 1000000 * blockIdx.x + 100000 * blockIdx.y + 10000 * blockIdx.z +
                                     100 * threadIdx.x + 10 * threadIdx.y + threadIdx.z + warpSize - 32;
        }
        """
        y = run_text(text, grid=(2, 3, 2), block=(5, 3, 2), checked=checked, y=ints(12 * 30)).reshape(
            2, 3, 2, 2, 3, 5
        )
        block_z, block_y, block_x, thread_z, thread_y, thread_x = np.indices(y.shape)
        expected = (
            1000000 * block_x + 100000 * block_y + 10000 * block_z + 100 * thread_x + 10 * thread_y + thread_z
        )
        assert np.array_equal(y, expected)

    def test_templates_lambdas_constants_and_dynamic_shared_memory(self, checked):
        text = """
        constexpr int WIDTH = 4;
        __constant__ float FACTORS[2] = {2.0f, 3.0f};
        template <bool TWICE, class T> __device__ __forceinline__ T scaled(T x) {
            if constexpr (TWICE) return 2 * x; else return x;
        }
        template <int N> struct Sum {
            float of[N] = {};
            __device__ void add(float x) {
        #pragma unroll
                for (int i = 0; i < N; ++i) of[i] += x;
            }
        };
        extern "C" __global__ void __launch_bounds__(32, 2)
            kernel(const float* __restrict__ x, float* __restrict__ y, float offset) {
            extern __shared__ __align__(128) unsigned char memory[];
            float* tile = reinterpret_cast<float*>(memory);
            __shared__ int count, unused[3];
            if (threadIdx.x == 0) count = 0;
            __syncthreads();
            const float4 four = *reinterpret_cast<const float4*>(x + WIDTH * threadIdx.x);
            *reinterpret_cast<float4*>(tile + WIDTH * threadIdx.x) = four;
            atomicAdd(&count, 1);
            __syncthreads();
            auto get = [&](int i) { return tile[i] + offset; };
            Sum<2> sum;
            for (int i = 0; i < WIDTH; ++i) sum.add(scaled<true>(get(WIDTH * threadIdx.x + i)));
            y[threadIdx.x] = sum.of[1] * FACTORS[1] + count;
        }
        """
        x = np.arange(128, dtype=np.float32)
        _, y = run_text(text, np.float32(0.5), block=32, shared_bytes=512, checked=checked, x=x, y=floats(32))
        assert np.array_equal(y, 6 * (x.reshape(32, 4).sum(1) + 2) + 32)

    def test_integer_functions(self, checked):
        expressions = {
            "min(3, -4)": -4,
            "max(3u, 5u)": 5,
            "min(-1, 2u)": 2,
            "(int)max(7LL, 9LL)": 9,
            "(int)min(2.5f, 1.5f)": 1,
            "__popc(0xf0f0u)": 8,
            "__clz(1)": 31,
            "__clz(0)": 32,
            "__ffs(8)": 4,
            "(int)__brev(1u)": -(2**31),
            "(int)__umulhi(0x80000000u, 6u)": 3,
            "(int)__byte_perm(0x33221100u, 0x77665544u, 0x5410)": 0x55441100,
            "__float_as_int(1.0f)": 0x3F800000,
            "(int)__int_as_float(0x40000000)": 2,
            "__float2int_rn(2.5f)": 2,
            "(int)(rsqrtf(0.25f) + __fdividef(1.0f, 4.0f) * 4)": 3,
            "(int)__longlong_as_double(0x4000000000000000LL)": 2,
            "(int)sizeof(float3) + (int)alignof(double4)": 12 + 16,
            "(int)make_uint4(1, 2, 3, 4).w + make_short2(5, 6).y": 10,
        }
        lines = "".join(f"y[{i}] = {expression};" for i, expression in enumerate(expressions))
        y = run_text(
            f'extern "C" __global__ void kernel(int* y) {{ {lines} }}',
            checked=checked,
            y=ints(len(expressions)),
        )
        assert dict(zip(expressions, y.tolist(), strict=True)) == expressions

    def test_products_that_must_not_be_fused(self, checked):
        text = """
        extern "C" __global__ void kernel(const float* x, float* y) {
            y[0] = __fadd_rn(__fmul_rn(x[0], x[0]), -x[1]);
        }
        """
        x = np.array([1 + 2**-12, 0], np.float32)
        x[1] = x[0] * x[0]
        assert run_text(text, checked=checked, x=x, y=floats(1))[1] == 0
