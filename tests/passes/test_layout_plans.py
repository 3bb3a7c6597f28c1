"""How the layout passes cut their work: access widths, lanes, parts. Pure arithmetic, no kernel runs."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st

from psa_cupy.geometry import PSAGeometry
from psa_cupy.launching.cpu import DEVICE
from psa_cupy.passes import layout
from psa_cupy.passes.descriptor import PSAProblem
from psa_cupy.passes.extract_v import EXTRACT_V
from psa_cupy.passes.merge_attn import MERGE_ATTN
from psa_cupy.passes.pack_qkv import PACK_QKV
from tests.passes.layout_cases import UNEVEN

BF16, F32, F64 = (np.dtype(t) for t in (ml_dtypes.bfloat16, np.float32, np.float64))


def problem_of(dtype=BF16, tokens=400, key_dim=32, batch=1, num_heads=4, **options) -> PSAProblem:
    return PSAProblem(PSAGeometry(batch, num_heads, key_dim, 2 * key_dim, 1, tokens), dtype, **options)


def launch_of(pass_, direction, problem, device=DEVICE):
    (launch,) = pass_.plan(direction, problem, device).launches
    return launch, dict(launch.kernel.constants)


@pytest.mark.parametrize(("dtype", "elements"), [(BF16, 8), (F32, 4), (F64, 2)], ids=str)
@pytest.mark.parametrize("tokens", [400, 6400])
def test_sixteen_bytes_on_both_sides_at_the_real_shapes(dtype, elements, tokens):
    problem = problem_of(dtype, tokens, batch=64)
    for pass_ in (PACK_QKV, MERGE_ATTN):
        for direction in ("forward", "backward"):
            _, constants = launch_of(pass_, direction, problem)
            assert constants["TOKEN_VECTOR"] == constants["CHANNEL_VECTOR"] == elements
            assert constants["UNROLL"] * elements**2 * dtype.itemsize >= layout.BYTES_IN_FLIGHT
            # a warp's runs are whole 32-byte sectors in both layouts
            lanes = constants["GROUP_LANES"]
            assert lanes * elements * dtype.itemsize >= 32
            assert 32 // lanes * elements * dtype.itemsize >= 32
    assert launch_of(EXTRACT_V, "forward", problem)[1]["VECTOR"] == elements


def test_an_unaligned_address_is_read_element_by_element():
    problem = problem_of(aligned=False)
    _, constants = launch_of(PACK_QKV, "forward", problem)
    assert constants["TOKEN_VECTOR"] == constants["CHANNEL_VECTOR"] == 1
    assert launch_of(EXTRACT_V, "forward", problem)[1]["VECTOR"] == 1


def test_only_the_side_that_is_added_to_is_narrow():
    problem = problem_of(accumulate=True)
    _, constants = launch_of(PACK_QKV, "backward", problem)
    assert (constants["TOKEN_VECTOR"], constants["CHANNEL_VECTOR"]) == (2, 8)
    _, constants = launch_of(MERGE_ATTN, "backward", problem)
    assert (constants["TOKEN_VECTOR"], constants["CHANNEL_VECTOR"]) == (8, 2)
    assert launch_of(EXTRACT_V, "backward", problem)[1]["VECTOR"] == 2


@pytest.mark.parametrize(("dtype", "elements"), [(BF16, 8), (F32, 4), (F64, 1)], ids=str)
@pytest.mark.parametrize("capability", [(9, 0), (12, 0)], ids=str)
def test_newer_gpus_add_sixteen_bytes_at_once(dtype, elements, capability):
    """Not in float64, for which they have no such instruction."""
    problem, device = problem_of(dtype, accumulate=True), replace(DEVICE, capability=capability)
    assert launch_of(PACK_QKV, "backward", problem, device)[1]["TOKEN_VECTOR"] == elements
    assert launch_of(MERGE_ATTN, "backward", problem, device)[1]["CHANNEL_VECTOR"] == elements
    assert launch_of(EXTRACT_V, "backward", problem, device)[1]["VECTOR"] == elements


@given(
    dtype=st.sampled_from((BF16, F32, F64)),
    tokens=st.integers(1, 40_000),
    key_dim=st.integers(1, 128),
    aligned=st.booleans(),
    accumulate=st.booleans(),
)
def test_blocks_cover_every_matrix_exactly(dtype, tokens, key_dim, aligned, accumulate):
    problem = problem_of(dtype, tokens, key_dim, batch=3, aligned=aligned, accumulate=accumulate)
    for pass_, matrices in ((PACK_QKV, 4 * 12), (MERGE_ATTN, 2 * 12)):
        for direction in ("forward", "backward"):
            launch, constants = launch_of(pass_, direction, problem)
            parts, patches_per_part = (int(a) for a in launch.arguments[-2:])
            lanes, unroll = constants["GROUP_LANES"], constants["UNROLL"]
            slices, rest = divmod(key_dim, constants["CHANNEL_VECTOR"] * lanes)
            patches, odd_tokens = divmod(tokens, constants["TOKEN_VECTOR"])
            assert rest == odd_tokens == 0
            assert launch.grid == (matrices * slices * parts, 1, 1)
            assert (parts - 1) * patches_per_part < patches <= parts * patches_per_part
            assert launch.block[0] * unroll >= patches_per_part * lanes
            assert launch.block[0] % 32 == 0
            assert launch.block[0] <= 2 * layout.THREADS


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_uneven_problem_is_uneven(accumulate):
    problem = PSAProblem(UNEVEN.geometry, UNEVEN.dtype, accumulate=accumulate)
    runs = UNEVEN.geometry.value_dim * UNEVEN.geometry.tokens
    for direction in ("forward", "backward"):
        for pass_, length, vector in (
            (PACK_QKV, UNEVEN.geometry.tokens, "TOKEN_VECTOR"),
            (MERGE_ATTN, UNEVEN.geometry.tokens, "TOKEN_VECTOR"),
            (EXTRACT_V, runs, "VECTOR"),
        ):
            launch, constants = launch_of(pass_, direction, problem)
            parts, items_per_part = (int(a) for a in launch.arguments[-2:])
            assert parts > 1
            assert parts * items_per_part > length // constants[vector]


def test_grids_stay_in_one_dimension_at_any_batch():
    problem = problem_of(tokens=400, batch=70_000)
    for pass_, direction in ((PACK_QKV, "forward"), (MERGE_ATTN, "backward"), (EXTRACT_V, "backward")):
        launch, _ = launch_of(pass_, direction, problem)
        assert 65_535 < launch.grid[0] < 2**31
        assert launch.grid[1:] == (1, 1)
