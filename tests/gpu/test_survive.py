"""What dies or hangs on a real GPU.

python -m pytest -m gpu tests/gpu/test_survive.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.command import drivetrain, good, write_task

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

STUCK = """\
x, y = batch
        self.calls = getattr(self, "calls", 0) + model.training
        if self.calls == 40:
            torch.cuda._sleep(10**13)  # clock cycles: more than an hour
        return F.cross"""


def test_a_kernel_that_never_ends_is_told_by_its_power(folder: Path) -> None:
    write_task(change=("x, y = batch\n        return F.cross", STUCK))
    command = ["train", "small.py", "epochs=20", "plan.capture=off", "plan.compile=off", "--restarts", "0", "--hang-after", "2s"]
    done = drivetrain(*command, "--name", "stuck")
    assert done.returncode == 202, done.stdout + done.stderr
    print(done.stderr)
    assert "rank 0 hangs" in done.stderr and "without a sign of life" in done.stderr
    assert "busy at" in done.stderr and "it waits in a kernel" in done.stderr


def test_faults_change_nothing(folder: Path) -> None:
    write_task()
    print(good("chaos", "small.py", "--faults", "8", "--steps", "60", "--keep", "kept"))
