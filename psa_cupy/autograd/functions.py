"""The functional API on Variables: each computes, and records how to pull gradients back.

Wherever a Variable is expected, an array will do: a constant. Errors are those of the functional API. A
backward here passes the tape's buffers on as the functional API's optional targets, which are added to.
"""

from __future__ import annotations

import numbers

import numpy as np

from psa_cupy.arguments import cupy_if_imported, is_cupy, require_arrays, require_dtype, require_shape
from psa_cupy.autograd.tape import Variable, device_of, record
from psa_cupy.passes import extract_v as extraction, merge_attn as merging, pack_qkv as packing
from psa_cupy.passes.flash_attention import flash_attention_backward, flash_attention_forward
from psa_cupy.passes.psa import psa_backward, psa_forward

_SILENT = np.errstate(all="ignore")
"""Decorates NumPy's arithmetic: overflow and NaN walk through silently, as in the passes and on a GPU."""


def psa(qkv: Variable, num_heads: int, *, key_dim: int | None = None, scale: float | None = None) -> Variable:
    """Fused position-sensitive attention: `psa_forward`'s out, differentiated by `psa_backward`.

    Parameters
    ----------
    qkv : Variable, (B, num_heads*(2*key_dim + value_dim), H, W)
        Per head: key_dim Q channels, key_dim K channels, value_dim V channels.
    num_heads, key_dim, scale
        As in `psa_forward`.

    Returns
    -------
    Variable, (B, num_heads*value_dim, H, W)
        out. Kept for backward: qkv, out and lse.

    Examples
    --------
    >>> import numpy as np
    >>> from psa_cupy import autograd
    >>> with autograd.Tape() as tape:
    ...     qkv = tape.variable(np.ones((1, 2 * 128, 20, 20), np.float32))
    ...     loss = autograd.sum(autograd.psa(qkv, num_heads=2))
    >>> tape.backward(loss)
    >>> qkv.grad.shape
    (1, 256, 20, 20)

    """
    x = _data(qkv)
    out, lse = psa_forward(x, num_heads, key_dim=key_dim, scale=scale)

    def backward(saved, d_outputs, targets):
        (d_out,), (d_qkv,) = d_outputs, targets
        return (psa_backward(d_out, *saved, num_heads, key_dim=key_dim, scale=scale, d_qkv=d_qkv),)

    return record("psa", (qkv,), (out,), (x, out, lse), backward)[0]


def pack_qkv(qkv: Variable, num_heads: int) -> tuple[Variable, Variable, Variable, Variable]:
    """The sections of `pack_qkv` as Variables of their own.

    Parameters
    ----------
    qkv : Variable, (B, num_heads*4*key_dim, H, W)
        As in `psa`, with value_dim = 2*key_dim.
    num_heads : int
        At least 1.

    Returns
    -------
    q, k, v_lo, v_hi : Variable, (B*num_heads, N, key_dim)
        Views of one array. Their gradients are copied together before `pack_qkv_backward`.

    Examples
    --------
    >>> import numpy as np
    >>> from psa_cupy import autograd
    >>> q, k, v_lo, v_hi = autograd.pack_qkv(np.ones((1, 128, 2, 3), np.float32), num_heads=1)
    >>> q.shape
    (1, 6, 32)

    """
    x = _data(qkv)
    packed = packing.pack_qkv(x, num_heads)
    height, width = x.shape[2:]

    def backward(saved, d_outputs, targets):
        (d_qkv,) = targets
        return (packing.pack_qkv_backward(_stacked(d_outputs), num_heads, height, width, d_qkv=d_qkv),)

    return record("pack_qkv", (qkv,), tuple(packed), (), backward)


def flash_attention(q: Variable, k: Variable, v: Variable, *, scale: float | None = None) -> Variable:
    """`flash_attention_forward`'s o, differentiated by `flash_attention_backward`.

    Parameters
    ----------
    q, k, v : Variable, (BH, Nq, D), (BH, Nk, D), (BH, Nk, Dv)
        Queries, keys, values.
    scale : float, optional
        Softmax scale; `D ** -0.5` by default.

    Returns
    -------
    Variable, (BH, Nq, Dv)
        o. Kept for backward: q, k, v, o and lse.

    Examples
    --------
    >>> import numpy as np
    >>> from psa_cupy import autograd
    >>> q = np.ones((1, 5, 8), np.float32)
    >>> autograd.flash_attention(q, q, np.ones((1, 5, 3), np.float32)).shape
    (1, 5, 3)

    """
    arrays = (_data(q), _data(k), _data(v))
    o, lse = flash_attention_forward(*arrays, scale=scale)

    def backward(saved, d_outputs, targets):
        (d_o,), (d_q, d_k, d_v) = d_outputs, targets
        return flash_attention_backward(d_o, *saved, scale=scale, d_q=d_q, d_k=d_k, d_v=d_v)

    return record("flash_attention", (q, k, v), (o,), (*arrays, o, lse), backward)[0]


def merge_attn(o_lo: Variable, o_hi: Variable, num_heads: int, height: int, width: int) -> Variable:
    """Both halves of attention's result as one NCHW array, by `merge_attn`.

    Parameters
    ----------
    o_lo, o_hi : Variable, (B*num_heads, N, key_dim)
        Attention's results for the two halves of V.
    num_heads, height, width : int
        N = height*width.

    Returns
    -------
    Variable, (B, num_heads*2*key_dim, H, W)
        The layout of `psa`'s result.

    Examples
    --------
    >>> import numpy as np
    >>> from psa_cupy import autograd
    >>> half = np.ones((2, 6, 32), np.float32)
    >>> autograd.merge_attn(half, half, num_heads=2, height=2, width=3).shape
    (1, 128, 2, 3)

    """
    out = merging.merge_attn(_data(o_lo), _data(o_hi), num_heads, height, width)

    def backward(saved, d_outputs, targets):
        (d_out,), (d_o_lo, d_o_hi) = d_outputs, targets
        return merging.merge_attn_backward(d_out, num_heads, d_o_lo=d_o_lo, d_o_hi=d_o_hi)

    return record("merge_attn", (o_lo, o_hi), (out,), (), backward)[0]


def extract_v(qkv: Variable, num_heads: int) -> Variable:
    """The V channels as an NCHW array, by `extract_v`: where the positional encoding branches off.

    Parameters
    ----------
    qkv : Variable, (B, num_heads*4*key_dim, H, W)
        As in `psa`, with value_dim = 2*key_dim.
    num_heads : int
        At least 1.

    Returns
    -------
    Variable, (B, num_heads*2*key_dim, H, W)
        V.

    Examples
    --------
    >>> import numpy as np
    >>> from psa_cupy import autograd
    >>> autograd.extract_v(np.ones((1, 128, 2, 3), np.float32), num_heads=1).shape
    (1, 64, 2, 3)

    """
    v = extraction.extract_v(_data(qkv), num_heads)

    def backward(saved, d_outputs, targets):
        (d_v,), (d_qkv,) = d_outputs, targets
        return (extraction.extract_v_backward(d_v, num_heads, d_qkv=d_qkv),)

    return record("extract_v", (qkv,), (v,), (), backward)[0]


def add(a: Variable, b: Variable) -> Variable:
    """The sum a + b, of equal shape and dtype: nothing is broadcast or promoted.

    Raises
    ------
    TypeError
        If one is no array, NumPy and CuPy are mixed, or dtypes differ.
    ValueError
        If shapes differ.

    Examples
    --------
    >>> import numpy as np
    >>> from psa_cupy import autograd
    >>> autograd.add(np.ones(2), np.ones(2)).data
    array([2., 2.])

    """
    x, y = _pair("add", a, b)

    def backward(saved, d_outputs, targets):
        (d_z,) = d_outputs
        return tuple(_accumulated(target, d_z) for target in targets)

    return record("add", (a, b), (_summed(x, y),), (), backward)[0]


def multiply(a: Variable, b: Variable | float) -> Variable:
    """The product a * b, element by element, of equal shape and dtype, or with a number b.

    A number is not rounded to a's dtype first: its product, in the backward too, is computed in float64 and
    then rounded. Kept for backward: both arrays, or nothing if b is a number.

    Raises
    ------
    TypeError, ValueError
        As in `add`.

    Examples
    --------
    >>> import numpy as np
    >>> from psa_cupy import autograd
    >>> autograd.multiply(np.ones(2), 3).data
    array([3., 3.])

    """
    if isinstance(b, numbers.Real):
        return _multiply_by_number(a, _as_float(b))
    x, y = _pair("multiply", a, b)

    def backward(saved, d_outputs, targets):
        (x, y), (d_z,), (d_x, d_y) = saved, d_outputs, targets
        return _accumulated(d_x, _product(d_z, y)), _accumulated(d_y, _product(d_z, x))

    return record("multiply", (a, b), (_product(x, y),), (x, y), backward)[0]


def _multiply_by_number(a: Variable, number: float) -> Variable:
    x = _one("multiply", a)

    def backward(saved, d_outputs, targets):
        (d_z,), (d_x,) = d_outputs, targets
        return (_accumulated(d_x, _multiple(d_z, number)),)

    return record("multiply", (a,), (_multiple(x, number),), (), backward)[0]


def _as_float(number: numbers.Real) -> float:
    try:
        return float(number)
    except OverflowError:
        raise ValueError(
            "multiply: b is an integer past float64, expected a number within its range"
        ) from None


def sum(a: Variable) -> Variable:
    """The sum of all elements, a 0-d array: added up in float64 and rounded once.

    Examples
    --------
    >>> import numpy as np
    >>> from psa_cupy import autograd
    >>> autograd.sum(np.ones((2, 3), np.float32)).data
    array(6., dtype=float32)

    """
    x = _one("sum", a)
    shape = x.shape

    def backward(saved, d_outputs, targets):
        (d_y,), (d_x,) = d_outputs, targets
        return (_accumulated(d_x, _namespace(d_y).broadcast_to(d_y, shape)),)

    return record("sum", (a,), (_total(x),), (), backward)[0]


@_SILENT
def _summed(x, y):
    with device_of(x):
        return _array(x + y, like=x)


@_SILENT
def _product(x, y):
    with device_of(x):
        return _array(x * y, like=x)


@_SILENT
def _multiple(x, number: float):
    with device_of(x):
        return _array(x.astype(np.float64, copy=False) * number, like=x)


@_SILENT
def _total(x):
    with device_of(x):
        return _array(x.astype(np.float64).sum(), like=x)


@_SILENT
def _accumulated(target, gradient):
    """`target`, with the gradient added; without one a copy, which shares memory with nothing."""
    if target is None:
        return _namespace(gradient).array(gradient, order="C")
    target += gradient
    return target


def _stacked(sections):
    """The sections' gradients as one array; what no gradient reached is zero."""
    given = next(section for section in sections if section is not None)
    xp = _namespace(given)
    return xp.stack([xp.zeros_like(given) if section is None else section for section in sections])


def _array(value, like):
    """`value` as an array of like's dtype: NumPy's arithmetic on 0-d arrays answers with scalars."""
    return _namespace(like).asarray(value, dtype=like.dtype)


def _namespace(array):
    return cupy_if_imported() if is_cupy(array) else np


def _data(value):
    """The array of a Variable; a constant as it is, for the functional API to check."""
    return value.data if isinstance(value, Variable) else value


def _one(function: str, a):
    x = _data(a)
    require_arrays(function, {"a": x})
    require_dtype(function, "a", x)
    return x


def _pair(function: str, a, b):
    x, y = _data(a), _data(b)
    require_arrays(function, {"a": x, "b": y})
    require_dtype(function, "b", y, expected=require_dtype(function, "a", x))
    require_shape(function, "b", y, x.shape)
    return x, y
