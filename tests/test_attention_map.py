"""Rows of the attention matrix: against the definition, against psa_forward, and wrong calls."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, strategies as st

from psa_cupy import reference
from psa_cupy.attention_map import attention_map

from .executors import executors
from .strategies import DTYPES, Problem, normal, problems


def every_row(p: Problem, scale):
    """softmax(scale * Q K^T) of every head, (B, heads, N, N)."""
    q, k, _ = (x.astype(np.float64) for x in p.attention_inputs())
    scores = scale * np.einsum("bnd,bmd->bnm", q, k)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    g = p.geometry
    return (weights / weights.sum(axis=2, keepdims=True)).reshape(g.batch, g.num_heads, g.tokens, g.tokens)


@executors("reference", "gpu")
@given(
    p=problems(tokens=(1, 7, 33, 129), halves=False),
    scale=st.sampled_from((None, 0.0, -0.5)),
    seed=st.integers(0, 9),
)
def test_chosen_rows(executor, p, scale, seed):
    queries = np.random.default_rng(seed).integers(0, p.geometry.tokens, seed).tolist()  # some twice, or none
    qkv = executor.array(p.qkv())
    rows = attention_map(qkv, p.num_heads, queries, key_dim=p.key_dim, scale=scale)
    assert isinstance(rows, type(qkv))
    assert rows.dtype == (np.float64 if p.dtype == np.float64 else np.float32)
    expected = every_row(p, p.key_dim**-0.5 if scale is None else scale)[:, :, queries]
    # exp makes of a score's last bit, 2^-53 of its terms, an error that large in p
    rounding = 1e-13 * (1 + 100 * p.magnitude) + (0 if p.dtype == np.float64 else 2.0**-24)
    assert rows.shape == expected.shape
    np.testing.assert_allclose(executor.to_numpy(rows), expected, rtol=rounding, atol=1e-38)


@executors("reference", "gpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_times_values_are_attention(executor, dtype):
    qkv = normal((2, 3 * 20, 4, 5), dtype, 0)
    rows = executor.to_numpy(attention_map(executor.array(qkv), 3, range(20)))
    out, lse = reference.psa_forward(qkv.astype(np.float64), 3)
    v = reference.extract_v(qkv, 3).astype(np.float64).reshape(2, 3, 10, 20)
    np.testing.assert_allclose(np.einsum("bhnm,bhcm->bhcn", rows, v).reshape(out.shape), out, atol=1e-5)
    np.testing.assert_allclose(rows.sum(axis=3), 1, rtol=1e-6)
    assert lse.shape == rows.shape[:3]


@executors("reference", "gpu")
def test_queries_of_any_kind(executor):
    qkv = executor.array(normal((1, 16, 3, 3), np.float32, 0))
    expected = executor.to_numpy(attention_map(qkv, 2, [8, 0]))
    kinds = [(8, 0), np.array([8, 0], np.uint8), np.array([0, 8])[::-1], executor.xp.asarray([8, 0])]
    for queries in kinds:
        assert np.array_equal(executor.to_numpy(attention_map(qkv, 2, queries)), expected)
    for none in ([], (), np.zeros(0), range(0)):
        assert attention_map(qkv, 2, none).shape == (1, 2, 0, 9)


@pytest.mark.parametrize("shape", [(0, 16, 3, 3), (1, 16, 0, 3), (1, 16, 3, 0)])
def test_zero_sizes(shape):
    assert attention_map(np.ones(shape), 2, []).shape == (shape[0], 2, 0, shape[2] * shape[3])
    if shape[0] == 0:
        assert attention_map(np.ones(shape), 2, [8]).shape == (0, 2, 1, 9)


def test_memory():
    """Two rows of 6400 tokens take what they need: the whole matrix would take 655 MB."""
    qkv = normal((1, 2 * 128, 80, 80), np.float32, 0)
    tracemalloc.start()
    try:
        attention_map(qkv, 2, [0, 6399])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20e6


def test_nan_stays_in_its_head():
    qkv = normal((1, 16, 3, 3), np.float32, 0)
    good = attention_map(qkv, 2, [4])
    qkv[0, 2, 0, 0] = np.nan  # a key of head 0
    rows = attention_map(qkv, 2, [4])
    assert np.isnan(rows[0, 0]).all() and np.array_equal(rows[0, 1], good[0, 1])


QKV = np.zeros((1, 16, 2, 3), np.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0], 2, [0]), TypeError, "qkv is a list, expected a NumPy or CuPy array"),
        ((QKV.astype(int), 2, [0]), TypeError, "qkv has dtype int64, expected one of"),
        ((QKV, 3, [0]), ValueError, "qkv has 16 channels, which 3 heads do not divide"),
        ((QKV, 2, [0.0]), TypeError, "queries has dtype float64, expected integers"),
        ((QKV, 2, [True]), TypeError, "queries has dtype bool, expected integers"),
        ((QKV, 2, 3), ValueError, "queries has shape (), expected 1 dimension"),
        ((QKV, 2, [[0, 1]]), ValueError, "queries has shape (1, 2), expected 1 dimension"),
        ((QKV, 2, [0, 6]), ValueError, "queries has 6, expected tokens from 0 to 5 (N = H*W)"),
        ((QKV, 2, [5, -1]), ValueError, "queries has -1, expected tokens from 0 to 5 (N = H*W)"),
    ],
)
def test_wrong_calls(arguments, error, message):
    with pytest.raises(error) as raised:
        attention_map(*arguments)
    assert str(raised.value).startswith(f"attention_map: {message}")


def test_wrong_keywords():
    with pytest.raises(ValueError, match="attention_map: scale is inf"):
        attention_map(QKV, 2, [0], scale=np.inf)
    with pytest.raises(ValueError, match="attention_map: key_dim is 0"):
        attention_map(QKV, 2, [0], key_dim=0)
