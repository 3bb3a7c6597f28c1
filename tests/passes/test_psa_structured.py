"""Scores that random numbers do not give: one key far above all others, and scores past any rounding."""

import numpy as np
import pytest

from psa_cupy import testing
from psa_cupy.geometry import PSAGeometry
from psa_cupy.launching import place
from psa_cupy.passes.descriptor import PSAProblem
from psa_cupy.passes.psa import PSA, backward_with, forward_with

from ..executors import executors
from ..strategies import DTYPES

KEY_DIM, VALUE_DIM = 32, 64


def variants(executor, direction, placed, scale):
    """The names of those that support the call where the array is."""
    with executor.context():
        device = place("test", qkv=placed).device
    geometry = PSAGeometry(1, 1, KEY_DIM, VALUE_DIM, 1, placed.shape[3])
    problem = PSAProblem(geometry, placed.dtype, scale)
    return [v.name for v in PSA.variants[direction] if v.supports(problem, device)]


def forwards(executor, qkv, scale):
    """Each variant's name, out and lse."""
    placed = executor.array(qkv)
    for name in variants(executor, "forward", placed, scale):
        out, lse = executor.run(forward_with, name, placed, 1, key_dim=KEY_DIM, scale=scale)
        yield name, executor.to_numpy(out), executor.to_numpy(lse)


@executors("cpu", "gpu")
@pytest.mark.parametrize("gap", [8.0, 13.125, 14.5])
@pytest.mark.parametrize("place_of_sink", [0, 70])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize == 2], ids=str)
def test_many_small_weights_beside_a_large_one_count(executor, dtype, place_of_sink, gap):
    """Attention sinks: the others' weights must not vanish from the output while the sum counts them.

    In 16 bits they could. (Wider types add 399 equal numbers here one by one, which rounds the same way each
    time: up to twice their bound, which knows no number of keys.)
    """
    tokens = 400
    qkv = np.zeros((1, 2 * KEY_DIM + VALUE_DIM, 1, tokens), dtype)
    qkv[0, 0] = 1
    qkv[0, KEY_DIM, 0, place_of_sink] = gap
    qkv[0, 2 * KEY_DIM :] = 1
    qkv[0, 2 * KEY_DIM, 0, place_of_sink] = 0  # in one channel, only the others are seen
    for name, out, lse in forwards(executor, qkv, scale=1.0):
        ratios = testing.psa_forward_ratios(qkv, out, lse, 1, key_dim=KEY_DIM, scale=1.0)
        assert max(ratios.values()) <= 1, (name, ratios)


@executors("cpu", "gpu")
@pytest.mark.parametrize("magnitude", [1e9, 1e12, 1e30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_huge_scores_give_finite_results(executor, dtype, magnitude):
    """What rounding leaves of a huge score is a large number itself, and no exponent for a weight."""
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((1, 2 * KEY_DIM + VALUE_DIM, 1, 72)).astype(dtype)
    for name, out, lse in forwards(executor, qkv, scale=magnitude):
        ratios = testing.psa_forward_ratios(qkv, out, lse, 1, key_dim=KEY_DIM, scale=magnitude)
        assert max(ratios.values()) <= 1, (name, ratios)
        assert np.isfinite(out.astype(np.float64)).all(), name


@executors("cpu", "gpu")
@pytest.mark.parametrize("magnitude", [1e7, 1e8, 1e9, 1e12])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_huge_scores(executor, dtype, magnitude):
    """A float32 lse is off by many units there: probabilities stay at 1 or less all the same."""
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((1, 2 * KEY_DIM + VALUE_DIM, 1, 72)).astype(dtype)
    d_out = rng.standard_normal((1, VALUE_DIM, 1, 72)).astype(dtype)
    keywords = {"key_dim": KEY_DIM, "scale": magnitude / KEY_DIM}
    placed = [executor.array(array) for array in (d_out, qkv)]
    out, lse = executor.run(forward_with, "plain", placed[1], 1, **keywords)
    for name in variants(executor, "backward", placed[1], magnitude):
        d_qkv = executor.to_numpy(executor.run(backward_with, name, *placed, out, lse, 1, **keywords))
        ratios = testing.psa_backward_ratios(d_out, qkv, d_qkv, 1, **keywords)
        if dtype == np.float16:  # the others pass its range
            ratios = {"d_v": ratios["d_v"]}
        assert max(ratios.values()) <= 1, (name, ratios)
