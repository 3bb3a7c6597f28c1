"""The passes, one file each, and `PASSES`: what each says of itself (see `descriptor`)."""

from psa_cupy.passes.extract_v import EXTRACT_V
from psa_cupy.passes.flash_attention import FLASH_ATTENTION
from psa_cupy.passes.merge_attn import MERGE_ATTN
from psa_cupy.passes.pack_qkv import PACK_QKV
from psa_cupy.passes.psa import PSA

PASSES = (PACK_QKV, FLASH_ATTENTION, MERGE_ATTN, EXTRACT_V, PSA)
"""One descriptor per pass."""

__all__ = ["PASSES"]
