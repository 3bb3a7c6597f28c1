"""Importing psa_cupy touches no CUDA, starts no compiler and does not need CuPy; the kernels are found."""

import importlib.metadata
import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest

import psa_cupy
from psa_cupy.launching import cpu

ROOT = Path(__file__).parents[1]


def run_python(code, *, path, cwd):
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=cwd, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_import_is_light(tmp_path):
    code = """
import subprocess, sys
sys.modules["cupy"] = None            # an import of CuPy would raise
def refuse(*a, **k): raise RuntimeError("a process was started")
subprocess.Popen = refuse
import numpy as np, psa_cupy
libraries = open("/proc/self/maps").read() if sys.platform == "linux" else ""
assert "libcuda" not in libraries and "libnvrtc" not in libraries
out, lse = psa_cupy.psa_forward(np.ones((1, 16, 2, 3), np.float32), 2)
print(out.shape)
"""
    assert run_python(code, path=ROOT, cwd=tmp_path) == "(1, 8, 2, 3)"


FIND = "from psa_cupy.launching.source import kernels_folder; print(kernels_folder())"


def test_a_checkout_finds_its_kernels(tmp_path):
    assert run_python(FIND, path=ROOT, cwd=tmp_path) == str(ROOT / "kernels_cu")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


def test_a_wheel_finds_its_kernels(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    found = run_python(FIND, path=tmp_path / "site", cwd=tmp_path)
    assert found == str(tmp_path / "site" / "psa_cupy" / "kernels_cu")


def test_a_wheel_holds_every_kernel_and_runs(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    shipped = {f.name for f in (tmp_path / "site" / "psa_cupy" / "kernels_cu").iterdir()}
    assert {f.name for f in (ROOT / "kernels_cu").iterdir()} <= shipped
    code = """
import numpy as np, psa_cupy
print(psa_cupy.psa_forward(np.ones((1, 16, 2, 3), np.float32), 2).lse.shape)
"""
    assert run_python(code, path=tmp_path / "site", cwd=tmp_path) == "(1, 2, 6)"


def is_installed():
    try:
        importlib.metadata.distribution("psa-cupy")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.skipif(not is_installed(), reason="psa-cupy is not installed (in CI it is, in editable form)")
def test_the_installed_package_finds_its_kernels():
    """From outside the checkout's folder."""
    assert run_python(FIND, path="", cwd="/").endswith("kernels_cu")


def test_the_types_of_results_and_errors_are_public():
    assert psa_cupy.__all__ == sorted(psa_cupy.__all__)
    qkv = np.ones((1, 16, 2, 3), np.float32)
    assert type(psa_cupy.psa_forward(qkv, 2)) is psa_cupy.PSAForward
    q, k, v, _ = psa_cupy.pack_qkv(qkv, 2)
    o, lse = attention = psa_cupy.flash_attention_forward(q, k, v)
    assert type(attention) is psa_cupy.FlashAttentionForward
    gradients = psa_cupy.flash_attention_backward(o, q, k, v, o, lse)
    assert type(gradients) is psa_cupy.FlashAttentionBackward
    d_out = np.ones((1, 8, 2, 3), np.float32)
    assert type(psa_cupy.merge_attn_backward(d_out, 2)) is psa_cupy.MergeAttnBackward
    assert psa_cupy.KernelError is cpu.KernelError


def test_numpy_arrays_work_while_another_thread_is_importing_cupy(monkeypatch):
    """The module is in sys.modules then, and empty."""
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    qkv = np.ones((1, 16, 2, 3), np.float32)
    out, lse = psa_cupy.psa_forward(qkv, 2)
    assert psa_cupy.psa_backward(out, qkv, out, lse, 2).shape == qkv.shape
