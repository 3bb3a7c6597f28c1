"""Forward and backward over the real YOLO shapes: time, and error against float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import psa_cupy
from psa_cupy import testing
from psa_cupy.cli.machine import Machine, find_machine
from psa_cupy.cli.shapes import YOLO_SHAPES, ModelShape, random_array


def add_arguments(parser) -> None:
    """Add the command's options."""
    parser.add_argument("--batch", type=int, default=1, help="images per batch (default 1)")


def run(arguments) -> int:
    """Print the table; returns 1 if a result is outside its bound."""
    if arguments.batch < 1:
        raise SystemExit(f"demo: --batch is {arguments.batch}, expected at least 1")
    console = Console()
    machine = find_machine()
    console.print(f"psa_cupy {psa_cupy.__version__} on: [bold]{machine.name}[/bold]")
    if machine.hint:
        console.print(machine.hint, highlight=False, markup=False)
    dtypes = (
        [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)] if machine.on_gpu else [np.dtype(np.float32)]
    )
    table = Table("YOLO models", "qkv", "dtype", "pass", "time", "error/bound")
    worst = 0.0
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("running", total=len(YOLO_SHAPES) * len(dtypes))
        for shape in YOLO_SHAPES:
            for dtype in dtypes:
                worst = max(worst, _add_rows(table, machine, shape, arguments.batch, dtype))
                progress.advance(task)
    console.print(table)
    verdict = "within" if worst <= 1 else "OUTSIDE"
    console.print(f"All results compared with float64: {verdict} the bounds of psa_cupy.testing.")
    return 0 if worst <= 1 else 1


def _add_rows(table: Table, machine: Machine, shape: ModelShape, batch: int, dtype: np.dtype) -> float:
    heads = shape.num_heads
    qkv = machine.array(shape.qkv(batch, dtype))
    out, lse = psa_cupy.psa_forward(qkv, heads)
    d_out = machine.array(random_array(out.shape, dtype, seed=1))
    d_qkv = psa_cupy.psa_backward(d_out, qkv, out, lse, heads)
    forward = max(testing.psa_forward_ratios(qkv, out, lse, heads).values())
    backward = max(testing.psa_backward_ratios(d_out, qkv, d_qkv, heads).values())
    timed = {
        "forward": (lambda: psa_cupy.psa_forward(qkv, heads), forward),
        "backward": (lambda: psa_cupy.psa_backward(d_out, qkv, out, lse, heads), backward),
    }
    for name, (function, ratio) in timed.items():
        seconds = machine.median_seconds(function)
        table.add_row(
            shape.models,
            "x".join(map(str, qkv.shape)),
            dtype.name,
            name,
            format_time(seconds),
            f"{ratio:.2f}",
        )
    return max(forward, backward)


def format_time(seconds: float) -> str:
    """A time with a unit a person reads: microseconds below 1 ms."""
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
