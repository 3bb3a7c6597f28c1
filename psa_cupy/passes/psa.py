"""The fused front door: attention straight from and to NCHW arrays, forward and backward.

Each call is checked in full once for its shapes (`forward_with`, `backward_with`); a later call on CuPy
arrays with the same shapes finds a prepared one, checks only what can have changed (kind, device, layout,
addresses, overlap) and launches.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from psa_cupy import reference
from psa_cupy.arguments import cupy_if_imported
from psa_cupy.geometry import PSAGeometry
from psa_cupy.launching.plan import MOST_PLANS
from psa_cupy.passes import (
    flash_attention,
    psa_backward as portable_backward,
    psa_backward_hopper as hopper_backward,
    psa_forward as portable_forward,
    psa_forward_float as portable_forward_float,
    psa_forward_hopper as hopper_forward,
)
from psa_cupy.passes.checks import check_backward, check_forward, specification
from psa_cupy.passes.descriptor import Pass, Variant, always


class PSAForward(NamedTuple):
    """The results of `psa_forward`."""

    out: object
    lse: object


def psa_forward(qkv, num_heads, *, key_dim=None, scale=None, out=None, lse=None) -> PSAForward:
    """Position-sensitive attention of every head, NCHW to NCHW, in one kernel.

    For each head, `out = V softmax(scale * Q^T K)^T` over the N = H*W tokens, with float32 accumulation
    (float64 for float64 arrays). No N x N array is made.

    Parameters
    ----------
    qkv : array, (B, num_heads*(2*key_dim + value_dim), H, W)
        float16, bfloat16, float32 or float64; NumPy or CuPy. Per head: key_dim Q channels, key_dim K
        channels, value_dim V channels. Any strides; what is not in C order is copied once.
    num_heads : int
        At least 1.
    key_dim : int, optional
        1 to 128. By default a quarter of a head's channels, so that value_dim = 2*key_dim; given, the
        rest of a head's channels, at most 256, is value_dim.
    scale : float, optional
        Softmax scale; `key_dim ** -0.5` by default. Any number up to 1e38 in size (float64 arrays: 1e307), 0
        and negative ones, too.
    out, lse : array, optional
        Arrays to write the results to: C-contiguous, of the results' shapes and dtypes, apart from each
        other and from qkv.

    Returns
    -------
    PSAForward
        out (B, num_heads*value_dim, H, W), dtype of qkv; lse (B, num_heads, N), the natural logarithm of
        the sum of the exponentials of the scaled scores, float32 (float64 for float64).

    Raises
    ------
    TypeError
        If an argument is no array, NumPy and CuPy are mixed, or a dtype is not supported.
    ValueError
        If sizes do not fit together, exceed the limits, or a target cannot be written to.

    Notes
    -----
    FlashAttention-2 [1]_ with the layout of YOLOv10's PSA block [2]_.

    References
    ----------
    .. [1] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
       arXiv:2307.08691.
    .. [2] A. Wang et al., "YOLOv10: Real-Time End-to-End Object Detection", arXiv:2405.14458.

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> qkv = np.random.default_rng(0).standard_normal((1, 2 * 128, 20, 20), dtype=np.float32)
    >>> out, lse = psa_cupy.psa_forward(qkv, num_heads=2)
    >>> out.shape, lse.shape
    ((1, 128, 20, 20), (1, 2, 400))

    """
    key = _prepared_key("forward", qkv, num_heads, key_dim, scale)
    if (prepared := _prepared.get(key)) is not None:
        results = prepared.call(qkv, (out, lse))
        if results is not None:
            return PSAForward(*results)
    return _forward(qkv, num_heads, key_dim, scale, out, lse, prepare_as=key)


def psa_backward(d_out, qkv, out, lse, num_heads, *, key_dim=None, scale=None, d_v_branch=None, d_qkv=None):
    """The gradient of `psa_forward` with respect to qkv.

    Parameters
    ----------
    d_out : array, (B, num_heads*value_dim, H, W)
        The gradient of the loss with respect to out; dtype of qkv.
    qkv : array, (B, num_heads*(2*key_dim + value_dim), H, W)
        The input of psa_forward.
    out, lse : array
        Its results.
    num_heads, key_dim, scale
        As in psa_forward.
    d_v_branch : array, optional
        The gradient that reaches V by another branch (the block's positional encoding), shape and dtype
        of out: added to V's gradient before it is rounded.
    d_qkv : array, optional
        A gradient to add to: C-contiguous, shape and dtype of qkv, apart from the inputs.

    Returns
    -------
    array
        d_qkv, shape and dtype of qkv: the given one, added to, or a new one.

    Raises
    ------
    TypeError
        If an argument is no array, NumPy and CuPy are mixed, or dtypes differ.
    ValueError
        If sizes do not fit together, exceed the limits, or d_qkv cannot be written to.

    Notes
    -----
    The probabilities are computed again from lse (FlashAttention-2, arXiv:2307.08691). The same call
    gives the same bits: every address is written once, by a sum rounded once.

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> qkv = np.random.default_rng(0).standard_normal((1, 2 * 128, 20, 20), dtype=np.float32)
    >>> out, lse = psa_cupy.psa_forward(qkv, num_heads=2)
    >>> psa_cupy.psa_backward(np.ones_like(out), qkv, out, lse, num_heads=2).shape
    (1, 256, 20, 20)

    """
    direction = ("backward", d_v_branch is None, d_qkv is None)
    key = _prepared_key(direction, qkv, num_heads, key_dim, scale)
    if (prepared := _prepared.get(key)) is not None:
        branch = () if d_v_branch is None else (d_v_branch,)
        results = prepared.call(qkv, (d_out, out, lse, *branch, d_qkv))
        if results is not None:
            return results[0]
    return _backward(d_out, qkv, out, lse, num_heads, key_dim, scale, d_v_branch, d_qkv, prepare_as=key)


def forward_with(variant, qkv, num_heads, *, key_dim=None, scale=None, out=None, lse=None) -> PSAForward:
    """`psa_forward` by the named kernel variant: how tests force one."""
    return _forward(qkv, num_heads, key_dim, scale, out, lse, variant=variant)


def backward_with(
    variant, d_out, qkv, out, lse, num_heads, *, key_dim=None, scale=None, d_v_branch=None, d_qkv=None
):
    """`psa_backward` by the named kernel variant: how tests force one."""
    return _backward(d_out, qkv, out, lse, num_heads, key_dim, scale, d_v_branch, d_qkv, variant=variant)


def _forward(qkv, num_heads, key_dim, scale, out, lse, variant=None, prepare_as=None) -> PSAForward:
    where, problem = check_forward("psa_forward", qkv, num_heads, key_dim, scale, out, lse)
    geometry, expected = problem.geometry, specification(problem.geometry, problem.dtype)

    if where.is_reference and variant is None:
        return PSAForward(
            *reference.psa_forward(
                qkv, num_heads, key_dim=geometry.key_dim, scale=problem.scale, out=out, lse=lse
            )
        )

    out = where.empty(*expected["out"]) if out is None else out
    lse = where.empty(*expected["lse"]) if lse is None else lse
    if geometry.is_empty:
        return PSAForward(out, lse)
    qkv = where.contiguous(qkv)
    problem = replace(problem, aligned=where.aligned(qkv, out, lse))
    plan = PSA.plan("forward", problem, where.device, variant)
    where.run(plan, {"qkv": qkv, "out": out, "lse": lse})
    if prepare_as is not None and problem.aligned:
        _remember(prepare_as, where.bound(plan), expected, others=(), targets=("out", "lse"))
    return PSAForward(out, lse)


def _backward(
    d_out, qkv, out, lse, num_heads, key_dim, scale, d_v_branch, d_qkv, variant=None, prepare_as=None
):
    inputs = {"d_out": d_out, "qkv": qkv, "out": out, "lse": lse, "d_v_branch": d_v_branch}
    where, problem, inputs = check_backward("psa_backward", inputs, num_heads, key_dim, scale, d_qkv)
    geometry, expected = problem.geometry, specification(problem.geometry, problem.dtype)

    if where.is_reference and variant is None:
        return reference.psa_backward(
            *(d_out, qkv, out, lse, num_heads),
            key_dim=geometry.key_dim,
            scale=problem.scale,
            d_v_branch=d_v_branch,
            d_qkv=d_qkv,
        )

    d_qkv = d_qkv if problem.accumulate else where.empty(*expected["d_qkv"])
    if geometry.is_empty:
        return d_qkv
    operands = {name: where.contiguous(array) for name, array in inputs.items()}
    operands["d_qkv"] = d_qkv
    problem = replace(problem, aligned=where.aligned(*operands.values()))
    plan = PSA.plan("backward", problem, where.device, variant)
    where.run(plan, operands)
    if prepare_as is not None and problem.aligned:
        others = [name for name in inputs if name != "qkv"]
        _remember(prepare_as, where.bound(plan), expected, others, targets=("d_qkv",))
    return d_qkv


_prepared: dict[tuple, _Prepared] = {}


def _prepared_key(direction, qkv, num_heads, key_dim, scale) -> tuple | None:
    """What a prepared call is found by; None for whatever must go the full way.

    Types are compared before values are: True == 1 and 4.0 == 4, but only the integers are valid.
    """
    cupy = cupy_if_imported()
    if cupy is None or type(qkv) is not cupy.ndarray or type(num_heads) is not int:
        return None
    if not (key_dim is None or type(key_dim) is int) or not (scale is None or type(scale) is float):
        return None
    return direction, qkv.shape, qkv.dtype, num_heads, key_dim, scale, qkv.data.device_id


def _remember(key, launch, expected, others, targets) -> None:
    if key in _prepared:  # this call needed the full way, others may not
        return
    if len(_prepared) >= MOST_PLANS:
        _prepared.clear()
    *_, device_id = key
    _prepared[key] = _Prepared(device_id, launch, expected, others, targets)


class _Prepared:
    """A call on CuPy arrays whose shapes, dtypes and parameters have been checked in full before.

    Holds for one device and aligned operands. `call` checks the rest and launches, or answers None when
    the arrays need the full way (a copy, another alignment, an error to raise).

    A small problem takes the host longer than the GPU. Hence what is known beforehand is computed when the
    call is prepared, and the checks are one loop that calls nothing.
    """

    def __init__(self, device_id, launch, expected, others, targets):
        cupy = cupy_if_imported()
        self._ndarray, self._runtime = cupy.ndarray, cupy.cuda.runtime
        self._device_id, self._launch = device_id, launch
        self._qkv_bytes = _bytes(*expected["qkv"])
        self._first_target = len(others)
        self._operands = tuple(
            (index, name, *expected[name], _bytes(*expected[name]), index >= len(others))
            for index, name in enumerate((*others, *targets))
        )

    def call(self, qkv, arrays):
        """Check, allocate the targets that are None, launch; the targets, or None.

        `arrays`: the other inputs, then the targets. That qkv is a CuPy array, its shape, dtype and device
        stand in the key that this call was found by.
        """
        if self._runtime.getDevice() != self._device_id:
            return None
        addresses = self._addresses(qkv, arrays)
        if addresses is None:
            return None
        if len(addresses) < 1 + len(arrays):
            arrays = self._with_new_targets(arrays, addresses)
        self._launch(addresses)
        return arrays[self._first_target :]

    def _addresses(self, qkv, arrays):
        """The address of every array that is given, by name; None if one does not fit."""
        start = qkv.data.ptr
        if start % 16 or not qkv.flags.c_contiguous:
            return None
        addresses, taken = {"qkv": start}, [(start, start + self._qkv_bytes)]
        for index, name, shape, dtype, nbytes, is_target in self._operands:
            array = arrays[index]
            if array is None and is_target:
                continue  # made later, once nothing stands against the call; it overlaps nothing
            if type(array) is not self._ndarray or array.shape != shape or array.dtype != dtype:
                return None
            memory = array.data
            start = memory.ptr
            if start % 16 or memory.device_id != self._device_id or not array.flags.c_contiguous:
                return None
            end = start + nbytes
            if is_target:
                for other_start, other_end in taken:
                    if start < other_end and other_start < end:
                        return None
            addresses[name] = start
            taken.append((start, end))
        return addresses

    def _with_new_targets(self, arrays, addresses):
        """The arrays, with new ones for None, whose addresses are added."""
        arrays = list(arrays)
        for index, name, shape, dtype, _, _ in self._operands:
            if arrays[index] is None:
                arrays[index] = new = self._ndarray(shape, dtype)  # what cupy.empty wraps
                addresses[name] = new.data.ptr
        return arrays


def _bytes(shape, dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _infer_shape(qkv_shape, num_heads, key_dim=None):
    """Shapes of (out, lse) from that of qkv, whose batch may be None (not yet known)."""
    geometry = PSAGeometry.from_qkv("psa_forward", (0, *qkv_shape[1:]), num_heads, key_dim)
    batch = qkv_shape[0]
    return (batch, *geometry.out_shape[1:]), (batch, *geometry.lse_shape[1:])


def _either(*modules) -> Variant:
    """The variant of several modules that bear one name: of the first that supports the problem."""

    def supporting(problem, device):
        return next((module for module in modules if module.supports(problem, device)), None)

    return Variant(
        modules[0].NAME,
        supports=lambda problem, device: supporting(problem, device) is not None,
        plan=lambda problem, device: supporting(problem, device).plan(problem, device),
    )


PSA = Pass(
    name="psa",
    function=psa_forward,
    backward=psa_backward,
    infer_shape=_infer_shape,
    variants={
        "forward": (
            Variant(hopper_forward.NAME, hopper_forward.supports, hopper_forward.plan),
            _either(portable_forward, portable_forward_float),
            Variant("plain", always, flash_attention.plain_psa_forward_plan),
        ),
        "backward": (
            Variant(hopper_backward.NAME, hopper_backward.supports, hopper_backward.plan),
            Variant(portable_backward.NAME, portable_backward.supports, portable_backward.plan),
            Variant("plain", always, flash_attention.plain_psa_backward_plan),
        ),
    },
)
