"""Wrong calls and the exact error each must give, before anything is computed or written.

A table, so that it can run under pytest and, in a process of its own, under `python -O`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import psa_cupy
from psa_cupy import autograd

F16, F32, F64 = np.float16, np.float32, np.float64


@dataclass(frozen=True)
class WrongCall:
    """A call, the exception it must raise and its whole message."""

    call: Callable[[], object]
    error: type[Exception]
    message: str


def zeros(*shape, dtype=F32):
    return np.zeros(shape, dtype)


def read_only(*shape, dtype=F32):
    array = zeros(*shape, dtype=dtype)
    array.flags.writeable = False
    return array


def unaligned(*shape, dtype=F32):
    elements = int(np.prod(shape))
    return np.zeros(elements * np.dtype(dtype).itemsize + 1, np.uint8)[1:].view(dtype).reshape(shape)


QKV = zeros(1, 16, 2, 3)  # 2 heads, key_dim 2, value_dim 4, N = 6
OUT = zeros(1, 8, 2, 3)
LSE = zeros(1, 2, 6)
PACKED = zeros(4, 2, 6, 2)
HALF = zeros(2, 6, 2)


def forward(qkv=QKV, num_heads=2, **keywords):
    return lambda: psa_cupy.psa_forward(qkv, num_heads, **keywords)


def backward(d_out=OUT, qkv=QKV, out=OUT, lse=LSE, num_heads=2, **keywords):
    return lambda: psa_cupy.psa_backward(d_out, qkv, out, lse, num_heads, **keywords)


def flash(q=HALF, k=HALF, v=HALF, **keywords):
    return lambda: psa_cupy.flash_attention_forward(q, k, v, **keywords)


def flash_back(d_o=HALF, q=HALF, k=HALF, v=HALF, o=HALF, lse=LSE[0], **keywords):
    return lambda: psa_cupy.flash_attention_backward(d_o, q, k, v, o, lse, **keywords)


ONE_OF = "expected one of float16, bfloat16, float32, float64"

WRONG_CALLS = {
    # ---- what is no array, or of a wrong kind
    "forward: a list": WrongCall(
        forward([1.0]), TypeError, "psa_forward: qkv is a list, expected a NumPy or CuPy array"
    ),
    "forward: None": WrongCall(
        lambda: psa_cupy.psa_forward(None, 2),
        TypeError,
        "psa_forward: qkv is None, expected a NumPy or CuPy array",
    ),
    "forward: a Variable": WrongCall(
        forward(autograd.Variable(QKV)),
        TypeError,
        "psa_forward: qkv is a Variable, expected a NumPy or CuPy array",
    ),
    "forward: a masked array": WrongCall(
        forward(np.ma.masked_array(QKV, mask=QKV == 0)),
        TypeError,
        "psa_forward: qkv is a MaskedArray, expected a NumPy or CuPy array",
    ),
    "attention_map: a masked array": WrongCall(
        lambda: psa_cupy.attention_map(np.ma.masked_array(QKV, mask=True), 2, [0]),
        TypeError,
        "attention_map: qkv is a MaskedArray, expected a NumPy or CuPy array",
    ),
    "attention_map: masked queries": WrongCall(
        lambda: psa_cupy.attention_map(QKV, 2, np.ma.masked_array([0, 1], mask=[True, False])),
        TypeError,
        "attention_map: queries is a MaskedArray, expected a sequence of integers",
    ),
    "variable: a masked array": WrongCall(
        lambda: autograd.Variable(np.ma.masked_array(QKV, mask=True)),
        TypeError,
        "Variable: data is a MaskedArray, expected a NumPy or CuPy array",
    ),
    "forward: integers": WrongCall(
        forward(zeros(1, 16, 2, 3, dtype=np.int32)), TypeError, f"psa_forward: qkv has dtype int32, {ONE_OF}"
    ),
    "forward: complex": WrongCall(
        forward(zeros(1, 16, 2, 3, dtype=np.complex64)),
        TypeError,
        f"psa_forward: qkv has dtype complex64, {ONE_OF}",
    ),
    "forward: longdouble": WrongCall(
        forward(zeros(1, 16, 2, 3, dtype=np.longdouble)),
        TypeError,
        f"psa_forward: qkv has dtype float128, {ONE_OF}",
    ),
    "forward: foreign byte order": WrongCall(
        forward(zeros(1, 16, 2, 3, dtype=">f4")), TypeError, f"psa_forward: qkv has dtype >f4, {ONE_OF}"
    ),
    "forward: booleans": WrongCall(
        forward(zeros(1, 16, 2, 3, dtype=bool)), TypeError, f"psa_forward: qkv has dtype bool, {ONE_OF}"
    ),
    # ---- sizes
    "forward: three dimensions": WrongCall(
        forward(zeros(16, 2, 3)),
        ValueError,
        "psa_forward: qkv has shape (16, 2, 3), expected 4 dimensions (B, C, H, W)",
    ),
    "forward: no channels": WrongCall(
        forward(zeros(1, 0, 2, 3)),
        ValueError,
        "psa_forward: qkv has 0 channels, which 2 heads do not divide; "
        "expected a positive multiple of num_heads",
    ),
    "forward: heads do not divide": WrongCall(
        forward(zeros(1, 130, 2, 3), 4),
        ValueError,
        "psa_forward: qkv has 130 channels, which 4 heads do not divide; "
        "expected a positive multiple of num_heads",
    ),
    "forward: not a multiple of 4": WrongCall(
        forward(zeros(1, 18, 2, 3), 1),
        ValueError,
        "psa_forward: qkv has 18 channels per head, expected a multiple of 4 (key_dim, key_dim, 2*key_dim), "
        "or key_dim passed explicitly",
    ),
    "forward: key_dim leaves no value": WrongCall(
        forward(key_dim=4),
        ValueError,
        "psa_forward: qkv has 8 channels per head and key_dim is 4, expected at least 2*key_dim + 1 = 9",
    ),
    "forward: key_dim above the limit": WrongCall(
        forward(zeros(1, 600, 1, 1), 1, key_dim=129),
        ValueError,
        "psa_forward: key_dim is 129, expected 1 to 128",
    ),
    "forward: value_dim above the limit": WrongCall(
        forward(zeros(1, 300, 1, 1), 1, key_dim=1),
        ValueError,
        "psa_forward: value_dim is 298, expected 1 to 256",
    ),
    "forward: key_dim derived above the limit": WrongCall(
        forward(zeros(1, 4 * 129, 1, 1), 1), ValueError, "psa_forward: key_dim is 129, expected 1 to 128"
    ),
    "forward: zero heads": WrongCall(
        forward(num_heads=0), ValueError, "psa_forward: num_heads is 0, expected an integer >= 1"
    ),
    "forward: negative heads": WrongCall(
        forward(num_heads=-2), ValueError, "psa_forward: num_heads is -2, expected an integer >= 1"
    ),
    "forward: float heads": WrongCall(
        forward(num_heads=2.0), TypeError, "psa_forward: num_heads is a float, expected an integer >= 1"
    ),
    "forward: bool heads": WrongCall(
        forward(num_heads=True), TypeError, "psa_forward: num_heads is a bool, expected an integer >= 1"
    ),
    "forward: float key_dim": WrongCall(
        forward(key_dim=2.0), TypeError, "psa_forward: key_dim is a float, expected an integer from 1 to 128"
    ),
    "forward: zero key_dim": WrongCall(
        forward(key_dim=0), ValueError, "psa_forward: key_dim is 0, expected 1 to 128"
    ),
    # ---- scale
    "forward: scale nan": WrongCall(
        forward(scale=float("nan")),
        ValueError,
        "psa_forward: scale is nan, expected a finite number or None",
    ),
    "forward: scale inf": WrongCall(
        forward(scale=float("inf")),
        ValueError,
        "psa_forward: scale is inf, expected a finite number or None",
    ),
    "forward: scale an integer past float64": WrongCall(
        forward(scale=-(10**400)),
        ValueError,
        "psa_forward: scale is -inf, expected a finite number or None",
    ),
    "flash: scale an integer past float64": WrongCall(
        flash(scale=10**400),
        ValueError,
        "flash_attention_forward: scale is inf, expected a finite number or None",
    ),
    "forward: too many tokens": WrongCall(
        lambda: psa_cupy.psa_forward(np.broadcast_to(QKV[:, :16, :1, :1], (1, 16, 2**16, 2**15)), 2),
        ValueError,
        "psa_forward: H*W is 2147483648, expected at most 2147482624",
    ),
    "flash: too many queries": WrongCall(
        lambda: psa_cupy.flash_attention_forward(
            np.broadcast_to(QKV[:, 0, :1, :1], (1, 2**31, 1)), *[QKV[:, 0, :1, :1]] * 2
        ),
        ValueError,
        "flash_attention_forward: q has shape (1, 2147483648, 1), expected at most 2147482624 tokens",
    ),
    "forward: scale past float32": WrongCall(
        forward(scale=1.1e38),
        ValueError,
        "psa_forward: scale is 1.1e+38, expected at most 1e+38 in size for float32 arrays",
    ),
    "forward: scale near float64's end": WrongCall(
        lambda: psa_cupy.psa_forward(QKV.astype(np.float64), 2, scale=-1e308),
        ValueError,
        "psa_forward: scale is -1e+308, expected at most 1e+307 in size for float64 arrays",
    ),
    "flash: scale past float32": WrongCall(
        flash(scale=-1e39),
        ValueError,
        "flash_attention_forward: scale is -1e+39, expected at most 1e+38 in size for float32 arrays",
    ),
    "attention_map: scale past float32": WrongCall(
        lambda: psa_cupy.attention_map(QKV, 2, [0], scale=1e39),
        ValueError,
        "attention_map: scale is 1e+39, expected at most 1e+38 in size for float32 arrays",
    ),
    "attention_map: timedeltas as queries": WrongCall(
        lambda: psa_cupy.attention_map(QKV, 2, np.array([0, 1], "m8[s]")),
        TypeError,
        "attention_map: queries has dtype timedelta64[s], expected integers",
    ),
    "forward: scale str": WrongCall(
        forward(scale="1"), TypeError, "psa_forward: scale is a str, expected a real number or None"
    ),
    "forward: scale list": WrongCall(
        forward(scale=[1.0]), TypeError, "psa_forward: scale is a list, expected a real number or None"
    ),
    "forward: scale bool": WrongCall(
        forward(scale=True), TypeError, "psa_forward: scale is a bool, expected a real number or None"
    ),
    # ---- targets
    "forward: out of a wrong shape": WrongCall(
        forward(out=zeros(1, 8, 3, 2)),
        ValueError,
        "psa_forward: out has shape (1, 8, 3, 2), expected (1, 8, 2, 3)",
    ),
    "forward: out of a wrong dtype": WrongCall(
        forward(out=zeros(1, 8, 2, 3, dtype=F64)),
        TypeError,
        "psa_forward: out has dtype float64, expected float32",
    ),
    "forward: lse in 16 bits": WrongCall(
        forward(zeros(1, 16, 2, 3, dtype=F16), lse=zeros(1, 2, 6, dtype=F16)),
        TypeError,
        "psa_forward: lse has dtype float16, expected float32",
    ),
    "forward: lse flat": WrongCall(
        forward(lse=zeros(2, 6)), ValueError, "psa_forward: lse has shape (2, 6), expected (1, 2, 6)"
    ),
    "forward: out not contiguous": WrongCall(
        forward(out=zeros(1, 8, 3, 2).transpose(0, 1, 3, 2)),
        ValueError,
        "psa_forward: out is not C-contiguous, expected a C-contiguous array to write to",
    ),
    "forward: out read-only": WrongCall(
        forward(out=read_only(1, 8, 2, 3)),
        ValueError,
        "psa_forward: out is read-only, expected a writable array",
    ),
    "forward: out unaligned": WrongCall(
        forward(out=unaligned(1, 8, 2, 3)),
        ValueError,
        "psa_forward: out is not aligned, expected elements at multiples of their size",
    ),
    "backward: d_qkv unaligned": WrongCall(
        backward(d_qkv=unaligned(1, 16, 2, 3)),
        ValueError,
        "psa_backward: d_qkv is not aligned, expected elements at multiples of their size",
    ),
    "forward: out overlaps qkv": WrongCall(
        forward(out=QKV[:, :8]),
        ValueError,
        "psa_forward: out overlaps qkv, expected memory of its own for each target",
    ),
    "forward: out overlaps lse": WrongCall(
        lambda: psa_cupy.psa_forward(QKV, 2, out=OUT, lse=OUT.reshape(-1)[:12].reshape(1, 2, 6)),
        ValueError,
        "psa_forward: out overlaps lse, expected memory of its own for each target",
    ),
    # ---- backward
    "backward: d_out of a wrong shape": WrongCall(
        backward(d_out=QKV),
        ValueError,
        "psa_backward: d_out has shape (1, 16, 2, 3), expected (1, 8, 2, 3)",
    ),
    "backward: d_out of a wrong dtype": WrongCall(
        backward(d_out=zeros(1, 8, 2, 3, dtype=F64)),
        TypeError,
        "psa_backward: d_out has dtype float64, expected float32",
    ),
    "backward: lse float64": WrongCall(
        backward(lse=zeros(1, 2, 6, dtype=F64)),
        TypeError,
        "psa_backward: lse has dtype float64, expected float32",
    ),
    "backward: out missing": WrongCall(
        lambda: psa_cupy.psa_backward(OUT, QKV, None, LSE, 2),
        TypeError,
        "psa_backward: out is None, expected a NumPy or CuPy array",
    ),
    "backward: branch of a wrong shape": WrongCall(
        backward(d_v_branch=QKV),
        ValueError,
        "psa_backward: d_v_branch has shape (1, 16, 2, 3), expected (1, 8, 2, 3)",
    ),
    "backward: d_qkv of a wrong dtype": WrongCall(
        backward(d_qkv=zeros(1, 16, 2, 3, dtype=F64)),
        TypeError,
        "psa_backward: d_qkv has dtype float64, expected float32",
    ),
    "backward: d_qkv read-only": WrongCall(
        backward(d_qkv=read_only(1, 16, 2, 3)),
        ValueError,
        "psa_backward: d_qkv is read-only, expected a writable array",
    ),
    "backward: d_qkv is qkv": WrongCall(
        backward(d_qkv=QKV),
        ValueError,
        "psa_backward: d_qkv overlaps qkv, expected memory of its own for each target",
    ),
    "backward: d_qkv not contiguous": WrongCall(
        backward(d_qkv=zeros(1, 16, 2, 6)[..., ::2]),
        ValueError,
        "psa_backward: d_qkv is not C-contiguous, expected a C-contiguous array to write to",
    ),
    # ---- the staged pair and the layout passes
    "staged: value_dim is not 2*key_dim": WrongCall(
        lambda: psa_cupy.psa_forward_staged(QKV, 2, key_dim=3),
        ValueError,
        "psa_forward_staged: value_dim is 2 and key_dim 3, expected value_dim = 2*key_dim",
    ),
    "staged: a list": WrongCall(
        lambda: psa_cupy.psa_forward_staged([1], 2),
        TypeError,
        "psa_forward_staged: qkv is a list, expected a NumPy or CuPy array",
    ),
    "staged backward: d_out of a wrong dtype": WrongCall(
        lambda: psa_cupy.psa_backward_staged(OUT.astype(F64), QKV, OUT, LSE, 2),
        TypeError,
        "psa_backward_staged: d_out has dtype float64, expected float32",
    ),
    "pack_qkv: three dimensions": WrongCall(
        lambda: psa_cupy.pack_qkv(zeros(16, 2, 3), 2),
        ValueError,
        "pack_qkv: qkv has shape (16, 2, 3), expected 4 dimensions (B, C, H, W)",
    ),
    "pack_qkv_backward: tokens do not fit": WrongCall(
        lambda: psa_cupy.pack_qkv_backward(PACKED, 2, 2, 2),
        ValueError,
        "pack_qkv_backward: d_packed has 6 tokens, expected height*width = 4",
    ),
    "pack_qkv_backward: heads do not fit": WrongCall(
        lambda: psa_cupy.pack_qkv_backward(PACKED, 3, 2, 3),
        ValueError,
        "pack_qkv_backward: d_packed has 2 heads in all, which 3 heads do not divide",
    ),
    "extract_v: integers": WrongCall(
        lambda: psa_cupy.extract_v(QKV.astype(np.int64), 2),
        TypeError,
        f"extract_v: qkv has dtype int64, {ONE_OF}",
    ),
    "extract_v_backward: odd channels per head": WrongCall(
        lambda: psa_cupy.extract_v_backward(zeros(1, 6, 2, 3), 2),
        ValueError,
        "extract_v_backward: d_v has 3 channels per head, expected an even number (value_dim = 2*key_dim)",
    ),
    "merge_attn: halves differ": WrongCall(
        lambda: psa_cupy.merge_attn(HALF, zeros(2, 6, 3), 2, 2, 3),
        ValueError,
        "merge_attn: o_hi has shape (2, 6, 3), expected (2, 6, 2)",
    ),
    "merge_attn: dtypes differ": WrongCall(
        lambda: psa_cupy.merge_attn(HALF, HALF.astype(F64), 2, 2, 3),
        TypeError,
        "merge_attn: o_hi has dtype float64, expected float32",
    ),
    # ---- flash attention
    "flash: two dimensions": WrongCall(
        flash(q=zeros(6, 2)),
        ValueError,
        "flash_attention_forward: q has shape (6, 2), expected 3 dimensions (BH, Nq, D)",
    ),
    "flash: key_dim differs": WrongCall(
        flash(k=zeros(2, 6, 3)),
        ValueError,
        "flash_attention_forward: k has shape (2, 6, 3), expected (2, 6, 2)",
    ),
    "flash: dtypes differ": WrongCall(
        flash(v=HALF.astype(F64)),
        TypeError,
        "flash_attention_forward: v has dtype float64, expected float32",
    ),
    "flash backward: targets overlap": WrongCall(
        lambda: (lambda t: flash_back(d_q=t, d_k=t)())(HALF.copy()),
        ValueError,
        "flash_attention_backward: d_q overlaps d_k, expected memory of its own for each target",
    ),
    "flash backward: d_v of a wrong shape": WrongCall(
        flash_back(d_v=zeros(2, 6, 3)),
        ValueError,
        "flash_attention_backward: d_v has shape (2, 6, 3), expected (2, 6, 2)",
    ),
    # ---- exploring and the tape
    "attention_map: a query too large": WrongCall(
        lambda: psa_cupy.attention_map(QKV, 2, [6]),
        ValueError,
        "attention_map: queries has 6, expected tokens from 0 to 5 (N = H*W)",
    ),
    "attention_map: queries of unequal lengths": WrongCall(
        lambda: psa_cupy.attention_map(QKV, 2, [[1], [2, 3]]),
        ValueError,
        "attention_map: queries is a nested sequence, expected 1 dimension",
    ),
    "attention_map: a query past 64 bits": WrongCall(
        lambda: psa_cupy.attention_map(QKV, 2, [10**30]),
        TypeError,
        "attention_map: queries has dtype object, expected integers",
    ),
    "autograd: a factor past float64": WrongCall(
        lambda: autograd.multiply(QKV, 10**400),
        ValueError,
        "multiply: b is an integer past float64, expected a number within its range",
    ),
    "tape: d_y of a wrong dtype": WrongCall(
        lambda: _tape_backward(OUT.astype(F64)),
        TypeError,
        "Tape.backward: d_y has dtype float64, expected float32",
    ),
    "tape: d_y missing": WrongCall(
        lambda: _tape_backward(None),
        ValueError,
        "Tape.backward: y has shape (1, 8, 2, 3) and no d_y, expected d_y unless y has one element",
    ),
}


def _tape_backward(d_y):
    with autograd.Tape() as tape:
        y = autograd.psa(tape.variable(QKV), 2)
    tape.backward(y, d_y)


def complaint(wrong: WrongCall) -> str | None:
    """What is wrong with the call's answer, or None if it is the expected error."""
    try:
        wrong.call()
    except Exception as error:
        if type(error) is wrong.error and str(error) == wrong.message:
            return None
        return f"got {type(error).__name__}: {error}\nexpected {wrong.error.__name__}: {wrong.message}"
    return f"nothing was raised, expected {wrong.error.__name__}: {wrong.message}"


if __name__ == "__main__":
    complaints = {name: complaint(wrong) for name, wrong in WRONG_CALLS.items()}
    for name, text in complaints.items():
        if text is not None:
            print(f"{name}: {text}")
    raise SystemExit(any(complaints.values()))
