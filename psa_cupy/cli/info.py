"""Versions, device, compiler and cache: what to put into a bug report."""

from __future__ import annotations

import os
import platform

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
    """Print a line for each; always returns 0."""
    lines = (*_software(), *_device(), *_cpu_execution())
    width = max(len(name) for name, _ in lines)
    for name, value in lines:  # plain text, unbroken: a path must come whole, and ".[cuda13x]" has brackets
        print(f"{name:{width}}  {value}")
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
    yield "C++ compiler", _answer(cpu.compiler) or "none found: kernels cannot be run on the CPU; install g++"
    yield "CPU kernel cache", str(_answer(cpu.cache_folder))


def _answer(question):
    """What it answers, or its error: a bug report needs the rest all the more."""
    try:
        return question()
    except (RuntimeError, ValueError) as error:
        return str(error)
