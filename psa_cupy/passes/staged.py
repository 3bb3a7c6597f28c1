"""The fused pair built of the single passes, as the original design does it: same results within the bounds.

Forward: pack; attention to each half of V; merge. Backward: the inverse of merge on d_out (and on out, whose
halves the attention backward needs); the attention backward of each half, whose gradients of Q and K meet in
one buffer; the inverse of pack; the branch's gradient by the backward of extract_v.

Each direction is one plan: the passes' own plans one after another, their operands bound to the caller's
arrays and to scratch arrays between them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from psa_cupy import reference
from psa_cupy.geometry import PSAGeometry
from psa_cupy.launching.plan import MOST_PLANS, Device, Operand, Plan, Scratch
from psa_cupy.passes.checks import check_backward, check_forward, specification
from psa_cupy.passes.descriptor import PSAProblem
from psa_cupy.passes.extract_v import EXTRACT_V
from psa_cupy.passes.flash_attention import FLASH_ATTENTION, FlashProblem
from psa_cupy.passes.merge_attn import MERGE_ATTN
from psa_cupy.passes.pack_qkv import PACK_QKV
from psa_cupy.passes.psa import PSAForward


def psa_forward_staged(qkv, num_heads, *, key_dim=None, scale=None, out=None, lse=None) -> PSAForward:
    """`psa_forward` in four steps: pack_qkv, attention to either half of V, merge_attn.

    Parameters
    ----------
    qkv : array, (B, num_heads*4*key_dim, H, W)
        float16, bfloat16, float32 or float64; NumPy or CuPy. Per head: key_dim Q channels, key_dim K
        channels, 2*key_dim V channels. Any strides; what is not in C order is copied once.
    num_heads : int
        At least 1.
    key_dim : int, optional
        1 to 128; a quarter of a head's channels, and nothing else.
    scale : float, optional
        Softmax scale; `key_dim ** -0.5` by default. Any number up to 1e38 in size (float64 arrays: 1e307), 0
        and negative ones, too.
    out, lse : array, optional
        Arrays to write the results to: C-contiguous, of the results' shapes and dtypes, apart from each
        other and from qkv.

    Returns
    -------
    PSAForward
        out (B, num_heads*2*key_dim, H, W), dtype of qkv; lse (B, num_heads, N), the natural log-sum-exp of
        the scaled scores, float32 (float64 for float64).

    Raises
    ------
    TypeError
        If an argument is no array, NumPy and CuPy are mixed, or a dtype is not supported.
    ValueError
        If sizes do not fit together, value_dim is not 2*key_dim, or a target cannot be written to.

    Notes
    -----
    The way of the original design (Teenygrad's psa.rs): to compare with, and to read. psa_forward does the
    same in one kernel and several times faster. Needs scratch for qkv and out once more.

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> qkv = np.random.default_rng(0).standard_normal((1, 2 * 128, 5, 5), dtype=np.float32)
    >>> staged, fused = psa_cupy.psa_forward_staged(qkv, 2), psa_cupy.psa_forward(qkv, 2)
    >>> bool(np.allclose(staged.out, fused.out, atol=1e-6))
    True

    """
    where, problem = check_forward(
        "psa_forward_staged", qkv, num_heads, key_dim, scale, out, lse, halves=True
    )
    geometry, expected = problem.geometry, specification(problem.geometry, problem.dtype)
    out = where.empty(*expected["out"]) if out is None else out
    lse = where.empty(*expected["lse"]) if lse is None else lse
    if geometry.is_empty:
        return PSAForward(out, lse)
    if where.is_reference:
        _reference_forward(qkv, geometry, problem.scale, out, lse)
        return PSAForward(out, lse)
    qkv = where.contiguous(qkv)
    problem = replace(problem, aligned=where.aligned(qkv, out, lse))
    where.run(forward_plan(problem, where.device), {"qkv": qkv, "out": out, "lse": lse})
    return PSAForward(out, lse)


def psa_backward_staged(
    d_out, qkv, out, lse, num_heads, *, key_dim=None, scale=None, d_v_branch=None, d_qkv=None
):
    """The gradient of `psa_forward_staged` with respect to qkv, by the single passes' backwards.

    Parameters
    ----------
    d_out : array, (B, num_heads*2*key_dim, H, W)
        The gradient of the loss with respect to out; dtype of qkv.
    qkv : array, (B, num_heads*4*key_dim, H, W)
        The input of the forward.
    out, lse : array
        Its results.
    num_heads, key_dim, scale
        As in psa_forward_staged.
    d_v_branch : array, optional
        The gradient that reaches V by another branch (the block's positional encoding), shape and dtype
        of out. It is added to V's gradient after that has been rounded.
    d_qkv : array, optional
        A gradient to add to, atomically: C-contiguous, shape and dtype of qkv, apart from the inputs.

    Returns
    -------
    array
        d_qkv, shape and dtype of qkv: the given one, added to, or a new one.

    Raises
    ------
    TypeError
        If an argument is no array, NumPy and CuPy are mixed, or dtypes differ.
    ValueError
        If sizes do not fit together, value_dim is not 2*key_dim, or d_qkv cannot be written to.

    Notes
    -----
    The gradients of Q and K are the sum of two contributions, one for each half of V, each rounded to the
    dtype. The same call gives the same bits: within a launch each address gets at most one addition.

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> qkv = np.random.default_rng(0).standard_normal((1, 2 * 128, 5, 5), dtype=np.float32)
    >>> out, lse = psa_cupy.psa_forward_staged(qkv, num_heads=2)
    >>> psa_cupy.psa_backward_staged(np.ones_like(out), qkv, out, lse, num_heads=2).shape
    (1, 256, 5, 5)

    """
    inputs = {"d_out": d_out, "qkv": qkv, "out": out, "lse": lse, "d_v_branch": d_v_branch}
    where, problem, inputs = check_backward(
        "psa_backward_staged", inputs, num_heads, key_dim, scale, d_qkv, halves=True
    )
    geometry = problem.geometry
    if where.is_reference:
        return _reference_backward(d_out, qkv, out, lse, geometry, problem.scale, d_v_branch, d_qkv)
    d_qkv = d_qkv if problem.accumulate else where.empty(geometry.qkv_shape, problem.dtype)
    if geometry.is_empty:
        return d_qkv
    operands = {name: where.contiguous(array) for name, array in inputs.items()}
    operands["d_qkv"] = d_qkv
    problem = replace(problem, aligned=where.aligned(*operands.values()))
    where.run(backward_plan(problem, where.device), operands)
    return d_qkv


@functools.lru_cache(maxsize=MOST_PLANS)
def forward_plan(problem: PSAProblem, device: Device) -> Plan:
    """pack, attention lo, attention hi, merge; operands qkv, out, lse.

    Both attentions write lse, and the same bits: it depends on Q and K only.
    """
    geometry, dtype = problem.geometry, problem.dtype
    attention = FLASH_ATTENTION.plan("forward", _half_attention(problem), device)
    q, k, v_lo, v_hi = _sections("packed", geometry)
    return _in_turn(
        PACK_QKV.plan("forward", problem, device),
        _bound(attention, q=q, k=k, v=v_lo, o=Operand("o_lo")),
        _bound(attention, q=q, k=k, v=v_hi, o=Operand("o_hi")),
        MERGE_ATTN.plan("forward", problem, device),
        scratch=(Scratch("packed", geometry.packed_shape, dtype), *_halves(problem, "o_lo", "o_hi")),
    )


@functools.lru_cache(maxsize=MOST_PLANS)
def backward_plan(problem: PSAProblem, device: Device) -> Plan:
    """The forward's steps backwards; operands d_out, qkv, out, lse, d_qkv, and d_v_branch if there is one."""
    geometry, dtype = problem.geometry, problem.dtype
    storing = replace(problem, accumulate=False)
    split = MERGE_ATTN.plan("backward", storing, device)
    q, k, v_lo, v_hi = _sections("packed", geometry)
    d_q, d_k, d_v_lo, d_v_hi = _sections("d_packed", geometry)
    common = {"q": q, "k": k, "d_q": d_q, "d_k": d_k}
    halves = {"lo": (v_lo, d_v_lo, (False, False, False)), "hi": (v_hi, d_v_hi, (True, True, False))}
    attention = tuple(
        _bound(
            FLASH_ATTENTION.plan("backward", _half_attention(problem, accumulate), device),
            d_o=Operand(f"d_o_{half}"),
            o=Operand(f"o_{half}"),
            v=v,
            d_v=d_v,
            **common,
        )
        for half, (v, d_v, accumulate) in halves.items()
    )
    branch = replace(problem, accumulate=True)
    return _in_turn(
        PACK_QKV.plan("forward", storing, device),
        split,
        _bound(split, d_out=Operand("out"), d_o_lo=Operand("o_lo"), d_o_hi=Operand("o_hi")),
        *attention,
        PACK_QKV.plan("backward", problem, device),
        *(
            (_bound(EXTRACT_V.plan("backward", branch, device), d_v=Operand("d_v_branch")),)
            if problem.branch
            else ()
        ),
        scratch=(
            Scratch("packed", geometry.packed_shape, dtype),
            Scratch("d_packed", geometry.packed_shape, dtype),
            *_halves(problem, "o_lo", "o_hi", "d_o_lo", "d_o_hi"),
        ),
    )


def _half_attention(problem: PSAProblem, accumulate=(False, False, False)) -> FlashProblem:
    """Attention to one half of V, all operands packed."""
    geometry = problem.geometry
    section_bytes = geometry.bh * geometry.tokens * geometry.key_dim * problem.dtype.itemsize
    return FlashProblem(
        bh=geometry.bh,
        queries=geometry.tokens,
        keys=geometry.tokens,
        key_dim=geometry.key_dim,
        value_dim=geometry.key_dim,
        dtype=problem.dtype,
        scale=problem.scale,
        aligned=section_bytes % 16 == 0,  # scratch begins aligned
        accumulate=accumulate,
    )


def _sections(name: str, geometry: PSAGeometry) -> tuple[Operand, ...]:
    """The four sections of a packed array."""
    return tuple(Operand(name, i * geometry.bh * geometry.tokens * geometry.key_dim) for i in range(4))


def _halves(problem: PSAProblem, *names: str) -> tuple[Scratch, ...]:
    geometry = problem.geometry
    shape = (geometry.bh, geometry.tokens, geometry.key_dim)
    return tuple(Scratch(name, shape, problem.dtype) for name in names)


def _bound(plan: Plan, **operands: Operand) -> Plan:
    """The plan with the named operands replaced by others."""
    return replace(
        plan,
        launches=tuple(
            replace(launch, arguments=tuple(_rebound(a, operands) for a in launch.arguments))
            for launch in plan.launches
        ),
    )


def _rebound(argument: object, operands: Mapping[str, Operand]) -> object:
    """The argument, or what stands for its name, as many elements further in as it was."""
    if not isinstance(argument, Operand) or argument.name not in operands:
        return argument
    other = operands[argument.name]
    return Operand(other.name, other.offset + argument.offset)


def _in_turn(*plans: Plan, scratch: tuple[Scratch, ...]) -> Plan:
    """One plan of several: their launches in order; scratch of one name is one array, used in turn."""
    own = {s.name: s for plan in plans for s in plan.scratch}
    return Plan(tuple(launch for plan in plans for launch in plan.launches), (*scratch, *own.values()))


def _reference_forward(qkv, geometry: PSAGeometry, scale: float, out, lse) -> None:
    q, k, v_lo, v_hi = reference.pack_qkv(qkv, geometry.num_heads)
    o_lo, packed_lse = reference.flash_attention_forward(q, k, v_lo, scale=scale)
    o_hi, _ = reference.flash_attention_forward(q, k, v_hi, scale=scale)
    out[...] = reference.merge_attn(o_lo, o_hi, geometry.num_heads, geometry.height, geometry.width)
    lse[...] = packed_lse.reshape(geometry.lse_shape)


def _reference_backward(d_out, qkv, out, lse, geometry: PSAGeometry, scale: float, d_v_branch, d_qkv):
    num_heads = geometry.num_heads
    q, k, v_lo, v_hi = reference.pack_qkv(qkv, num_heads)
    d_packed = np.zeros(geometry.packed_shape, qkv.dtype)
    d_q, d_k, d_v_lo, d_v_hi = d_packed
    d_o_halves = reference.merge_attn_backward(d_out, num_heads)
    o_halves = reference.merge_attn_backward(out, num_heads)
    packed_lse = lse.reshape(geometry.bh, geometry.tokens)
    for d_o, v, o, d_v in zip(d_o_halves, (v_lo, v_hi), o_halves, (d_v_lo, d_v_hi), strict=True):
        reference.flash_attention_backward(
            d_o, q, k, v, o, packed_lse, scale=scale, d_q=d_q, d_k=d_k, d_v=d_v
        )
    d_qkv = reference.pack_qkv_backward(d_packed, num_heads, geometry.height, geometry.width, d_qkv=d_qkv)
    return d_qkv if d_v_branch is None else reference.extract_v_backward(d_v_branch, num_heads, d_qkv=d_qkv)
