"""What tests draw: shapes, dtype, seed and magnitude, never elements."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from psa_cupy.geometry import PSAGeometry

DTYPES = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))

IMAGES = {
    1: (1, 1),
    7: (1, 7),
    31: (31, 1),
    33: (3, 11),
    63: (9, 7),
    65: (5, 13),
    127: (1, 127),
    129: (43, 3),
    361: (19, 19),
    400: (16, 25),
}
"""Height and width for each number of tokens: around every tile size, and the detectors' own."""

TOKENS = tuple(IMAGES)
KEY_DIMS = (1, 5, 32, 36, 64, 128)
MAGNITUDES = (0.01, 1.0, 30.0, 3e3, 1e5)
"""Of q . k over sqrt(key_dim)."""


def normal(shape, dtype, seed: int, magnitude: float = 1.0) -> np.ndarray:
    """Normally distributed numbers of the given standard deviation, rounded to the dtype."""
    return (np.random.default_rng(seed).standard_normal(shape) * magnitude).astype(dtype)


@dataclass(frozen=True)
class Problem:
    """One call's sizes, dtype and seed; makes its arrays."""

    batch: int
    num_heads: int
    key_dim: int
    value_dim: int
    height: int
    width: int
    dtype: np.dtype
    seed: int = 0
    magnitude: float = 1.0

    @property
    def geometry(self) -> PSAGeometry:
        return PSAGeometry(self.batch, self.num_heads, self.key_dim, self.value_dim, self.height, self.width)

    @property
    def halves(self) -> bool:
        """Whether value_dim = 2*key_dim, which the layout passes need."""
        return self.value_dim == 2 * self.key_dim

    def qkv(self) -> np.ndarray:
        """V of unit variance, scores of `magnitude` at the default scale."""
        g = self.geometry
        x = np.random.default_rng(self.seed).standard_normal((g.bh, g.head_channels, g.tokens))
        x[:, : 2 * g.key_dim] *= self.magnitude**0.5
        return x.astype(self.dtype).reshape(g.qkv_shape)

    def d_out(self) -> np.ndarray:
        """A gradient of unit variance, shape of out."""
        return normal(self.geometry.out_shape, self.dtype, self.seed + 1)

    def d_v_branch(self) -> np.ndarray:
        """Another, for V alone."""
        return normal(self.geometry.out_shape, self.dtype, self.seed + 2)

    def target(self) -> np.ndarray:
        """A gradient that d_qkv already holds."""
        return normal(self.geometry.qkv_shape, self.dtype, self.seed + 3)

    def attention_inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k and v of flash_attention: C-contiguous, tokens first."""
        g = self.geometry
        x = self.qkv().reshape(g.bh, g.head_channels, g.tokens).transpose(0, 2, 1)
        edges = (0, g.key_dim, 2 * g.key_dim, g.head_channels)
        return tuple(np.array(x[:, :, a:b], order="C") for a, b in itertools.pairwise(edges))


def seeds():
    """Of the arrays' elements."""
    return st.integers(0, 2**16)


@st.composite
def problems(
    draw,
    *,
    tokens=TOKENS,
    key_dims=KEY_DIMS,
    dtypes=DTYPES,
    magnitudes=MAGNITUDES,
    max_bh: int = 4,
    halves: bool = True,
) -> Problem:
    """Problems with H and W either way round; `halves=False` also draws other value_dims."""
    height, width = IMAGES[draw(st.sampled_from(tokens))]
    if draw(st.booleans()):
        height, width = width, height
    num_heads = draw(st.integers(1, min(6, max_bh)))
    batch = draw(st.integers(1, max_bh // num_heads))
    key_dim = draw(st.sampled_from(key_dims))
    value_dim = 2 * key_dim if halves else draw(st.sampled_from((2 * key_dim, key_dim, 1, 24)))
    dtype = draw(st.sampled_from(dtypes))
    magnitude = draw(st.sampled_from(magnitudes))
    return Problem(batch, num_heads, key_dim, value_dim, height, width, dtype, draw(seeds()), magnitude)
