"""FlashAttention-2 on packed heads, forward and backward, and its plain kernels' plans.

The kernels take the layout of their operands at compile time, so the same text also runs psa_forward and
psa_backward straight on NCHW arrays: `plain_psa_forward_plan` and `plain_psa_backward_plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from psa_cupy import reference
from psa_cupy.arguments import (
    lse_dtype,
    require_disjoint,
    require_dtype,
    require_ndim,
    require_shape,
    require_target,
    softmax_scale,
)
from psa_cupy.geometry import MAX_KEY_DIM, MAX_TOKENS, MAX_VALUE_DIM, ceil_divide, round_up
from psa_cupy.launching import place
from psa_cupy.launching.plan import Device, Kernel, Launch, Operand, Plan, Scratch
from psa_cupy.passes.descriptor import Pass, PSAProblem, Variant, always


class FlashAttentionForward(NamedTuple):
    """The results of `flash_attention_forward`."""

    o: object
    lse: object


class FlashAttentionBackward(NamedTuple):
    """The results of `flash_attention_backward`."""

    d_q: object
    d_k: object
    d_v: object


def flash_attention_forward(q, k, v, *, scale=None) -> FlashAttentionForward:
    """Attention of every head over packed tokens: `o = softmax(scale * q k^T) v`.

    Sums are formed in float32 (float64 for float64 arrays). No Nq x Nk array is made.

    Parameters
    ----------
    q : array, (BH, Nq, D)
        float16, bfloat16, float32 or float64; NumPy or CuPy. D is 1 to 128. Any strides; what is not in
        C order is copied once.
    k : array, (BH, Nk, D)
        dtype of q.
    v : array, (BH, Nk, Dv)
        dtype of q; Dv is 1 to 256, independent of D.
    scale : float, optional
        Softmax scale; `D ** -0.5` by default. Any number up to 1e38 in size (float64 arrays: 1e307), 0
        and negative ones, too.

    Returns
    -------
    FlashAttentionForward
        o (BH, Nq, Dv), dtype of q; lse (BH, Nq), the natural logarithm of the sum of the exponentials of
        the scaled scores, float32 (float64 for float64). Without keys (Nk = 0), o is 0 and lse -inf.

    Raises
    ------
    TypeError
        If an argument is no array, NumPy and CuPy are mixed, or dtypes differ or are not supported.
    ValueError
        If shapes do not fit together or exceed the limits, or scale is not finite.

    Notes
    -----
    FlashAttention-2 [1]_; the original design's flash_attention2_forward.

    References
    ----------
    .. [1] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
       arXiv:2307.08691.

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> q = k = np.zeros((2, 5, 4), np.float32)
    >>> o, lse = psa_cupy.flash_attention_forward(q, k, np.ones((2, 5, 3), np.float32))
    >>> o.shape, bool((o == 1).all()), bool(np.allclose(lse, np.log(5)))
    ((2, 5, 3), True, True)

    """
    name = "flash_attention_forward"
    where = place(name, q=q, k=k, v=v)
    problem = _problem(name, q, k, v, scale)
    if where.is_reference:
        return FlashAttentionForward(*reference.flash_attention_forward(q, k, v, scale=problem.scale))
    q, k, v = map(where.contiguous, (q, k, v))
    o = where.empty(problem.o_shape, problem.dtype)
    lse = where.empty(problem.lse_shape, problem.real)
    run_forward(where, problem, q, k, v, o, lse)
    return FlashAttentionForward(o, lse)


def flash_attention_backward(
    d_o, q, k, v, o, lse, *, scale=None, d_q=None, d_k=None, d_v=None
) -> FlashAttentionBackward:
    """The gradients of `flash_attention_forward` with respect to q, k and v.

    Parameters
    ----------
    d_o : array, (BH, Nq, Dv)
        The gradient of the loss with respect to o; dtype of q.
    q, k, v : array
        The inputs of flash_attention_forward.
    o, lse : array
        Its results.
    scale
        As in flash_attention_forward.
    d_q, d_k, d_v : array, optional
        Gradients to add to, atomically: C-contiguous, of the shape and dtype of q, k and v, apart from each
        other and from the inputs.

    Returns
    -------
    FlashAttentionBackward
        d_q, d_k, d_v of the shape and dtype of q, k and v: for each, the given one, added to, or a new one.

    Raises
    ------
    TypeError
        If an argument is no array, NumPy and CuPy are mixed, or dtypes differ or are not supported.
    ValueError
        If shapes do not fit together or exceed the limits, scale is not finite, or a target cannot be
        written to.

    Notes
    -----
    The probabilities are computed again from lse (FlashAttention-2, arXiv:2307.08691); the original
    design's psa_fa2_backward. The same call gives the same bits: every address of a gradient gets one
    finished sum, rounded once.

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4), dtype=np.float32)
    >>> o, lse = psa_cupy.flash_attention_forward(q, k, v)
    >>> d_q, d_k, d_v = psa_cupy.flash_attention_backward(np.ones_like(o), q, k, v, o, lse)
    >>> bool(np.allclose(d_v.sum(axis=1), 5, atol=1e-5))
    True

    """
    name = "flash_attention_backward"
    inputs = {"d_o": d_o, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    targets = {"d_q": d_q, "d_k": d_k, "d_v": d_v}
    where = place(name, **inputs, **targets)
    problem = _problem(name, q, k, v, scale)
    for input_name, shape, dtype in (
        ("d_o", problem.o_shape, problem.dtype),
        ("o", problem.o_shape, problem.dtype),
        ("lse", problem.lse_shape, problem.real),
    ):
        require_dtype(name, input_name, inputs[input_name], dtype)
        require_shape(name, input_name, inputs[input_name], shape)
    for target_name, like in (("d_q", q), ("d_k", k), ("d_v", v)):
        require_target(name, target_name, targets[target_name], like.shape, problem.dtype)
    require_disjoint(name, targets, inputs)

    if where.is_reference:
        results = reference.flash_attention_backward(*inputs.values(), scale=problem.scale, **targets)
        return FlashAttentionBackward(*results)
    inputs = {input_name: where.contiguous(array) for input_name, array in inputs.items()}
    gradients = FlashAttentionBackward(
        where.empty(q.shape, problem.dtype) if d_q is None else d_q,
        where.empty(k.shape, problem.dtype) if d_k is None else d_k,
        where.empty(v.shape, problem.dtype) if d_v is None else d_v,
    )
    accumulate = (d_q is not None, d_k is not None, d_v is not None)
    run_backward(where, problem, inputs, gradients, accumulate)
    return gradients


@dataclass(frozen=True)
class FlashProblem:
    """One call of the flash functions, as far as planning depends on it."""

    bh: int
    queries: int
    keys: int
    key_dim: int
    value_dim: int
    dtype: np.dtype
    scale: float
    aligned: bool = True
    """Whether the base address of every operand is a multiple of 16 bytes."""
    accumulate: tuple[bool, bool, bool] = (False, False, False)
    """Backward: for each of d_q, d_k, d_v, whether the caller gave the target, which is then added to."""

    @property
    def o_shape(self) -> tuple[int, int, int]:
        """(BH, Nq, Dv)."""
        return (self.bh, self.queries, self.value_dim)

    @property
    def lse_shape(self) -> tuple[int, int]:
        """(BH, Nq)."""
        return (self.bh, self.queries)

    @property
    def real(self) -> np.dtype:
        """What sums, lse and the scale are held in: float32, float64 for float64."""
        return lse_dtype(self.dtype)


def run_forward(where, problem: FlashProblem, q, k, v, o, lse) -> None:
    """Attention of contiguous arrays into o and lse, at `where` (not the reference)."""
    operands = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
    problem = replace(problem, aligned=where.aligned(*operands.values()))
    where.run(FLASH_ATTENTION.plan("forward", problem, where.device), operands)


def run_backward(where, problem: FlashProblem, inputs, gradients, accumulate) -> None:
    """Gradients of contiguous arrays, stored or added, at `where` (not the reference).

    `inputs` maps the names d_o, q, k, v, o, lse to arrays; `gradients` and `accumulate` are of q, k, v.
    """
    operands = {**inputs, **dict(zip(("d_q", "d_k", "d_v"), gradients, strict=True))}
    problem = replace(problem, aligned=where.aligned(*operands.values()), accumulate=accumulate)
    where.run(FLASH_ATTENTION.plan("backward", problem, where.device), operands)


def _problem(function: str, q, k, v, scale) -> FlashProblem:
    """Check q, k, v and scale against each other."""
    dtype = require_dtype(function, "q", q)
    require_dtype(function, "k", k, dtype)
    require_dtype(function, "v", v, dtype)
    bh, queries, key_dim = require_ndim(function, "q", q, ("BH", "Nq", "D"))
    _, keys, _ = require_ndim(function, "k", k, ("BH", "Nk", "D"))
    _, _, value_dim = require_ndim(function, "v", v, ("BH", "Nk", "Dv"))
    require_shape(function, "k", k, (bh, keys, key_dim))
    require_shape(function, "v", v, (bh, keys, value_dim))
    for name, array, dim, most in (("q", q, key_dim, MAX_KEY_DIM), ("v", v, value_dim, MAX_VALUE_DIM)):
        if not 1 <= dim <= most:
            raise ValueError(
                f"{function}: {name} has shape {array.shape}, expected a last dimension from 1 to {most}"
            )
    for name, array, tokens in (("q", q, queries), ("k", k, keys)):
        if tokens > MAX_TOKENS:
            raise ValueError(
                f"{function}: {name} has shape {array.shape}, expected at most {MAX_TOKENS} tokens"
            )
    scale = softmax_scale(function, scale, key_dim, dtype)
    return FlashProblem(bh, queries, keys, key_dim, value_dim, dtype, scale)


@dataclass(frozen=True)
class _Layout:
    """How the operands lie in memory: compile-time layout, and the elements from head to head."""

    channel_major: bool
    wide: bool
    """Whether 16-byte copies are possible."""
    q_stride: int
    k_stride: int
    v_stride: int
    o_stride: int


@dataclass(frozen=True)
class _Tile:
    """How a block is cut (kernels_cu/fma_tile.cuh): warps, and the scores of one thread."""

    warps: int
    rows: int
    columns: int

    @property
    def block_rows(self) -> int:
        return self.warps * 4 * self.rows

    @property
    def block_columns(self) -> int:
        return 8 * self.columns

    def shared_elements(self, row_channels: int, column_channels: int, unit: int) -> int:
        """Operand tiles of so many channels by row and by column, padded by 16 bytes, and the weights."""
        row_pitch, column_pitch = self.block_rows + unit, self.block_columns + unit
        return row_channels * row_pitch + (column_channels + self.block_rows) * column_pitch


_TILES = sorted(
    (_Tile(warps, rows, columns) for warps in (4, 2) for rows in (8, 4, 2, 1) for columns in (4, 2, 1)),
    key=lambda tile: (tile.warps, tile.rows * tile.columns / (tile.rows + tile.columns), tile.rows),
    reverse=True,
)
"""In order of preference: more multiplications for each number read from shared memory."""

_FORWARD_REGISTERS, _BACKWARD_REGISTERS = 128, 176
"""The most 32-bit registers of a thread that may hold scores and sums; the rest is for operands."""


_FORWARD = ("q", "k", "v", "o", "lse")
_BACKWARD = {
    "flash_attention_backward_q": ("d_o", "q", "k", "v", "o", "lse", "d_q", "delta"),
    "flash_attention_backward_kv": ("d_o", "q", "k", "v", "lse", "delta", "d_v_branch", "d_k", "d_v"),
}
"""The kernels' pointer arguments, in order."""


def _padded(channels: int) -> int:
    return round_up(channels, 8)


def _forward_shared(problem: FlashProblem, tile: _Tile) -> int:
    """Bytes of shared memory: Q by row, K and V by column, the weights."""
    key, value, size = _padded(problem.key_dim), _padded(problem.value_dim), problem.real.itemsize
    return size * tile.shared_elements(key, key + value, 16 // size)


def _backward_shared(problem: FlashProblem, tile: _Tile) -> int:
    """Bytes of shared memory: two operands by row, two by column, the weights, lse and delta."""
    channels, size = _padded(problem.key_dim) + _padded(problem.value_dim), problem.real.itemsize
    of_queries = 2 * max(tile.block_rows, tile.block_columns)
    return size * (tile.shared_elements(channels, channels, 16 // size) + of_queries)


def _forward_registers(problem: FlashProblem, tile: _Tile) -> int:
    sums = _padded(problem.value_dim) // 8
    return tile.rows * (sums + tile.columns) * problem.real.itemsize // 4


def _backward_registers(problem: FlashProblem, tile: _Tile) -> int:
    sums = (_padded(problem.key_dim) + _padded(problem.value_dim)) // 8
    return tile.rows * (sums + 2 * tile.columns) * problem.real.itemsize // 4


def _choose_tile(problem: FlashProblem, device: Device, shared, registers, most_registers: int) -> _Tile:
    """The first tile of which two blocks, else one, fit a multiprocessor; smaller if it would idle."""
    fitting = [
        tile
        for limit in (device.shared_bytes_of_each(2), device.shared_bytes_of_each(1))
        for tile in _TILES
        if registers(problem, tile) <= most_registers and shared(problem, tile) <= limit
    ]
    for tile in fitting:
        blocks, _, _ = _blocks(problem, problem.queries, tile)
        if tile.rows <= 2 or blocks >= device.multiprocessors:
            return tile
    return fitting[0]


def _kernel(problem: FlashProblem, layout: _Layout, tile: _Tile, file: str, entry: str, **more) -> Kernel:
    constants = {
        "T": problem.dtype,
        "KEY_DIM": problem.key_dim,
        "VALUE_DIM": problem.value_dim,
        "CHANNEL_MAJOR": layout.channel_major,
        "WIDE": layout.wide,
        "WARPS": tile.warps,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        **more,
    }
    return Kernel(file, entry, tuple(constants.items()))


def _sizes(problem: FlashProblem, layout: _Layout) -> tuple[np.generic, ...]:
    """The arguments that end every kernel's list: token counts, strides and the scale."""
    strides = (layout.q_stride, layout.k_stride, layout.v_stride, layout.o_stride)
    tokens = (np.int32(problem.queries), np.int32(problem.keys))
    return (*tokens, *map(np.int64, strides), problem.real.type(problem.scale))


def _blocks(problem: FlashProblem, tokens: int, tile: _Tile) -> tuple[int, int, int]:
    return (problem.bh * ceil_divide(tokens, tile.block_rows), 1, 1)


def _forward_plan(
    problem: FlashProblem, layout: _Layout, operands: Mapping[str, Operand], device: Device
) -> Plan:
    if problem.bh * problem.queries == 0:
        return Plan()
    tile = _choose_tile(problem, device, _forward_shared, _forward_registers, _FORWARD_REGISTERS)
    file = "flash_attention_forward.cu"
    return Plan(
        (
            Launch(
                _kernel(problem, layout, tile, file, "flash_attention_forward"),
                grid=_blocks(problem, problem.queries, tile),
                block=(32 * tile.warps, 1, 1),
                arguments=(*(operands[name] for name in _FORWARD), *_sizes(problem, layout)),
                shared_bytes=_forward_shared(problem, tile),
            ),
        )
    )


def _backward_plan(
    problem: FlashProblem, layout: _Layout, operands: Mapping[str, Operand], device: Device
) -> Plan:
    """The queries' kernel, which also writes delta, then the keys'; a side without tokens is left out."""
    tile = _choose_tile(problem, device, _backward_shared, _backward_registers, _BACKWARD_REGISTERS)
    tokens = {"flash_attention_backward_q": problem.queries, "flash_attention_backward_kv": problem.keys}
    # A null pointer cannot be said; without a branch the kernel never looks at it.
    operands = {"delta": Operand("delta"), "d_v_branch": operands["d_o"], **operands}
    constants = dict(zip(("ACCUMULATE_Q", "ACCUMULATE_K", "ACCUMULATE_V"), problem.accumulate, strict=True))
    constants["BRANCH"] = operands["d_v_branch"] != operands["d_o"]
    launches = tuple(
        Launch(
            _kernel(problem, layout, tile, "flash_attention_backward.cu", entry, **constants),
            grid=_blocks(problem, tokens[entry], tile),
            block=(32 * tile.warps, 1, 1),
            arguments=(*(operands[name] for name in _BACKWARD[entry]), *_sizes(problem, layout)),
            shared_bytes=_backward_shared(problem, tile),
        )
        for entry in _BACKWARD
        if problem.bh * tokens[entry] > 0
    )
    return Plan(launches, (Scratch("delta", problem.lse_shape, problem.real),) if launches else ())


def _packed_layout(problem: FlashProblem) -> _Layout:
    return _Layout(
        channel_major=False,
        wide=problem.aligned,
        q_stride=problem.queries * problem.key_dim,
        k_stride=problem.keys * problem.key_dim,
        v_stride=problem.keys * problem.value_dim,
        o_stride=problem.queries * problem.value_dim,
    )


def _of_heads(problem: FlashProblem | PSAProblem) -> FlashProblem:
    """The problem itself, or the packed attention of a block's heads."""
    if isinstance(problem, FlashProblem):
        return problem
    geometry = problem.geometry
    return FlashProblem(
        bh=geometry.bh,
        queries=geometry.tokens,
        keys=geometry.tokens,
        key_dim=geometry.key_dim,
        value_dim=geometry.value_dim,
        dtype=problem.dtype,
        scale=problem.scale,
        aligned=problem.aligned,
        accumulate=(problem.accumulate,) * 3,
    )


def _packed_forward_plan(problem: FlashProblem | PSAProblem, device: Device) -> Plan:
    problem = _of_heads(problem)
    operands = {name: Operand(name) for name in _FORWARD}
    return _forward_plan(problem, _packed_layout(problem), operands, device)


def _packed_backward_plan(problem: FlashProblem | PSAProblem, device: Device) -> Plan:
    problem = _of_heads(problem)
    operands = {name: Operand(name) for name in (*_FORWARD, "d_o", "d_q", "d_k", "d_v")}
    return _backward_plan(problem, _packed_layout(problem), operands, device)


def _nchw(problem: PSAProblem) -> tuple[FlashProblem, _Layout, dict[str, Operand]]:
    """Attention over NCHW arrays: channels outside tokens, and q, k, v inside one array."""
    geometry = problem.geometry
    tokens, key_dim, value_dim = geometry.tokens, geometry.key_dim, geometry.value_dim
    qkv_stride, out_stride = geometry.head_channels * tokens, value_dim * tokens
    layout = _Layout(
        channel_major=True,
        wide=problem.aligned and tokens * problem.dtype.itemsize % 16 == 0,
        q_stride=qkv_stride,
        k_stride=qkv_stride,
        v_stride=qkv_stride,
        o_stride=out_stride,
    )
    offsets = {"q": 0, "k": key_dim * tokens, "v": 2 * key_dim * tokens}
    operands = {"o": Operand("out"), "lse": Operand("lse"), "d_o": Operand("d_out")}
    for name, offset in offsets.items():
        operands[name] = Operand("qkv", offset)
        operands["d_" + name] = Operand("d_qkv", offset)
    if problem.branch:
        operands["d_v_branch"] = Operand("d_v_branch")
    return _of_heads(problem), layout, operands


def plain_psa_forward_plan(problem: PSAProblem, device: Device) -> Plan:
    """psa_forward by the plain kernel; operands qkv, out, lse."""
    return _forward_plan(*_nchw(problem), device)


def plain_psa_backward_plan(problem: PSAProblem, device: Device) -> Plan:
    """psa_backward by the plain kernels; operands d_out, qkv, out, lse, d_qkv, and d_v_branch if given."""
    return _backward_plan(*_nchw(problem), device)


def _infer_shape(q_shape, k_shape, v_shape):
    """Shapes of (o, lse) from those of q, k and v, whose first dimension may be None (not yet known)."""
    (bh, _, key_dim), (_, keys, value_dim) = q_shape, v_shape
    if tuple(k_shape) != (bh, keys, key_dim) or v_shape[0] != bh:
        raise ValueError(
            f"flash_attention_forward: q, k, v have shapes {q_shape}, {k_shape}, {v_shape}, "
            "expected (BH, Nq, D), (BH, Nk, D), (BH, Nk, Dv)"
        )
    return (*q_shape[:2], value_dim), tuple(q_shape[:2])


FLASH_ATTENTION = Pass(
    name="flash_attention2",
    function=flash_attention_forward,
    backward=flash_attention_backward,
    infer_shape=_infer_shape,
    variants={
        "forward": (Variant("plain", always, _packed_forward_plan),),
        "backward": (Variant("plain", always, _packed_backward_plan),),
    },
)
