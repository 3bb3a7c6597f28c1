"""The scaffolding itself: guards and poison show what they are for, and tables hold every pair."""

import itertools

import numpy as np
import pytest

from psa_cupy import launching

from . import pairwise
from .executors import EXECUTORS, Executor, executors
from .strategies import DTYPES, IMAGES, normal


@executors("reference", "gpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_arrays_are_placed_as_asked(executor, dtype, offset):
    original = normal((3, 5), dtype, 0)
    array = executor.array(original, offset=offset)
    assert isinstance(array, executor.xp.ndarray) and array.flags.c_contiguous
    assert executor._address(array) % 256 == offset * dtype.itemsize
    assert np.array_equal(executor.to_numpy(array), original)
    empty = executor.to_numpy(executor.empty((3, 5), dtype, offset=offset))
    assert np.isnan(empty.astype(np.float64)).all()


@pytest.mark.parametrize(("position", "side"), [(-1, "before"), (4, "behind")])
def test_a_write_outside_is_found(position, side):
    executor = Executor()
    array = executor.array(np.zeros((2, 2)))

    def overrun():
        memory = np.lib.stride_tricks.as_strided(array.base.view(), array.base.shape)
        start = array.ctypes.data - array.base.ctypes.data
        memory[start + 8 * position : start + 8 * position + 8] = 0

    with pytest.raises(pytest.fail.Exception, match=f"float64 array of shape .* written {side} it"):
        executor.run(overrun)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_what_the_library_allocates_is_poisoned(name):
    executor = EXECUTORS[name]()
    where = launching.place("test", x=np.zeros(1))
    with executor.context():
        array = where.empty((4, 4), np.dtype(np.float32))
    assert np.isnan(array).all()
    assert any(memory is array.base for memory, *_ in executor._guarded)
    assert where.empty is launching.OnCpu.empty


def test_every_pair_is_in_the_table():
    factors = {"a": (1, 2, 3, 4), "b": "xyz", "c": (True, False), "d": DTYPES}

    def allowed(a, b, **others):
        return not (a == 4 and b != "x")

    table = pairwise.pairwise(factors, allowed)
    whole = [dict(zip(factors, v, strict=True)) for v in itertools.product(*factors.values())]
    whole = [row for row in whole if allowed(**row)]
    for pair in itertools.combinations(factors, 2):
        assert {tuple(row[f] for f in pair) for row in table} == {
            tuple(row[f] for f in pair) for row in whole
        }
    assert all(row in whole for row in table) and len(table) < len(whole) / 3
    assert table == pairwise.pairwise(factors, allowed)


def test_tables_with_one_factor_or_no_rows():
    assert pairwise.pairwise({"a": (1, 2)}) == [{"a": 1}, {"a": 2}]
    assert pairwise.pairwise({"a": (1, 2), "b": (3,)}, lambda **row: False) == []


def test_images_have_their_tokens():
    assert all(height * width == tokens for tokens, (height, width) in IMAGES.items())
