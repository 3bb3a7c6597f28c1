"""Who computes in a test, so that one test body serves all: executors place arrays, run calls, fetch results.

Arrays are placed between guard bands, and every array that the library allocates is filled with NaN and
guarded too: an element that a kernel does not write, writes outside or reads from outside shows.
"""

from __future__ import annotations

import collections
import contextlib
from unittest import mock

import numpy as np
import pytest

from psa_cupy import launching
from psa_cupy.launching import cpu

_GUARD_BYTES = 4096
_ALIGNMENT = 256
_POISON = 0xFF
"""Every floating-point type reads these bytes as NaN; it stands in guards and in fresh arrays."""


def why_no_gpu() -> str | None:
    """Why GPU tests cannot run here; None if they can."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"
    return None if count else "no CUDA device"


def executors(*names: str):
    """Run the test, which takes the fixture `executor`, on these only."""
    params = [pytest.param(EXECUTORS[n], id=n, marks=EXECUTORS[n].marks) for n in names]
    return pytest.mark.parametrize("executor", params, indirect=True)


class Executor:
    """The reference: NumPy arrays, NumPy arithmetic."""

    name = "reference"
    marks: tuple = ()

    def __init__(self):
        self._guarded = collections.deque(maxlen=200)  # Hypothesis runs many examples on one executor

    def why_not(self) -> str | None:
        """Why it cannot run here; None if it can."""
        return None

    @property
    def xp(self):
        """The array module."""
        return np

    def array(self, array: np.ndarray, *, offset: int = 0):
        """A copy in this executor's memory, C-contiguous, between guard bands.

        Parameters
        ----------
        array : numpy.ndarray
            What to copy.
        offset : int
            Elements that the base address lies behind a multiple of 256 bytes.

        """
        placed = self.empty(array.shape, array.dtype, offset=offset)
        placed[...] = self._upload(array)
        return placed

    def empty(self, shape, dtype, *, offset: int = 0):
        """A new array full of NaN, between guard bands."""
        dtype = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        shift = offset * dtype.itemsize
        memory = self.xp.full(2 * _GUARD_BYTES + _ALIGNMENT + shift + size, _POISON, np.uint8)
        start = _GUARD_BYTES + shift - (self._address(memory) + _GUARD_BYTES) % _ALIGNMENT + _ALIGNMENT
        self._guarded.append((memory, start, start + size, f"{dtype.name} array of shape {tuple(shape)}"))
        return memory[start : start + size].view(dtype).reshape(shape)

    def to_numpy(self, array) -> np.ndarray:
        """The array as NumPy's."""
        return np.asarray(array)

    def run(self, function, *arguments, **keywords):
        """Call the function here, every array it allocates poisoned and guarded; check the guards."""
        with self.context():
            result = function(*arguments, **keywords)
        self.check_guards()
        return result

    @contextlib.contextmanager
    def context(self):
        """Inside, the library computes here."""
        with self._poisoned_allocation(), self._computing():
            yield

    def check_guards(self) -> None:
        """Fail if anything was written outside an array."""
        for memory, start, end, what in self._guarded:
            for side, guard in (("before", memory[:start]), ("behind", memory[end:])):
                wrong = self.xp.flatnonzero(guard != _POISON)
                if wrong.size:
                    first = int(wrong[0]) - (start if side == "before" else 0)
                    pytest.fail(f"{what}: {wrong.size} bytes written {side} it, the first at byte {first}")

    def _computing(self):
        return contextlib.nullcontext()

    def _poisoned_allocation(self):
        return mock.patch.object(launching.OnCpu, "empty", lambda _, shape, dtype: self.empty(shape, dtype))

    def _upload(self, array: np.ndarray):
        return array

    def _address(self, array) -> int:
        return array.ctypes.data


class CpuKernels(Executor):
    """The CUDA C kernels, executed on the CPU."""

    name = "cpu"
    checked = False

    def why_not(self):
        return None if cpu.compiler() else "no C++ compiler: the kernels cannot run on the CPU"

    def _computing(self):
        return cpu.cpu_kernels(checked=self.checked)


class CheckedCpuKernels(CpuKernels):
    """The same, with every access watched: keep sizes small."""

    name = "checked"
    checked = True


class Gpu(Executor):
    """CuPy arrays on the current device."""

    name = "gpu"
    marks = (pytest.mark.gpu,)

    def why_not(self):
        return why_no_gpu()

    @property
    def xp(self):
        import cupy

        return cupy

    def to_numpy(self, array):
        return self.xp.asnumpy(array)

    def _poisoned_allocation(self):
        return mock.patch.object(launching.OnGpu, "empty", lambda _, shape, dtype: self.empty(shape, dtype))

    def _upload(self, array):
        return self.xp.asarray(array)

    def _address(self, array):
        return array.data.ptr


EXECUTORS = {e.name: e for e in (Executor, CpuKernels, CheckedCpuKernels, Gpu)}
