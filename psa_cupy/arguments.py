"""Checks of what a caller passed, each with one form of message: function, argument, expectation, what came.

They run before anything is launched or written. Nothing here knows a pass; sizes belong to `geometry`.
"""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Mapping

import ml_dtypes
import numpy as np

DTYPES = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
"""The dtypes of every array argument. Told apart by identity: bfloat16's kind is 'V'."""

_ALIGNED = "elements at multiples of their size"


def cupy_if_imported():
    """CuPy's module if somebody imported it, else None: no CuPy array can exist before that.

    While another thread is importing it, it is there already, but has no arrays yet.
    """
    cupy = sys.modules.get("cupy")
    return cupy if hasattr(cupy, "ndarray") else None


def is_cupy(array: object) -> bool:
    """Whether `array` is a CuPy array, without importing CuPy."""
    cupy = cupy_if_imported()
    return cupy is not None and isinstance(array, cupy.ndarray)


def require_arrays(function: str, arrays: Mapping[str, object]) -> bool:
    """Check that all arrays (None: not given) are NumPy's or all CuPy's, on one device; True for CuPy.

    Raises
    ------
    TypeError
        If one is no array or has a mask, which no computation here would heed, or NumPy and CuPy are mixed.
    ValueError
        If they live on several devices, or CuPy cannot read one (NumPy copes with any address).

    """
    kinds = {}
    for name, array in arrays.items():
        if array is None:
            continue
        if isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray):
            kinds[name] = "NumPy"
        elif is_cupy(array):
            kinds[name] = "CuPy"
        else:
            raise TypeError(f"{function}: {name} is a {type(array).__name__}, expected a NumPy or CuPy array")
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{name} is {kind}" for name, kind in kinds.items())
        raise TypeError(f"{function}: arrays must be all NumPy or all CuPy, got a mix: {listed}")
    on_gpu = "CuPy" in kinds.values()
    if on_gpu:
        given = {name: arrays[name] for name in kinds}
        _require_one_device(function, given)
        _require_aligned(function, given)
    return on_gpu


def _require_one_device(function: str, arrays: Mapping[str, object]) -> None:
    devices = {name: array.device.id for name, array in arrays.items()}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{function}: arrays must be on one device, got {listed}")


def _require_aligned(function: str, arrays: Mapping[str, object]) -> None:
    """Check CuPy arrays' addresses: a kernel that misses an element's alignment ends the CUDA context."""
    for name, array in arrays.items():
        if array.data.ptr % array.dtype.itemsize:
            raise ValueError(f"{function}: {name} is not aligned, expected {_ALIGNED}")


def require_dtype(function: str, name: str, array, expected: np.dtype | None = None) -> np.dtype:
    """Check a required array's dtype: one of `DTYPES`, or exactly `expected`; returns it."""
    if array is None:
        raise TypeError(f"{function}: {name} is None, expected a NumPy or CuPy array")
    if expected is None and array.dtype not in DTYPES:
        names = ", ".join(dtype.name for dtype in DTYPES)
        raise TypeError(f"{function}: {name} has dtype {array.dtype}, expected one of {names}")
    if expected is not None and array.dtype != expected:
        raise TypeError(f"{function}: {name} has dtype {array.dtype}, expected {expected}")
    return array.dtype


def lse_dtype(dtype: np.dtype) -> np.dtype:
    """What lse and the sums behind it are held in: float32, float64 for float64."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def require_ndim(function: str, name: str, array, layout: tuple[str, ...]) -> tuple[int, ...]:
    """Check the number of dimensions against the names of the layout; returns the shape."""
    if array.ndim != len(layout):
        raise ValueError(
            f"{function}: {name} has shape {array.shape}, expected {len(layout)} dimensions "
            f"({', '.join(layout)})"
        )
    return array.shape


def require_shape(function: str, name: str, array, expected: tuple[int, ...]) -> None:
    """Check an array's shape."""
    if array.shape != expected:
        raise ValueError(f"{function}: {name} has shape {array.shape}, expected {expected}")


def require_target(function: str, name: str, target, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Check an array to write to: dtype, shape, C-contiguous, aligned, writable. None passes."""
    if target is None:
        return
    require_dtype(function, name, target, dtype)
    require_shape(function, name, target, shape)
    if not target.flags.c_contiguous:
        raise ValueError(f"{function}: {name} is not C-contiguous, expected a C-contiguous array to write to")
    if isinstance(target, np.ndarray) and not target.flags.aligned:
        raise ValueError(f"{function}: {name} is not aligned, expected {_ALIGNED}")
    if isinstance(target, np.ndarray) and not target.flags.writeable:
        raise ValueError(f"{function}: {name} is read-only, expected a writable array")


def require_disjoint(function: str, targets: Mapping[str, object], inputs: Mapping[str, object]) -> None:
    """Check that no target shares memory with an input or another target (None: not given)."""
    given = [(name, target) for name, target in targets.items() if target is not None]
    for index, (name, target) in enumerate(given):
        others = given[index + 1 :] + [(n, a) for n, a in inputs.items() if a is not None]
        for other_name, other in others:
            if share_memory(target, other):
                raise ValueError(
                    f"{function}: {name} overlaps {other_name}, expected memory of its own for each target"
                )


def share_memory(a, b) -> bool:
    """Whether two arrays of one kind have an address in common; CuPy's, whether their ranges of bytes do."""
    if a.size == 0 or b.size == 0:
        return False
    if isinstance(a, np.ndarray):
        return np.shares_memory(a, b)
    (a_low, a_high), (b_low, b_high) = _byte_bounds(a), _byte_bounds(b)
    return a_low < b_high and b_low < a_high


def _byte_bounds(array) -> tuple[int, int]:
    if array.flags.c_contiguous:  # nearly always; cupy.byte_bounds takes several microseconds
        return array.data.ptr, array.data.ptr + array.nbytes
    return cupy_if_imported().byte_bounds(array)


def require_integer(function: str, name: str, value: object, low: int, high: int | None = None) -> int:
    """Check an integer (not a bool) against its limits; returns it as a Python int."""
    limits = f">= {low}" if high is None else f"from {low} to {high}"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{function}: {name} is a {type(value).__name__}, expected an integer {limits}")
    if number < low or (high is not None and number > high):
        raise ValueError(f"{function}: {name} is {number}, expected an integer {limits}")
    return number


def softmax_scale(function: str, scale: object, key_dim: int, dtype: np.dtype) -> float:
    """The softmax scale as a float: `key_dim ** -0.5` for None; any number up to a limit, 0 and negative too.

    The limit leaves the accumulator's range room for the scale times log2 e.
    """
    if scale is None:
        return key_dim**-0.5
    if isinstance(scale, (bool, np.bool_)) or not isinstance(scale, numbers.Real):
        raise TypeError(f"{function}: scale is a {type(scale).__name__}, expected a real number or None")
    try:
        value = float(scale)
    except OverflowError:  # an int past float64
        value = math.inf if scale > 0 else -math.inf
    if not math.isfinite(value):
        raise ValueError(f"{function}: scale is {value}, expected a finite number or None")
    largest = 1e307 if dtype == np.float64 else 1e38
    if abs(value) > largest:
        raise ValueError(
            f"{function}: scale is {value}, expected at most {largest} in size for {dtype} arrays"
        )
    return value
