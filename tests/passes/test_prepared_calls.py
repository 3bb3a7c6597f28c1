"""A prepared call launches only what fits it; stand-ins for CuPy's arrays show it without a GPU."""

import sys
import types

import numpy as np
import pytest

from psa_cupy.passes.psa import _Prepared, _prepared_key

SHAPE, DTYPE = (2, 4), np.dtype(np.float32)
BYTES = 32
NEW = 1 << 20
"""Where a new array lies."""


class ndarray:
    """What a prepared call uses of a cupy.ndarray."""

    def __init__(self, shape=SHAPE, dtype=DTYPE, *, pointer=NEW, device=0, c_contiguous=True):
        self.shape, self.dtype = shape, dtype
        self.data = types.SimpleNamespace(ptr=pointer, device_id=device)
        self.flags = types.SimpleNamespace(c_contiguous=c_contiguous)


class Subclass(ndarray):
    pass


@pytest.fixture
def runtime(monkeypatch):
    """CuPy's runtime, device 0 the current one."""
    runtime = types.SimpleNamespace(getDevice=lambda: 0)
    cupy = types.SimpleNamespace(ndarray=ndarray, cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return runtime


@pytest.fixture
def launched():
    return []


@pytest.fixture
def prepared(runtime, launched):
    """A call of two inputs and two targets, prepared on device 0."""
    expected = dict.fromkeys(("qkv", "d_out", "first", "second", "unused"), (SHAPE, DTYPE))
    return _Prepared(0, launched.append, expected, ["d_out"], ("first", "second"))


QKV, D_OUT, FIRST, SECOND = (ndarray(pointer=1 << n) for n in range(12, 16))
ADDRESSES = {"qkv": 1 << 12, "d_out": 1 << 13, "first": 1 << 14, "second": 1 << 15}


def test_what_fits_is_launched(prepared, launched):
    assert tuple(prepared.call(QKV, (D_OUT, FIRST, SECOND))) == (FIRST, SECOND)
    assert launched == [ADDRESSES]


@pytest.mark.parametrize("given", [(None, None), (FIRST, None), (None, SECOND)])
def test_targets_that_are_not_given_are_made(prepared, launched, given):
    results = prepared.call(QKV, (D_OUT, *given))
    for result, target, name in zip(results, given, ("first", "second"), strict=True):
        assert result is target or (target is None and result.data.ptr == NEW)
        assert (type(result), result.shape, result.dtype) == (ndarray, SHAPE, DTYPE)
        assert launched[0][name] == result.data.ptr
    assert launched[0].keys() == ADDRESSES.keys()


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(None, id="None"),
        pytest.param(np.zeros(SHAPE, DTYPE), id="NumPy"),
        pytest.param([1.0], id="a list"),
        pytest.param(Subclass(), id="a subclass"),
        pytest.param(ndarray(device=1), id="another device"),
        pytest.param(ndarray(shape=(4, 2)), id="another shape"),
        pytest.param(ndarray(dtype=np.dtype(np.float16)), id="another dtype"),
        pytest.param(ndarray(c_contiguous=False), id="not contiguous"),
        pytest.param(ndarray(pointer=NEW + 4), id="another alignment"),
    ],
)
def test_what_does_not_fit_goes_the_full_way(prepared, launched, other):
    assert prepared.call(QKV, (other, FIRST, SECOND)) is None
    assert prepared.call(QKV, (other, None, None)) is None
    if other is not None:
        assert prepared.call(QKV, (D_OUT, other, SECOND)) is None
        assert prepared.call(QKV, (D_OUT, None, other)) is None
    assert not launched


@pytest.mark.parametrize("changed", [{"pointer": (1 << 12) + 4}, {"c_contiguous": False}])
def test_qkv_of_another_layout_goes_the_full_way(prepared, launched, changed):
    assert prepared.call(ndarray(**changed), (D_OUT, None, None)) is None
    assert not launched


@pytest.mark.parametrize("changed", [{"shape": (4, 2)}, {"dtype": np.dtype(np.float16)}, {"device": 1}])
def test_qkv_of_another_kind_does_not_find_the_call(runtime, changed):
    """The call itself does not look at these."""
    assert _prepared_key("forward", ndarray(**changed), 1, None, None) != _prepared_key(
        "forward", ndarray(), 1, None, None
    )


@pytest.mark.parametrize("other", [None, np.zeros(SHAPE, DTYPE), [1.0], Subclass()])
def test_what_is_no_cupy_array_finds_no_call(runtime, other):
    assert _prepared_key("forward", ndarray(), 1, None, None) is not None
    assert _prepared_key("forward", other, 1, None, None) is None


@pytest.mark.parametrize("name", ADDRESSES)
@pytest.mark.parametrize("shift", [0, 16, -16])
def test_a_target_that_overlaps_goes_the_full_way(prepared, launched, name, shift):
    overlapping = ndarray(pointer=ADDRESSES[name] + shift)
    if name != "first":
        assert prepared.call(QKV, (D_OUT, overlapping, SECOND)) is None
    if name != "second":
        assert prepared.call(QKV, (D_OUT, FIRST, overlapping)) is None
    if name in ("qkv", "d_out"):
        assert prepared.call(QKV, (D_OUT, None, overlapping)) is None
    assert not launched


@pytest.mark.parametrize("name", ADDRESSES)
@pytest.mark.parametrize("shift", [BYTES, -BYTES])
def test_a_target_may_begin_where_another_array_ends(prepared, launched, name, shift):
    beside = ndarray(pointer=ADDRESSES[name] + shift)
    targets = (FIRST, beside) if name == "first" else (beside, SECOND)
    assert tuple(prepared.call(QKV, (D_OUT, *targets))) == targets
    assert len(launched) == 1


def test_inputs_may_overlap_each_other(prepared, launched):
    assert prepared.call(QKV, (QKV, FIRST, SECOND)) is not None
    assert launched == [ADDRESSES | {"d_out": 1 << 12}]


def test_another_current_device_goes_the_full_way(prepared, launched, runtime):
    runtime.getDevice = lambda: 1
    assert prepared.call(QKV, (D_OUT, None, None)) is None
    assert not launched
