"""What an executable keeps alive, and until when: shown without a GPU, by stand-ins."""

import types
import weakref

import numpy as np
import pytest

from psa_cupy.launching.plan import Plan, Scratch

pytest.importorskip("cupy", reason="no CuPy: install the extra nvrtc")

from psa_cupy.launching import gpu


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

    executable._launches = [launch, launch]
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


class _Nothing:
    """A device that is current already."""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass
