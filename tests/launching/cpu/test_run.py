"""Running plans: arguments, scratch, what is written back when, who may run at once."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from psa_cupy.launching import cpu
from psa_cupy.launching.plan import Kernel, Launch, Operand, Plan, Scratch, TensorMap
from tests.launching.cpu.texts import HEADERS, floats, ints, needs_compiler, run_text

pytestmark = needs_compiler

COPY = 'extern "C" __global__ void kernel(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }'
FACTOR = """
extern "C" __global__ void kernel(float* y, float factor, int n, long long m, bool yes) {
    y[0] = factor * n * m * yes;
}
"""
FACTOR_ARGUMENTS = (np.float32(2), np.int32(3), np.int64(4), np.bool_(True))


def launch(*arguments, entry="kernel", grid=(1, 1, 1), block=(1, 1, 1), **more):
    return Launch(Kernel("test.cu", entry), grid, block, arguments, **more)


def run_launches(text, launches, operands, scratch=(), checked=None):
    cpu.run(
        Plan(tuple(launches), tuple(scratch)), operands, checked=checked, render=lambda kernel: HEADERS + text
    )


def test_scalars_arrive_by_value():
    assert run_text(FACTOR, *FACTOR_ARGUMENTS, y=floats(1)) == 24


WRONG_SCALARS = {
    "argument 1 is float64, the kernel takes float32": (np.float64(2), *FACTOR_ARGUMENTS[1:]),
    "argument 2 is int64, the kernel takes int32": (np.float32(2), np.int64(3), *FACTOR_ARGUMENTS[2:]),
    "argument 1 is a float, expected an Operand or a NumPy scalar": (2.0, *FACTOR_ARGUMENTS[1:]),
    "4 arguments, the kernel takes 5": FACTOR_ARGUMENTS[:3],
    "argument 1 is the operand y, the kernel takes float32": (Operand("y"), *FACTOR_ARGUMENTS[1:]),
}


@pytest.mark.parametrize("message", WRONG_SCALARS)
def test_arguments_that_do_not_fit(message):
    with pytest.raises(TypeError, match=f"kernel: {message}"):
        run_text(FACTOR, *WRONG_SCALARS[message], y=floats(1))


def test_an_array_of_another_dtype():
    with pytest.raises(TypeError, match="argument 0 is x of float16, the kernel takes float32"):
        run_text(COPY, x=np.zeros(1, np.float16), y=floats(1))


def test_an_offset_is_in_elements():
    operands = dict(x=np.arange(6, dtype=np.float32), y=floats(3))
    run_launches(COPY, [launch(Operand("x", 4), Operand("y", 1), block=(2, 1, 1))], operands)
    assert np.array_equal(operands["y"], [np.nan, 4, 5], equal_nan=True)


@pytest.mark.parametrize("shift", [0, 4, 8, 12])
def test_copies_are_aligned_as_the_arrays_are(shift):
    text = 'extern "C" __global__ void kernel(const float* x, int* y) { y[0] = (unsigned long long)x % 16; }'
    memory = np.zeros(32, np.uint8)
    start = -memory.ctypes.data % 16 + shift
    assert run_text(text, x=memory[start : start + 4].view(np.float32), y=ints(1))[1] == shift


def test_scratch_is_nan_and_shared_by_the_launches_of_a_plan():
    operands = dict(x=np.arange(2, dtype=np.float32), y=floats(4))
    scratch = [Scratch("between", (4,), np.dtype(np.float32))]
    first = launch(Operand("x"), Operand("between"), block=(2, 1, 1))
    second = launch(Operand("between"), Operand("y"), block=(4, 1, 1))
    run_launches(COPY, [first, second], operands, scratch)
    assert np.array_equal(operands["y"], [0, 1, np.nan, np.nan], equal_nan=True)


def test_nothing_is_written_if_a_later_launch_fails():
    operands = dict(x=np.arange(4, dtype=np.float32), y=floats(4))
    good, bad = (launch(Operand("x"), Operand("y"), block=(threads, 1, 1)) for threads in (4, 5))
    with pytest.raises(cpu.KernelError, match="element 4 of x, which has 4"):
        run_launches(COPY, [good, bad], operands)
    assert np.isnan(operands["y"]).all() and np.array_equal(operands["x"], np.arange(4))
    run_launches(COPY, [good], operands)
    assert np.array_equal(operands["y"], np.arange(4))


def test_a_read_only_array_may_be_read_but_not_written():
    x, y = np.arange(4, dtype=np.float32), floats(4)
    x.flags.writeable = False
    run_text(COPY, block=4, x=x, y=y)
    assert np.array_equal(y, x)
    with pytest.raises(cpu.KernelError, match="wrote to x, which is read-only"):
        run_text(COPY, block=4, y=y + 1, x=x)


def test_one_array_under_two_names():
    x = np.arange(4, dtype=np.float32)
    text = """
    extern "C" __global__ void kernel(const float* a, const float* b, float* y) {
        y[threadIdx.x] = a[threadIdx.x] + b[threadIdx.x];
    }
    """
    assert np.array_equal(run_text(text, block=4, a=x, b=x, y=floats(4))[2], 2 * x)


def test_empty_arrays_have_no_element():
    with pytest.raises(cpu.KernelError, match="element 0 of x, which has 0"):
        run_text(COPY, checked=True, x=floats(0), y=floats(1))


def test_non_contiguous_arrays_are_refused():
    with pytest.raises(ValueError, match="operand x is not C-contiguous"):
        run_text(COPY, x=np.zeros((4, 4), np.float32).T, y=floats(1))


def test_plans_that_are_for_a_gpu_only():
    tensor_map = TensorMap("x", 0, (8, 8, 1), (8, 64), (8, 8, 1))
    with pytest.raises(
        ValueError, match=r"the CPU does not execute kernels .* tensor maps; expected the portable variant"
    ):
        run_launches(COPY, [launch(tensor_map, Operand("y"))], dict(x=floats(64), y=floats(1)))
    kernel = Kernel("test.cu", "kernel", arch="sm_90a")
    with pytest.raises(ValueError, match="sm_90a"):
        run_launches(
            COPY,
            [Launch(kernel, (1, 1, 1), (1, 1, 1), (Operand("x"), Operand("y")))],
            dict(x=floats(1), y=floats(1)),
        )


@pytest.mark.parametrize(
    "wrong",
    [
        dict(block=(1025, 1, 1)),
        dict(block=(0, 1, 1)),
        dict(grid=(1, 65536, 1)),
        dict(shared_bytes=163 * 1024 + 1),
    ],
)
def test_launches_that_no_device_takes(wrong):
    with pytest.raises(ValueError, match=r"kernel: .*, expected"):
        run_launches(COPY, [launch(Operand("x"), Operand("y"), **wrong)], dict(x=floats(1), y=floats(1)))


def test_a_name_that_the_text_does_not_define():
    with pytest.raises(ValueError, match="other: its CUDA C text defines no such kernel"):
        run_launches(COPY, [launch(entry="other")], {})


def test_the_results_are_the_same_bits_every_time():
    text = """
    extern "C" __global__ void kernel(const float* x, float* y) {
        atomicAdd(y, x[blockIdx.x * 64 + threadIdx.x]);
        __syncthreads();
        atomicAdd(y + 1, x[blockIdx.x * 64 + threadIdx.x] * 3);
    }
    """
    x = np.random.default_rng(0).standard_normal(640).astype(np.float32)
    first, second = (run_text(text, grid=10, block=64, x=x, y=np.zeros(2, np.float32))[1] for _ in range(2))
    assert first.tobytes() == second.tobytes()


def test_threads_take_turns():
    results = [floats(64) for _ in range(4)]
    threads = [
        threading.Thread(
            target=run_text, args=(COPY,), kwargs=dict(block=64, x=np.full(64, i, np.float32), y=y)
        )
        for i, y in enumerate(results)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [set(y) for y in results] == [{0}, {1}, {2}, {3}]


def test_the_setting_belongs_to_the_context():
    assert not cpu.active()
    seen = []
    with cpu.cpu_kernels():
        assert cpu.active()
        with cpu.cpu_kernels(checked=True):
            assert cpu.active()
        thread = threading.Thread(target=lambda: seen.append(cpu.active()))
        thread.start()
        thread.join()
    assert not cpu.active() and seen == [False]


def test_checked_follows_the_setting():
    race = 'extern "C" __global__ void kernel(float* y) { y[0] = threadIdx.x; }'
    operands = dict(y=floats(1))
    run_launches(race, [launch(Operand("y"), block=(32, 1, 1))], operands)
    assert operands["y"] == 31
    with cpu.cpu_kernels(checked=True), pytest.raises(cpu.KernelError, match="race"):
        run_launches(race, [launch(Operand("y"), block=(32, 1, 1))], operands)


@pytest.mark.parametrize(
    ("value", "expected"), [("1", "True"), ("checked", "True"), ("0", "False"), ("", "False")]
)
def test_the_environment_turns_it_on(value, expected, monkeypatch):
    monkeypatch.setenv("PSA_CUPY_CPU_KERNELS", value)
    program = "from psa_cupy.launching import cpu; print(cpu.active())"
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.strip()
        == expected
    )


def test_a_wrong_word_in_the_environment(monkeypatch):
    monkeypatch.setenv("PSA_CUPY_CPU_KERNELS", "yes")
    result = subprocess.run(
        [sys.executable, "-c", "import psa_cupy.launching.cpu"], capture_output=True, text=True, check=False
    )
    assert "PSA_CUPY_CPU_KERNELS is 'yes', expected 1, checked or 0" in result.stderr


def test_a_fork_waits_for_another_threads_launch():
    """Else the child inherits a lock that nobody in it will ever release."""
    program = """if True:
        import os, threading
        import numpy as np, psa_cupy

        qkv = np.ones((1, 16, 4, 4), np.float32)
        started, stop = threading.Event(), threading.Event()

        def launches():
            with psa_cupy.cpu_kernels(checked=True):
                while not stop.is_set():
                    psa_cupy.psa_forward(qkv, 1)
                    started.set()

        thread = threading.Thread(target=launches)
        thread.start()
        started.wait()
        for _ in range(5):
            if (child := os.fork()) == 0:
                with psa_cupy.cpu_kernels():
                    ok = np.isfinite(psa_cupy.psa_forward(qkv, 1).out).all()
                os._exit(0 if ok else 1)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        thread.join()
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120)
