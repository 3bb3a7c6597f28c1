"""The fused backward on Hopper's own instructions (wgmma, TMA): which problems it takes, and its plan.

The kernel is kernels_cu/psa_backward_hopper.cu, whose header tells the design. Here its sizes are chosen:
how many warpgroups share the boxes of moving tokens, whether a head's boxes all fit into shared memory
(resident) or pass through a ring, and how the tiles of a head are spread over blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from psa_cupy.geometry import PSAGeometry, ceil_divide, round_up
from psa_cupy.launching.plan import Device, Kernel, Launch, Operand, Plan, Scratch, TensorMap
from psa_cupy.passes.descriptor import PSAProblem

NAME = "hopper"

_FILE = "psa_backward_hopper.cu"
_TILE = 64
"""Tokens of a tile and of a box (the kernel's TILE)."""
_MAX_COLUMNS = 128
"""The widest operand the wgmma wrappers are made for."""
_MAX_RING = 8
"""Boxes of a ring: more would not be in flight."""


@dataclass(frozen=True)
class Layout:
    """How a block is made up: compile-time choices of the kernel."""

    warpgroups: int
    blocks_per_multiprocessor: int
    keys_in_registers: bool
    """Whether a key task holds its K and V in registers; else wgmma reads them from shared memory."""


TWO_BLOCKS = Layout(warpgroups=2, blocks_per_multiprocessor=2, keys_in_registers=False)
"""At most 128 registers a thread."""
THREE_WARPGROUPS = Layout(warpgroups=3, blocks_per_multiprocessor=1, keys_in_registers=True)
"""At most 168 registers a thread."""
THREE_WARPGROUPS_SHARED_KEYS = Layout(warpgroups=3, blocks_per_multiprocessor=1, keys_in_registers=False)
TWO_WARPGROUPS = Layout(warpgroups=2, blocks_per_multiprocessor=1, keys_in_registers=True)
"""At most 255 registers a thread."""


def supports(problem: PSAProblem, device: Device) -> bool:
    """Whether the kernel takes the problem: 16-bit types, rows of 16-byte units, dims that fit registers."""
    return (
        device.capability == (9, 0)
        and device.tensor_maps
        and problem.dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
        and problem.aligned
        and problem.geometry.tokens % 8 == 0
        and choose_layout(problem) is not None
    )


def choose_layout(problem: PSAProblem) -> Layout | None:
    """The layout with the most warpgroups whose registers suffice, or None.

    A key task holds two accumulators of 64 x 32 (S, dP: 16 registers each), one of 64 x key_dim and one of
    64 x value_dim, P and dS (16), and about 30 registers besides; with K and V in registers 4 for each 16 of
    their channels, and a branch 4. (What the compiler really takes is checked by the tests: no spills.)

    Measured on an H200, bfloat16, in microseconds, at (BH, tokens) = (64, 400), (256, 400), (1024, 400),
    (32, 1600) and (16, 6400), key_dim 32 and value_dim 64: two blocks of two warpgroups 31.6, 91.6, 319, 148
    and 849; one block of four 35.7, 98.6, 355, 144 and 869; one of three, keys in registers, 35.1, 102, 366,
    141 and 888. key_dim 36 and value_dim 72: one block of three, keys in registers, 39.7, 114, 415, 155 and
    974. key_dim 64 and value_dim 128: one block of two 58.8, 171, 621 and 219 (not run at 6400).
    """
    geometry = problem.geometry
    columns = round_up(geometry.key_dim, 8), round_up(geometry.value_dim, 8)
    if max(columns) > _MAX_COLUMNS:
        return None
    registers = 32 + sum(columns) // 2 + 16 + 30
    with_keys = registers + (round_up(geometry.key_dim, 16) + round_up(geometry.value_dim, 16)) // 4
    with_keys += 4 * problem.branch
    if registers <= 126:
        return TWO_BLOCKS
    if with_keys <= 166:
        return THREE_WARPGROUPS
    if registers <= 160:
        return THREE_WARPGROUPS_SHARED_KEYS
    return TWO_WARPGROUPS if with_keys <= 240 else None


def plan(problem: PSAProblem, device: Device) -> Plan:
    """The launches of psa_backward: operands d_out, qkv, out, lse, d_qkv, and d_v_branch if there is one."""
    geometry = problem.geometry
    if geometry.is_empty:
        return Plan()
    layout = choose_layout(problem)
    boxes = ceil_divide(geometry.tokens, _TILE)
    stages = _stages_that_fit(geometry, device, layout)
    resident = boxes <= stages
    stages = boxes if resident else min(stages, _MAX_RING)
    tiles_per_block = _tiles_per_block(boxes, geometry.bh, device, layout) if resident else layout.warpgroups
    blocks_per_head = ceil_divide(boxes, tiles_per_block)
    slots = device.multiprocessors * layout.blocks_per_multiprocessor
    heads_per_wave = min(geometry.bh, max(1, slots // (2 * blocks_per_head)))

    constants = (
        ("T", problem.dtype),
        ("KEY_DIM", geometry.key_dim),
        ("VALUE_DIM", geometry.value_dim),
        ("WARPGROUPS", layout.warpgroups),
        ("BLOCKS_PER_SM", layout.blocks_per_multiprocessor),
        ("KEYS_IN_REGISTERS", layout.keys_in_registers),
        ("STAGES", stages),
        ("RESIDENT", resident),
        ("BRANCH", problem.branch),
        ("ACCUMULATE", problem.accumulate),
    )
    scale_log2, log2_e = _factors(problem.scale)
    rows = Scratch("rows", (geometry.bh, boxes * _TILE, 2), np.dtype(np.float32))
    fused = Launch(
        kernel=_kernel("psa_backward_hopper", constants),
        grid=(2 * geometry.bh * blocks_per_head, 1, 1),
        block=(128 * layout.warpgroups, 1, 1),
        arguments=(
            *_tensor_maps(geometry),
            Operand("out"),
            Operand("lse"),
            Operand("lse" if resident else rows.name),  # read only if not resident
            Operand("d_v_branch" if problem.branch else "out"),  # read only with a branch
            Operand("d_qkv"),
            np.int32(geometry.bh),
            np.int32(heads_per_wave),
            np.int32(tiles_per_block),
            np.int32(geometry.tokens),
            np.float32(problem.scale),
            scale_log2,
            *log2_e,
        ),
        shared_bytes=_shared_bytes(geometry, layout, stages),
    )
    if resident:
        return Plan((fused,))
    row_pairs = Launch(
        kernel=_kernel("psa_backward_hopper_rows", constants),
        grid=(geometry.bh * boxes, 1, 1),
        block=(128, 1, 1),
        arguments=(
            Operand("out"),
            Operand("d_out"),
            Operand("lse"),
            Operand(rows.name),
            np.int32(geometry.tokens),
            *log2_e,
        ),
    )
    return Plan((row_pairs, fused), (rows,))


def _factors(scale: float) -> tuple[np.float32, tuple[np.float32, np.float32]]:
    """Rounded scale*log2 e for scores, and for lse that number over scale: log2 e in two words, nearly.

    Both sides of the exponent are so multiplied by the same number, whose rounding would otherwise be an
    error proportional to the scores. Where the rounded product has lost digits, or scale is 0, lse takes
    log2 e itself.
    """
    scale_log2 = np.float32(scale * math.log2(math.e))
    factor = float(scale_log2) / scale if abs(scale_log2) > 1e-30 else math.log2(math.e)
    high = np.float32(factor)
    return scale_log2, (high, np.float32(factor - float(high)))


def _kernel(entry: str, constants: tuple) -> Kernel:
    return Kernel(_FILE, entry, constants, arch="sm_90a")


def _tensor_maps(geometry: PSAGeometry) -> tuple[TensorMap, ...]:
    """q, k, v and d_out as (tokens, channels, BH), in boxes of 64 tokens by all channels (whole 16s)."""
    tokens = geometry.tokens

    def view(name: str, first_channel: int, channels: int, channels_per_head: int) -> TensorMap:
        return TensorMap(
            name,
            offset=first_channel * tokens,
            dims=(tokens, channels, geometry.bh),
            strides=(tokens, channels_per_head * tokens),
            box=(_TILE, round_up(channels, 16), 1),
        )

    key_dim, value_dim, head = geometry.key_dim, geometry.value_dim, geometry.head_channels
    return (
        view("qkv", 0, key_dim, head),
        view("qkv", key_dim, key_dim, head),
        view("qkv", 2 * key_dim, value_dim, head),
        view("d_out", 0, value_dim, value_dim),
    )


def _tiles_per_block(tiles: int, heads: int, device: Device, layout: Layout) -> int:
    """Few enough that blocks fill the device, and as many as that allows: each block loads the whole head."""
    slots = device.multiprocessors * layout.blocks_per_multiprocessor
    most_blocks = ceil_divide(tiles, layout.warpgroups)
    blocks = min(most_blocks, max(1, slots // (2 * heads)))
    return ceil_divide(tiles, blocks)


def _stages_that_fit(geometry: PSAGeometry, device: Device, layout: Layout) -> int:
    """How many boxes of moving tokens a block has room for."""
    room = device.shared_bytes_of_each(layout.blocks_per_multiprocessor)
    without = _shared_bytes(geometry, layout, 0)
    return (room - without) // (_shared_bytes(geometry, layout, 1) - without)


def _shared_bytes(geometry: PSAGeometry, layout: Layout, stages: int) -> int:
    """The kernel's shared memory: boxes of tiles and stages, 64 pairs of floats a stage, barriers."""
    box = 128 * (round_up(geometry.key_dim, 16) + round_up(geometry.value_dim, 16))
    barriers = 8 * (2 * stages + layout.warpgroups)
    return (layout.warpgroups + stages) * box + stages * _TILE * 8 + barriers
