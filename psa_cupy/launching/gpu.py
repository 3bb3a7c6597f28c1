"""Runs plans on CuPy arrays: compiles with cupy.RawKernel and launches on CuPy's current stream.

A plan is bound to a device once (`bind`): compiled kernels and prepared argument buffers. A later call
only writes addresses into those buffers and launches: no synchronisation, no host copy. Imported lazily:
it needs CuPy.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import cupy
import numpy as np
from cupy.cuda import driver

from psa_cupy.launching import tensor_map
from psa_cupy.launching.plan import MOST_PLANS, Device, Kernel, Launch, Operand, Plan, TensorMap
from psa_cupy.launching.source import render

_MOST_BLOCKS = 2**31 - 1
"""Of a launch."""

_LEAST_CAPABILITY = (7, 5)
"""Of the GPUs the kernels are written for: Turing."""

_allowance = threading.Lock()
"""Held while a kernel's shared memory allowance is looked at and raised."""

_retained: list[cupy.ndarray] = []
"""Temporary arrays of captured launches, kept for the life of the process: a graph may be replayed."""


@functools.cache
def device(device_id: int) -> Device:
    """What planning needs to know of a CUDA device.

    Raises
    ------
    ValueError
        If no kernel is written for so old a device.

    """
    properties = cupy.cuda.runtime.getDeviceProperties(device_id)
    capability = (properties["major"], properties["minor"])
    if capability < _LEAST_CAPABILITY:
        found, least = (".".join(map(str, version)) for version in (capability, _LEAST_CAPABILITY))
        raise ValueError(
            f"psa_cupy: GPU {device_id} has compute capability {found}, expected at least {least}"
        )
    return Device(
        capability=capability,
        multiprocessors=properties["multiProcessorCount"],
        shared_bytes=properties["sharedMemPerBlockOptin"],
        tensor_maps=capability == (9, 0) and tensor_map.available(),
    )


def run(plan: Plan, operands: Mapping[str, cupy.ndarray]) -> None:
    """Launch a plan on the current device and stream.

    Parameters
    ----------
    plan : Plan
        Kept by identity: pass the same object for the same problem.
    operands : mapping of str to cupy.ndarray
        C-contiguous arrays, by the names that the plan's arguments use.

    """
    if plan.launches:
        bind(plan, cupy.cuda.runtime.getDevice())({name: array.data.ptr for name, array in operands.items()})


@functools.lru_cache(maxsize=MOST_PLANS)
def bind(plan: Plan, device_id: int) -> Executable:
    """The plan's executable on a device, which must be the current one.

    Raises
    ------
    RuntimeError
        If the current stream is capturing: a first call compiles and loads kernels.
    ValueError
        If a launch needs more blocks than a GPU takes.

    """
    if cupy.cuda.get_current_stream().is_capturing():
        raise RuntimeError(
            "psa_cupy: a first call with these arguments cannot be captured into a graph, since it loads "
            "kernels: call once before the capture, with arrays of the same shapes, dtype and alignment, the "
            "same scale, and the same targets given"
        )
    return Executable(plan, device_id)


class Executable:
    """A plan bound to a device. Calling it launches; several threads may."""

    def __init__(self, plan: Plan, device_id: int):
        self._scratch = plan.scratch
        self._in_thread = _InThread(plan, device_id)

    def __call__(self, addresses: Mapping[str, int]) -> None:
        """Launch on the current stream; `addresses` are the operands' base addresses."""
        stream = cupy.cuda.get_current_stream()
        if self._scratch:
            # Held until all launches are in the stream: what is released before, another thread's launch into
            # the same stream could be given. Afterwards the pool hands it out again in stream order.
            scratch = {s.name: cupy.empty(s.shape, s.dtype) for s in self._scratch}
            retain_if_capturing(*scratch.values())
            addresses = {**addresses, **{name: array.data.ptr for name, array in scratch.items()}}
        for launch in self._in_thread.launches:
            launch(addresses, stream.ptr)


def retain_if_capturing(*arrays: cupy.ndarray) -> None:
    """Keep temporary arrays for ever if the current stream is capturing: a replay writes to them again."""
    if cupy.cuda.get_current_stream().is_capturing():
        _retained.extend(arrays)


class _InThread(threading.local):
    """A plan's launches, each thread's own: the driver reads their arguments while another thread fills its.

    (A subclass of threading.local runs __init__ again, with the same arguments, in every thread that uses
    the object. Its attributes are slow to read: hence only one, which a call reads once.)
    """

    def __init__(self, plan: Plan, device_id: int):
        self.launches = [_BoundLaunch(launch, device_id) for launch in plan.launches]


class _BoundLaunch:
    """A launch with its kernel loaded and its arguments laid out, for one thread."""

    def __init__(self, launch: Launch, device_id: int):
        if (blocks := launch.grid[0]) > _MOST_BLOCKS:
            raise ValueError(
                f"{launch.kernel.entry}: the arrays need {blocks} blocks, "
                f"expected at most {_MOST_BLOCKS}: split the batch"
            )
        self._function = load(launch.kernel, launch.shared_bytes, device_id)
        self._launch_kernel = functools.partial(
            driver.launchKernel, self._function.ptr, *launch.grid, *launch.block, launch.shared_bytes
        )
        self._values = [_argument_buffer(argument) for argument in launch.arguments]
        arguments = list(zip(self._values, launch.arguments, strict=True))
        dtype = element_type(launch.kernel)
        self._pointers = [
            (value, argument.name, argument.offset * dtype.itemsize)
            for value, argument in arguments
            if isinstance(argument, Operand)
        ]
        self._maps = [
            (value, argument.name, _encoder(argument, dtype))
            for value, argument in arguments
            if isinstance(argument, TensorMap)
        ]
        self._parameters = (ctypes.c_void_p * len(self._values))(*map(ctypes.addressof, self._values))
        self._parameters_address = ctypes.addressof(self._parameters)

    def __call__(self, addresses: Mapping[str, int], stream: int) -> None:
        for value, name, byte_offset in self._pointers:
            value.value = addresses[name] + byte_offset
        for value, name, encode in self._maps:
            value.raw = encode(addresses[name])
        self._launch_kernel(stream, self._parameters_address, 0)


def precompile(plans: Iterable[Plan], device_id: int) -> None:
    """Compile the kernels of many plans at once, on all processors, so that first calls find them."""

    def build(launch: Launch) -> None:
        with cupy.cuda.Device(device_id):
            load(launch.kernel, launch.shared_bytes, device_id)

    launches = {(launch.kernel, launch.shared_bytes): launch for plan in plans for launch in plan.launches}
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, launches.values()))


def element_type(kernel: Kernel) -> np.dtype:
    """The kernel's element type T, in which operand offsets are counted."""
    return dict(kernel.constants)["T"]


def _argument_buffer(argument: object):
    """Host memory for one kernel argument; scalars are written once, here."""
    if isinstance(argument, Operand):
        return ctypes.c_uint64()
    if isinstance(argument, TensorMap):
        return ctypes.create_string_buffer(tensor_map.BYTES)
    if isinstance(argument, np.generic):
        return ctypes.create_string_buffer(argument.tobytes(), argument.itemsize)
    raise TypeError(f"launch argument {argument!r}: expected an Operand, a TensorMap or a NumPy scalar")


def _encoder(argument: TensorMap, dtype: np.dtype):
    """From a base address to the map's bytes; the last ones are kept."""

    @functools.lru_cache(maxsize=256)
    def encode(address: int) -> bytes:
        return tensor_map.encode(argument, address, dtype)

    return encode


@functools.cache
def load(kernel: Kernel, shared_bytes: int, device_id: int):
    """The compiled kernel on a device (a cupy Function), allowed the shared memory it asks for.

    The driver keeps one allowance for a kernel, whatever number of plans launch it: it is only ever raised.
    """
    options = ("-std=c++17",) + ((f"-arch={kernel.arch}",) if kernel.arch else ())
    raw = cupy.RawKernel(render(kernel), kernel.entry, options=options)
    function = raw.kernel
    with _allowance:
        if shared_bytes > raw.max_dynamic_shared_size_bytes:
            raw.max_dynamic_shared_size_bytes = shared_bytes
    return function
