"""The text given to the compilers: constants in front, includes inlined once, lines kept."""

import re

import ml_dtypes
import numpy as np
import pytest

from psa_cupy.launching import source
from psa_cupy.launching.plan import Kernel


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A folder of two files that include a third."""
    (tmp_path / "common.cuh").write_text("// common\nint common;\n")
    (tmp_path / "other.cuh").write_text('#include "common.cuh"\nint other;\n')
    (tmp_path / "pass.cu").write_text('// header\n#include "common.cuh"\n#include "other.cuh"\nint pass;\n')
    source.render.cache_clear()
    source._read.cache_clear()
    monkeypatch.setattr(source, "kernels_folder", lambda: tmp_path)
    yield tmp_path
    source.render.cache_clear()
    source._read.cache_clear()


def test_includes_are_inlined_once(kernels):
    text = source.render(Kernel("pass.cu", "pass"))
    assert text.count("int common;") == 1
    assert '#include "' not in text


def test_lines_keep_their_file_and_number(kernels):
    text = source.render(Kernel("pass.cu", "pass"))
    assert _place_of(text, "int common;") == ("common.cuh", 2)
    assert _place_of(text, "int other;") == ("other.cuh", 2)
    assert _place_of(text, "int pass;") == ("pass.cu", 4)


def _place_of(text, needle):
    file, number = None, 0
    for line in text.splitlines():
        directive = re.match(r'#line (\d+) "(.*)"', line)
        if directive:
            file, number = directive[2], int(directive[1])
            continue
        if line == needle:
            return file, number
        number += 1
    raise AssertionError(needle)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (np.dtype(np.float16), "using X = __half;"),
        (np.dtype(ml_dtypes.bfloat16), "using X = __nv_bfloat16;"),
        (np.dtype(np.float32), "using X = float;"),
        (np.dtype(np.float64), "using X = double;"),
        (True, "constexpr bool X = true;"),
        (32, "constexpr int X = 32;"),
    ],
)
def test_constants(kernels, value, line):
    assert line in source.render(Kernel("pass.cu", "pass", (("X", value),))).splitlines()


def test_unknown_constant_is_a_type_error(kernels):
    with pytest.raises(TypeError, match="constant X is a str"):
        source.render(Kernel("pass.cu", "pass", (("X", "1"),)))


def test_missing_kernels_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "__file__", str(tmp_path / "psa_cupy" / "launching" / "source.py"))
    source.kernels_folder.cache_clear()
    try:
        with pytest.raises(FileNotFoundError, match="reinstall the package"):
            source.kernels_folder()
    finally:
        source.kernels_folder.cache_clear()
