"""From a Kernel to its CUDA C text: one string, so that a compiler cache keyed by text is never stale."""

from __future__ import annotations

import functools
import pathlib
import re

import ml_dtypes
import numpy as np

from psa_cupy.launching.plan import Kernel

C_TYPES = {
    np.dtype(np.float16): "__half",
    np.dtype(ml_dtypes.bfloat16): "__nv_bfloat16",
    np.dtype(np.float32): "float",
    np.dtype(np.float64): "double",
}
"""The dtypes kernels are made for. bfloat16 is told by identity: its dtype.kind is 'V'."""

_HEADERS = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
_INCLUDE = re.compile(r'^[ \t]*#include "([^"]+)"[^\n]*\n', re.MULTILINE)


@functools.cache
def kernels_folder() -> pathlib.Path:
    """Where the .cu files are: in the package (wheel) or beside it (checkout, editable install).

    Raises
    ------
    FileNotFoundError
        If neither place has them.

    """
    package = pathlib.Path(__file__).resolve().parents[1]
    for folder in (package / "kernels_cu", package.parent / "kernels_cu"):
        if (folder / "common.cuh").is_file():
            return folder
    raise FileNotFoundError(f"psa_cupy: no kernels_cu in {package} or beside it: reinstall the package")


@functools.cache
def render(kernel: Kernel) -> str:
    """The CUDA C text of a kernel: headers, its constants, and its file with every include inlined.

    `#line` directives keep the names and lines of the .cu and .cuh files in compiler messages.
    """
    constants = "".join(_constant(name, value) for name, value in kernel.constants)
    return _HEADERS + constants + _inline(kernel.file, seen=set())


def _constant(name: str, value: object) -> str:
    if isinstance(value, np.dtype):
        return f"using {name} = {C_TYPES[value]};\n"
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};\n"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};\n"
    raise TypeError(f"render: constant {name} is a {type(value).__name__}, expected a dtype, bool or int")


@functools.cache
def _read(file: str) -> str:
    return (kernels_folder() / file).read_text()


def _inline(file: str, seen: set[str]) -> str:
    """The text of `file` with each `#include "x"` replaced by x's text, or by nothing if x came before."""
    seen.add(file)
    text = _read(file)
    parts, position = [f'#line 1 "{file}"\n'], 0
    for match in _INCLUDE.finditer(text):
        parts.append(text[position : match.start()])
        next_line = text.count("\n", 0, match.end()) + 1
        if match[1] not in seen:
            parts.append(_inline(match[1], seen))
        parts.append(f'#line {next_line} "{file}"\n')
        position = match.end()
    return "".join(parts) + text[position:]
