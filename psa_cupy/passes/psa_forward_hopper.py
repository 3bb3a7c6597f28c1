"""The Hopper variant of psa_forward: wgmma on tiles that TMA brings, for 16-bit types.

Belongs to kernels_cu/psa_forward_hopper.cu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from psa_cupy.geometry import PSAGeometry, ceil_divide, round_up
from psa_cupy.launching.plan import Device, Kernel, Launch, Operand, Plan, TensorMap
from psa_cupy.passes.descriptor import PSAProblem

NAME = "hopper"

_DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_MAX_KEY_DIM, _MAX_VALUE_DIM = 64, 128
_BOX_TOKENS, _ROW_BYTES = 64, 128


@dataclass(frozen=True)
class Tuning:
    """How the kernel uses a multiprocessor; the names are the kernel's constants in lower case."""

    warpgroups: int
    stages: int
    blocks_per_multiprocessor: int

    def constants(self) -> tuple[tuple[str, int], ...]:
        """As a Kernel wants them."""
        return tuple((name.upper(), value) for name, value in vars(self).items())


def supports(problem: PSAProblem, device: Device) -> bool:
    """Whether the variant runs the problem on the device.

    TMA wants 16-byte aligned rows: a multiple of 8 tokens, and aligned arrays.
    """
    geometry = problem.geometry
    return (
        device.tensor_maps
        and device.capability == (9, 0)
        and problem.dtype in _DTYPES
        and problem.aligned
        and geometry.tokens % 8 == 0
        and geometry.key_dim <= _MAX_KEY_DIM
        and geometry.value_dim <= _MAX_VALUE_DIM
    )


def plan(problem: PSAProblem, device: Device) -> Plan:
    """One launch; operands "qkv", "out", "lse"."""
    return plan_with(choose_tuning(problem.geometry, device), problem)


def choose_tuning(geometry: PSAGeometry, device: Device) -> Tuning:
    """As many warpgroups on a multiprocessor as registers and rings of three or four boxes allow.

    A fourth box is worth more than a fourth warpgroup, but not more than a third. Where there are few tiles
    of queries, two or four warpgroups share the keys of each.

    Measured on an H200, 2026-12-01, bfloat16, microseconds. Heads of 32 and 64 channels, by (B, heads, N):
    (1, 2, 400) 7.7; (16, 4, 400) 13.7; (64, 4, 400) 33.9; (256, 4, 400) 105.4; (8, 4, 1600) 47.6;
    (4, 4, 6400) 293; (1, 4, 35344) 2332. One, two, four warpgroups for a tile's keys: (1, 2, 400) 8.5, 7.7,
    8.3; (1, 4, 1600) 18.1, 14.1, 12.9; (1, 1, 6400) 54.2, 34.8, 29.4; but (16, 4, 400), 448 tiles, 13.7,
    17.2, 23.3. Heads of 36 and 72 channels, four boxes for three warpgroups against three for four:
    (64, 4, 400) 40.4 and 42.2; (256, 4, 400) 128.7 and 131.3; (8, 4, 1600) 55.6 and 60.3.
    """
    most_warpgroups = 4 if geometry.key_dim <= 48 and geometry.value_dim <= 72 else 3
    for warpgroups in (4, 2, 1):
        if warpgroups > 1 and not _shares_keys(warpgroups, geometry, device):
            continue
        fitting = [
            tuning
            for blocks in range(1, most_warpgroups // warpgroups + 1)
            for tuning in (Tuning(warpgroups, 3, blocks), Tuning(warpgroups, 4, blocks))
            if _fits(tuning, geometry, device)
        ]
        if fitting:
            return max(fitting, key=_worth)
    raise ValueError(f"psa_forward: {device} has too little shared memory for the hopper variant")


def _fits(tuning: Tuning, geometry: PSAGeometry, device: Device) -> bool:
    """Whether so many blocks fit a multiprocessor."""
    return _shared_bytes(tuning, geometry) <= device.shared_bytes_of_each(tuning.blocks_per_multiprocessor)


def _worth(tuning: Tuning) -> tuple[int, int, int]:
    """Three warpgroups on a multiprocessor come first, then the boxes of a ring, then more blocks."""
    blocks = tuning.blocks_per_multiprocessor
    return min(tuning.warpgroups * blocks, 3), tuning.stages, blocks


def _shares_keys(warpgroups: int, geometry: PSAGeometry, device: Device) -> bool:
    """Whether so many warpgroups shall share the keys of a tile of queries.

    Where even then there are no more than two for each multiprocessor, and each has three boxes of keys.
    """
    tiles = _tiles(geometry.tokens)
    return warpgroups * geometry.bh * tiles <= 2 * device.multiprocessors and tiles >= 3 * warpgroups


def plan_with(tuning: Tuning, problem: PSAProblem) -> Plan:
    """The plan of a given tuning."""
    geometry = problem.geometry
    kernel = Kernel(
        "psa_forward_hopper.cu",
        "psa_forward_hopper",
        constants=(
            ("T", problem.dtype),
            ("KEY_DIM", geometry.key_dim),
            ("VALUE_DIM", geometry.value_dim),
            ("JOINED_BOX", _joined_box(geometry)),
            *tuning.constants(),
        ),
        arch="sm_90a",
    )
    tiles = _tiles(geometry.tokens)
    return Plan(
        launches=(
            Launch(
                kernel,
                grid=(geometry.bh * tiles, 1, 1),
                block=(128 * tuning.warpgroups, 1, 1),
                arguments=(
                    *tensor_maps(geometry),
                    Operand("out"),
                    Operand("lse"),
                    np.int32(geometry.tokens),
                    np.uint32((2**32 - 1) // tiles),
                    np.float32(problem.scale * math.log2(math.e)),
                ),
                shared_bytes=_shared_bytes(tuning, geometry),
            ),
        )
    )


def tensor_maps(geometry: PSAGeometry) -> tuple[TensorMap, TensorMap, TensorMap]:
    """Maps (tokens, channels, bh) of q, k and v in qkv.

    One map each: channels past a section's own are outside its map and arrive as zeros. Where there are none
    such, the map of k covers v, too, and one copy brings both.
    """
    tokens, key_dim, value_dim = geometry.tokens, geometry.key_dim, geometry.value_dim
    more = value_dim if _joined_box(geometry) else 0
    sections = (
        (0, key_dim, _key_rows(geometry)),
        (key_dim, key_dim + more, _key_rows(geometry) + more),
        (2 * key_dim, value_dim, _value_rows(geometry)),
    )
    return tuple(
        TensorMap(
            "qkv",
            offset=first_channel * tokens,
            dims=(tokens, channels, geometry.bh),
            strides=(tokens, geometry.head_channels * tokens),
            box=(_BOX_TOKENS, rows, 1),
        )
        for first_channel, channels, rows in sections
    )


def _joined_box(geometry: PSAGeometry) -> bool:
    """Whether K and V need no padding rows between and after them."""
    return geometry.key_dim % 16 == 0 and geometry.value_dim % 8 == 0


def _key_rows(geometry: PSAGeometry) -> int:
    """Channels of Q and K in shared memory: wgmma multiplies 16 at a time."""
    return round_up(geometry.key_dim, 16)


def _value_rows(geometry: PSAGeometry) -> int:
    """Channels of V in shared memory: wgmma makes results 8 at a time."""
    return round_up(geometry.value_dim, 8)


def _tiles(tokens: int) -> int:
    """Tiles of 64 queries, and boxes of 64 keys, of a head."""
    return ceil_divide(tokens, _BOX_TOKENS)


def _shared_bytes(tuning: Tuning, geometry: PSAGeometry) -> int:
    boxes = tuning.stages * tuning.warpgroups
    box_rows = _key_rows(geometry) + _value_rows(geometry)
    barriers = 2 * boxes + 1
    return (boxes * box_rows + _key_rows(geometry)) * _ROW_BYTES + barriers * 8
