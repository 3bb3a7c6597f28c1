"""The attention shapes of real detectors at 640 x 640 pixels: 20 x 20 tokens, value_dim = 2*key_dim."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ModelShape:
    """One attention module's sizes and the models that have it."""

    models: str
    num_heads: int
    key_dim: int = 32

    def qkv(self, batch: int, dtype: np.dtype, seed: int = 0) -> np.ndarray:
        """Unit-variance random qkv of this shape."""
        return random_array((batch, self.num_heads * 4 * self.key_dim, 20, 20), dtype, seed)


YOLO_SHAPES = (
    ModelShape("v10n 11n 26n", num_heads=2),
    ModelShape("v10s v10b v10l 11s 11m 11l 26s 26m 26l", num_heads=4),
    ModelShape("v10m", num_heads=4, key_dim=36),
    ModelShape("v10x", num_heads=5),
    ModelShape("11x 26x", num_heads=6),
)


def random_array(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """Standard normal numbers, rounded to dtype."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
