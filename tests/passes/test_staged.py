"""The staged pair: the single passes one after another give the fused pair's results."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from psa_cupy import testing
from psa_cupy.geometry import PSAGeometry
from psa_cupy.launching.cpu import DEVICE
from psa_cupy.passes.descriptor import PSAProblem
from psa_cupy.passes.staged import backward_plan, forward_plan, psa_backward_staged, psa_forward_staged
from tests.executors import executors
from tests.pairwise import pairwise
from tests.strategies import DTYPES, IMAGES, Problem

BF16 = np.dtype(ml_dtypes.bfloat16)
EVERYWHERE = executors("reference", "cpu", "gpu")

TABLE = pairwise(
    {
        "dtype": DTYPES,
        "key_dim": [1, 5, 32, 36],
        "tokens": [1, 33, 63, 129],
        "batch_and_heads": [(1, 1), (2, 1), (1, 3)],
        "offset": [0, 1],
        "scale": [None, -0.3],
        "branch": [True, False],
    }
)


def problem_of(dtype, key_dim, tokens, batch_and_heads=(1, 2)) -> Problem:
    return Problem(*batch_and_heads, key_dim, 2 * key_dim, *IMAGES[tokens], np.dtype(dtype))


def forward(executor, problem, scale=None, offset=0):
    """qkv, and the results, where the executor has them."""
    qkv = executor.array(problem.qkv(), offset=offset)
    return qkv, *executor.run(psa_forward_staged, qkv, problem.num_heads, scale=scale)


def backward(executor, problem, qkv, out, lse, branch=None, **more):
    if branch is not None:
        branch = executor.array(branch)
    d_out = executor.array(problem.d_out())
    arguments = (d_out, qkv, out, lse, problem.num_heads)
    return executor.to_numpy(executor.run(psa_backward_staged, *arguments, d_v_branch=branch, **more))


def rounded_sum(before, *gradients):
    """Additions one after another, each rounded to the dtype."""
    wide = np.float64 if before.dtype == np.float64 else np.float32
    for gradient in gradients:
        before = (before.astype(wide) + gradient.astype(wide)).astype(before.dtype)
    return before


@EVERYWHERE
@pytest.mark.parametrize("row", TABLE, ids=lambda r: "-".join(map(str, r.values())))
def test_within_bounds(executor, row):
    problem = problem_of(row["dtype"], row["key_dim"], row["tokens"], row["batch_and_heads"])
    branch = problem.d_v_branch() if row["branch"] else None
    qkv, out, lse = forward(executor, problem, row["scale"], row["offset"])
    assert (out.shape, lse.shape) == (problem.geometry.out_shape, problem.geometry.lse_shape)
    d_qkv = backward(executor, problem, qkv, out, lse, branch, scale=row["scale"])
    heads, scale = problem.num_heads, row["scale"]
    host_qkv, host_out, host_lse = map(executor.to_numpy, (qkv, out, lse))
    ratios = testing.psa_forward_ratios(host_qkv, host_out, host_lse, heads, scale=scale)
    ratios |= testing.psa_backward_ratios(
        problem.d_out(), host_qkv, d_qkv, heads, scale=scale, d_v_branch=branch
    )
    assert max(ratios.values()) <= 1, ratios
    assert host_qkv.tobytes() == problem.qkv().tobytes()


@executors("checked")
def test_checked(executor):
    problem = problem_of(np.float32, 5, 65)
    qkv, out, lse = forward(executor, problem)
    d_qkv = backward(executor, problem, qkv, out, lse, problem.d_v_branch())
    ratios = testing.psa_backward_ratios(
        problem.d_out(), problem.qkv(), d_qkv, 2, d_v_branch=problem.d_v_branch()
    )
    assert max(ratios.values()) <= 1, ratios


@EVERYWHERE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_given_gradient_is_added_to(executor, dtype):
    problem = problem_of(dtype, 5, 33)
    qkv, out, lse = forward(executor, problem)
    gradient, before = backward(executor, problem, qkv, out, lse), problem.target()
    target = executor.array(before)
    added = backward(executor, problem, qkv, out, lse, d_qkv=target)
    assert added.tobytes() == rounded_sum(before, gradient).tobytes()
    assert executor.to_numpy(target).tobytes() == added.tobytes()


@EVERYWHERE
def test_the_branch_reaches_v_alone(executor):
    problem = problem_of(BF16, 5, 33)
    g, branch = problem.geometry, problem.d_v_branch()
    qkv, out, lse = forward(executor, problem)
    without = backward(executor, problem, qkv, out, lse).reshape(g.bh, g.head_channels, g.tokens)
    with_branch = backward(executor, problem, qkv, out, lse, branch).reshape(without.shape)
    values = slice(2 * g.key_dim, None)
    assert with_branch[:, : 2 * g.key_dim].tobytes() == without[:, : 2 * g.key_dim].tobytes()
    expected = rounded_sum(without[:, values], branch.reshape(g.bh, g.value_dim, g.tokens))
    assert with_branch[:, values].tobytes() == expected.tobytes()


@EVERYWHERE
def test_given_results_are_written(executor):
    problem = problem_of(np.float32, 5, 33)
    qkv, out, lse = forward(executor, problem)
    given_out, given_lse = executor.empty(out.shape, out.dtype), executor.empty(lse.shape, lse.dtype)
    result = executor.run(psa_forward_staged, qkv, 2, out=given_out, lse=given_lse)
    assert result.out is given_out
    assert result.lse is given_lse
    for given, own in ((given_out, out), (given_lse, lse)):
        assert executor.to_numpy(given).tobytes() == executor.to_numpy(own).tobytes()


@executors("cpu", "gpu")
def test_the_same_call_gives_the_same_bits(executor):
    problem = problem_of(BF16, 36, 129)
    results = []
    for _ in range(2):
        qkv, out, lse = forward(executor, problem)
        d_qkv = backward(executor, problem, qkv, out, lse, d_qkv=executor.array(problem.target()))
        results.append([executor.to_numpy(a).tobytes() for a in (out, lse, d_qkv)])
    assert results[0] == results[1]


@EVERYWHERE
@pytest.mark.parametrize(("batch", "height", "width"), [(0, 2, 3), (1, 0, 3), (2, 4, 0)])
def test_empty(executor, batch, height, width):
    problem = Problem(batch, 2, 5, 10, height, width, np.dtype(np.float32))
    qkv, out, lse = forward(executor, problem)
    assert (out.shape, lse.shape) == (problem.geometry.out_shape, problem.geometry.lse_shape)
    assert backward(executor, problem, qkv, out, lse).shape == qkv.shape
    target = executor.array(problem.target())
    backward(executor, problem, qkv, out, lse, d_qkv=target)


def test_the_plans_are_the_passes_in_order():
    problem = PSAProblem(PSAGeometry(2, 4, 32, 64, 20, 20), BF16, branch=True)
    forward_entries = [launch.kernel.entry for launch in forward_plan(problem, DEVICE).launches]
    attention = "flash_attention_forward"
    assert forward_entries == ["pack_qkv", attention, attention, "merge_attn"]
    plan = backward_plan(problem, DEVICE)
    assert [launch.kernel.entry for launch in plan.launches] == [
        "pack_qkv",
        *["merge_attn_backward"] * 2,
        *["flash_attention_backward_q", "flash_attention_backward_kv"] * 2,
        "pack_qkv_backward",
        "extract_v_backward",
    ]
    names = [scratch.name for scratch in plan.scratch]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"key_dim": 4}, ValueError, "value_dim is 12 and key_dim 4, expected value_dim = 2"),
        ({"scale": np.nan}, ValueError, "scale is nan"),
        ({"d_out": np.zeros((1, 20, 2, 2), np.float32)}, ValueError, "d_out has shape"),
        ({"lse": np.zeros((1, 2, 6))}, TypeError, "lse has dtype float64, expected float32"),
        ({"d_qkv": np.zeros((1, 40, 2, 3))}, TypeError, "d_qkv has dtype float64, expected float32"),
        ({"d_v_branch": np.zeros((1, 20, 2, 3), np.float16)}, TypeError, "d_v_branch has dtype float16"),
    ],
)
def test_wrong_calls(wrong, error, message):
    qkv, out = np.zeros((1, 40, 2, 3), np.float32), np.zeros((1, 20, 2, 3), np.float32)
    arguments = {"d_out": out.copy(), "qkv": qkv, "out": out, "lse": np.zeros((1, 2, 6), np.float32)}
    with pytest.raises(error, match=f"^psa_backward_staged: .*{message}"):
        psa_backward_staged(**{**arguments, "num_heads": 2, **wrong})
