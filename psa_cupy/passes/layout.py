"""What the three layout passes share: how wide their accesses are, how work is cut into blocks, one check.

kernels_cu/transpose.cuh and extract_v.cu describe the kernels that these numbers are for.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from psa_cupy.arguments import require_integer, require_ndim
from psa_cupy.geometry import MAX_KEY_DIM, PSAGeometry, ceil_divide, round_up
from psa_cupy.launching.plan import Device, Kernel, Launch, Operand
from psa_cupy.passes.descriptor import PSAProblem

ACCESS_BYTES = 16
"""The widest access of a thread."""
ATOMIC_BYTES = 4
"""The widest atomic addition that every architecture has; neighbouring threads then add side by side.
sm_90 and later have ACCESS_BYTES, but for float64."""
BYTES_IN_FLIGHT = 128
"""What a thread loads before it stores, in as many rounds as that takes ..."""
MOST_ROUNDS = 8
"""... but no more than these, which keep it all in registers."""
ADDING_BYTES_IN_FLIGHT = 32
"""The same where it adds: an addition reads, too, and what it will meet is prefetched."""
THREADS = 256
"""The most threads of a block."""


def vector_of(problem: PSAProblem, device: Device, length: int, adds: bool) -> int:
    """How many elements one access along runs of `length` elements takes: a power of two that divides it."""
    if not problem.aligned:
        return 1
    adds_widely = device.capability >= (9, 0) and problem.dtype != np.float64
    widest = ATOMIC_BYTES if adds and not adds_widely else ACCESS_BYTES
    return math.gcd(length, max(1, widest // problem.dtype.itemsize))


def transpose_launch(
    problem: PSAProblem,
    device: Device,
    file: str,
    entry: str,
    *,
    matrices: int,
    arguments: tuple[object, ...],
    accumulate_constants: dict[str, bool],
    adds_along: str | None = None,
) -> Launch:
    """A launch of `matrices` transposes between (key_dim, N) and (N, key_dim), as transpose.cuh cuts them.

    Parameters
    ----------
    problem : PSAProblem
        Its geometry's key_dim and tokens are the sizes of each matrix.
    device : Device
        What will run it.
    file, entry : str
        The kernel.
    matrices : int
        How many.
    arguments : tuple
        The kernel's own arguments, in front of parts and patches_per_part.
    accumulate_constants : dict
        The file's ACCUMULATE constants.
    adds_along : {"tokens", "channels"}, optional
        The contiguous direction of a target that is added to.

    """
    geometry = problem.geometry
    token_vector = vector_of(problem, device, geometry.tokens, adds=adds_along == "tokens")
    channel_vector = vector_of(problem, device, geometry.key_dim, adds=adds_along == "channels")
    group_lanes = lanes_along_channels(geometry.key_dim // channel_vector, channel_vector, token_vector)
    unroll = rounds_of(token_vector * channel_vector * problem.dtype.itemsize, adds=adds_along is not None)
    slices = geometry.key_dim // (channel_vector * group_lanes)
    patches = geometry.tokens // token_vector
    parts, patches_per_part = even_parts(patches, per_item=group_lanes, most=THREADS * unroll)
    constants = {
        "T": problem.dtype,
        "KEY_DIM": geometry.key_dim,
        "TOKEN_VECTOR": token_vector,
        "CHANNEL_VECTOR": channel_vector,
        "GROUP_LANES": group_lanes,
        "UNROLL": unroll,
        **accumulate_constants,
    }
    return Launch(
        kernel=Kernel(file, entry, tuple(constants.items())),
        grid=(matrices * slices * parts, 1, 1),
        block=(threads_for(patches_per_part * group_lanes, unroll), 1, 1),
        arguments=(*arguments, np.uint32(parts), np.int32(patches_per_part)),
    )


def copy_launch(
    problem: PSAProblem,
    device: Device,
    file: str,
    entry: str,
    *,
    run: int,
    arguments: tuple[Operand, ...],
    accumulate: bool,
) -> Launch:
    """A launch that moves one run of `run` contiguous elements for every bh, as extract_v.cu cuts them."""
    vector = vector_of(problem, device, run, adds=accumulate)
    unroll = rounds_of(vector * problem.dtype.itemsize, adds=accumulate)
    vectors = run // vector
    parts, vectors_per_part = even_parts(vectors, per_item=1, most=THREADS * unroll)
    constants = (("T", problem.dtype), ("VECTOR", vector), ("UNROLL", unroll), ("ACCUMULATE", accumulate))
    return Launch(
        kernel=Kernel(file, entry, constants),
        grid=(problem.geometry.bh * parts, 1, 1),
        block=(threads_for(vectors_per_part, unroll), 1, 1),
        arguments=(*arguments, np.int64(vectors), np.uint32(parts), np.int32(vectors_per_part)),
    )


@functools.cache
def lanes_along_channels(groups: int, channel_vector: int, token_vector: int) -> int:
    """How many consecutive threads take neighbouring groups of channels; the next ones take the next tokens.

    A divisor of `groups`. The shorter of the two runs that a warp then touches, along the channels in one
    layout and along the tokens in the other, is as long as can be; among equals, more channels.
    """

    def shorter_run(lanes: int) -> int:
        return min(min(lanes, 32) * channel_vector, max(1, 32 // lanes) * token_vector)

    divisors = [lanes for lanes in range(1, groups + 1) if groups % lanes == 0]
    return max(divisors, key=lambda lanes: (shorter_run(lanes), lanes))


def rounds_of(round_bytes: int, adds: bool) -> int:
    """How many rounds of loads a thread makes before it stores."""
    in_flight = ADDING_BYTES_IN_FLIGHT if adds else BYTES_IN_FLIGHT
    return min(max(1, in_flight // round_bytes), MOST_ROUNDS)


def even_parts(items: int, per_item: int, most: int) -> tuple[int, int]:
    """How many parts of how many items: the fewest of at most `most` threads' worth, and of even size."""
    per_part = ceil_divide(items, ceil_divide(items * per_item, most))
    return ceil_divide(items, per_part), per_part


def threads_for(items: int, unroll: int) -> int:
    """Threads of a block, whole warps, that take `items` in `unroll` rounds."""
    return round_up(ceil_divide(items, unroll), 32)


def geometry_of_heads(
    function: str, name: str, array, *, num_heads: int, height: int, width: int, layout: tuple[str, ...]
) -> PSAGeometry:
    """The geometry of an array whose last dimensions are (BH, N, key_dim), with value_dim = 2*key_dim.

    Raises
    ------
    TypeError
        If num_heads, height or width is no integer.
    ValueError
        If the sizes do not fit together or exceed the limits.

    """
    bh, tokens, key_dim = require_ndim(function, name, array, layout)[-3:]
    num_heads = require_integer(function, "num_heads", num_heads, 1)
    height = require_integer(function, "height", height, 0)
    width = require_integer(function, "width", width, 0)
    if tokens != height * width:
        raise ValueError(f"{function}: {name} has {tokens} tokens, expected height*width = {height * width}")
    if bh % num_heads:
        raise ValueError(f"{function}: {name} has {bh} heads in all, which {num_heads} heads do not divide")
    require_integer(function, f"key_dim of {name}", key_dim, 1, MAX_KEY_DIM)
    return PSAGeometry(bh // num_heads, num_heads, key_dim, 2 * key_dim, height, width)
