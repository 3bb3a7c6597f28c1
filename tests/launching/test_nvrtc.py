"""Every kernel compiles for every architecture, without a GPU, and spills no more registers than stated."""

import itertools

import numpy as np
import pytest

from psa_cupy.arguments import DTYPES
from psa_cupy.geometry import PSAGeometry
from psa_cupy.passes import PASSES
from psa_cupy.passes.descriptor import PSAProblem
from psa_cupy.passes.psa import PSA

from ..pairwise import pairwise
from . import nvrtc

pytestmark = pytest.mark.skipif(
    not nvrtc.is_available, reason="CuPy (NVRTC) is not installed: the extra nvrtc"
)

REAL_DIMS = ((32, 64), (36, 72))
OTHER_DIMS = ((5, 10), (64, 128), (128, 256))
SPILL_LIMIT = 512
"""Bytes of spill loads and stores that a kernel may have ..."""
WIDEST_SPILL_LIMIT = 4096
"""... and at key_dim 128, value_dim 256, where float64 sums alone fill the registers."""
NO_SPILL_ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
"""Where the fused 16-bit kernels of real models have none (sm_90: 90a, the Hopper kernels too)."""

CALLS = {
    "20x20": ({"height": 20, "width": 20}, {}),
    "19x19, rows not aligned": ({"height": 19, "width": 19}, {"aligned": False}),
    "a long head": ({"height": 20, "width": 320}, {}),
    "a large batch": ({"batch": 64, "height": 20, "width": 20}, {}),
    "added to": ({"height": 20, "width": 20}, {"accumulate": True, "branch": True}),
}
"""Calls that between them need every kernel: what is special of the geometry, and of the problem."""


def problem_of(dims, dtype, call):
    key_dim, value_dim = dims
    sizes, rest = CALLS[call]
    geometry = PSAGeometry(
        **{"batch": 2, "num_heads": 4, "key_dim": key_dim, "value_dim": value_dim, **sizes}
    )
    return PSAProblem(geometry, dtype, key_dim**-0.5, **rest)


def kernels(problem, arch, passes=PASSES):
    """Every kernel that an architecture would be given for a problem, once, with a label."""
    found = {}
    device = nvrtc.DEVICES[arch]
    for descriptor, direction in itertools.product(passes, ("forward", "backward")):
        for variant in descriptor.variants[direction]:
            if variant.supports(problem, device):
                label = f"{descriptor.name} {direction} ({variant.name})"
                found.update((launch.kernel, label) for launch in variant.plan(problem, device).launches)
    return found


def complaints(kernels, arch, spill_limit):
    for kernel, label in kernels.items():
        report = nvrtc.compile_for(kernel, arch)
        if report.spilled_bytes > spill_limit:
            yield f"{label} {kernel.entry}: {report.spilled_bytes} bytes spilled, expected <= {spill_limit}"
        if "C7515" in report.log:
            yield f"{label} {kernel.entry}: ptxas serialises wgmma (C7515)"


def only_two_archs_for_other_dims(arch, dims, **rest):
    return dims in REAL_DIMS or arch in ("sm_80", "sm_90")


EVERY_PAIR = pairwise(
    {
        "arch": list(nvrtc.DEVICES),
        "dims": [*REAL_DIMS, *OTHER_DIMS],
        "dtype": list(DTYPES),
        "call": list(CALLS),
    },
    only_two_archs_for_other_dims,
)


@pytest.mark.parametrize("row", EVERY_PAIR, ids=lambda row: "-".join(map(str, row.values())))
def test_kernels_compile(row):
    found = kernels(problem_of(row["dims"], row["dtype"], row["call"]), row["arch"])
    limit = WIDEST_SPILL_LIMIT if row["dims"] == (128, 256) else SPILL_LIMIT
    assert not list(complaints(found, row["arch"], limit))


FUSED_16_BIT = pairwise(
    {
        "arch": list(NO_SPILL_ARCHS),
        "dims": list(REAL_DIMS),
        "dtype": [dtype for dtype in DTYPES if dtype.itemsize == 2],
        "call": list(CALLS),
    }
)


@pytest.mark.parametrize("row", FUSED_16_BIT, ids=lambda row: "-".join(map(str, row.values())))
def test_fused_16_bit_kernels_of_real_models_do_not_spill(row):
    found = kernels(problem_of(row["dims"], row["dtype"], row["call"]), row["arch"], passes=(PSA,))
    fused = {kernel: label for kernel, label in found.items() if "plain" not in label}
    assert fused
    assert not list(complaints(fused, row["arch"], spill_limit=0))


def test_a_broken_kernel_is_reported_with_its_line(monkeypatch):
    """The compiler names the .cu file and the line in it, not a place in the assembled string."""
    from psa_cupy.launching import source
    from psa_cupy.launching.plan import Kernel

    def broken(file):
        return '// one line\nextern "C" __global__ void k() { nonsense; }\n'

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
