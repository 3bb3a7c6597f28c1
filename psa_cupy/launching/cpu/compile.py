"""CUDA C text to a shared library of the CPU, by the machine's C++ compiler; kept in a cache folder."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator

_HERE = pathlib.Path(__file__).resolve().parent
_RUNTIME_SOURCES = sorted((_HERE / "runtime").glob("*.cpp"))

_COMMON = (
    *("-std=c++17", "-O2", "-fPIC", "-w"),
    # Line tables, in the plain form from which addr2line also tells calls that were inlined (with GCC's newer
    # forms binutils 2.40 loses the .cu file's name).
    *("-g1", "-gdwarf-4", "-gno-statement-frontiers", "-gno-variable-location-views"),
    # Kernels reinterpret memory freely, as CUDA lets them; errno and traps are nothing that they look at.
    *("-fno-strict-aliasing", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    # Faults leave by longjmp, and find their place by return addresses: no tail calls, no checks of either.
    *("-U_FORTIFY_SOURCE", "-fno-stack-protector", "-fno-optimize-sibling-calls"),
    # A kernel's statics are its own: without this, equal templates in two libraries share them.
    "-fno-gnu-unique",
)
_CHECKED = (
    *("-DCUDA_ON_CPU_CHECKED", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"),
    "-fsanitize=alignment,null,bounds,integer-divide-by-zero,shift-exponent",
)

_HOW_TO_INSTALL = (
    "needs Linux and a C++17 compiler that takes GCC's options; install one (Debian and Ubuntu: "
    "apt install g++; Fedora: dnf install gcc-c++; conda: conda install gxx) or name it in the "
    "environment variable CXX"
)

_NAME_ANOTHER = "name a folder in the environment variable PSA_CUPY_CACHE_DIR"


def compiler() -> str | None:
    """The C++ compiler as a command: the environment's CXX, else g++, else c++.

    None if there is none, or the system is not Linux: signals, guard pages and libraries are used its way.

    Raises
    ------
    ValueError
        If CXX is no command.

    """
    if sys.platform != "linux":
        return None
    for command in [os.environ["CXX"]] if os.environ.get("CXX", "").strip() else ["g++", "c++"]:
        try:
            program, *options = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"psa_cupy: the environment variable CXX is {command!r}: {error}") from None
        if path := shutil.which(program):
            return shlex.join([path, *options])
    return None


def cache_folder() -> pathlib.Path:
    """Where compiled kernels are kept: PSA_CUPY_CACHE_DIR, else psa_cupy in the user's cache folder.

    Raises
    ------
    RuntimeError
        If neither is set and the user has no home. (Temporary folders are no way out: what is loaded from
        them could be another user's.)

    """
    chosen = os.environ.get("PSA_CUPY_CACHE_DIR")
    users = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = pathlib.Path(chosen) if chosen else pathlib.Path(users, "psa_cupy")
        return folder.expanduser().absolute()  # a library's name without a folder is looked for elsewhere
    except RuntimeError:
        raise RuntimeError(f"cpu_kernels: no home folder for the cache of kernels; {_NAME_ANOTHER}") from None


def build_kernels(text: str, checked: bool) -> pathlib.Path:
    """The shared library of a CUDA C text, built if the cache has none: a door to each of its kernels.

    Raises
    ------
    RuntimeError
        If there is no C++ compiler, it does not accept the text (the message holds what it said), or the
        cache folder cannot be written to.

    """
    runtime = build_runtime()
    flags = (*_flags(), *(_CHECKED if checked else ()), "-include", "cuda_on_cpu.h")
    links = ("-Wl,-Bsymbolic", "-Wl,-rpath,$ORIGIN", str(runtime))
    kind = "checked" if checked else "kernels"
    return _build(kind, as_cpp(text), flags, links, _key(text, flags, runtime.name))


@functools.cache
def _runtime_text() -> str:
    return "".join(f'#include "{source}"\n' for source in _RUNTIME_SOURCES)


def build_runtime() -> pathlib.Path:
    """The shared library that runs kernels: fibers, barriers, guard pages, checks."""
    flags = (*_flags(), "-O3", "-fvisibility=hidden")
    key = _key(_headers_and_runtime(), flags, "")
    links = (f"-Wl,-soname,runtime_{key}.so", "-ldl", "-lpthread")
    return _build("runtime", _runtime_text(), flags, links, key)


def load(build, *arguments) -> ctypes.CDLL:
    """The library that `build(*arguments)` names, loaded; one that does not load is built once more."""
    path = build(*arguments)
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        path.unlink(missing_ok=True)
        return ctypes.CDLL(str(build(*arguments)))


def compile_all(texts: Iterable[str], checked: bool) -> None:
    """Fills the cache with the libraries of many texts, a compiler on every processor at a time."""
    texts = list(dict.fromkeys(texts))
    if not texts:
        return
    build_runtime()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda text: build_kernels(text, checked), texts):
            pass


# ---- From CUDA C to C++.

_COMMENT_OR_STRING = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
_ALIGNMENT = r"(?:alignas|__align__)\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)"
_SHARED = re.compile(
    rf"{_COMMENT_OR_STRING}|(?P<extern>\bextern\s+)?(?:{_ALIGNMENT}\s*)?"
    r"\b__shared__\b(?P<declaration>[^;={}]*);",
    re.DOTALL,
)
_KERNEL = re.compile(
    rf"{_COMMENT_OR_STRING}|\b__global__\s+(?:void\s+)?"
    r"(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*)?(?:void\s+)?(?P<name>\w+)\s*\(",
    re.DOTALL,
)
_VARIABLE = re.compile(r"(?P<type>.*?)\b(?P<name>\w+)\s*(?P<dimensions>(?:\[[^\]]*\]\s*)*)$", re.DOTALL)


def as_cpp(text: str) -> str:
    """The text with shared memory declarations as macros of language.h, and the doors of its kernels."""
    doors = "".join(f"CUDA_ON_CPU_ENTRY({name})\n" for name in kernel_names(text))
    return _SHARED.sub(_shared_as_macro, text) + f'\n#line 1 "doors of the kernels"\n{doors}'


def kernel_names(text: str) -> list[str]:
    """The names of the kernels that a text defines, in its order."""
    return list(dict.fromkeys(match["name"] for match in _KERNEL.finditer(text) if match["name"]))


def _shared_as_macro(match: re.Match) -> str:
    if match["declaration"] is None:
        return match[0]  # a comment or a string
    declaration, alignment = match["declaration"], match[2]
    if inner := re.search(_ALIGNMENT, declaration):
        declaration, alignment = declaration.replace(inner[0], " "), inner[1]
    variables = [_VARIABLE.match(variable.strip()) for variable in _split_at_commas(declaration)]
    if not all(variables) or not variables[0]["type"].strip():
        return match[0]  # the compiler will stop at the macro __shared__, in this line
    type_ = " ".join(variables[0]["type"].split())
    macros = [_macro(bool(match["extern"]), alignment or "1", type_, variable) for variable in variables]
    return "; ".join(macros) + ";" + "\n" * match[0].count("\n")


def _macro(dynamic: bool, alignment: str, type_: str, variable: re.Match) -> str:
    if dynamic:
        return f"CUDA_ON_CPU_DYNAMIC_SHARED({alignment}, {variable['name']}, {type_})"
    dimensions = " ".join(variable["dimensions"].split())
    return f"CUDA_ON_CPU_SHARED({alignment}, {variable['name']}, {dimensions}, {type_})"


def _split_at_commas(declaration: str) -> list[str]:
    """`Pair<int, 2> a[f(1, 2)], b` is two variables: a comma inside brackets is no separator."""
    parts, depth = [""], 0
    for character in declaration:
        depth += (character in "<([") - (character in ">)]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


# ---- Building and caching.


@functools.cache
def _flags() -> tuple[str, ...]:
    return (*_COMMON, *_instruction_sets(), f"-I{_HERE / 'include'}")


@functools.cache
def _instruction_sets() -> tuple[str, ...]:
    """Half conversions and fused multiply-adds in one instruction, where this machine has them."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    with contextlib.suppress(OSError):
        described = pathlib.Path("/proc/cpuinfo").read_text()
        known = set(re.search(r"^flags\s*:(.*)$", described, re.MULTILINE)[1].split())
        if {"avx2", "fma", "f16c"} <= known:
            return ("-mavx2", "-mfma", "-mf16c", "-fcf-protection=none")
    return ("-fcf-protection=none",)


@functools.cache
def _headers_and_runtime() -> str:
    headers = [*sorted((_HERE / "include").glob("*.h")), *sorted((_HERE / "runtime").glob("*.h"))]
    return "".join(file.read_text() for file in [*headers, *_RUNTIME_SOURCES])


@functools.cache
def _compiler_version(command: str) -> str:
    asked = [*shlex.split(command), "--version"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout


def _found_compiler() -> str:
    if command := compiler():
        return command
    raise RuntimeError(f"cpu_kernels: {_HOW_TO_INSTALL}")


def _key(text: str, flags: tuple[str, ...], runtime: str) -> str:
    command = _found_compiler()
    parts = (text, _headers_and_runtime(), runtime, command, _compiler_version(command), *flags)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _build(kind: str, text: str, flags: tuple[str, ...], links: tuple[str, ...], key: str) -> pathlib.Path:
    """The library from the cache if it is there and whole; else built, under a lock for other processes."""
    folder = cache_folder()
    library = folder / f"{kind}_{key}.so"
    if _is_whole(library):
        return library
    _make_writable(folder)
    with _only_builder(folder / f"{kind}_{key}.lock"):
        if not _is_whole(library):
            _compile(text, flags, links, library)
    return library


def _make_writable(folder: pathlib.Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        raise RuntimeError(
            f"cpu_kernels: cannot write to {folder}, the cache of compiled kernels; {_NAME_ANOTHER}"
        )


@contextlib.contextmanager
def _only_builder(path: pathlib.Path) -> Iterator[None]:
    import fcntl  # here, because Windows lacks it

    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        path.unlink(missing_ok=True)


_DIGEST_BYTES = hashlib.sha256().digest_size


def _is_whole(library: pathlib.Path) -> bool:
    """Whether the file is what was built, ending in the digest of the rest: loading a cut one is fatal."""
    try:
        contents = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(contents[:-_DIGEST_BYTES]).digest() == contents[-_DIGEST_BYTES:]


def _compile(text: str, flags: tuple[str, ...], links: tuple[str, ...], library: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled = pathlib.Path(folder) / "compiled.o"
        linked = pathlib.Path(folder) / "linked.so"
        _call_compiler([*flags, "-x", "c++", "-c", "-", "-o", str(compiled)], text)
        # Linked in a step of its own, without the sanitizers' options, which would bring in their libraries.
        _call_compiler(["-shared", str(compiled), "-o", str(linked), *links], None)
        contents = linked.read_bytes()
        linked.write_bytes(contents + hashlib.sha256(contents).digest())
        os.replace(linked, library)


def _call_compiler(arguments: list[str], text: str | None) -> None:
    command = [*shlex.split(_found_compiler()), *arguments]
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"cpu_kernels: {command[0]} does not accept a kernel's text:\n{result.stderr}")
