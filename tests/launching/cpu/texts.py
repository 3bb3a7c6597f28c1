"""Runs a test's own CUDA C text by the door that the library's kernels go through."""

import numpy as np
import pytest

from psa_cupy.launching import cpu
from psa_cupy.launching.plan import Kernel, Launch, Operand, Plan

needs_compiler = pytest.mark.skipif(
    cpu.compiler() is None, reason="no C++ compiler: the CPU execution cannot be tested"
)

HEADERS = '#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n#line 1 "test.cu"\n'


def run_text(
    text, *scalars, grid=1, block=1, shared_bytes=0, checked=False, scratch=(), entry="kernel", **arrays
):
    """Launch `entry` of the text on the arrays, in their order, and then the scalars; returns the arrays."""
    three = lambda size: tuple(size) + (1,) * (3 - len(size)) if isinstance(size, tuple) else (size, 1, 1)  # noqa: E731
    names = [*arrays, *(array.name for array in scratch)]
    arguments = (*(Operand(name) for name in names), *scalars)
    launch = Launch(Kernel("test.cu", entry), three(grid), three(block), arguments, shared_bytes)
    cpu.run(Plan((launch,), scratch), arrays, checked=checked, render=lambda kernel: HEADERS + text)
    return tuple(arrays.values()) if len(arrays) > 1 else next(iter(arrays.values()))


def ints(*shape):
    return np.zeros(shape, np.int32)


def floats(*shape):
    return np.full(shape, np.nan, np.float32)
