"""Bugs planted into copies of the real kernels: each must be reported, with the line where it shows.

A bug is a replacement that must fit the kernel's text exactly once. When a kernel changes so that it no
longer fits, the test fails and says so: plant the bug anew.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest

import psa_cupy
from psa_cupy import reference, testing
from psa_cupy.launching import cpu, source
from psa_cupy.passes import psa
from tests.launching.cpu.texts import needs_compiler

pytestmark = needs_compiler


def random(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def forward(num_heads=1, key_dim=32, height=10, width=20):
    """The portable kernel: cp.async, ldmatrix, mma.sync; chunks of keys, of which the last is not full."""
    qkv = random((1, num_heads * 4 * key_dim, height, width), np.float16)
    out, lse = psa.forward_with("portable", qkv, num_heads)
    return testing.psa_forward_ratios(qkv, out, lse, num_heads)


def backward():
    """psa_backward's portable kernels."""
    qkv, d_out = random((1, 128, 6, 8), np.float16), random((1, 64, 6, 8), np.float16, 1)
    out, lse = reference.psa_forward(qkv, 1)
    d_qkv = psa.backward_with("portable", d_out, qkv, out, lse, 1)
    return testing.psa_backward_ratios(d_out, qkv, d_qkv, 1)


def flash():
    """The plain kernel: barriers, __syncwarp; several tiles of keys, several blocks for a head."""
    q, k, v = (random((1, 150, dim), np.float32, dim) for dim in (32, 32, 60))
    o, lse = psa_cupy.flash_attention_forward(q, k, v)
    return testing.attention_forward_ratios(q, k, v, o, lse)


def pack():
    """A copying kernel; several blocks."""
    qkv = random((1, 128, 5, 7), np.float32)
    packed = psa_cupy.pack_qkv(qkv, 1)
    return {"differs": 0.0 if np.array_equal(packed[0, 0].T, qkv[0, :32].reshape(32, 35)) else np.inf}


@dataclass(frozen=True)
class Bug:
    """What to replace in the text of an entry, and what the checked mode must say, naming which line."""

    name: str
    call: Callable
    entry: str
    old: str
    new: str
    says: str
    at: str
    """Matches the line that must be named."""


BUGS = (
    Bug(
        "missing __syncthreads",
        *(forward, "psa_forward", "__syncthreads();", ";"),
        says=r"race: read of|read of shared memory that this block has not written",
        at="ldmatrix_x4_trans",
    ),
    Bug(
        "missing __syncthreads before a buffer is used again",
        *(
            flash,
            "flash_attention_forward",
            "BLOCK_COLUMNS) {\n        __syncthreads();",
            "BLOCK_COLUMNS) {\n",
        ),
        says="race: write over what another thread read, with no barrier between: .* of shared memory",
        at="load_tile<",
    ),
    Bug(
        "missing __syncwarp before what other lanes wrote to global memory",
        *(
            backward,
            "psa_backward",
            "] = row;\n        }\n    }\n    __syncwarp();",
            "] = row;\n        }\n    }\n",
        ),
        says="race: .* of rows, ",
        at=r"head\.rows\[",
    ),
    Bug(
        "missing __syncwarp",
        *(flash, "flash_attention_forward", "    __syncwarp();\n}", "\n}"),
        says="(race: read of|has not written).* of shared memory",
        at="accumulate<VALUE_SUMS>",
    ),
    Bug(
        "a read one past the end",
        *(flash, "flash_attention_forward", "first + token < tokens", "first + token <= tokens"),
        says=r"read out of bounds: element 48\d\d of [qk], which has 4800",
        at="load_tile<",
    ),
    Bug(
        "a write one past the end",
        *(forward, "psa_forward", "row_query < tokens", "row_query <= tokens"),
        says="write out of bounds: element 200 of lse, which has 200",
        at=r"lse\[row_query\]",
    ),
    Bug(
        "a barrier that some warps do not reach",
        *(
            forward,
            "psa_forward",
            "cp_async_wait<LOOKAHEAD - 1>();",
            "cp_async_wait<LOOKAHEAD - 1>(); if (tile >= end) return;",
        ),
        says=r"barrier divergence: \d+ of \d+ threads wait at the barrier",
        at="__syncthreads",
    ),
    Bug(
        "a barrier in one branch only",
        *(
            flash,
            "flash_attention_forward",
            "        if (rows <= 0) continue;",
            "        if (rows <= 0) return;",
        ),
        says=r"barrier divergence: \d+ of \d+ threads wait at the barrier",
        at="__syncthreads",
    ),
    Bug(
        "a wrong warp mask",
        *(forward, "psa_forward", "WARP = 0xffffffffu", "WARP = 0x7fffffffu"),
        says=r"warp divergence: the calling lane is not in the mask it gives, by thread \(31, 0, 0\)",
        at="_sync",
    ),
    Bug(
        "a misaligned asynchronous copy",
        *(forward, "psa_forward", "cp_async_16(target, ", "cp_async_16(target + 1, "),
        says="misaligned target address of cp.async",
        at="cp_async_16",
    ),
    Bug(
        "a misaligned vector access",
        *(
            flash,
            "flash_attention_forward",
            "COLUMN_PITCH = BLOCK_COLUMNS + UNIT",
            "COLUMN_PITCH = BLOCK_COLUMNS + UNIT + 1",
        ),
        says="misaligned access: .* of shared memory .* as a type that needs 16 bytes of alignment",
        at="multiply|read<|Vector<",
    ),
    Bug(
        "a missing wait for asynchronous copies",
        *(forward, "psa_forward", "cp_async_wait<LOOKAHEAD - 1>", "cp_async_wait<LOOKAHEAD>"),
        says="race: read of the target of an asynchronous copy before the wait for it",
        at="ldmatrix_x4_trans",
    ),
    Bug(
        "a read of shared memory that nobody wrote",
        *(flash, "flash_attention_forward", "PADDED = (CHANNELS + 7) / 8 * 8", "PADDED = CHANNELS"),
        says="read of shared memory that this block has not written",
        at="accumulate<VALUE_SUMS>",
    ),
    Bug(
        "two blocks that write one address",
        *(flash, "flash_attention_forward", "% tiles) * BLOCK_ROWS", "% tiles) * (BLOCK_ROWS - 1)"),
        says="race between blocks: write over what another block of the launch wrote: .* of (lse|o)",
        at="lse|store_rows|o_head",
    ),
    Bug(
        "two blocks that copy to one address",
        *(pack, "pack_qkv", "along_tokens < tile.patches", "along_tokens <= tile.patches"),
        says="race between blocks: write over what another block of the launch wrote: .* of packed",
        at="store",
    ),
)

TAILS = (
    (
        "a key too many",
        forward,
        "psa_forward",
        "scale, tokens - chunk * CHUNK",
        "scale, tokens - chunk * CHUNK + 1",
    ),
    (
        "a key too few",
        forward,
        "psa_forward",
        "scale, tokens - chunk * CHUNK",
        "scale, tokens - chunk * CHUNK - 1",
    ),
    (
        "a key too many",
        flash,
        "flash_attention_forward",
        "lane.column_of(j) >= left",
        "lane.column_of(j) > left",
    ),
    (
        "a key too few",
        flash,
        "flash_attention_forward",
        "lane.column_of(j) >= left",
        "lane.column_of(j) >= left - 1",
    ),
)


def call_with(call, entry, old, new, *, checked):
    """The call on kernels of which `entry` has the bug."""
    assert old.count("\n") == new.count("\n"), "lines must keep their numbers"
    planted = []

    def render(kernel):
        text = source.render(kernel)
        if kernel.entry != entry:
            return text
        planted.append(kernel)
        count = text.count(old)
        assert count == 1, (
            f"{old!r} occurs {count} times in {kernel.file}, which has changed: plant the bug anew"
        )
        return text.replace(old, new)

    with (
        mock.patch.object(cpu, "run", functools.partial(cpu.run, render=render)),
        cpu.cpu_kernels(checked=checked),
    ):
        result = call()
    assert planted, f"{entry} was not launched"
    return result


def named_lines(message):
    """The source lines of the place that a report names first: of a .cu, and of the .cuh it called."""
    place = re.search(r" at (\w+\.cuh?:\d+)(?: \(in (\w+\.cuh:\d+)\))?", message)
    assert place, f"no source line in: {message}"
    named = [name.split(":") for name in place.groups() if name]
    return [(source.kernels_folder() / file).read_text().split("\n")[int(line) - 1] for file, line in named]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_checked_mode_reports(bug):
    with pytest.raises(cpu.KernelError) as caught:
        call_with(bug.call, bug.entry, bug.old, bug.new, checked=True)
    message = str(caught.value)
    assert message.startswith(f"{bug.entry}: ")
    assert re.search(bug.says, message), message
    assert any(re.search(bug.at, line) for line in named_lines(message)), (message, named_lines(message))


@pytest.mark.parametrize(
    ("name", "call", "entry", "old", "new"), TAILS, ids=[f"{t[2]}: {t[0]}" for t in TAILS]
)
def test_the_bound_of_lse_sees_a_wrong_tail(name, call, entry, old, new):
    ratios = call_with(call, entry, old, new, checked=False)
    assert ratios["lse"] > 3, ratios


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("call", [forward, backward, flash, pack])
def test_without_a_bug_the_same_calls_are_right(call, checked):
    with cpu.cpu_kernels(checked=checked):
        ratios = call()
    assert max(ratios.values()) <= 1, ratios
