"""`psa_cupy.testing.gradcheck` for functions of Variables: the tape's own backward is what it checks."""

from __future__ import annotations

import numpy as np

from psa_cupy import testing
from psa_cupy.arguments import cupy_if_imported, is_cupy
from psa_cupy.autograd.tape import Tape, Variable, no_grad


def gradcheck(function, inputs, *, eps: float = 1e-5, rtol: float = 1e-6, seed: int = 0) -> float:
    """Check the gradients that a tape gives for a function, along random directions, in float64.

    Parameters
    ----------
    function : callable
        ``function(*variables)`` gives a Variable or a tuple of Variables, of float64.
    inputs : sequence of Variable or array
        Where to check; NumPy or CuPy, of any supported dtype: the function gets float64 copies. A Variable
        that requires no gradient is passed as a constant.
    eps, rtol, seed
        As in `psa_cupy.testing.gradcheck`.

    Returns
    -------
    float
        The largest relative error found, at most rtol.

    Raises
    ------
    psa_cupy.testing.GradientError
        With a dump of what failed.
    TypeError
        If an input is no array and no Variable, or the function gives anything but Variables.
    ValueError
        If nothing would be checked: no input requires a gradient, or as in `psa_cupy.testing.gradcheck`.

    Examples
    --------
    >>> import numpy as np
    >>> from psa_cupy import autograd
    >>> qkv = np.random.default_rng(0).standard_normal((1, 2 * 8, 2, 3))
    >>> autograd.gradcheck(lambda x: autograd.psa(x, num_heads=2), [qkv]) <= 1e-6
    True

    """
    inputs = tuple(inputs)
    wanted = [x.requires_grad if isinstance(x, Variable) else True for x in inputs]
    if inputs and not any(wanted):
        raise ValueError("gradcheck: no input requires a gradient, expected at least one that does")

    def variables(arrays):
        return [Variable(array, flag) for array, flag in zip(arrays, wanted, strict=True)]

    def forward(*arrays):
        with no_grad():
            return tuple(y.data for y in _as_tuple(function(*variables(arrays))))

    def backward(*d_outputs_and_arrays):
        d_outputs, arrays = d_outputs_and_arrays[: -len(inputs)], d_outputs_and_arrays[-len(inputs) :]
        with Tape() as tape:
            xs = variables(arrays)
            ys = _as_tuple(function(*xs))
        for y, d_y in zip(ys, d_outputs, strict=True):
            if y.requires_grad:
                tape.backward(y, d_y, retain_graph=True)
        return tuple(_gradient(x) if x.requires_grad else None for x in xs)

    arrays = [x.data if isinstance(x, Variable) else x for x in inputs]
    return testing.gradcheck(forward, backward, arrays, eps=eps, rtol=rtol, seed=seed)


def _gradient(x: Variable):
    """What reached x; zeros if nothing did, which is a claim to check like any other."""
    if x.grad is not None:
        return x.grad
    return (cupy_if_imported() if is_cupy(x.data) else np).zeros_like(x.data)


def _as_tuple(value) -> tuple[Variable, ...]:
    """What the function gave, checked."""
    results = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    for result in results:
        if not isinstance(result, Variable):
            raise TypeError(
                f"gradcheck: function gave a {type(result).__name__}, expected a Variable or a tuple of them"
            )
    return results
