"""The portable fused forward: its results on the CPU and on a GPU, its tiles, how it compiles."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from psa_cupy import testing
from psa_cupy.geometry import PSAGeometry
from psa_cupy.launching import cpu
from psa_cupy.passes import psa_forward as portable
from psa_cupy.passes.descriptor import PSAProblem

from .. import strategies
from ..executors import executors
from ..launching import nvrtc
from ..pairwise import pairwise
from ..strategies import Problem
from . import forward_cases
from .forward_cases import assert_within_bounds, forward

F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
DTYPES = (F16, BF16)


def problem_of(tokens, dims=(32, 64), dtype=BF16, **more) -> Problem:
    return forward_cases.problem_of(tokens, dims, dtype, **more)


# ---- results ----

TABLE = pairwise(
    {
        # few, for each has to be compiled
        "kind": (((5, 24), BF16), ((32, 64), BF16), ((32, 64), F16), ((36, 72), F16)),
        "tokens": (1, 7, 31, 33, 63, 65, 127, 128, 129, 130, 132),
        "magnitude": (1e-3, 1.0, 30.0, 3e3, 1e5),
        "offset": (0, 1),
    }
)


@executors("cpu", "gpu")
@pytest.mark.parametrize("row", TABLE, ids=lambda row: "-".join(map(str, row.values())))
def test_within_the_bounds(executor, row):
    problem = problem_of(row["tokens"], *row["kind"], heads=1, magnitude=row["magnitude"])
    assert_within_bounds(problem, forward(executor, problem, offset=row["offset"]))


@executors("cpu", "gpu")
@pytest.mark.parametrize(
    ("tokens", "dims", "dtype"),
    [(361, (32, 64), BF16), (400, (32, 64), F16), (361, (36, 72), F16), (400, (36, 72), BF16)],
    ids=str,
)
def test_detectors_heads(executor, tokens, dims, dtype):
    problem = problem_of(tokens, dims, dtype)
    assert_within_bounds(problem, forward(executor, problem))


@executors("cpu", "gpu")
@pytest.mark.parametrize("dims", [(1, 2), (128, 256), (3, 200)], ids=str)
def test_extreme_heads(executor, dims):
    problem = problem_of(33, dims, F16, heads=1)
    assert_within_bounds(problem, forward(executor, problem))


@executors("gpu")
@given(problem=strategies.problems(halves=False, max_bh=6, dtypes=DTYPES))
def test_any_problem_on_a_gpu(executor, problem):
    assert_within_bounds(problem, forward(executor, problem))


@executors("checked")
@pytest.mark.parametrize(
    ("tokens", "dims", "dtype", "offset"),
    [(65, (32, 64), BF16, 0), (33, (36, 72), F16, 1), (200, (5, 24), BF16, 0)],
    ids=str,
)
def test_breaks_no_rule_of_cuda(executor, tokens, dims, dtype, offset):
    problem = problem_of(tokens, dims, dtype, heads=1)
    assert_within_bounds(problem, forward(executor, problem, offset=offset))


RESIDENT = portable.Tile(3, 1, 32, lookahead=2, resident=True, min_blocks=1)
STREAMING = portable.Tile(2, 1, 16, lookahead=2, resident=False, min_blocks=1)
WIDE_STREAMING = portable.Tile(2, 2, 32, lookahead=1, resident=False, min_blocks=1)


@executors("cpu", "checked")
@pytest.mark.parametrize(
    ("tile", "splits", "offset"),
    [(RESIDENT, 1, 0), (RESIDENT, 2, 1), (STREAMING, 4, 1), (WIDE_STREAMING, 2, 0)],
    ids=str,
)
def test_every_kind_of_tile(executor, tile, splits, offset):
    problem = problem_of(120, (5, 24), heads=1)  # K and V have rows of zeros
    g = problem.geometry
    operands = {
        "qkv": executor.array(problem.qkv(), offset=offset),
        "out": executor.empty(g.out_shape, BF16, offset=offset),
        "lse": executor.empty(g.lse_shape, np.float32),
    }
    described = PSAProblem(g, BF16, problem.key_dim**-0.5, aligned=offset == 0)
    cpu.run(portable.plan_with(tile, splits, described), operands, checked=executor.checked)
    executor.check_guards()
    assert_within_bounds(problem, (operands["out"], operands["lse"]))


# ---- the reference of the softmax ----


@executors("cpu", "gpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_that_rise_with_the_keys(executor, dtype):
    """Every group of keys asks for a higher reference than the one before."""
    problem = problem_of(129, (32, 64), dtype, heads=1)
    g = problem.geometry
    qkv = problem.qkv().reshape(g.bh, g.head_channels, g.tokens)
    qkv[:, g.key_dim : 2 * g.key_dim] = np.linspace(-40, 40, g.tokens)
    qkv[:, : g.key_dim] = np.where(np.arange(g.tokens) % 2, 1, -1)  # for every second query they fall
    qkv = qkv.reshape(g.qkv_shape)
    assert_within_bounds(problem, forward(executor, problem, qkv=qkv), qkv=qkv)


@executors("cpu", "gpu")
@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0])
def test_scale_is_a_value(executor, scale):
    problem = problem_of(33, (5, 24), magnitude=10.0)
    assert_within_bounds(problem, forward(executor, problem, scale=scale), scale=scale)


# ---- invariants ----


@executors("cpu", "gpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_token(executor, dtype):
    problem = problem_of(1, (32, 64), dtype, magnitude=30.0)
    out, _ = forward(executor, problem)
    v = problem.qkv().reshape(2, -1)[:, 64:]
    np.testing.assert_array_equal(out.reshape(2, -1), v)


@executors("cpu", "gpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [7, 127])
def test_constant_values_come_out(executor, tokens, dtype):
    problem = problem_of(tokens, dtype=dtype, magnitude=4.0)
    g = problem.geometry
    qkv = problem.qkv().reshape(g.bh, g.head_channels, g.tokens)
    constants = np.linspace(1, 2, g.value_dim).astype(dtype)[:, None]
    qkv[:, 2 * g.key_dim :] = constants
    out, _ = forward(executor, problem, qkv=qkv.reshape(g.qkv_shape))
    out = out.reshape(g.bh, g.value_dim, g.tokens).astype(np.float64)
    ulp = 4 * testing.unit_roundoff(dtype)  # of numbers in [1, 2), and twice that at 2
    assert (np.abs(out - constants.astype(np.float64)) <= ulp).all()


@executors("cpu", "gpu")
def test_a_vector_added_to_every_key_moves_only_lse(executor):
    problem = problem_of(65)
    g = problem.geometry
    qkv = problem.qkv().astype(np.float64).reshape(g.bh, g.head_channels, g.tokens)
    keys = slice(g.key_dim, 2 * g.key_dim)
    qkv[:, keys] = np.round(qkv[:, keys] * 8) / 8  # a grid on which k + u is exact
    u = np.random.default_rng(5).integers(-4, 5, (g.bh, g.key_dim, 1)) / 2
    moved = qkv.copy()
    moved[:, keys] += u
    expected = g.key_dim**-0.5 * (qkv[:, : g.key_dim] * u).sum(1).reshape(g.lse_shape)
    lse = []
    for x in (qkv, moved):
        x = x.reshape(g.qkv_shape).astype(BF16)
        results = forward(executor, problem, qkv=x)
        assert_within_bounds(problem, results, qkv=x)
        lse.append(results[1].astype(np.float64))
    # qkv's own rounding to bfloat16 moves q, on which u acts
    np.testing.assert_allclose(lse[1] - lse[0], expected, atol=2.0**-8 * np.abs(u).sum())


@executors("cpu", "gpu")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_head(executor, bad):
    problem = problem_of(65, heads=3)
    qkv = problem.qkv()
    clean_out, clean_lse = forward(executor, problem)
    qkv.reshape(3, 128, 65)[1, 40, 30] = bad  # of K
    out, lse = forward(executor, problem, qkv=qkv)
    assert not np.isfinite(lse[:, 1]).all()
    for head in (0, 2):
        channels = slice(64 * head, 64 * head + 64)
        assert out[:, channels].tobytes() == clean_out[:, channels].tobytes()
        assert lse[:, head].tobytes() == clean_lse[:, head].tobytes()


@executors("cpu", "gpu")
def test_repeatable(executor):
    problem = problem_of(129)
    first, second = forward(executor, problem), forward(executor, problem)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


# ---- plans ----

DIMS = [(1, 1), (5, 3), (32, 64), (36, 72), (64, 128), (128, 256)]


def test_needs_the_instructions_of_sm_80():
    for arch, device in nvrtc.DEVICES.items():
        described = PSAProblem(problem_of(400).geometry, BF16)
        assert portable.supports(described, device) is (arch != "sm_75")


@pytest.mark.parametrize("arch", sorted(set(nvrtc.DEVICES) - {"sm_75"}))
def test_tiles_fit_every_device(arch):
    device = nvrtc.DEVICES[arch]
    for dims in DIMS:
        for tokens in (1, 16, 361, 400, 1600, 35344):
            for batch in (1, 64):
                described = PSAProblem(PSAGeometry(batch, 4, *dims, 1, tokens), BF16)
                assert portable.supports(described, device) is (device.capability >= (8, 0))
                tile, splits = portable.choose_tile(described, device)
                (launch,) = portable.plan(described, device).launches
                assert launch.shared_bytes <= device.shared_bytes
                assert launch.block[0] == 32 * tile.warps <= 1024
                tiles_per_block = -(-tokens // (16 * tile.query_tiles)) / splits
                assert tile.resident or tiles_per_block <= tile.warps


SPILLS = pairwise(
    {
        "arch": ("sm_80", "sm_90", "sm_100", "sm_120"),
        "dims": ((32, 64), (36, 72)),
        "tokens": (361, 398, 400, 1600),
        "dtype": DTYPES,
    }
)
SMALL_MEMORY = [  # the tile of their own with the most registers
    {"arch": arch, "dims": (32, 64), "tokens": 1600, "dtype": dtype}
    for arch in ("sm_89", "sm_120")
    for dtype in DTYPES
]


@pytest.mark.skipif(not nvrtc.is_available, reason="CuPy (NVRTC) is not installed: the extra nvrtc")
@pytest.mark.parametrize("row", SPILLS + SMALL_MEMORY, ids=lambda row: "-".join(map(str, row.values())))
def test_compiles_without_spills(row):
    described = PSAProblem(PSAGeometry(64, 4, *row["dims"], 1, row["tokens"]), row["dtype"])
    (launch,) = portable.plan(described, nvrtc.DEVICES[row["arch"]]).launches
    assert nvrtc.compile_for(launch.kernel, row["arch"]).spilled_bytes == 0
