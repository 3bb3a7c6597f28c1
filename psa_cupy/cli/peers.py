"""What a user would run instead of psa_cupy: plain CuPy, and PyTorch where it is installed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from psa_cupy.geometry import PSAGeometry

_MOST_SCORES = 1 << 30
"""Peers that hold N x N matrices are left out above this many scores (several matrices, 16 GB and more)."""


@dataclass(frozen=True)
class Peer:
    """One alternative; `make(cp, geometry, dtype, work)` gives the function to time."""

    name: str
    layout: str
    make: Callable
    all_works: tuple[str, ...] = ("forward",)
    holds_scores: bool = True

    def works(self, geometry: PSAGeometry) -> tuple[str, ...]:
        """The works it can do at this size."""
        too_large = self.holds_scores and geometry.bh * geometry.tokens**2 > _MOST_SCORES
        return () if too_large else self.all_works


def available(cp) -> Iterator[Peer]:
    """The peers that are installed."""
    yield Peer("CuPy matmul and softmax", "NCHW", _make_cupy)
    try:
        import torch
        import torch.nn.attention  # from 2.3 on
    except (ImportError, OSError):  # none, too old, or one whose libraries are missing
        return
    if not torch.cuda.is_available():
        return
    both = ("forward", "both")
    yield Peer("torch eager", "NCHW", functools.partial(_make_torch, _eager), both)
    yield Peer("torch.compile", "NCHW", _make_compiled, both)
    for label, backend in _sdpa_backends():
        nchw = functools.partial(_make_torch, functools.partial(_sdpa, backend))
        yield Peer(f"torch sdpa {label}", "NCHW", nchw, both, holds_scores=label == "math")
        given = functools.partial(_make_given, backend)
        yield Peer(
            f"torch sdpa {label}", "given", given, ("forward", "backward"), holds_scores=label == "math"
        )


def _sdpa_backends():
    from torch.nn.attention import SDPBackend

    return (
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("efficient", SDPBackend.EFFICIENT_ATTENTION),
        ("math", SDPBackend.MATH),
    )


def _make_cupy(cp, geometry, dtype, work):
    # CuPy has no matmul for bfloat16: its 16-bit rate is float16's.
    array_dtype = dtype if dtype.kind == "f" else np.dtype(np.float16)
    qkv = cp.random.standard_normal(geometry.qkv_shape, dtype=cp.float32).astype(array_dtype)
    key_dim = geometry.key_dim

    def forward():
        heads = qkv.reshape(geometry.batch, geometry.num_heads, geometry.head_channels, geometry.tokens)
        q, k, v = heads[:, :, :key_dim], heads[:, :, key_dim : 2 * key_dim], heads[:, :, 2 * key_dim :]
        scores = (q.swapaxes(-1, -2) @ k) * array_dtype.type(key_dim**-0.5)
        scores = cp.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        return (v @ scores.swapaxes(-1, -2)).reshape(geometry.out_shape)

    return forward


def _torch_input(geometry, dtype, shape, requires_grad):
    import torch

    torch_dtype = getattr(torch, dtype.name)
    return torch.randn(shape, device="cuda", dtype=torch_dtype).requires_grad_(requires_grad)


def _split(qkv, geometry):
    heads = qkv.view(geometry.batch, geometry.num_heads, geometry.head_channels, geometry.tokens)
    return heads.split([geometry.key_dim, geometry.key_dim, geometry.value_dim], dim=2)


def _eager(qkv, geometry):
    q, k, v = _split(qkv, geometry)
    attention = ((q.transpose(-2, -1) @ k) * geometry.key_dim**-0.5).softmax(dim=-1)
    return (v @ attention.transpose(-2, -1)).view(geometry.out_shape)


def _sdpa(backend, qkv, geometry):
    import torch
    from torch.nn.attention import sdpa_kernel

    q, k, v = (x.transpose(-1, -2).contiguous() for x in _split(qkv, geometry))
    with sdpa_kernel(backend):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return o.transpose(-1, -2).reshape(geometry.out_shape)


def _make_compiled(cp, geometry, dtype, work):
    import torch

    torch._dynamo.reset()
    return _make_torch(torch.compile(_eager, dynamic=False), cp, geometry, dtype, work)


def _make_torch(function, cp, geometry, dtype, work):
    qkv = _torch_input(geometry, dtype, geometry.qkv_shape, requires_grad=work == "both")
    if work == "forward":
        return lambda: function(qkv, geometry)
    d_out = _torch_input(geometry, dtype, geometry.out_shape, requires_grad=False)

    def both():
        qkv.grad = None
        function(qkv, geometry).backward(d_out)

    return both


def _make_given(backend, cp, geometry, dtype, work):
    import torch
    from torch.nn.attention import sdpa_kernel

    attention = torch.nn.functional.scaled_dot_product_attention
    dims = (geometry.key_dim, geometry.key_dim, geometry.value_dim)
    q, k, v = (
        _torch_input(
            geometry, dtype, (geometry.batch, geometry.num_heads, geometry.tokens, d), work == "backward"
        )
        for d in dims
    )

    def forward():
        with sdpa_kernel(backend):
            return attention(q, k, v)

    if work == "forward":
        return forward
    o = forward()
    d_o = torch.randn_like(o)
    return lambda: torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True)
