"""Checks a gradient against differences of the function itself, in float64, along random directions."""

from __future__ import annotations

import math

import numpy as np

from psa_cupy.arguments import cupy_if_imported, is_cupy, require_arrays

_MOST_ELEMENTS = 200
"""Differentiated one by one to find the worst, once a direction has failed."""


class GradientError(AssertionError):
    """A gradient does not agree with differences of its function."""


def gradcheck(forward, backward, arrays, *, eps: float = 1e-5, rtol: float = 1e-6, seed: int = 0) -> float:
    """Check a vector-Jacobian product along random directions, in float64.

    With random w (shapes of the outputs) and u (shape of one array) it compares
    ``<w, f(x + eps u) - f(x - eps u)> / (2 eps)`` with ``<gradient, u>``, for one array after the other.

    Parameters
    ----------
    forward : callable
        ``forward(*arrays)`` gives an array or a tuple of arrays.
    backward : callable
        ``backward(*d_outputs, *arrays)`` gives the gradient of ``sum(d_output * output)`` with respect to
        each array: an array if there is one, or a tuple, with None for an array that is not to be checked.
    arrays : sequence of array
        NumPy or CuPy, of any real dtype: the functions get float64 copies.
    eps : float
        Step of the difference, in units of each array's root mean square; at least 2**-51 / rtol, since
        below that rounding alone exceeds rtol.
    rtol : float
        Largest difference allowed, relative to the larger of both values and of the gradient's norm.
    seed : int
        Of the directions.

    Returns
    -------
    float
        The largest relative error found, at most rtol.

    Raises
    ------
    GradientError
        With a dump of what failed: shapes, both values, the relative error and the worst element.
    TypeError
        If an array, an output or a gradient is none, or an array is complex.
    ValueError
        If nothing would be checked: there are no arrays, backward gives no gradient at all, an output is not
        finite, or eps is too small; or if backward gives another number of gradients, or other shapes.

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> from psa_cupy import testing
    >>> arrays = np.random.default_rng(0).standard_normal((3, 1, 6, 4))
    >>> def forward(q, k, v):
    ...     return psa_cupy.flash_attention_forward(q, k, v).o
    >>> def backward(d_o, q, k, v):
    ...     o, lse = psa_cupy.flash_attention_forward(q, k, v)
    ...     return psa_cupy.flash_attention_backward(d_o, q, k, v, o, lse)
    >>> testing.gradcheck(forward, backward, arrays) <= 1e-6
    True

    """
    _require_telling(eps, rtol)
    check = _Check(forward, tuple(arrays), eps, seed)
    gradients = _as_tuple(backward(*(a.copy() for a in (*check.weights, *check.arrays))))
    check.require_gradients(gradients)
    worst = 0.0
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue
        direction = check.random_like(gradient)
        analytic = float((gradient * direction).sum())
        numeric, noise = check.difference(index, direction)
        size = max(abs(analytic), abs(numeric), float((gradient * gradient).sum()) ** 0.5)
        error = abs(analytic - numeric) - noise
        relative = 0.0 if error <= 0 else error / (size or 1.0)
        if not relative <= rtol:  # NaN fails
            raise GradientError(check.dump(index, gradient, analytic, numeric, relative, rtol))
        worst = max(worst, relative)
    return worst


def _require_telling(eps: float, rtol: float) -> None:
    """Check that a step of eps leaves rounding errors below rtol: otherwise any gradient would pass."""
    if not (0 < rtol < math.inf):
        raise ValueError(f"gradcheck: rtol is {rtol}, expected a positive number")
    if not (2.0**-51 / rtol <= eps < math.inf):
        raise ValueError(f"gradcheck: eps is {eps}, expected at least 2**-51 / rtol = {2.0**-51 / rtol:.2g}")


class _Check:
    """The function at one point, weighted with random numbers: a scalar to differentiate."""

    def __init__(self, forward, arrays, eps: float, seed: int):
        if len(arrays) == 0:
            raise ValueError("gradcheck: arrays is empty, expected at least one array")
        for i, array in enumerate(arrays):
            _require_real(f"array {i}", array)
        self._forward, self._eps = forward, eps
        # Not default_rng(seed): the caller's arrays may be that, and weights equal to x hide transpositions.
        self._random = np.random.default_rng((seed, len(arrays), 0x9E3779B9))
        self._xp = cupy_if_imported() if is_cupy(arrays[0]) else np
        self.arrays = [a.astype(np.float64) for a in arrays]
        self._outputs = self._evaluate(self.arrays)
        for i, output in enumerate(self._outputs):
            if not bool(self._xp.isfinite(output).all()):
                raise ValueError(f"gradcheck: output {i} has NaN or infinity, expected finite numbers")
        self.weights = [self.random_like(y) for y in self._outputs]

    def random_like(self, array):
        """Normally distributed numbers in an array's shape."""
        return self._xp.asarray(self._random.standard_normal(array.shape))

    def require_gradients(self, gradients: tuple) -> None:
        """Check number, kind and shapes of what backward gave."""
        if len(gradients) != len(self.arrays):
            raise ValueError(
                f"gradcheck: backward gave {len(gradients)} gradients, expected one for each of "
                f"{len(self.arrays)} arrays"
            )
        if all(gradient is None for gradient in gradients):
            raise ValueError("gradcheck: backward gave no gradient, expected at least one array")
        for i, (gradient, array) in enumerate(zip(gradients, self.arrays, strict=True)):
            if gradient is None:
                continue
            _require_real(f"gradient {i}", gradient)
            if gradient.shape != array.shape:
                raise ValueError(
                    f"gradcheck: gradient {i} has shape {gradient.shape}, expected {array.shape}, its array's"
                )

    def difference(self, index: int, direction) -> tuple[float, float]:
        """The central difference along a direction of one array, and what rounding may have done to it."""
        x = self.arrays[index]
        root_mean_square = float((x * x).mean()) ** 0.5 if x.size else 0.0
        step = self._eps * (root_mean_square or 1.0)
        above, below = (self._evaluate(self._moved(index, sign * step * direction)) for sign in (1, -1))
        value = sum(float((w * (a - b)).sum()) for w, a, b in zip(self.weights, above, below, strict=True))
        size = sum(float(abs(w * y).sum()) for w, y in zip(self.weights, self._outputs, strict=True))
        return value / (2 * step), 4 * 2.0**-53 * size / step

    def dump(self, index, gradient, analytic, numeric, relative, rtol) -> str:
        """Everything one wants to see of a failure."""
        lines = [
            f"gradcheck: gradient {index} has relative error {relative:.3g}, expected at most {rtol:.3g}",
            *(f"  array {i}: shape {a.shape}" for i, a in enumerate(self.arrays)),
            *(f"  output {i}: shape {y.shape}" for i, y in enumerate(self._outputs)),
            f"  along a random direction: backward {analytic:.12g}, difference {numeric:.12g}",
        ]
        return "\n".join([*lines, self._worst_element(index, gradient)])

    def _worst_element(self, index: int, gradient) -> str:
        candidates = np.arange(gradient.size)
        if gradient.size > _MOST_ELEMENTS:
            candidates = np.sort(self._random.choice(gradient.size, _MOST_ELEMENTS, replace=False))
        found = []
        for flat in candidates:
            where = tuple(int(i) for i in np.unravel_index(flat, gradient.shape))
            direction = self._xp.zeros(gradient.shape)
            direction[where] = 1.0
            analytic, numeric = float(gradient[where]), self.difference(index, direction)[0]
            error = abs(analytic - numeric)
            found.append((np.inf if np.isnan(error) else error, where, analytic, numeric))
        error, where, analytic, numeric = max(found)
        return (
            f"  worst of {len(found)} elements tried: {list(where)}: backward {analytic:.12g}, "
            f"difference {numeric:.12g}, off by {error:.3g}"
        )

    def _moved(self, index: int, by):
        return [a + by if i == index else a for i, a in enumerate(self.arrays)]

    def _evaluate(self, arrays) -> list:
        outputs = [self._xp.array(y) for y in _as_tuple(self._forward(*(a.copy() for a in arrays)))]
        for i, output in enumerate(outputs):
            if output.dtype != np.float64:
                raise TypeError(f"gradcheck: output {i} has dtype {output.dtype}, expected float64")
        return outputs


def _require_real(name: str, array) -> None:
    """Check an array or a NumPy scalar, not complex."""
    if not isinstance(array, np.generic):
        require_arrays("gradcheck", {name: array})
    if array is None or array.dtype.kind == "c":
        what = "None" if array is None else f"of dtype {array.dtype}"
        raise TypeError(f"gradcheck: {name} is {what}, expected an array of real numbers")


def _as_tuple(value) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
