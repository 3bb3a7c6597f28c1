"""Versions, device, compiler and cache: what to put into a bug report."""

from __future__ import annotations

import os
import platform

from rich.console import Console
from rich.table import Table
from rich.text import Text

import psa_cupy
from psa_cupy.cli.machine import find_machine, installed_versions
from psa_cupy.launching import cpu
from psa_cupy.launching.source import kernels_folder

_PACKAGES = (
    "numpy",
    "ml_dtypes",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "cupy",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "torch",
)


def add_arguments(parser) -> None:
    """Add the command's options: none."""


def run(arguments) -> int:
    """Print the table; always returns 0."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")  # a path must come whole
    for name, value in (*_software(), *_device(), *_cpu_execution()):
        table.add_row(name, Text(value))  # not markup: ".[cuda13x]" has brackets
    Console().print(table)
    return 0


def _software():
    yield "psa_cupy", psa_cupy.__version__
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    yield from installed_versions(_PACKAGES).items()
    yield "kernels_cu", str(kernels_folder())


def _device():
    machine = find_machine()
    yield "runs on", machine.name
    if machine.hint:
        yield "hint", machine.hint
    if machine.on_gpu:
        from psa_cupy.launching import gpu

        device = gpu.device(0)
        yield "compute capability", "{}.{}".format(*device.capability)
        yield "multiprocessors", str(device.multiprocessors)
        yield "shared memory per block", f"{device.shared_bytes // 1024} KiB"
        yield "TMA descriptors", "yes" if device.tensor_maps else "no"
        yield "driver", str(machine.xp.cuda.runtime.driverGetVersion())
        cache = os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache"))
        yield "GPU kernel cache", cache


def _cpu_execution():
    yield "C++ compiler", cpu.compiler() or "none found: kernels cannot be run on the CPU; install g++"
    try:
        yield "CPU kernel cache", str(cpu.cache_folder())
    except RuntimeError as error:  # no home: a bug report needs the rest all the more
        yield "CPU kernel cache", str(error)
