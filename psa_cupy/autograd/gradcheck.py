"""`psa_cupy.testing.gradcheck` for functions of Variables: the tape's own backward is what it checks."""

from __future__ import annotations

import contextlib

import numpy as np

from psa_cupy import testing
from psa_cupy.arguments import cupy_if_imported, is_cupy
from psa_cupy.autograd.tape import Tape, Variable, no_grad
from psa_cupy.testing.gradients import as_sequence


def gradcheck(function, inputs, *, eps: float = 1e-5, rtol: float = 1e-6, seed: int = 0) -> float:
    """Check the gradients that a tape gives for a function, along random directions, in float64.

    It records on a tape of its own, even where another is recording, and leaves the gradients of all other
    Variables, which the function may use, as they were.

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
        If an input is no array and no Variable, or the function gives anything but Variables, or as in
        `psa_cupy.testing.gradcheck`.
    ValueError
        If nothing would be checked: no input requires a gradient, the function gives a Variable that it did
        not compute, or as in `psa_cupy.testing.gradcheck`.

    Examples
    --------
    >>> import numpy as np
    >>> from psa_cupy import autograd
    >>> qkv = np.random.default_rng(0).standard_normal((1, 2 * 8, 2, 3))
    >>> autograd.gradcheck(lambda x: autograd.psa(x, num_heads=2), [qkv]) <= 1e-6
    True

    """
    inputs = as_sequence("inputs", inputs, "Variables or arrays")
    wanted = [x.requires_grad if isinstance(x, Variable) else True for x in inputs]
    if inputs and not any(wanted):
        raise ValueError("gradcheck: no input requires a gradient, expected at least one that does")

    def variables(arrays):
        return [Variable(array, flag) for array, flag in zip(arrays, wanted, strict=True)]

    def forward(*arrays):
        ys = _as_tuple(function(*variables(arrays)))
        if any(y.requires_grad for y in ys):  # nothing records here
            raise ValueError(
                "gradcheck: function gave an input or another Variable that it did not compute, "
                "expected what it computed"
            )
        return tuple(y.data for y in ys)

    def backward(*d_outputs_and_arrays):
        d_outputs, arrays = d_outputs_and_arrays[: -len(inputs)], d_outputs_and_arrays[-len(inputs) :]
        with Tape() as tape:
            xs = variables(arrays)
            ys = _as_tuple(function(*xs))
        with _set_aside(tape._leaves):
            for y, d_y in zip(ys, d_outputs, strict=True):
                if y.requires_grad:
                    tape.backward(y, d_y, retain_graph=True)
            return tuple(_gradient(x) if x.requires_grad else None for x in xs)

    arrays = [x.data if isinstance(x, Variable) else x for x in inputs]
    with no_grad():  # not on the caller's tape
        return testing.gradcheck(forward, backward, arrays, eps=eps, rtol=rtol, seed=seed)


@contextlib.contextmanager
def _set_aside(leaves):
    """Inside, leaves have no gradients; afterwards, those they had: some are the caller's Variables."""
    held = [(leaf, leaf.take()) for leaf in leaves]
    try:
        yield
    finally:
        for leaf, buffer in held:
            leaf.buffer = buffer


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
