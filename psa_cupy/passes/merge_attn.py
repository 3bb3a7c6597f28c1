"""The two halves of packed attention's result to one NCHW array, and back."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from psa_cupy import reference
from psa_cupy.arguments import require_disjoint, require_dtype, require_integer, require_shape, require_target
from psa_cupy.geometry import PSAGeometry
from psa_cupy.launching import place
from psa_cupy.launching.plan import MOST_PLANS, Device, Operand, Plan
from psa_cupy.passes.descriptor import Pass, PSAProblem, Variant, always
from psa_cupy.passes.layout import geometry_of_heads, transpose_launch

_FILE = "merge_attn.cu"
_HALVES = 2


class MergeAttnBackward(NamedTuple):
    """The results of `merge_attn_backward`."""

    d_o_lo: object
    d_o_hi: object


def merge_attn(o_lo, o_hi, num_heads, height, width):
    """Attention's result for the two halves of V as one NCHW feature map.

    A copy: every bit pattern survives.

    Parameters
    ----------
    o_lo : array, (B*num_heads, N, key_dim)
        What attention made of the first key_dim V channels of each head. float16, bfloat16, float32 or
        float64; NumPy or CuPy; key_dim is 1 to 128. Any strides; what is not in C order is copied once.
    o_hi : array, (B*num_heads, N, key_dim)
        What it made of the last key_dim ones; dtype of o_lo.
    num_heads : int
        At least 1.
    height, width : int
        H and W; N = H*W.

    Returns
    -------
    array, (B, num_heads*2*key_dim, H, W)
        Per head the channels of o_lo, then those of o_hi; dtype of o_lo.

    Raises
    ------
    TypeError
        If an argument is no array, NumPy and CuPy are mixed, dtypes differ or are not supported, or a size
        is no integer.
    ValueError
        If sizes do not fit together or exceed the limits.

    Notes
    -----
    The original design's psa_merge_attn_nchw.

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> o_lo = np.array([[[1], [2]]], np.float32)   # one head of key_dim 1, two tokens
    >>> psa_cupy.merge_attn(o_lo, 10 * o_lo, num_heads=1, height=1, width=2)[0]
    array([[[ 1.,  2.]],
    <BLANKLINE>
           [[10., 20.]]], dtype=float32)

    """
    name = "merge_attn"
    where = place(name, o_lo=o_lo, o_hi=o_hi)
    dtype = require_dtype(name, "o_lo", o_lo)
    require_dtype(name, "o_hi", o_hi, dtype)
    geometry = geometry_of_heads(
        *(name, "o_lo", o_lo),
        num_heads=num_heads,
        height=height,
        width=width,
        layout=("B*num_heads", "N", "key_dim"),
    )
    require_shape(name, "o_hi", o_hi, o_lo.shape)
    if where.is_reference:
        return reference.merge_attn(o_lo, o_hi, num_heads, height, width)

    out = where.empty(geometry.out_shape, dtype)
    if geometry.is_empty:
        return out
    operands = {"o_lo": where.contiguous(o_lo), "o_hi": where.contiguous(o_hi), "out": out}
    problem = PSAProblem(geometry, dtype, aligned=where.aligned(*operands.values()))
    where.run(MERGE_ATTN.plan("forward", problem, where.device), operands)
    return out


def merge_attn_backward(d_out, num_heads, *, d_o_lo=None, d_o_hi=None) -> MergeAttnBackward:
    """The gradients of `merge_attn` with respect to o_lo and o_hi: the inverse permutation.

    Parameters
    ----------
    d_out : array, (B, num_heads*2*key_dim, H, W)
        The gradient of the loss with respect to the merged array.
    num_heads : int
        At least 1.
    d_o_lo, d_o_hi : array, optional
        Gradients to add to, atomically, each element rounded once: C-contiguous, (B*num_heads, N, key_dim),
        of d_out's dtype, apart from each other and from d_out.

    Returns
    -------
    MergeAttnBackward
        d_o_lo and d_o_hi, (B*num_heads, N, key_dim): for each, the given one, added to, or a new one.

    Raises
    ------
    TypeError
        If an argument is no array, NumPy and CuPy are mixed, dtypes differ or are not supported, or
        num_heads is no integer.
    ValueError
        If sizes do not fit together or exceed the limits, or a target cannot be written to.

    Notes
    -----
    With a target, addresses are added to atomically, one addition each: the same call gives the same bits.

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> d_out = np.arange(4, dtype=np.float32).reshape(1, 2, 1, 2)   # one head of key_dim 1, two tokens
    >>> d_o_lo, d_o_hi = psa_cupy.merge_attn_backward(d_out, num_heads=1)
    >>> d_o_hi
    array([[[2.],
            [3.]]], dtype=float32)

    """
    name = "merge_attn_backward"
    targets = {"d_o_lo": d_o_lo, "d_o_hi": d_o_hi}
    where = place(name, d_out=d_out, **targets)
    dtype = require_dtype(name, "d_out", d_out)
    geometry = PSAGeometry.from_out(name, "d_out", d_out.shape, num_heads)
    half_shape = (geometry.bh, geometry.tokens, geometry.key_dim)
    for target_name, target in targets.items():
        require_target(name, target_name, target, half_shape, dtype)
    require_disjoint(name, targets, {"d_out": d_out})
    if where.is_reference:
        return MergeAttnBackward(*reference.merge_attn_backward(d_out, num_heads, **targets))

    accumulate = tuple(target is not None for target in targets.values())
    results = MergeAttnBackward(
        *(where.empty(half_shape, dtype) if t is None else t for t in targets.values())
    )
    if geometry.is_empty:
        return results
    d_out = where.contiguous(d_out)
    problem = PSAProblem(geometry, dtype, aligned=where.aligned(d_out, *results))
    where.run(
        _backward_plan_adding(problem, where.device, *accumulate), {"d_out": d_out, **results._asdict()}
    )
    return results


def _forward_plan(problem: PSAProblem, device: Device) -> Plan:
    return _plan(problem, device, "merge_attn", ("o_lo", "o_hi", "out"), to_lo=False, to_hi=False)


def _backward_plan(problem: PSAProblem, device: Device) -> Plan:
    return _backward_plan_adding(problem, device, problem.accumulate, problem.accumulate)


@functools.lru_cache(maxsize=MOST_PLANS)
def _backward_plan_adding(problem: PSAProblem, device: Device, to_lo: bool, to_hi: bool) -> Plan:
    """The backward's plan for targets of which one may be given and the other not."""
    return _plan(problem, device, "merge_attn_backward", ("d_out", "d_o_lo", "d_o_hi"), to_lo, to_hi)


def _plan(
    problem: PSAProblem, device: Device, entry: str, operands: tuple[str, ...], to_lo: bool, to_hi: bool
) -> Plan:
    geometry = problem.geometry
    launch = transpose_launch(
        *(problem, device, _FILE, entry),
        matrices=_HALVES * geometry.bh,
        arguments=(*map(Operand, operands), np.int64(geometry.tokens)),
        accumulate_constants={"ACCUMULATE_LO": to_lo, "ACCUMULATE_HI": to_hi},
        adds_along="channels" if to_lo or to_hi else None,
    )
    return Plan((launch,))


def _infer_shape(o_lo_shape, o_hi_shape, num_heads, height, width):
    """The shape of the merged array; its batch is None while B*num_heads is not yet known (None)."""
    bh, tokens, key_dim = o_lo_shape
    if tuple(o_hi_shape) != tuple(o_lo_shape):
        raise ValueError(f"merge_attn: o_hi has shape {o_hi_shape}, expected {o_lo_shape}")
    if tokens != height * width:
        raise ValueError(f"merge_attn: o_lo has {tokens} tokens, expected height*width = {height * width}")
    num_heads = require_integer("merge_attn", "num_heads", num_heads, 1)
    return None if bh is None else bh // num_heads, num_heads * _HALVES * key_dim, height, width


MERGE_ATTN = Pass(
    name="psa_merge_attn_nchw",
    function=merge_attn,
    backward=merge_attn_backward,
    infer_shape=_infer_shape,
    variants={
        "forward": (Variant("plain", always, _forward_plan),),
        "backward": (Variant("plain", always, _backward_plan),),
    },
)
