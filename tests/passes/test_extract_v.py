"""extract_v and its backward, on every executor: bits, zeros elsewhere, additions to a target."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given

from psa_cupy.geometry import PSAGeometry
from psa_cupy.passes.extract_v import EXTRACT_V, extract_v, extract_v_backward
from tests.passes.layout_cases import UNEVEN, assert_same_bits, few, is_v, layout_problems, rounded_sum, v_of
from tests.strategies import DTYPES


def test_worked_by_hand(executor):
    # two heads of key_dim 1, one token: channels Q K V V, Q K V V
    qkv = np.arange(8, dtype=np.float32).reshape(1, 8, 1, 1)
    v = executor.run(extract_v, executor.array(qkv), 2)
    assert executor.to_numpy(v).ravel().tolist() == [2, 3, 6, 7]
    d_qkv = executor.run(extract_v_backward, v, 2)
    assert executor.to_numpy(d_qkv).ravel().tolist() == [0, 0, 2, 3, 0, 0, 6, 7]


@few
@example(UNEVEN)
@given(layout_problems())
def test_bits_and_zeros(executor, problem):
    geometry = problem.geometry
    values = problem.bits(geometry.qkv_shape)
    qkv = executor.array(values, offset=problem.offset)
    v = executor.run(extract_v, qkv, geometry.num_heads)
    assert_same_bits(executor.to_numpy(v), v_of(values, geometry))
    assert_same_bits(executor.to_numpy(qkv), values)

    d_v = executor.array(v_of(values, geometry), offset=problem.offset)
    d_qkv = executor.run(extract_v_backward, d_v, geometry.num_heads)
    expected = np.zeros_like(values)
    expected[:, is_v(geometry)] = v_of(values, geometry)
    assert_same_bits(executor.to_numpy(d_qkv), expected)
    assert_same_bits(executor.to_numpy(d_v), v_of(values, geometry))


@few
@example(UNEVEN)
@given(layout_problems())
def test_backward_adds_to_the_v_channels_of_a_given_target(executor, problem):
    geometry = problem.geometry
    gradient = problem.normal(geometry.out_shape, 1)
    before = problem.normal(geometry.qkv_shape, 2)
    before[:, ~is_v(geometry)] = problem.bits(geometry.qkv_shape)[:, ~is_v(geometry)]
    d_qkv = executor.array(before, offset=problem.offset)
    assert (
        executor.run(extract_v_backward, executor.array(gradient), geometry.num_heads, d_qkv=d_qkv) is d_qkv
    )
    # not even a zero is added to the other channels: any bits stay
    expected = before.copy()
    expected[:, is_v(geometry)] = rounded_sum(v_of(before, geometry), gradient)
    assert_same_bits(executor.to_numpy(d_qkv), expected)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize == 2], ids=str)
def test_every_16_bit_pattern_survives(executor, dtype):
    v = np.arange(2**16, dtype=np.uint16).view(dtype).reshape(1, 128, 16, 32)
    qkv = executor.run(extract_v_backward, executor.array(v), 2)
    assert_same_bits(executor.to_numpy(executor.run(extract_v, qkv, 2)), v)


def test_strided_input(executor):
    values = np.arange(240, dtype=np.float32).reshape(1, 40, 3, 2)
    swapped = executor.array(values).transpose(0, 1, 3, 2)
    expected = v_of(values.transpose(0, 1, 3, 2), PSAGeometry(1, 2, 5, 10, 2, 3))
    assert_same_bits(executor.to_numpy(executor.run(extract_v, swapped, 2)), expected)


@pytest.mark.parametrize(("batch", "height", "width"), [(0, 2, 3), (1, 0, 3), (2, 4, 0)])
def test_empty(executor, batch, height, width):
    qkv = executor.array(np.zeros((batch, 16, height, width), np.float32))
    v = executor.run(extract_v, qkv, 2)
    assert v.shape == (batch, 8, height, width)
    assert executor.run(extract_v_backward, v, 2).shape == qkv.shape
    assert executor.run(extract_v_backward, v, 2, d_qkv=qkv) is qkv


def test_infer_shape():
    assert EXTRACT_V.infer_shape((3, 256, 20, 20), 2) == (3, 128, 20, 20)
    assert EXTRACT_V.infer_shape((None, 256, 20, 20), 2) == (None, 128, 20, 20)


def test_target_may_not_overlap_the_input():
    buffer = np.zeros((2, 8, 2, 3), np.float32)
    with pytest.raises(ValueError, match=r"^extract_v_backward: d_qkv overlaps d_v"):
        extract_v_backward(buffer[:1, :4], 1, d_qkv=buffer[:1])
