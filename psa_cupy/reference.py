"""The mathematics of every pass and its backward in NumPy: the textbook, and what NumPy arrays get.

Functions have the names and keyword arguments of the public API and take arguments that have been checked.
Attention is computed in float64, one tile of scores at a time, and each result is rounded once, to its
dtype. A target given is added to by one in-place add, in the target's dtype, of the rounded gradient.

Inside, an attention operand is *tokens first*, (BH, tokens, channels): for NCHW arrays, a transposed view.
"""

from __future__ import annotations

import numpy as np

from psa_cupy.arguments import lse_dtype
from psa_cupy.views import heads_of, split_qkv, tiles, tokens_first

_TILE_SCORES = 1 << 17
"""Scores computed at a time: 1 MiB of float64, which the caches hold."""


# ---- layout passes: copies, and the inverse permutations


def pack_qkv(qkv, num_heads):
    """Sections Q, K, V_lo, V_hi of (B, num_heads*4*key_dim, H, W) as (4, BH, N, key_dim)."""
    return _copy(_sections(qkv, num_heads))


def pack_qkv_backward(d_packed, num_heads, height, width, *, d_qkv=None):
    """Sections' gradients (4, BH, N, key_dim) to that of qkv."""
    _, bh, _, key_dim = d_packed.shape
    target = d_qkv
    if d_qkv is None:
        shape = (bh // num_heads, num_heads * 4 * key_dim, height, width)
        d_qkv = np.empty(shape, d_packed.dtype)
    _store(_sections(d_qkv, num_heads), d_packed, add=target is not None)
    return d_qkv


def extract_v(qkv, num_heads):
    """The V channels of qkv, as (B, num_heads*2*key_dim, H, W)."""
    batch, channels, height, width = qkv.shape
    v = heads_of(qkv, num_heads)[:, channels // num_heads // 2 :]
    return _copy(v).reshape(batch, channels // 2, height, width)


def extract_v_backward(d_v, num_heads, *, d_qkv=None):
    """The V channels' gradient to that of qkv, whose other channels get nothing."""
    batch, channels, height, width = d_v.shape
    target = d_qkv
    if d_qkv is None:
        d_qkv = np.zeros((batch, 2 * channels, height, width), d_v.dtype)
    v_channels = heads_of(d_qkv, num_heads)[:, channels // num_heads :]
    _store(v_channels, heads_of(d_v, num_heads), add=target is not None)
    return d_qkv


def merge_attn(o_lo, o_hi, num_heads, height, width):
    """Two halves (BH, N, key_dim) of attention's result, as one (B, num_heads*2*key_dim, H, W)."""
    bh, _, key_dim = o_lo.shape
    out = np.empty((bh // num_heads, num_heads * 2 * key_dim, height, width), o_lo.dtype)
    for target, half in zip(_halves(out, num_heads), (o_lo, o_hi), strict=True):
        target[...] = half
    return out


def merge_attn_backward(d_out, num_heads, *, d_o_lo=None, d_o_hi=None):
    """The gradient of the NCHW result to those of its two halves."""
    lo, hi = _halves(d_out, num_heads)
    return _added(d_o_lo, lo), _added(d_o_hi, hi)


# ---- attention


def flash_attention_forward(q, k, v, *, scale=None):
    """Attention of q (BH, Nq, D) to k (BH, Nk, D) and v (BH, Nk, Dv): o (BH, Nq, Dv) and lse (BH, Nq)."""
    o = np.empty((*q.shape[:2], v.shape[2]), q.dtype)
    lse = np.empty(q.shape[:2], lse_dtype(q.dtype))
    _attend(q, k, v, _scale(scale, q.shape[2]), o, lse)
    return o, lse


def flash_attention_backward(d_o, q, k, v, o, lse, *, scale=None, d_q=None, d_k=None, d_v=None):
    """The gradients of o with respect to q, k and v; uses o and lse as given."""
    add = tuple(target is not None for target in (d_q, d_k, d_v))
    targets = tuple(
        np.empty(x.shape, x.dtype) if target is None else target
        for target, x in zip((d_q, d_k, d_v), (q, k, v), strict=True)
    )
    _attend_backward(d_o, q, k, v, o, lse, _scale(scale, q.shape[2]), targets, add)
    return targets


def psa_forward(qkv, num_heads, *, key_dim=None, scale=None, out=None, lse=None):
    """Attention from qkv (B, num_heads*(2*key_dim + value_dim), H, W): out, NCHW, and lse (B, heads, N)."""
    q, k, v = split_qkv(qkv, num_heads, key_dim)
    batch, _, height, width = qkv.shape
    if out is None:
        out = np.empty((batch, num_heads * v.shape[2], height, width), qkv.dtype)
    if lse is None:
        lse = np.empty((batch, num_heads, height * width), lse_dtype(qkv.dtype))
    _attend(q, k, v, _scale(scale, q.shape[2]), tokens_first(out, num_heads), lse.reshape(q.shape[:2]))
    return out, lse


def psa_backward(d_out, qkv, out, lse, num_heads, *, key_dim=None, scale=None, d_v_branch=None, d_qkv=None):
    """The gradient of psa_forward's out with respect to qkv; d_v_branch is added to V's before rounding."""
    q, k, v = split_qkv(qkv, num_heads, key_dim)
    add = (d_qkv is not None,) * 3
    if d_qkv is None:
        d_qkv = np.empty(qkv.shape, qkv.dtype)
    _attend_backward(
        *(tokens_first(d_out, num_heads), q, k, v, tokens_first(out, num_heads), lse.reshape(q.shape[:2])),
        _scale(scale, q.shape[2]),
        split_qkv(d_qkv, num_heads, q.shape[2]),
        add,
        branch=None if d_v_branch is None else tokens_first(d_v_branch, num_heads),
    )
    return d_qkv


# ---- the two formulas


@np.errstate(all="ignore")  # NaN, inf and overflow walk through silently, as on a GPU
def _attend(q, k, v, scale, o, lse) -> None:
    """Softmax attention, o = softmax(scale q k^T) v and lse, each row's log-sum-exp, written in place."""
    if k.shape[1] == 0:  # a sum over no keys
        o[...], lse[...] = 0, -np.inf
        return
    for heads, row_slices in tiles(q.shape[0], q.shape[1], k.shape[1], _TILE_SCORES):
        keys, values = _float64(k[heads]), _float64(v[heads])
        for rows in row_slices:
            p = _float64(q[heads, rows]) @ keys.transpose(0, 2, 1)
            p *= scale
            row_max = p.max(axis=2, keepdims=True)
            p -= row_max
            np.exp(p, out=p)
            row_sum = p.sum(axis=2, keepdims=True)
            o[heads, rows] = p @ values / row_sum
            lse[heads, rows] = (row_max + np.log(row_sum))[..., 0]


@np.errstate(all="ignore")
def _attend_backward(d_o, q, k, v, o, lse, scale, targets, add, branch=None) -> None:
    """Gradients of q, k, v (`targets`, each stored or added): the chain rule through `_attend`.

    With P = exp(scale q k^T - lse) the softmax's gradient is dS = P (dP - delta), where dP = dO v^T and
    delta = rowsum(dO o) = rowsum(P dP). Then dq = scale dS k, dk = scale dS^T q, dv = P^T dO (+ branch).
    """
    for heads, row_slices in tiles(q.shape[0], q.shape[1], k.shape[1], _TILE_SCORES):
        keys, values = _float64(k[heads]), _float64(v[heads])
        d_keys = np.zeros(keys.shape)
        d_values = np.zeros(values.shape) if branch is None else _float64(branch[heads])
        for rows in row_slices:
            queries, d_rows = _float64(q[heads, rows]), _float64(d_o[heads, rows])
            p = queries @ keys.transpose(0, 2, 1)
            p *= scale
            p -= _float64(lse[heads, rows])[..., None]
            np.exp(p, out=p)
            d_values += p.transpose(0, 2, 1) @ d_rows
            delta = (d_rows * _float64(o[heads, rows])).sum(axis=2, keepdims=True)
            d_scores = d_rows @ values.transpose(0, 2, 1)
            d_scores -= delta
            d_scores *= p
            d_scores *= scale
            d_keys += d_scores.transpose(0, 2, 1) @ queries
            _store(targets[0][heads, rows], d_scores @ keys, add[0])
        _store(targets[1][heads], d_keys, add[1])
        _store(targets[2][heads], d_values, add[2])


# ---- layouts as views


def _sections(qkv, num_heads):
    """(B, num_heads*4*key_dim, H, W) as (section, BH, N, key_dim)."""
    batch, channels, height, width = qkv.shape
    key_dim = channels // num_heads // 4
    return qkv.reshape(batch * num_heads, 4, key_dim, height * width).transpose(1, 0, 3, 2)


def _halves(nchw, num_heads):
    """The lower and the upper half of each head's channels, tokens first."""
    return np.split(tokens_first(nchw, num_heads), 2, axis=2)


# ---- small helpers


def _float64(array):
    """The array in float64: bfloat16 must leave its dtype before any arithmetic."""
    return array.astype(np.float64)


def _scale(scale, key_dim) -> float:
    return key_dim**-0.5 if scale is None else float(scale)


def _copy(array):
    """A C-ordered copy: a transposed view may already be in C order, and must not be handed out."""
    return np.array(array, order="C", copy=True)


@np.errstate(all="ignore")
def _store(target, value, add: bool) -> None:
    rounded = value.astype(target.dtype, copy=False)
    if add:
        target += rounded
    else:
        target[...] = rounded


def _added(target, gradient):
    """`target`, added to; a new array if there is none."""
    if target is None:
        return _copy(gradient)
    _store(target, gradient, add=True)
    return target
