"""The portable fused backward (mma.sync, sm_80 and later): which problems it takes, and its plan.

The kernel is in kernels_cu/psa_backward.cu, whose header tells the design: one launch owns d_q and leaves
behind what a row of scores needs (lse, delta), the next owns d_k and d_v. Here the sizes are chosen: warps
per block, and whether the other side of a head stays in shared memory or passes through it in chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from psa_cupy.arguments import lse_dtype
from psa_cupy.geometry import PSAGeometry, ceil_divide, round_up
from psa_cupy.launching.plan import Device, Kernel, Launch, Operand, Plan, Scratch
from psa_cupy.passes.descriptor import PSAProblem

NAME = "portable"

_FILE = "psa_backward.cu"
_STEP = 16
"""Moving tokens of a step (the kernel's STEP)."""
_ROWS_UNIT = 32
"""The pairs of a head come in these (the kernel's ROWS_UNIT): the larger of the two tiles."""
_MAX_REGISTERS = 255
"""Of a thread."""


@dataclass(frozen=True)
class Tile:
    """How a block is made up: compile-time choices of the kernel."""

    warps: int
    blocks_per_multiprocessor: int
    chunk: int
    """Moving tokens that are in shared memory together, a multiple of 16."""
    stages: int
    """Chunks there is room for."""
    resident: bool
    """Whether the one chunk holds all tokens."""
    stationary_in_registers: bool
    """Whether a warp holds its own operands in registers; else it reads them again in each step."""
    tokens: int = 16
    """Stationary tokens of a warp: 16 or 32."""


# Best first: H200, 2026-12-01, us. Warps, blocks of a multiprocessor, tokens of a warp's tile.
#     bfloat16 at (64, 4, 400): keys    4 x 2 of 32: 65.5, 8 x 2: 68.9, 7 x 1 of 32: 70.5, 8 x 1 of 32: 72.6
#                               queries 10 x 2: 57.2, 9 x 2: 59.5; of 32, 4 x 2: 72.8, 12 x 1: 79.1
#         dims 36 and 72:       keys    7 x 1 of 32: 85.4, 8 x 1: 92.4; 12 x 1: 91.6, but it spills on sm_100
#                               queries 13 x 1: 74.5, 7 x 1 of 32: 89.3
#     float32:                  keys    8 x 1: 322.4, 9 x 1: 408.4, in chunks 347.0
#                               queries 8 x 1: 239.0, 12 x 1: 247.1, in chunks 274.4
_RESIDENT = {
    True: ((4, 2, 32), (8, 2, 16), (7, 1, 32), (8, 1, 16)),
    False: ((10, 2, 16), (13, 1, 16), (8, 1, 16)),
}
"""Of key and of query tasks, where all moving tokens stay in shared memory."""
# Likewise, and the tokens of a chunk.
#     bfloat16 at (8, 4, 1600): keys    8 x 1 of 32, 128: 128.8, 4 x 2 of 32, 128: 135.6, 8 x 2, 128: 146.9
#                                       (but spills on sm_100), 6 x 2, 128: 158.3
#                               queries 8 x 2, 128: 108.2, 10 x 2, 64: 110.3; of 32, 4 x 3, 64: 124.1
#     float32:                  keys    4 x 2, 64: 678.7, 8 x 1, 64: 716.4
#                               queries 4 x 2, 64: 488.3, 8 x 1, 64: 513.7, 4 x 3, 48: 553.1
_SMALL = ((4, 2, 16, 64), (8, 1, 16, 64), (4, 1, 16, 64), (4, 1, 16, 16))
_PASSING = {True: ((8, 1, 32, 128), (6, 2, 16, 128), *_SMALL), False: ((8, 2, 16, 128), *_SMALL)}
"""Of key and of query tasks, where they pass by in chunks."""


def supports(problem: PSAProblem, device: Device) -> bool:
    """Whether the kernels take the problem: any whose tiles fit into shared memory, from sm_80 on."""
    return device.capability >= (8, 0) and all(choose_tile(problem, device, keys) for keys in (True, False))


def plan(problem: PSAProblem, device: Device) -> Plan:
    """The launches of psa_backward: operands d_out, qkv, out, lse, d_qkv, and d_v_branch if there is one."""
    if problem.geometry.is_empty:
        return Plan()
    tiles = [choose_tile(problem, device, keys) for keys in (True, False)]
    return plan_with_tiles(problem, device, *tiles)


def choose_tile(problem: PSAProblem, device: Device, keys: bool) -> Tile | None:
    """The tile of the key or the query tasks: the first that fits, best first; None if none does."""
    whole = round_up(problem.geometry.tokens, _STEP)
    candidates = []
    for held in (True, False):
        candidates += [Tile(w, blocks, whole, 1, True, held, tokens) for w, blocks, tokens in _RESIDENT[keys]]
        candidates += [
            Tile(w, blocks, min(chunk, whole), 2, False, held, tokens)
            for w, blocks, tokens, chunk in _PASSING[keys]
        ]
    if not _wide_tiles_pay(problem, device):
        candidates = [tile for tile in candidates if tile.tokens == 16]
    candidates = [
        tile for tile in candidates if _registers(problem, tile, keys) <= _registers_there_are(tile)
    ]
    # Sums that fill the registers go in and out of memory: one chunk leaves them more than two.
    stages = (2, 1) if _sum_registers(problem, keys) < _MAX_REGISTERS else (1,)
    candidates += [Tile(w, 1, _STEP, s, False, False) for w in (4, 2, 1) for s in stages]
    return next((tile for tile in candidates if _fits(problem, device, tile, keys)), None)


def plan_with_tiles(problem: PSAProblem, device: Device, key_tile: Tile, query_tile: Tile) -> Plan:
    """`plan` with tiles of the caller's choice: tests compare them."""
    geometry = problem.geometry
    accumulator = lse_dtype(problem.dtype)
    rows = Scratch("rows", (geometry.bh, round_up(geometry.tokens, _ROWS_UNIT), 2), accumulator)
    launches = (
        _launch(problem, device, rows, query_tile, keys=False),
        _launch(problem, device, rows, key_tile, keys=True),
    )
    return Plan(launches, (rows,))


def _launch(problem: PSAProblem, device: Device, rows: Scratch, tile: Tile, keys: bool) -> Launch:
    geometry = problem.geometry
    tiles = ceil_divide(geometry.tokens, tile.tokens)
    tiles_per_block = _tiles_per_block(tiles, geometry.bh, device, tile) if tile.resident else tile.warps
    blocks_per_head = ceil_divide(tiles, tiles_per_block)
    real = lse_dtype(problem.dtype).type
    scale = problem.scale
    # The softmax of one score is 1, exactly: the kernel is told a score of 0 (and the rows, an lse of 0).
    scale_log2 = scale * math.log2(math.e) if geometry.tokens > 1 else 0.0
    return Launch(
        kernel=Kernel(_FILE, "psa_backward", _constants(problem, tile, keys)),
        grid=(geometry.bh * blocks_per_head, 1, 1),
        block=(32 * tile.warps, 1, 1),
        arguments=(
            Operand("d_out"),
            Operand("qkv"),
            Operand("out"),
            Operand("lse"),
            Operand(rows.name),
            Operand("d_v_branch" if problem.branch else "d_out"),  # read only with a branch
            Operand("d_qkv"),
            np.int32(geometry.tokens),
            np.int32(blocks_per_head),
            np.int32(tiles_per_block),
            real(scale_log2),
            real(scale),
        ),
        shared_bytes=_shared_bytes(problem, tile, keys),
    )


def _constants(problem: PSAProblem, tile: Tile, keys: bool) -> tuple:
    return (
        ("T", problem.dtype),
        ("KEY_DIM", problem.geometry.key_dim),
        ("VALUE_DIM", problem.geometry.value_dim),
        ("KEYS", keys),
        ("TILE", tile.tokens),
        ("WARPS", tile.warps),
        ("BLOCKS_PER_MULTIPROCESSOR", tile.blocks_per_multiprocessor),
        ("CHUNK", tile.chunk),
        ("STAGES", tile.stages),
        ("RESIDENT", tile.resident),
        ("STATIONARY_IN_REGISTERS", tile.stationary_in_registers),
        ("COPY_BYTES", _copy_bytes(problem)),
        ("BRANCH", problem.branch and keys),
        ("ACCUMULATE", problem.accumulate),
    )


def _copy_bytes(problem: PSAProblem) -> int:
    """The widest copy, at most 16 bytes, that divides every row and so every address."""
    itemsize = problem.dtype.itemsize
    if not problem.aligned:
        return itemsize
    return max(
        size for size in (16, 8, 4, 2) if size == itemsize or problem.geometry.tokens * itemsize % size == 0
    )


def _tiles_per_block(tiles: int, heads: int, device: Device, tile: Tile) -> int:
    """Few enough that blocks fill the device, and as many as that allows: each block loads the whole head."""
    slots = device.multiprocessors * tile.blocks_per_multiprocessor
    blocks = min(ceil_divide(tiles, tile.warps), max(1, slots // heads))
    return ceil_divide(tiles, blocks)


def _wide_tiles_pay(problem: PSAProblem, device: Device) -> bool:
    """Whether a warp may have 32 tokens: pays in 16-bit types, if every quarter multiprocessor gets a tile.

    Copies of single elements and additions to d_qkv would make such tiles spill.
    """
    geometry = problem.geometry
    tiles = geometry.bh * ceil_divide(geometry.tokens, 32)
    simple = _copy_bytes(problem) > 2 and not problem.accumulate
    return problem.dtype.itemsize == 2 and simple and tiles >= 4 * device.multiprocessors


def _registers(problem: PSAProblem, tile: Tile, keys: bool) -> int:
    """An estimate of a thread's registers: sums, operands if held, one step's scores, and addresses."""
    geometry: PSAGeometry = problem.geometry
    itemsize = problem.dtype.itemsize
    words = 2 if itemsize == 8 else 1
    # In 32-bit words a thread holds of 16 tokens x 16 channels: 4 of 16-bit types; float32 in two parts.
    held = {2: 4, 4: 16, 8: 16}[itemsize] * (
        ceil_divide(geometry.key_dim, 16) + ceil_divide(geometry.value_dim, 16)
    )
    halves = tile.tokens // 16
    of_tile = _sum_registers(problem, keys) + (held if tile.stationary_in_registers else 0) + 16 * words
    passing = 8 + 8 * halves if itemsize == 2 and not tile.resident else 0
    extras = 22 if itemsize == 2 and keys and (problem.branch or problem.accumulate) else 0
    return halves * of_tile + 20 * words + {2: 8, 4: 16, 8: 0}[itemsize] + passing + extras


def _sum_registers(problem: PSAProblem, keys: bool) -> int:
    """Registers of a thread for the gradients of 16 tokens."""
    words = 2 if problem.dtype.itemsize == 8 else 1
    geometry = problem.geometry
    key_columns, value_columns = ceil_divide(geometry.key_dim, 8), ceil_divide(geometry.value_dim, 8)
    return 4 * words * (key_columns + (value_columns if keys else 0))


def _registers_there_are(tile: Tile) -> int:
    """Registers a thread may have: a quarter of a multiprocessor has 16384, handed out by eights."""
    warps_of_a_quarter = ceil_divide(tile.warps * tile.blocks_per_multiprocessor, 4)
    return min(_MAX_REGISTERS, 16384 // (32 * warps_of_a_quarter) // 8 * 8)


def _fits(problem: PSAProblem, device: Device, tile: Tile, keys: bool) -> bool:
    return _shared_bytes(problem, tile, keys) <= device.shared_bytes_of_each(tile.blocks_per_multiprocessor)


def _shared_bytes(problem: PSAProblem, tile: Tile, keys: bool) -> int:
    """The kernel's shared memory: chunks of moving tokens, their rows' pairs, a stationary tile per warp."""
    itemsize = problem.dtype.itemsize
    unit = 16 if itemsize == 2 else 8
    channels = round_up(problem.geometry.key_dim, unit) + round_up(problem.geometry.value_dim, unit)
    pitch = tile.chunk + (8 if itemsize < 8 else 4 if tile.chunk > _STEP else 0)
    tile_pitch = tile.tokens + (8 if tile.tokens > 16 else 0)
    pairs = 2 * lse_dtype(problem.dtype).itemsize * tile.stages * tile.chunk if keys else 0
    return channels * itemsize * (tile.stages * pitch + tile.warps * tile_pitch) + pairs
