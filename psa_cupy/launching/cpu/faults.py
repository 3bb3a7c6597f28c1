"""What went wrong in a kernel, told with the file and line of its source."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess


class KernelError(RuntimeError):
    """A kernel did what CUDA forbids. The message names the array, the threads and the source line."""


_ADDRESS = re.compile(r"\{([0-9a-f]+)\}")
_FRAME = re.compile(r"([^/\s]+):(\d+)(?: \(discriminator \d+\))?$")


def with_source_lines(report: str, library: pathlib.Path) -> str:
    """The report with each "{code address}" in it as "psa_forward.cu:123"."""
    return _ADDRESS.sub(lambda match: _source_line(library, match[1]), report)


def _source_line(library: pathlib.Path, address: str) -> str:
    """The innermost line of a .cu file, and of the .cuh function that it called, if it was inside one."""
    frames = [frame for frame in _inlined_frames(library, address) if frame[0].endswith((".cu", ".cuh"))]
    places = [f"{file}:{line}" for file, line in frames]
    if not places:
        return f"code address 0x{address} (addr2line of binutils would name the line)"
    in_kernel = next((i for i, (file, _) in enumerate(frames) if file.endswith(".cu")), 0)
    return places[0] if in_kernel == 0 else f"{places[in_kernel]} (in {places[0]})"


def _inlined_frames(library: pathlib.Path, address: str) -> list[tuple[str, str]]:
    """File and line of an instruction, and of the calls that were inlined around it, innermost first."""
    tool = shutil.which("addr2line")
    if tool is None:
        return []
    command = [tool, "-i", "-e", str(library), f"0x{address}"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return [match.groups() for line in lines if (match := _FRAME.search(line))]
