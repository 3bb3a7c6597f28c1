"""Every kernel compiles for every architecture, without a GPU, and spills no more registers than stated."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from psa_cupy.arguments import DTYPES
from psa_cupy.geometry import PSAGeometry
from psa_cupy.passes import PASSES
from psa_cupy.passes.descriptor import PSAProblem

from . import nvrtc

pytestmark = pytest.mark.skipif(not nvrtc.is_available, reason="CuPy (NVRTC) is not installed: the extra nvrtc")

REAL_DIMS = ((32, 64), (36, 72))
OTHER_DIMS = ((5, 10), (64, 128), (128, 256))
OTHER_ARCHS = ("sm_80", "sm_90")
SPILL_LIMIT = 256
"""Bytes of spill loads and stores that a kernel may have; the 16-bit kernels of real models: none."""
NO_SPILL_ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")


def problems(dims, dtype):
    """Problems that between them need every kernel: aligned and not, short and long, every backward."""
    key_dim, value_dim = dims
    small = PSAGeometry(2, 4, key_dim, value_dim, 20, 20)
    for geometry in (small, replace(small, height=19, width=19), replace(small, batch=64), replace(small, height=320)):
        aligned = geometry.tokens % 8 == 0
        yield PSAProblem(geometry, dtype, key_dim**-0.5, aligned)
    yield PSAProblem(small, dtype, key_dim**-0.5, accumulate=True, branch=True)


def kernels(dims, dtype, arch):
    """Every kernel that an architecture would be given for these dims and dtype, once, with a label."""
    found = {}
    device = nvrtc.DEVICES[arch]
    for descriptor, direction, problem in itertools.product(
        PASSES, ("forward", "backward"), problems(dims, dtype)
    ):
        for variant in descriptor.variants[direction]:
            if not variant.supports(problem, device):
                continue
            for launch in variant.plan(problem, device).launches:
                found.setdefault(launch.kernel, f"{descriptor.name} {direction} ({variant.name})")
    return found


CASES = [
    *itertools.product(nvrtc.DEVICES, REAL_DIMS, DTYPES),
    *itertools.product(OTHER_ARCHS, OTHER_DIMS, DTYPES),
]


@pytest.mark.parametrize(("arch", "dims", "dtype"), CASES, ids=lambda v: getattr(v, "name", str(v)))
def test_kernels_compile_without_spilling(arch, dims, dtype):
    spills_allowed = not (dims in REAL_DIMS and dtype.itemsize == 2 and arch in NO_SPILL_ARCHS)
    complaints = []
    for kernel, label in kernels(dims, dtype, arch).items():
        report = nvrtc.compile_for(kernel, arch)
        limit = SPILL_LIMIT if spills_allowed else 0
        if report.spilled_bytes > limit:
            complaints.append(f"{label} {kernel.entry}: {report.spilled_bytes} bytes spilled, expected <= {limit}")
        if "C7515" in report.log:
            complaints.append(f"{label} {kernel.entry}: ptxas serialises wgmma (C7515)")
    assert not complaints, "\n".join(complaints)


def test_a_broken_kernel_is_reported_with_its_line(monkeypatch):
    """The compiler names the .cu file and the line in it, not a place in the assembled string."""
    from psa_cupy.launching import source
    from psa_cupy.launching.plan import Kernel

    def broken(file):
        return "// one line\nextern \"C\" __global__ void k() { nonsense; }\n"

    monkeypatch.setattr(source, "_read", broken)
    with pytest.raises(AssertionError, match=r'broken\.cu"?\(2\)'):
        nvrtc.compile_for(Kernel("broken.cu", "k", (("T", np.dtype(np.float32)),)), "sm_80")


def test_the_sum_of_spills_is_read_from_the_log():
    """A kernel forced to spill must be seen to."""
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_80'\n"
        "    0 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\n"
    )
    assert "spill" in nvrtc._of_entry(log, "k")
