"""pack_qkv and its backward, on every executor: bits, the inverse, additions to a target."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given

from psa_cupy.geometry import PSAGeometry
from psa_cupy.passes.pack_qkv import PACK_QKV, pack_qkv, pack_qkv_backward
from tests.passes.layout_cases import UNEVEN, assert_same_bits, few, layout_problems, packed_of, rounded_sum
from tests.strategies import DTYPES


def test_worked_by_hand(executor):
    # one head of key_dim 1, three tokens: channel rows Q, K, V_lo, V_hi
    qkv = np.arange(12, dtype=np.float32).reshape(1, 4, 1, 3)
    packed = executor.to_numpy(executor.run(pack_qkv, executor.array(qkv), 1))
    assert packed.tolist() == [[[[0], [1], [2]]], [[[3], [4], [5]]], [[[6], [7], [8]]], [[[9], [10], [11]]]]


@few
@example(UNEVEN)
@given(layout_problems())
def test_bits_and_inverse(executor, problem):
    geometry = problem.geometry
    values = problem.bits(geometry.qkv_shape)
    expected = packed_of(values, geometry)
    qkv = executor.array(values, offset=problem.offset)
    packed = executor.run(pack_qkv, qkv, geometry.num_heads)
    assert_same_bits(executor.to_numpy(packed), expected)
    assert_same_bits(executor.to_numpy(qkv), values)

    d_packed = executor.array(expected, offset=problem.offset)
    d_qkv = executor.run(pack_qkv_backward, d_packed, geometry.num_heads, geometry.height, geometry.width)
    assert_same_bits(executor.to_numpy(d_qkv), values)
    assert_same_bits(executor.to_numpy(d_packed), expected)


@few
@example(UNEVEN)
@given(layout_problems())
def test_backward_adds_to_a_given_target_rounding_once(executor, problem):
    geometry = problem.geometry
    gradient, before = problem.normal(geometry.qkv_shape, 1), problem.normal(geometry.qkv_shape, 2)
    d_packed = executor.array(packed_of(gradient, geometry))
    d_qkv = executor.array(before, offset=problem.offset)
    sizes = (geometry.num_heads, geometry.height, geometry.width)
    assert executor.run(pack_qkv_backward, d_packed, *sizes, d_qkv=d_qkv) is d_qkv
    assert_same_bits(executor.to_numpy(d_qkv), rounded_sum(before, gradient))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize == 2], ids=str)
def test_every_16_bit_pattern_survives(executor, dtype):
    qkv = np.arange(2**16, dtype=np.uint16).view(dtype).reshape(1, 256, 16, 16)
    packed = executor.run(pack_qkv, executor.array(qkv), 2)
    assert_same_bits(executor.to_numpy(executor.run(pack_qkv_backward, packed, 2, 16, 16)), qkv)


def test_strided_and_read_only_input(executor):
    values = np.arange(240, dtype=np.float32).reshape(1, 40, 3, 2)
    swapped = executor.array(values).transpose(0, 1, 3, 2)
    expected = packed_of(values.transpose(0, 1, 3, 2), PSAGeometry(1, 2, 5, 10, 2, 3))
    assert_same_bits(executor.to_numpy(executor.run(pack_qkv, swapped, 2)), expected)
    if isinstance(swapped, np.ndarray):
        swapped.flags.writeable = False
        assert_same_bits(executor.run(pack_qkv, swapped, 2), expected)


@pytest.mark.parametrize(("batch", "height", "width"), [(0, 2, 3), (1, 0, 3), (2, 4, 0)])
def test_empty(executor, batch, height, width):
    qkv = executor.array(np.zeros((batch, 16, height, width), np.float32))
    packed = executor.run(pack_qkv, qkv, 2)
    assert packed.shape == (4, 2 * batch, height * width, 2)
    assert executor.run(pack_qkv_backward, packed, 2, height, width).shape == qkv.shape
    assert executor.run(pack_qkv_backward, packed, 2, height, width, d_qkv=qkv) is qkv


def test_infer_shape():
    assert PACK_QKV.infer_shape((3, 256, 20, 20), 2) == (4, 6, 400, 32)
    assert PACK_QKV.infer_shape((None, 256, 20, 20), 2) == (4, None, 400, 32)


def zeros(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"d_packed": zeros(3, 2, 6, 4)}, "d_packed has shape (3, 2, 6, 4), expected (4, 2, 6, 4)"),
        (
            {"d_packed": zeros(4, 2, 6, 0)},
            "key_dim of d_packed is 0, expected an integer from 1 to 128",
        ),
        (
            {"d_packed": zeros(4, 2, 6)},
            "d_packed has shape (4, 2, 6), expected 4 dimensions (4, B*num_heads, N, key_dim)",
        ),
        ({"height": -1}, "height is -1, expected an integer >= 0"),
        ({"d_qkv": zeros(1, 32, 3, 2)}, "d_qkv has shape (1, 32, 3, 2), expected (1, 32, 2, 3)"),
        (
            {"d_qkv": zeros(1, 32, 2, 6)[..., ::2]},
            "d_qkv is not C-contiguous, expected a C-contiguous array to write to",
        ),
    ],
)
def test_wrong_calls(wrong, message):
    arguments = {"d_packed": zeros(4, 2, 6, 4), "num_heads": 2, "height": 2, "width": 3}
    with pytest.raises(ValueError) as error:
        pack_qkv_backward(**{**arguments, **wrong})
    assert str(error.value) == f"pack_qkv_backward: {message}"


def test_target_may_not_overlap_the_input():
    buffer = zeros(4 * 2 * 6 * 4)
    with pytest.raises(ValueError, match=r"^pack_qkv_backward: d_qkv overlaps d_packed"):
        pack_qkv_backward(buffer.reshape(4, 2, 6, 4), 2, 2, 3, d_qkv=buffer.reshape(1, 32, 2, 3))
