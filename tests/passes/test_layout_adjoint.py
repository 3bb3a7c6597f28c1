"""<pass(x), y> = <x, backward(y)> for the layout passes, exactly: small integers make every sum exact."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from psa_cupy.passes.extract_v import extract_v, extract_v_backward
from psa_cupy.passes.merge_attn import merge_attn, merge_attn_backward
from psa_cupy.passes.pack_qkv import pack_qkv, pack_qkv_backward
from tests.executors import executors
from tests.passes.layout_cases import few, layout_problems


def inner(a, b) -> float:
    return float(np.vdot(a.astype(np.float64), b.astype(np.float64)))


@executors("reference", "cpu", "gpu")
@few
@given(layout_problems())
def test_adjoint(executor, problem):
    geometry = problem.geometry
    heads, sides = geometry.num_heads, (geometry.height, geometry.width)

    def run(function, *arguments):
        placed = [executor.array(a) if isinstance(a, np.ndarray) else a for a in arguments]
        result = executor.run(function, *placed)
        return (
            [executor.to_numpy(r) for r in result] if isinstance(result, tuple) else executor.to_numpy(result)
        )

    qkv, packed = problem.integers(geometry.qkv_shape, 0), problem.integers(geometry.packed_shape, 1)
    v, (lo, hi) = problem.integers(geometry.out_shape, 2), packed[:2]
    d_lo, d_hi = run(merge_attn_backward, v, heads)

    assert inner(run(pack_qkv, qkv, heads), packed) == inner(
        qkv, run(pack_qkv_backward, packed, heads, *sides)
    )
    assert inner(run(extract_v, qkv, heads), v) == inner(qkv, run(extract_v_backward, v, heads))
    assert inner(run(merge_attn, lo, hi, heads, *sides), v) == inner(lo, d_lo) + inner(hi, d_hi)
