"""Checks a gradient against differences of the function itself, in float64, along random directions."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable

import numpy as np

from psa_cupy.arguments import (
    DTYPES,
    cupy_if_imported,
    is_cupy,
    require_arrays,
    require_integer,
    require_shape,
)

_MOST_ELEMENTS = 200
"""Differentiated one by one to find the worst, once a direction has failed."""

_ROUNDOFF = 2.0**-53
_SMALLEST = 2.0**-1074
"""What float64 rounds by: relative to a number, and at least."""

_FAR = 2.0**26
"""A step, in units of an array's size, that shows in any output that is not constant."""


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
        Largest difference allowed, relative to the larger of both values and of the gradient's norm; less
        than 1, which a gradient of zero would meet.
    seed : int
        Of the directions; at least 0.

    Returns
    -------
    float
        The largest relative error found beyond rounding noise, at most rtol.

    Raises
    ------
    GradientError
        With a dump of what failed: shapes, both values, the relative error and the worst element.
    TypeError
        If an array, an output or a gradient is none, or not of real numbers, or eps, rtol or seed is no
        number of its kind.
    ValueError
        If nothing would be checked: there are no arrays, outputs or gradients, or none that has an element;
        an array or an output is not finite; eps, rtol or seed is out of its range; or rounding noise would
        hide errors above rtol (see Notes). Or if backward gives another number of gradients, or other shapes.

    Notes
    -----
    Rounding moves each output by some 2**-53 of its size, and so the difference by up to
    ``noise = 4 * 2**-53 * sum(abs(w * f(x))) / step``. A difference off by more than rtol, but within noise,
    is forgiven only if noise is at most rtol on the same scale: nothing off by more than 2*rtol passes. If
    noise is more, because outputs are large compared with their change, the check cannot tell and raises
    ValueError. Use a larger eps, or smaller outputs: take a constant off them.

    A gradient of zero has no scale of its own. It passes, up to noise, if noise is at most rtol of the slope
    across a step as large as the array, or if even that step and one 2**26 times as large change outputs by
    no more than rounding.

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
    eps, rtol = _require_telling(eps, rtol)
    check = _Check(forward, as_sequence("arrays", arrays, "arrays"), eps, rtol, seed)
    gradients = check.gradients(backward)
    return max(check.error(index, g) for index, g in enumerate(gradients) if g is not None)


def as_sequence(name: str, values, kind: str) -> tuple:
    """The values as a tuple, if they are several things and not one."""
    if not isinstance(values, Iterable) or getattr(values, "ndim", 1) == 0:
        raise TypeError(f"gradcheck: {name} is a {type(values).__name__}, expected a sequence of {kind}")
    return tuple(values)


def _require_telling(eps, rtol) -> tuple[float, float]:
    """Check that a step of eps leaves rounding errors below rtol: otherwise any gradient would pass."""
    eps, rtol = _as_float("eps", eps), _as_float("rtol", rtol)
    if not (0 < rtol < 1):
        raise ValueError(f"gradcheck: rtol is {rtol}, expected a positive number below 1")
    if not (2.0**-51 / rtol <= eps < math.inf):
        raise ValueError(
            f"gradcheck: eps is {eps}, expected at least 2**-51 / rtol = {2.0**-51 / rtol:.2g}, and finite"
        )
    return eps, rtol


def _as_float(name: str, value) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"gradcheck: {name} is a {type(value).__name__}, expected a real number")
    try:
        return float(value)
    except OverflowError:  # an int past float64
        return math.inf if value > 0 else -math.inf


class _Check:
    """The function at one point, weighted with random numbers: a scalar to differentiate."""

    def __init__(self, forward, arrays, eps: float, rtol: float, seed: int):
        seed = require_integer("gradcheck", "seed", seed, low=0)
        self.arrays = [_in_float64(f"array {i}", array) for i, array in enumerate(arrays)]
        require_arrays("gradcheck", {f"array {i}": array for i, array in enumerate(self.arrays)})
        if not any(a.size for a in self.arrays):
            raise ValueError("gradcheck: arrays is empty, expected at least one array with an element")
        _require_finite("array", self.arrays)
        self._forward, self._eps, self._rtol = forward, eps, rtol
        # Not default_rng(seed): the caller's arrays may be that, and weights equal to x hide transpositions.
        self._random = np.random.default_rng((seed, len(arrays), 0x9E3779B9))
        self._xp = cupy_if_imported() if is_cupy(self.arrays[0]) else np
        self._outputs = self._evaluate(self.arrays)
        if not any(y.size for y in self._outputs):
            raise ValueError("gradcheck: the function gave no element, expected at least one output with one")
        _require_finite("output", self._outputs)
        self._weights = [self._random_like(y) for y in self._outputs]

    def gradients(self, backward) -> list:
        """What backward gives, checked: arrays of float64, or None for one that is not to be checked."""
        given = _as_tuple(backward(*(a.copy() for a in (*self._weights, *self.arrays))))
        if len(given) != len(self.arrays):
            raise ValueError(
                f"gradcheck: backward gave {len(given)} gradients, expected one for each of "
                f"{len(self.arrays)} arrays"
            )
        gradients = [None if g is None else _in_float64(f"gradient {i}", g) for i, g in enumerate(given)]
        for i, (gradient, array) in enumerate(zip(gradients, self.arrays, strict=True)):
            if gradient is not None:
                require_arrays("gradcheck", {f"array {i}": array, f"gradient {i}": gradient})
                require_shape("gradcheck", f"gradient {i}", gradient, array.shape)
        if not any(gradient is not None and gradient.size for gradient in gradients):
            raise ValueError("gradcheck: backward gave no gradient, expected at least one with an element")
        return gradients

    def error(self, index: int, gradient) -> float:
        """The relative error along a random direction, beyond what rounding explains; at most rtol."""
        direction = self._random_like(gradient)
        analytic = float((gradient * direction).sum())
        numeric, noise = self._difference(index, direction, self._eps)
        size = max(abs(analytic), abs(numeric), _norm(gradient))
        error = abs(analytic - numeric)
        relative = 0.0 if error <= noise else (error - noise) / (size or 1.0)
        if not (relative <= self._rtol and math.isfinite(size)):  # NaN fails
            raise GradientError(self._dump(index, gradient, analytic, numeric, relative))
        agrees = size > 0 and error <= self._rtol * size
        if not agrees and noise > self._rtol * size and not self._is_zero(index, direction, size, noise):
            raise ValueError(
                f"gradcheck: gradient {index} differs by {error:.3g} and rounding noise may be {noise:.3g}, "
                f"expected at most rtol = {self._rtol:.3g} of its size {size:.3g}: the outputs are too large "
                "for their change; use a larger eps, or take a constant off the outputs"
            )
        return relative

    @np.errstate(all="ignore")  # large steps may leave the function's domain
    def _is_zero(self, index: int, direction, size: float, noise: float) -> bool:
        """Whether a gradient is within noise, and that is nothing to what large steps do; see gradcheck."""
        if not size <= noise < math.inf:
            return False
        slope, rounding = self._difference(index, direction, 1.0)
        if abs(slope) > rounding:
            return noise <= self._rtol * abs(slope)
        slope, rounding = self._difference(index, direction, _FAR)
        return abs(slope) <= rounding  # constant

    def _random_like(self, array):
        """Normally distributed numbers in an array's shape."""
        return self._xp.asarray(self._random.standard_normal(array.shape))

    def _difference(self, index: int, direction, eps: float) -> tuple[float, float]:
        """The central difference along a direction of one array, and what rounding may have done to it."""
        x = self.arrays[index]
        root_mean_square = _norm(x) / max(x.size, 1) ** 0.5
        step = eps * root_mean_square or eps
        above, below = (self._evaluate(self._moved(index, sign * step * direction)) for sign in (1, -1))
        value = sum(float((w * (a - b)).sum()) for w, a, b in zip(self._weights, above, below, strict=True))
        rounding = sum(
            float((abs(w) * (_ROUNDOFF * abs(y) + _SMALLEST)).sum())
            for w, y in zip(self._weights, self._outputs, strict=True)
        )
        return value / (2 * step), 4 * rounding / step

    def _dump(self, index, gradient, analytic, numeric, relative) -> str:
        """Everything one wants to see of a failure."""
        lines = [
            f"gradcheck: gradient {index} has relative error {relative:.3g}, "
            f"expected at most {self._rtol:.3g}",
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
            analytic, numeric = float(gradient[where]), self._difference(index, direction, self._eps)[0]
            error = abs(analytic - numeric)
            found.append((np.inf if np.isnan(error) else error, where, analytic, numeric))
        error, where, analytic, numeric = max(found)
        return (
            f"  worst of {len(found)} elements tried: {list(where)}: backward {analytic:.12g}, "
            f"difference {numeric:.12g}, off by {error:.3g}"
        )

    def _moved(self, index: int, by):
        """The arrays, one moved; still an array if it is 0-d, where NumPy's sum is a scalar."""
        return [self._xp.asarray(a + by) if i == index else a for i, a in enumerate(self.arrays)]

    def _evaluate(self, arrays) -> list:
        outputs = [self._xp.array(y) for y in _as_tuple(self._forward(*(a.copy() for a in arrays)))]
        for i, output in enumerate(outputs):
            if output.dtype != np.float64:
                raise TypeError(f"gradcheck: output {i} has dtype {output.dtype}, expected float64")
        return outputs


def _in_float64(name: str, array):
    """A copy of an array, or of a NumPy scalar, checked to be of real numbers."""
    if isinstance(array, np.generic):
        array = np.asarray(array)
    require_arrays("gradcheck", {name: array})
    if array is None or not (array.dtype.kind in "biuf" or array.dtype in DTYPES):
        what = "None" if array is None else f"of dtype {array.dtype}"
        raise TypeError(f"gradcheck: {name} is {what}, expected an array of real numbers")
    return array.astype(np.float64)


def _require_finite(what: str, arrays) -> None:
    for i, array in enumerate(arrays):
        if array.size and not math.isfinite(float(abs(array).max())):
            raise ValueError(f"gradcheck: {what} {i} has NaN or infinity, expected finite numbers")


def _norm(array) -> float:
    """The Euclidean norm, of numbers whose squares may under- or overflow too."""
    largest = float(abs(array).max()) if array.size else 0.0
    if not 0 < largest < math.inf:
        return largest
    return largest * float(((array / largest) ** 2).sum()) ** 0.5


def _as_tuple(value) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
