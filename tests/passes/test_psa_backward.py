"""The portable fused backward: its results on the CPU and on a GPU, who owns what, how it compiles."""

import importlib.util
import itertools
import pathlib
import re

import numpy as np
import pytest
from hypothesis import given

from psa_cupy import reference, testing
from psa_cupy.geometry import PSAGeometry
from psa_cupy.launching import cpu
from psa_cupy.launching.plan import Device
from psa_cupy.launching.source import render
from psa_cupy.passes import psa_backward as portable
from psa_cupy.passes.descriptor import PSAProblem
from psa_cupy.passes.psa import backward_with

from .. import strategies
from ..executors import executors
from ..pairwise import pairwise
from ..strategies import DTYPES, IMAGES, Problem

F16, BF16, F32, F64 = DTYPES
H200 = Device(capability=(9, 0), multiprocessors=132, shared_bytes=227 * 1024, tensor_maps=True)
RTX = Device(capability=(8, 6), multiprocessors=84, shared_bytes=99 * 1024, tensor_maps=False)


def problem_of(tokens, key_dim=32, value_dim=64, dtype=BF16, *, heads=2, **kwargs) -> Problem:
    return Problem(1, heads, key_dim, value_dim, *IMAGES[tokens], np.dtype(dtype), **kwargs)


def forward(problem, qkv, scale=None):
    """`out` and `lse`, as rounded as a forward kernel's."""
    return reference.psa_forward(qkv, problem.num_heads, key_dim=problem.key_dim, scale=scale)


def backward(executor, problem, *, offset=0, scale=None, qkv=None, d_out=None, branch=None, target=None):
    """d_qkv by the portable kernels, in NumPy; None stands for the problem's own arrays, or for none."""
    qkv = problem.qkv() if qkv is None else qkv
    d_out = problem.d_out() if d_out is None else d_out
    inputs = [executor.array(a, offset=offset) for a in (d_out, qkv, *forward(problem, qkv, scale))]
    keywords = {"key_dim": problem.key_dim, "scale": scale}
    if branch is not None:
        keywords["d_v_branch"] = executor.array(branch, offset=offset)
    if target is not None:
        keywords["d_qkv"] = executor.array(target, offset=offset)
    result = executor.run(backward_with, "portable", *inputs, problem.num_heads, **keywords)
    return executor.to_numpy(result)


def assert_within_bounds(problem, d_qkv, qkv=None, d_out=None, **keywords):
    qkv = problem.qkv() if qkv is None else qkv
    d_out = problem.d_out() if d_out is None else d_out
    ratios = testing.psa_backward_ratios(
        d_out, qkv, d_qkv, problem.num_heads, key_dim=problem.key_dim, **keywords
    )
    assert max(ratios.values()) <= 1, ratios


def split(problem, d_qkv):
    """d_q, d_k, d_v of every head in float64: (BH, channels, N)."""
    g = problem.geometry
    x = d_qkv.astype(np.float64).reshape(g.bh, g.head_channels, g.tokens)
    return np.split(x, (g.key_dim, 2 * g.key_dim), axis=1)


def same_bits(a, b):
    return a.tobytes() == b.tobytes()


# ---- results ----

TABLE = pairwise(
    {
        "dims": ((1, 2), (5, 24), (32, 64), (36, 72), (100, 3)),
        "tokens": (7, 33, 65, 127),
        "dtype": DTYPES,
        "magnitude": (1e-3, 1.0, 30.0, 1e5),
        "branch": (False, True),
        "offset": (0, 1),
    }
)


@executors("cpu", "gpu")
@pytest.mark.parametrize("row", TABLE, ids=lambda row: "-".join(map(str, row.values())))
def test_within_the_bounds(executor, row):
    problem = problem_of(row["tokens"], *row["dims"], row["dtype"], heads=1, magnitude=row["magnitude"])
    branch = problem.d_v_branch() if row["branch"] else None
    d_qkv = backward(executor, problem, branch=branch, offset=row["offset"])
    assert_within_bounds(problem, d_qkv, d_v_branch=branch)


@executors("cpu", "gpu")
@pytest.mark.parametrize(
    ("tokens", "dtype"), [(31, F32), (63, BF16), (129, F16), (361, F32), (400, BF16)], ids=str
)
def test_other_numbers_of_tokens(executor, tokens, dtype):
    problem = problem_of(tokens, dtype=dtype)
    assert_within_bounds(problem, backward(executor, problem))


@executors("cpu", "gpu")
def test_the_widest_heads(executor):
    problem = problem_of(33, 128, 256, BF16, heads=1)
    assert_within_bounds(problem, backward(executor, problem))


@executors("gpu")
@pytest.mark.parametrize(("heads", "height", "width"), [(48, 20, 20), (20, 26, 40)], ids=str)
@pytest.mark.parametrize("dims", [(32, 64), (36, 72)], ids=str)
def test_enough_tokens_for_wide_tiles(executor, heads, height, width, dims):
    problem = Problem(1, heads, *dims, height, width, BF16)
    assert_within_bounds(problem, backward(executor, problem))


@executors("gpu")
@given(problem=strategies.problems(halves=False, max_bh=6))
def test_any_problem_on_a_gpu(executor, problem):
    assert_within_bounds(problem, backward(executor, problem))


@executors("checked")
@pytest.mark.parametrize(
    ("tokens", "dims", "dtype", "offset"),
    [
        (65, (32, 64), BF16, 0),
        (33, (5, 10), F32, 0),
        (31, (36, 72), F64, 0),
        (65, (5, 24), F16, 1),
        (200, (32, 64), F32, 0),
    ],
    ids=str,
)
def test_breaks_no_rule_of_cuda(executor, tokens, dims, dtype, offset):
    image = IMAGES.get(tokens, (8, tokens // 8))
    problem = Problem(1, 1, *dims, *image, dtype)
    branch = problem.d_v_branch()
    assert_within_bounds(
        problem, backward(executor, problem, branch=branch, offset=offset), d_v_branch=branch
    )


TILES = {
    "one chunk at a time, operands in shared memory": portable.Tile(2, 1, 16, 1, False, False),
    "two chunks, operands in registers": portable.Tile(3, 1, 32, 2, False, True),
    "two chunks, 32 tokens a warp": portable.Tile(3, 1, 32, 2, False, True, tokens=32),
    "all resident, 32 tokens a warp": portable.Tile(3, 1, 144, 1, True, False, tokens=32),
}


@executors("cpu", "checked")
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_tiles_that_few_problems_get(executor, tile, dtype):
    problem = problem_of(129, 5, 24, dtype, heads=1)
    qkv, d_out = problem.qkv(), problem.d_out()
    out, lse = forward(problem, qkv)
    names = ("d_out", "qkv", "out", "lse")
    operands = {n: executor.array(a) for n, a in zip(names, (d_out, qkv, out, lse), strict=True)}
    operands["d_qkv"] = executor.empty(qkv.shape, dtype)
    described = PSAProblem(problem.geometry, dtype, problem.key_dim**-0.5)
    with executor.context():
        cpu.run(portable.plan_with_tiles(described, cpu.DEVICE, tile, tile), operands)
    executor.check_guards()
    assert_within_bounds(problem, operands["d_qkv"])


@executors("cpu", "gpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_given_target_receives_one_rounded_addition(executor, dtype):
    problem = problem_of(33, 5, 10, dtype)
    branch, before = problem.d_v_branch(), problem.target()
    alone = backward(executor, problem, branch=branch)
    added = backward(executor, problem, branch=branch, target=before)
    wide = np.float64 if dtype == F64 else np.float32
    expected = (before.astype(wide) + alone.astype(wide)).astype(dtype)
    if executor.name == "gpu" or dtype.itemsize == 2:
        assert same_bits(added, expected)
    else:  # the C++ compiler may fuse the addition with the product by scale before it
        slack = testing.unit_roundoff(dtype) * (np.abs(alone) + np.abs(expected))
        assert (np.abs(added - expected) <= 2 * slack).all()


# ---- invariants ----


@executors("cpu", "gpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_token(executor, dtype):
    problem = problem_of(1, dtype=dtype, magnitude=30.0)
    d_q, d_k, d_v = split(problem, backward(executor, problem))
    d_out = problem.d_out().astype(np.float64).reshape(d_v.shape)
    np.testing.assert_array_equal(d_v, d_out)
    q, k, v = split(problem, problem.qkv())
    d_s = 2 * (np.abs(d_out) * np.abs(v)).sum(axis=1, keepdims=True) * problem.key_dim**-0.5
    roundoff = 2.0**-53 if dtype == F64 else 2.0**-24
    assert (np.abs(d_q) <= 8 * roundoff * d_s * np.abs(k)).all()
    assert (np.abs(d_k) <= 8 * roundoff * d_s * np.abs(q)).all()


@executors("cpu", "gpu")
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_sums_that_must_agree(executor, dtype):
    """The rows of P sum to 1, and scaling q against k changes nothing."""
    problem = problem_of(65, dtype=dtype)
    d_q, d_k, d_v = split(problem, backward(executor, problem))
    q, k, _ = split(problem, problem.qkv())
    d_out = problem.d_out().astype(np.float64).reshape(d_v.shape)
    tolerance = 1e-13 if dtype == F64 else 2e-6
    assert (np.abs(d_v.sum(2) - d_out.sum(2)) <= tolerance * np.abs(d_out).sum(2)).all()
    terms = np.abs(q * d_q).sum((1, 2)) + np.abs(k * d_k).sum((1, 2))
    assert (np.abs((q * d_q).sum((1, 2)) - (k * d_k).sum((1, 2))) <= tolerance * terms).all()


@executors("cpu", "gpu")
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_a_vector_added_to_every_key_changes_nothing(executor, dtype):
    problem = problem_of(65, dtype=dtype)
    g = problem.geometry
    qkv = problem.qkv().astype(np.float64).reshape(g.bh, g.head_channels, g.tokens)
    keys = slice(g.key_dim, 2 * g.key_dim)
    qkv[:, keys] = np.round(qkv[:, keys] * 8) / 8  # a grid on which k + u is exact
    moved = qkv.copy()
    moved[:, keys] += np.random.default_rng(5).integers(-4, 5, (g.bh, g.key_dim, 1)) / 2
    qkv, moved = (x.reshape(g.qkv_shape).astype(dtype) for x in (qkv, moved))
    assert_within_bounds(problem, backward(executor, problem, qkv=moved), qkv=moved)
    gradients = [split(problem, backward(executor, problem, qkv=x)) for x in (qkv, moved)]
    # Each within its bound of one exact value; of that, errors are a few roundings of the dtype.
    roundoff = testing.unit_roundoff(dtype)
    for name, a, b in zip("qkv", *gradients, strict=True):
        assert np.linalg.norm(a - b) <= 16 * max(roundoff, 2.0**-20) * np.linalg.norm(a), name


@executors("cpu", "gpu")
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scale_is_a_value(executor, scale):
    problem = problem_of(33, 5, 10, BF16)
    d_qkv = backward(executor, problem, scale=scale)
    assert_within_bounds(problem, d_qkv, scale=scale)
    if scale == 0:
        d_q, d_k, _ = split(problem, d_qkv)
        assert not d_q.any()
        assert not d_k.any()


@executors("cpu", "gpu")
def test_scores_far_below_zero(executor):
    """There exp2(-lse) of a key beyond the last overflows: it may not reach a gradient."""
    problem = problem_of(33, 5, 10, BF16)
    g = problem.geometry
    qkv = problem.qkv().astype(np.float32).reshape(g.bh, g.head_channels, g.tokens)
    qkv[:, : g.key_dim] -= 40
    qkv[:, g.key_dim : 2 * g.key_dim] += 40
    qkv = qkv.reshape(g.qkv_shape).astype(BF16)
    assert_within_bounds(problem, backward(executor, problem, qkv=qkv), qkv=qkv)


@executors("cpu", "gpu")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_head(executor, bad):
    problem = problem_of(33, 5, 10, BF16, heads=3)
    clean = backward(executor, problem)
    qkv = problem.qkv()
    qkv.reshape(3, 20, 33)[1, :, 4] = bad
    with np.errstate(invalid="ignore"):
        d_qkv = backward(executor, problem, qkv=qkv)
    for head in (0, 2):
        assert same_bits(d_qkv.reshape(3, 20, 33)[head], clean.reshape(3, 20, 33)[head])
    assert np.isnan(d_qkv.reshape(3, 20, 33)[1].astype(np.float32)).any()


@executors("cpu", "gpu")
def test_the_same_call_gives_the_same_bits(executor):
    problem = problem_of(129, dtype=F32)
    assert same_bits(backward(executor, problem), backward(executor, problem))


# ---- plans ----


def described(bh=4, tokens=400, key_dim=32, value_dim=64, dtype=BF16, **kwargs):
    return PSAProblem(PSAGeometry(1, bh, key_dim, value_dim, 1, tokens), dtype, key_dim**-0.5, **kwargs)


@pytest.mark.parametrize("device", [H200, RTX, cpu.DEVICE], ids=["H200", "RTX", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_takes_every_problem(device, dtype):
    for key_dim, value_dim, tokens in itertools.product((1, 5, 36, 128), (1, 24, 72, 256), (1, 129, 6400)):
        problem = described(tokens=tokens, key_dim=key_dim, value_dim=value_dim, dtype=dtype)
        assert portable.supports(problem, device)
        for launch in portable.plan(problem, device).launches:
            blocks = dict(launch.kernel.constants)["BLOCKS_PER_MULTIPROCESSOR"]
            assert blocks * (launch.shared_bytes + 1024) <= device.shared_bytes + 1024


def test_leaves_older_gpus_to_the_plain_variant():
    assert not portable.supports(described(), Device((7, 5), 40, 64 * 1024, tensor_maps=False))


def test_an_empty_problem_launches_nothing():
    assert portable.plan(described(tokens=0), H200).launches == ()


@pytest.mark.parametrize("bh", [1, 7, 132, 133, 300])
@pytest.mark.parametrize("tokens", [1, 16, 17, 400, 6400])
def test_each_tile_has_one_owner(bh, tokens):
    """Blocks own tiles_per_block tiles of a head, decoded as the kernel does; chunks need a warp for each."""
    for launch in portable.plan(described(bh, tokens), H200).launches:
        _, blocks_per_head, tiles_per_block = (int(x) for x in launch.arguments[7:10])
        constants = dict(launch.kernel.constants)
        assert constants["RESIDENT"] or tiles_per_block <= constants["WARPS"]
        tiles = -(-tokens // constants["TILE"])
        owned = []
        for block in range(launch.grid[0]):
            first = block % blocks_per_head * tiles_per_block
            last = min(first + tiles_per_block, tiles)
            owned += [(block // blocks_per_head, tile) for tile in range(first, last)]
        assert owned == list(itertools.product(range(bh), range(tiles)))


def test_a_warp_gets_32_tokens_only_where_that_pays():
    def key_tokens(device=H200, **kwargs):
        return portable.choose_tile(described(**kwargs), device, True).tokens

    assert key_tokens(bh=256) == key_tokens(bh=48) == key_tokens(bh=20, tokens=1040) == 32
    assert key_tokens(bh=256, key_dim=36, value_dim=72) == key_tokens(bh=256, branch=True) == 32
    assert key_tokens(bh=4) == key_tokens(bh=256, tokens=399) == key_tokens(bh=256, dtype=F32) == 16
    assert key_tokens(bh=256, accumulate=True) == 16


def test_scratch_is_linear_in_tokens():
    (rows,) = portable.plan(described(tokens=6401), H200).scratch
    assert rows.shape == (4, 6432, 2)


# ---- compiling ----


def compiled_log(kernel, arch):
    nvrtc = pytest.importorskip("cupy.cuda").nvrtc
    nvidia = importlib.util.find_spec("nvidia")
    folders = (
        [pathlib.Path(p) / "cu13" / "include" for p in nvidia.submodule_search_locations] if nvidia else []
    )
    if not any(folder.is_dir() for folder in folders):
        pytest.skip("no CUDA headers: install the extra nvrtc")
    program = nvrtc.createProgram(render(kernel), kernel.file, (), ())
    options = ("-std=c++17", f"-arch=sm_{arch}", "-ftz=true", "--ptxas-options=-v", f"-I{folders[0]}")
    nvrtc.compileProgram(program, options)
    return nvrtc.getProgramLog(program)


ARCHITECTURES = {
    "80": Device((8, 0), 108, 163 * 1024, False),
    "86": RTX,
    "89": Device((8, 9), 128, 99 * 1024, False),
    "90": H200,
    "100": Device((10, 0), 148, 227 * 1024, False),
    "120": Device((12, 0), 170, 99 * 1024, False),
}


def assert_spills_at_most(most, problem, arch):
    for launch in portable.plan(problem, ARCHITECTURES[arch]).launches:
        log = compiled_log(launch.kernel, arch)
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
        assert spilled
        assert max(spilled) <= most, log


EXTRAS = {
    "alone": {},
    "branch": {"branch": True},
    "added to": {"accumulate": True},
    "both": {"accumulate": True, "branch": True},
    "odd": {"tokens": 399},
    "passing": {"tokens": 1600},
    "passing, both": {"tokens": 1600, "accumulate": True, "branch": True},
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dims", [(32, 64), (36, 72)])
@pytest.mark.parametrize("extras", EXTRAS.values(), ids=EXTRAS)
def test_16_bit_kernels_compile_without_spills(arch, dims, extras):
    assert_spills_at_most(
        0, described(256, **{"tokens": 400, **extras}, key_dim=dims[0], value_dim=dims[1]), arch
    )


@pytest.mark.parametrize("arch", ["80", "90"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_wide_types_compile_with_few_spills(arch, dtype):
    assert_spills_at_most(128, described(256, 400, dtype=dtype), arch)
