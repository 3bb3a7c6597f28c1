"""What a GPU can do at most, and the time that allows attention to take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from psa_cupy.cli.machine import Machine
from psa_cupy.geometry import PSAGeometry

_EXPONENTIALS_PER_CLOCK = 16
"""Of the special-function units, per multiprocessor."""
_CLOCK_RATE = 13
"""cudaDevAttrClockRate: the peak clock in kHz."""


@dataclass(frozen=True)
class Rates:
    """Ceilings of one device."""

    bytes_per_second: float
    """Measured: of a large device-to-device copy, read and written bytes both counted."""
    flop_per_second: float
    """Measured: of a large matrix product, in float16 for 16-bit types; float32: a third of half of that, as
    three TF32 products."""
    exponentials_per_second: float
    """Computed: what the special-function units do at the peak clock."""


def measure(machine: Machine, dtype: np.dtype) -> Rates:
    """The rates of a machine's GPU for attention in `dtype`."""
    return Rates(_copy_rate(machine), _flop_rate(machine, dtype), _exponential_rate(machine.xp))


def limit_seconds(rates: Rates, geometry: PSAGeometry, dtype: np.dtype, work: str) -> float:
    """The least time for "forward" or "backward": the largest of bytes, FLOP and exponentials."""
    tokens, bh = geometry.tokens, geometry.bh
    key_dim, value_dim = geometry.key_dim, geometry.value_dim
    if work == "forward":
        rows = geometry.head_channels + value_dim
        flop_per_score = 2 * (key_dim + value_dim)
    else:
        rows = 2 * geometry.head_channels + 2 * value_dim
        flop_per_score = 2 * (3 * key_dim + 2 * value_dim)
    scores = bh * tokens * tokens
    return max(
        bh * rows * tokens * dtype.itemsize / rates.bytes_per_second,
        scores * flop_per_score / rates.flop_per_second,
        scores / rates.exponentials_per_second,
    )


def _copy_rate(machine):
    source = machine.xp.ones(1 << 28, np.float32)
    target = machine.xp.empty_like(source)
    return 2 * source.nbytes / machine.median_seconds(lambda: machine.xp.copyto(target, source))


def _flop_rate(machine, dtype):
    cp = machine.xp
    size = 8192 if dtype != np.float64 else 4096
    matrix_dtype = cp.float64 if dtype == np.float64 else cp.float16
    a = cp.random.standard_normal((size, size), dtype=cp.float32).astype(matrix_dtype)
    rate = 2 * size**3 / machine.median_seconds(lambda: a @ a)
    return rate / 6 if dtype == np.float32 else rate


def _exponential_rate(cp):
    device = cp.cuda.runtime.getDevice()
    multiprocessors = cp.cuda.runtime.getDeviceProperties(device)["multiProcessorCount"]
    kilohertz = cp.cuda.runtime.deviceGetAttribute(_CLOCK_RATE, device)
    return multiprocessors * _EXPONENTIALS_PER_CLOCK * kilohertz * 1e3
