"""The V channels of NCHW qkv as an NCHW array of their own, and back."""

from __future__ import annotations

from psa_cupy import reference
from psa_cupy.arguments import require_disjoint, require_dtype, require_target
from psa_cupy.geometry import PSAGeometry
from psa_cupy.launching import place
from psa_cupy.launching.plan import Device, Operand, Plan
from psa_cupy.passes.descriptor import Pass, PSAProblem, Variant, always
from psa_cupy.passes.layout import copy_launch

_FILE = "extract_v.cu"


def extract_v(qkv, num_heads):
    """V as an NCHW feature map, as the block's depthwise positional encoding wants it.

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
    array, (B, num_heads*2*key_dim, H, W)
        The V channels, head by head; dtype of qkv.

    Raises
    ------
    TypeError
        If qkv is no array or of an unsupported dtype, or num_heads is no integer.
    ValueError
        If num_heads times 4 does not divide the channels, or key_dim exceeds 128.

    Notes
    -----
    The original design's psa_extract_v_nchw.

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> qkv = np.arange(8, dtype=np.float32).reshape(1, 8, 1, 1)   # two heads of key_dim 1, one token
    >>> psa_cupy.extract_v(qkv, num_heads=2).ravel()
    array([2., 3., 6., 7.], dtype=float32)

    """
    name = "extract_v"
    where = place(name, qkv=qkv)
    dtype = require_dtype(name, "qkv", qkv)
    geometry = PSAGeometry.from_qkv(name, qkv.shape, num_heads)
    if where.is_reference:
        return reference.extract_v(qkv, num_heads)

    v = where.empty(geometry.out_shape, dtype)
    if geometry.is_empty:
        return v
    qkv = where.contiguous(qkv)
    problem = PSAProblem(geometry, dtype, aligned=where.aligned(qkv, v))
    where.run(EXTRACT_V.plan("forward", problem, where.device), {"qkv": qkv, "v": v})
    return v


def extract_v_backward(d_v, num_heads, *, d_qkv=None):
    """The gradient of `extract_v` with respect to qkv: d_v in the V channels, zero in the others.

    Parameters
    ----------
    d_v : array, (B, num_heads*2*key_dim, H, W)
        The gradient of the loss with respect to V.
    num_heads : int
        At least 1.
    d_qkv : array, optional
        A gradient whose V channels are added to, atomically, each element rounded once, and whose other
        channels stay as they are: C-contiguous, of qkv's shape and d_v's dtype, apart from d_v.

    Returns
    -------
    array, (B, num_heads*4*key_dim, H, W)
        d_qkv: the given one, added to, or a new one.

    Raises
    ------
    TypeError
        If an argument is no array, NumPy and CuPy are mixed, dtypes differ or are not supported, or
        num_heads is no integer.
    ValueError
        If sizes do not fit together or exceed the limits, or d_qkv cannot be written to.

    Notes
    -----
    With a target, addresses are added to atomically, one addition each: the same call gives the same bits.

    Examples
    --------
    >>> import numpy as np
    >>> import psa_cupy
    >>> d_v = np.array([1, 2], np.float32).reshape(1, 2, 1, 1)   # one head of key_dim 1, one token
    >>> psa_cupy.extract_v_backward(d_v, num_heads=1).ravel()
    array([0., 0., 1., 2.], dtype=float32)

    """
    name = "extract_v_backward"
    where = place(name, d_v=d_v, d_qkv=d_qkv)
    dtype = require_dtype(name, "d_v", d_v)
    geometry = PSAGeometry.from_out(name, "d_v", d_v.shape, num_heads)
    require_target(name, "d_qkv", d_qkv, geometry.qkv_shape, dtype)
    require_disjoint(name, {"d_qkv": d_qkv}, {"d_v": d_v})
    if where.is_reference:
        return reference.extract_v_backward(d_v, num_heads, d_qkv=d_qkv)

    accumulate = d_qkv is not None
    d_qkv = d_qkv if accumulate else where.empty(geometry.qkv_shape, dtype)
    if geometry.is_empty:
        return d_qkv
    d_v = where.contiguous(d_v)
    problem = PSAProblem(geometry, dtype, aligned=where.aligned(d_v, d_qkv), accumulate=accumulate)
    where.run(EXTRACT_V.plan("backward", problem, where.device), {"d_v": d_v, "d_qkv": d_qkv})
    return d_qkv


def _forward_plan(problem: PSAProblem, device: Device) -> Plan:
    return _plan(problem, device, "extract_v", ("qkv", "v"), accumulate=False)


def _backward_plan(problem: PSAProblem, device: Device) -> Plan:
    return _plan(problem, device, "extract_v_backward", ("d_v", "d_qkv"), problem.accumulate)


def _plan(
    problem: PSAProblem, device: Device, entry: str, operands: tuple[str, str], accumulate: bool
) -> Plan:
    geometry = problem.geometry
    launch = copy_launch(
        *(problem, device, _FILE, entry),
        run=geometry.value_dim * geometry.tokens,
        arguments=tuple(map(Operand, operands)),
        accumulate=accumulate,
    )
    return Plan((launch,))


def _infer_shape(qkv_shape, num_heads):
    """The shape of V from that of qkv, whose batch may be None (not yet known)."""
    geometry = PSAGeometry.from_qkv("extract_v", (0, *qkv_shape[1:]), num_heads)
    return qkv_shape[0], *geometry.out_shape[1:]


EXTRACT_V = Pass(
    name="psa_extract_v_nchw",
    function=extract_v,
    backward=extract_v_backward,
    infer_shape=_infer_shape,
    variants={
        "forward": (Variant("plain", always, _forward_plan),),
        "backward": (Variant("plain", always, _backward_plan),),
    },
)
