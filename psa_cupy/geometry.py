"""Sizes of position-sensitive attention: derived and checked once, from the shape of `qkv`.

One head's channels are adjacent in `qkv` (key_dim of Q, key_dim of K, value_dim of V), so the array seen
as (BH, head_channels, N) is the same memory: every kernel needs one base offset per bh, no more.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from psa_cupy.arguments import require_integer

MAX_KEY_DIM = 128
MAX_VALUE_DIM = 256
MAX_TOKENS = 2**31 - 2**10
"""Kernels count a head's tokens in 32 bits, and a tile past the last."""


def ceil_divide(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def round_up(value: int, unit: int) -> int:
    """The least multiple of `unit` that is not below `value`."""
    return ceil_divide(value, unit) * unit


@dataclass(frozen=True)
class PSAGeometry:
    """The sizes of one call. B, H or W may be zero; dims are at least 1."""

    batch: int
    num_heads: int
    key_dim: int
    value_dim: int
    height: int
    width: int

    @classmethod
    def from_qkv(
        cls, function: str, shape: tuple[int, ...], num_heads: int, key_dim: int | None = None
    ) -> PSAGeometry:
        """The geometry of `qkv` (B, num_heads*(2*key_dim + value_dim), H, W).

        Parameters
        ----------
        function : str
            The public function's name, for messages.
        shape : tuple of int
            The shape of qkv.
        num_heads : int
            At least 1.
        key_dim : int, optional
            None: a quarter of a head's channels, so that value_dim = 2*key_dim.

        Raises
        ------
        ValueError
            If the sizes do not fit together or exceed the limits (key_dim 1..128, value_dim 1..256).

        """
        if type(num_heads) is not int:
            num_heads = require_integer(function, "num_heads", num_heads, 1)
        if key_dim is not None and type(key_dim) is not int:
            key_dim = require_integer(function, "key_dim", key_dim, 1, MAX_KEY_DIM)
        return _from_qkv(function, tuple(shape), num_heads, key_dim)

    @classmethod
    def from_out(cls, function: str, name: str, shape: tuple[int, ...], num_heads: int) -> PSAGeometry:
        """The geometry of an array (B, num_heads*value_dim, H, W) with value_dim = 2*key_dim."""
        num_heads = require_integer(function, "num_heads", num_heads, 1)
        batch, channels, height, width = _require_nchw(function, name, shape)
        value_dim = _per_head(function, name, channels, num_heads)
        if value_dim % 2:
            raise ValueError(
                f"{function}: {name} has {value_dim} channels per head, expected an even number "
                "(value_dim = 2*key_dim)"
            )
        return cls(batch, num_heads, value_dim // 2, value_dim, height, width)._within_limits(function)

    @property
    def tokens(self) -> int:
        """N = H*W."""
        return self.height * self.width

    @property
    def bh(self) -> int:
        """B*num_heads."""
        return self.batch * self.num_heads

    @property
    def head_channels(self) -> int:
        """Channels of one head in qkv."""
        return 2 * self.key_dim + self.value_dim

    @property
    def qkv_shape(self) -> tuple[int, int, int, int]:
        """Of qkv and its gradient."""
        return (self.batch, self.num_heads * self.head_channels, self.height, self.width)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """Of the attention's result, NCHW."""
        return (self.batch, self.num_heads * self.value_dim, self.height, self.width)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        """Of lse: (B, num_heads, N)."""
        return (self.batch, self.num_heads, self.tokens)

    @property
    def packed_shape(self) -> tuple[int, int, int, int]:
        """Of pack_qkv's result: (section, bh, token, channel)."""
        return (4, self.bh, self.tokens, self.key_dim)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: B, H or W is zero."""
        return self.bh * self.tokens == 0

    def require_halves(self, function: str) -> None:
        """Check value_dim = 2*key_dim, which the layout passes need (V is split in two halves)."""
        if self.value_dim != 2 * self.key_dim:
            raise ValueError(
                f"{function}: value_dim is {self.value_dim} and key_dim {self.key_dim}, "
                "expected value_dim = 2*key_dim"
            )

    def _within_limits(self, function: str) -> PSAGeometry:
        for name, value, most in (
            ("key_dim", self.key_dim, MAX_KEY_DIM),
            ("value_dim", self.value_dim, MAX_VALUE_DIM),
        ):
            if not 1 <= value <= most:
                raise ValueError(f"{function}: {name} is {value}, expected 1 to {most}")
        if not self.is_empty and self.tokens > MAX_TOKENS:
            raise ValueError(f"{function}: H*W is {self.tokens}, expected at most {MAX_TOKENS}")
        return self


@functools.lru_cache(maxsize=4096)
def _from_qkv(function: str, shape: tuple[int, ...], num_heads: int, key_dim: int | None) -> PSAGeometry:
    require_integer(function, "num_heads", num_heads, 1)
    batch, channels, height, width = _require_nchw(function, "qkv", shape)
    head_channels = _per_head(function, "qkv", channels, num_heads)
    if key_dim is None:
        if head_channels % 4:
            raise ValueError(
                f"{function}: qkv has {head_channels} channels per head, expected a multiple of 4 "
                "(key_dim, key_dim, 2*key_dim), or key_dim passed explicitly"
            )
        key_dim = head_channels // 4
    value_dim = head_channels - 2 * key_dim
    if value_dim < 1 and 1 <= key_dim <= MAX_KEY_DIM:
        raise ValueError(
            f"{function}: qkv has {head_channels} channels per head and key_dim is {key_dim}, "
            f"expected at least 2*key_dim + 1 = {2 * key_dim + 1}"
        )
    return PSAGeometry(batch, num_heads, key_dim, value_dim, height, width)._within_limits(function)


def _require_nchw(function: str, name: str, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    if len(shape) != 4:
        raise ValueError(f"{function}: {name} has shape {shape}, expected 4 dimensions (B, C, H, W)")
    return shape


def _per_head(function: str, name: str, channels: int, num_heads: int) -> int:
    if channels == 0 or channels % num_heads:
        raise ValueError(
            f"{function}: {name} has {channels} channels, which {num_heads} heads do not divide; "
            "expected a positive multiple of num_heads"
        )
    return channels // num_heads
