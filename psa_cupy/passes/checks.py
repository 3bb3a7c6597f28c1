"""The checks of the fused pair's arguments, by its own name or staged: before anything is written."""

from __future__ import annotations

import numpy as np

from psa_cupy.arguments import (
    lse_dtype,
    require_disjoint,
    require_dtype,
    require_shape,
    require_target,
    softmax_scale,
)
from psa_cupy.geometry import PSAGeometry
from psa_cupy.launching import OnCpu, OnGpu, place
from psa_cupy.passes.descriptor import PSAProblem


def specification(geometry: PSAGeometry, dtype: np.dtype) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of each array of the pair's signatures, by name."""
    qkv, out = (geometry.qkv_shape, dtype), (geometry.out_shape, dtype)
    lse = (geometry.lse_shape, lse_dtype(dtype))
    return {"qkv": qkv, "out": out, "lse": lse, "d_out": out, "d_v_branch": out, "d_qkv": qkv}


def check_forward(
    function: str, qkv, num_heads, key_dim, scale, out, lse, *, halves: bool = False
) -> tuple[OnCpu | OnGpu, PSAProblem]:
    """Check a forward's arguments: where they live, and the problem, whose alignment is yet to be looked at.

    With `halves`, value_dim has to be 2*key_dim.
    """
    where = place(function, qkv=qkv, out=out, lse=lse)
    problem = _problem(function, qkv, num_heads, key_dim, scale, halves)
    expected = specification(problem.geometry, problem.dtype)
    require_target(function, "out", out, *expected["out"])
    require_target(function, "lse", lse, *expected["lse"])
    require_disjoint(function, {"out": out, "lse": lse}, {"qkv": qkv})
    return where, problem


def check_backward(
    function: str,
    inputs: dict[str, object],
    num_heads,
    key_dim,
    scale,
    d_qkv,
    *,
    halves: bool = False,
) -> tuple[OnCpu | OnGpu, PSAProblem, dict[str, object]]:
    """Check a backward's arguments: as `check_forward`, and the inputs that were given."""
    where = place(function, **inputs, d_qkv=d_qkv)
    branch, accumulate = inputs["d_v_branch"] is not None, d_qkv is not None
    problem = _problem(function, inputs["qkv"], num_heads, key_dim, scale, halves, accumulate, branch)
    expected = specification(problem.geometry, problem.dtype)
    given = {name: array for name, array in inputs.items() if branch or name != "d_v_branch"}
    for name, array in given.items():
        shape, dtype = expected[name]
        require_dtype(function, name, array, dtype)
        require_shape(function, name, array, shape)
    require_target(function, "d_qkv", d_qkv, *expected["d_qkv"])
    require_disjoint(function, {"d_qkv": d_qkv}, given)
    return where, problem, given


def _problem(
    function: str, qkv, num_heads, key_dim, scale, halves: bool, accumulate=False, branch=False
) -> PSAProblem:
    dtype = require_dtype(function, "qkv", qkv)
    geometry = PSAGeometry.from_qkv(function, qkv.shape, num_heads, key_dim)
    if halves:
        geometry.require_halves(function)
    scale = softmax_scale(function, scale, geometry.key_dim, dtype)
    return PSAProblem(geometry, dtype, scale, accumulate=accumulate, branch=branch)
