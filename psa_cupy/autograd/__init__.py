"""A tape that chains the backward kernels; see `Tape`."""

from psa_cupy.autograd.functions import (
    add,
    extract_v,
    flash_attention,
    merge_attn,
    multiply,
    pack_qkv,
    psa,
    sum,
)
from psa_cupy.autograd.gradcheck import gradcheck
from psa_cupy.autograd.tape import Tape, Variable, no_grad, record

__all__ = [
    "Tape",
    "Variable",
    "add",
    "extract_v",
    "flash_attention",
    "gradcheck",
    "merge_attn",
    "multiply",
    "no_grad",
    "pack_qkv",
    "psa",
    "record",
    "sum",
]
