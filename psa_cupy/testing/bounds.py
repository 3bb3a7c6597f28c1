"""How accurate a result of attention must be, measured against float64.

Let x* be the float64 result of the same inputs, u_T the unit roundoff of the arrays' dtype and u_acc that of
the accumulators: 2^-24, or 2^-53 for float64. The *yardstick* is FlashAttention's formula in float64 with
only P, dS, O and the results rounded to the dtype. A result x passes if, in Frobenius norms::

    |x - x*|  <=  1.5 |yardstick - x*|  +  u_T |x*| / 4  +  u_acc (8 + 4 max|S|) |X|

where X is the same expression in absolute values: P|V| for o; (P o (|dO||V|^T + rowsum(|dO||O|))) |scale|
times |K| or |Q| for dQ and dK; P^T |dO| for dV; and |S| = |scale| |Q||K|^T. lse passes if, element by
element, in every dtype::

    |lse - lse*|  <=  u_acc (24 + 4 max|S| + 2 max|lse*|)

with the maxima over the head. (|S|, not |scores|: what rounding does to a score grows with the terms that are
summed, and a score may be small because large terms cancel.)

Norms are taken head by head and, in a long head, run by run of 64 tokens or more, so that a wrong head or a
wrong last row cannot hide among right ones. Few numbers' norms scatter, and good results must not fail by
chance: a run has 1024 elements or more, and a head with fewer passes if it passes by one of eight yardsticks,
which round P, dS and O relative to 2^(i/8) (a kernel rounds P relative to whichever maximum it has then).

The functions answer with error / bound, the largest of all: at most 1 passes, and a NaN or an infinity that
float64 does not have counts as infinite. A head whose inputs are not finite is not compared. A result of
another shape or dtype than it must have, or an input, is an error (TypeError, ValueError), not a ratio.

All functions take NumPy or CuPy arrays, and compute where the arrays are, a few rows of scores at a time.
"""

from __future__ import annotations

import itertools

import numpy as np

from psa_cupy.arguments import (
    cupy_if_imported,
    is_cupy,
    lse_dtype,
    require_arrays,
    require_dtype,
    require_ndim,
    require_shape,
    softmax_scale,
)
from psa_cupy.geometry import PSAGeometry
from psa_cupy.passes.checks import specification
from psa_cupy.views import split_qkv, tiles, tokens_first

ABSOLUTE_BOUNDS = {
    ("forward", "float32"): 2e-6,
    ("backward", "float32"): 1e-5,
    ("forward", "float64"): 1e-13,
    ("backward", "float64"): 1e-13,
}
"""The largest error of any element at inputs of unit variance and the default scale."""

_UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}

_LEAST_TOKENS, _LEAST_ELEMENTS = 64, 1024
"""Of a run that a norm is taken over."""

_SHIFTS = tuple(2 ** (i / 8) for i in range(1, 8))
"""What the further yardsticks of a small head multiply P, dS and O by before rounding."""

_TILE_SCORES = {"numpy": 1 << 18, "cupy": 1 << 23}
"""Scores computed at a time: 2 MiB of float64 for a processor's caches, 64 MiB to fill a GPU."""


def unit_roundoff(dtype) -> float:
    """The largest relative error of rounding to a dtype: half the distance from 1 to the next number.

    Raises
    ------
    TypeError
        If the dtype is none of the library's.

    Examples
    --------
    >>> import numpy as np
    >>> from psa_cupy import testing
    >>> testing.unit_roundoff(np.float32) == 2**-24
    True

    """
    name = np.dtype(dtype).name
    if name not in _UNIT_ROUNDOFF:
        raise TypeError(f"unit_roundoff: dtype is {name}, expected one of {', '.join(_UNIT_ROUNDOFF)}")
    return _UNIT_ROUNDOFF[name]


def attention_forward_ratios(q, k, v, o, lse, *, scale=None) -> dict[str, float]:
    """Errors of `flash_attention_forward` over their bounds.

    Parameters
    ----------
    q, k, v : array, (BH, Nq, D), (BH, Nk, D), (BH, Nk, Dv)
        The inputs.
    o, lse : array, (BH, Nq, Dv), (BH, Nq)
        The results to judge.
    scale : float, optional
        Softmax scale; `D ** -0.5` by default.

    Returns
    -------
    dict
        "o" and "lse": measured error / bound, at most 1 if the result is good.

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> from psa_cupy import testing
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 100, 32), dtype=np.float32)
    >>> o, lse = psa_cupy.flash_attention_forward(q, k, v)
    >>> max(testing.attention_forward_ratios(q, k, v, o, lse).values()) <= 1
    True
    >>> o[1, 99] += 0.1
    >>> testing.attention_forward_ratios(q, k, v, o, lse)["o"] > 1
    True

    """
    scale = _check_attention("attention_forward_ratios", scale, q=q, k=k, v=v, o=o, lse=lse)
    return _judged(lambda rounding: _forward_ratios(q, k, v, o, lse, scale, rounding), q, k, v)


def attention_backward_ratios(d_o, q, k, v, d_q, d_k, d_v, *, scale=None) -> dict[str, float]:
    """Errors of `flash_attention_backward` over their bounds.

    Parameters
    ----------
    d_o, q, k, v : array, (BH, Nq, Dv), (BH, Nq, D), (BH, Nk, D), (BH, Nk, Dv)
        The inputs; o and lse are computed here, exactly.
    d_q, d_k, d_v : array, shapes of q, k, v
        The results to judge, as stored in new arrays: what a target held before is not known here.
    scale : float, optional
        Softmax scale; `D ** -0.5` by default.

    Returns
    -------
    dict
        "d_q", "d_k" and "d_v": measured error / bound, at most 1 if the result is good.

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> from psa_cupy import testing
    >>> q, k, v, d_o = np.random.default_rng(0).standard_normal((4, 2, 100, 32), dtype=np.float32)
    >>> o, lse = psa_cupy.flash_attention_forward(q, k, v)
    >>> gradients = psa_cupy.flash_attention_backward(d_o, q, k, v, o, lse)
    >>> max(testing.attention_backward_ratios(d_o, q, k, v, *gradients).values()) <= 1
    True

    """
    arrays = {"d_o": d_o, "q": q, "k": k, "v": v, "d_q": d_q, "d_k": d_k, "d_v": d_v}
    scale = _check_attention("attention_backward_ratios", scale, **arrays)
    return _judged(lambda rounding: _backward_ratios(*arrays.values(), None, scale, rounding), q, k, v)


def psa_forward_ratios(qkv, out, lse, num_heads, *, key_dim=None, scale=None) -> dict[str, float]:
    """Errors of `psa_forward` over their bounds.

    Parameters
    ----------
    qkv : array, (B, num_heads*(2*key_dim + value_dim), H, W)
        The input.
    out, lse : array, (B, num_heads*value_dim, H, W), (B, num_heads, N)
        The results to judge.
    num_heads, key_dim, scale
        As in psa_forward.

    Returns
    -------
    dict
        "o" and "lse": measured error / bound, at most 1 if the result is good.

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> from psa_cupy import testing
    >>> qkv = np.random.default_rng(0).standard_normal((1, 2 * 128, 10, 10), dtype=np.float32)
    >>> out, lse = psa_cupy.psa_forward(qkv, num_heads=2)
    >>> max(testing.psa_forward_ratios(qkv, out, lse, num_heads=2).values()) <= 1
    True

    """
    scale = _check_block("psa_forward_ratios", num_heads, key_dim, scale, qkv=qkv, out=out, lse=lse)
    q, k, v = split_qkv(qkv, num_heads, key_dim)
    return attention_forward_ratios(
        *(q, k, v, tokens_first(out, num_heads), lse.reshape(q.shape[:2])), scale=scale
    )


def psa_backward_ratios(
    d_out, qkv, d_qkv, num_heads, *, key_dim=None, scale=None, d_v_branch=None
) -> dict[str, float]:
    """Errors of `psa_backward` over their bounds.

    Parameters
    ----------
    d_out : array, (B, num_heads*value_dim, H, W)
        The gradient that came in.
    qkv : array, (B, num_heads*(2*key_dim + value_dim), H, W)
        The forward's input; out and lse are computed here, exactly.
    d_qkv : array, shape of qkv
        The result to judge, as stored in a new array.
    num_heads, key_dim, scale, d_v_branch
        As in psa_backward.

    Returns
    -------
    dict
        "d_q", "d_k" and "d_v": measured error / bound, at most 1 if the result is good.

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> from psa_cupy import testing
    >>> qkv = np.random.default_rng(0).standard_normal((1, 2 * 128, 10, 10), dtype=np.float32)
    >>> out, lse = psa_cupy.psa_forward(qkv, num_heads=2)
    >>> d_qkv = psa_cupy.psa_backward(out, qkv, out, lse, num_heads=2)
    >>> sorted(testing.psa_backward_ratios(out, qkv, d_qkv, num_heads=2))
    ['d_k', 'd_q', 'd_v']

    """
    given = {} if d_v_branch is None else {"d_v_branch": d_v_branch}
    arrays = {"qkv": qkv, "d_out": d_out, "d_qkv": d_qkv, **given}
    scale = _check_block("psa_backward_ratios", num_heads, key_dim, scale, **arrays)
    q, k, v = split_qkv(qkv, num_heads, key_dim)
    arrays = (tokens_first(d_out, num_heads), q, k, v, *split_qkv(d_qkv, num_heads, q.shape[2]))
    branch = None if d_v_branch is None else tokens_first(d_v_branch, num_heads)
    return _judged(lambda rounding: _backward_ratios(*arrays, branch, scale, rounding), q, k, v)


def absolute_ratio(result, exact, direction: str) -> float:
    """The largest error of any element over `ABSOLUTE_BOUNDS`, for inputs of unit variance, scale=None.

    Parameters
    ----------
    result : array
        float32 or float64; the dtype chooses the bound.
    exact : array, shape of result
        The float64 result of the same inputs.
    direction : {"forward", "backward"}
        Which bound.

    Returns
    -------
    float
        At most 1 if the result is good; infinity for a NaN that exact does not have.

    Raises
    ------
    TypeError
        If an argument is no array, or exact is not float64.
    ValueError
        If shapes differ, or there is no bound for that direction and dtype.

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> from psa_cupy import testing
    >>> qkv = np.random.default_rng(0).standard_normal((1, 2 * 128, 10, 10), dtype=np.float32)
    >>> exact = psa_cupy.psa_forward(qkv.astype(np.float64), num_heads=2).out
    >>> testing.absolute_ratio(psa_cupy.psa_forward(qkv, num_heads=2).out, exact, "forward") <= 1
    True

    """
    require_arrays("absolute_ratio", {"result": result, "exact": exact})
    require_dtype("absolute_ratio", "exact", exact, np.dtype(np.float64))
    require_shape("absolute_ratio", "exact", exact, result.shape)
    if (direction, result.dtype.name) not in ABSOLUTE_BOUNDS:
        given = f"direction is {direction!r}, dtype of result {result.dtype}"
        known = ", ".join(" ".join(pair) for pair in ABSOLUTE_BOUNDS)
        raise ValueError(f"absolute_ratio: {given}, expected one of {known}")
    bound = ABSOLUTE_BOUNDS[direction, result.dtype.name]
    xp = _namespace(result)
    with np.errstate(all="ignore"):
        error = abs(_float64(result) - _float64(exact))
        return _largest(_ratios(error, xp.full(error.shape, bound), comparable=xp.isfinite(exact)))


# ---- exact results and yardstick, tile by tile


class _Rounding:
    """How the yardstick rounds to a dtype: results, and operands (P, dS, O), which it shifts meanwhile."""

    def __init__(self, dtype, shift: float):
        self._dtype, self._shift = dtype, shift

    def result(self, x):
        """Float64 numbers rounded to the dtype's; what would overflow stays as it is."""
        if self._dtype == np.float64:
            return x
        rounded = _float64(x.astype(self._dtype))
        xp = _namespace(x)
        return xp.where(xp.isfinite(rounded), rounded, x)

    def operand(self, x):
        """Float64 numbers rounded to the dtype's, all of them divided by the shift."""
        return self.result(x * self._shift) / self._shift


def _judged(ratios_with, q, k, v) -> dict[str, float]:
    """The largest ratio of all heads, each head's to the bound of its most lenient yardstick."""
    ratios = ratios_with(_Rounding(q.dtype, 1.0))
    if min(q.shape[1], k.shape[1]) * min(q.shape[2], v.shape[2]) < _LEAST_ELEMENTS:
        for shift in _SHIFTS:
            if all(_largest(of_heads) <= 1 for of_heads in ratios.values()):
                break
            others = ratios_with(_Rounding(q.dtype, shift))
            ratios = {name: _namespace(q).minimum(ratios[name], others[name]) for name in ratios}
    return {name: _largest(of_heads) for name, of_heads in ratios.items()}


class _Tile:
    """Some rows of attention, exact and as the yardstick has them."""

    def __init__(self, queries, keys, values, scale: float, rounding: _Rounding):
        xp = _namespace(queries)
        scores = scale * (queries @ keys.transpose(0, 2, 1))
        self.score_magnitude = abs(scale) * (abs(queries) @ abs(keys).transpose(0, 2, 1))
        row_max = scores.max(axis=2, keepdims=True)
        weights = xp.exp(scores - row_max)
        row_sum = weights.sum(axis=2, keepdims=True)
        self.lse = (row_max + xp.log(row_sum))[..., 0]
        self.o = weights @ values / row_sum
        o = rounding.operand(weights) @ values / row_sum
        self.o_yardstick, self.o_operand = rounding.result(o), rounding.operand(o)
        self.o_magnitude = weights @ abs(values) / row_sum
        self.p = weights / row_sum


@np.errstate(all="ignore")
def _forward_ratios(q, k, v, o, lse, scale: float, rounding: _Rounding) -> dict:
    xp = _namespace(o)
    if k.shape[1] == 0:  # a sum over no keys
        return {"o": _exactly(o, 0), "lse": _exactly(lse, -xp.inf)}
    most_score, most_lse, lse_error = xp.zeros((3, q.shape[0]))
    comparable = _finite_heads(q, k, v)
    norms = _Norms(o, comparable)
    for heads, row_slices in _tiles(q, k):
        keys, values = _float64(k[heads]), _float64(v[heads])
        for rows in row_slices:
            tile = _Tile(_float64(q[heads, rows]), keys, values, scale, rounding)
            norms.add(heads, rows, o[heads, rows], tile.o, tile.o_yardstick, tile.o_magnitude)
            _keep_most(most_score, heads, tile.score_magnitude)
            _keep_most(most_lse, heads, abs(tile.lse))
            _keep_most(lse_error, heads, abs(_float64(lse[heads, rows]) - tile.lse))
    lse_bound = _accumulator_roundoff(o.dtype) * (24 + 4 * most_score + 2 * most_lse)
    return {
        "o": norms.ratios(most_score),
        "lse": _ratios(lse_error, lse_bound, comparable),
    }


@np.errstate(all="ignore")
def _backward_ratios(d_o, q, k, v, d_q, d_k, d_v, branch, scale: float, rounding: _Rounding) -> dict:
    if k.shape[1] == 0:
        return {"d_q": _exactly(d_q, 0), "d_k": _exactly(d_k, 0), "d_v": _exactly(d_v, 0)}
    xp = _namespace(q)
    most_score, every = xp.zeros(q.shape[0]), slice(None)
    comparable = _finite_heads(d_o, q, k, v, *(() if branch is None else (branch,)))
    d_q_norms, d_k_norms, d_v_norms = (_Norms(result, comparable) for result in (d_q, d_k, d_v))
    for heads, row_slices in _tiles(q, k):
        keys, values = _float64(k[heads]), _float64(v[heads])
        # Each (exact, yardstick, magnitude), added up over the queries.
        d_keys, d_values = xp.zeros((3, *keys.shape)), xp.zeros((3, *values.shape))
        if branch is not None:
            d_values += _float64(branch[heads])
            xp.abs(d_values[2], out=d_values[2])
        for rows in row_slices:
            queries, d_rows = _float64(q[heads, rows]), _float64(d_o[heads, rows])
            tile = _Tile(queries, keys, values, scale, rounding)
            _keep_most(most_score, heads, tile.score_magnitude)
            exact, yardstick, magnitude = _score_gradients(tile, d_rows, values, rounding)
            d_queries = (
                scale * (exact @ keys),
                rounding.result(scale * (yardstick @ keys)),
                abs(scale) * (magnitude @ abs(keys)),
            )
            d_q_norms.add(heads, rows, d_q[heads, rows], *d_queries)
            d_keys[0] += scale * (exact.transpose(0, 2, 1) @ queries)
            d_keys[1] += scale * (yardstick.transpose(0, 2, 1) @ queries)
            d_keys[2] += abs(scale) * (magnitude.transpose(0, 2, 1) @ abs(queries))
            d_values[0] += tile.p.transpose(0, 2, 1) @ d_rows
            d_values[1] += rounding.operand(tile.p).transpose(0, 2, 1) @ d_rows
            d_values[2] += tile.p.transpose(0, 2, 1) @ abs(d_rows)
        d_k_norms.add(heads, every, d_k[heads], d_keys[0], rounding.result(d_keys[1]), d_keys[2])
        d_v_norms.add(heads, every, d_v[heads], d_values[0], rounding.result(d_values[1]), d_values[2])
    norms = {"d_q": d_q_norms, "d_k": d_k_norms, "d_v": d_v_norms}
    return {name: n.ratios(most_score) for name, n in norms.items()}


def _score_gradients(tile: _Tile, d_rows, values, rounding: _Rounding):
    """The gradient of a tile's scaled scores: exact, the yardstick's, and in absolute values."""
    d_p = d_rows @ values.transpose(0, 2, 1)
    exact = tile.p * (d_p - (d_rows * tile.o).sum(axis=2, keepdims=True))
    yardstick = tile.p * (d_p - (d_rows * tile.o_operand).sum(axis=2, keepdims=True))
    magnitude = abs(d_rows) @ abs(values).transpose(0, 2, 1)
    magnitude += abs(d_rows * tile.o).sum(axis=2, keepdims=True)
    magnitude *= tile.p
    return exact, rounding.operand(yardstick), magnitude


class _Norms:
    """Squares, by token, of one result's error, the yardstick's, x* and X; norms over runs of tokens."""

    def __init__(self, result, comparable):
        self._xp, self._dtype, self._comparable = _namespace(result), result.dtype, comparable
        bh, tokens, channels = result.shape
        self._runs = _runs(tokens, channels)
        self._squares = self._xp.zeros((4, bh, tokens))

    def add(self, heads, rows, result, exact, yardstick, magnitude) -> None:
        """Set what is known of some rows of some heads."""
        parts = (_float64(result) - exact, yardstick - exact, exact, magnitude)
        for squares, part in zip(self._squares, parts, strict=True):
            squares[heads, rows] = (part * part).sum(axis=2)

    def ratios(self, most_score):
        """Error / bound of each head's worst run."""
        worst = self._xp.zeros(self._comparable.shape)
        for run in self._runs:
            worst = self._xp.maximum(worst, self._run_ratios(run, most_score))
        return worst

    def _run_ratios(self, run: slice, most_score):
        error, yardstick, exact, magnitude = self._xp.sqrt(self._squares[:, :, run].sum(axis=2))
        bound = (
            1.5 * yardstick
            + unit_roundoff(self._dtype) * exact / 4
            + _accumulator_roundoff(self._dtype) * (8 + 4 * most_score) * magnitude
        )
        return _ratios(error, bound, self._comparable)


def _runs(tokens: int, channels: int) -> list[slice]:
    """Equal runs of tokens, as many as leave each with `_LEAST_TOKENS` and `_LEAST_ELEMENTS`."""
    count = max(1, min(tokens // _LEAST_TOKENS, tokens * channels // _LEAST_ELEMENTS))
    edges = [tokens * i // count for i in range(count + 1)]
    return [slice(*pair) for pair in itertools.pairwise(edges)]


# ---- small helpers


def _check_attention(function: str, scale, **arrays) -> float:
    """Check arrays by their names in attention: broadcasting would judge results by the wrong elements.

    Returns the scale, checked too.
    """
    require_arrays(function, arrays)
    dtype = require_dtype(function, "q", arrays["q"])
    bh, queries, key_dim = require_ndim(function, "q", arrays["q"], ("BH", "Nq", "D"))
    _, keys, value_dim = require_ndim(function, "v", arrays["v"], ("BH", "Nk", "Dv"))
    of_queries, of_keys, of_values = (bh, queries, key_dim), (bh, keys, key_dim), (bh, keys, value_dim)
    shapes = {"q": of_queries, "k": of_keys, "v": of_values, "lse": (bh, queries)}
    shapes |= {"d_q": of_queries, "d_k": of_keys, "d_v": of_values}
    shapes |= dict.fromkeys(("o", "d_o"), (bh, queries, value_dim))
    for name, array in arrays.items():
        require_dtype(function, name, array, lse_dtype(dtype) if name == "lse" else dtype)
        require_shape(function, name, array, shapes[name])
    return softmax_scale(function, scale, key_dim, dtype)


def _check_block(function: str, num_heads, key_dim, scale, **arrays) -> float:
    """The same by their names in the block."""
    require_arrays(function, arrays)
    dtype = require_dtype(function, "qkv", arrays["qkv"])
    geometry = PSAGeometry.from_qkv(function, arrays["qkv"].shape, num_heads, key_dim)
    expected = specification(geometry, dtype)
    for name, array in arrays.items():
        require_dtype(function, name, array, expected[name][1])
        require_shape(function, name, array, expected[name][0])
    return softmax_scale(function, scale, geometry.key_dim, dtype)


def _finite_heads(*inputs):
    """Whether all inputs of a head are finite. (If they are too large even for float64, nothing passes.)"""
    xp = _namespace(inputs[0])
    finite = [xp.isfinite(_float64(array)).all(axis=(1, 2)) for array in inputs]
    return xp.stack(finite).all(axis=0)


def _ratios(error, bound, comparable):
    """Error / bound; infinity for NaN, 0 for 0 / 0 and for what is not comparable."""
    xp = _namespace(error)
    ratio = xp.where(error == 0, 0, error / bound)
    ratio = xp.where(xp.isnan(ratio) | ~xp.isfinite(bound), xp.inf, ratio)
    return xp.where(comparable, ratio, 0)


def _exactly(array, value):
    """For each head, 0 if every element equals the value, else infinity."""
    ratios = _namespace(array).zeros(array.shape[0])
    ratios[(_float64(array) != value).any(axis=tuple(range(1, array.ndim)))] = np.inf
    return ratios


def _largest(ratios) -> float:
    return float(ratios.max()) if ratios.size else 0.0


def _keep_most(most, heads, values) -> None:
    """most[heads] = the maximum of that and of each head's values; NaN stays."""
    largest = values.max(axis=tuple(range(1, values.ndim)))
    most[heads] = _namespace(most).maximum(most[heads], largest)


def _tiles(q, k):
    most_scores = _TILE_SCORES["cupy" if is_cupy(q) else "numpy"]
    return tiles(q.shape[0], q.shape[1], k.shape[1], most_scores)


def _accumulator_roundoff(dtype) -> float:
    return 2.0**-53 if dtype == np.float64 else 2.0**-24


def _float64(array):
    return array.astype(np.float64)


def _namespace(array):
    return cupy_if_imported() if is_cupy(array) else np
