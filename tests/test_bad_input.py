"""Bad input gets a clear error before any launch, and nothing the caller owns is changed."""

import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import psa_cupy

from . import wrong_calls
from .wrong_calls import WRONG_CALLS, complaint


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_call(name):
    assert complaint(WRONG_CALLS[name]) is None


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_call_with_cpu_kernels(name):
    """The same answers on the way to the kernels; none of these calls may compile or run one."""
    with psa_cupy.cpu_kernels():
        assert complaint(WRONG_CALLS[name]) is None


def test_table_is_large_enough():
    assert len(WRONG_CALLS) >= 40


def test_nothing_is_changed():
    arrays = {k: v for k, v in vars(wrong_calls).items() if isinstance(v, np.ndarray)}
    assert len(arrays) == 5
    for wrong in WRONG_CALLS.values():
        complaint(wrong)
    for name, array in arrays.items():
        assert not array.any(), name


def test_checks_stand_under_python_o():
    """`python -O` drops asserts: the checks must not be asserts."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-O", "-m", "tests.wrong_calls"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mix_of_numpy_and_cupy_is_a_type_error(monkeypatch):
    """CuPy arrays are recognised through sys.modules; a stand-in shows it without a GPU."""

    class ndarray:
        device = types.SimpleNamespace(id=0)

    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=ndarray))
    with pytest.raises(TypeError) as caught:
        psa_cupy.psa_backward(ndarray(), wrong_calls.QKV, wrong_calls.OUT, wrong_calls.LSE, 2)
    assert str(caught.value) == (
        "psa_backward: arrays must be all NumPy or all CuPy, got a mix: "
        "d_out is CuPy, qkv is NumPy, out is NumPy, lse is NumPy"
    )


def test_arrays_on_two_devices_are_a_value_error(monkeypatch):
    class ndarray:
        def __init__(self, device):
            self.device = types.SimpleNamespace(id=device)

    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=ndarray))
    with pytest.raises(ValueError) as caught:
        psa_cupy.merge_attn(ndarray(0), ndarray(1), 2, 2, 3)
    assert str(caught.value) == "merge_attn: arrays must be on one device, got o_lo on 0, o_hi on 1"


def test_an_unaligned_cupy_array_is_a_value_error(monkeypatch):
    """CUDA would end the process's context; a stand-in shows the check without a GPU."""

    class ndarray:
        device = types.SimpleNamespace(id=0)
        dtype = np.dtype(np.float32)
        data = types.SimpleNamespace(ptr=4098)

    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=ndarray))
    with pytest.raises(ValueError) as caught:
        psa_cupy.extract_v(ndarray(), 2)
    assert str(caught.value) == "extract_v: qkv is not aligned, expected elements at multiples of their size"


def test_cpu_kernels_without_a_compiler_say_what_to_install(tmp_path):
    """In a process of its own: here, a kernel that another test compiled needs no compiler."""
    code = """
import numpy as np, psa_cupy
with psa_cupy.cpu_kernels():
    psa_cupy.psa_forward(np.ones((1, 16, 2, 3), np.float32), 2)
"""
    environment = {**os.environ, "PATH": "/nonexistent", "PSA_CUPY_CACHE_DIR": str(tmp_path)}
    environment.pop("CXX", None)
    command = [sys.executable, "-c", code]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "install g++" in done.stderr.splitlines()[-1], done.stderr
