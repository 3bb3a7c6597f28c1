"""The compiler and its cache."""

import pathlib
import shutil
import subprocess
import sys

import pytest

from psa_cupy import __main__ as command_line
from psa_cupy.launching import cpu
from psa_cupy.launching.cpu.compile import build_kernels, build_runtime, load
from tests.launching.cpu.texts import HEADERS, needs_compiler

TEXT = HEADERS + 'extern "C" __global__ void kernel(float* y) { y[0] = 1; }\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder, save the runtime, which takes longest to build."""
    if cpu.compiler():
        shutil.copy(build_runtime(), tmp_path)
    monkeypatch.setenv("PSA_CUPY_CACHE_DIR", str(tmp_path))
    return tmp_path


def libraries(folder):
    return sorted(folder.glob("*.so"))


def test_the_cache_folder(monkeypatch):
    monkeypatch.delenv("PSA_CUPY_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
    assert cpu.cache_folder() == pathlib.Path("/some/where/psa_cupy")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cpu.cache_folder() == pathlib.Path.home() / ".cache/psa_cupy"
    monkeypatch.setenv("PSA_CUPY_CACHE_DIR", "/else/where")
    assert cpu.cache_folder() == pathlib.Path("/else/where")
    monkeypatch.setenv("PSA_CUPY_CACHE_DIR", ".")  # a library named without a folder would not be found
    assert cpu.cache_folder() == pathlib.Path.cwd()
    monkeypatch.setenv("PSA_CUPY_CACHE_DIR", "~no-such-user/kernels")
    with pytest.raises(RuntimeError, match="PSA_CUPY_CACHE_DIR"):
        cpu.cache_folder()


def test_the_compiler_named_in_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "  ")
    blank = cpu.compiler()
    monkeypatch.delenv("CXX")
    assert blank == cpu.compiler()
    monkeypatch.setenv("CXX", "g++ 'x")
    with pytest.raises(ValueError, match='environment variable CXX is "g\\+\\+ \'x"'):
        cpu.compiler()
    assert command_line.main(["info"]) == 0  # the bug report has it
    assert "CXX" in capsys.readouterr().out


def test_without_a_compiler_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cpu.compiler() is None
    with pytest.raises(RuntimeError, match=r"needs Linux and a C\+\+17 compiler .* apt install g\+\+"):
        build_kernels(TEXT, False)


@needs_compiler
@pytest.mark.parametrize("place", ["/proc/none", "a file", "no home"])
def test_a_cache_folder_that_cannot_be_is_explained(place, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if place == "no home":
        monkeypatch.delenv("PSA_CUPY_CACHE_DIR", raising=False)
        monkeypatch.setattr("os.path.expanduser", lambda path: path)
    else:
        (tmp_path / "a file").touch()
        monkeypatch.setenv("PSA_CUPY_CACHE_DIR", str(tmp_path / place))
    with pytest.raises(RuntimeError, match=r"cpu_kernels: .* environment variable PSA_CUPY_CACHE_DIR"):
        build_kernels(TEXT, False)
    assert command_line.main(["info"]) == 0


@needs_compiler
def test_a_text_is_compiled_once(folder):
    path = build_kernels(TEXT, False)
    assert path.parent == folder and build_kernels(TEXT, False) == path
    written = path.stat().st_mtime_ns
    assert build_kernels(TEXT, False) == path and path.stat().st_mtime_ns == written
    assert {file.suffix for file in folder.iterdir()} == {".so"}, "nothing else is left behind"


@needs_compiler
def test_text_mode_and_compiler_are_in_the_key(folder, monkeypatch):
    paths = [build_kernels(TEXT, False), build_kernels(TEXT, True), build_kernels(TEXT + "//", False)]
    monkeypatch.setenv("CXX", f"{cpu.compiler()} -DOTHER")
    paths.append(build_kernels(TEXT, False))
    assert len(set(paths)) == 4


@needs_compiler
@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:5000], lambda b: b[:-1] + b"?"])
def test_a_damaged_file_is_built_again(folder, damage):
    path = build_kernels(TEXT, False)
    size = path.stat().st_size
    path.write_bytes(damage(path.read_bytes()))
    assert load(build_kernels, TEXT, False).cuda_on_cpu_call_kernel
    assert path.stat().st_size == size


@needs_compiler
def test_a_file_that_does_not_load_is_built_again(folder):
    build_kernels(TEXT, False)
    bad = folder / "bad.so"
    bad.write_bytes(b"no library")
    answers = iter([bad, build_kernels(TEXT, False)])
    assert load(lambda: next(answers)).cuda_on_cpu_call_kernel
    assert not bad.exists()


@needs_compiler
def test_what_the_compiler_says_names_the_kernels_line(folder):
    with pytest.raises(RuntimeError, match=r"does not accept a kernel's text:(.|\n)*test\.cu:2:.*nonsense"):
        build_kernels(HEADERS + 'extern "C" __global__ void kernel(float* y) {\n    nonsense;\n}\n', False)


@needs_compiler
def test_a_shared_declaration_that_cannot_be_read_stops_the_compiler(folder):
    text = 'extern "C" __global__ void kernel(float* y) {\n    __shared__ float x = 1;\n}\n'
    with pytest.raises(RuntimeError, match=r"expected: __shared__ type name(.|\n)*test\.cu:2:"):
        build_kernels(HEADERS + text, False)


@needs_compiler
def test_processes_build_one_text_at_once(folder):
    program = "from psa_cupy.launching.cpu.compile import build_kernels, load\n"
    program += f"load(build_kernels, {TEXT!r}, False).cuda_on_cpu_call_kernel"
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(libraries(folder)) == 2  # the runtime, and the text once


@needs_compiler
def test_fibers_without_the_assembler(folder, monkeypatch):
    """Other processors switch by ucontext: a whole process of it here."""
    program = """if True:
        import numpy as np
        from psa_cupy.launching import cpu
        from tests.launching.cpu.texts import run_text
        text = '''extern "C" __global__ void kernel(float* x, int past) {
            __shared__ float tile[64];
            tile[threadIdx.x] = x[threadIdx.x + past];
            __syncthreads();
            x[threadIdx.x] = tile[63 - threadIdx.x] + __shfl_xor_sync(~0u, threadIdx.x, 1);
        }'''
        for checked in (False, True):
            x = run_text(text, np.int32(0), block=64, checked=checked, x=np.arange(64, dtype=np.float32))
            assert np.array_equal(x, np.arange(64)[::-1] + (np.arange(64) ^ 1)), x
            try:
                run_text(text, np.int32(1), block=64, checked=checked, x=x)
            except cpu.KernelError as error:
                assert "read out of bounds: element 64 of x" in str(error), error
                assert "at test.cu:3" in str(error), error
            else:
                raise AssertionError("not seen")
    """
    monkeypatch.setenv("CXX", f"{cpu.compiler()} -DCUDA_ON_CPU_UCONTEXT")
    subprocess.run([sys.executable, "-c", program], check=True)


@needs_compiler
def test_precompiled_kernels_are_found(folder, monkeypatch):
    from psa_cupy.launching import source
    from psa_cupy.launching.plan import Kernel

    monkeypatch.setattr(source, "render", lambda kernel: TEXT + f"// {kernel.entry}\n")
    cpu.precompile([Kernel("test.cu", entry) for entry in "aba"])
    built = libraries(folder)
    assert len(built) == 3  # the runtime, a and b
    assert {build_kernels(TEXT + f"// {entry}\n", False) for entry in "ab"} < set(built)
    assert libraries(folder) == built
