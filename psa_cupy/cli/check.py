"""Every kernel variant, dtype and a range of shapes against float64, on the user's own machine."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import psa_cupy
from psa_cupy import reference, testing
from psa_cupy.arguments import DTYPES
from psa_cupy.cli.machine import Machine, find_machine
from psa_cupy.cli.shapes import random_array
from psa_cupy.geometry import PSAGeometry
from psa_cupy.launching import cpu, place
from psa_cupy.launching.plan import Plan
from psa_cupy.passes import PASSES
from psa_cupy.passes.descriptor import PSAProblem
from psa_cupy.passes.psa import PSA, backward_with, forward_with

_GPU_CASES = (
    PSAGeometry(1, 2, 32, 64, 20, 20),
    PSAGeometry(2, 4, 36, 72, 20, 20),
    PSAGeometry(1, 6, 32, 64, 19, 19),
    PSAGeometry(1, 1, 32, 64, 1, 1),
    PSAGeometry(2, 3, 5, 10, 7, 9),
    PSAGeometry(1, 2, 64, 64, 16, 8),
    PSAGeometry(1, 1, 128, 256, 13, 10),
    PSAGeometry(1, 2, 32, 64, 40, 40),
)
_CPU_CASES = (
    PSAGeometry(1, 2, 32, 64, 10, 10),
    PSAGeometry(1, 1, 36, 72, 9, 7),
    PSAGeometry(1, 1, 5, 10, 5, 7),
    PSAGeometry(1, 1, 32, 64, 1, 1),
)


_DIRECTIONS = ("forward", "backward")


def add_arguments(parser) -> None:
    """Add the command's options: none."""


def run(arguments) -> int:
    """Run every check with a progress bar; returns 1 if one failed."""
    console = Console()
    machine = find_machine()
    console.print(f"psa_cupy {psa_cupy.__version__} check on: [bold]{machine.name}[/bold]")
    if machine.hint:
        console.print(machine.hint, highlight=False, markup=False)
    if not machine.on_gpu and cpu.compiler() is None:
        console.print("No C++ compiler: only the reference is checked; install g++ to run the kernels.")
    cases = _GPU_CASES if machine.on_gpu else _CPU_CASES
    data = [_Data(machine, case, dtype) for case, dtype in itertools.product(cases, DTYPES)]
    # What cannot be compiled, a check of its own will say.
    with console.status("compiling the kernels"), contextlib.suppress(Exception):
        data[0].place.precompile(plan for one in data for plan in one.plans())
    checks = [check for one in data for check in one.checks()]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    worst: dict[tuple[str, str], float] = {}
    failures = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("checking", total=len(checks))
        for name, case, dtype, function in checks:
            progress.update(task, description=f"{name} {dtype.name}")
            ratio = _measured(function, failures, f"{name} {dtype.name} {case}")
            worst[name, dtype.name] = max(worst.get((name, dtype.name), 0.0), ratio)
            progress.advance(task)
    console.print(_table(worst))
    for failure in failures:
        console.print(failure, style="red", highlight=False, markup=False)
    verdict = (
        f"{len(failures)} of {len(checks)} checks failed" if failures else f"all {len(checks)} checks passed"
    )
    console.print(verdict, style="bold red" if failures else "bold green")
    return 1 if failures else 0


def _measured(function, failures: list[str], label: str) -> float:
    """The check's error over its bound; a failure (too large, or an error raised) is noted."""
    try:
        ratio = function()
    except Exception as error:  # a check must not hide the ones after it
        failures.append(f"{label}: {type(error).__name__}: {error}")
        return float("inf")
    if not ratio <= 1:
        failures.append(f"{label}: error is {ratio:.3g} of its bound")
    return ratio


def _table(worst: dict[tuple[str, str], float]) -> Table:
    dtypes = [dtype.name for dtype in DTYPES]
    table = Table("largest error / bound", *dtypes)
    for name in dict.fromkeys(name for name, _ in worst):
        table.add_row(name, *(f"{worst[name, d]:.2f}" if (name, d) in worst else "-" for d in dtypes))
    return table


class _Data:
    """Inputs of one case, and the checks on them."""

    def __init__(self, machine: Machine, case: PSAGeometry, dtype: np.dtype):
        self.machine, self.case, self.dtype = machine, case, dtype
        self.qkv = machine.array(random_array(case.qkv_shape, dtype, seed=0))
        self.d_out = machine.array(random_array(case.out_shape, dtype, seed=1))
        with self._kernels():
            self.place = place("check", qkv=self.qkv)

    def checks(self) -> Iterator[tuple]:
        """Every (name, case, dtype, function giving error / bound)."""
        for direction in _DIRECTIONS:
            for variant in self._variants(direction) or ["reference"]:
                name = f"psa_{direction} ({variant})"
                yield name, self.case, self.dtype, self.attention(direction, variant)
        if self.case.value_dim == 2 * self.case.key_dim:
            yield "staged pair", self.case, self.dtype, self.staged
            yield "layout passes", self.case, self.dtype, self.layout

    def plans(self) -> Iterator[Plan]:
        """The plans that the checks will run, to be compiled together."""
        for direction in _DIRECTIONS:
            for variant in self._variants(direction):
                yield PSA.plan(direction, self._problem, self.place.device, variant)
            if self._variants(direction) and self.case.value_dim == 2 * self.case.key_dim:
                for descriptor in PASSES:
                    yield descriptor.plan(direction, self._problem, self.place.device)

    @property
    def _problem(self) -> PSAProblem:
        return PSAProblem(self.case, self.dtype, self.case.key_dim**-0.5)

    def _variants(self, direction: str) -> list[str]:
        """The kernel variants that can run the case here: none without a C++ compiler or a GPU."""
        if self.place.is_reference:
            return []
        return [v.name for v in PSA.variants[direction] if v.supports(self._problem, self.place.device)]

    def _kernels(self):
        """NumPy arrays go through the CPU-executed kernels, if they can."""
        if self.machine.on_gpu or cpu.compiler() is None:
            return contextlib.nullcontext()
        return psa_cupy.cpu_kernels()

    def attention(self, direction: str, variant: str):
        """The check of one direction by one variant."""
        forced = None if variant == "reference" else variant
        heads, key_dim = self.case.num_heads, self.case.key_dim

        def forward() -> float:
            with self._kernels():
                out, lse = forward_with(forced, self.qkv, heads, key_dim=key_dim)
            return max(testing.psa_forward_ratios(self.qkv, out, lse, heads, key_dim=key_dim).values())

        def backward() -> float:
            with self._kernels():
                out, lse = forward_with(None, self.qkv, heads, key_dim=key_dim)
                d_qkv = backward_with(forced, self.d_out, self.qkv, out, lse, heads, key_dim=key_dim)
            ratios = testing.psa_backward_ratios(self.d_out, self.qkv, d_qkv, heads, key_dim=key_dim)
            return max(ratios.values())

        return forward if direction == "forward" else backward

    def staged(self) -> float:
        """The staged pair, forward and backward."""
        heads = self.case.num_heads
        with self._kernels():
            out, lse = psa_cupy.psa_forward_staged(self.qkv, heads)
            d_qkv = psa_cupy.psa_backward_staged(self.d_out, self.qkv, out, lse, heads)
        return max(
            *testing.psa_forward_ratios(self.qkv, out, lse, heads).values(),
            *testing.psa_backward_ratios(self.d_out, self.qkv, d_qkv, heads).values(),
        )

    def layout(self) -> float:
        """The layout passes, which are copies: 0 if every bit agrees, else infinity."""
        heads, height, width = self.case.num_heads, self.case.height, self.case.width
        with self._kernels():
            packed = psa_cupy.pack_qkv(self.qkv, heads)
            v = psa_cupy.extract_v(self.qkv, heads)
            merged = psa_cupy.merge_attn(packed[2], packed[3], heads, height, width)
            unpacked = psa_cupy.pack_qkv_backward(packed, heads, height, width)
            o_lo, o_hi = psa_cupy.merge_attn_backward(v, heads)
            only_v = psa_cupy.extract_v_backward(v, heads)
        host = self.machine.xp.asnumpy if self.machine.on_gpu else np.asarray
        pairs = (
            (packed, reference.pack_qkv(host(self.qkv), heads)),
            (unpacked, self.qkv),
            (v, reference.extract_v(host(self.qkv), heads)),
            (only_v, reference.extract_v_backward(host(v), heads)),
            (merged, v),
            (o_lo, packed[2]),
            (o_hi, packed[3]),
        )
        same = all(np.array_equal(_bits(host(a)), _bits(host(b))) for a, b in pairs)
        return 0.0 if same else float("inf")


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)
