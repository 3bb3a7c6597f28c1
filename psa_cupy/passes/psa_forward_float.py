"""The portable variant of psa_forward for float32 and float64: one launch on mma.sync, sm_80 and later.

Belongs to kernels_cu/psa_forward_float.cu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from psa_cupy.geometry import PSAGeometry, ceil_divide, round_up
from psa_cupy.launching.plan import Device, Kernel, Launch, Operand, Plan
from psa_cupy.passes.descriptor import PSAProblem

NAME = "portable"

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
_MAX_REGISTERS = 255
"""Of a thread."""
_SPARED_REGISTERS = 23
"""By which the estimate for float32 may exceed the registers: spills of about 100 bytes at most, and the
tiles that need it are the fastest all the same (choose_tile)."""


@dataclass(frozen=True)
class Tile:
    """How a block is made up; the names are the kernel's constants in lower case."""

    warps: int
    query_tiles: int
    chunk: int
    min_blocks: int
    value_part: int

    @property
    def queries(self) -> int:
        """Queries that all warps of a block work on at once."""
        return 16 * self.query_tiles * self.warps

    def constants(self) -> tuple[tuple[str, int], ...]:
        """As a Kernel wants them."""
        return tuple((name.upper(), value) for name, value in vars(self).items())


def supports(problem: PSAProblem, device: Device) -> bool:
    """Whether the variant runs the problem on the device."""
    return problem.dtype in _DTYPES and device.capability >= (8, 0)


def plan(problem: PSAProblem, device: Device) -> Plan:
    """One launch; operands "qkv", "out", "lse"."""
    return plan_with(choose_tile(problem, device), problem)


def choose_tile(problem: PSAProblem, device: Device) -> Tile:
    """The first tile, best first, whose registers and shared memory suffice for the blocks it asks for.

    Measured on an H200 (2026-12-01, microseconds, (B, heads, tokens), key_dim 32 where nothing is said):
    float32, eight warps (8, 1, 32, 2): (64, 4, 400) 154, (16, 4, 400) 46, (1, 2, 400) 29, (8, 4, 1600) 278;
    four with two tiles of queries each (4, 2, 32, 2): 166, 47, 33, 305; (4, 1, 32, 3): 176, 72, 28, 351.
    At key_dim 36, where eight warps lack registers, (64, 4, 400): (4, 2, 32, 2) 245, (4, 1, 32, 3) 255,
    (4, 1, 32, 2) 298. float64: (64, 4, 400) and (1, 2, 400) by two blocks 407 and 40, by three 428 and 51.
    """
    part = _value_part(problem)
    candidates = [Tile(4, 1, chunk, blocks, part) for blocks in (4, 3, 2) for chunk in (32, 16)]
    if problem.dtype == np.float64:
        candidates = [tile for tile in candidates if tile.min_blocks == 2]
    double = Tile(4, 2, 32, 2, part)
    if _grid(double, problem.geometry) > device.multiprocessors:
        candidates.insert(0, double)
    if problem.dtype == np.float32:
        candidates.insert(0, Tile(8, 1, 32, 2, part))
    fitting = (tile for tile in candidates if _fits(problem, device, tile))
    return next(fitting, Tile(4, 1, 16, 1, part))


def plan_with(tile: Tile, problem: PSAProblem) -> Plan:
    """The plan of a given tile."""
    geometry = problem.geometry
    widest = 16 // problem.dtype.itemsize
    kernel = Kernel(
        "psa_forward_float.cu",
        "psa_forward_float",
        constants=(
            ("T", problem.dtype),
            ("KEY_DIM", geometry.key_dim),
            ("VALUE_DIM", geometry.value_dim),
            *tile.constants(),
            ("WIDTH", math.gcd(widest, geometry.tokens) if problem.aligned else 1),
        ),
    )
    launch = Launch(
        kernel,
        grid=(_grid(tile, geometry), 1, 1),
        block=(32 * tile.warps, 1, 1),
        arguments=(
            Operand("qkv"),
            Operand("out"),
            Operand("lse"),
            np.int32(geometry.tokens),
            np.int32(_splits(tile, geometry)),
            problem.dtype.type(problem.scale * math.log2(math.e)),
        ),
        shared_bytes=shared_bytes(tile, geometry, problem.dtype),
    )
    return Plan((launch,))


def shared_bytes(tile: Tile, geometry: PSAGeometry, dtype: np.dtype) -> int:
    """Two slots of K and V, for float32 in three and two parts of 16 bits, and the chunk on its way."""
    if dtype == np.float64:
        key_rows = round_up(geometry.key_dim, 4)
        return 2 * 8 * (key_rows * (tile.chunk + 4) + tile.value_part * (tile.chunk + 8))
    key_rows, value_rows = round_up(geometry.key_dim, 16), tile.value_part
    slot = 2 * (3 * key_rows + 2 * value_rows) * (tile.chunk + 8) + 4 * value_rows
    return 2 * slot + 4 * (key_rows + value_rows) * tile.chunk


def _splits(tile: Tile, geometry: PSAGeometry) -> int:
    """Blocks that share the queries of one head."""
    return ceil_divide(geometry.tokens, tile.queries)


def _grid(tile: Tile, geometry: PSAGeometry) -> int:
    return geometry.bh * ceil_divide(geometry.value_dim, tile.value_part) * _splits(tile, geometry)


def _fits(problem: PSAProblem, device: Device, tile: Tile) -> bool:
    if shared_bytes(tile, problem.geometry, problem.dtype) > device.shared_bytes_of_each(tile.min_blocks):
        return False
    threads = 32 * tile.warps * tile.min_blocks
    there_are = min(_MAX_REGISTERS, 65536 // threads // 8 * 8)  # of a multiprocessor's, by eights
    spared = _SPARED_REGISTERS if problem.dtype == np.float32 else 0
    return _registers(problem, tile.query_tiles, tile.value_part) <= there_are + spared


def _value_part(problem: PSAProblem) -> int:
    """Channels of V that a block takes: of equal parts, as many as a warp has registers for."""
    unit = 16 if problem.dtype == np.float32 else 8
    value_dim = problem.geometry.value_dim
    parts = 1
    while _registers(problem, 1, round_up(ceil_divide(value_dim, parts), unit)) > _MAX_REGISTERS:
        parts += 1
    return round_up(ceil_divide(value_dim, parts), unit)


def _registers(problem: PSAProblem, query_tiles: int, value_part: int) -> int:
    """An estimate for a thread: Q and sums of its tiles, and what a group of keys needs."""
    key_dim = problem.geometry.key_dim
    if problem.dtype == np.float64:
        return query_tiles * (round_up(key_dim, 4) + value_part + 32) + 30
    return query_tiles * (12 * ceil_divide(key_dim, 16) + value_part // 2 + 32) + 62
