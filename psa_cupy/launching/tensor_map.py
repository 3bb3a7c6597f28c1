"""TMA descriptors (CUtensorMap) for the Hopper kernels, made by the CUDA driver.

The driver is called through ctypes and not through cuda-bindings: the struct must lie on a multiple of 64
bytes, which a struct inside a Python object (cuda.bindings.driver.CUtensorMap) does not.
"""

from __future__ import annotations

import ctypes
import functools
import sys

import ml_dtypes
import numpy as np

from psa_cupy.launching.plan import TensorMap

BYTES = 128
"""The size of a CUtensorMap."""

_DATA_TYPES = {np.dtype(np.float16): 6, np.dtype(ml_dtypes.bfloat16): 9}
_INTERLEAVE_NONE, _SWIZZLE_128B, _L2_PROMOTION_256B, _OUTSIDE_IS_ZERO = 0, 3, 3, 0


def available() -> bool:
    """Whether this machine has a CUDA driver that makes tensor maps (CUDA 12 and later)."""
    return _driver_function() is not None


def encode(tensor_map: TensorMap, base_address: int, dtype: np.dtype) -> bytes:
    """The 128 bytes of a CUtensorMap.

    A pure function of its arguments, so that a caller may keep what it gave: memory that is freed and handed
    out again at the same address has the same map.

    Parameters
    ----------
    tensor_map : TensorMap
        The view: offset, dims, strides and box in elements.
    base_address : int
        Where the named array begins on the device; with the offset, a multiple of 16 bytes.
    dtype : dtype
        float16 or bfloat16.

    Raises
    ------
    TypeError
        If the dtype is another one.
    ValueError
        If the address, a stride or the box is not what TMA can do.
    RuntimeError
        If there is no driver, or it refuses.

    """
    if dtype not in _DATA_TYPES:
        raise TypeError(f"tensor_map: dtype is {dtype}, expected float16 or bfloat16")
    address = base_address + tensor_map.offset * dtype.itemsize
    strides = tuple(stride * dtype.itemsize for stride in tensor_map.strides)
    _require_possible(tensor_map, address, strides, dtype.itemsize)
    function = _driver_function()
    if function is None:
        raise RuntimeError("tensor_map: no CUDA driver with cuTensorMapEncodeTiled on this machine")
    memory = ctypes.create_string_buffer(2 * BYTES)
    result_address = -(-ctypes.addressof(memory) // BYTES) * BYTES
    rank = len(tensor_map.dims)
    status = function(
        ctypes.c_void_p(result_address),
        _DATA_TYPES[dtype],
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*tensor_map.dims),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*tensor_map.box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        _INTERLEAVE_NONE,
        _SWIZZLE_128B,
        _L2_PROMOTION_256B,
        _OUTSIDE_IS_ZERO,
    )
    if status != 0:
        raise RuntimeError(f"tensor_map: the driver refuses {tensor_map} at {address:#x}: CUresult {status}")
    return ctypes.string_at(result_address, BYTES)


def _require_possible(tensor_map: TensorMap, address: int, strides: tuple[int, ...], itemsize: int) -> None:
    if address % 16:
        raise ValueError(f"tensor_map: {tensor_map.name} is at {address:#x}, expected a multiple of 16 bytes")
    for stride in strides:
        if stride % 16 or not 0 < stride < 2**40:
            raise ValueError(
                f"tensor_map: {tensor_map.name} has a stride of {stride} bytes, "
                "expected a positive multiple of 16 below 2**40"
            )
    if tensor_map.box[0] * itemsize != 128 or not all(1 <= size <= 256 for size in tensor_map.box):
        raise ValueError(
            f"tensor_map: {tensor_map.name} has the box {tensor_map.box}, "
            "expected rows of 128 bytes (the swizzle's width) and 1 to 256 in each dimension"
        )
    if not all(1 <= size <= 2**32 for size in tensor_map.dims):
        raise ValueError(
            f"tensor_map: {tensor_map.name} has dims {tensor_map.dims}, expected 1 to 2**32 in each"
        )


@functools.cache
def _driver_function():
    """cuTensorMapEncodeTiled, or None."""
    try:
        driver = ctypes.WinDLL("nvcuda.dll") if sys.platform == "win32" else ctypes.CDLL("libcuda.so.1")
        return driver.cuTensorMapEncodeTiled
    except (OSError, AttributeError):
        return None
