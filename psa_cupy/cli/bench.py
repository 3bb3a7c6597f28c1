"""Time psa_cupy beside what a user would run instead, on one GPU, in one run.

Every row has the median time, the limit that the device's ceilings set (bytes and FLOP, measured, and
exponentials, computed from the peak clock, whichever is largest) and their ratio. Times lie between two
events on the GPU: where a library's host code takes longer than its kernels, its row shows that. "NCHW" rows
start from and end in the detector's layout; "given" rows get q, k, v in the layout the library wants, for
free; plain CuPy, which cannot multiply bfloat16, gets float16. On a CPU the NumPy reference is timed, without
peers and limits.
"""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import psa_cupy
from psa_cupy.arguments import DTYPES
from psa_cupy.cli import ceilings, peers
from psa_cupy.cli.machine import Machine, find_machine, first_line, installed_versions
from psa_cupy.cli.shapes import random_array
from psa_cupy.geometry import MAX_KEY_DIM, PSAGeometry

DEFAULT_SHAPES = "1x2x20,16x4x20,64x4x20,256x4x20,8x4x40,4x4x80"
CPU_SHAPES = "1x2x20,1x4x20"
KEY_DIM = 32
_VERSIONS_OF = ("psa-cupy", "numpy", "cupy-cuda13x", "cupy-cuda12x", "torch", "triton")
"""What a benchmark's figures depend on."""


@dataclass(frozen=True)
class Row:
    """One timed piece of work."""

    name: str
    work: str
    """forward, backward, both, or host: the time a forward call takes the host, which does not wait."""
    layout: str
    """NCHW, or given: layout changes are free."""
    shape: tuple[int, int, int]
    """(B, num_heads, N)."""
    dtype: str
    median_us: float
    limit_us: float | None


def add_arguments(parser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--shapes", help=f"B x heads x side, comma-separated (default {DEFAULT_SHAPES}; CPU: {CPU_SHAPES})"
    )
    parser.add_argument("--key-dim", type=int, default=KEY_DIM, help="value_dim is twice as large")
    parser.add_argument("--dtype", choices=[d.name for d in DTYPES], help="default bfloat16 (CPU: float32)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--no-peers", action="store_true", help="time psa_cupy alone")


def run(arguments) -> int:
    """Print and write the rows; returns 1 if a psa_cupy row could not be measured."""
    _require_possible(arguments)
    console = Console()
    machine = find_machine()
    console.print(f"psa_cupy {psa_cupy.__version__} bench on: [bold]{machine.name}[/bold]")
    if machine.hint:
        console.print(machine.hint, highlight=False, markup=False)
    name = arguments.dtype or ("bfloat16" if machine.on_gpu else "float32")
    dtype = next(d for d in DTYPES if d.name == name)
    default = DEFAULT_SHAPES if machine.on_gpu else CPU_SHAPES
    shapes = parse_shapes(default if arguments.shapes is None else arguments.shapes)
    rates = _measured_rates(console, machine, dtype) if machine.on_gpu else None
    tasks = [task for shape in shapes for task in _tasks(machine, shape, dtype, arguments)]
    rows, refusals = _run(console, machine, tasks, rates)
    for shape in shapes:
        console.print(_table(shape, [row for row in rows if row.shape == shape.bench_shape]))
    for refusal in refusals:
        console.print(refusal, highlight=False, markup=False)
    if arguments.json:
        _write(arguments.json, machine, rates, rows)
    return int(any(refusal.startswith("psa_cupy") for refusal in refusals))


def _measured_rates(console: Console, machine: Machine, dtype: np.dtype) -> ceilings.Rates | None:
    """The device's ceilings; None, saying so, where CuPy lacks a library or the device memory for them."""
    try:
        return ceilings.measure(machine, dtype)
    except Exception as error:  # the times are worth having without limits
        console.print(f"no limits: {first_line(error)[:100]}", highlight=False, markup=False)
        return None


def _require_possible(arguments) -> None:
    """Stop at once at what would only show after minutes of timing."""
    if not 1 <= arguments.key_dim <= MAX_KEY_DIM:
        raise SystemExit(f"bench: --key-dim is {arguments.key_dim}, expected 1 to {MAX_KEY_DIM}")
    if arguments.json and (arguments.json.is_dir() or not arguments.json.parent.is_dir()):
        raise SystemExit(f"bench: --json is {arguments.json}, expected a file in a folder that exists")


@dataclass(frozen=True)
class _Shape:
    batch: int
    num_heads: int
    side: int

    @property
    def bench_shape(self) -> tuple[int, int, int]:
        return (self.batch, self.num_heads, self.side**2)

    def geometry(self, key_dim: int) -> PSAGeometry:
        return PSAGeometry(self.batch, self.num_heads, key_dim, 2 * key_dim, self.side, self.side)


def parse_shapes(text: str) -> list[_Shape]:
    """Shapes from "64x4x20,4x4x80".

    Raises
    ------
    SystemExit
        With a message, if the text is not of that form.

    """
    items = text.split(",")
    if not all(re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", item) for item in items):
        raise SystemExit(f"bench: --shapes is {text!r}, expected B x heads x side like 64x4x20,4x4x80")
    return [_Shape(*map(int, item.split("x"))) for item in items]


@dataclass(frozen=True)
class _Task:
    name: str
    work: str
    layout: str
    shape: _Shape
    dtype: np.dtype
    key_dim: int
    make: Callable[[], Callable[[], object]]
    """Prepares the inputs and gives the function to time; what it allocates goes with it."""


def _run(console, machine, tasks, rates):
    rows, refusals = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of what a refusal says in one line
        bar = progress.add_task("timing", total=len(tasks))
        for task in tasks:
            progress.update(bar, description=f"{task.shape.bench_shape} {task.name}")
            try:
                rows.append(_measure(machine, task, rates))
            except Exception as error:  # a peer that refuses a shape must not end the run
                what = f"{task.name} {task.shape.bench_shape} {task.work}"
                refusals.append(f"{what}: not measured: {first_line(error)[:100]}")
            progress.advance(bar)
    return rows, refusals


def _measure(machine: Machine, task: _Task, rates) -> Row:
    time_of = machine.host_seconds if task.work == "host" else machine.median_seconds
    seconds = time_of(task.make())
    limit = None
    if rates is not None and task.work != "host":
        works = ("forward", "backward") if task.work == "both" else (task.work,)
        geometry = task.shape.geometry(task.key_dim)
        limit = sum(ceilings.limit_seconds(rates, geometry, task.dtype, work) for work in works) * 1e6
    return Row(
        task.name, task.work, task.layout, task.shape.bench_shape, task.dtype.name, seconds * 1e6, limit
    )


def _tasks(machine: Machine, shape: _Shape, dtype: np.dtype, arguments) -> Iterator[_Task]:
    common = (shape, dtype, arguments.key_dim)
    for name, work, make in _own_work(machine, *common):
        yield _Task(name, work, "NCHW", *common, make)
    if machine.on_gpu and not arguments.no_peers:
        for peer in peers.available(machine.xp):
            for work in peer.works(shape.geometry(arguments.key_dim)):
                make = _peer_maker(peer, machine, shape.geometry(arguments.key_dim), dtype, work)
                yield _Task(peer.name, work, peer.layout, *common, make)


def _peer_maker(peer, machine, geometry, dtype, work):
    return lambda: peer.make(machine.xp, geometry, dtype, work)


def _own_work(machine: Machine, shape: _Shape, dtype: np.dtype, key_dim: int):
    geometry = shape.geometry(key_dim)
    heads = shape.num_heads
    pairs = {
        "psa_cupy": (psa_cupy.psa_forward, psa_cupy.psa_backward),
        "psa_cupy staged": (psa_cupy.psa_forward_staged, psa_cupy.psa_backward_staged),
    }

    def inputs():
        qkv = machine.array(random_array(geometry.qkv_shape, dtype, seed=0))
        return qkv, machine.array(random_array(geometry.out_shape, dtype, seed=1))

    for name, (forward, backward) in pairs.items():

        def make_forward(forward=forward):
            qkv, _ = inputs()
            return lambda: forward(qkv, heads)

        def make_backward(forward=forward, backward=backward):
            qkv, d_out = inputs()
            out, lse = forward(qkv, heads)
            return lambda: backward(d_out, qkv, out, lse, heads)

        def make_both(forward=forward, backward=backward):
            qkv, d_out = inputs()
            return lambda: backward(d_out, qkv, *forward(qkv, heads), heads)

        yield name, "forward", make_forward
        yield name, "backward", make_backward
        yield name, "both", make_both
    if machine.on_gpu and geometry.batch == 1:
        yield from _host_work(inputs, heads)


def _host_work(inputs, heads):
    def make_allocating():
        qkv, _ = inputs()
        return lambda: psa_cupy.psa_forward(qkv, heads)

    def make_given():
        qkv, _ = inputs()
        out, lse = psa_cupy.psa_forward(qkv, heads)
        return lambda: psa_cupy.psa_forward(qkv, heads, out=out, lse=lse)

    yield "psa_cupy, results allocated", "host", make_allocating
    yield "psa_cupy, targets given", "host", make_given


def _table(shape: _Shape, rows: list[Row]) -> Table:
    title = f"B={shape.batch} heads={shape.num_heads} N={shape.side**2}"
    table = Table("what", "layout", "work", "median us", "limit us", "limit / median", title=title)
    for row in sorted(rows, key=lambda row: (row.work, row.layout, row.median_us)):
        limit = (
            ("-", "-")
            if row.limit_us is None
            else (f"{row.limit_us:.1f}", f"{row.limit_us / row.median_us:.2f}")
        )
        table.add_row(row.name, row.layout, row.work, f"{row.median_us:.1f}", *limit)
    return table


def _write(path: Path, machine: Machine, rates, rows: list[Row]) -> None:
    document = {
        "device": machine.name,
        "date": time.strftime("%Y-%m-%d"),
        "versions": installed_versions(_VERSIONS_OF),
        "rates": None if rates is None else asdict(rates),
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
