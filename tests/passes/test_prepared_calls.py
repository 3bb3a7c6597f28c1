"""A prepared call launches only what fits it; stand-ins for CuPy's arrays show it without a GPU."""

import sys
import types

import numpy as np
import pytest

from psa_cupy.passes.psa import _Prepared

SHAPE, DTYPE = (2, 4), np.dtype(np.float32)


class ndarray:
    """What a prepared call reads of a cupy.ndarray."""

    def __init__(self, shape=SHAPE, dtype=DTYPE, *, pointer=1 << 12, device=0, c_contiguous=True):
        self.shape, self.dtype = shape, dtype
        self.data = types.SimpleNamespace(ptr=pointer, device_id=device)
        self.flags = types.SimpleNamespace(c_contiguous=c_contiguous)
        self.nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize


@pytest.fixture
def prepared(monkeypatch):
    """A call of two inputs and a target, prepared on device 0; `launched` counts."""
    runtime = types.SimpleNamespace(getDevice=lambda: 0)
    cupy = types.SimpleNamespace(
        ndarray=ndarray,
        empty=lambda shape, dtype: ndarray(shape, dtype, pointer=1 << 20),
        cuda=types.SimpleNamespace(runtime=runtime),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    launched = []
    where = types.SimpleNamespace(launch=lambda plan, addresses: launched.append(addresses))
    specification = (SHAPE, DTYPE)
    call = _Prepared(0, where, None, {"d_out": specification, "qkv": specification}, {"d_qkv": specification})
    call.launched, call.runtime = launched, runtime
    return call


GOOD = ndarray(pointer=1 << 14)


def test_what_fits_is_launched(prepared):
    target = ndarray(pointer=1 << 16)
    assert prepared.call((ndarray(), GOOD), (target,)) == (target,)
    assert prepared.launched == [{"d_out": 1 << 12, "qkv": 1 << 14, "d_qkv": 1 << 16}]
    assert prepared.call((ndarray(), GOOD), (None,))[0].data.ptr == 1 << 20


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(None, id="None"),
        pytest.param(np.zeros(SHAPE, DTYPE), id="NumPy"),
        pytest.param([1.0], id="a list"),
        pytest.param(type("Subclass", (ndarray,), {})(), id="a subclass"),
        pytest.param(ndarray(device=1), id="another device"),
        pytest.param(ndarray(shape=(4, 2)), id="another shape"),
        pytest.param(ndarray(dtype=np.dtype(np.float16)), id="another dtype"),
        pytest.param(ndarray(c_contiguous=False), id="not contiguous"),
        pytest.param(ndarray(pointer=(1 << 12) + 4), id="another alignment"),
    ],
)
def test_what_does_not_fit_goes_the_full_way(prepared, other):
    assert prepared.call((other, GOOD), (None,)) is None
    assert prepared.call((GOOD, other), (None,)) is None
    if other is not None:
        assert prepared.call((ndarray(), GOOD), (other,)) is None
    assert not prepared.launched


@pytest.mark.parametrize("pointer", [1 << 14, (1 << 14) + 16, (1 << 12) - 16])
def test_a_target_that_overlaps_goes_the_full_way(prepared, pointer):
    assert prepared.call((ndarray(), GOOD), (ndarray(pointer=pointer),)) is None
    assert not prepared.launched


def test_another_current_device_goes_the_full_way(prepared):
    prepared.runtime.getDevice = lambda: 1
    assert prepared.call((ndarray(), GOOD), (None,)) is None
    assert not prepared.launched
