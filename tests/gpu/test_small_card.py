"""A GPU of which others hold most: what is left decides the plan, and the plan runs in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]  # alone: it holds most of the GPU

FREE = 6 << 30  # bytes that are left
HOG = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("holds", flush=True)
sys.stdin.read()
"""
TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from drivetrain import Task, Tensors


class Deep(Task):
    width: int = 4096
    layers: int = 24
    global_batch: int = 64
    steps: int = 2
    learning_rate: float = 1e-4

    def model(self):
        block = lambda: nn.Sequential(nn.Linear(self.width, self.width), nn.GELU())
        return nn.Sequential(*(block() for _ in range(self.layers)), nn.Linear(self.width, 10))

    def train_data(self):
        return Tensors(torch.randn(256, self.width), torch.randint(10, (256,)))

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
"""


@pytest.fixture
def crowded() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", HOG, str(FREE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as hog:
        assert hog.stdout is not None and hog.stdout.readline() == "holds\n"
        yield
        hog.kill()


def drivetrain(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "deep.py").write_text(TASK)
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "drivetrain", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


def planned(folder: Path) -> dict[str, Any]:
    shown = drivetrain(folder, "plan", "deep.py:Deep", "--json")
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)["plan"]  # type: ignore[no-any-return]


def test_with_the_whole_gpu_nothing_is_sharded(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert plan["strategy"] == "single" and plan["offload"] == "none"


@pytest.mark.parametrize("known", [True, False], ids=["planned", "at-once"])
def test_with_little_of_it_the_plan_is_another_and_runs(known: bool, tmp_path: Path, crowded: None) -> None:
    if known:
        plan = planned(tmp_path)
        assert plan["strategy"] == "fsdp" and plan["offload"] != "none", plan
        assert any(one["choice"] == "single" and "GiB" in one["why"] for one in plan["rejected"]), plan["rejected"]
        assert sum(plan["predicted"]["memory_bytes"].values()) < FREE
    ran = drivetrain(tmp_path, "train", "deep.py:Deep", "--run-dir", "runs/deep")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    facts = json.loads((tmp_path / "runs/deep/run.json").read_text())
    assert facts["plan"]["strategy"] == "fsdp" and facts["plan"]["offload"] != "none"
    assert facts["outcome"] == "ok"
