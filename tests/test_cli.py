"""The commands run on a machine without a GPU, say where they run, and exit as documented."""

import json
import sys

import pytest

from psa_cupy import __main__ as command_line, launching
from psa_cupy.cli import bench, check, demo, machine
from psa_cupy.launching import cpu

needs_compiler = pytest.mark.skipif(cpu.compiler() is None, reason="no C++ compiler")


def test_demo_is_the_default(capsys):
    assert command_line.main([]) == 0
    printed = capsys.readouterr().out
    assert "CPU (NumPy)" in printed
    assert "pip install" in printed or "finds no" in printed
    assert "v10m" in printed and "within the bounds" in printed


def test_demo_fails_when_a_result_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr(demo.testing, "psa_forward_ratios", lambda *a, **k: {"out": 1.5})
    assert command_line.main(["demo"]) == 1
    assert "OUTSIDE" in capsys.readouterr().out


@needs_compiler
def test_check_passes(capsys, monkeypatch):
    monkeypatch.setattr(check, "_CPU_CASES", check._CPU_CASES[2:3])
    assert command_line.main(["check"]) == 0
    assert "checks passed" in capsys.readouterr().out


@needs_compiler
def test_check_fails_when_a_kernel_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr(check, "_CPU_CASES", check._CPU_CASES[3:4])
    monkeypatch.setattr(check.testing, "psa_backward_ratios", lambda *a, **k: {"d_q": float("nan")})
    assert command_line.main(["check"]) == 1
    assert "checks failed" in capsys.readouterr().out


@needs_compiler
@pytest.mark.parametrize(
    "name",
    ["pack_qkv", "pack_qkv_backward", "extract_v", "extract_v_backward", "merge_attn", "merge_attn_backward"],
)
def test_check_fails_when_a_layout_pass_is_wrong(name, capsys, monkeypatch):
    right = getattr(check.psa_cupy, name)

    def wrong(*arguments):
        results = right(*arguments)
        last = results[-1] if isinstance(results, tuple) else results
        last[...] = -last
        return results

    monkeypatch.setattr(check, "_CPU_CASES", check._CPU_CASES[2:3])
    monkeypatch.setattr(check.psa_cupy, name, wrong)
    monkeypatch.setattr(check._Data, "_variants", lambda self, direction: [])  # kernels are not the point
    assert command_line.main(["check"]) == 1
    assert "layout passes" in capsys.readouterr().out


def test_info_gives_everything_whole(capsys, monkeypatch):
    """Brackets are no markup, and long paths are not cut."""
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    monkeypatch.setenv("PSA_CUPY_CACHE_DIR", "/a/very/long/path" * 10)
    assert command_line.main(["info"]) == 0
    printed = "".join(capsys.readouterr().out.split())
    assert 'pipinstall".[cuda13x]"' in printed
    assert "/a/very/long/path" * 10 in printed and "\u2026" not in printed


def test_bench_writes_json(capsys, tmp_path):
    path = tmp_path / "figures.json"
    assert command_line.main(["bench", "--shapes", "1x2x4", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {(row["name"], row["work"]) for row in rows} == {
        (name, work) for name in ("psa_cupy", "psa_cupy staged") for work in ("forward", "backward", "both")
    }
    assert all(row["median_us"] > 0 and row["shape"] == [1, 2, 16] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            (["bench", f"--shapes={wrong}"], "bench: --shapes is .* expected B x heads x side")
            for wrong in ("4", "1x2", "1x2x3x4", "ax2x8", "1x2x0", "0x2x8", "1x2x-8", "", "1x2x8,")
        ),
        (["bench", "--key-dim=0"], "bench: --key-dim is 0, expected 1 to 128"),
        (["bench", "--key-dim=129"], "bench: --key-dim is 129, expected 1 to 128"),
        (["bench", "--json=/nonexistent/x.json"], "bench: --json is /nonexistent/x.json, expected a file in"),
        (["demo", "--batch=0"], "demo: --batch is 0, expected at least 1"),
        (["demo", "--batch=-1"], "demo: --batch is -1, expected at least 1"),
    ],
)
def test_a_wrong_option_is_explained_before_anything_runs(arguments, message):
    with pytest.raises(SystemExit, match=message):
        command_line.main(arguments)


def test_options_alone_are_the_demos(capsys):
    with pytest.raises(SystemExit, match="demo: --batch is 0"):
        command_line.main(["--batch", "0"])
    with pytest.raises(SystemExit):
        command_line.main(["--help"])
    assert "demo|check|bench|info" in capsys.readouterr().out


def test_a_cupy_that_cannot_be_imported_is_a_hint(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it raises ImportError
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    assert command_line.main(["info"]) == 0
    assert "cannot be imported" in capsys.readouterr().out


@needs_compiler
def test_check_goes_on_where_kernels_cannot_be_compiled_together(capsys, monkeypatch):
    """Each check says what it meets, so one bad kernel is not the end of the others."""

    def precompile(self, plans):
        raise RuntimeError("a kernel does not compile")

    monkeypatch.setattr(check, "_CPU_CASES", check._CPU_CASES[3:4])
    monkeypatch.setattr(launching.OnCpu, "precompile", precompile)
    assert command_line.main(["check"]) == 0
    assert "checks passed" in capsys.readouterr().out


def test_bench_refuses_a_folder_before_timing(tmp_path):
    with pytest.raises(SystemExit, match="bench: --json is"):
        command_line.main(["bench", "--shapes", "1x2x4", "--json", str(tmp_path)])


def test_bench_goes_on_without_ceilings(capsys, monkeypatch):
    def measure(*arguments):
        raise ImportError("no cuBLAS\nat all")

    monkeypatch.setattr(bench.ceilings, "measure", measure)
    assert bench._measured_rates(bench.Console(), None, None) is None
    assert "no limits: no cuBLAS" in capsys.readouterr().out
