"""The notebooks run from top to bottom here, GPU or not, and are committed as they ran."""

import os
import re
from pathlib import Path

import pytest

from psa_cupy.launching import cpu

nbclient = pytest.importorskip("nbclient", reason="the extra test is not installed")
nbformat = pytest.importorskip("nbformat", reason="the extra test is not installed")

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
NAMES = ("01_first_call", "02_inside_the_kernels", "03_autograd_tape", "04_performance")
RUNS_KERNELS_ON_CPU = ("02_inside_the_kernels",)


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def outputs_of(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def kinds_of(notebook):
    """For each code cell: whether it gave pictures, tables, text (which may come in several pieces)."""
    return [
        sorted({kind for output in cell.outputs for kind in output.get("data", {"stream": None})})
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.parametrize("name", NAMES)
def test_runs_and_shows_what_is_committed(name):
    """Numbers may differ from machine to machine; every picture and table must come again."""
    if name in RUNS_KERNELS_ON_CPU and cpu.compiler() is None:
        pytest.skip("no C++ compiler: the kernels cannot run on the CPU")
    committed, notebook = read(name), read(name)
    client = nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(FOLDER)}})
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    client.execute(env={**os.environ, "PYTHONPATH": path})
    assert kinds_of(notebook) == kinds_of(committed)


@pytest.mark.parametrize("name", NAMES)
def test_is_committed_as_it_ran(name):
    notebook = read(name)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert any(
        "image/png" in o.get("data", {}) or "image/jpeg" in o.get("data", {}) for o in outputs_of(notebook)
    )
    for output in outputs_of(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text
        assert not re.search(r"/(home|root|work|tmp|Users)/", str(output)), "a path of somebody's machine"


def test_are_small():
    assert sum(path.stat().st_size for path in FOLDER.glob("*.ipynb")) < 2_000_000
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)
