"""Arrays of NumPy here and of CuPy on a GPU, for tests that need no kernels."""

import gc

import numpy as np
import pytest

from psa_cupy.arguments import is_cupy


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    return pytest.importorskip(request.param)


@pytest.fixture
def no_gc():
    """Memory must come back by reference counts alone: a cycle would keep it until a collection."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def to_numpy(array):
    return array.get() if is_cupy(array) else np.asarray(array)


def share_memory(a, b) -> bool:
    if not is_cupy(a):
        return np.shares_memory(a, b)
    return a.data.ptr < b.data.ptr + b.nbytes and b.data.ptr < a.data.ptr + a.nbytes
