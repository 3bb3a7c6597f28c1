"""reference.py against plain loops, finite differences and values worked out by hand."""

import itertools
import math
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st

from psa_cupy import reference
from psa_cupy.testing import gradcheck

from .strategies import DTYPES, Problem, normal, problems, seeds

SMALL = {"tokens": (1, 7, 31), "key_dims": (1, 5), "magnitudes": (0.01, 1.0, 30.0), "max_bh": 6}


# ---- layout passes, element by element


def each_element(p: Problem):
    """(b, head, section, channel, h, w) of qkv, and the channel's index in NCHW."""
    ranges = (p.batch, p.num_heads, 4, p.key_dim, p.height, p.width)
    for b, head, section, channel, h, w in itertools.product(*map(range, ranges)):
        yield b, head, section, channel, h, w, (head * 4 + section) * p.key_dim + channel


@given(problems(**SMALL))
def test_pack_qkv_by_loops(p):
    qkv = p.qkv()
    packed = reference.pack_qkv(qkv, p.num_heads)
    assert packed.shape == p.geometry.packed_shape and packed.dtype == p.dtype and packed.flags.c_contiguous
    for b, head, section, channel, h, w, c in each_element(p):
        assert packed[section, b * p.num_heads + head, h * p.width + w, channel] == qkv[b, c, h, w]
    assert np.array_equal(reference.pack_qkv_backward(packed, p.num_heads, p.height, p.width), qkv)


@given(problems(**SMALL))
def test_extract_v_by_loops(p):
    qkv = p.qkv()
    v = reference.extract_v(qkv, p.num_heads)
    d_qkv = reference.extract_v_backward(v, p.num_heads)
    assert v.shape == p.geometry.out_shape and v.flags.c_contiguous
    assert d_qkv.shape == qkv.shape and d_qkv.flags.c_contiguous
    for b, head, section, channel, h, w, c in each_element(p):
        if section < 2:
            assert d_qkv[b, c, h, w] == 0
        else:
            of_v = head * p.value_dim + (section - 2) * p.key_dim + channel
            assert v[b, of_v, h, w] == d_qkv[b, c, h, w] == qkv[b, c, h, w]


@given(problems(**SMALL))
def test_merge_attn_by_loops(p):
    _, _, lo, hi = reference.pack_qkv(p.qkv(), p.num_heads)
    out = reference.merge_attn(lo, hi, p.num_heads, p.height, p.width)
    assert out.shape == p.geometry.out_shape and out.flags.c_contiguous
    for b, head, section, channel, h, w, _ in each_element(p):
        if section >= 2:
            half, bh = (lo, hi)[section - 2], b * p.num_heads + head
            c = head * p.value_dim + (section - 2) * p.key_dim + channel
            assert out[b, c, h, w] == half[bh, h * p.width + w, channel]
    for half, again in zip((lo, hi), reference.merge_attn_backward(out, p.num_heads), strict=True):
        assert np.array_equal(half, again) and again.flags.c_contiguous


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layout_passes_keep_every_bit(dtype):
    """NaNs' payloads, infinities, subnormals and the sign of zero."""
    bits = np.random.default_rng(0).integers(0, 256, 2 * 3 * 20 * 6 * dtype.itemsize, dtype=np.uint8)
    qkv = bits.view(dtype).reshape(2, 60, 2, 3)
    packed = reference.pack_qkv(qkv, 3)
    again = reference.pack_qkv_backward(packed, 3, 2, 3)
    assert np.array_equal(again.view(np.uint8), qkv.view(np.uint8))
    v = reference.merge_attn(packed[2], packed[3], 3, 2, 3)
    assert np.array_equal(v.view(np.uint8), reference.extract_v(qkv, 3).view(np.uint8))


def test_results_share_no_memory_with_inputs():
    """At one token or one channel a transposed view would already be in C order."""
    for shape in ((1, 4, 2, 3), (1, 16, 1, 1)):
        qkv = np.ones(shape)
        packed = reference.pack_qkv(qkv, 1)
        v = reference.extract_v(qkv, 1)
        results = [packed, v, *reference.merge_attn_backward(v, 1)]
        assert not any(np.shares_memory(r, source) for r in results for source in (qkv, v) if r is not source)


# ---- attention


def attention_by_loops(q, k, v, scale):
    """One query of one head after the other, from the definition; lists of floats."""
    o, lse = np.empty((*q.shape[:2], v.shape[2])), np.empty(q.shape[:2])
    for bh, n in itertools.product(*map(range, lse.shape)):
        scores = [
            scale * sum(float(a) * float(b) for a, b in zip(q[bh, n], key, strict=True)) for key in k[bh]
        ]
        largest = max(scores)
        lse[bh, n] = largest + math.log(sum(math.exp(s - largest) for s in scores))
        weights = [math.exp(s - lse[bh, n]) for s in scores]
        for c in range(v.shape[2]):
            o[bh, n, c] = sum(w * float(x) for w, x in zip(weights, v[bh, :, c], strict=True))
    return o, lse


@given(problems(**SMALL, halves=False), st.sampled_from((None, 0.0, -0.7, 2)))
def test_flash_attention_forward_by_loops(p, scale):
    q, k, v = p.attention_inputs()
    o, lse = reference.flash_attention_forward(q, k, v, scale=scale)
    expected_o, expected_lse = attention_by_loops(q, k, v, p.key_dim**-0.5 if scale is None else scale)
    rounding = {"float16": 2e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-13}[p.dtype.name]
    assert o.dtype == p.dtype
    assert lse.dtype == (np.float64 if p.dtype == np.float64 else np.float32)
    np.testing.assert_allclose(o.astype(np.float64), expected_o, rtol=rounding, atol=rounding)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6 if lse.dtype == np.float32 else 1e-13, atol=1e-6)


def test_flash_attention_by_hand():
    """Scores ln 1 and ln 3: weights 1/4 and 3/4."""
    q, k = np.array([[[2.0]]]), np.array([[[0.0], [math.log(3)]]])
    v = np.array([[[4.0, 0.0], [8.0, -4.0]]])
    o, lse = reference.flash_attention_forward(q, k, v, scale=0.5)
    np.testing.assert_allclose(o, [[[7.0, -3.0]]], rtol=1e-15)
    np.testing.assert_allclose(lse, [[math.log(4)]], rtol=1e-15)
    # dP = (4, 8), delta = 7, dS = (1/4 * -3, 3/4 * 1)
    d_o = np.array([[[1.0, 0.0]]])
    d_q, d_k, d_v = reference.flash_attention_backward(d_o, q, k, v, o, lse, scale=0.5)
    np.testing.assert_allclose(d_q, [[[0.5 * 0.75 * math.log(3)]]], rtol=1e-14)
    np.testing.assert_allclose(d_k, [[[-0.75], [0.75]]], rtol=1e-14)
    np.testing.assert_allclose(d_v, [[[0.25, 0.0], [0.75, 0.0]]], rtol=1e-14)


def test_scores_far_from_zero():
    """The exponential of either score overflows or vanishes; their difference does not."""
    v = np.array([[[0.0], [1.0]]])
    for shift in (-1e5, 1e5):
        k = np.array([[[shift], [shift + math.log(3)]]])
        o, lse = reference.flash_attention_forward(np.ones((1, 1, 1)), k, v)
        np.testing.assert_allclose(o, [[[0.75]]], rtol=1e-10)
        np.testing.assert_allclose(lse, [[shift + math.log(4)]], rtol=1e-15)


def test_no_keys_and_no_queries():
    q, k, v = np.ones((2, 3, 5)), np.ones((2, 0, 5)), np.ones((2, 0, 7))
    o, lse = reference.flash_attention_forward(q, k, v)
    assert o.shape == (2, 3, 7) and not o.any() and np.array_equal(lse, np.full((2, 3), -np.inf))
    d_q, d_k, d_v = reference.flash_attention_backward(o, q, k, v, o, lse)
    assert d_q.shape == q.shape and not d_q.any() and d_k.shape == k.shape and d_v.shape == v.shape
    o, lse = reference.flash_attention_forward(k, q, q)
    assert o.shape == (2, 0, 5) and lse.shape == (2, 0)
    d_q, d_k, d_v = reference.flash_attention_backward(o, k, q, q, o, lse)
    assert d_q.shape == k.shape and not d_k.any() and not d_v.any()


@pytest.mark.parametrize("shape", [(0, 16, 2, 3), (1, 16, 0, 3), (1, 16, 2, 0)])
def test_zero_sizes(shape):
    qkv = np.ones(shape, np.float32)
    out, lse = reference.psa_forward(qkv, 2)
    assert out.shape == (shape[0], 8, *shape[2:]) and lse.shape == (shape[0], 2, shape[2] * shape[3])
    assert reference.psa_backward(out, qkv, out, lse, 2).shape == shape
    assert reference.pack_qkv(qkv, 2).shape == (4, shape[0] * 2, shape[2] * shape[3], 2)


def test_more_tokens_than_a_tile(monkeypatch):
    """The same results, nearly, whichever tiles: several heads, one head, some rows, one row."""
    q, k, v, d_o = (normal((5, n, 6), np.float64, i) for i, n in enumerate((33, 40, 40, 33)))
    results = []
    for most_scores in (1 << 17, 4 * 64 * 40, 33 * 40, 7 * 40, 1):
        monkeypatch.setattr(reference, "_TILE_SCORES", most_scores)
        o, lse = reference.flash_attention_forward(q, k, v)
        results.append((o, lse, *reference.flash_attention_backward(d_o, q, k, v, o, lse)))
    for result in results[1:]:
        for a, b in zip(results[0], result, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


def test_memory_is_bounded():
    """N = 6400 in a few tens of MB: a matrix of scores would take 328."""
    qkv = normal((1, 128, 80, 80), np.float32, 0)
    tracemalloc.start()
    try:
        out, lse = reference.psa_forward(qkv, 1)
        reference.psa_backward(out, qkv, out, lse, 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40e6


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_inf_stay_in_their_head(dtype, poison, recwarn):
    qkv, d_out = normal((2, 40, 3, 3), dtype, 0), normal((2, 20, 3, 3), dtype, 1)
    poisoned = qkv.copy()
    poisoned[1, 0, 1, 1] = poison  # a query of bh 2
    for x in (qkv, poisoned):
        out, lse = reference.psa_forward(x, 2)
        d_qkv = reference.psa_backward(d_out, x, out, lse, 2)
        results = [r.reshape(4, -1) for r in (out, lse, d_qkv)]
        if x is qkv:
            good = results
    for a, b in zip(good, results, strict=True):
        assert np.array_equal(a[[0, 1, 3]], b[[0, 1, 3]])
        assert not np.isfinite(b[2].astype(np.float64)).all()
    assert not recwarn.list


# ---- backward


@given(problems(**SMALL, halves=False, dtypes=DTYPES[3:]), st.sampled_from((None, 0.0, -0.7)))
def test_psa_backward_by_finite_differences(p, scale):
    keywords = {"key_dim": p.key_dim, "scale": scale}

    def forward(qkv):
        return reference.psa_forward(qkv, p.num_heads, **keywords)[0]

    def backward(d_out, qkv):
        out, lse = reference.psa_forward(qkv, p.num_heads, **keywords)
        return reference.psa_backward(d_out, qkv, out, lse, p.num_heads, **keywords)

    gradcheck(forward, backward, [p.qkv()], rtol=1e-5)


@given(seeds(), st.integers(1, 9), st.integers(1, 9), st.sampled_from((None, 0.3)))
def test_flash_attention_backward_by_finite_differences(seed, query_count, key_count, scale):
    shapes = ((2, query_count, 4), (2, key_count, 4), (2, key_count, 3))

    def forward(q, k, v):
        return reference.flash_attention_forward(q, k, v, scale=scale)[0]

    def backward(d_o, q, k, v):
        o, lse = reference.flash_attention_forward(q, k, v, scale=scale)
        return reference.flash_attention_backward(d_o, q, k, v, o, lse, scale=scale)

    gradcheck(forward, backward, [normal(s, np.float64, seed + i) for i, s in enumerate(shapes)])


def test_backward_uses_the_given_out_and_lse():
    """P = exp(score - lse) and delta = rowsum(d_out out), of what is given."""
    qkv, d_out = normal((1, 8, 2, 2), np.float64, 0), normal((1, 4, 2, 2), np.float64, 1)
    out, lse = reference.psa_forward(qkv, 1)
    right = reference.psa_backward(d_out, qkv, out, lse, 1)
    halved = reference.psa_backward(d_out, qkv, out, lse + math.log(2), 1)
    np.testing.assert_allclose(halved, right / 2, rtol=1e-14)
    without_delta = reference.psa_backward(d_out, qkv, np.zeros_like(out), lse, 1)
    assert np.array_equal(without_delta[:, 4:], right[:, 4:]) and not np.allclose(without_delta, right)


@given(problems(**SMALL, halves=False, dtypes=DTYPES[3:]))
def test_psa_is_flash_attention_on_its_heads(p):
    """Up to the order in which BLAS sums over other strides."""
    q, k, v = p.attention_inputs()
    out, lse = reference.psa_forward(p.qkv(), p.num_heads, key_dim=p.key_dim)
    o, flash_lse = reference.flash_attention_forward(q, k, v)
    g = p.geometry
    assert out.flags.c_contiguous and out.dtype == p.dtype
    o_nchw = o.transpose(0, 2, 1).reshape(g.out_shape)
    np.testing.assert_allclose(out, o_nchw, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse.reshape(g.bh, g.tokens), flash_lse, rtol=1e-12)
    d_qkv = reference.psa_backward(p.d_out(), p.qkv(), out, lse, p.num_heads, key_dim=p.key_dim)
    d_o = p.d_out().reshape(g.bh, g.value_dim, g.tokens).transpose(0, 2, 1)
    gradients = reference.flash_attention_backward(d_o, q, k, v, o, flash_lse)
    joined = np.concatenate(gradients, axis=2).transpose(0, 2, 1).reshape(g.qkv_shape)
    np.testing.assert_allclose(d_qkv, joined, rtol=1e-10, atol=1e-10)


# ---- targets


@given(problems(**SMALL))
def test_targets_are_added_to_in_place_and_in_their_dtype(p):
    qkv, d_out, held = p.qkv(), p.d_out(), p.target()
    out, lse = reference.psa_forward(qkv, p.num_heads)
    for backward in (
        lambda **d_qkv: reference.psa_backward(d_out, qkv, out, lse, p.num_heads, **d_qkv),
        lambda **d_qkv: reference.extract_v_backward(d_out, p.num_heads, **d_qkv),
        lambda **d_qkv: reference.pack_qkv_backward(
            reference.pack_qkv(qkv, p.num_heads), p.num_heads, p.height, p.width, **d_qkv
        ),
    ):
        target = held.copy()
        assert backward(d_qkv=target) is target
        assert np.array_equal(target, held + backward(), equal_nan=True)


@given(problems(**SMALL), st.integers(0, 7))
def test_each_target_may_be_given_or_not(p, given_ones):
    q, k, v = p.attention_inputs()
    o, lse = reference.flash_attention_forward(q, k, v)
    new = reference.flash_attention_backward(o, q, k, v, o, lse)
    targets = [x.copy() if given_ones >> i & 1 else None for i, x in enumerate((q, k, v))]
    names = dict(zip(("d_q", "d_k", "d_v"), targets, strict=True))
    results = reference.flash_attention_backward(o, q, k, v, o, lse, **names)
    for target, result, gradient, held in zip(targets, results, new, (q, k, v), strict=True):
        assert target is None or result is target
        expected = gradient if target is None else held + gradient
        assert np.array_equal(result, expected) and result.dtype == p.dtype


def test_merge_attn_backward_targets():
    d_out, held = normal((1, 8, 2, 3), np.float32, 0), normal((2, 6, 2), np.float32, 1)
    lo, hi = reference.merge_attn_backward(d_out, 2)
    target = held.copy()
    new_lo, added_hi = reference.merge_attn_backward(d_out, 2, d_o_hi=target)
    assert added_hi is target and np.array_equal(target, held + hi) and np.array_equal(new_lo, lo)


def test_branch_is_added_before_rounding():
    """1 + 2^-9 + 2^-9 in bfloat16: 1 if each sum is rounded, 1 + 2^-7 if the sum of all is (ties to even)."""
    qkv = np.zeros((1, 4, 1, 1), ml_dtypes.bfloat16)
    out, lse = reference.psa_forward(qkv, 1)
    d_out = np.full(out.shape, 1.0, out.dtype)
    branch = np.full(out.shape, 1.5 * 2**-8, out.dtype)
    d_qkv = reference.psa_backward(d_out, qkv, out, lse, 1, d_v_branch=branch)
    assert np.array_equal(d_qkv[:, 2:].astype(np.float64), np.full((1, 2, 1, 1), 1 + 2.0**-7))
    added = reference.psa_backward(d_out, qkv, out, lse, 1, d_v_branch=branch, d_qkv=np.zeros_like(qkv))
    assert np.array_equal(added, d_qkv)
    assert not d_qkv[:, :2].any()


def test_forward_targets():
    qkv = normal((1, 16, 2, 3), np.float16, 0)
    out, lse = reference.psa_forward(qkv, 2)
    targets = np.full_like(out, np.nan), np.full_like(lse, np.nan)
    results = reference.psa_forward(qkv, 2, out=targets[0], lse=targets[1])
    assert results[0] is targets[0] and results[1] is targets[1]
    assert np.array_equal(results[0], out) and np.array_equal(results[1], lse)


def test_inputs_of_any_strides():
    qkv = normal((2, 16, 3, 5), np.float32, 0)
    strided = np.asfortranarray(qkv)
    assert not strided.flags.c_contiguous
    out, lse = reference.psa_forward(qkv, 2)
    for a, b in zip(reference.psa_forward(strided, 2), (out, lse), strict=True):
        assert np.array_equal(a, b)
    backward = reference.psa_backward(np.asfortranarray(out), strided, out, np.asfortranarray(lse), 2)
    assert np.array_equal(backward, reference.psa_backward(out, qkv, out, lse, 2))
    assert np.array_equal(reference.pack_qkv(strided, 2), reference.pack_qkv(qkv, 2))
    assert np.array_equal(reference.extract_v(strided, 2), reference.extract_v(qkv, 2))
