"""Runs a plan's launches on the CPU: arrays into guarded memory, launch after launch, results back."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from psa_cupy.launching import source
from psa_cupy.launching.cpu.compile import build_kernels, build_runtime, load
from psa_cupy.launching.cpu.faults import KernelError, with_source_lines
from psa_cupy.launching.plan import Device, Kernel, Launch, Operand, Plan, TensorMap

DEVICE = Device(capability=(8, 0), multiprocessors=108, shared_bytes=163 * 1024, tensor_maps=False)
"""What plans for the CPU are made for: it executes the launches of an A100."""

_MAX_THREADS = 1024
_ALIGNMENT = 16
"""The widest access of a thread, in bytes."""

_LOCK = threading.Lock()
"""The runtime runs one launch at a time: its fibers belong to one thread."""
if hasattr(os, "register_at_fork"):  # a child must not begin in the middle of another thread's launch
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


class _OperandRequest(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("element_bytes", ctypes.c_size_t),
    )


class _LaunchRequest(ctypes.Structure):
    """runtime/scheduler.cpp has the same structures."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_shared_bytes", ctypes.c_size_t),
        ("operands", ctypes.POINTER(_OperandRequest)),
        ("operand_count", ctypes.c_size_t),
        ("checked", ctypes.c_int),
    )


def run(
    plan: Plan,
    operands: dict[str, np.ndarray],
    *,
    checked: bool = False,
    render: Callable[[Kernel], str] = source.render,
) -> None:
    """Runs a plan's launches, in their order, on the CPU.

    The arrays are changed only if every launch succeeds.

    Parameters
    ----------
    plan
        What to launch. Its scratch arrays are made here, filled with NaN.
    operands
        The arrays that the plan's operands name, C-contiguous.
    checked
        Watch every access: races, bounds, uninitialised shared memory, alignment. Up to twenty times slower.
    render
        Makes the CUDA C text of a kernel; tests pass their own.

    Raises
    ------
    KernelError
        If a kernel does what CUDA forbids.
    TypeError, ValueError
        If a launch does not fit its kernel's parameters or the device.
    RuntimeError
        If the C++ compiler is missing or does not accept the text.

    """
    with _LOCK, _in_guarded_memory(plan, operands) as memory:
        for launch in plan.launches:
            _launch(launch, memory, checked, render(launch.kernel))


class _GuardedArray:
    """An array full of NaN between pages that no one may touch, `shift` bytes behind a multiple of 16."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype, shift: int = 0) -> None:
        self.name, self.dtype = name, np.dtype(dtype)
        self.bytes = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        self.base = _runtime().cuda_on_cpu_allocate(self.bytes, shift)
        if not self.base:
            raise MemoryError(f"cpu_kernels: no memory for {name}, {self.bytes} bytes")

    @staticmethod
    def copy_of(name: str, array: np.ndarray) -> _GuardedArray:
        """Aligned no better than the array itself: a kernel may rely on what planning saw, on no more."""
        copy = _GuardedArray(name, array.shape, array.dtype, array.ctypes.data % _ALIGNMENT)
        copy.bytes_view()[:] = _bytes_of(array)
        return copy

    def bytes_view(self) -> np.ndarray:
        memory = (ctypes.c_ubyte * self.bytes).from_address(self.base)
        return np.frombuffer(memory, np.uint8)

    def request(self) -> _OperandRequest:
        return _OperandRequest(self.name.encode(), self.base, self.bytes, self.dtype.itemsize)

    def release(self) -> None:
        _runtime().cuda_on_cpu_release(self.base, self.bytes)


@contextmanager
def _in_guarded_memory(plan: Plan, operands: dict[str, np.ndarray]) -> Iterator[dict[str, _GuardedArray]]:
    """Copies the operands in, and what has changed of them out again if nothing was raised."""
    memory: dict[str, _GuardedArray] = {}
    try:
        for name, array in operands.items():
            if not array.flags.c_contiguous:
                raise ValueError(f"cpu_kernels: operand {name} is not C-contiguous")
            memory[name] = _GuardedArray.copy_of(name, array)
        for scratch in plan.scratch:
            memory[scratch.name] = _GuardedArray(scratch.name, scratch.shape, scratch.dtype)
        yield memory
        for name, array in operands.items():
            _copy_back(memory[name], array)
    finally:
        for guarded in memory.values():
            guarded.release()


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _copy_back(guarded: _GuardedArray, array: np.ndarray) -> None:
    result, before = guarded.bytes_view(), _bytes_of(array)
    if np.array_equal(result, before):
        return  # an input, which other threads may be reading
    if not array.flags.writeable:
        raise KernelError(f"the kernels wrote to {guarded.name}, which is read-only")
    before[:] = result


def _launch(launch: Launch, memory: dict[str, _GuardedArray], checked: bool, text: str) -> None:
    name = launch.kernel.entry
    _check_shape(launch)
    kernels = _Kernels.of(text, checked)
    entry, types = kernels.entry(name)
    arguments = _Arguments(name, types, launch.arguments, memory)
    requests = [guarded.request() for guarded in memory.values()]
    request = _LaunchRequest(
        entry,
        arguments.pointers,
        launch.grid,
        launch.block,
        launch.shared_bytes,
        (_OperandRequest * len(requests))(*requests),
        len(requests),
        checked,
    )
    if report := _runtime().cuda_on_cpu_launch(ctypes.byref(request)).decode():
        raise KernelError(f"{name}: {with_source_lines(report, kernels.path)}")


def _check_shape(launch: Launch) -> None:
    name = launch.kernel.entry
    takes_tensor_maps = any(isinstance(argument, TensorMap) for argument in launch.arguments)
    if launch.kernel.arch is not None or takes_tensor_maps:
        raise ValueError(
            f"{name}: the CPU does not execute kernels that are for one architecture ({launch.kernel.arch}) "
            "or take tensor maps; expected the portable variant"
        )
    if min(launch.grid) < 1 or min(launch.block) < 1 or np.prod(launch.block) > _MAX_THREADS:
        raise ValueError(
            f"{name}: grid {launch.grid} and block {launch.block}, expected at least 1 everywhere "
            f"and at most {_MAX_THREADS} threads in a block"
        )
    if launch.grid[0] >= 2**31 or max(launch.grid[1:]) > 65535:
        raise ValueError(f"{name}: grid {launch.grid}, expected at most 2**31 - 1, 65535, 65535")
    if launch.shared_bytes > DEVICE.shared_bytes:
        raise ValueError(
            f"{name}: {launch.shared_bytes} bytes of shared memory, expected at most {DEVICE.shared_bytes}"
        )


class _Arguments:
    """The arguments of a launch as a kernel takes them: an array of their addresses."""

    def __init__(
        self, name: str, types: list[str], values: tuple[object, ...], memory: dict[str, _GuardedArray]
    ) -> None:
        if len(values) != len(types):
            raise TypeError(f"{name}: {len(values)} arguments, the kernel takes {len(types)}")
        self._kept = [
            _argument(f"{name}: argument {i}", type_, value, memory)
            for i, (type_, value) in enumerate(zip(types, values, strict=True))
        ]
        self.pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in self._kept))


def _argument(what: str, type_: str, value: object, memory: dict[str, _GuardedArray]) -> ctypes.Array:
    """The bytes of one argument. `type_` is the parameter's: a NumPy name, or "*" and an element's."""
    if isinstance(value, Operand):
        guarded = memory[value.name]
        if not type_.startswith("*"):
            raise TypeError(f"{what} is the operand {value.name}, the kernel takes {type_}")
        if type_ not in ("*", f"*{guarded.dtype.name}"):
            raise TypeError(f"{what} is {value.name} of {guarded.dtype.name}, the kernel takes {type_[1:]}")
        contents = np.uint64(guarded.base + value.offset * guarded.dtype.itemsize)
    elif isinstance(value, np.generic):
        if value.dtype.name != type_:
            raise TypeError(f"{what} is {value.dtype.name}, the kernel takes {type_}")
        contents = value
    else:
        raise TypeError(f"{what} is a {type(value).__name__}, expected an Operand or a NumPy scalar")
    return ctypes.create_string_buffer(contents.tobytes(), contents.dtype.itemsize)


class _Kernels:
    """The loaded library of one CUDA C text."""

    def __init__(self, text: str, checked: bool) -> None:
        _runtime()
        self._library = load(build_kernels, text, checked)
        self._entries: dict[str, tuple[int, list[str]]] = {}
        self.path = pathlib.Path(self._library._name)

    @staticmethod
    @functools.cache
    def of(text: str, checked: bool) -> _Kernels:
        return _Kernels(text, checked)

    def entry(self, name: str) -> tuple[int, list[str]]:
        """The address of a kernel's door, and its parameters' types."""
        if name not in self._entries:
            self._entries[name] = self._find_entry(name)
        return self._entries[name]

    def _find_entry(self, name: str) -> tuple[int, list[str]]:
        try:
            door = getattr(self._library, f"cuda_on_cpu_call_{name}")
        except AttributeError:
            raise ValueError(f"{name}: its CUDA C text defines no such kernel") from None
        types = getattr(self._library, f"cuda_on_cpu_types_{name}")
        types.restype = ctypes.POINTER(ctypes.c_char_p)
        names, count = types(), 0
        while names[count] is not None:
            count += 1
        return ctypes.cast(door, ctypes.c_void_p).value, [names[i].decode() for i in range(count)]


@functools.cache
def _runtime() -> ctypes.CDLL:
    library = load(build_runtime)
    library.cuda_on_cpu_allocate.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    library.cuda_on_cpu_allocate.restype = ctypes.c_void_p
    library.cuda_on_cpu_release.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.cuda_on_cpu_launch.argtypes = [ctypes.POINTER(_LaunchRequest)]
    library.cuda_on_cpu_launch.restype = ctypes.c_char_p
    return library
