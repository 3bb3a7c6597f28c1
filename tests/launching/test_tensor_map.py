"""Tensor maps: what the driver is asked, what is refused, and (on a GPU) that the driver takes ours."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from psa_cupy.launching import tensor_map
from psa_cupy.launching.plan import TensorMap

MAP = TensorMap("qkv", offset=3200, dims=(400, 32, 8), strides=(400, 51200), box=(64, 32, 1))
ADDRESS = 1 << 20
FLOAT16, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


class Driver:
    """Stands in for cuTensorMapEncodeTiled: notes its arguments and answers with a status."""

    def __init__(self, status=0):
        self.calls, self.status = [], status

    def __call__(self, result, data_type, rank, address, dims, strides, box, steps, *modes):
        self.calls.append(
            {
                "result": result.value,
                "data_type": data_type,
                "rank": rank.value,
                "address": address.value,
                "dims": tuple(dims),
                "strides": tuple(strides),
                "box": tuple(box),
                "steps": tuple(steps),
                "modes": modes,
            }
        )
        return self.status


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(tensor_map, "_driver_function", lambda: driver)
    return driver


def test_arguments_of_the_driver(driver):
    assert len(tensor_map.encode(MAP, ADDRESS, BFLOAT16)) == tensor_map.BYTES
    (call,) = driver.calls
    assert call["result"] % 64 == 0
    assert call["data_type"] == 9
    assert call["rank"] == 3
    assert call["address"] == ADDRESS + 2 * MAP.offset
    assert call["dims"] == MAP.dims
    assert call["strides"] == (800, 102400)
    assert call["box"] == MAP.box
    assert call["steps"] == (1, 1, 1)
    assert call["modes"] == (0, 3, 3, 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_other_dtypes_are_a_type_error(driver, dtype):
    with pytest.raises(TypeError, match="dtype is float"):
        tensor_map.encode(MAP, ADDRESS, np.dtype(dtype))


@pytest.mark.parametrize(
    ("change", "address", "message"),
    [
        ({}, ADDRESS + 8, "expected a multiple of 16 bytes"),
        ({"offset": 4}, ADDRESS, "expected a multiple of 16 bytes"),
        ({"strides": (361, 51200)}, ADDRESS, "stride of 722 bytes"),
        ({"strides": (400, 2**39)}, ADDRESS, "below 2"),
        ({"box": (32, 32, 1)}, ADDRESS, "rows of 128 bytes"),
        ({"box": (64, 257, 1)}, ADDRESS, "1 to 256"),
        ({"dims": (400, 32, 0)}, ADDRESS, "dims"),
    ],
)
def test_what_tma_cannot_do_is_a_value_error(driver, change, address, message):
    with pytest.raises(ValueError, match=message):
        tensor_map.encode(dataclasses.replace(MAP, **change), address, FLOAT16)
    assert driver.calls == []


def test_refusal_of_the_driver_is_an_error(driver):
    driver.status = 1
    with pytest.raises(RuntimeError, match="CUresult 1"):
        tensor_map.encode(MAP, ADDRESS, FLOAT16)


def test_without_a_driver(monkeypatch):
    monkeypatch.setattr(tensor_map, "_driver_function", lambda: None)
    assert not tensor_map.available()
    with pytest.raises(RuntimeError, match="no CUDA driver"):
        tensor_map.encode(MAP, ADDRESS, FLOAT16)


@pytest.mark.gpu
def test_the_driver_takes_our_maps():
    cupy = pytest.importorskip("cupy")
    assert tensor_map.available()
    array = cupy.zeros(MAP.offset + MAP.strides[1] * MAP.dims[2], np.float16)
    encoded = {tensor_map.encode(MAP, array.data.ptr, dtype) for dtype in (FLOAT16, BFLOAT16)}
    assert len(encoded) == 2
    assert all(len(e) == 128 and any(e) for e in encoded)
