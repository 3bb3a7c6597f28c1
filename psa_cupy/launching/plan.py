"""What is to be launched, as plain data: nothing here knows whether a GPU or a CPU will run it.

A pass turns its geometry into a `Plan`; `launching.gpu` and `launching.cpu` both know how to run one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

RESERVED_SHARED_BYTES = 1024
"""Shared memory that the system takes of a multiprocessor for each block, in bytes, from compute
capability 8.0 on (Turing takes none): two blocks may have less than a half each of what one may have."""


MOST_PLANS = 4096
"""How many plans are kept, and things made of them: programs with ever new shapes must not grow for ever."""


@dataclass(frozen=True)
class Kernel:
    """One specialised kernel: a file of kernels_cu, an entry in it, and its compile-time constants.

    `constants` become lines in front of the text, in this order: a dtype is `using NAME = <C type>;`,
    a bool or an int is `constexpr`. Equal kernels have equal text, so this is the cache key.
    """

    file: str
    entry: str
    constants: tuple[tuple[str, object], ...] = ()
    arch: str | None = None
    """Set when the text is for one architecture only ("sm_90a"): such a kernel has a portable twin."""


@dataclass(frozen=True)
class Operand:
    """A pointer argument: the named array, `offset` elements of the kernel's type T in."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class TensorMap:
    """A `const __grid_constant__ CUtensorMap` argument: a 3-D tiled view of a named array for TMA.

    `dims`, innermost first, in elements; `strides`, in elements, of dims 1 and 2 (dim 0 is contiguous);
    `box`: the tile one copy brings (elements, innermost first). Rows of the box are swizzled over 128
    bytes; what lies outside `dims` arrives as zero.
    """

    name: str
    offset: int
    dims: tuple[int, int, int]
    strides: tuple[int, int]
    box: tuple[int, int, int]


@dataclass(frozen=True)
class Scratch:
    """A temporary array of a plan, allocated for the call and not initialised."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `arguments` are Operand, TensorMap or NumPy scalars, in the kernel's order."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[object, ...]
    shared_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Plan:
    """Launches in stream order, and the scratch arrays they share. An empty plan launches nothing.

    Equal only to itself: passes make one per problem and device and keep it, and what a plan was
    compiled to is found by its identity.
    """

    launches: tuple[Launch, ...] = ()
    scratch: tuple[Scratch, ...] = field(default=())


@dataclass(frozen=True)
class Device:
    """What planning needs to know of the machine that will run the kernels."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    """The most dynamic shared memory a block may ask for, in bytes."""
    tensor_maps: bool
    """Whether TMA descriptors can be made: compute capability 9.0 and a driver of CUDA 12 or later."""

    def shared_bytes_of_each(self, blocks: int) -> int:
        """The most dynamic shared memory, in bytes, of each of `blocks` on one multiprocessor."""
        reserved = RESERVED_SHARED_BYTES if self.capability >= (8, 0) else 0
        return (self.shared_bytes + reserved) // blocks - reserved
