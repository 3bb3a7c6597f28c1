"""Position-sensitive attention (YOLO's PSA / C2PSA block) on NumPy and CuPy arrays, forward and backward."""

from psa_cupy import autograd, testing
from psa_cupy.attention_map import attention_map
from psa_cupy.launching.cpu import KernelError, cpu_kernels
from psa_cupy.passes.extract_v import extract_v, extract_v_backward
from psa_cupy.passes.flash_attention import (
    FlashAttentionBackward,
    FlashAttentionForward,
    flash_attention_backward,
    flash_attention_forward,
)
from psa_cupy.passes.merge_attn import MergeAttnBackward, merge_attn, merge_attn_backward
from psa_cupy.passes.pack_qkv import pack_qkv, pack_qkv_backward
from psa_cupy.passes.psa import PSAForward, psa_backward, psa_forward
from psa_cupy.passes.staged import psa_backward_staged, psa_forward_staged

__version__ = "0.1.0"

__all__ = [
    "FlashAttentionBackward",
    "FlashAttentionForward",
    "KernelError",
    "MergeAttnBackward",
    "PSAForward",
    "attention_map",
    "autograd",
    "cpu_kernels",
    "extract_v",
    "extract_v_backward",
    "flash_attention_backward",
    "flash_attention_forward",
    "merge_attn",
    "merge_attn_backward",
    "pack_qkv",
    "pack_qkv_backward",
    "psa_backward",
    "psa_backward_staged",
    "psa_forward",
    "psa_forward_staged",
    "testing",
]
