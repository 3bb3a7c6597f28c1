"""NCHW qkv to packed Q, K and the two halves of V, token by token, and back."""

from __future__ import annotations

import numpy as np

from psa_cupy import reference
from psa_cupy.arguments import require_disjoint, require_dtype, require_target
from psa_cupy.geometry import PSAGeometry
from psa_cupy.launching import place
from psa_cupy.launching.plan import Device, Operand, Plan
from psa_cupy.passes.descriptor import Pass, PSAProblem, Variant, always
from psa_cupy.passes.layout import geometry_of_heads, transpose_launch

_FILE = "pack_qkv.cu"
_SECTIONS = 4


def pack_qkv(qkv, num_heads):
    """Q, K and the two halves of V as arrays of tokens, as attention over packed heads wants them.

    A copy: every bit pattern survives.

    Parameters
    ----------
    qkv : array, (B, num_heads*4*key_dim, H, W)
        float16, bfloat16, float32 or float64; NumPy or CuPy. Per head: key_dim Q channels, key_dim K
        channels, 2*key_dim V channels; key_dim is 1 to 128. Any strides; what is not in C order is copied
        once.
    num_heads : int
        At least 1.

    Returns
    -------
    array, (4, B*num_heads, N, key_dim)
        Sections Q, K, V_lo (the first key_dim V channels) and V_hi; dtype of qkv; N = H*W, token h*W + w.

    Raises
    ------
    TypeError
        If qkv is no array or of an unsupported dtype, or num_heads is no integer.
    ValueError
        If num_heads times 4 does not divide the channels, or key_dim exceeds 128.

    Notes
    -----
    The original design's psa_pack_qkv.

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> qkv = np.arange(16, dtype=np.float32).reshape(1, 8, 1, 2)   # one head of key_dim 2, two tokens
    >>> q, k, v_lo, v_hi = psa_cupy.pack_qkv(qkv, num_heads=1)
    >>> q
    array([[[0., 2.],
            [1., 3.]]], dtype=float32)

    """
    name = "pack_qkv"
    where = place(name, qkv=qkv)
    dtype = require_dtype(name, "qkv", qkv)
    geometry = PSAGeometry.from_qkv(name, qkv.shape, num_heads)
    if where.is_reference:
        return reference.pack_qkv(qkv, num_heads)

    packed = where.empty(geometry.packed_shape, dtype)
    if geometry.is_empty:
        return packed
    qkv = where.contiguous(qkv)
    problem = PSAProblem(geometry, dtype, aligned=where.aligned(qkv, packed))
    where.run(PACK_QKV.plan("forward", problem, where.device), {"qkv": qkv, "packed": packed})
    return packed


def pack_qkv_backward(d_packed, num_heads, height, width, *, d_qkv=None):
    """The gradient of `pack_qkv` with respect to qkv: the inverse permutation.

    Parameters
    ----------
    d_packed : array, (4, B*num_heads, N, key_dim)
        The gradient of the loss with respect to the packed array.
    num_heads : int
        At least 1.
    height, width : int
        H and W; N = H*W.
    d_qkv : array, optional
        A gradient to add to, atomically, each element rounded once: C-contiguous, of qkv's shape and
        d_packed's dtype, apart from d_packed.

    Returns
    -------
    array, (B, num_heads*4*key_dim, H, W)
        d_qkv: the given one, added to, or a new one.

    Raises
    ------
    TypeError
        If an argument is no array, NumPy and CuPy are mixed, dtypes differ or are not supported, or a size
        is no integer.
    ValueError
        If sizes do not fit together or exceed the limits, or d_qkv cannot be written to.

    Notes
    -----
    With a target, addresses are added to atomically, one addition each: the same call gives the same bits.

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> qkv = np.arange(16, dtype=np.float32).reshape(1, 8, 1, 2)
    >>> packed = psa_cupy.pack_qkv(qkv, num_heads=1)
    >>> bool((psa_cupy.pack_qkv_backward(packed, 1, height=1, width=2) == qkv).all())
    True

    """
    name = "pack_qkv_backward"
    where = place(name, d_packed=d_packed, d_qkv=d_qkv)
    dtype = require_dtype(name, "d_packed", d_packed)
    geometry = geometry_of_heads(
        *(name, "d_packed", d_packed),
        num_heads=num_heads,
        height=height,
        width=width,
        layout=("4", "B*num_heads", "N", "key_dim"),
    )
    if d_packed.shape[0] != _SECTIONS:
        raise ValueError(f"{name}: d_packed has shape {d_packed.shape}, expected {geometry.packed_shape}")
    require_target(name, "d_qkv", d_qkv, geometry.qkv_shape, dtype)
    require_disjoint(name, {"d_qkv": d_qkv}, {"d_packed": d_packed})
    if where.is_reference:
        return reference.pack_qkv_backward(d_packed, num_heads, height, width, d_qkv=d_qkv)

    accumulate = d_qkv is not None
    d_qkv = d_qkv if accumulate else where.empty(geometry.qkv_shape, dtype)
    if geometry.is_empty:
        return d_qkv
    d_packed = where.contiguous(d_packed)
    problem = PSAProblem(geometry, dtype, aligned=where.aligned(d_packed, d_qkv), accumulate=accumulate)
    where.run(PACK_QKV.plan("backward", problem, where.device), {"d_packed": d_packed, "d_qkv": d_qkv})
    return d_qkv


def _forward_plan(problem: PSAProblem, device: Device) -> Plan:
    return _plan(problem, device, "pack_qkv", ("qkv", "packed"), accumulate=False)


def _backward_plan(problem: PSAProblem, device: Device) -> Plan:
    return _plan(problem, device, "pack_qkv_backward", ("d_packed", "d_qkv"), problem.accumulate)


def _plan(
    problem: PSAProblem, device: Device, entry: str, operands: tuple[str, str], accumulate: bool
) -> Plan:
    geometry = problem.geometry
    launch = transpose_launch(
        *(problem, device, _FILE, entry),
        matrices=_SECTIONS * geometry.bh,
        arguments=(*map(Operand, operands), np.int64(geometry.tokens), np.int64(geometry.bh)),
        accumulate_constants={"ACCUMULATE": accumulate},
        adds_along="tokens" if accumulate else None,
    )
    return Plan((launch,))


def _infer_shape(qkv_shape, num_heads):
    """The shape of the packed array; B*num_heads is None while the batch is not yet known (None)."""
    geometry = PSAGeometry.from_qkv("pack_qkv", (0, *qkv_shape[1:]), num_heads)
    batch = qkv_shape[0]
    return _SECTIONS, None if batch is None else batch * num_heads, geometry.tokens, geometry.key_dim


PACK_QKV = Pass(
    name="psa_pack_qkv",
    function=pack_qkv,
    backward=pack_qkv_backward,
    infer_shape=_infer_shape,
    variants={
        "forward": (Variant("plain", always, _forward_plan),),
        "backward": (Variant("plain", always, _backward_plan),),
    },
)
