"""The examples in docstrings run, and every public function and class has one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import psa_cupy

MODULES = [
    module.name
    for module in pkgutil.walk_packages(psa_cupy.__path__, "psa_cupy.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.startswith("psa_cupy"):
            raise
        pytest.skip(f"{name} needs {error.name}")  # the modules that run kernels on a GPU
    assert doctest.testmod(module).failed == 0


def public_functions():
    for namespace in (psa_cupy, psa_cupy.testing, psa_cupy.autograd):
        for name in namespace.__all__:
            value = getattr(namespace, name)
            if inspect.isfunction(value):
                yield pytest.param(value, id=f"{namespace.__name__}.{name}")


@pytest.mark.parametrize("function", list(public_functions()))
def test_public_functions_are_documented(function):
    text = inspect.getdoc(function) or ""
    assert ">>> " in text, "no example"
    for parameter in inspect.signature(function).parameters:
        assert parameter in text, f"{parameter} is not described"
