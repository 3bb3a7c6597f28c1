"""What the tests of the portable forward's two kernels share: problems, the call, and the bounds."""

from __future__ import annotations

import numpy as np

from psa_cupy import testing
from psa_cupy.arguments import lse_dtype
from psa_cupy.passes.psa import forward_with
from tests.strategies import IMAGES, Problem


def problem_of(tokens, dims, dtype, *, heads=2, **more) -> Problem:
    image = IMAGES.get(tokens, (1, tokens))
    return Problem(1, heads, *dims, *image, np.dtype(dtype), **more)


def forward(executor, problem, *, qkv=None, scale=None, offset=0):
    """`out` and `lse` by the portable kernel into poisoned, guarded arrays, in NumPy."""
    g = problem.geometry
    qkv = executor.array(problem.qkv() if qkv is None else qkv, offset=offset)
    out = executor.empty(g.out_shape, problem.dtype, offset=offset)
    lse = executor.empty(g.lse_shape, lse_dtype(problem.dtype), offset=offset)
    executor.run(
        *(forward_with, "portable", qkv, problem.num_heads),
        key_dim=problem.key_dim,
        scale=scale,
        out=out,
        lse=lse,
    )
    return executor.to_numpy(out), executor.to_numpy(lse)


def assert_within_bounds(problem, results, qkv=None, scale=None):
    qkv = problem.qkv() if qkv is None else qkv
    ratios = testing.psa_forward_ratios(
        qkv, *results, problem.num_heads, key_dim=problem.key_dim, scale=scale
    )
    assert max(ratios.values()) <= 1, ratios
