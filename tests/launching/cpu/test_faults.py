"""Faults in small kernels: each is reported with the array, the thread and the source line."""

import contextlib
import re
import shutil

import numpy as np
import pytest

from psa_cupy.launching.cpu import KernelError
from tests.launching.cpu.texts import floats, ints, needs_compiler, run_text

pytestmark = needs_compiler

HEAD = 'extern "C" __global__ void kernel(float* x, float* y) {\n    const int i = threadIdx.x;\n'


def report_of(body, *, checked=True, grid=1, block=64, **arrays):
    """What a kernel of this body says; `FAULT` at the end of a line marks the line that must be named."""
    arrays = arrays or dict(x=np.ones(64, np.float32), y=floats(64))
    text = HEAD + body + "}\n"
    with pytest.raises(KernelError) as caught:
        run_text(text, grid=grid, block=block, checked=checked, **arrays)
    message = str(caught.value)
    if "FAULT" in text:
        line = next(n for n, line in enumerate(text.split("\n"), 1) if "FAULT" in line)
        assert re.search(rf"at test\.cu:{line}\b", message), message
    return message


BOTH = pytest.mark.parametrize("checked", [False, True])


@BOTH
def test_a_read_past_the_end(checked):
    message = report_of("    y[i] = x[i + 1];  // FAULT\n", checked=checked)
    assert (
        "read out of bounds: element 64 of x, which has 64, by thread (63, 0, 0) of block (0, 0, 0)"
        in message
    )


@BOTH
def test_a_write_past_the_end(checked):
    message = report_of("    y[i + 1] = x[i];  // FAULT\n", checked=checked)
    assert "write out of bounds: element 64 of y, which has 64" in message


@BOTH
def test_a_read_before_the_beginning(checked):
    message = report_of("    y[i] = x[i - 1024];  // FAULT\n", checked=checked)
    assert "read out of bounds: element -1024 of x" in message


def test_a_write_just_before_the_beginning_is_seen_after_the_launch():
    assert "write out of bounds, just before or after y" in report_of("    y[i - 1] = x[i];\n", checked=False)


def test_a_write_into_the_padding_is_seen_after_the_launch():
    arrays = dict(x=np.ones(64, np.float32), y=floats(62))  # 248 bytes: the guard page begins 8 bytes later
    assert "write out of bounds, just before or after y" in report_of(
        "    y[i] = x[i];\n", checked=False, **arrays
    )


@BOTH
def test_past_a_shared_array(checked):
    message = report_of(
        "    __shared__ float tile[64];\n    (&tile[0])[i + 1] = 1;  // FAULT\n", checked=checked
    )
    assert "write out of bounds: element 64 of shared memory tile, which has 64" in message


def test_an_index_out_of_a_row():
    assert "index 8 out of an array's bounds" in report_of(
        "    __shared__ float tile[8][8];\n    tile[1][i] = 1;  // FAULT\n"
    )


@BOTH
def test_a_wild_address(checked):
    message = report_of("    *(float*)16 = x[i];  // FAULT\n", checked=checked)
    assert "write out of bounds: an address near no array, by thread (0, 0, 0)" in message


def test_a_race_for_want_of_a_barrier():
    message = report_of(
        "    __shared__ float tile[64];\n    tile[i] = x[i];\n    y[i] = tile[i ^ 32];  // FAULT\n"
    )
    assert (
        "read of shared memory that this block has not written: element 32 of shared memory tile" in message
    )
    message = report_of(
        "    __shared__ float tile[64];\n    tile[i] = x[i];\n    y[i] = tile[i & 32];  // FAULT\n"
    )
    assert (
        "race: read of what another thread wrote, with no barrier between: element 0 of shared memory tile"
        in message
    )
    assert "by thread (1, 0, 0) of block (0, 0, 0)" in message
    assert "after thread (0, 0, 0) of block (0, 0, 0) at test.cu:4" in message


def test_a_race_in_global_memory():
    message = report_of("    y[i] = x[i];\n    x[i] = y[i / 2];  // FAULT\n")
    assert "race: read of what another thread wrote, with no barrier between: element 0 of y" in message


def test_a_race_of_two_writes():
    assert "race: write over what another thread wrote" in report_of("    y[i / 2] = x[i];  // FAULT\n")


def test_a_write_over_what_others_read():
    message = report_of("    const float first = x[(i + 1) % 64];\n    x[i] = first;  // FAULT\n")
    assert "race: write over what another thread read, with no barrier between: element 1 of x" in message


def test_a_race_within_a_warp():
    body = """
    __shared__ float tile[64];
    tile[i] = x[i];
    SYNC
    y[i] = tile[i / 32 * 32];  // FAULT
"""
    assert "race: read of what another thread wrote" in report_of(body.replace("SYNC", ";"))
    assert "race: read of what another thread wrote" in report_of(
        body.replace("SYNC", "__shfl_sync(~0u, i, 0);")
    )
    run_text(
        HEAD + body.replace("SYNC", "__syncwarp();") + "}",
        block=64,
        checked=True,
        x=np.ones(64, np.float32),
        y=floats(64),
    )


def test_syncwarp_orders_only_the_lanes_of_its_mask():
    body = """    __shared__ float tile[32];
    tile[i] = x[i];
    if (i < 16) __syncwarp(0xffffu); else __syncwarp(0xffff0000u);
    y[i] = tile[i / 16 * 16];
    y[i + 32] = tile[0];  // FAULT
"""
    assert "element 0 of shared memory tile, which has 32, by thread (31, 0, 0)" in report_of(body, block=32)


def test_reads_of_several_lanes_then_a_sync_then_one_lane_reads_and_writes():
    body = """
    __shared__ float tile[32];
    tile[i] = x[i];
    __syncwarp();
    y[i] = tile[31 - i];
    __syncwarp();
    tile[i] += 1;
"""
    run_text(HEAD + body + "}", block=32, checked=True, x=np.ones(32, np.float32), y=floats(32))


def test_blocks_that_write_one_address():
    message = report_of("    if (i == 0) y[0] = x[i];  // FAULT\n", grid=2)
    assert "race between blocks: write over what another block of the launch wrote: element 0 of y" in message
    assert "of block (1, 0, 0)" in message


def test_blocks_that_read_what_another_writes():
    assert "race between blocks: read of" in report_of(
        "    if (i == 0) y[blockIdx.x] = y[0];  // FAULT\n", grid=2
    )
    message = report_of("    if (i < 2) x[blockIdx.x * 2 + i] = x[i * 2] + 1;  // FAULT\n", grid=2)
    assert "race between blocks" in message


def test_a_write_over_what_two_earlier_blocks_read():
    body = "    if (i == 0) { y[blockIdx.x] = x[0]; if (blockIdx.x == 2) x[0] = 1; }  // FAULT\n"
    assert "race between blocks: write over what another block of the launch read" in report_of(body, grid=3)


def test_atomic_and_plain_access_between_blocks():
    body = "    if (blockIdx.x == 0) { if (i == 0) atomicAdd(y, 1.0f); }\n    else y[i] = 1;  // FAULT\n"
    message = report_of(body, grid=2)
    assert (
        "race between blocks: write over what another block of the launch changed by an atomic function"
        in message
    )
    body = "    if (blockIdx.x == 0) y[i] = 1;\n    else atomicAdd(y, 1.0f);  // FAULT\n"
    assert "race between blocks: atomic function on what another block of the launch wrote" in report_of(
        body, grid=2
    )


def test_atomic_and_plain_access_within_a_block():
    body = """
    __shared__ int count;
    if (i == 0) count = 0;
    SYNC
    atomicAdd(&count, 1);  // FAULT
"""
    assert "race: atomic function on what another thread wrote" in report_of(body.replace("SYNC", ";"))
    fixed = body.replace("SYNC", "__syncthreads();")
    run_text(HEAD + fixed + "}", block=64, checked=True, x=floats(1), y=floats(1))
    message = report_of(
        fixed.replace("// FAULT", "").replace("atomic", "if (i == 63) atomic")
        + "    y[i] = count;  // FAULT\n"
    )
    assert "race: read of what another thread changed by an atomic function" in message


def test_shared_memory_that_nobody_wrote():
    body = """
    __shared__ float tile[65];
    tile[i] = x[i];
    __syncthreads();
    y[i] = tile[i + 1];  // FAULT
"""
    message = report_of(body)
    assert (
        "read of shared memory that this block has not written: element 64 of shared memory tile" in message
    )


def test_shared_memory_does_not_survive_its_block():
    body = """
    __shared__ float tile[64];
    if (blockIdx.x == 0) tile[i] = x[i];
    __syncthreads();
    x[blockIdx.x * 64 + i] = tile[i];  // FAULT
"""
    message = report_of(body, grid=2, x=np.ones(128, np.float32), y=floats(1))
    assert "that this block has not written" in message and "of block (1, 0, 0)" in message


COPY = """    __shared__ __align__(16) float tile[260];
    cp_async_16(TARGET, SOURCE);  // FAULT
    cp_async_commit();
    WAIT
    __syncthreads();
    y[i] = tile[i];
"""


def copying(target="&tile[4 * i]", source="&x[4 * i]", wait="cp_async_wait<0>();"):
    arrays = dict(x=np.ones(256, np.float32), y=floats(64))
    return COPY.replace("TARGET", target).replace("SOURCE", source).replace("WAIT", wait), arrays


@BOTH
def test_a_right_asynchronous_copy(checked):
    body, arrays = copying()
    assert (run_text(HEAD + body + "}", block=64, checked=checked, **arrays)[1] == 1).all()


def test_a_missing_wait():
    body, arrays = copying(wait="cp_async_wait<1>();")
    message = report_of(body.replace("// FAULT", "").replace("tile[i];", "tile[i];  // FAULT"), **arrays)
    assert "race: read of the target of an asynchronous copy before the wait for it" in message
    assert "shared memory tile" in message
    body = HEAD + body + "}"
    assert np.isnan(run_text(body, block=64, **arrays)[1]).all()  # unchecked: the poison shows it


@BOTH
def test_a_misaligned_asynchronous_copy(checked):
    body, arrays = copying(target="&tile[4 * i + 1]")
    assert "misaligned target address of cp.async" in report_of(body, checked=checked, **arrays)
    body, arrays = copying(source="&x[4 * i + 1]")
    assert "misaligned source address of cp.async" in report_of(body, checked=checked, **arrays)


@BOTH
def test_an_asynchronous_copy_past_the_end(checked):
    body, arrays = copying(source="&x[4 * i + 4]")
    assert "read out of bounds: element 256 of x" in report_of(body, checked=checked, **arrays)
    body, arrays = copying(target="&tile[4 * i + 12]")
    assert "out of bounds: element 26" in report_of(body, checked=checked, **arrays)


def test_an_asynchronous_copy_over_bytes_still_read():
    body = """    __shared__ __align__(16) float tile[64];
    tile[i] = x[i];
    __syncthreads();
    y[i] = tile[63 - i];
    if (i < 16) cp_async_16(&tile[4 * i], &x[4 * i]);  // FAULT
"""
    assert "race: asynchronous copy over what another thread read" in report_of(body)


@BOTH
def test_a_misaligned_ldmatrix(checked):
    body = """
    __shared__ __align__(16) float tile[64];
    tile[i] = 0;
    __syncwarp();
    unsigned r[4];
    ldmatrix_x4(r, &tile[1]);  // FAULT
"""
    assert "misaligned row address of ldmatrix" in report_of(body, checked=checked)


def test_a_misaligned_vector_access():
    body = "    const float2 pair = *(const float2*)&x[i + 1];  // FAULT\n    y[i] = pair.x + pair.y;\n"
    message = report_of(body)
    assert (
        "misaligned access: element 1 of x, which has 64, as a type that needs 8 bytes of alignment"
        in message
    )


@BOTH
def test_a_barrier_that_some_threads_never_reach(checked):
    message = report_of("    if (i == 5) return;\n    __syncthreads();  // FAULT\n", checked=checked)
    assert "barrier divergence: 63 of 64 threads wait at the barrier" in message
    assert "1 have finished, the first is thread (5, 0, 0) of block (0, 0, 0)" in message


@BOTH
def test_two_barriers_at_once(checked):
    body = "    if (i < 32) __syncthreads();  // FAULT\n    else\n        __syncthreads();\n"
    message = report_of(body, checked=checked)
    assert "barrier divergence: thread (32, 0, 0)" in message and "at test.cu:5" in message


@BOTH
def test_a_mask_that_leaves_the_caller_out(checked):
    assert "the calling lane is not in the mask" in report_of(
        "    __syncwarp(0xffffu);  // FAULT\n", checked=checked
    )


@BOTH
def test_a_mask_that_names_lanes_that_do_not_come(checked):
    message = report_of(
        "    if (i % 32 < 16) y[i] = __shfl_xor_sync(~0u, x[i], 1);  // FAULT\n", checked=checked
    )
    assert "warp divergence" in message and "waits for the lanes ffffffff of its warp" in message


@BOTH
def test_masks_that_do_not_agree(checked):
    message = report_of(
        "    y[i] = __shfl_xor_sync(i % 32 < 16 ? ~0u : 0xffff0001u, x[i], 1);  // FAULT\n", checked=checked
    )
    assert "warp divergence" in message and "meets lane" in message


@BOTH
def test_a_shuffle_from_outside_its_mask(checked):
    body = "    if (i < 16) y[i] = __shfl_sync(0xffffu, x[i], 20);  // FAULT\n"
    assert "reads a lane that is not in its mask" in report_of(body, checked=checked)


@BOTH
def test_a_division_by_zero(checked):
    body = "    y[i] = 7 / (int)(x[i] - 1);  // FAULT\n"
    assert "integer division by zero" in report_of(body, checked=checked)


@BOTH
def test_a_stack_overflow(checked):
    text = """
    __device__ __noinline__ float deep(float* x, int n) {
        float a[4000];
        a[n] = x[0];
        return n ? deep(x, n - 1) + a[n] : a[0];
    }
    extern "C" __global__ void kernel(float* x) { x[0] = deep(x, 100); }
    """
    with pytest.raises(KernelError, match="stack overflow, by thread"):
        run_text(text, checked=checked, x=np.ones(1, np.float32))


def test_the_line_is_the_kernels_and_the_helpers():
    text = '#line 7 "helper.cuh"\n__device__ __forceinline__ void put(float* y, int i) { y[i] = 1; }\n'
    text += '#line 1 "test.cu"\nextern "C" __global__ void kernel(float* y) {\n    put(y, 64);\n}\n'
    with pytest.raises(KernelError, match=r"at test\.cu:2 \(in helper\.cuh:7\)"):
        run_text(text, checked=True, y=floats(64))


def test_without_addr2line_the_address_is_named(monkeypatch):
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "addr2line" else which(name))
    with pytest.raises(
        KernelError, match=r"by thread .* at code address 0x[0-9a-f]+ \(addr2line of binutils"
    ):
        run_text(HEAD + "y[i] = x[i + 1];}", block=64, x=np.ones(64, np.float32), y=floats(64))


@BOTH
def test_a_fault_leaves_the_runtime_usable(checked):
    for _ in range(3):
        report_of("    y[i + 1] = x[i];  // FAULT\n", checked=checked)
        arrays = dict(x=np.ones(64, np.float32), y=floats(64))
        _, y = run_text(HEAD + "y[i] = x[i];}", block=64, checked=checked, **arrays)
        assert (y == 1).all()


def test_constants_locals_and_arguments_are_no_arrays():
    text = """
    __constant__ float TABLE[4] = {1, 2, 3, 4};
    struct Pair { float a[2]; };
    __device__ __noinline__ float sum(const Pair& pair, int i) { return pair.a[i] + TABLE[i % 4]; }
    extern "C" __global__ void kernel(int* y, int n) {
        Pair pair = {{float(n), float(blockDim.x)}};
        y[threadIdx.x] = sum(pair, threadIdx.x % 2);
    }
    """
    y = run_text(text, np.int32(5), block=4, checked=True, y=ints(4))
    assert y.tolist() == [6, 6, 6, 6]


@BOTH
def test_a_copy_that_nobody_waits_for_ends_with_its_block(checked):
    body = """
    __shared__ __align__(16) float tile[64];
    if (i < 16) cp_async_16(&tile[4 * i], &x[4 * i]);
    if (blockIdx.x == 0) return;
    __syncthreads();
    if (x[0] < 0) __trap();
    y[i] = 1;
}
"""
    for sign in (1, 1, -1, 1):  # the third launch gives up while its copies are under way
        arrays = dict(x=np.full(64, sign, np.float32), y=floats(64))
        with pytest.raises(KernelError, match="__trap") if sign < 0 else contextlib.nullcontext():
            run_text(HEAD + body, grid=2, block=64, checked=checked, **arrays)
