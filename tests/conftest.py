"""What all tests share: one BLAS thread, Hypothesis profiles, executors, skips of GPU tests with a reason."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported, here and in xdist's workers

import pytest
from hypothesis import HealthCheck, settings

from . import pairwise
from .executors import EXECUTORS, why_no_gpu

_common = {
    "deadline": None,
    "print_blob": True,
    # An executor is one fixture for all examples of a test: it only holds memory to check.
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}
settings.register_profile("ci", derandomize=True, max_examples=20, **_common)
settings.register_profile("exhaustive", derandomize=False, max_examples=1000, **_common)
settings.load_profile("ci")


def pytest_configure(config):
    """`--hypothesis-profile=exhaustive` also makes whole products of the pairwise tables."""
    pairwise.EXHAUSTIVE = config.getoption("--hypothesis-profile", default=None) == "exhaustive"


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is not None and (reason := why_no_gpu()):
        pytest.skip(reason)


@pytest.fixture(params=[pytest.param(e, id=e.name, marks=e.marks) for e in EXECUTORS.values()])
def executor(request):
    """Who computes: the reference, the kernels executed on the CPU (plain, checked) or a GPU.

    A test that is not for all of them says `@executors("cpu", "gpu")`.
    """
    executor = request.param()
    if reason := executor.why_not():
        pytest.skip(reason)
    yield executor
    executor.check_guards()
