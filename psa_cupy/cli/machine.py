"""The machine a command runs on: which array library, what to say of it, how to time there."""

from __future__ import annotations

import importlib.metadata
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

_FLUSH_BYTES = 256 << 20
"""More than any GPU's L2: written between timed calls, so that each starts from device memory."""

_BUDGET_SECONDS = 0.2
"""How long a function is timed, roughly."""


@dataclass(frozen=True)
class Machine:
    """Where arrays live: `xp` is numpy or cupy."""

    xp: object
    on_gpu: bool
    name: str
    hint: str
    """What the user could install for more, or an empty string."""

    def array(self, array: np.ndarray):
        """A NumPy array on this machine's device."""
        return self.xp.asarray(array)

    def median_seconds(self, function: Callable[[], object]) -> float:
        """The median time of a call, after warming up; on a GPU between events, with the L2 flushed."""
        function()
        return self._gpu_median(function) if self.on_gpu else _cpu_median(function)

    def host_seconds(self, function: Callable[[], object]) -> float:
        """What a call costs the host, which does not wait for the GPU: the median of many short rounds."""
        times, calls = [], 20
        for _ in range(60):
            self.xp.cuda.Device().synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            times.append((time.perf_counter() - start) / calls)
        return statistics.median(times)

    def _gpu_median(self, function):
        cp = self.xp
        flush = cp.empty(_FLUSH_BYTES, cp.int8)
        function()
        first = self._timed(function, flush)
        repeats = int(min(200, max(10, _BUDGET_SECONDS / max(first, 1e-5))))
        pairs = [(cp.cuda.Event(), cp.cuda.Event()) for _ in range(repeats)]
        for start, end in pairs:
            flush.fill(0)
            start.record()
            function()
            end.record()
        cp.cuda.Device().synchronize()
        return statistics.median(cp.cuda.get_elapsed_time(start, end) for start, end in pairs) / 1e3

    def _timed(self, function, flush):
        start, end = self.xp.cuda.Event(), self.xp.cuda.Event()
        flush.fill(0)
        start.record()
        function()
        end.record()
        end.synchronize()
        return self.xp.cuda.get_elapsed_time(start, end) / 1e3


def _cpu_median(function):
    times = []
    while not times or (sum(times) < _BUDGET_SECONDS and len(times) < 20):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def find_machine() -> Machine:
    """The GPU if CuPy and a GPU are there, otherwise the CPU, with a hint why."""
    if find_spec("cupy") is None:
        return _cpu(_hint_without_cupy())
    try:
        import cupy
    except ImportError as error:  # a CUDA library of another release, or none
        return _cpu(f"CuPy is installed, but cannot be imported ({first_line(error)}).")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return _cpu(f"CuPy is installed, but finds no usable GPU ({first_line(error)}).")
    if count == 0:
        return _cpu("CuPy is installed, but finds no GPU.")
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    return Machine(cupy, True, name, hint="")


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _cpu(hint: str) -> Machine:
    return Machine(np, False, "CPU (NumPy)", hint)


def _hint_without_cupy() -> str:
    if _has_nvidia_driver():
        return 'An NVIDIA driver is installed, but CuPy is not: for the GPU, pip install ".[cuda13x]"'
    return 'No GPU found. On a machine with an NVIDIA GPU: pip install ".[cuda13x]"'


def _has_nvidia_driver() -> bool:
    import ctypes.util

    return ctypes.util.find_library("cuda") is not None
