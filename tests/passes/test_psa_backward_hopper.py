"""The Hopper fused backward: what it takes, who owns what, how it compiles; on a GPU, its results."""

import importlib.util
import itertools
import pathlib
import re

import ml_dtypes
import numpy as np
import pytest

from psa_cupy import reference, testing
from psa_cupy.geometry import PSAGeometry
from psa_cupy.launching.plan import Device
from psa_cupy.launching.source import render
from psa_cupy.passes import psa_backward_hopper as hopper
from psa_cupy.passes.descriptor import PSAProblem

H200 = Device(capability=(9, 0), multiprocessors=132, shared_bytes=232448, tensor_maps=True)
BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
DIMS = ((1, 2), (5, 10), (16, 32), (32, 64), (36, 72), (48, 96), (64, 64), (64, 128))


def problem(bh=4, tokens=400, key_dim=32, value_dim=64, dtype=BF16, **kwargs):
    return PSAProblem(PSAGeometry(1, bh, key_dim, value_dim, 1, tokens), dtype, key_dim**-0.5, **kwargs)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("dims", DIMS)
def test_takes_16_bit_types_and_usual_dims(dtype, dims):
    assert hopper.supports(problem(key_dim=dims[0], value_dim=dims[1], dtype=dtype), H200)


@pytest.mark.parametrize(
    "other",
    [
        problem(tokens=399),
        problem(tokens=396),
        problem(aligned=False),
        problem(dtype=np.dtype(np.float32)),
        problem(key_dim=128, value_dim=256),
    ],
)
def test_leaves_other_problems_to_other_variants(other):
    assert not hopper.supports(other, H200)


def test_needs_hopper_and_tensor_maps():
    assert not hopper.supports(problem(), Device((9, 0), 132, 232448, tensor_maps=False))
    assert not hopper.supports(problem(), Device((10, 0), 148, 232448, tensor_maps=True))
    assert not hopper.supports(problem(), Device((8, 0), 108, 166912, tensor_maps=False))


def owned(launch):
    """Every (is_keys, bh, tile) that the blocks of a launch own, decoded as the kernel does."""
    heads, heads_per_wave, tiles_per_block, tokens = (int(x) for x in launch.arguments[9:13])
    tiles = -(-tokens // 64)
    blocks_per_head = -(-tiles // tiles_per_block)
    for index in range(launch.grid[0]):
        wave, block = divmod(index, 2 * heads_per_wave * blocks_per_head)
        key_blocks = min(heads_per_wave, heads - wave * heads_per_wave) * blocks_per_head
        is_keys = block < key_blocks
        block = block if is_keys else block - key_blocks
        bh = wave * heads_per_wave + block // blocks_per_head
        first = block % blocks_per_head * tiles_per_block
        for tile in range(first, min(first + tiles_per_block, tiles)):
            yield is_keys, bh, tile


@pytest.mark.parametrize("bh", [1, 7, 64, 132, 133, 300])
@pytest.mark.parametrize("tokens", [8, 64, 72, 400, 448, 456, 1600])
def test_each_tile_has_one_owner(bh, tokens):
    *_, fused = hopper.plan(problem(bh, tokens), H200).launches
    tiles = range(-(-tokens // 64))
    assert sorted(owned(fused)) == sorted(itertools.product((False, True), range(bh), tiles))


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("tokens", [8, 448, 456, 640, 648, 6400])
def test_blocks_fit_a_multiprocessor(dims, tokens):
    one = problem(tokens=tokens, key_dim=dims[0], value_dim=dims[1])
    *_, fused = hopper.plan(one, H200).launches
    blocks = dict(fused.kernel.constants)["BLOCKS_PER_SM"]
    assert fused.shared_bytes <= H200.shared_bytes
    assert blocks * (fused.shared_bytes + 1024) <= H200.shared_bytes + 1024


def test_long_rows_stream_with_scratch_linear_in_tokens():
    plan = hopper.plan(problem(tokens=6400), H200)
    assert [launch.kernel.entry for launch in plan.launches] == [
        "psa_backward_hopper_rows",
        "psa_backward_hopper",
    ]
    assert [scratch.shape for scratch in plan.scratch] == [(4, 6400, 2)]
    # The thread that fills a slot looks back two boxes: a ring shorter than that would wait for itself.
    assert dict(plan.launches[1].kernel.constants)["STAGES"] >= 4


def test_an_empty_problem_launches_nothing():
    assert hopper.plan(problem(tokens=0), H200).launches == ()


def compiled_log(kernel):
    nvrtc = pytest.importorskip("cupy.cuda").nvrtc
    nvidia = importlib.util.find_spec("nvidia")
    folders = (
        [pathlib.Path(p) / "cu13" / "include" for p in nvidia.submodule_search_locations] if nvidia else []
    )
    if not any(folder.is_dir() for folder in folders):
        pytest.skip("no CUDA headers: install the extra nvrtc")
    program = nvrtc.createProgram(render(kernel), kernel.file, (), ())
    options = ("-std=c++17", f"-arch={kernel.arch}", "-ftz=true", "--ptxas-options=-v", f"-I{folders[0]}")
    nvrtc.compileProgram(program, options)
    return nvrtc.getProgramLog(program)


@pytest.mark.parametrize("tokens", [400, 1600])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dims", [(5, 10), (32, 64), (36, 72), (48, 96), (64, 128)])
def test_compiles_without_spills_or_serialised_wgmma(dims, added, tokens):
    one = problem(tokens=tokens, key_dim=dims[0], value_dim=dims[1], accumulate=added, branch=added)
    *_, fused = hopper.plan(one, H200).launches
    log = compiled_log(fused.kernel)
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
    assert spilled
    assert not any(spilled), log
    assert not re.search(r"C75\d\d", log), log  # ptxas says that it serialises wgmma or adds waits


@pytest.mark.gpu
class TestOnGpu:
    @pytest.fixture(autouse=True)
    def hopper_gpu(self):
        self.cp = pytest.importorskip("cupy")
        from psa_cupy.launching import gpu

        if not hopper.supports(problem(), gpu.device(self.cp.cuda.runtime.getDevice())):
            pytest.skip("needs a Hopper GPU")

    def inputs(self, heads, tokens, dims, dtype, magnitude=1.0):
        """qkv, d_out, out and lse in NumPy; scores have about the magnitude as standard deviation."""
        rng = np.random.default_rng(heads + tokens)
        geometry = PSAGeometry(1, heads, *dims, 1, tokens)
        qkv = rng.standard_normal((heads, geometry.head_channels, tokens))
        qkv[:, : 2 * dims[0]] *= magnitude**0.5
        qkv = qkv.reshape(geometry.qkv_shape).astype(dtype)
        d_out = rng.standard_normal(geometry.out_shape).astype(dtype)
        out, lse = reference.psa_forward(qkv, heads, key_dim=dims[0])
        return qkv, d_out, out.astype(dtype), lse.astype(np.float32)

    def backward(self, qkv, d_out, out, lse, heads, key_dim, **arrays):
        from psa_cupy.passes.psa import backward_with

        arrays = {name: self.cp.asarray(a) for name, a in arrays.items() if a is not None}
        on_gpu = [self.cp.asarray(a) for a in (d_out, qkv, out, lse)]
        return self.cp.asnumpy(backward_with("hopper", *on_gpu, heads, key_dim=key_dim, **arrays))

    @pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
    @pytest.mark.parametrize("dims", [(5, 10), (32, 64), (36, 72), (64, 128)])
    @pytest.mark.parametrize("tokens", [8, 24, 64, 72, 200, 400, 448, 456, 1096])
    def test_within_the_bounds(self, tokens, dims, dtype):
        qkv, d_out, out, lse = self.inputs(2, tokens, dims, dtype)
        d_qkv = self.backward(qkv, d_out, out, lse, 2, dims[0])
        ratios = testing.psa_backward_ratios(d_out, qkv, d_qkv, 2, key_dim=dims[0])
        assert max(ratios.values()) <= 1, ratios

    def test_small_dims_through_the_ring(self):
        one = problem(2, 3000, 5, 10)
        *_, fused = hopper.plan(one, H200).launches
        assert not dict(fused.kernel.constants)["RESIDENT"]
        qkv, d_out, out, lse = self.inputs(2, 3000, (5, 10), BF16)
        d_qkv = self.backward(qkv, d_out, out, lse, 2, 5)
        ratios = testing.psa_backward_ratios(d_out, qkv, d_qkv, 2, key_dim=5)
        assert max(ratios.values()) <= 1, ratios

    @pytest.mark.parametrize("tokens", [72, 400, 1096])
    @pytest.mark.parametrize("magnitude", [0.01, 30, 3e4])
    def test_any_magnitude_of_scores(self, tokens, magnitude):
        qkv, d_out, out, lse = self.inputs(2, tokens, (32, 64), BF16, magnitude)
        d_qkv = self.backward(qkv, d_out, out, lse, 2, 32)
        ratios = testing.psa_backward_ratios(d_out, qkv, d_qkv, 2, key_dim=32)
        assert max(ratios.values()) <= 1, ratios

    @pytest.mark.parametrize("dims", [(32, 64), (36, 72)])
    @pytest.mark.parametrize("tokens", [400, 1096])
    def test_second_gradient_of_v(self, tokens, dims):
        qkv, d_out, out, lse = self.inputs(3, tokens, dims, BF16)
        branch = np.random.default_rng(1).standard_normal(out.shape).astype(BF16)
        d_qkv = self.backward(qkv, d_out, out, lse, 3, dims[0], d_v_branch=branch)
        ratios = testing.psa_backward_ratios(d_out, qkv, d_qkv, 3, key_dim=dims[0], d_v_branch=branch)
        assert max(ratios.values()) <= 1, ratios

    @pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
    @pytest.mark.parametrize("tokens", [40, 400, 1096])
    def test_a_given_target_receives_one_rounded_addition(self, tokens, dtype):
        qkv, d_out, out, lse = self.inputs(2, tokens, (32, 64), dtype)
        alone = self.backward(qkv, d_out, out, lse, 2, 32)
        before = np.random.default_rng(2).standard_normal(qkv.shape).astype(dtype)
        added = self.backward(qkv, d_out, out, lse, 2, 32, d_qkv=before)
        expected = (before.astype(np.float32) + alone.astype(np.float32)).astype(dtype)
        np.testing.assert_array_equal(added.astype(np.float32), expected.astype(np.float32))

    def test_nan_stays_in_its_head(self):
        qkv, d_out, out, lse = self.inputs(3, 400, (32, 64), BF16)
        clean = self.backward(qkv, d_out, out, lse, 3, 32)
        qkv.reshape(3, 128, 400)[1] = np.nan
        d_qkv = self.backward(qkv, d_out, out, lse, 3, 32).reshape(3, 128, 400)
        for head in (0, 2):
            assert d_qkv[head].tobytes() == clean.reshape(3, 128, 400)[head].tobytes()
