"""The portable variant of psa_forward: one launch on mma.sync, for 16-bit types, sm_80 and later.

Belongs to kernels_cu/psa_forward.cu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from psa_cupy.geometry import PSAGeometry, ceil_divide, round_up
from psa_cupy.launching.plan import Device, Kernel, Launch, Operand, Plan
from psa_cupy.passes.descriptor import PSAProblem

NAME = "portable"

_DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


@dataclass(frozen=True)
class Tile:
    """How a block is made up; the names are the kernel's constants in lower case."""

    warps: int
    query_tiles: int
    chunk: int
    lookahead: int
    resident: bool
    min_blocks: int

    @property
    def queries(self) -> int:
        """Queries that all warps of a block work on at once."""
        return 16 * self.query_tiles * self.warps

    def constants(self) -> tuple[tuple[str, int | bool], ...]:
        """As a Kernel wants them."""
        return tuple((name.upper(), value) for name, value in vars(self).items())


def supports(problem: PSAProblem, device: Device) -> bool:
    """Whether the variant runs the problem on the device."""
    return problem.dtype in _DTYPES and device.capability >= (8, 0)


def plan(problem: PSAProblem, device: Device) -> Plan:
    """One launch; operands "qkv", "out", "lse"."""
    tile, splits = choose_tile(problem, device)
    return plan_with(tile, splits, problem)


def choose_tile(problem: PSAProblem, device: Device) -> tuple[Tile, int]:
    """The tile, and how many blocks share the queries of one head.

    Measured on an H200 (2026-12-01, bfloat16, microseconds). Resident, each K and V read once, wins where a
    multiprocessor holds two such blocks: (64, 4, 400) 38.8, the best streaming tile 46.1. With more channels
    it still does where it holds one: key_dim 36 56.5, streaming 58.7. All other heads are streamed, with two
    tiles of queries per warp where registers allow: (8, 4, 1600) 74, (4, 4, 6400) 512.
    """
    return _resident(problem, device) or _streaming(problem.geometry, device)


def _resident(problem: PSAProblem, device: Device) -> tuple[Tile, int] | None:
    """For heads whose K and V stay in shared memory; None for others.

    A head is split only as far as all blocks still run at once. Of an earlier kernel: (64, 4, 400) by two
    blocks 45.7, by one 43.5; (16, 4, 400) by five 26.9, by four 19.1 (of this one 18.3), by one 27.3.
    """
    geometry = problem.geometry
    few_channels = _has_few_channels(geometry)
    blocks = 2 if few_channels else 1
    tiles = ceil_divide(geometry.tokens, 16)
    splits = max(1, min(tiles // 4, blocks * device.multiprocessors // geometry.bh))
    most = 8 if _has_many_channels(geometry) else 13
    # few values, so that few kernels serve all numbers of tokens
    warps = next((w for w in (4, 7) if w * splits >= tiles), most)
    tile = Tile(warps, 1, _resident_chunk(problem), lookahead=2, resident=True, min_blocks=blocks)
    return (tile, splits) if _holds(device, tile, geometry) else None


def _resident_chunk(problem: PSAProblem) -> int:
    """Keys that arrive at once.

    Where rows have to be moved into place, a warp does it for two rows of 112 keys with 30 of its lanes, of
    80 with 22, of 144 for one with 19. Tokens (64, 4): 361 63.8, 66.5 and 64.9, 398 53.3, 56.6 and 56.0,
    399 67.0, 70.8 and 68.0. Aligned rows are best in small chunks: 400 40.7, 38.8 and 41.6.
    """
    return 80 if _width(problem) == 8 else 112


def _streaming(geometry: PSAGeometry, device: Device) -> tuple[Tile, int]:
    """For heads of any length: the largest tile that a multiprocessor holds `min_blocks` times."""
    if _has_few_channels(geometry):
        warps = 7 if 224 < geometry.tokens <= 448 else 8  # 400 queries: two blocks
        shapes = [(warps, 2, 64, 3, 2), (warps, 2, 32, 2, 2)]
    else:
        query_tiles = 1 if _has_many_channels(geometry) else 2
        shapes = [(4, query_tiles, 64, 2, 3), (4, query_tiles, 32, 2, 2)]
    tiles = [Tile(w, q, c, ahead, False, blocks) for w, q, c, ahead, blocks in shapes]
    smallest = Tile(4, query_tiles=1, chunk=16, lookahead=2, resident=False, min_blocks=1)
    tile = next((t for t in tiles if _holds(device, t, geometry)), smallest)
    return tile, ceil_divide(geometry.tokens, tile.queries)


def _has_few_channels(geometry: PSAGeometry) -> bool:
    """Whether two blocks of 13 warps have registers enough."""
    return geometry.key_dim <= 32 and geometry.value_dim <= 64


def _has_many_channels(geometry: PSAGeometry) -> bool:
    """Whether a warp's registers hold no second tile of queries."""
    return geometry.key_dim > 64 or geometry.value_dim > 96


def _holds(device: Device, tile: Tile, geometry: PSAGeometry) -> bool:
    """Whether a multiprocessor's shared memory is enough for `min_blocks` blocks."""
    return shared_bytes(tile, geometry) <= device.shared_bytes_of_each(tile.min_blocks)


def plan_with(tile: Tile, splits: int, problem: PSAProblem) -> Plan:
    """The plan of a given tile; every head's queries are shared by `splits` blocks."""
    geometry = problem.geometry
    kernel = Kernel(
        "psa_forward.cu",
        "psa_forward",
        constants=(
            ("T", problem.dtype),
            ("KEY_DIM", geometry.key_dim),
            ("VALUE_DIM", geometry.value_dim),
            *tile.constants(),
            ("WIDTH", _width(problem)),
        ),
    )
    launch = Launch(
        kernel,
        grid=(geometry.bh * splits, 1, 1),
        block=(32 * tile.warps, 1, 1),
        arguments=(
            Operand("qkv"),
            Operand("out"),
            Operand("lse"),
            np.int32(geometry.tokens),
            np.int32(splits),
            np.float32(problem.scale * math.log2(math.e)),
        ),
        shared_bytes=shared_bytes(tile, geometry),
    )
    return Plan((launch,))


def _width(problem: PSAProblem) -> int:
    """Tokens of the widest access that the alignment of all rows allows; four are no better than two."""
    if not problem.aligned or problem.geometry.tokens % 2:
        return 1
    return 2 if problem.geometry.tokens % 8 else 8


def shared_bytes(tile: Tile, geometry: PSAGeometry) -> int:
    """The slots of K and V, and each warp's tile of Q, in rows padded by 8 tokens."""
    key_rows, value_rows = (round_up(dim, 16) for dim in (geometry.key_dim, geometry.value_dim))
    slots = ceil_divide(geometry.tokens, tile.chunk) if tile.resident else tile.lookahead + 1
    slot = (key_rows + value_rows) * (tile.chunk + 8)
    queries = tile.warps * key_rows * (16 * tile.query_tiles + 8)
    return 2 * (slots * slot + queries)
