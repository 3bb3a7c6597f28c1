"""The Hopper forward: where it is chosen, what it launches, how it compiles; on a GPU, its results."""

import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest

from psa_cupy.geometry import PSAGeometry
from psa_cupy.launching.plan import Device, TensorMap
from psa_cupy.passes import psa_forward_hopper as hopper
from psa_cupy.passes.descriptor import PSAProblem
from tests.launching import nvrtc

H200 = Device(capability=(9, 0), multiprocessors=132, shared_bytes=227 * 1024, tensor_maps=True)
FLOAT16, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
DIMS = [(32, 64), (36, 72), (16, 32), (64, 128), (64, 64), (48, 96), (20, 44), (5, 3), (64, 8), (16, 128)]


def problem(tokens=400, dims=(32, 64), dtype=BFLOAT16, batch=2, heads=3, **more):
    return PSAProblem(PSAGeometry(batch, heads, *dims, 1, tokens), dtype, dims[0] ** -0.5, **more)


@pytest.mark.parametrize(
    ("expected", "what", "device"),
    [
        (True, problem(), H200),
        (True, problem(tokens=8, dtype=FLOAT16, dims=(64, 128)), H200),
        (False, problem(tokens=361), H200),
        (False, problem(tokens=396), H200),
        (False, problem(aligned=False), H200),
        (False, problem(dims=(65, 64)), H200),
        (False, problem(dims=(32, 129)), H200),
        (False, problem(dtype=np.dtype(np.float32)), H200),
        (False, problem(), dataclasses.replace(H200, tensor_maps=False)),
        (False, problem(), dataclasses.replace(H200, capability=(10, 0))),
    ],
)
def test_supports(expected, what, device):
    assert hopper.supports(what, device) is expected


@pytest.mark.parametrize("dims", DIMS)
def test_maps_cover_their_channels_and_no_others(dims):
    geometry = problem(dims=dims).geometry
    key_dim, value_dim = dims
    joined = key_dim % 16 == 0 and value_dim % 8 == 0  # the copy of k brings v, too
    shape = (geometry.bh, geometry.head_channels, geometry.tokens)
    starts, widths = (0, key_dim, 2 * key_dim), (key_dim, key_dim + joined * value_dim, value_dim)
    for tensor_map, start, width in zip(hopper.tensor_maps(geometry), starts, widths, strict=True):
        counts, expected = np.zeros(shape, np.int8), np.zeros(shape, np.int8)
        n, channel, bh = np.ix_(*map(np.arange, tensor_map.dims))
        at = tensor_map.offset + n + channel * tensor_map.strides[0] + bh * tensor_map.strides[1]
        np.add.at(counts.reshape(-1), at.reshape(-1), 1)
        expected[:, start : start + width] = 1
        np.testing.assert_array_equal(counts, expected)
        assert tensor_map.box[1] >= tensor_map.dims[1]


@pytest.mark.parametrize("dims", DIMS)
def test_blocks_fit_a_multiprocessor(dims):
    tuning = hopper.choose_tuning(problem(dims=dims).geometry, H200)
    (launch,) = hopper.plan(problem(dims=dims), H200).launches
    assert tuning.blocks_per_multiprocessor * (launch.shared_bytes + 1024) <= 228 * 1024
    assert tuning.stages >= 3


def test_one_block_for_each_tile_of_queries():
    (launch,) = hopper.plan(problem(tokens=400, batch=64, heads=4), H200).launches
    assert launch.grid == (256 * 7, 1, 1)
    assert sum(isinstance(argument, TensorMap) for argument in launch.arguments) == 3


@pytest.mark.skipif(not nvrtc.is_available, reason="CuPy (NVRTC) is not installed: the extra nvrtc")
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_compiles_without_spills_and_without_waiting_for_each_wgmma(dims, dtype):
    (launch,) = hopper.plan(problem(dims=dims, dtype=dtype), H200).launches
    report = nvrtc.compile_for(launch.kernel, "sm_90")
    assert report.spilled_bytes == 0
    blocks = dict(launch.kernel.constants)["BLOCKS_PER_MULTIPROCESSOR"]
    assert report.registers * launch.block[0] * blocks <= 65536
    # C7510 to C7517: wgmma serialised, or a wait put in by the compiler.
    assert not re.search(r"C75\d\d|serializ", report.log), report.log


@pytest.mark.gpu
class TestOnHopper:
    @pytest.fixture(autouse=True)
    def need_hopper(self):
        cupy = pytest.importorskip("cupy")
        if cupy.cuda.Device().compute_capability != "90":
            pytest.skip("not a Hopper GPU")

    @staticmethod
    def run(tokens, dims, dtype, magnitude=1.0, scale=None, spoil=None):
        import cupy

        from psa_cupy.passes.psa import forward_with

        key_dim, value_dim = dims
        rng = np.random.default_rng(tokens + key_dim)
        qkv = rng.standard_normal((3, 2, 2 * key_dim + value_dim, tokens), dtype=np.float32)
        qkv[:, :, : 2 * key_dim] *= np.float32(magnitude) ** np.float32(0.5)
        if spoil is not None:
            qkv[0, 0, key_dim, tokens // 2] = spoil
        qkv = cupy.asarray(qkv.reshape(3, -1, 1, tokens).astype(dtype))
        out = cupy.asarray(np.full((3, 2 * value_dim, 1, tokens), np.nan, dtype))
        lse = cupy.full((3, 2, tokens), cupy.nan, cupy.float32)
        forward_with("hopper", qkv, 2, key_dim=key_dim, scale=scale, out=out, lse=lse)
        return qkv, out, lse

    def check(self, tokens, dims, dtype, **more):
        from psa_cupy.testing import psa_forward_ratios

        qkv, out, lse = self.run(tokens, dims, dtype, **more)
        ratios = psa_forward_ratios(qkv, out, lse, 2, key_dim=dims[0], scale=more.get("scale"))
        assert max(ratios.values()) <= 1, ratios

    @pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
    @pytest.mark.parametrize("tokens", [8, 16, 24, 40, 64, 72, 120, 128, 200, 264, 400, 1600])
    def test_tokens(self, tokens, dtype):
        self.check(tokens, (32, 64), dtype)

    @pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
    @pytest.mark.parametrize("dims", DIMS, ids=str)
    def test_dims(self, dims, dtype):
        self.check(72, dims, dtype)
        self.check(400, dims, dtype)

    @pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
    @pytest.mark.parametrize("magnitude", [0.01, 30, 1e3, 1e5])
    def test_magnitudes(self, magnitude, dtype):
        self.check(400, (32, 64), dtype, magnitude=magnitude)
        self.check(72, (36, 72), dtype, magnitude=magnitude)

    @pytest.mark.parametrize("scale", [-0.2, 0.0, 1.7])
    def test_scales(self, scale):
        self.check(200, (32, 64), BFLOAT16, magnitude=10, scale=scale)

    @pytest.mark.parametrize("spoil", [np.nan, np.inf])
    def test_what_is_not_finite_stays_in_its_head(self, spoil):
        _, out, lse = self.run(200, (32, 64), BFLOAT16, spoil=spoil)
        _, clean_out, clean_lse = self.run(200, (32, 64), BFLOAT16)
        out, clean_out = (x.reshape(6, -1).view(np.int16).get() for x in (out, clean_out))
        lse, clean_lse = (x.reshape(6, -1).get() for x in (lse, clean_lse))
        assert not np.isfinite(lse[0]).all()
        np.testing.assert_array_equal(lse[1:], clean_lse[1:])
        np.testing.assert_array_equal(out[1:], clean_out[1:])

    def test_repeatable(self):
        first, second = self.run(400, (36, 72), FLOAT16), self.run(400, (36, 72), FLOAT16)
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a.get().view(np.int8), b.get().view(np.int8))
