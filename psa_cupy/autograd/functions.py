"""The functional API on Variables: each computes, and records how to pull gradients back.

A backward here passes the tape's buffers on as the functional API's optional targets, which are added to.
"""

from __future__ import annotations

import numbers

import numpy as np

from psa_cupy.arguments import cupy_if_imported, is_cupy
from psa_cupy.autograd.tape import Variable, record
from psa_cupy.passes.extract_v import extract_v as _extract_v
from psa_cupy.passes.extract_v import extract_v_backward
from psa_cupy.passes.flash_attention import flash_attention_backward, flash_attention_forward
from psa_cupy.passes.merge_attn import merge_attn as _merge_attn
from psa_cupy.passes.merge_attn import merge_attn_backward
from psa_cupy.passes.pack_qkv import pack_qkv as _pack_qkv
from psa_cupy.passes.pack_qkv import pack_qkv_backward
from psa_cupy.passes.psa import psa_backward, psa_forward


def psa(qkv: Variable, num_heads: int, *, key_dim=None, scale=None) -> Variable:
    """Fused position-sensitive attention: `psa_forward`'s out, differentiated by `psa_backward`."""
    x = _data(qkv)
    out, lse = psa_forward(x, num_heads, key_dim=key_dim, scale=scale)

    def backward(saved, d_outputs, targets):
        (d_out,), (d_qkv,) = d_outputs, targets
        return (psa_backward(d_out, *saved, num_heads, key_dim=key_dim, scale=scale, d_qkv=d_qkv),)

    return record("psa", (qkv,), (out,), (x, out, lse), backward)[0]


def pack_qkv(qkv: Variable, num_heads: int) -> tuple[Variable, Variable, Variable, Variable]:
    """The sections q, k, v_lo, v_hi of `pack_qkv`, each (BH, N, key_dim): views of one array."""
    x = _data(qkv)
    height, width = x.shape[2:]

    def backward(saved, d_outputs, targets):
        (d_qkv,) = targets
        d_packed = _stacked(d_outputs)
        return (pack_qkv_backward(d_packed, num_heads, height, width, d_qkv=d_qkv),)

    return record("pack_qkv", (qkv,), tuple(_pack_qkv(x, num_heads)), (), backward)


def flash_attention(q: Variable, k: Variable, v: Variable, *, scale=None) -> Variable:
    """`flash_attention_forward`'s o, differentiated by `flash_attention_backward`."""
    arrays = (_data(q), _data(k), _data(v))
    o, lse = flash_attention_forward(*arrays, scale=scale)

    def backward(saved, d_outputs, targets):
        (d_o,), (d_q, d_k, d_v) = d_outputs, targets
        return flash_attention_backward(d_o, *saved, scale=scale, d_q=d_q, d_k=d_k, d_v=d_v)

    return record("flash_attention", (q, k, v), (o,), (*arrays, o, lse), backward)[0]


def merge_attn(o_lo: Variable, o_hi: Variable, num_heads: int, height: int, width: int) -> Variable:
    """Both halves of attention's result, (BH, N, key_dim) each, as one NCHW array."""
    lo, hi = _data(o_lo), _data(o_hi)

    def backward(saved, d_outputs, targets):
        (d_out,), (d_o_lo, d_o_hi) = d_outputs, targets
        return merge_attn_backward(d_out, num_heads, d_o_lo=d_o_lo, d_o_hi=d_o_hi)

    out = _merge_attn(lo, hi, num_heads, height, width)
    return record("merge_attn", (o_lo, o_hi), (out,), (), backward)[0]


def extract_v(qkv: Variable, num_heads: int) -> Variable:
    """The V channels of qkv as an NCHW array: where the positional encoding branches off."""
    x = _data(qkv)

    def backward(saved, d_outputs, targets):
        (d_v,), (d_qkv,) = d_outputs, targets
        return (extract_v_backward(d_v, num_heads, d_qkv=d_qkv),)

    return record("extract_v", (qkv,), (_extract_v(x, num_heads),), (), backward)[0]


def add(a: Variable, b: Variable) -> Variable:
    """A + b, of equal shape and dtype."""
    x, y = _pair("add", a, b)

    def backward(saved, d_outputs, targets):
        (d_z,) = d_outputs
        return tuple(_added(target, d_z) for target in targets)

    return record("add", (a, b), (_array(x, x + y),), (), backward)[0]


def multiply(a: Variable, b: Variable | float) -> Variable:
    """A * b, element by element, of equal shape and dtype; b may be a number."""
    if isinstance(b, numbers.Real):
        return _multiply_by_number(a, float(b))
    x, y = _pair("multiply", a, b)

    def backward(saved, d_outputs, targets):
        (x, y), (d_z,), (d_x, d_y) = saved, d_outputs, targets
        return _added(d_x, d_z * y), _added(d_y, d_z * x)

    return record("multiply", (a, b), (_array(x, x * y),), (x, y), backward)[0]


def _multiply_by_number(a: Variable, number: float) -> Variable:
    x = _data(a)

    def backward(saved, d_outputs, targets):
        (d_z,), (d_x,) = d_outputs, targets
        return (_added(d_x, _array(d_z, d_z * number)),)

    return record("multiply", (a,), (_array(x, x * number),), (), backward)[0]


def sum(a: Variable) -> Variable:
    """The sum of all elements, a 0-d array: added up in float64 and rounded once."""
    x = _data(a)
    shape, dtype = x.shape, x.dtype

    def backward(saved, d_outputs, targets):
        (d_y,), (d_x,) = d_outputs, targets
        return (_added(d_x, _xp(d_y).broadcast_to(d_y, shape)),)

    total = _array(x, x.astype(np.float64).sum())
    return record("sum", (a,), (total,), (), backward)[0]


def _added(target, gradient):
    """`target += gradient`, or a new array that shares memory with nothing."""
    if target is None:
        return _xp(gradient).array(gradient, order="C", copy=True)
    target += gradient
    return target


def _array(like, value):
    """`value` as an array of like's dtype: NumPy's arithmetic on 0-d arrays answers with scalars."""
    return _xp(like).asarray(value, dtype=like.dtype)


def _stacked(sections):
    """The sections' gradients as one array; what no gradient reached is zero."""
    given = next(s for s in sections if s is not None)
    xp = _xp(given)
    return xp.stack([xp.zeros_like(given) if s is None else s for s in sections])


def _xp(array):
    return cupy_if_imported() if is_cupy(array) else np


def _data(value):
    """The array of a Variable; a constant as it is, for the functional API to check."""
    return value.data if isinstance(value, Variable) else value


def _pair(function: str, a, b):
    x, y = _data(a), _data(b)
    for name, array in (("a", x), ("b", y)):
        if not isinstance(array, np.ndarray) and not is_cupy(array):
            raise TypeError(
                f"{function}: {name} is a {type(array).__name__}, expected a Variable or an array"
            )
    if type(x) is not type(y):
        raise TypeError(f"{function}: a and b must be both NumPy or both CuPy, got a mix")
    if x.dtype != y.dtype:
        raise TypeError(f"{function}: b has dtype {y.dtype}, expected {x.dtype}, the dtype of a")
    if x.shape != y.shape:
        raise ValueError(f"{function}: b has shape {y.shape}, expected {x.shape}, the shape of a")
    return x, y
