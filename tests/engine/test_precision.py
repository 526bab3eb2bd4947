"""fp16 skips overflowed steps and counts them; NaN stops; bf16 and fp16 learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drivetrain.engine.group import Group
from drivetrain.engine.loop import Training
from drivetrain.engine.numerics.precision import LossScale
from drivetrain.outcomes import Outcome, Problem
from tests import sample_tasks
from tests.processes import on_ranks
from tests.sample_tasks import Plain, rows, train, training

ALONE = Group(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_like_fp32(precision: str, tmp_path: Path) -> None:
    for name in ("fp32", precision):
        train("Plain", str(tmp_path / name), {"precision": name, "epochs": 6}, None, None, ALONE)
    half, full = rows(tmp_path / precision)[-1], rows(tmp_path / "fp32")[-1]
    assert half["eval/loss"] == pytest.approx(full["eval/loss"], rel=0.1)
    assert half["eval/loss"] != full["eval/loss"]


def test_fp16_overflow_skips_the_step_and_is_counted(tmp_path: Path) -> None:
    job = training("Exploding", str(tmp_path), ALONE, {"precision": "fp16", "spike": 1e4, "epochs": 4})
    before = [p.detach().clone() for p in job.setup.model.parameters()]
    job.execution.step(0)
    assert all(torch.equal(a, b) for a, b in zip(before, job.setup.model.parameters(), strict=True)), (
        "an overflowed step must not move the weights"
    )
    assert job.execution.step.loss_scale is not None
    assert job.execution.step.loss_scale.scale == 2.0**15
    result = job.run_to_end()
    job.setup.observer.close()
    assert result.outcome is Outcome.OK
    last_row = rows(tmp_path)[-1]
    assert last_row["skipped_steps"] >= 1
    assert last_row["loss_scale"] < 2.0**16
    assert last_row["eval/accuracy"] > 0.8


def test_the_loss_scale_doubles_after_2000_good_steps_in_a_row() -> None:
    loss_scale, good, overflow = LossScale(torch.device("cpu")), torch.tensor(0.0), torch.tensor(1.0)
    scales = []
    for steps in ([good] * 1999, [overflow], [good] * 1999, [good]):
        for step in steps:
            loss_scale.update(step)
        scales.append(loss_scale.scale.item())
    assert scales == [2.0**16, 2.0**15, 2.0**15, 2.0**16] and loss_scale.skipped == 1


def test_the_momentum_of_sgd_is_unchanged_by_a_skipped_step(tmp_path: Path) -> None:
    job = training("Exploding", str(tmp_path), ALONE, {"precision": "fp16", "spike": 1e4, "optim": "sgd"})
    job.execution.step(0)
    assert job.execution.step.loss_scale is not None and job.execution.step.loss_scale.skipped == 1
    assert all(not job.execution.optimizer.state[p]["momentum_buffer"].any() for p in job.setup.model.parameters())


def test_fp16_resumes_with_its_scale(tmp_path: Path) -> None:
    options = {"precision": "fp16", "spike": 3e3, "dropout": 0.2}
    on_ranks(2, train, "Exploding", str(tmp_path / "uninterrupted"), options, None, None)
    for stop in (3, 9, None):
        on_ranks(2, train, "Exploding", str(tmp_path / "resumed"), options, None, stop)
    assert rows(tmp_path / "uninterrupted") == rows(tmp_path / "resumed")
    assert rows(tmp_path / "uninterrupted")[-1]["skipped_steps"] > 0


def test_nan_stops_at_its_step_and_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    job = training("Exploding", str(tmp_path), ALONE, {"nan_from": 10, "save_every": 4, "log_every": 6})
    with pytest.raises(Problem, match=r"not a number at step 10 .*last good checkpoint is step 8") as caught:
        job.run_to_end()
    assert caught.value.outcome is Outcome.NAN


def test_a_nan_gradient_with_a_finite_loss_never_reaches_a_checkpoint(tmp_path: Path) -> None:
    job = training("Plain", str(tmp_path), ALONE, {"save_every": 3, "log_every": 100})
    make_third_gradient_nan(job)
    with pytest.raises(Problem, match="not a number at step 3"):
        job.run_to_end()
    assert job.setup.run.checkpoint_steps() == []


def test_a_gradient_that_is_nan_is_noticed_at_its_step_without_a_save(tmp_path: Path) -> None:
    """One step later the loss would be NaN too."""
    job = training("Plain", str(tmp_path), ALONE, {"save_every": 100, "log_every": 1})
    make_third_gradient_nan(job)
    with pytest.raises(Problem, match="not a number at step 3"):
        job.run_to_end()


def make_third_gradient_nan(job: Training) -> None:
    first_parameter = next(iter(job.setup.model.parameters()))
    calls = []

    def make_third_nan(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return gradient * float("nan") if len(calls) == 3 else gradient

    first_parameter.register_hook(make_third_nan)


def test_weights_that_an_update_made_infinite_are_not_saved(tmp_path: Path) -> None:
    """The loss and the gradient of the first step are numbers, and its update is not."""
    job = training("Plain", str(tmp_path), ALONE, {"learning_rate": 1e300, "optim": "sgd", "save_every": 1})
    with pytest.raises(Problem, match="not a number at step 1 "):
        job.run_to_end()
    assert job.setup.run.checkpoint_steps() == []


def test_tf32_needs_a_gpu() -> None:
    from drivetrain.plan.choose import choose

    with pytest.raises(Problem, match="tf32 needs an NVIDIA GPU"):
        choose(Plain(precision="tf32").settings(), sample_tasks.HARDWARE, device="cpu", world_size=1, local_procs=1)
