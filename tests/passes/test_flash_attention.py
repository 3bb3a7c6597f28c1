"""flash_attention and the plain kernels, packed and NCHW: bounds, invariants, targets, bad numbers, tiles."""

from __future__ import annotations

import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from psa_cupy import launching, testing
from psa_cupy.launching.cpu import DEVICE
from psa_cupy.passes import flash_attention as module
from psa_cupy.passes.flash_attention import FLASH_ATTENTION, flash_attention_backward, flash_attention_forward
from psa_cupy.passes.psa import backward_with, forward_with
from tests.executors import executors
from tests.launching import nvrtc
from tests.pairwise import pairwise
from tests.strategies import DTYPES, IMAGES, Problem, normal

BF16 = np.dtype(ml_dtypes.bfloat16)
GRADIENTS = ("d_q", "d_k", "d_v")
KERNELS = executors("cpu", "gpu")


def inputs(dtype, bh, queries, keys, dims, seed=0, magnitude=1.0):
    """q, k, v, d_o: V and d_o of unit variance, scores of `magnitude` at the default scale."""
    key_dim, value_dim = dims
    q = normal((bh, queries, key_dim), dtype, seed, magnitude**0.5)
    k = normal((bh, keys, key_dim), dtype, seed + 1, magnitude**0.5)
    v, d_o = normal((bh, keys, value_dim), dtype, seed + 2), normal((bh, queries, value_dim), dtype, seed + 3)
    return q, k, v, d_o


def attend(executor, q, k, v, d_o, scale=None, **targets):
    """o, lse and the gradients, computed by the executor, as NumPy arrays."""
    arrays = [executor.array(a) for a in (q, k, v)]
    o, lse = executor.run(flash_attention_forward, *arrays, scale=scale)
    targets = {name: executor.array(target) for name, target in targets.items()}
    gradients = executor.run(
        flash_attention_backward, executor.array(d_o), *arrays, o, lse, scale=scale, **targets
    )
    for name, gradient in zip(GRADIENTS, gradients, strict=True):
        assert name not in targets or gradient is targets[name]
    for before, after in zip((q, k, v), arrays, strict=True):
        assert_same_bits(executor.to_numpy(after), before)
    return [executor.to_numpy(a) for a in (o, lse, *gradients)]


def assert_within_bounds(q, k, v, d_o, o, lse, *gradients, scale=None):
    ratios = testing.attention_forward_ratios(q, k, v, o, lse, scale=scale)
    ratios |= testing.attention_backward_ratios(d_o, q, k, v, *gradients, scale=scale)
    assert max(ratios.values()) <= 1, ratios


def assert_same_bits(a, b):
    assert a.dtype == b.dtype
    assert a.tobytes() == b.tobytes()


def rounded_sum(before, gradient):
    """What one atomic addition in the dtype gives."""
    wide = np.float64 if before.dtype == np.float64 else np.float32
    return (before.astype(wide) + gradient.astype(wide)).astype(before.dtype)


@pytest.fixture
def large_tiles(monkeypatch):
    """Plans for the CPU as if small problems filled the device: they get the largest tiles."""
    monkeypatch.setattr(launching.OnCpu, "device", replace(DEVICE, multiprocessors=1))


PACKED = pairwise(
    {
        "dtype": DTYPES,
        "dims": [(5, 9), (32, 64), (36, 72), (64, 24), (128, 256)],
        "queries": [1, 31, 65, 129],
        "keys": [1, 33, 63, 127],
        "magnitude": [0.01, 1.0, 1e3],
        "scale": [None, -0.3],
        "large": [True, False],
    }
)


@KERNELS
@pytest.mark.parametrize("row", PACKED, ids=lambda r: "-".join(map(str, r.values())))
def test_packed_within_bounds(executor, row, request):
    if row["large"]:
        request.getfixturevalue("large_tiles")
    arrays = inputs(row["dtype"], 2, row["queries"], row["keys"], row["dims"], magnitude=row["magnitude"])
    assert_within_bounds(*arrays, *attend(executor, *arrays, row["scale"]), scale=row["scale"])


@KERNELS
@pytest.mark.parametrize("dims", [(32, 32), (32, 64), (36, 72)])
@pytest.mark.parametrize(("queries", "keys"), [(400, 400), (361, 400)])
def test_the_detectors_own_sizes(executor, large_tiles, dims, queries, keys):
    arrays = inputs(np.float32, 1, queries, keys, dims)
    o, lse, *gradients = attend(executor, *arrays)
    assert_within_bounds(*arrays, o, lse, *gradients)
    exact = flash_attention_forward(*(a.astype(np.float64) for a in arrays[:3]))
    assert testing.absolute_ratio(o, exact.o, "forward") <= 1


CHECKED = pairwise(
    {
        "dtype": DTYPES,
        "dims": [(5, 9), (32, 64), (36, 72)],
        "queries": [1, 65, 129],
        "keys": [7, 33, 127],
        "large": [True, False],
    }
)


@executors("checked")
@pytest.mark.parametrize("row", CHECKED, ids=lambda r: "-".join(map(str, r.values())))
def test_checked(executor, row, request):
    if row["large"]:
        request.getfixturevalue("large_tiles")
    arrays = inputs(row["dtype"], 1, row["queries"], row["keys"], row["dims"])
    assert_within_bounds(*arrays, *attend(executor, *arrays))


@executors("checked")
def test_checked_over_several_tiles(executor, large_tiles):
    """Some races need three tiles."""
    arrays = inputs(np.float32, 1, 200, 200, (32, 32))
    assert_within_bounds(*arrays, *attend(executor, *arrays))


NCHW = pairwise(
    {
        "dtype": DTYPES,
        "dims": [(5, 10), (32, 64), (36, 72), (7, 3)],
        "tokens": [1, 33, 65, 128],
        "offset": [0, 1],
        "large": [True, False],
        "branch": [True, False],
        "accumulate": [True, False],
    }
)


@KERNELS
@pytest.mark.parametrize("row", NCHW, ids=lambda r: "-".join(map(str, r.values())))
def test_nchw_within_bounds(executor, row, request):
    """The plain kernels of psa_forward and psa_backward, on any alignment."""
    if row["large"]:
        request.getfixturevalue("large_tiles")
    check_nchw(executor, row)


@executors("checked")
@pytest.mark.parametrize("row", NCHW[:4], ids=lambda r: "-".join(map(str, r.values())))
def test_nchw_checked(executor, row, large_tiles):
    check_nchw(executor, row)


def check_nchw(executor, row):
    key_dim, value_dim = row["dims"]
    height, width = IMAGES.get(row["tokens"], (8, 16))
    problem = Problem(1, 2, key_dim, value_dim, height, width, row["dtype"])
    host_qkv, host_d_out, branch = problem.qkv(), problem.d_out(), problem.d_v_branch()
    if not row["branch"]:
        branch = None
    qkv, d_out = (executor.array(a, offset=row["offset"]) for a in (host_qkv, host_d_out))
    out, lse = executor.run(forward_with, "plain", qkv, 2, key_dim=key_dim)

    def backward(**target):
        device_branch = None if branch is None else executor.array(branch)
        return executor.to_numpy(
            executor.run(
                *(backward_with, "plain", d_out, qkv, out, lse, 2),
                key_dim=key_dim,
                d_v_branch=device_branch,
                **target,
            )
        )

    d_qkv = backward()
    ratios = testing.psa_forward_ratios(
        host_qkv, executor.to_numpy(out), executor.to_numpy(lse), 2, key_dim=key_dim
    )
    ratios |= testing.psa_backward_ratios(host_d_out, host_qkv, d_qkv, 2, key_dim=key_dim, d_v_branch=branch)
    assert max(ratios.values()) <= 1, ratios
    if row["accumulate"]:
        target = problem.target()
        added = backward(d_qkv=executor.array(target, offset=row["offset"]))
        assert_same_bits(added, rounded_sum(target, d_qkv))


@KERNELS
@settings(max_examples=12)
@given(
    dtype=st.sampled_from((np.dtype(np.float32), BF16)),
    queries=st.integers(1, 140),
    keys=st.integers(1, 140),
    bh=st.integers(1, 3),
    seed=st.integers(0, 2**16),
    magnitude=st.sampled_from((0.01, 1.0, 30.0, 3e3, 1e5)),
    scale=st.sampled_from((None, 1.0, -0.05, 1e-3)),
)
def test_any_lengths_and_magnitudes(executor, dtype, queries, keys, bh, seed, magnitude, scale):
    arrays = inputs(dtype, bh, queries, keys, (5, 9), seed, magnitude)
    assert_within_bounds(*arrays, *attend(executor, *arrays, scale), scale=scale)


@KERNELS
@pytest.mark.parametrize("dtype", [np.float32, np.float64, BF16], ids=str)
def test_scores_up_to_1e5(executor, dtype):
    arrays = inputs(dtype, 1, 129, 127, (32, 32), magnitude=5e4)
    scores = arrays[0].astype(np.float64) @ arrays[1].astype(np.float64).transpose(0, 2, 1) * 32**-0.5
    assert 1e5 < np.abs(scores).max() < 1e6
    assert_within_bounds(*arrays, *attend(executor, *arrays))


@executors("reference", "cpu", "gpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_given_targets_are_added_to_and_rounded_once(executor, dtype):
    arrays = q, k, v, _ = inputs(dtype, 2, 33, 65, (5, 9))
    *_, d_q, d_k, d_v = attend(executor, *arrays)
    before = dict(zip(GRADIENTS, (normal(a.shape, dtype, 9) for a in (q, k, v)), strict=True))
    for given_names in (("d_q", "d_k", "d_v"), ("d_q",), ("d_k",), ("d_v",)):
        targets = {name: before[name] for name in given_names}
        *_, a_q, a_k, a_v = attend(executor, *arrays, **targets)
        for name, added, stored in zip(GRADIENTS, (a_q, a_k, a_v), (d_q, d_k, d_v), strict=True):
            assert_same_bits(added, rounded_sum(before[name], stored) if name in targets else stored)


@KERNELS
def test_the_same_call_gives_the_same_bits(executor):
    arrays = inputs(BF16, 2, 129, 127, (36, 72))
    for first, second in zip(attend(executor, *arrays), attend(executor, *arrays), strict=True):
        assert_same_bits(first, second)


@executors("reference", "cpu", "gpu")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "d_o"])
def test_a_bad_number_stays_in_its_head(executor, bad, where):
    arrays = inputs(np.float32, 3, 33, 65, (5, 9))
    clean = attend(executor, *arrays)
    arrays[("q", "k", "v", "d_o").index(where)][1, 20, 2] = bad
    for before, after in zip(clean, attend(executor, *arrays), strict=True):
        assert_same_bits(after[[0, 2]], before[[0, 2]])
    spoilt = attend(executor, *arrays)[2 if where == "d_o" else 0]
    assert not np.isfinite(spoilt[1]).all()


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_zero_is_the_mean(executor, dtype):
    arrays = inputs(dtype, 2, 33, 65, (5, 9))
    o, lse, d_q, d_k, d_v = attend(executor, *arrays, scale=0)
    assert_within_bounds(*arrays, o, lse, d_q, d_k, d_v, scale=0)
    assert np.abs(lse - np.log(65)).max() < 24 * 2**-24
    assert not d_q.astype(np.float32).any()
    assert not d_k.astype(np.float32).any()
    mean = arrays[2].astype(np.float64).mean(axis=1, keepdims=True)
    assert np.abs(o.astype(np.float64) - mean).max() <= 2 * testing.unit_roundoff(dtype)


@KERNELS
def test_a_negative_scale_is_a_negative_q(executor):
    q, k, v, d_o = inputs(np.float32, 2, 33, 65, (5, 9))
    o, lse, d_q, d_k, d_v = attend(executor, q, k, v, d_o, scale=-0.7)
    p, m, e_q, e_k, e_v = attend(executor, -q, k, v, d_o, scale=0.7)
    for a, b in ((o, p), (lse, m), (d_k, e_k), (d_v, e_v)):
        assert_same_bits(a, b)
    assert (d_q == -e_q).all()


@KERNELS
def test_the_largest_scale_does_not_make_nan_of_zero(executor):
    q, k, v, d_o = inputs(np.float32, 1, 7, 9, (5, 9))
    for o in (attend(executor, 0 * q, k, v, d_o, scale=s)[0] for s in (1e38, -1e38)):
        assert np.abs(o - v.mean(axis=1, keepdims=True)).max() < 1e-6


@executors("reference", "cpu", "gpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_keys(executor, dtype):
    q, k, v, d_o = inputs(dtype, 2, 33, 0, (5, 9))
    o, lse, d_q, d_k, d_v = attend(executor, q, k, v, d_o)
    assert o.shape == (2, 33, 9)
    assert not o.astype(np.float32).any()
    assert (lse == -np.inf).all()
    assert d_q.shape == q.shape
    assert not d_q.astype(np.float32).any()
    assert d_k.shape == k.shape
    assert d_v.shape == v.shape
    before = normal(q.shape, dtype, 9)
    assert_same_bits(attend(executor, q, k, v, d_o, d_q=before)[2], before)


@executors("reference", "cpu", "gpu")
def test_without_queries_or_heads(executor):
    for bh, queries in ((2, 0), (0, 33)):
        q, k, v, d_o = inputs(np.float32, bh, queries, 65, (5, 9))
        o, lse, d_q, d_k, d_v = attend(executor, q, k, v, d_o)
        assert (o.shape, lse.shape, d_q.shape) == ((bh, queries, 9), (bh, queries), (bh, queries, 5))
        assert d_k.shape == k.shape
        assert d_v.shape == v.shape
        assert not d_k.any()
        assert not d_v.any()


@executors("reference", "cpu", "gpu")
def test_strided_input(executor):
    q, k, v, d_o = inputs(np.float32, 2, 33, 65, (5, 9))
    expected = attend(executor, q, k, v, d_o)
    on_device = [
        executor.array(np.ascontiguousarray(a.transpose(1, 2, 0))).transpose(2, 0, 1) for a in (q, k, v, d_o)
    ]
    o, lse = executor.run(flash_attention_forward, *on_device[:3])
    gradients = executor.run(flash_attention_backward, on_device[3], *on_device[:3], o, lse)
    for result, e in zip((o, lse, *gradients), expected, strict=True):
        assert_same_bits(executor.to_numpy(result), e)


class TestInvariants:
    """What must hold whatever the numbers: catches what norms cannot see."""

    @KERNELS
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_constant_v_comes_back(self, executor, dtype):
        q, k, v, d_o = inputs(dtype, 2, 65, 127, (32, 24))
        v[...] = 1.37
        o = attend(executor, q, k, v, d_o)[0].astype(np.float64)
        # sums of 127 terms in the accumulator, then one rounding to the dtype
        u_accumulator = 2.0 ** (-53 if dtype == np.float64 else -24)
        constant = float(v[0, 0, 0])
        one_ulp = constant * 2 * testing.unit_roundoff(dtype)
        assert np.abs(o - constant).max() <= one_ulp + 8 * u_accumulator * (dtype.itemsize > 2)

    @KERNELS
    def test_one_token_is_exact(self, executor):
        for dtype in DTYPES:
            for magnitude in (1.0, 1e4):
                q, k, v, d_o = inputs(dtype, 3, 1, 1, (5, 9), magnitude=magnitude)
                o, _, d_q, d_k, d_v = attend(executor, q, k, v, d_o)
                assert_same_bits(o, v)
                assert_same_bits(d_v, d_o)
                u_accumulator = 2.0 ** (-53 if dtype == np.float64 else -24)
                scale = 5**-0.5
                size = 2 * np.abs(d_o.astype(np.float64) * v.astype(np.float64)).sum(2, keepdims=True) * scale
                for gradient, other in ((d_q, k), (d_k, q)):
                    allowed = 8 * u_accumulator * size * np.abs(other.astype(np.float64))
                    assert (np.abs(gradient.astype(np.float64)) <= allowed).all()

    @KERNELS
    def test_a_vector_added_to_every_key_moves_lse_only(self, executor):
        rng = np.random.default_rng(0)
        q, k = rng.integers(-8, 9, (2, 2, 65, 8)).astype(np.float32) / 8  # sums of these are exact
        u = rng.integers(-8, 9, 8).astype(np.float32) / 8
        v, d_o = normal((2, 65, 9), np.float32, 1), normal((2, 65, 9), np.float32, 2)
        o, lse, *gradients = attend(executor, q, k + u, v, d_o)
        shift = (q.astype(np.float64) @ u) * 8**-0.5
        ratios = testing.attention_forward_ratios(q, k, v, o, (lse - shift).astype(np.float32))
        ratios |= testing.attention_backward_ratios(d_o, q, k, v, *gradients)
        assert max(ratios.values()) <= 1, ratios

    @KERNELS
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_sums_of_gradients(self, executor, dtype):
        q, k, v, d_o = inputs(dtype, 2, 65, 127, (32, 24))
        _, _, d_q, d_k, d_v = (a.astype(np.float64) for a in attend(executor, q, k, v, d_o))
        q, k, d_o = (a.astype(np.float64) for a in (q, k, d_o))
        roundoff = 4 * testing.unit_roundoff(dtype)
        # every row of P sums to 1
        error = np.abs(d_v.sum(axis=1) - d_o.sum(axis=1)).max()
        assert error <= roundoff * np.abs(d_o).sum(axis=1).max()
        # the scores do not change when q grows as k shrinks
        terms_q, terms_k = q * d_q, k * d_k
        error = np.abs(terms_q.sum(axis=(1, 2)) - terms_k.sum(axis=(1, 2))).max()
        assert error <= roundoff * np.abs(terms_q).sum(axis=(1, 2)).max()


class TestPlans:
    @pytest.mark.parametrize("shared_bytes", [64 * 1024, 99 * 1024, 227 * 1024])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_a_tile_fits_for_every_dim(self, shared_bytes, dtype):
        device = replace(DEVICE, shared_bytes=shared_bytes)
        for key_dim in (1, 8, 9, 32, 36, 64, 65, 120, 128):
            for value_dim in (1, 8, 9, 64, 72, 128, 129, 200, 256):
                problem = module.FlashProblem(64, 400, 400, key_dim, value_dim, np.dtype(dtype), 1.0)
                for direction in ("forward", "backward"):
                    plan = FLASH_ATTENTION.plan(direction, problem, device)
                    assert all(launch.shared_bytes <= shared_bytes for launch in plan.launches)

    def test_grids_are_one_dimensional_at_any_batch(self):
        problem = module.FlashProblem(100_000, 400, 400, 32, 64, np.dtype(np.float32), 1.0)
        for direction in ("forward", "backward"):
            for launch in FLASH_ATTENTION.plan(direction, problem, DEVICE).launches:
                assert launch.grid[0] >= 400_000
                assert launch.grid[1:] == (1, 1)

    def test_a_small_problem_gets_more_and_smaller_blocks(self):
        large, small = (
            FLASH_ATTENTION.plan(
                "forward", module.FlashProblem(bh, 400, 400, 32, 64, np.dtype(np.float32), 1.0), DEVICE
            ).launches[0]
            for bh in (256, 2)
        )
        assert large.grid[0] == 256 * 4
        assert small.grid[0] > 2 * 4

    def test_scratch_is_one_number_per_query(self):
        problem = module.FlashProblem(3, 400, 77, 32, 64, np.dtype(np.float16), 1.0)
        (delta,) = FLASH_ATTENTION.plan("backward", problem, DEVICE).scratch
        assert (delta.shape, delta.dtype) == ((3, 400), np.float32)
        assert FLASH_ATTENTION.plan("forward", problem, DEVICE).scratch == ()

    def test_nothing_to_do_launches_nothing(self):
        for bh, queries, keys in ((0, 5, 5), (2, 0, 0)):
            problem = module.FlashProblem(bh, queries, keys, 32, 64, np.dtype(np.float32), 1.0)
            for direction in ("forward", "backward"):
                assert FLASH_ATTENTION.plan(direction, problem, DEVICE).launches == ()

    def test_infer_shape(self):
        assert FLASH_ATTENTION.infer_shape((6, 7, 5), (6, 9, 5), (6, 9, 3)) == ((6, 7, 3), (6, 7))
        assert FLASH_ATTENTION.infer_shape((None, 7, 5), (None, 9, 5), (None, 9, 3)) == (
            (None, 7, 3),
            (None, 7),
        )

    @pytest.mark.parametrize("k_shape", [(5, 9, 5), (6, 8, 5), (6, 9, 4)])
    def test_infer_shape_of_shapes_that_do_not_fit(self, k_shape):
        with pytest.raises(ValueError, match=r"^flash_attention_forward: .*expected \(BH, Nq, D\)"):
            FLASH_ATTENTION.infer_shape((6, 7, 5), k_shape, (6, 9, 3))

    @pytest.mark.parametrize("name", sorted(nvrtc.DEVICES))
    def test_a_multiprocessor_holds_two_blocks_where_a_tile_for_two_is_chosen(self, name):
        """Tiles are sought for two blocks first; from sm_80 on the system takes 1 KiB for each."""
        device = nvrtc.DEVICES[name]
        reserved = 0 if name == "sm_75" else 1024
        of_two = 0
        for direction, key_dim, value_dim in itertools.product(
            ("forward", "backward"), (32, 64, 96, 128), range(8, 257, 8)
        ):
            problem = module.FlashProblem(256, 400, 400, key_dim, value_dim, np.dtype(np.float32), 1.0)
            launch = FLASH_ATTENTION.plan(direction, problem, device).launches[0]
            assert launch.shared_bytes <= device.shared_bytes
            if launch.shared_bytes <= device.shared_bytes // 2:
                of_two += 1
                assert 2 * (launch.shared_bytes + reserved) <= device.shared_bytes + reserved
        assert of_two


F32 = np.zeros((2, 5, 4), np.float32)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            {"k": np.zeros((2, 6, 3), np.float32)},
            ValueError,
            r"k has shape \(2, 6, 3\), expected \(2, 6, 4\)",
        ),
        (
            {"v": np.zeros((2, 6, 3), np.float32)},
            ValueError,
            r"v has shape \(2, 6, 3\), expected \(2, 5, 3\)",
        ),
        ({"q": np.zeros((2, 5), np.float32)}, ValueError, "q has shape .*, expected 3 dimensions"),
        ({"v": np.zeros((2, 5, 257), np.float32)}, ValueError, "expected a last dimension from 1 to 256"),
        ({"k": np.zeros((2, 5, 4))}, TypeError, "k has dtype float64, expected float32"),
        ({"q": np.zeros((2, 5, 4), np.int32)}, TypeError, "q has dtype int32, expected one of"),
        ({"scale": np.inf}, ValueError, "scale is inf"),
        ({"d_o": np.zeros((2, 5, 3), np.float32)}, ValueError, "d_o has shape"),
        ({"lse": np.zeros((2, 5))}, TypeError, "lse has dtype float64, expected float32"),
        ({"d_k": np.zeros((2, 5, 3), np.float32)}, ValueError, "d_k has shape"),
        ({"d_k": np.zeros((2, 5, 8), np.float32)[..., ::2]}, ValueError, "d_k is not C-contiguous"),
        ({"d_q": F32}, ValueError, "d_q overlaps"),
    ],
)
def test_wrong_calls(wrong, error, message):
    arguments = {name: F32 for name in ("d_o", "q", "k", "v", "o")} | {"lse": np.zeros((2, 5), np.float32)}
    with pytest.raises(error, match=f"^flash_attention_backward: .*{message}"):
        flash_attention_backward(**{**arguments, **wrong})
