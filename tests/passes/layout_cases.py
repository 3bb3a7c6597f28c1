"""What the tests of the three layout passes share: problems, bit patterns, and what must come out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings, strategies as st

from psa_cupy.geometry import PSAGeometry
from tests.strategies import DTYPES, KEY_DIMS, Problem, normal, seeds

SHORT_IMAGES = ((1, 1), (7, 1), (1, 8), (31, 1), (3, 11), (2, 17), (6, 6), (5, 13), (8, 16), (43, 3))
"""Numbers of tokens with every power of two up to 8 as a factor, and odd ones: one for each access width."""
LONG_IMAGES = ((19, 19), (20, 20))

few = settings(max_examples=settings.default.max_examples // 2)
"""Every example may be kernels of its own to compile."""


@dataclass(frozen=True)
class LayoutProblem(Problem):
    """A problem, and by how many elements the addresses of its arrays are shifted."""

    offset: int = 0

    @property
    def half_shape(self) -> tuple[int, int, int]:
        return self.geometry.packed_shape[1:]

    def bits(self, shape: tuple[int, ...]) -> np.ndarray:
        """Any bit pattern: payloads of not-a-number, subnormals, negative zeros."""
        raw = np.random.default_rng(self.seed).bytes(int(np.prod(shape)) * self.dtype.itemsize)
        return np.frombuffer(raw, self.dtype).reshape(shape)

    def normal(self, shape: tuple[int, ...], which: int = 0) -> np.ndarray:
        return normal(shape, self.dtype, (self.seed, which))

    def integers(self, shape: tuple[int, ...], which: int = 0) -> np.ndarray:
        return np.random.default_rng((self.seed, which)).integers(-3, 4, shape).astype(self.dtype)


@st.composite
def layout_problems(draw) -> LayoutProblem:
    key_dim = draw(st.sampled_from(KEY_DIMS))
    height, width = draw(st.sampled_from(SHORT_IMAGES + (LONG_IMAGES if key_dim in (32, 36) else ())))
    max_bh = 2 if height * width > 300 else 6
    num_heads = draw(st.integers(1, max_bh))
    return LayoutProblem(
        batch=draw(st.integers(1, max_bh // num_heads)),
        num_heads=num_heads,
        key_dim=key_dim,
        value_dim=2 * key_dim,
        height=height,
        width=width,
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(seeds()),
        offset=draw(st.sampled_from((0, 0, 1))),
    )


UNEVEN = LayoutProblem(1, 1, 7, 14, 1, 301, np.dtype(np.float64))
"""Cut into several parts of which the last is shorter, in every pass and direction."""


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == expected.dtype
    as_words = f"u{expected.dtype.itemsize}"
    got, expected = np.ascontiguousarray(got), np.ascontiguousarray(expected)
    np.testing.assert_array_equal(got.view(as_words), expected.view(as_words), strict=True)


def rounded_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The sum rounded once to its dtype (by way of float32 for 16-bit types, which changes nothing)."""
    if a.dtype.itemsize > 2:
        return a + b
    return (a.astype(np.float32) + b.astype(np.float32)).astype(a.dtype)


def packed_of(qkv: np.ndarray, geometry: PSAGeometry) -> np.ndarray:
    """What pack_qkv must give, section by section and head by head."""
    key_dim, tokens = geometry.key_dim, geometry.tokens
    packed = np.empty(geometry.packed_shape, qkv.dtype)
    for section in range(4):
        for batch in range(geometry.batch):
            for head in range(geometry.num_heads):
                first = (head * 4 + section) * key_dim
                channels = qkv[batch, first : first + key_dim].reshape(key_dim, tokens)
                packed[section, batch * geometry.num_heads + head] = channels.T
    return packed


def v_of(qkv: np.ndarray, geometry: PSAGeometry) -> np.ndarray:
    """What extract_v must give."""
    return qkv[:, is_v(geometry)]


def is_v(geometry: PSAGeometry) -> np.ndarray:
    """For each channel of qkv whether it is one of V's."""
    return np.arange(geometry.qkv_shape[1]) % geometry.head_channels >= 2 * geometry.key_dim
