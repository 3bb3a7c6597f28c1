"""Compiling a kernel for an architecture without a GPU, and reading what ptxas says of it."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import re
from dataclasses import dataclass

from psa_cupy.launching.plan import Device, Kernel
from psa_cupy.launching.source import render

# multiprocessors and shared memory of a typical GPU of each compute capability
DEVICES = {
    "sm_75": Device((7, 5), 40, 64 * 1024, False),
    "sm_80": Device((8, 0), 108, 163 * 1024, False),
    "sm_86": Device((8, 6), 84, 99 * 1024, False),
    "sm_89": Device((8, 9), 128, 99 * 1024, False),
    "sm_90": Device((9, 0), 132, 227 * 1024, True),
    "sm_100": Device((10, 0), 148, 227 * 1024, False),
    "sm_120": Device((12, 0), 170, 99 * 1024, False),
}

is_available = importlib.util.find_spec("cupy") is not None


@dataclass(frozen=True)
class Report:
    """What ptxas said of one entry."""

    registers: int
    spilled_bytes: int
    log: str


@functools.cache
def include_options() -> tuple[str, ...]:
    """-I for CUDA's own headers, as the package nvidia-cuda-runtime (or the toolkit) installs them."""
    import nvidia

    folders = [pathlib.Path(root) for root in nvidia.__path__]
    found = [f / "cu13" / "include" for f in folders] + [f / "cuda_runtime" / "include" for f in folders]
    return tuple(f"-I{folder}" for folder in found if folder.is_dir())


def compile_for(kernel: Kernel, arch: str) -> Report:
    """Compile with the options CuPy uses; fails with the compiler's messages."""
    from cupy.cuda import nvrtc

    options = (
        f"-arch={kernel.arch or arch}",
        "-std=c++17",
        "-ftz=true",
        "--ptxas-options=-v",
        *include_options(),
    )
    program = nvrtc.createProgram(render(kernel), kernel.file, (), ())
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError as error:
        raise AssertionError(f"{kernel} for {arch}: {nvrtc.getProgramLog(program)}") from error
    log = nvrtc.getProgramLog(program)
    spilled = sum(
        int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", _of_entry(log, kernel.entry))
    )
    registers = re.search(r"Used (\d+) registers", _of_entry(log, kernel.entry))
    assert registers, log
    return Report(int(registers[1]), spilled, log)


def _of_entry(log: str, entry: str) -> str:
    """The part of the log about one entry."""
    parts = re.split(r"(?=Compiling entry function)", log)
    return next(part for part in parts if f"'{entry}'" in part)
