"""The portable variant of psa_forward: one launch on mma.sync, for 16-bit types, sm_80 and later.

Belongs to kernels_cu/psa_forward.cu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from psa_cupy.geometry import PSAGeometry
from psa_cupy.launching.plan import Device, Kernel, Launch, Operand, Plan
from psa_cupy.passes.descriptor import PSAProblem

NAME = "portable"

_DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_BLOCK_RESERVE = 1024
"""Shared memory that the system takes of a multiprocessor for each block, in bytes."""


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
    tile, splits = choose_tile(problem.geometry, device)
    return plan_with(tile, splits, problem)


def choose_tile(geometry: PSAGeometry, device: Device) -> tuple[Tile, int]:
    """The tile, and how many blocks share the queries of one head.

    Heads whose K and V fit a multiprocessor twice stay resident, read once for all queries; longer ones are
    streamed. A head's queries are spread over more blocks while the multiprocessors are not all busy.
    """
    many_registers = geometry.value_dim > 96 or geometry.key_dim > 64
    tiles = -(-geometry.tokens // 16)
    blocks = 1 if many_registers else 2
    resident = Tile(warps=min(8 if many_registers else 13, tiles), query_tiles=1, chunk=80, lookahead=2,
                    resident=True, min_blocks=blocks)  # fmt: skip
    room = (device.shared_bytes + _BLOCK_RESERVE) // blocks - _BLOCK_RESERVE
    if shared_bytes(resident, geometry) <= room:
        wanted = -(-blocks * device.multiprocessors // geometry.bh)
        return resident, max(1, min(tiles // 4, wanted))

    streaming = Tile(warps=4, query_tiles=1, chunk=64, lookahead=2, resident=False, min_blocks=blocks + 1)
    if shared_bytes(streaming, geometry) > device.shared_bytes:
        streaming = Tile(warps=4, query_tiles=1, chunk=16, lookahead=2, resident=False, min_blocks=1)
    return streaming, -(-geometry.tokens // streaming.queries)


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
            ("WIDTH", math.gcd(8, geometry.tokens) if problem.aligned else 1),
        ),
        min_capability=(8, 0),
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


def shared_bytes(tile: Tile, geometry: PSAGeometry) -> int:
    """The slots of K and V, and each warp's tile of Q, in rows padded by 8 tokens."""
    key_rows, value_rows = (-(-dim // 16) * 16 for dim in (geometry.key_dim, geometry.value_dim))
    slots = -(-geometry.tokens // tile.chunk) if tile.resident else tile.lookahead + 1
    slot = (key_rows + value_rows) * (tile.chunk + 8)
    queries = tile.warps * key_rows * (16 * tile.query_tiles + 8)
    return 2 * (slots * slot + queries)
