"""A small selection of calls that covers every kernel variant: what compute-sanitizer is run over.

    compute-sanitizer --tool racecheck python -m tests.sanitized_calls [dtype ...]

All dtypes unless some are named: racecheck is slow, and one process for each dtype takes the time of one.
Needs a GPU. Each result is also compared with its bound, so that a sanitizer that changes the timing also
shows what a race would do.
"""

from __future__ import annotations

import itertools
import sys

import cupy as cp
import numpy as np

import psa_cupy
from psa_cupy import testing
from psa_cupy.arguments import DTYPES
from psa_cupy.cli.shapes import random_array
from psa_cupy.geometry import PSAGeometry
from psa_cupy.launching import gpu
from psa_cupy.passes.descriptor import PSAProblem
from psa_cupy.passes.psa import PSA, backward_with, forward_with

GEOMETRIES = (
    PSAGeometry(1, 2, 32, 64, 9, 8),  # 72 tokens: two tiles of 64, rows aligned to 16 bytes
    PSAGeometry(1, 1, 36, 72, 5, 13),  # 65 tokens: padded channels, odd rows
    PSAGeometry(1, 1, 32, 64, 20, 25),  # 500 tokens: streamed
)
"""Of 64 tokens and more, so that tiles have neighbours and tails."""


def main(names: list[str]) -> None:
    """Run every call of the dtypes named, of all by default; raises if a result is outside its bound."""
    dtypes = [dtype for dtype in DTYPES if not names or dtype.name in names]
    calls = 0
    for geometry, dtype in itertools.product(GEOMETRIES, dtypes):
        calls += attention(geometry, dtype) + single_passes(geometry, dtype)
        cp.cuda.Device().synchronize()
        print(f"{dtype}, {geometry}: {calls} calls so far, all within their bounds", flush=True)


def attention(geometry: PSAGeometry, dtype: np.dtype) -> int:
    """Every variant of the fused pair, the backward with and without targets."""
    heads, key_dim = geometry.num_heads, geometry.key_dim
    qkv = cp.asarray(random_array(geometry.qkv_shape, dtype, seed=0))
    d_out = cp.asarray(random_array(geometry.out_shape, dtype, seed=1))
    device = gpu.device(cp.cuda.runtime.getDevice())
    problem = PSAProblem(geometry, dtype, key_dim**-0.5)
    names = {
        direction: [v.name for v in PSA.variants[direction] if v.supports(problem, device)]
        for direction in ("forward", "backward")
    }
    for name in names["forward"]:
        out, lse = forward_with(name, qkv, heads, key_dim=key_dim)
        require(testing.psa_forward_ratios(qkv, out, lse, heads, key_dim=key_dim), name, geometry, dtype)
    for name in names["backward"]:
        arguments = (d_out, qkv, out, lse, heads)
        d_qkv = backward_with(name, *arguments, key_dim=key_dim)
        require(testing.psa_backward_ratios(d_out, qkv, d_qkv, heads, key_dim=key_dim), name, geometry, dtype)
        target = cp.zeros_like(qkv)
        backward_with(name, *arguments, key_dim=key_dim, d_v_branch=d_out, d_qkv=target)
        ratios = testing.psa_backward_ratios(d_out, qkv, target, heads, key_dim=key_dim, d_v_branch=d_out)
        require(ratios, name, geometry, dtype)
    return len(names["forward"]) + 2 * len(names["backward"])


def single_passes(geometry: PSAGeometry, dtype: np.dtype) -> int:
    """The layout passes and their backwards, new arrays and targets, and the staged pair built of them."""
    heads, height, width = geometry.num_heads, geometry.height, geometry.width
    qkv = cp.asarray(random_array(geometry.qkv_shape, dtype, seed=2))
    packed = psa_cupy.pack_qkv(qkv, heads)
    v = psa_cupy.extract_v(qkv, heads)
    merged = psa_cupy.merge_attn(packed[2], packed[3], heads, height, width)
    back = psa_cupy.pack_qkv_backward(packed, heads, height, width)
    if not (merged == v).all() or not (back == qkv).all():
        raise AssertionError(f"layout passes: {geometry} {dtype}: not the inverse permutation")
    target = cp.zeros_like(qkv)
    psa_cupy.pack_qkv_backward(packed, heads, height, width, d_qkv=target)
    psa_cupy.extract_v_backward(v, heads, d_qkv=target)
    halves = psa_cupy.merge_attn_backward(v, heads)
    psa_cupy.merge_attn_backward(v, heads, d_o_lo=halves.d_o_lo, d_o_hi=halves.d_o_hi)
    psa_cupy.extract_v_backward(v, heads)
    out, lse = psa_cupy.psa_forward_staged(qkv, heads)
    psa_cupy.psa_backward_staged(v, qkv, out, lse, heads, d_qkv=target)
    return 11


def require(ratios: dict[str, float], name: str, geometry: PSAGeometry, dtype: np.dtype) -> None:
    """Raise if a result is outside its bound."""
    if not max(ratios.values()) <= 1:
        raise AssertionError(f"{name}: {geometry} {dtype}: {ratios}")


if __name__ == "__main__":
    main(sys.argv[1:])
