"""Where chosen queries look: rows of the attention matrix, for looking at, never the whole matrix."""

from __future__ import annotations

import numpy as np

from psa_cupy.arguments import cupy_if_imported, is_cupy, require_arrays, require_dtype, softmax_scale
from psa_cupy.geometry import PSAGeometry
from psa_cupy.views import split_qkv, tiles

_NAME = "attention_map"

_TILE_SCORES = 1 << 20
"""Scores computed at a time: 8 MiB of float64."""


def attention_map(qkv, num_heads, queries, *, key_dim=None, scale=None):
    """The probabilities with which chosen queries attend to every token.

    Computed in float64 by array arithmetic, rounded once; beside the result only a few rows are held at a
    time.

    Parameters
    ----------
    qkv : array, (B, num_heads*(2*key_dim + value_dim), H, W)
        float16, bfloat16, float32 or float64; NumPy or CuPy. The input of `psa_forward`.
    num_heads : int
        At least 1.
    queries : sequence of int, or 1-D integer array
        Tokens, each 0 to N-1; the pixel at row h and column w is token ``h*W + w``. In any order, repeated or
        empty. A CuPy array is copied to the host, which waits for the device.
    key_dim, scale
        As in `psa_forward`.

    Returns
    -------
    array, (B, num_heads, len(queries), N)
        float32 (float64 for float64), in qkv's memory. Each row sums to 1; reshaped to (..., H, W) it is an
        image.

    Raises
    ------
    TypeError
        If qkv is no array, its dtype is not supported, or queries are not integers.
    ValueError
        If sizes do not fit together or exceed the limits, queries are not one-dimensional, or a query is no
        token.

    Notes
    -----
    Row n is softmax(scale * Q_n K^T), the P of "Attention Is All You Need" (A. Vaswani et al.,
    arXiv:1706.03762).

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> qkv = np.random.default_rng(0).standard_normal((1, 2 * 128, 20, 20), dtype=np.float32)
    >>> rows = psa_cupy.attention_map(qkv, 2, [0, 10 * 20 + 10])     # the first pixel, and one in the middle
    >>> rows.shape
    (1, 2, 2, 400)
    >>> bool(abs(rows.sum(axis=-1) - 1).max() < 1e-6)
    True

    """
    require_arrays(_NAME, {"qkv": qkv})
    dtype = require_dtype(_NAME, "qkv", qkv)
    geometry = PSAGeometry.from_qkv(_NAME, qkv.shape, num_heads, key_dim)
    scale = softmax_scale(_NAME, scale, geometry.key_dim, dtype)
    tokens = _require_tokens(queries, geometry.tokens)
    if not is_cupy(qkv):
        return _probabilities(np, qkv, geometry, tokens, scale, dtype)
    with qkv.device:
        return _probabilities(cupy_if_imported(), qkv, geometry, tokens, scale, dtype)


@np.errstate(all="ignore")  # NaN and inf walk through silently, as on a GPU
def _probabilities(xp, qkv, geometry: PSAGeometry, tokens: np.ndarray, scale: float, dtype):
    q, k, _ = split_qkv(qkv, geometry.num_heads, geometry.key_dim)
    chosen = q[:, xp.asarray(tokens)]
    result_dtype = np.float64 if dtype == np.float64 else np.float32
    rows_of_head = xp.empty((geometry.bh, tokens.size, geometry.tokens), result_dtype)
    for heads, row_slices in tiles(geometry.bh, tokens.size, geometry.tokens, _TILE_SCORES):
        keys = k[heads].astype(np.float64)
        for rows in row_slices:
            p = chosen[heads, rows].astype(np.float64) @ keys.transpose(0, 2, 1)
            p *= scale
            p -= p.max(axis=2, keepdims=True)
            p = xp.exp(p, out=p)
            p /= p.sum(axis=2, keepdims=True)
            rows_of_head[heads, rows] = p
    return rows_of_head.reshape(geometry.batch, geometry.num_heads, tokens.size, geometry.tokens)


def _require_tokens(queries, count: int) -> np.ndarray:
    """The queries as an integer array, each 0 to count - 1."""
    if isinstance(queries, np.ma.MaskedArray):
        raise TypeError(f"{_NAME}: queries is a MaskedArray, expected a sequence of integers")
    try:
        tokens = queries.get() if is_cupy(queries) else np.asarray(queries)
    except ValueError:  # sequences of unequal lengths
        raise ValueError(f"{_NAME}: queries is a nested sequence, expected 1 dimension") from None
    if tokens.ndim != 1:
        raise ValueError(f"{_NAME}: queries has shape {tokens.shape}, expected 1 dimension")
    if tokens.size == 0:
        return np.zeros(0, np.intp)
    if tokens.dtype.kind not in "iu":  # an integer past 64 bits makes an array of objects
        raise TypeError(f"{_NAME}: queries has dtype {tokens.dtype}, expected integers")
    if (outside := tokens[(tokens < 0) | (tokens >= count)]).size:
        raise ValueError(
            f"{_NAME}: queries has {outside[0]}, expected tokens from 0 to {count - 1} (N = H*W)"
        )
    return tokens.astype(np.intp)
