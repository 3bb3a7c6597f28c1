"""The bounds accept the flash formula, computed in the dtype, and reject the mistakes that kernels make."""

import re

import numpy as np
import pytest
from hypothesis import given, strategies as st

import psa_cupy
from psa_cupy import reference, testing
from psa_cupy.testing import GradientError, bounds, gradcheck

from .executors import executors
from .strategies import DTYPES, KEY_DIMS, MAGNITUDES, normal, problems, seeds

BFLOAT16 = DTYPES[1]


# ---- the flash formula as a kernel computes it: float32 (float64), online over chunks of keys


def accumulator(dtype):
    return np.float64 if dtype == np.float64 else np.float32


def dot(a, b):
    """One multiply-add after the other: what a kernel does, and worse than BLAS's blocks."""
    total = np.zeros((*a.shape[:2], b.shape[1]), a.dtype)
    for channel in range(a.shape[2]):
        total += a[:, :, None, channel] * b[:, None, :, channel]
    return total


def flash_forward(q, k, v, scale=None, chunk=16):
    dtype, work = q.dtype, accumulator(q.dtype)
    q, k, v = (x.astype(work) for x in (q, k, v))
    scores = dot(q, k) * work(q.shape[2] ** -0.5 if scale is None else scale)
    row_max = np.full((*q.shape[:2], 1), -np.inf, work)
    row_sum, o = np.zeros_like(row_max), np.zeros((*q.shape[:2], v.shape[2]), work)
    for start in range(0, k.shape[1], chunk):
        part = scores[:, :, start : start + chunk]
        new_max = np.maximum(row_max, part.max(axis=2, keepdims=True))
        p, shrink = np.exp(part - new_max), np.exp(row_max - new_max)
        row_sum = row_sum * shrink + p.sum(axis=2, keepdims=True)
        o = o * shrink + p.astype(dtype).astype(work) @ v[:, start : start + chunk]
        row_max = new_max
    return (o / row_sum).astype(dtype), (row_max + np.log(row_sum))[..., 0]


def flash_backward(d_o, q, k, v, o, lse, scale=None, with_delta=True):
    dtype, work = q.dtype, accumulator(q.dtype)
    scale = work(q.shape[2] ** -0.5 if scale is None else scale)
    d_o, q, k, v, o = (x.astype(work) for x in (d_o, q, k, v, o))
    p = np.exp(dot(q, k) * scale - lse[..., None])
    delta = (d_o * o).sum(axis=2, keepdims=True) if with_delta else 0
    d_scores = (p * (dot(d_o, v) - delta)).astype(dtype).astype(work)
    p = p.astype(dtype).astype(work)
    d_q, d_k = scale * (d_scores @ k), scale * (d_scores.transpose(0, 2, 1) @ q)
    return tuple(x.astype(dtype) for x in (d_q, d_k, p.transpose(0, 2, 1) @ d_o))


def most(ratios):
    return max(ratios.values())


# ---- good results pass


@given(
    problems(tokens=(1, 7, 31, 63, 65, 127, 129), max_bh=2, halves=False),
    st.sampled_from((None, 0.0, -0.1)),
)
def test_the_flash_formula_passes(p, scale):
    q, k, v = p.attention_inputs()
    d_o = normal((*q.shape[:2], p.value_dim), p.dtype, p.seed + 1)
    o, lse = flash_forward(q, k, v, scale)
    forward = testing.attention_forward_ratios(q, k, v, o, lse, scale=scale)
    backward = testing.attention_backward_ratios(
        d_o, q, k, v, *flash_backward(d_o, q, k, v, o, lse, scale), scale=scale
    )
    assert set(forward) == {"o", "lse"} and set(backward) == {"d_q", "d_k", "d_v"}
    assert most(forward) <= 1 and most(backward) <= 1


@given(problems(tokens=(1, 7, 33, 129, 400), max_bh=2, magnitudes=MAGNITUDES[:3]))
def test_the_reference_passes(p):
    out, lse = reference.psa_forward(p.qkv(), p.num_heads)
    branch = p.d_v_branch()
    d_qkv = reference.psa_backward(p.d_out(), p.qkv(), out, lse, p.num_heads, d_v_branch=branch)
    assert most(testing.psa_forward_ratios(p.qkv(), out, lse, p.num_heads)) <= 0.67
    ratios = testing.psa_backward_ratios(p.d_out(), p.qkv(), d_qkv, p.num_heads, d_v_branch=branch)
    assert most(ratios) <= 0.67
    without = testing.psa_backward_ratios(p.d_out(), p.qkv(), d_qkv, p.num_heads)
    assert without["d_v"] > 1 and without["d_q"] <= 0.67


@pytest.mark.parametrize("tokens", [1, 2, 7, 31])
@pytest.mark.parametrize("key_dim", KEY_DIMS[:2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_heads_do_not_fail_by_chance(dtype, key_dim, tokens):
    """Norms of few numbers scatter: here are many heads, each with a norm of its own."""
    q, k, v, d_o = (normal((200, tokens, key_dim), dtype, i) for i in range(4))
    o, lse = flash_forward(q, k, v)
    assert most(testing.attention_forward_ratios(q, k, v, o, lse)) <= 1
    gradients = flash_backward(d_o, q, k, v, o, lse)
    assert most(testing.attention_backward_ratios(d_o, q, k, v, *gradients)) <= 1


@pytest.mark.parametrize("magnitude", [30.0, 1e5])
@pytest.mark.parametrize("key_dim", [1, 32, 128])
@pytest.mark.parametrize("tokens", [1, 129])
def test_cancelling_scores_pass(tokens, key_dim, magnitude):
    """One score near zero is the sum of large terms: float32 cannot be exact relative to the score itself."""
    shape = (200 if tokens == 1 else 2, tokens, key_dim)
    q, k = (normal(shape, np.float32, i, magnitude**0.5) for i in range(2))
    v = normal(shape, np.float32, 2)
    assert most(testing.attention_forward_ratios(q, k, v, *flash_forward(q, k, v))) <= 1


# ---- mistakes fail


def forward_mutants(q, k, v):
    """Name, wrong (o, lse), and who must see it."""
    padded_k, padded_v = (np.concatenate([x, np.zeros_like(x[:, :1])], axis=1) for x in (k, v))
    o, lse = flash_forward(q, k, v)
    stale, half, nan, one = o.copy(), v.shape[2] // 2, o.copy(), o.copy()
    stale[-1, -1] = 0
    nan[0, 5, 3] = np.nan
    one[-1, :, -1] = one[-1, :, 0]
    yield "a dropped key", flash_forward(q, k[:, :-1], v[:, :-1]), {"o", "lse"}
    yield "a key too many", flash_forward(q, padded_k, padded_v), {"lse"}
    yield "a repeated key", flash_forward(q, *(np.append(x, x[:, -1:], axis=1) for x in (k, v))), {"o", "lse"}
    yield "scale off by 2 percent", flash_forward(q, k, v, 1.02 * q.shape[2] ** -0.5), {"o", "lse"}
    yield "scale of value_dim", flash_forward(q, k, v, v.shape[2] ** -0.5), {"o", "lse"}
    yield "scale forgotten", flash_forward(q, k, v, 1.0), {"o", "lse"}
    yield "scale's sign", flash_forward(q, k, v, -(q.shape[2] ** -0.5)), {"o", "lse"}
    yield "swapped halves", (np.concatenate([o[..., half:], o[..., :half]], axis=2), lse), {"o"}
    yield "heads swapped", (o[::-1], lse[::-1]), {"o", "lse"}
    yield "tokens transposed", transposed(o, lse), {"o", "lse"}
    yield "a stale last row", (stale, lse), {"o"}
    yield "a wrong last channel", (one, lse), {"o"}
    yield "NaN in one element", (nan, lse), {"o"}
    yield "lse in base 2", (o, lse / np.log(2).astype(lse.dtype)), {"lse"}
    yield "lse without the maximum", (o, lse - lse[:, :1]), {"lse"}
    yield "keys and values apart by one", flash_forward(q, k, np.roll(v, 1, axis=1)), {"o"}
    yield "values' fragment swapped", flash_forward(q, k, swapped_neighbours(v)), {"o"}


def transposed(o, lse):
    """Tokens in (W, H) order."""
    order = np.arange(o.shape[1]).reshape(20, -1).T.reshape(-1)
    return o[:, order], lse[:, order]


def swapped_neighbours(x):
    """Two tokens in the middle exchanged."""
    order = np.arange(x.shape[1])
    order[[8, 9]] = order[[9, 8]]
    return x[:, order]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_mistakes_fail(dtype):
    q, k = (normal((2, 400, 32), dtype, i) for i in range(2))
    v = normal((2, 400, 64), dtype, 2)
    assert most(testing.attention_forward_ratios(q, k, v, *flash_forward(q, k, v))) <= 1
    for name, wrong, seen_by in forward_mutants(q, k, v):
        ratios = testing.attention_forward_ratios(q, k, v, *wrong)
        assert all(ratios[result] > 1 for result in seen_by), (name, ratios)


def test_a_key_too_many_is_seen_by_lse_alone():
    """Of values that are all alike the mean with one more, equal, value is the same."""
    q, k = (normal((1, 400, 32), BFLOAT16, i) for i in range(2))
    v = np.ones((1, 400, 64), BFLOAT16)
    one_more = flash_forward(q, *(np.append(x, x[:, -1:], axis=1) for x in (k, v)))
    ratios = testing.attention_forward_ratios(q, k, v, *one_more)
    assert ratios["o"] <= 1 and ratios["lse"] > 50


def backward_mutants(d_o, q, k, v):
    o, lse = flash_forward(q, k, v)
    right = flash_backward(d_o, q, k, v, o, lse)
    d_q, d_k, d_v = right
    with_stale_row = [x.copy() for x in right]
    for x in with_stale_row:
        x[-1, -1] = 0
    everything = {"d_q", "d_k", "d_v"}
    less = [x[:, :-1] for x in (d_o, q, o, lse)]
    yield "a dropped query", (d_q, *flash_backward(less[0], less[1], k, v, *less[2:])[1:]), {"d_k", "d_v"}
    d_q_less = flash_backward(d_o, q, k[:, :-1], v[:, :-1], o, lse)[0]
    yield "a dropped key", (d_q_less, d_k, d_v), {"d_q"}
    yield "no delta", flash_backward(d_o, q, k, v, o, lse, with_delta=False), {"d_q", "d_k"}
    yield "scale forgotten", (d_q * q.dtype.type(32**0.5), d_k * q.dtype.type(32**0.5), d_v), {"d_q", "d_k"}
    yield "scale off by 2 percent", flash_backward(d_o, q, k, v, o, lse, 1.02 * 32**-0.5), everything
    yield "lse of the next row", flash_backward(d_o, q, k, v, o, np.roll(lse, 1, 1)), everything
    yield "o of the next row", flash_backward(d_o, q, k, v, np.roll(o, 1, 1), lse), {"d_q", "d_k"}
    yield "d_o of the other head", flash_backward(d_o[::-1], q, k, v, o, lse), everything
    yield "d_q and d_k exchanged", (d_k, d_q, d_v), {"d_q", "d_k"}
    yield "added twice", tuple(x + x for x in right), everything
    yield "a stale last row", tuple(with_stale_row), everything
    yield "not written", tuple(np.full_like(x, np.nan) for x in right), everything


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_mistakes_fail(dtype):
    q, k = (normal((2, 200, 32), dtype, i) for i in range(2))
    v, d_o = (normal((2, 200, 64), dtype, i) for i in (2, 3))
    for name, wrong, seen_by in backward_mutants(d_o, q, k, v):
        ratios = testing.attention_backward_ratios(d_o, q, k, v, *wrong)
        assert all(ratios[result] > 1 for result in seen_by), (name, ratios)
        assert all(ratio <= 1 for result, ratio in ratios.items() if result not in seen_by), (name, ratios)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [2, 7, 31])
def test_mistakes_in_small_heads_fail(tokens, dtype):
    """Small heads are allowed more yardsticks, but no mistakes."""
    q, k, v, d_o = (normal((1, tokens, 5), dtype, i) for i in range(4))
    o, lse = flash_forward(q, k, v)
    d_q, d_k, d_v = flash_backward(d_o, q, k, v, o, lse)
    wrong_forward = {
        "a dropped key": flash_forward(q, k[:, :-1], v[:, :-1]),
        "a stale row": (
            o * (np.arange(tokens) > 0)[:, None].astype(dtype),
            lse - np.arange(tokens, dtype=lse.dtype) / 1000,
        ),
    }
    for name, wrong in wrong_forward.items():
        ratios = testing.attention_forward_ratios(q, k, v, *wrong)
        assert min(ratios.values()) > 1, (name, ratios)
    wrong_backward = {
        "no delta": (*flash_backward(d_o, q, k, v, o, lse, with_delta=False)[:2], d_v[:, ::-1]),
        "scale off by 5 percent": flash_backward(d_o, q, k, v, o, lse, 1.05 * 5**-0.5),
        "added twice": (d_q + d_q, d_k + d_k, d_v + d_v),
    }
    for name, wrong in wrong_backward.items():
        ratios = testing.attention_backward_ratios(d_o, q, k, v, *wrong)
        assert min(ratios.values()) > 1, (name, ratios)


def test_less_precise_arithmetic_fails():
    """float32 results of products in TF32, and float64 results of float32 arithmetic."""
    q, k, v = (normal((1, 129, 32), np.float32, i) for i in range(3))
    tf32 = [(x.view(np.uint32) + 0x1000 & 0xFFFFE000).view(np.float32) for x in (q, k, v)]
    assert min(testing.attention_forward_ratios(q, k, v, *flash_forward(*tf32)).values()) > 1
    q, k, v = (normal((1, 129, 32), np.float64, i) for i in range(3))
    o, lse = flash_forward(*(x.astype(np.float32) for x in (q, k, v)))
    ratios = testing.attention_forward_ratios(q, k, v, o.astype(np.float64), lse.astype(np.float64))
    assert min(ratios.values()) > 1e3


def test_a_wrong_row_of_a_long_head_fails():
    """One row of 1600 is 2.5 percent of the head's norm: its run of 64 rows sees it."""
    q, k, v = (normal((1, 1600, 8), BFLOAT16, i) for i in range(3))
    o, lse = reference.flash_attention_forward(q, k, v)
    assert testing.attention_forward_ratios(q, k, v, o, lse)["o"] <= 1
    o[0, 1599] *= 1.125
    assert testing.attention_forward_ratios(q, k, v, o, lse)["o"] > 1


# ---- what the ratios mean


def test_a_head_that_is_not_finite_is_not_compared_but_the_others_are():
    qkv = normal((1, 24, 3, 3), np.float32, 0)
    qkv[0, 0, 0, 0] = np.nan  # head 0 of 3
    out, lse = reference.psa_forward(qkv, 3)
    assert np.isnan(out).any() and most(testing.psa_forward_ratios(qkv, out, lse, 3)) <= 1
    out[0, -1, 2, 2] = np.nan  # head 2
    assert testing.psa_forward_ratios(qkv, out, lse, 3)["o"] == np.inf
    lse[0, 1, 0] = np.inf
    assert testing.psa_forward_ratios(qkv, out, lse, 3)["lse"] == np.inf
    d_qkv = reference.psa_backward(np.ones_like(out), qkv, *reference.psa_forward(qkv, 3), 3)
    assert most(testing.psa_backward_ratios(np.ones_like(out), qkv, d_qkv, 3)) <= 1
    d_qkv[0, -1] = np.nan
    assert testing.psa_backward_ratios(np.ones_like(out), qkv, d_qkv, 3)["d_v"] == np.inf


def test_inputs_past_float64_let_nothing_pass():
    """The exact result is not a number then, and whatever stands there was not judged."""
    q, k, v = (normal((1, 5, 4), np.float64, i) * 1e200 for i in range(3))
    o = np.zeros((1, 5, 4))
    assert testing.attention_forward_ratios(q, k, v, o, o[..., 0].copy()) == {"o": np.inf, "lse": np.inf}
    ratios = testing.attention_backward_ratios(v, q, k, v, o, o, o)
    assert ratios == {"d_q": np.inf, "d_k": np.inf, "d_v": np.inf}


def test_exact_zeros_must_be_zero():
    """With scale 0 nothing reaches q and k."""
    q, k, v, d_o = (normal((1, 9, 4), np.float32, i) for i in range(4))
    o, lse = reference.flash_attention_forward(q, k, v, scale=0.0)
    d_q, d_k, d_v = reference.flash_attention_backward(d_o, q, k, v, o, lse, scale=0.0)
    assert testing.attention_backward_ratios(d_o, q, k, v, d_q, d_k, d_v, scale=0)["d_q"] == 0
    d_q[0, 0, 0] = 1e-30
    assert testing.attention_backward_ratios(d_o, q, k, v, d_q, d_k, d_v, scale=0)["d_q"] == np.inf


def test_no_keys():
    q, none = np.ones((2, 3, 4), np.float32), np.ones((2, 0, 4), np.float32)
    o, lse = np.zeros_like(q), np.full((2, 3), -np.inf, np.float32)
    assert testing.attention_forward_ratios(q, none, none, o, lse) == {"o": 0, "lse": 0}
    assert testing.attention_forward_ratios(q, none, none, o + 1, lse) == {"o": np.inf, "lse": 0}
    assert testing.attention_forward_ratios(q, none, none, o, np.zeros_like(lse))["lse"] == np.inf
    assert most(testing.attention_backward_ratios(q, q, none, none, o, none, none)) == 0
    assert testing.attention_backward_ratios(q, q, none, none, q, none, none)["d_q"] == np.inf
    assert most(testing.attention_forward_ratios(none, q, q, none, lse[:, :0])) == 0
    assert most(testing.attention_backward_ratios(none, none, q, q, none, o, o)) == 0
    assert testing.attention_backward_ratios(none, none, q, q, none, q, o)["d_k"] == np.inf


@given(seeds())
def test_ratios_do_not_depend_on_the_tiles(seed):
    q, k, v, d_o = (normal((3, 70, 5), np.float16, seed + i) for i in range(4))
    o, lse = reference.flash_attention_forward(q, k, v)
    gradients = reference.flash_attention_backward(d_o, q, k, v, o, lse)
    tiles = bounds._TILE_SCORES["numpy"]
    try:
        found = []
        for bounds._TILE_SCORES["numpy"] in (tiles, 70 * 7, 1):
            ratios = testing.attention_forward_ratios(q, k, v, o, lse)
            ratios |= testing.attention_backward_ratios(d_o, q, k, v, *gradients)
            found.append(list(ratios.values()))
    finally:
        bounds._TILE_SCORES["numpy"] = tiles
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-6)


def test_the_bound_by_hand():
    """One query, two keys of score 0, v = 1 and 2: o* = 1.5, lse* = ln 2, and the yardstick is exact."""
    q, k, v = np.zeros((1, 1, 1)), np.zeros((1, 2, 1)), np.array([[[1.0], [2.0]]])
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    o, lse = np.array([[[1.5 + 2.0**-20]]], np.float32), np.array([[np.log(2.0) + 2.0**-20]], np.float32)
    ratios = testing.attention_forward_ratios(q, k, v, o, lse)
    u = 2.0**-24
    assert ratios["o"] == pytest.approx(2.0**-20 / (u * 1.5 / 4 + 8 * u * 1.5), rel=1e-12)
    error = float(lse[0, 0]) - np.log(2.0)
    assert ratios["lse"] == pytest.approx(error / (u * (24 + 2 * np.log(2.0))), rel=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_absolute_bounds(dtype):
    qkv, d_out = normal((1, 256, 20, 20), dtype, 0), normal((1, 128, 20, 20), dtype, 1)
    q, k, v = (x.transpose(0, 2, 1) for x in np.split(qkv.reshape(2, 128, 400), (32, 64), axis=1))
    d_o = d_out.reshape(2, 64, 400).transpose(0, 2, 1)
    o, lse = flash_forward(q, k, v)
    exact = reference.flash_attention_forward(*(x.astype(np.float64) for x in (q, k, v)))
    assert testing.absolute_ratio(o, exact[0], "forward") <= 1
    gradients = flash_backward(d_o, q, k, v, o, lse)
    wide = [x.astype(np.float64) for x in (d_o, q, k, v)]
    for gradient, right in zip(gradients, reference.flash_attention_backward(*wide, *exact), strict=True):
        assert testing.absolute_ratio(gradient, right, "backward") <= 1
    o[0, 7, 7] += 3 * testing.ABSOLUTE_BOUNDS["forward", dtype]
    assert testing.absolute_ratio(o, exact[0], "forward") > 1
    o[0, 7, 7] = np.nan
    assert testing.absolute_ratio(o, exact[0], "forward") == np.inf


def test_unit_roundoff():
    for dtype in DTYPES:
        u = testing.unit_roundoff(dtype)
        one = np.ones((), dtype)
        assert (one + dtype.type(2 * u)).astype(np.float64) == 1 + 2 * u
        assert (one + dtype.type(u)).astype(np.float64) == 1  # a tie, to even


@executors("reference", "gpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ratios_where_the_arrays_are(executor, dtype):
    qkv, d_out = normal((2, 3 * 40, 7, 9), dtype, 0), normal((2, 3 * 20, 7, 9), dtype, 1)
    out, lse = reference.psa_forward(qkv, 3)
    d_qkv = reference.psa_backward(d_out, qkv, out, lse, 3)
    expected = testing.psa_forward_ratios(qkv, out, lse, 3)
    expected |= testing.psa_backward_ratios(d_out, qkv, d_qkv, 3, d_v_branch=d_out)
    qkv, d_out, out, lse, d_qkv = map(executor.array, (qkv, d_out, out, lse, d_qkv))
    found = testing.psa_forward_ratios(qkv, out, lse, 3)
    found |= testing.psa_backward_ratios(d_out, qkv, d_qkv, 3, d_v_branch=d_out)
    # In float64 the float64 results themselves, summed in another order, differ by a part of the bound.
    tolerance = {"rel": 1e-2, "abs": 0.3} if dtype == np.float64 else {"rel": 1e-3, "abs": 1e-4}
    assert found == pytest.approx(expected, **tolerance)


# ---- results that are not what they should be


QKV = normal((1, 16, 4, 4), np.float32, 0)  # 2 heads, key_dim 2
OUT, LSE = psa_cupy.psa_forward(QKV, 2)
D_QKV = psa_cupy.psa_backward(OUT, QKV, OUT, LSE, 2)
HEAD = normal((2, 6, 4), np.float32, 0)
O_OF_HEAD, LSE_OF_HEAD = psa_cupy.flash_attention_forward(HEAD, HEAD, HEAD)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: testing.psa_forward_ratios(QKV, OUT.reshape(1, 8, 2, 8), LSE, 2),
            ValueError,
            r"psa_forward_ratios: out has shape \(1, 8, 2, 8\), expected \(1, 8, 4, 4\)",
        ),
        (
            lambda: testing.psa_forward_ratios(QKV, OUT, LSE[:, :, :1], 2),
            ValueError,
            r"psa_forward_ratios: lse has shape \(1, 2, 1\), expected \(1, 2, 16\)",
        ),
        (
            lambda: testing.psa_forward_ratios(QKV, OUT.astype(np.float16), LSE, 2),
            TypeError,
            "psa_forward_ratios: out has dtype float16, expected float32",
        ),
        (
            lambda: testing.psa_backward_ratios(OUT, QKV, D_QKV.astype(np.float16), 2),
            TypeError,
            "psa_backward_ratios: d_qkv has dtype float16, expected float32",
        ),
        (
            lambda: testing.psa_backward_ratios(OUT, QKV, D_QKV.reshape(1, 16, 2, 8), 2),
            ValueError,
            "psa_backward_ratios: d_qkv has shape",
        ),
        (
            lambda: testing.attention_forward_ratios(HEAD, HEAD, HEAD, O_OF_HEAD[..., :1], LSE_OF_HEAD),
            ValueError,
            "attention_forward_ratios: o has shape",
        ),
        (
            lambda: testing.attention_forward_ratios(HEAD, HEAD, HEAD, O_OF_HEAD, LSE_OF_HEAD[:, :1]),
            ValueError,
            "attention_forward_ratios: lse has shape",
        ),
        (
            lambda: testing.attention_backward_ratios(HEAD, HEAD, HEAD, HEAD, HEAD, HEAD[:1], HEAD),
            ValueError,
            "attention_backward_ratios: d_k has shape",
        ),
        (
            lambda: testing.attention_forward_ratios(HEAD, HEAD, HEAD, O_OF_HEAD, LSE_OF_HEAD, scale=np.nan),
            ValueError,
            "attention_forward_ratios: scale is nan",
        ),
        (
            lambda: testing.attention_backward_ratios(*[HEAD] * 7, scale=True),
            TypeError,
            "attention_backward_ratios: scale is a bool",
        ),
        (
            lambda: testing.psa_backward_ratios(OUT, QKV, D_QKV, 2, scale=np.inf),
            ValueError,
            "psa_backward_ratios: scale is inf",
        ),
        (
            lambda: testing.psa_forward_ratios(QKV, OUT, LSE.astype(np.float16), 2),
            TypeError,
            "psa_forward_ratios: lse has dtype float16, expected float32",
        ),
        (
            lambda: testing.psa_forward_ratios([1.0], OUT, LSE, 2),
            TypeError,
            "psa_forward_ratios: qkv is a list",
        ),
        (
            lambda: testing.psa_backward_ratios(OUT[:, :1], QKV, D_QKV, 2),
            ValueError,
            "psa_backward_ratios: d_out has shape",
        ),
        (
            lambda: testing.psa_backward_ratios(OUT, QKV, D_QKV, 2, d_v_branch=OUT[:, :, :1]),
            ValueError,
            "psa_backward_ratios: d_v_branch has shape",
        ),
        (
            lambda: testing.attention_forward_ratios(HEAD, HEAD[:1], HEAD, O_OF_HEAD, LSE_OF_HEAD),
            ValueError,
            "attention_forward_ratios: k has shape",
        ),
        (
            lambda: testing.attention_forward_ratios(HEAD[0], HEAD, HEAD, O_OF_HEAD, LSE_OF_HEAD),
            ValueError,
            "attention_forward_ratios: q has shape",
        ),
        (
            lambda: testing.attention_backward_ratios(HEAD[:, :1], HEAD, HEAD, HEAD, HEAD, HEAD, HEAD),
            ValueError,
            "attention_backward_ratios: d_o has shape",
        ),
        (
            lambda: testing.absolute_ratio(OUT, OUT[:, :1].astype(np.float64), "forward"),
            ValueError,
            "absolute_ratio: exact has shape",
        ),
        (
            lambda: testing.absolute_ratio(OUT, OUT, "forward"),
            TypeError,
            "absolute_ratio: exact has dtype float32, expected float64",
        ),
        (
            lambda: testing.absolute_ratio(OUT.astype(np.float16), OUT.astype(np.float64), "forward"),
            ValueError,
            "absolute_ratio: direction is 'forward', dtype of result float16",
        ),
        (
            lambda: testing.absolute_ratio(OUT, OUT.astype(np.float64), "sideways"),
            ValueError,
            "absolute_ratio: direction is 'sideways'",
        ),
        (
            lambda: testing.unit_roundoff(np.int32),
            TypeError,
            "unit_roundoff: dtype is int32, expected one of float16",
        ),
        (
            lambda: testing.attention_forward_ratios(HEAD, HEAD, HEAD, O_OF_HEAD.tolist(), LSE_OF_HEAD),
            TypeError,
            "attention_forward_ratios: o is a list",
        ),
    ],
)
def test_results_of_another_kind_are_refused(call, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call()


# ---- gradcheck


def square_times(x, y):
    return (x * x).sum(axis=0) * y, x.sum()


def square_times_backward(d_product, d_sum, x, y):
    return 2 * x * (d_product * y) + d_sum, d_product * (x * x).sum(axis=0)


ARRAYS = [normal((3, 4), np.float32, 0), normal((4,), np.float64, 1)]


@executors("reference", "gpu")
def test_gradcheck_accepts(executor):
    arrays = [executor.array(a) for a in ARRAYS]
    assert gradcheck(square_times, square_times_backward, arrays) <= 1e-6
    assert gradcheck(lambda x: x * 0, lambda d, x: x * 0, arrays[:1]) == 0
    assert gradcheck(square_times, lambda *a: (square_times_backward(*a)[0], None), arrays) <= 1e-6
    assert all(executor.to_numpy(a).tobytes() == b.tobytes() for a, b in zip(arrays, ARRAYS, strict=True))


def test_gradcheck_dumps_what_failed():
    def wrong(*arguments):
        d_x, d_y = square_times_backward(*arguments)
        d_x[2, 1] += 0.01
        return d_x, d_y

    with pytest.raises(GradientError) as failure:
        gradcheck(square_times, wrong, ARRAYS)
    message = str(failure.value)
    assert "gradient 0 has relative error" in message and "expected at most 1e-06" in message
    assert "array 0: shape (3, 4)" in message and "array 1: shape (4,)" in message
    assert "output 0: shape (4,)" in message and "output 1: shape ()" in message
    assert "worst of 12 elements tried: [2, 1]" in message and "off by 0.01" in message


@pytest.mark.parametrize(
    "wrong",
    [
        lambda d_x, d_y: (d_x, d_y * (1 + 1e-5)),
        lambda d_x, d_y: (-d_x, d_y),
        lambda d_x, d_y: (d_x * np.nan, d_y),
        lambda d_x, d_y: (d_x[::-1], d_y),
    ],
)
def test_gradcheck_rejects(wrong):
    with pytest.raises(GradientError):
        gradcheck(square_times, lambda *a: wrong(*square_times_backward(*a)), ARRAYS)


def test_gradcheck_says_what_backward_should_have_given():
    with pytest.raises(ValueError, match=r"backward gave 1 gradients, expected one for each of 2 arrays"):
        gradcheck(square_times, lambda *a: square_times_backward(*a)[0], ARRAYS)
    with pytest.raises(ValueError, match=r"gradient 0 has shape \(4, 3\), expected \(3, 4\)"):
        gradcheck(square_times, lambda *a: (square_times_backward(*a)[0].T, None), ARRAYS)
    with pytest.raises(ValueError, match="arrays is empty"):
        gradcheck(square_times, square_times_backward, [])


def cube(x):
    return x * x * x


@pytest.mark.parametrize(
    ("forward", "backward", "arrays", "options", "error", "message"),
    [
        (cube, lambda d, x: None, ARRAYS[:1], {}, ValueError, "backward gave no gradient"),
        (
            cube,
            lambda d, x: 7 * x,
            ARRAYS[:1],
            {"eps": 1e-16},
            ValueError,
            r"eps is 1e-16, expected at least",
        ),
        (cube, lambda d, x: 7 * x, ARRAYS[:1], {"eps": 0.0}, ValueError, r"eps is 0.0, expected at least"),
        (cube, lambda d, x: 7 * x, ARRAYS[:1], {"eps": np.nan}, ValueError, r"eps is nan, expected at least"),
        (
            cube,
            lambda d, x: 7 * x,
            ARRAYS[:1],
            {"rtol": np.inf},
            ValueError,
            "rtol is inf, expected a positive",
        ),
        (cube, lambda d, x: 7 * x, ARRAYS[:1], {"rtol": 0}, ValueError, "rtol is 0.0, expected a positive"),
        (cube, lambda d, x: 0 * x, ARRAYS[:1], {"rtol": 1.0}, ValueError, "rtol is 1.0, expected a positive"),
        (lambda x: x / 0, lambda d, x: d, ARRAYS[:1], {}, ValueError, "output 0 has NaN or infinity"),
        (
            cube,
            lambda d, x: 1.0,
            ARRAYS[:1],
            {},
            TypeError,
            "gradient 0 is a float, expected a NumPy or CuPy",
        ),
        (cube, cube, [[1.0]], {}, TypeError, "array 0 is a list, expected a NumPy or CuPy array"),
        (cube, cube, [None], {}, TypeError, "array 0 is None, expected an array of real numbers"),
        (
            cube,
            cube,
            [ARRAYS[0] * 1j],
            {},
            TypeError,
            "array 0 is of dtype complex64, expected an array of real",
        ),
        (lambda x: x > 0, cube, ARRAYS[:1], {}, TypeError, "output 0 has dtype bool, expected float64"),
        (lambda x: (), lambda x: 7 * x, ARRAYS[:1], {}, ValueError, "the function gave no element, expected"),
        (lambda x: [], lambda x: 7 * x, ARRAYS[:1], {}, ValueError, "the function gave no element, expected"),
        (lambda x: x[:0], lambda d, x: 7 * x, ARRAYS[:1], {}, ValueError, "the function gave no element"),
        (
            cube,
            lambda d, x: 7 * x,
            [np.ones((0, 3))],
            {},
            ValueError,
            "arrays is empty, expected at least one",
        ),
        (
            lambda x, y: x * y.sum(),
            lambda d, x, y: (None, y),
            [np.ones(3), np.ones(0)],
            {},
            ValueError,
            "backward gave no gradient, expected at least one with an element",
        ),
        (cube, cube, 1.5, {}, TypeError, "arrays is a float, expected a sequence of arrays"),
        (cube, cube, np.ones(()), {}, TypeError, "arrays is a ndarray, expected a sequence of arrays"),
        (cube, cube, None, {}, TypeError, "arrays is a NoneType, expected a sequence of arrays"),
        *(
            (cube, cube, [np.zeros(3, dtype)], {}, TypeError, rf"array 0 is of dtype .*{name}.*, expected an")
            for dtype, name in {"M8[s]": "datetime", "m8[s]": "timedelta", "O": "object", "U3": "U3"}.items()
        ),
        (cube, cube, [np.zeros(3, [("a", "f4")])], {}, TypeError, r"array 0 is of dtype \[\('a', '<f4'\)\]"),
        (cube, lambda d, x: x * 1j, ARRAYS[:1], {}, TypeError, "gradient 0 is of dtype complex128, expected"),
        (
            cube,
            lambda d, x: x,
            [np.ma.ones(3)],
            {},
            TypeError,
            "array 0 is a MaskedArray, expected a NumPy or",
        ),
        (
            cube,
            lambda d, x: d,
            [np.array([1, np.nan])],
            {},
            ValueError,
            "array 0 has NaN or infinity, expected",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gradcheck_refuses_what_would_check_nothing(forward, backward, arrays, options, error, message):
    with pytest.raises(error, match=f"^gradcheck: {message}"):
        gradcheck(forward, backward, arrays, **options)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        *((name, "a", TypeError, f"{name} is a str, expected") for name in ("eps", "rtol", "seed")),
        *((name, None, TypeError, f"{name} is a NoneType, expected") for name in ("eps", "rtol", "seed")),
        *((name, True, TypeError, f"{name} is a bool, expected") for name in ("eps", "rtol", "seed")),
        *((name, 1j, TypeError, f"{name} is a complex, expected") for name in ("eps", "rtol", "seed")),
        *((name, -1, ValueError, f"{name} is -1.*, expected") for name in ("eps", "rtol", "seed")),
        *((name, np.nan, ValueError, f"{name} is nan, expected") for name in ("eps", "rtol")),
        *((name, 10**400, ValueError, f"{name} is inf, expected") for name in ("eps", "rtol")),
        ("seed", 1.5, TypeError, "seed is a float, expected an integer >= 0"),
    ],
)
def test_gradcheck_takes_numbers(name, value, error, message):
    with pytest.raises(error, match=f"^gradcheck: {message}"):
        gradcheck(cube, lambda d, x: 3 * x * x * d, ARRAYS[:1], **{name: value})


def test_gradcheck_takes_0d_arrays():
    """Arithmetic on them answers with scalars; the functions get arrays all the same."""
    kinds = set()

    def forward(x):
        kinds.add(type(x))
        return x**2

    for x in (np.array(3.0), np.float32(3)):
        assert gradcheck(forward, lambda d, x: 2 * x * d, [x]) <= 1e-6
        with pytest.raises(GradientError):
            gradcheck(forward, lambda d, x: 2.001 * x * d, [x])
    assert kinds == {np.ndarray}


# What noise may hide, and what it may not

SQUARE = normal((50, 50), np.float64, 0)


@pytest.mark.parametrize("offset", [10.0**k for k in range(21)])
@pytest.mark.parametrize("wrong", [0.0, 1.001, -1.0])
@pytest.mark.filterwarnings("error")
def test_gradcheck_passes_no_wrong_gradient_of_large_outputs(offset, wrong):
    """However large: if rounding hides the error, it says so."""
    for array, function, gradient in (
        (SQUARE, lambda a: a + offset, lambda d, a: d),
        (SQUARE, lambda a: a * a + offset, lambda d, a: 2 * a * d),
        (SQUARE[:1, :3], lambda a: np.exp(a).sum() + offset, lambda d, a: d * np.exp(a)),
    ):
        with pytest.raises((GradientError, ValueError)) as caught:
            gradcheck(function, lambda d, a, g=gradient: wrong * g(d, a), [array])
        if caught.type is ValueError:
            assert re.match("gradcheck: gradient 0 differs by .* use a larger eps", str(caught.value))


def test_gradcheck_passes_nothing_off_by_more_than_twice_rtol():
    """Along the direction, relative to the larger of the values and the gradient's norm."""
    for offset in (0.0, 1e2, 1e3, 1e4, 1e5, 1e6):
        for factor in (1e-5, 1e-4, 1e-3):
            with pytest.raises((GradientError, ValueError)):
                gradcheck(lambda a: a * a + offset, lambda d, a: 2 * a * d * (1 + factor), [SQUARE])  # noqa: B023


def test_gradcheck_tells_with_a_larger_eps_or_without_the_constant():
    """What its message advises helps."""
    with pytest.raises(ValueError, match="use a larger eps, or take a constant off the outputs"):
        gradcheck(lambda a: a * a + 1e8, lambda d, a: 2 * a * d, [SQUARE])
    assert gradcheck(lambda a: a * a + 1e8, lambda d, a: 2 * a * d, [SQUARE], eps=1.0) <= 1e-6
    assert gradcheck(lambda a: (a * a + 1e8) - 1e8, lambda d, a: 2 * a * d, [SQUARE], rtol=1e-3) <= 1e-3
    with pytest.raises(GradientError):
        gradcheck(lambda a: a * a + 1e8, lambda d, a: 2.001 * a * d, [SQUARE], eps=1.0)


def softmax(a):
    e = np.exp(a - a.max())
    return e / e.sum()


ROW = normal((6,), np.float64, 2)


@pytest.mark.parametrize(
    ("forward", "backward", "arrays"),
    [
        pytest.param(
            lambda a: softmax(a).sum(),
            lambda d, a: d * (softmax(a) - softmax(a) * softmax(a).sum()),
            [ROW],
            id="a constant, with rounding",
        ),
        pytest.param(lambda a, b: b * b, lambda d, a, b: (0 * a, 2 * b * d), [ROW, ROW], id="not used"),
        pytest.param(
            lambda a, b: np.maximum(a, 0) + b,
            lambda d, a, b: (d * (a > 0), d),
            [-abs(ROW), ROW],
            id="flat here",
        ),
        pytest.param(
            lambda a: (a - 1) ** 3 + 1, lambda d, a: 3 * d * (a - 1) ** 2, [np.ones(4)], id="saddle"
        ),
        pytest.param(
            lambda a: ((a - 1) ** 2).sum() + 3, lambda d, a: 2 * d * (a - 1), [np.ones(4)], id="minimum"
        ),
        pytest.param(lambda a: np.cos(a), lambda d, a: -d * np.sin(a), [np.zeros(4)], id="maximum at zero"),
        pytest.param(
            lambda a, b: (a * a, b * 1e12),
            lambda d, e, a, b: (2 * a * d, 1e12 * e),
            [ROW, ROW],
            id="beside a large output",
        ),
    ],
)
def test_gradcheck_passes_right_gradients_that_are_small(forward, backward, arrays):
    assert gradcheck(forward, backward, arrays) <= 1e-6


def test_gradcheck_passes_attention_to_one_key():
    """The gradients of q and k are zero but for rounding."""
    for seed in range(5):
        q, k, v = (normal((2, n, 4), np.float64, seed + i) for i, n in enumerate((3, 1, 1)))

        def forward(q, k, v):
            return psa_cupy.flash_attention_forward(q, k, v)[0]

        def backward(d_o, q, k, v):
            return psa_cupy.flash_attention_backward(d_o, q, k, v, *psa_cupy.flash_attention_forward(q, k, v))

        assert gradcheck(forward, backward, [q, k, 100 * v]) <= 1e-6


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [1e-300, 1e-200, 1e-100, 1e100, 1e150])
def test_gradcheck_at_any_size(size):
    """Squares of these under- or overflow."""
    assert gradcheck(lambda a: 2 * a, lambda d, a: 2 * d, [size * ROW]) <= 1e-6
    assert gradcheck(lambda a: a / size, lambda d, a: d / size, [size * ROW]) <= 1e-6
    with pytest.raises(GradientError):
        gradcheck(lambda a: a / size, lambda d, a: 1.001 * d / size, [size * ROW])
    if size < 1:
        assert gradcheck(lambda a: a * a, lambda d, a: 2 * a * d, [size * ROW]) <= 1e-6


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gradcheck_rejects_a_gradient_where_differences_are_not_numbers():
    with pytest.raises(GradientError):
        gradcheck(np.sqrt, lambda d, x: np.zeros_like(x), [np.zeros(3)])


def test_gradcheck_takes_a_function_that_changes_its_argument():
    def doubled(x):
        x *= 2
        return x

    arrays = [normal((3,), np.float64, 0)]
    assert gradcheck(doubled, lambda d, x: 2 * d, arrays) <= 1e-6
    with pytest.raises(GradientError):
        gradcheck(doubled, lambda d, x: 4 * d, arrays)
