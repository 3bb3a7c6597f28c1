"""Attention's operands as views of NumPy and CuPy arrays, and the tiles to take them in.

An operand is *tokens first*, (BH, tokens, channels): for an NCHW array a transposed view, since one head's
channels are adjacent. Shared by the computations in array code: reference, testing and attention_map.
"""

from __future__ import annotations

from collections.abc import Iterator

_ROWS_OF_A_HEAD = 64
"""Rows of scores as large as a head's keys and values: with few queries, heads are what fills memory."""


def heads_of(nchw, num_heads: int):
    """(B, num_heads*c, H, W) as (BH, c, N)."""
    batch, channels, height, width = nchw.shape
    return nchw.reshape(batch * num_heads, channels // num_heads, height * width)


def tokens_first(nchw, num_heads: int):
    """(B, num_heads*c, H, W) as (BH, N, c)."""
    return heads_of(nchw, num_heads).transpose(0, 2, 1)


def split_qkv(qkv, num_heads: int, key_dim: int | None = None):
    """Q, K and V of every head, tokens first; key_dim None: a quarter of a head's channels."""
    channels = tokens_first(qkv, num_heads)
    if key_dim is None:
        key_dim = channels.shape[2] // 4
    return channels[..., :key_dim], channels[..., key_dim : 2 * key_dim], channels[..., 2 * key_dim :]


def tiles(bh: int, query_count: int, key_count: int, most_scores: int) -> Iterator[tuple[slice, list[slice]]]:
    """Slices of heads, each with the slices of queries to take in turn.

    A tile holds whole rows of scores: several heads', one head's, or some of one head's rows, at most
    `most_scores` in all unless one row has more.
    """
    key_count, all_rows = max(1, key_count), max(1, query_count)
    rows = min(max(1, most_scores // key_count), all_rows)
    rows_in_memory = max(rows, _ROWS_OF_A_HEAD)
    heads = max(1, most_scores // (rows_in_memory * key_count)) if rows == all_rows else 1
    row_slices = [slice(start, start + rows) for start in range(0, query_count, rows)]
    for start in range(0, bh, heads):
        yield slice(start, start + heads), row_slices
