"""The largest scales, by every variant of the fused pair."""

import numpy as np
import pytest

from psa_cupy.geometry import PSAGeometry
from psa_cupy.launching import place
from psa_cupy.passes.descriptor import PSAProblem
from psa_cupy.passes.psa import PSA, backward_with, forward_with

from ..executors import executors
from ..strategies import DTYPES

TOKENS, KEY_DIM, VALUE_DIM = 72, 5, 10


def variants(executor, direction, qkv, scale):
    """The names of the variants that support the call where qkv is."""
    problem = PSAProblem(PSAGeometry(1, 1, KEY_DIM, VALUE_DIM, 1, TOKENS), qkv.dtype, scale)
    with executor.context():
        device = place("test", qkv=qkv).device
    return [v.name for v in PSA.variants[direction] if v.supports(problem, device)]


@executors("cpu", "gpu")
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(d, sign * (1e307 if d == np.float64 else 1e38)) for d in DTYPES for sign in (1, -1)],
    ids=str,
)
def test_scores_of_zero_stay_zero_at_the_largest_scale(executor, dtype, scale):
    """The weights are all alike then: 0 times a scale that has become infinite would be not a number."""
    rng = np.random.default_rng(0)
    qkv = np.zeros((1, 2 * KEY_DIM + VALUE_DIM, 1, TOKENS), dtype)
    qkv[:, 2 * KEY_DIM :] = rng.standard_normal((1, VALUE_DIM, 1, TOKENS)).astype(dtype)
    d_out = executor.array(rng.standard_normal((1, VALUE_DIM, 1, TOKENS)).astype(dtype))
    values = qkv[:, 2 * KEY_DIM :].astype(np.float64)
    qkv = executor.array(qkv)
    keywords = {"key_dim": KEY_DIM, "scale": scale}
    for variant in variants(executor, "forward", qkv, scale):
        out, lse = executor.run(forward_with, variant, qkv, 1, **keywords)
        mean = np.broadcast_to(values.mean(axis=3, keepdims=True), values.shape)
        np.testing.assert_allclose(
            executor.to_numpy(out).astype(np.float64), mean, atol=2e-3, err_msg=variant
        )
        np.testing.assert_allclose(executor.to_numpy(lse), np.log(TOKENS), rtol=1e-6, err_msg=variant)
    mean = executor.to_numpy(d_out).astype(np.float64).mean(axis=3, keepdims=True)
    for variant in variants(executor, "backward", qkv, scale):
        d_qkv = executor.run(backward_with, variant, d_out, qkv, out, lse, 1, **keywords)
        d_qkv = executor.to_numpy(d_qkv).astype(np.float64)
        assert not d_qkv[:, : 2 * KEY_DIM].any(), variant
        expected = np.broadcast_to(mean, values.shape)
        np.testing.assert_allclose(d_qkv[:, 2 * KEY_DIM :], expected, atol=2e-3, err_msg=variant)
