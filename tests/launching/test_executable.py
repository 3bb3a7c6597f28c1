"""What an executable launches, what it keeps alive, and until when: shown without a GPU, by stand-ins."""

import ctypes
import itertools
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from psa_cupy.launching.plan import Kernel, Launch, Operand, Plan, Scratch, TensorMap

pytest.importorskip("cupy", reason="no CuPy: install the extra nvrtc")

from psa_cupy.launching import gpu, tensor_map


class Array:
    """Enough of a CuPy array: an address."""

    def __init__(self, shape, dtype):
        self.data = types.SimpleNamespace(ptr=id(self))


@pytest.fixture
def stream(monkeypatch):
    """The current stream, which captures if told to; what is retained stays within the test."""
    stream = types.SimpleNamespace(ptr=0, capturing=False)
    stream.is_capturing = lambda: stream.capturing
    cuda = types.SimpleNamespace(get_current_stream=lambda: stream)
    monkeypatch.setattr(gpu, "cupy", types.SimpleNamespace(empty=Array, cuda=cuda))
    monkeypatch.setattr(gpu, "_retained", [])
    return stream


@pytest.fixture
def executable(monkeypatch):
    """Two launches and two scratch arrays; `alive` notes at each launch whether the arrays still are."""
    arrays = []

    def empty(shape, dtype):
        array = Array(shape, dtype)
        arrays.append(weakref.ref(array))
        return array

    scratch = tuple(Scratch(name, (4,), np.dtype(np.float32)) for name in ("rows", "delta"))
    executable = gpu.Executable(Plan((), scratch), 0)
    executable.alive, executable.arrays, executable.empty = [], arrays, empty

    def launch(addresses, stream):
        assert set(addresses) == {"qkv", "rows", "delta"}
        executable.alive.append([array() is not None for array in arrays])

    executable._in_thread.launches = [launch, launch]
    return executable


def test_scratch_lives_until_the_last_launch(stream, executable, monkeypatch):
    """Else another thread's launch into the same stream could be given the memory between two of ours."""
    monkeypatch.setattr(gpu.cupy, "empty", executable.empty)
    executable({"qkv": 1})
    assert executable.alive == [[True, True], [True, True]]
    assert [array() for array in executable.arrays] == [None, None]
    assert gpu._retained == []


def test_scratch_of_a_capture_lives_on(stream, executable, monkeypatch):
    monkeypatch.setattr(gpu.cupy, "empty", executable.empty)
    stream.capturing = True
    executable({"qkv": 1})
    assert [array() for array in executable.arrays] == gpu._retained
    assert len(gpu._retained) == 2


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("is_contiguous", [False, True])
def test_a_copy_made_in_a_capture_lives_on(stream, capturing, is_contiguous):
    """A replay copies into that memory again; the caller's own array is the caller's to keep."""
    from psa_cupy.launching import OnGpu

    where = object.__new__(OnGpu)
    array, copy = Array((), None), Array((), None)
    where._gpu, where._handle = gpu, _Nothing()
    where._cupy = types.SimpleNamespace(ascontiguousarray=lambda a: a if is_contiguous else copy)
    stream.capturing = capturing
    result = where.contiguous(array)
    assert result is (array if is_contiguous else copy)
    assert gpu._retained == ([copy] if capturing and not is_contiguous else [])


@pytest.fixture
def driver(monkeypatch):
    """A driver of which `launched` holds, for each launch, its configuration, stream and arguments' bytes."""
    driver = types.SimpleNamespace(launched=[], on_launch=lambda: None)

    def launch_kernel(function, *configuration_stream_parameters_extra):
        *configuration, stream, parameters, extra = configuration_stream_parameters_extra
        driver.on_launch()
        pointers = (ctypes.c_void_p * len(ARGUMENTS)).from_address(parameters)
        arguments = [ctypes.string_at(*pair) for pair in zip(pointers, ARGUMENT_BYTES, strict=True)]
        driver.launched.append((function, configuration, stream, arguments, extra))

    driver.launchKernel = launch_kernel
    monkeypatch.setattr(gpu, "driver", driver)
    monkeypatch.setattr(gpu, "load", lambda kernel, shared_bytes, device_id: types.SimpleNamespace(ptr=77))
    monkeypatch.setattr(
        tensor_map, "encode", lambda argument, address, dtype: address.to_bytes(128, "little")
    )
    return driver


VIEW = TensorMap("qkv", 0, (64, 1, 1), (64, 64), (64, 1, 1))
ARGUMENTS = (VIEW, Operand("out"), np.int32(-5), Operand("out", 3), Operand("lse"))
ARGUMENT_BYTES = (128, 8, 4, 8, 8)


def one_launch():
    kernel = Kernel("file.cu", "entry", (("T", np.dtype(np.float16)),))
    return gpu.Executable(Plan((Launch(kernel, (4, 1, 1), (32, 2, 1), ARGUMENTS, shared_bytes=9),)), 0)


def arguments_at(qkv, out, lse):
    numbers = (qkv, out, np.int32(-5), out + 3 * 2, lse)
    return [
        int(n).to_bytes(size, "little", signed=True) for n, size in zip(numbers, ARGUMENT_BYTES, strict=True)
    ]


def test_a_launch_gets_its_geometry_stream_and_arguments(stream, driver):
    executable, stream.ptr = one_launch(), 5
    for qkv, out, lse in ((1 << 10, 1 << 12, 1 << 14), (1 << 11, 1 << 12, 1 << 40)):
        executable({"qkv": qkv, "out": out, "lse": lse})
        launched = (77, [4, 1, 1, 32, 2, 1, 9], 5, arguments_at(qkv, out, lse), 0)
        assert driver.launched.pop() == launched


def test_more_blocks_than_a_gpu_takes_are_refused(driver):
    kernel = Kernel("file.cu", "entry", (("T", np.dtype(np.float16)),))
    gpu.Executable(Plan((Launch(kernel, (2**31 - 1, 1, 1), (32, 1, 1), ()),)), 0)
    with pytest.raises(ValueError, match=r"entry: the arrays need 2147483648 blocks, .* split the batch"):
        gpu.Executable(Plan((Launch(kernel, (2**31, 1, 1), (32, 1, 1), ()),)), 0)


def test_threads_do_not_share_argument_buffers(stream, driver):
    """All have written theirs before the driver reads any."""
    executable, threads = one_launch(), 3
    driver.on_launch = threading.Barrier(threads, timeout=30).wait
    operands = [{"qkv": 1 << n, "out": 2 << n, "lse": 3 << n} for n in range(10, 10 + threads)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(executable, operands))
    arguments = [launched[3] for launched in driver.launched]
    assert sorted(arguments) == sorted(arguments_at(**each) for each in operands)


@pytest.fixture
def one_function_for_a_text(monkeypatch):
    """CuPy as it is: all RawKernels of one text have one function, whose allowance any of them may set."""
    allowances = {}

    class RawKernel:
        def __init__(self, text, entry, options):
            self._text = text
            allowances.setdefault(text, 48 * 1024)

        @property
        def kernel(self):
            return types.SimpleNamespace(allowance=lambda: allowances[self._text])

        @property
        def max_dynamic_shared_size_bytes(self):
            return allowances[self._text]

        @max_dynamic_shared_size_bytes.setter
        def max_dynamic_shared_size_bytes(self, value):
            allowances[self._text] = value

    monkeypatch.setattr(gpu, "cupy", types.SimpleNamespace(RawKernel=RawKernel))
    monkeypatch.setattr(gpu, "render", lambda kernel: kernel.entry)
    gpu.load.cache_clear()
    yield
    gpu.load.cache_clear()


@pytest.mark.parametrize("order", list(itertools.permutations((0, 60_000, 90_000))))
def test_a_plan_does_not_lower_what_another_is_allowed(one_function_for_a_text, order):
    kernel = Kernel("file.cu", "entry", (("T", np.dtype(np.float16)),))
    for shared_bytes in (*order, *order):
        gpu.load(kernel, shared_bytes, 0)
    for shared_bytes in order:
        assert gpu.load(kernel, shared_bytes, 0).allowance() == 90_000


@pytest.mark.parametrize(
    ("major", "minor", "supported"), [(6, 1, False), (7, 0, False), (7, 5, True), (12, 0, True)]
)
def test_a_gpu_that_is_too_old_is_refused(monkeypatch, major, minor, supported):
    properties = {"major": major, "minor": minor, "multiProcessorCount": 10, "sharedMemPerBlockOptin": 65536}
    runtime = types.SimpleNamespace(getDeviceProperties=lambda device_id: properties)
    monkeypatch.setattr(gpu, "cupy", types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime)))
    gpu.device.cache_clear()
    if supported:
        assert gpu.device(3).capability == (major, minor)
    else:
        with pytest.raises(
            ValueError, match=f"GPU 3 has compute capability {major}.{minor}, expected at least 7.5"
        ):
            gpu.device(3)
    gpu.device.cache_clear()


class _Nothing:
    """A device that is current already."""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass
