"""A hang under the launchers of accelerate and DeepSpeed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.foreign_hangs import HOLDS_GIL, check_hung_run, write_hanging_task
from tests.launching import BIN, free_port, start

MODULE = ("drivetrain", "train", "hanging.py", "--hang-after", "2s")
LAUNCHERS: dict[str, tuple[object, ...]] = {
    "accelerate": (
        "accelerate", "launch", "--multi_gpu", "--num_processes", 2, "--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no",
        "--main_process_port", 0, "-m",
    ),
    "deepspeed": (sys.executable, BIN / "deepspeed", "--num_gpus", 2, "--master_port", 0, "--module"),
}  # fmt: skip

pytestmark = pytest.mark.system


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_hang_under_a_launcher(name: str, tmp_path: Path) -> None:
    line = write_hanging_task(tmp_path, HOLDS_GIL)
    words = [free_port() if word == 0 and name == "deepspeed" else word for word in LAUNCHERS[name]]
    with start(*words, *MODULE, folder=tmp_path, TMPDIR=tmp_path, HF_HOME=tmp_path, DS_ACCELERATOR="cpu") as launcher:
        assert launcher.wait() != 0
        assert "rank 1 hangs in step 6" in launcher.output and "202" in launcher.output, launcher.output
    check_hung_run(tmp_path, line)
