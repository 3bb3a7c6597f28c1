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


def rising(qkv, key_dim):
    """Scores grow along the keys, far beyond those of the first ones."""
    qkv[:, key_dim : 2 * key_dim] *= np.linspace(0.02, 1, qkv.shape[2], dtype=np.float32)


def large_at_the_end(qkv, key_dim):
    """One large score, at the last key."""
    keys = qkv[:, key_dim : 2 * key_dim]
    keys[:, :, :-1] *= 0.01


def negative(qkv, key_dim):
    """All scores far below the 0 that missing keys have."""
    queries, keys = qkv[:, :key_dim], qkv[:, key_dim : 2 * key_dim]
    np.abs(queries, out=queries)
    np.negative(np.abs(keys), out=keys)


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
@pytest.mark.parametrize(("batch", "tokens"), [(64, 400), (1, 400), (1, 1600)])
def test_blocks_fit_a_multiprocessor(dims, batch, tokens):
    described = problem(tokens, dims, batch=batch)
    tuning = hopper.choose_tuning(described.geometry, H200)
    (launch,) = hopper.plan(described, H200).launches
    assert tuning.blocks_per_multiprocessor * (launch.shared_bytes + 1024) <= 228 * 1024
    assert launch.block == (128 * tuning.warpgroups, 1, 1)
    assert tuning.stages >= 3


@pytest.mark.parametrize(
    ("dims", "stages", "blocks"),
    [
        ((32, 64), 4, 4),
        ((20, 44), 4, 4),
        ((36, 72), 4, 3),  # measured: better than three boxes for four blocks
        ((64, 64), 4, 3),
        ((48, 96), 3, 3),
        ((64, 128), 4, 2),
    ],
)
def test_boxes_and_blocks_by_size_of_a_head(dims, stages, blocks):
    tuning = hopper.choose_tuning(problem(dims=dims, batch=64).geometry, H200)
    assert tuning == hopper.Tuning(1, stages, blocks)


@pytest.mark.parametrize(
    ("warpgroups", "batch", "heads", "tokens"),
    [
        (2, 1, 2, 400),  # 14 tiles
        (2, 4, 4, 400),
        (1, 16, 4, 400),  # 448 tiles
        (1, 64, 4, 400),
        (4, 1, 2, 1600),  # 50 tiles
        (1, 8, 4, 1600),
        (1, 4, 4, 6400),
    ],
)
def test_warpgroups_share_keys_where_there_are_few_tiles(warpgroups, batch, heads, tokens):
    geometry = problem(tokens, batch=batch, heads=heads).geometry
    assert hopper.choose_tuning(geometry, H200).warpgroups == warpgroups


@pytest.mark.parametrize("dims", DIMS)
def test_every_warpgroup_has_keys(dims):
    for tokens in range(8, 2048, 8):
        tuning = hopper.choose_tuning(problem(tokens, dims, batch=1, heads=1).geometry, H200)
        assert tuning.warpgroups <= -(-tokens // 64)


def test_a_device_with_little_shared_memory_is_a_value_error():
    with pytest.raises(ValueError, match="too little shared memory"):
        hopper.choose_tuning(problem().geometry, dataclasses.replace(H200, shared_bytes=16 * 1024))


def test_one_block_for_each_tile_of_queries():
    (launch,) = hopper.plan(problem(tokens=400, batch=64, heads=4), H200).launches
    assert launch.grid == (256 * 7, 1, 1)
    assert sum(isinstance(argument, TensorMap) for argument in launch.arguments) == 3


@pytest.mark.skipif(not nvrtc.is_available, reason="CuPy (NVRTC) is not installed: the extra nvrtc")
@pytest.mark.parametrize(
    ("dims", "dtype", "batch", "tokens"),
    [(dims, dtype, 64, 400) for dims in DIMS for dtype in (BFLOAT16, FLOAT16)]
    + [(dims, BFLOAT16, 1, tokens) for dims in [(32, 64), (36, 72), (64, 128)] for tokens in (400, 1600)],
    ids=str,
)
def test_compiles_without_spills_and_without_waiting_for_each_wgmma(dims, dtype, batch, tokens):
    (launch,) = hopper.plan(problem(tokens, dims, dtype, batch), H200).launches
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
    def run(tokens, dims, dtype, *, batch=3, magnitude=1.0, scale=None, change=None):
        """Inputs, outputs and lse; `change(qkv, key_dim)` may edit the (BH, channels, tokens) inputs."""
        import cupy

        from psa_cupy.passes.psa import forward_with

        key_dim, value_dim = dims
        rng = np.random.default_rng(tokens + key_dim)
        qkv = rng.standard_normal((2 * batch, 2 * key_dim + value_dim, tokens), dtype=np.float32)
        qkv[:, : 2 * key_dim] *= np.float32(magnitude) ** np.float32(0.5)
        if change is not None:
            change(qkv, key_dim)
        qkv = cupy.asarray(qkv.reshape(batch, -1, 1, tokens).astype(dtype))
        out = cupy.asarray(np.full((batch, 2 * value_dim, 1, tokens), np.nan, dtype))
        lse = cupy.full((batch, 2, tokens), cupy.nan, cupy.float32)
        forward_with("hopper", qkv, 2, key_dim=key_dim, scale=scale, out=out, lse=lse)
        return qkv, out, lse

    def check(self, tokens, dims, dtype, *, scale=None, **more):
        from psa_cupy.testing import psa_forward_ratios

        qkv, out, lse = self.run(tokens, dims, dtype, scale=scale, **more)
        ratios = psa_forward_ratios(qkv, out, lse, 2, key_dim=dims[0], scale=scale)
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

    @pytest.mark.parametrize("dims", [(32, 64), (36, 72), (64, 128)], ids=str)
    @pytest.mark.parametrize(("batch", "tokens"), [(24, 400), (1, 400), (1, 776), (1, 1600)])
    def test_one_and_several_warpgroups_for_the_keys(self, batch, tokens, dims):
        self.check(tokens, dims, BFLOAT16, batch=batch)
        self.check(tokens, dims, FLOAT16, batch=batch, magnitude=30)

    @pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
    @pytest.mark.parametrize("change", [rising, large_at_the_end])
    @pytest.mark.parametrize(("batch", "tokens"), [(3, 72), (24, 400), (1, 400), (3, 1600), (1, 1600)])
    def test_scores_far_above_those_of_the_first_keys(self, batch, tokens, change, dtype):
        self.check(tokens, (32, 64), dtype, batch=batch, magnitude=300, change=change)
        self.check(tokens, (36, 72), dtype, batch=batch, magnitude=1e5, change=change)

    @pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
    @pytest.mark.parametrize("tokens", [8, 24, 40, 72])
    def test_missing_keys_do_not_count_where_all_scores_are_negative(self, tokens, dtype):
        self.check(tokens, (32, 64), dtype, magnitude=300, change=negative)

    def test_values_so_large_that_only_the_exact_sums_are_finite(self):
        def change(qkv, key_dim):
            rising(qkv, key_dim)
            qkv[:, 2 * key_dim :] *= 1e33

        self.check(400, (32, 64), BFLOAT16, magnitude=6, change=change)

    @pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
    @pytest.mark.parametrize("spoil", [np.nan, np.inf])
    @pytest.mark.parametrize(("batch", "tokens"), [(3, 200), (3, 400), (24, 400)])
    def test_what_is_not_finite_stays_in_its_head(self, batch, tokens, spoil, dtype):
        def change(qkv, key_dim):
            qkv[0, key_dim, tokens // 2] = spoil  # in k
            qkv[1, 2 * key_dim, tokens - 1] = spoil  # in the first channel of v

        _, out, lse = self.run(tokens, (32, 64), dtype, batch=batch, change=change)
        _, clean_out, clean_lse = self.run(tokens, (32, 64), dtype, batch=batch)
        lse, clean_lse = (x.reshape(2 * batch, -1).get() for x in (lse, clean_lse))
        out, clean_out = (x.get().reshape(2 * batch, 64, tokens) for x in (out, clean_out))
        assert np.isnan(lse[0]).any()
        assert not np.isfinite(out[1, 0].astype(np.float32)).any()
        np.testing.assert_allclose(lse[1], clean_lse[1], rtol=0, atol=1e-5)
        np.testing.assert_allclose(
            *(x[1, 1:].astype(np.float32) for x in (out, clean_out)), rtol=0, atol=0.02
        )
        np.testing.assert_array_equal(lse[2:], clean_lse[2:])
        np.testing.assert_array_equal(out[2:].view(np.int16), clean_out[2:].view(np.int16))

    def test_repeatable(self):
        first, second = self.run(400, (36, 72), FLOAT16), self.run(400, (36, 72), FLOAT16)
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a.get().view(np.int8), b.get().view(np.int8))
