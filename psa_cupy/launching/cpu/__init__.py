"""The CUDA C kernels on the CPU: the same text that a GPU gets, compiled by the machine's C++ compiler.

Every CUDA thread becomes a fiber; barriers, shuffles, atomics, ldmatrix, mma.sync and cp.async are emulated
(include/, runtime/). wgmma, TMA and mbarriers are not: such kernels have a portable variant.

`compile` makes a library of a text, `launch` runs plans with it, `faults` says what went wrong in them.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from psa_cupy.launching import source
from psa_cupy.launching.cpu import compile as _compile, launch as _launch
from psa_cupy.launching.cpu.compile import cache_folder, compiler
from psa_cupy.launching.cpu.faults import KernelError
from psa_cupy.launching.cpu.launch import DEVICE
from psa_cupy.launching.plan import Kernel, Plan

__all__ = ["DEVICE", "KernelError", "active", "cache_folder", "compiler", "cpu_kernels", "precompile", "run"]

_MODES = {"": None, "0": None, "1": "plain", "checked": "checked"}


def _mode_of_environment() -> str | None:
    value = os.environ.get("PSA_CUPY_CPU_KERNELS", "")
    if value not in _MODES:
        raise ValueError(f"psa_cupy: PSA_CUPY_CPU_KERNELS is {value!r}, expected 1, checked or 0")
    return _MODES[value]


_DEFAULT = _mode_of_environment()
_mode: contextvars.ContextVar[str | None] = contextvars.ContextVar("cpu_kernels", default=_DEFAULT)


@contextlib.contextmanager
def cpu_kernels(checked: bool = False) -> Iterator[None]:
    """Send NumPy arrays through the CUDA C kernels, executed on the CPU, instead of the NumPy reference.

    Needs a C++ compiler; each kernel is compiled once and kept in a cache folder (`PSA_CUPY_CACHE_DIR`, or
    `psa_cupy` in the user's cache folder). The environment variable `PSA_CUPY_CPU_KERNELS` set to ``1`` or
    ``checked`` does the same for a whole process. The setting belongs to the current context (a thread, a
    task).

    Parameters
    ----------
    checked : bool
        Also watch every access of the kernels to memory: races, bounds, uninitialised shared memory, missing
        waits for asynchronous copies, alignment. Up to twenty times slower, forty for tiny calls.

    Raises
    ------
    RuntimeError
        At the first launch, if there is no C++ compiler.
    KernelError
        By a call inside the block, if a kernel does what CUDA forbids: a RuntimeError that names the array,
        the threads and the source line.

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> qkv = np.zeros((1, 128, 2, 3), np.float32)
    >>> with psa_cupy.cpu_kernels():                   # doctest: +SKIP
    ...     psa_cupy.psa_forward(qkv, 1).out.shape
    (1, 64, 2, 3)

    """
    token = _mode.set("checked" if checked else "plain")
    try:
        yield
    finally:
        _mode.reset(token)


def active() -> bool:
    """Whether NumPy arrays go through the kernels here and now."""
    return _mode.get() is not None


def run(
    plan: Plan,
    operands: dict[str, np.ndarray],
    *,
    checked: bool | None = None,
    render: Callable[[Kernel], str] = source.render,
) -> None:
    """`launch.run`, checked if `cpu_kernels` says so and the caller does not say otherwise."""
    if checked is None:
        checked = _mode.get() == "checked"
    _launch.run(plan, operands, checked=checked, render=render)


def precompile(kernels: Iterable[Kernel], checked: bool = False) -> None:
    """Fills the cache: compiles many kernels, one on every processor at a time."""
    _compile.compile_all([source.render(kernel) for kernel in kernels], checked)
