"""A run reports where its time goes, where a NaN comes from, which rank is out of step, and what a save needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.log.rows import SPIKE_QUIET_STEPS, SpikeDetector
from drivetrain.engine.state import checkpoint
from drivetrain.engine.state.checkpoint import CheckpointWriter
from drivetrain.plan import HOST_SYNC_REASON, Plan
from drivetrain.runs import Run
from drivetrain.watch.heartbeat import PARTS
from drivetrain.watch.time_breakdown import TimeBreakdown
from tests.command import TASK, expect_error, run_drivetrain, run_ok, write_task
from tests.launching import free_port

HEALTHY_SECONDS = {"compute": 8.0, "data": 0.5, "optimizer": 0.5, "loop": 0.2, "communication": 0.3, "evaluation": 0.5}


def time_breakdown(*ranks: dict[str, float], steps: int = 100) -> TimeBreakdown:
    return TimeBreakdown([dict.fromkeys(PARTS, 0.0) | rank for rank in ranks], steps)


# --- where the time goes ---


@pytest.mark.parametrize(
    ("change", "plan", "message"),
    [
        ({}, {}, ""),
        ({"data": 9.0}, {"data": "loader", "workers": 2}, "data loading is 49 % of the time: raise plan.workers from 2 to 8"),
        ({"copy": 4.0}, {"data": "loader"}, "copying batches to the GPU is 29 % of the time: give them smaller"),
        ({"communication": 9.0}, {}, "summing gradients over processes is 48 %"),
        ({"saving": 4.0}, {}, "raise save_every"),
        ({"evaluation": 15.0}, {}, "raise eval_every"),
    ],
)
def test_bottlenecks_are_named(change: dict[str, float], plan: dict[str, Any], message: str) -> None:
    bottleneck = time_breakdown(HEALTHY_SECONDS | change).bottleneck(Plan(**plan), threads=8)
    assert message in bottleneck if message else bottleneck == ""


def test_a_slow_rank_is_named() -> None:
    slow = HEALTHY_SECONDS | {"compute": 16.0, "communication": 0.1}
    fast = HEALTHY_SECONDS | {"compute": 8.0, "communication": 8.1}
    assert "rank 1 is slow: its computing takes 1.9 times as long" in time_breakdown(fast, slow, fast).bottleneck(Plan(), 8)
    assert "rank" not in time_breakdown(HEALTHY_SECONDS, HEALTHY_SECONDS).bottleneck(Plan(), 8)


def test_a_tiny_batch_is_named() -> None:
    bottleneck = time_breakdown(HEALTHY_SECONDS, steps=20_000).bottleneck(Plan(global_batch=4), 8)
    assert "only 4 samples" in bottleneck and "raise global_batch" in bottleneck
    assert not time_breakdown(HEALTHY_SECONDS, steps=20_000).bottleneck(Plan(global_batch=256), 8)
    assert not time_breakdown({"data": 0.5}).bottleneck(Plan(), 8), "half a second is too short for a verdict"


def test_a_host_that_waits_for_its_gpu_is_named() -> None:
    reason = f"small.py:31, `scale = x.max().item()`: {HOST_SYNC_REASON}"
    bottleneck = time_breakdown(HEALTHY_SECONDS).bottleneck(Plan(capture="off", reasons={"capture": reason}), 8)
    assert bottleneck.startswith("small.py:31, `scale = x.max().item()`") and "keep values on the device" in bottleneck
    assert not time_breakdown(HEALTHY_SECONDS).bottleneck(Plan(capture="off", reasons={"capture": "pinned"}), 8)
    assert not time_breakdown(HEALTHY_SECONDS).bottleneck(Plan(capture="on", reasons={"capture": "one graph a step"}), 8)


LOADER = """

class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.data = datasets.digits("train")

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        import time; time.sleep(0.002)
        return self.data[i]
"""


@pytest.mark.system  # slow
def test_the_bottlenecks_of_real_runs_are_named(folder: Path) -> None:
    file = write_task(change=('return datasets.digits("train")', "return Rows()"))
    file.write_text(file.read_text() + LOADER)
    output = run_ok("train", "small.py", "epochs=3", "plan.workers=1", "--name", "loading")
    assert "data loading is" in output and "raise plan.workers from 1" in output, output
    assert "data loading is" in run_ok("status", "loading")

    write_task("late.py", ("return F.cross", "import os, time; time.sleep(0.05 * int(os.environ['RANK']))\n        return F.cross"))
    output = run_ok("train", "late.py", "epochs=6", "--procs", "2", "--name", "late")
    assert "rank 1 is slow: its computing takes" in output, output

    write_task("saving.py")
    slow = ",".join(f"slow@save:{step}" for step in range(5, 60, 5))
    output = run_ok("train", "saving.py", "epochs=4", "save_every=5", "--name", "saving", DRIVETRAIN_FAULTS=slow)
    assert "saving is" in output and "raise save_every" in output, output


def test_a_healthy_run_names_no_bottleneck(folder: Path) -> None:
    write_task(change=("return F.cross", "import time; time.sleep(0.02)\n        return F.cross"))  # stands for the model's work
    output = run_ok("train", "small.py", "epochs=10", "save_every=50", "--name", "healthy")
    assert "\ntime " not in output, output
    time = json.loads(run_ok("status", "healthy", "--json"))["time"]
    assert time["shares"]["compute"] > 0.8 and time["bottleneck"] == ""


# --- not a number ---

WITH_NAN_MODULE = (
    "return nn.Sequential(nn.Flatten(), nn.Linear(64, self.hidden), nn.ReLU()",
    "return nn.Sequential(nn.Flatten(), nn.Linear(64, self.hidden), Root(), nn.ReLU()",
)
MODULE = "\n\nclass Root(nn.Module):\n    def forward(self, x):\n        return {}\n"


@pytest.mark.parametrize(
    ("change", "module", "source"),
    [
        (WITH_NAN_MODULE, "x.sub(x.max()).sqrt()", "the output of 2 (Root); its inputs and weights are numbers"),
        (WITH_NAN_MODULE, "x.abs().sub(x.abs().min()).sqrt()", "the gradient of 1."),
        (("return F.cross_entropy(model(x), y)", "return (F.cross_entropy(model(x), y) - 99).log()"), "", "it is loss() itself"),
        (("return x + 0.1", "return float('nan') * x + 0.1"), "", "the batch itself"),
    ],
    ids=["module", "gradient", "loss", "batch"],
)
def test_the_source_of_a_nan_is_found(change: tuple[str, str], module: str, source: str, folder: Path) -> None:
    file = write_task(change=change)
    file.write_text(file.read_text() + (MODULE.format(module) if module else ""))
    message = expect_error("train", "small.py", "--find-nan", "--name", "nan", code=70)
    assert source in message, message
    assert [e["why"] for e in Run("runs/nan").events() if e["event"] == "restarted"] == ["nan"]


def test_a_nan_that_is_not_repeated_keeps_its_outcome(folder: Path) -> None:
    nan_once = "import os; first = not os.path.exists('seen'); open('seen', 'a').close(); return (float('nan') if first else 1.0) * x + 0.1"
    write_task(change=("return x + 0.1", nan_once))
    message = expect_error("train", "small.py", "--find-nan", "--name", "nan", code=70)
    assert "was not a number at step 1, but --find-nan found nothing" in message and "plan.compile=off" in message
    assert [e["step"] for e in Run("runs/nan").events() if e["event"] == "nan"] == [1]
    assert Run("runs/nan").read()["outcome"] == "nan"


def test_a_nan_says_how_to_find_its_source(folder: Path) -> None:
    write_task(change=("return x + 0.1", "return float('nan') * x + 0.1"))
    assert "drivetrain resume nan --find-nan" in expect_error("train", "small.py", "--name", "nan", code=70)


def test_a_spike_of_the_loss_is_reported_once() -> None:
    spikes = SpikeDetector()
    messages = [spikes.check({"step": i, "train/loss": 1.0 + 0.1 * (i % 3)}) for i in range(1, 100)]
    assert not any(messages)
    assert "jumped to 9 at step 100" in spikes.check({"step": 100, "train/loss": 9.0, "grad_norm": 40.0})
    assert not spikes.check({"step": 101, "train/loss": 9.0}), "reported once"
    assert spikes.check({"step": 101 + SPIKE_QUIET_STEPS, "train/loss": 9.0})
    assert not any(SpikeDetector().check({"step": i, "train/loss": 2.0 ** (10 - i)}) for i in range(60)), "a falling loss is no spike"


# --- collectives ---

EXTRA_BROADCAST = (
    "return F.cross",
    "import os, torch.distributed as dist\n"
    "        dist.broadcast(torch.zeros(3), 0) if os.environ['RANK'] == '1' and model.training else None\n        return F.cross",
)


def test_a_rank_out_of_step_is_named(folder: Path) -> None:
    write_task(change=EXTRA_BROADCAST)
    message = expect_error("train", "small.py", "--procs", "2", "--check-collectives", code=1)
    assert "rank 1 is out of step: it is in broadcast(float32[3]) at small.py:" in message and "the others in all_" in message


COLLECTIVES_OF_A_SUBGROUP = """\
import os, torch.distributed as dist
        global subgroup
        subgroup = globals().get("subgroup") or dist.new_group([1, 2])
        rank = int(os.environ["RANK"])
        if rank and model.training:
            dist.all_reduce(torch.zeros(2), group=subgroup)
            dist.all_reduce(torch.zeros(3 if rank == RANK_WITH_3 else 2), dist.ReduceOp.SUM, subgroup)
        return F.cross"""


@pytest.mark.system
def test_the_collectives_of_a_subgroup_are_compared_within_the_subgroup(folder: Path) -> None:
    words = ["train", "small.py", "steps=4", "save_every=2", "--procs", "3", "--check-collectives"]
    write_task(change=("return F.cross", COLLECTIVES_OF_A_SUBGROUP.replace("RANK_WITH_3", "2")))
    message = expect_error(*words, "--name", "different", code=1)
    assert "collective 2: rank 1 is out of step: it is in all_reduce(float32[2]) at small.py:" in message or (
        "collective 2: rank 2 is out of step: it is in all_reduce(float32[3]) at small.py:" in message
    ), message
    write_task(change=("return F.cross", COLLECTIVES_OF_A_SUBGROUP.replace("RANK_WITH_3", "9")))
    run_ok(*words, "--name", "same")


def test_sharded_saves_are_checked_from_their_own_thread(folder: Path) -> None:
    write_task()
    run_ok("train", "small.py", "steps=6", "save_every=1", "plan.strategy=fsdp", "--procs", "2", "--check-collectives", "--name", "parts")
    assert Run("runs/parts").checkpoint_steps()[-1] == 6


def test_a_collective_imported_by_name_is_checked_too(folder: Path) -> None:
    text = TASK.replace("import torch\n", "import torch, os\nfrom torch.distributed import all_gather\n", 1)
    gather = "kind = torch.float64 if os.environ['RANK'] == '1' else torch.float32; all_gather([torch.zeros(1, dtype=kind) for _ in '12'], torch.zeros(1, dtype=kind))"
    write_task(change=("return F.cross", f"{gather}\n        return F.cross"), text=text)
    message = expect_error("train", "small.py", "--procs", "2", "--check-collectives", code=1)
    assert "out of step: it is in all_gather(float" in message and "at small.py:" in message


def test_checked_collectives_change_nothing(folder: Path) -> None:
    write_task()
    run_ok("train", "small.py", "--procs", "2", "--name", "plain")
    run_ok("train", "small.py", "--procs", "2", "--name", "checked", "--check-collectives")
    assert Path("runs/plain/model/model.safetensors").read_bytes() == Path("runs/checked/model/model.safetensors").read_bytes()


# --- profile, disk ---


def test_a_profile_is_printed_and_written(folder: Path) -> None:
    write_task()
    output = run_ok("train", "small.py", "--profile", "5", "--name", "seen")
    assert "profile of 5 steps:" in output and "most of it aten::" in output
    assert json.loads(Path("runs/seen/logs/profile.json").read_text())["traceEvents"]
    assert "aten::addmm" in Path("runs/seen/logs/profile.txt").read_text()


def environment_of_one_rank() -> dict[str, str]:
    """Returns the variables that a launcher sets for a single process."""
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def test_flags_that_another_launcher_leaves_without_effect_are_named(folder: Path) -> None:
    write_task()
    output = run_ok(
        "train", "small.py", "steps=4", "--restarts", "5", "--hang-after", "1min", "--name", "flags", **environment_of_one_rank()
    )
    assert "--restarts is ignored, because only the launcher can restart them" in output and "--hang-after" not in output
    assert "ignored" not in run_ok("train", "small.py", "steps=4", "--name", "plain", **environment_of_one_rank())


def test_a_profile_under_another_launcher_and_of_too_short_a_run(folder: Path) -> None:
    write_task()
    assert "profile of 5 steps:" in run_ok("train", "small.py", "--profile", "5", "--name", "seen", **environment_of_one_rank())
    assert Path("runs/seen/logs/profile.txt").is_file()
    assert "no profile: it begins with step 12" in run_ok("train", "small.py", "steps=4", "--profile", "5", "--name", "short")


def test_a_save_on_a_full_disk_reports_the_missing_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, notices = Run(tmp_path / "run"), list[str]()
    writer = CheckpointWriter(run, 2, lambda name: None, notices.append)
    writer.save(1, {"model/x": torch.zeros(100)}, {}, None)
    writer.wait()
    free = checkpoint.shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: free)
    writer.save(2, {"model/x": torch.zeros(1_000_000)}, {}, None)
    writer.wait()
    assert "the disk is full: 3.0 MB are missing (1.0 MB free); training goes on" in notices[0]
    assert run.checkpoint_steps() == [1] and not list(run.checkpoints.glob(".*"))


def test_flags_are_explained() -> None:
    text = run_drivetrain("train", "--help").stdout
    for flag in ("--restarts", "--hang-after", "--time-limit", "--find-nan", "--profile", "--check-collectives"):
        assert flag in text
