"""The portable fused forward of float32 and float64: its results on the CPU and on a GPU, its tiles."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from psa_cupy import reference, testing
from psa_cupy.geometry import PSAGeometry
from psa_cupy.launching import cpu
from psa_cupy.passes import psa_forward_float as portable
from psa_cupy.passes.descriptor import PSAProblem
from psa_cupy.passes.psa import PSA

from .. import strategies
from ..executors import executors
from ..launching import nvrtc
from ..pairwise import pairwise
from ..strategies import Problem
from . import forward_cases
from .forward_cases import assert_within_bounds, forward

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
DTYPES = (F32, F64)
BOTH = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def problem_of(tokens, dims=(32, 64), dtype=F32, **more) -> Problem:
    return forward_cases.problem_of(tokens, dims, dtype, **more)


def in_heads(problem, array):
    """`array` as (BH, channels, tokens): the same memory."""
    return array.reshape(problem.geometry.bh, -1, problem.geometry.tokens)


# ---- results ----

TABLE = pairwise(
    {
        "dims": ((1, 2), (5, 24), (32, 64), (36, 72), (100, 3)),
        "tokens": (1, 7, 31, 33, 63, 65, 127, 128, 129, 130, 132),
        "dtype": DTYPES,
        "magnitude": (1e-3, 1.0, 30.0, 3e3, 1e5),
        "offset": (0, 1),
    }
)


@executors("cpu", "gpu")
@pytest.mark.parametrize("row", TABLE, ids=lambda row: "-".join(map(str, row.values())))
def test_within_the_bounds(executor, row):
    problem = problem_of(row["tokens"], row["dims"], row["dtype"], magnitude=row["magnitude"])
    assert_within_bounds(problem, forward(executor, problem, offset=row["offset"]))


@executors("cpu", "gpu")
@BOTH
@pytest.mark.parametrize("tokens", [361, 400])
def test_detectors_heads(executor, tokens, dtype):
    """Also within the absolute bound, which products of fewer parts of float32 miss."""
    for dims in ((32, 64), (36, 72)):
        problem = problem_of(tokens, dims, dtype)
        out, lse = forward(executor, problem)
        assert_within_bounds(problem, (out, lse))
        exact, _ = reference.psa_forward(
            problem.qkv().astype(np.float64), problem.num_heads, key_dim=problem.key_dim
        )
        assert testing.absolute_ratio(out, exact, "forward") <= 1


@executors("cpu", "gpu")
@BOTH
@pytest.mark.parametrize("dims", [(128, 256), (64, 128), (3, 200)], ids=str)
def test_wide_heads(executor, dims, dtype):
    problem = problem_of(65, dims, dtype, heads=1)
    assert_within_bounds(problem, forward(executor, problem))


@executors("gpu")
@given(problem=strategies.problems(halves=False, max_bh=6, dtypes=DTYPES))
def test_any_problem_on_a_gpu(executor, problem):
    assert_within_bounds(problem, forward(executor, problem))


@executors("checked")
@pytest.mark.parametrize(
    ("tokens", "dims", "dtype", "offset"),
    [(65, (32, 64), F32, 0), (129, (5, 3), F64, 0), (62, (36, 72), F64, 0), (200, (32, 64), F32, 1)],
    ids=str,
)
def test_breaks_no_rule_of_cuda(executor, tokens, dims, dtype, offset):
    problem = problem_of(tokens, dims, dtype, heads=1)
    assert_within_bounds(problem, forward(executor, problem, offset=offset))


NARROW = portable.Tile(1, 1, 16, min_blocks=1, value_part=48)
WIDE = portable.Tile(3, 2, 32, min_blocks=1, value_part=48)
IN_PARTS = portable.Tile(2, 2, 64, min_blocks=1, value_part=16)


@executors("cpu", "checked")
@BOTH
@pytest.mark.parametrize(("tile", "offset"), [(NARROW, 0), (WIDE, 1), (IN_PARTS, 0)], ids=str)
def test_every_kind_of_tile(executor, tile, offset, dtype):
    problem = problem_of(140, (17, 40), dtype, heads=1)  # chunks, also of the longest kind: three and more
    g = problem.geometry
    operands = {
        "qkv": executor.array(problem.qkv(), offset=offset),
        "out": executor.empty(g.out_shape, dtype, offset=offset),
        "lse": executor.empty(g.lse_shape, dtype),
    }
    described = PSAProblem(g, dtype, problem.key_dim**-0.5, aligned=offset == 0)
    cpu.run(portable.plan_with(tile, described), operands, checked=executor.checked)
    executor.check_guards()
    assert_within_bounds(problem, (operands["out"], operands["lse"]))


# ---- the reference of the softmax ----


@executors("cpu", "gpu")
@BOTH
def test_scores_that_rise_with_the_keys(executor, dtype):
    """Every group of keys asks for a higher reference than the one before."""
    problem = problem_of(129, (16, 32), dtype)
    key_dim, tokens = problem.key_dim, problem.geometry.tokens
    qkv = problem.qkv()
    in_heads(problem, qkv)[:, key_dim : 2 * key_dim] = np.linspace(-40, 40, tokens)
    # for every second query they fall
    in_heads(problem, qkv)[:, :key_dim] = np.where(np.arange(tokens) % 2, 1, -1)
    assert_within_bounds(problem, forward(executor, problem, qkv=qkv), qkv=qkv)


@executors("cpu", "gpu")
@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0])
def test_scale_is_a_value(executor, scale):
    problem = problem_of(33, (5, 24), magnitude=10.0)
    assert_within_bounds(problem, forward(executor, problem, scale=scale), scale=scale)


# ---- the range of the parts of float32 ----


def assert_every_element_is_close(problem, qkv, results):
    """Each error against the sum of absolute terms of its own element: norms would hide small channels."""
    key_dim = problem.key_dim
    q, k, v = np.split(in_heads(problem, qkv).astype(np.float64), [key_dim, 2 * key_dim], axis=1)
    scores = q.transpose(0, 2, 1) @ k * key_dim**-0.5
    p = np.exp(scores - scores.max(2, keepdims=True))
    p = (p / p.sum(2, keepdims=True)).transpose(0, 2, 1)
    bound = testing.unit_roundoff(problem.dtype) * (8 + 4 * np.abs(scores).max()) * (np.abs(v) @ p)
    assert (np.abs(in_heads(problem, results[0]) - v @ p) <= bound).all()


@executors("cpu", "gpu")
@BOTH
def test_channels_of_very_different_size(executor, dtype):
    problem = problem_of(65, (16, 40), dtype)
    qkv = problem.qkv()
    in_heads(problem, qkv)[:, 32:] *= np.logspace(-34, 32, 40).astype(dtype)[:, None]
    results = forward(executor, problem, qkv=qkv)
    assert_every_element_is_close(problem, qkv, results)


@executors("cpu", "gpu")
@BOTH
def test_keys_of_large_values_and_little_weight(executor, dtype):
    """Every fifth value is 2^20 times the others, at a weight of about 2^-20."""
    problem = problem_of(200, (16, 40), dtype)
    qkv = problem.qkv()
    heads = in_heads(problem, qkv)
    heads[:, 0], heads[:, 16] = 4, 0
    heads[:, 16, ::5] = -20 * np.log(2)
    heads[:, 32:, ::5] *= 2.0**20
    results = forward(executor, problem, qkv=qkv)
    assert_within_bounds(problem, results, qkv=qkv)
    assert_every_element_is_close(problem, qkv, results)


# ---- invariants ----


@executors("cpu", "gpu")
@BOTH
def test_one_token(executor, dtype):
    problem = problem_of(1, (36, 72), dtype, magnitude=30.0)
    out, _ = forward(executor, problem)
    np.testing.assert_array_equal(in_heads(problem, out), in_heads(problem, problem.qkv())[:, 72:])


@executors("cpu", "gpu")
@BOTH
@pytest.mark.parametrize("tokens", [7, 127, 200])
def test_constant_values_come_out(executor, tokens, dtype):
    problem = problem_of(tokens, dtype=dtype, magnitude=4.0)
    qkv = problem.qkv()
    constants = np.linspace(1, 2, problem.value_dim).astype(dtype)[:, None]
    in_heads(problem, qkv)[:, 2 * problem.key_dim :] = constants
    out, _ = forward(executor, problem, qkv=qkv)
    # One ulp, and what the two sums of so many terms lose: the accumulator is no wider. (Measured for 127 and
    # 200 tokens: float32 8 and 10 units, float64 18 and 22, the plain kernel 16 to 21.)
    bound = (2 + 2 * tokens**0.5) * testing.unit_roundoff(dtype) * constants.astype(np.float64)
    assert (np.abs(in_heads(problem, out) - constants.astype(np.float64)) <= bound).all()


@executors("cpu", "gpu")
@BOTH
def test_a_vector_added_to_every_key_moves_only_lse(executor, dtype):
    problem = problem_of(65, dtype=dtype)
    key_dim = problem.key_dim
    qkv = problem.qkv()
    keys = slice(key_dim, 2 * key_dim)
    in_heads(problem, qkv)[:, keys] = np.round(in_heads(problem, qkv)[:, keys] * 8) / 8  # k + u is exact
    u = np.random.default_rng(5).integers(-4, 5, (problem.geometry.bh, key_dim, 1)) / 2
    moved = qkv.copy()
    in_heads(problem, moved)[:, keys] += u.astype(dtype)
    queries = in_heads(problem, qkv)[:, :key_dim].astype(np.float64)
    expected = key_dim**-0.5 * (queries * u).sum(1).reshape(problem.geometry.lse_shape)
    lse = []
    for x in (qkv, moved):
        results = forward(executor, problem, qkv=x)
        assert_within_bounds(problem, results, qkv=x)
        lse.append(results[1].astype(np.float64))
    np.testing.assert_allclose(lse[1] - lse[0], expected, atol=200 * testing.unit_roundoff(dtype))


@executors("cpu", "gpu")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_head(executor, bad):
    problem = problem_of(65, (16, 32), heads=3)
    qkv = problem.qkv()
    clean_out, clean_lse = forward(executor, problem)
    in_heads(problem, qkv)[1, 20, 30] = bad
    out, lse = forward(executor, problem, qkv=qkv)
    assert not np.isfinite(lse[:, 1]).all()
    for head in (0, 2):
        channels = slice(32 * head, 32 * head + 32)
        assert out[:, channels].tobytes() == clean_out[:, channels].tobytes()
        assert lse[:, head].tobytes() == clean_lse[:, head].tobytes()


@executors("cpu", "gpu")
@BOTH
def test_repeatable(executor, dtype):
    problem = problem_of(129, dtype=dtype)
    first, second = forward(executor, problem), forward(executor, problem)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


# ---- plans ----

DIMS = [(1, 1), (5, 3), (32, 64), (36, 72), (64, 128), (128, 1), (128, 256)]


def test_portable_by_name_is_the_kernel_of_the_dtype():
    device = nvrtc.DEVICES["sm_80"]
    for dtype, file in ((ml_dtypes.bfloat16, "psa_forward.cu"), (F32, "psa_forward_float.cu")):
        described = PSAProblem(problem_of(400).geometry, np.dtype(dtype))
        for variant in (None, "portable"):
            (launch,) = PSA.plan("forward", described, device, variant).launches
            assert launch.kernel.file == file
    assert PSA.choose("forward", described, nvrtc.DEVICES["sm_75"]).name == "plain"


@pytest.mark.parametrize("arch", sorted(set(nvrtc.DEVICES) - {"sm_75"}))
def test_tiles_fit_every_device(arch):
    device = nvrtc.DEVICES[arch]
    for dims in DIMS:
        for tokens in (1, 16, 361, 400, 1600, 35344):
            for batch, dtype in ((1, F32), (64, F32), (1, F64), (64, F64)):
                described = PSAProblem(PSAGeometry(batch, 4, *dims, 1, tokens), dtype)
                assert portable.supports(described, device)
                tile = portable.choose_tile(described, device)
                (launch,) = portable.plan(described, device).launches
                assert launch.shared_bytes <= device.shared_bytes
                parts = -(-dims[1] // tile.value_part)
                assert parts <= 8
                assert launch.grid[0] * tile.queries >= batch * 4 * parts * tokens


@pytest.mark.skipif(not nvrtc.is_available, reason="CuPy (NVRTC) is not installed: the extra nvrtc")
@pytest.mark.parametrize("tokens", [361, 400])
@pytest.mark.parametrize("dims", [(32, 64), (36, 72)], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_real_heads_hardly_spill(arch, dims, tokens):
    for dtype in DTYPES:
        described = PSAProblem(PSAGeometry(64, 4, *dims, 1, tokens), dtype)
        (launch,) = portable.plan(described, nvrtc.DEVICES[arch]).launches
        # measured on an H200: two tiles of queries at 36/72 are the fastest, although they spill 100 bytes
        most = 112 if dtype == F32 else 32
        assert nvrtc.compile_for(launch.kernel, arch).spilled_bytes <= most


@pytest.mark.skipif(not nvrtc.is_available, reason="CuPy (NVRTC) is not installed: the extra nvrtc")
@BOTH
@pytest.mark.parametrize("dims", [(64, 128), (128, 256), (3, 200)], ids=str)
def test_wide_heads_hardly_spill(dims, dtype):
    for arch in ("sm_86", "sm_100"):
        described = PSAProblem(PSAGeometry(64, 4, *dims, 1, 400), dtype)
        (launch,) = portable.plan(described, nvrtc.DEVICES[arch]).launches
        assert nvrtc.compile_for(launch.kernel, arch).spilled_bytes <= 128
