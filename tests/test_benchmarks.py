"""The published figures are those of benchmarks/results, and the programs behind them run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import environment

ROOT = Path(__file__).parent.parent


def test_the_pages_show_the_results() -> None:
    process = subprocess.run([sys.executable, "benchmarks/tables.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_every_result_says_how_it_was_made() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        result = json.loads(path.read_text())
        assert {"date", "torch", "python", "command", "rows"} <= result.keys(), path.name
        _, program, *words = result["command"].split()
        is_there = importlib.util.find_spec(words[0]) is not None if program == "-m" else (ROOT / program).is_file()
        assert is_there, path.name


@pytest.mark.system  # takes a minute
@pytest.mark.timeout(1200)
def test_the_vision_benchmark_runs_on_any_machine(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "benchmarks/vision.py", "--cpu", "--quick", "--json", str(tmp_path / "out.json")],
        cwd=ROOT, capture_output=True, text=True, env=environment(PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [r["name"] for r in rows] == ["the guide's loop, 0 workers", "drivetrain", "Lightning", "Accelerate", "drivetrain"]
    assert all(r["images_per_second"] > 0 for r in rows)


@pytest.mark.system  # slow
@pytest.mark.timeout(1200)
def test_the_benchmark_of_adapters_runs_on_any_machine(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "benchmarks/lora.py", "--cpu", "--json", str(tmp_path / "out.json")],
        cwd=ROOT, capture_output=True, text=True, env=environment(),
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    full_rows, chat_rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert full_rows["ratio"] > 0 and chat_rows["ratio"] > 0 and "padded" not in full_rows
    assert chat_rows["packing_ratio"] > 1, "packing is faster than padding"


@pytest.mark.system  # slow
@pytest.mark.timeout(1200)
def test_the_benchmark_of_chest_xrays_runs_on_any_machine(tmp_path: Path) -> None:
    programs = ("loader", "eager", "drivetrain")
    process = subprocess.run(
        [sys.executable, "benchmarks/cxr.py", "--cpu", "--questions", "1", "2", "--programs", *programs, "--json", str(tmp_path / "out.json")],
        cwd=ROOT, capture_output=True, text=True, env=environment(),
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["name"], row["questions_per_image"]) for row in rows] == [(name, k) for k in (1, 2) for name in programs]
    assert all(row["pairs_per_second"] > 0 for row in rows)


@pytest.mark.system  # slow
@pytest.mark.timeout(1200)
def test_the_benchmark_of_tuning_runs_on_any_machine(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "benchmarks/tune.py", "--quick", "--json", str(tmp_path / "out.json")],
        cwd=ROOT, capture_output=True, text=True, env=environment(PYTHONPATH=":".join(sys.path)),
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["finished"] == row["trials"] == 4 and row["steps_per_second"] > 0 and f"{row['best']:.1f}" in process.stdout


@pytest.mark.system  # slow
@pytest.mark.timeout(1200)
def test_the_benchmark_of_algorithm_distillation_runs_on_any_machine(tmp_path: Path) -> None:
    words = ["--speed", "--seeds", "1", "--worlds", "darkroom,key-to-door", "--variants", "--json", str(tmp_path / "out.json")]
    process = subprocess.run(
        [sys.executable, "benchmarks/distill.py", "--cpu", *words],
        cwd=ROOT, capture_output=True, text=True, env=environment(PYTHONPATH=":".join(sys.path)),
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    speeds, recipes, variants = ([row for row in rows if row["kind"] == kind] for kind in ("speed", "recipe", "variant"))
    assert [row["name"] for row in speeds] == ["accelerate", "drivetrain", "drivetrain", "drivetrain"] and speeds[1]["ratio"] > 0
    assert [(row["name"], row["seed"]) for row in recipes] == [("darkroom", 1), ("key-to-door", 1)]
    assert [(row["name"], row["tokens"]) for row in variants] == [("ad", 80), ("compressed", 82), ("latent", 81)]
    assert all(0 <= row["of_optimum"] <= 1 for row in recipes + variants)
