"""PSAGeometry: every size follows from qkv's shape, and the two constructors agree."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from psa_cupy.geometry import PSAGeometry

SIZES = st.fixed_dictionaries(
    {
        "batch": st.integers(0, 3),
        "num_heads": st.integers(1, 6),
        "key_dim": st.integers(1, 128),
        "value_dim": st.integers(1, 256),
        "height": st.integers(0, 9),
        "width": st.integers(0, 9),
    }
)


@given(SIZES)
def test_from_qkv_inverts_qkv_shape(sizes):
    geometry = PSAGeometry(**sizes)
    again = PSAGeometry.from_qkv("f", geometry.qkv_shape, geometry.num_heads, geometry.key_dim)
    assert again == geometry


@given(SIZES)
def test_key_dim_defaults_to_a_quarter(sizes):
    geometry = PSAGeometry(**{**sizes, "value_dim": 2 * sizes["key_dim"]})
    assert PSAGeometry.from_qkv("f", geometry.qkv_shape, geometry.num_heads) == geometry
    assert PSAGeometry.from_out("f", "d_out", geometry.out_shape, geometry.num_heads) == geometry


@given(SIZES)
def test_sizes_agree_with_each_other(sizes):
    g = PSAGeometry(**sizes)
    assert np.prod(g.qkv_shape) == g.bh * g.head_channels * g.tokens
    assert np.prod(g.out_shape) == g.bh * g.value_dim * g.tokens
    assert np.prod(g.lse_shape) == g.bh * g.tokens
    assert g.is_empty == (np.prod(g.qkv_shape) == 0)


@pytest.mark.parametrize("heads", [np.int32(2), np.int64(2)])
def test_numpy_integers_are_integers(heads):
    assert PSAGeometry.from_qkv("f", (1, 16, 2, 3), heads).num_heads == 2


def test_a_bool_is_no_integer_after_an_equal_one():
    """True == 1 and 4.0 == 4: a cached answer for the integer must not let the others pass."""
    assert PSAGeometry.from_qkv("f", (1, 16, 2, 3), 1).key_dim == 4
    with pytest.raises(TypeError, match="num_heads is a bool"):
        PSAGeometry.from_qkv("f", (1, 16, 2, 3), True)
    assert PSAGeometry.from_qkv("f", (1, 16, 2, 3), 1, 4).key_dim == 4
    with pytest.raises(TypeError, match="key_dim is a float"):
        PSAGeometry.from_qkv("f", (1, 16, 2, 3), 1, 4.0)
