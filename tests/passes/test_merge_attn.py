"""merge_attn and its backward, on every executor: bits, the inverse, additions to either target or both."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from psa_cupy.geometry import PSAGeometry
from psa_cupy.passes.merge_attn import MERGE_ATTN, merge_attn, merge_attn_backward
from tests.passes.layout_cases import (
    UNEVEN,
    assert_same_bits,
    few,
    layout_problems,
    packed_of,
    rounded_sum,
    v_of,
)
from tests.strategies import DTYPES


def merged_and_halves(qkv, geometry):
    """An NCHW array and the two halves it is merged of: the V channels of qkv, and the same packed."""
    return v_of(qkv, geometry), *packed_of(qkv, geometry)[2:]


def test_worked_by_hand(executor):
    # one head of key_dim 2, two tokens: channel rows lo 0, lo 1, hi 0, hi 1
    lo, hi = np.array([[[[0, 2], [1, 3]]], [[[4, 6], [5, 7]]]], np.float32)
    out = executor.run(merge_attn, executor.array(lo), executor.array(hi), 1, 1, 2)
    assert executor.to_numpy(out).tolist() == [[[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]]


@few
@example(UNEVEN)
@given(layout_problems())
def test_bits_and_inverse(executor, problem):
    geometry = problem.geometry
    merged, *halves = merged_and_halves(problem.bits(geometry.qkv_shape), geometry)
    inputs = [executor.array(half, offset=problem.offset) for half in halves]
    out = executor.run(merge_attn, *inputs, geometry.num_heads, geometry.height, geometry.width)
    assert_same_bits(executor.to_numpy(out), merged)

    d_out = executor.array(merged, offset=problem.offset)
    results = executor.run(merge_attn_backward, d_out, geometry.num_heads)
    for result, array, half in zip(results, inputs, halves, strict=True):
        assert_same_bits(executor.to_numpy(result), half)
        assert_same_bits(executor.to_numpy(array), half)
    assert_same_bits(executor.to_numpy(d_out), merged)


@few
@example(UNEVEN, (True, False))
@given(layout_problems(), st.sampled_from(((True, True), (True, False), (False, True))))
def test_backward_adds_to_the_given_targets_rounding_once(executor, problem, given_targets):
    geometry = problem.geometry
    merged, *halves = merged_and_halves(problem.normal(geometry.qkv_shape), geometry)
    before = [problem.normal(problem.half_shape, which) for which in (1, 2)]
    targets = [
        executor.array(values, offset=problem.offset) if is_given else None
        for values, is_given in zip(before, given_targets, strict=True)
    ]
    results = executor.run(
        *(merge_attn_backward, executor.array(merged), geometry.num_heads),
        d_o_lo=targets[0],
        d_o_hi=targets[1],
    )
    for result, target, half, old in zip(results, targets, halves, before, strict=True):
        assert target is None or result is target
        expected = half if target is None else rounded_sum(old, half)
        assert_same_bits(executor.to_numpy(result), expected)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize == 2], ids=str)
def test_every_16_bit_pattern_survives(executor, dtype):
    out = np.arange(2**16, dtype=np.uint16).view(dtype).reshape(1, 128, 16, 32)
    halves = executor.run(merge_attn_backward, executor.array(out), 2)
    assert_same_bits(executor.to_numpy(executor.run(merge_attn, *halves, 2, 16, 32)), out)


def test_strided_input(executor):
    qkv = np.arange(240, dtype=np.float32).reshape(1, 40, 2, 3)
    merged, *halves = merged_and_halves(qkv, PSAGeometry(1, 2, 5, 10, 2, 3))
    as_columns = [executor.array(half.transpose(2, 0, 1)).transpose(1, 2, 0) for half in halves]
    assert not as_columns[0].flags.c_contiguous
    assert_same_bits(executor.to_numpy(executor.run(merge_attn, *as_columns, 2, 2, 3)), merged)


@pytest.mark.parametrize(("batch", "height", "width"), [(0, 2, 3), (1, 0, 3), (2, 4, 0)])
def test_empty(executor, batch, height, width):
    d_out = executor.array(np.zeros((batch, 8, height, width), np.float32))
    halves = executor.run(merge_attn_backward, d_out, 2)
    assert [half.shape for half in halves] == [(2 * batch, height * width, 2)] * 2
    assert executor.run(merge_attn, *halves, 2, height, width).shape == d_out.shape


def test_infer_shape():
    assert MERGE_ATTN.infer_shape((6, 400, 32), (6, 400, 32), 2, 20, 20) == (3, 128, 20, 20)
    assert MERGE_ATTN.infer_shape((None, 400, 32), (None, 400, 32), 2, 20, 20) == (None, 128, 20, 20)


def test_targets_may_not_overlap():
    buffer = np.zeros((3, 6, 4), np.float32)
    d_out = np.zeros((1, 16, 2, 3), np.float32)
    with pytest.raises(ValueError, match=r"^merge_attn_backward: d_o_lo overlaps d_o_hi"):
        merge_attn_backward(d_out, 2, d_o_lo=buffer[:2], d_o_hi=buffer[1:])
    with pytest.raises(ValueError, match=r"^merge_attn_backward: d_o_hi overlaps d_out"):
        merge_attn_backward(d_out, 2, d_o_hi=d_out.reshape(4, 6, 4)[:2])
