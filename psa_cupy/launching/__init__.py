"""From a pass's arrays to the place that computes: the reference, the CPU-executed kernels or a GPU.

`place` looks at what the caller passed and answers with an object that allocates and runs there, so that
a pass is written once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np

from psa_cupy.arguments import require_arrays
from psa_cupy.launching import cpu
from psa_cupy.launching.plan import Device, Plan


class OnCpu:
    """NumPy arrays: computed by reference.py, or by the CUDA C text inside `cpu_kernels()`."""

    empty = staticmethod(np.empty)
    device = cpu.DEVICE

    def __init__(self, is_reference: bool):
        self.is_reference = is_reference

    def contiguous(self, array: np.ndarray) -> np.ndarray:
        """The array in C order, its elements aligned: itself, or one copy."""
        return np.require(array, requirements="CAE")

    def aligned(self, *arrays: np.ndarray | None) -> bool:
        """Whether every base address is a multiple of 16 bytes, as wide copies need."""
        return all(a is None or a.ctypes.data % 16 == 0 for a in arrays)

    def run(self, plan: Plan, operands: dict[str, np.ndarray]) -> None:
        """Run a plan's kernels on the CPU."""
        cpu.run(plan, operands)

    def precompile(self, plans: Iterable[Plan]) -> None:
        """Compile the kernels of many plans at once, so that first calls find them."""
        cpu.precompile(launch.kernel for plan in plans for launch in plan.launches)


class OnGpu:
    """CuPy arrays on one device: computed there, on CuPy's current stream."""

    is_reference = False

    def __init__(self, device_id: int):
        import cupy

        from psa_cupy.launching import gpu

        self._cupy, self._gpu = cupy, gpu
        self._handle = cupy.cuda.Device(device_id)
        self.device: Device = gpu.device(device_id)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype):
        """An uninitialised array on the device."""
        with self._handle:
            return self._cupy.empty(shape, dtype)

    def contiguous(self, array):
        """The array in C order: itself, or one copy, which a captured graph may need again."""
        with self._handle:
            contiguous = self._cupy.ascontiguousarray(array)
            if contiguous.data.ptr != array.data.ptr:
                self._gpu.retain_if_capturing(contiguous)
            return contiguous

    def aligned(self, *arrays) -> bool:
        """Whether every base address is a multiple of 16 bytes, as wide copies need."""
        return all(a is None or a.data.ptr % 16 == 0 for a in arrays)

    def run(self, plan: Plan, operands: dict) -> None:
        """Launch a plan on the device, on its current stream."""
        with self._handle:
            self._gpu.run(plan, operands)

    def precompile(self, plans: Iterable[Plan]) -> None:
        """Compile the kernels of many plans at once, so that first calls find them."""
        self._gpu.precompile(plans, self._handle.id)

    def bound(self, plan: Plan):
        """The plan's executable: launches when called with the operands' addresses, on this device only."""
        with self._handle:
            return self._gpu.bind(plan, self._handle.id)


_REFERENCE, _CPU_KERNELS = OnCpu(is_reference=True), OnCpu(is_reference=False)
_on_gpu = functools.cache(OnGpu)


def place(function: str, **arrays) -> OnCpu | OnGpu:
    """Where the arrays of a call live and who computes.

    Parameters
    ----------
    function : str
        The public function's name, for messages.
    **arrays
        Every array argument by name; None where not given.

    Raises
    ------
    TypeError
        If an argument is no array, or NumPy and CuPy are mixed.
    ValueError
        If CuPy arrays live on several devices.

    """
    if require_arrays(function, arrays):
        return _on_gpu(next(a for a in arrays.values() if a is not None).device.id)
    return _CPU_KERNELS if cpu.active() else _REFERENCE
