"""What the front end makes of a machine's GPUs, on any machine."""

from __future__ import annotations

import time

import pytest

from drivetrain.hardware import Gpu, Hardware, TorchBuild, check_torch_can_use, detect, torch_build, visible_gpus, with_timeout
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan, choose
from tests.samples import Plain

L4 = tuple(Gpu(i, "NVIDIA L4", 24 * 2**30, (8, 9)) for i in range(4))
T4 = tuple(Gpu(i, "Tesla T4", 16 * 2**30, (7, 5)) for i in range(2))
FOUR = Hardware(16, 2**36, L4, "", "535.1", (12, 2))
CUDA = TorchBuild("2.13.0", "12.6", None)


def test_this_machine_is_described() -> None:
    found = detect()
    assert found.cpu_cores >= 1
    assert found.memory_bytes > 2**28
    assert "CPU core" in found.sentence()
    assert torch_build().version.startswith("2.")


def test_a_gpu_that_torch_cannot_use_stops_with_cause_and_fix() -> None:
    with pytest.raises(Problem, match=r"4 x NVIDIA L4, but torch 2.13.0\+cpu is a CPU build.*--device cpu"):
        check_torch_can_use(FOUR, TorchBuild("2.13.0+cpu", None, None), {})
    with pytest.raises(Problem, match=r"driver 535.1 reaches CUDA 12.2 and torch 2.13.0 needs 13.0: update the driver"):
        check_torch_can_use(FOUR, TorchBuild("2.13.0", "13.0", None), {})
    for hidden in ("", "-1"):
        with pytest.raises(Problem, match=r"CUDA_VISIBLE_DEVICES='.*' hides them: unset it"):
            check_torch_can_use(FOUR, CUDA, {"CUDA_VISIBLE_DEVICES": hidden})
    check_torch_can_use(FOUR, CUDA, {})
    check_torch_can_use(Hardware(2, 2**34), TorchBuild("2.13.0+cpu", None, None), {})


def test_visible_gpus_follow_the_environment_and_the_flag() -> None:
    assert visible_gpus(FOUR, {}) == ["0", "1", "2", "3"]
    assert visible_gpus(FOUR, {"CUDA_VISIBLE_DEVICES": "2,0"}) == ["2", "0"]
    assert visible_gpus(FOUR, {"CUDA_VISIBLE_DEVICES": "2,0"}, "1") == ["0"]
    assert visible_gpus(FOUR, {"CUDA_VISIBLE_DEVICES": "GPU-abc,-1,1"}) == ["GPU-abc"]
    with pytest.raises(Problem, match="no GPU '7' here"):
        visible_gpus(FOUR, {}, "0,7")


def plan(hardware: Hardware, device: str, procs: int, **pins: object) -> Plan:
    return choose(Plain(global_batch=64).settings(), hardware, device=device, world_size=procs, local_procs=procs, pins=pins)


def test_precision_and_backend_follow_the_hardware() -> None:
    assert (plan(FOUR, "cuda", 4).precision, plan(FOUR, "cuda", 4).backend) == ("bf16", "nccl")
    assert plan(Hardware(8, 2**34, T4), "cuda", 2).precision == "fp16"
    assert (plan(FOUR, "cpu", 2).precision, plan(FOUR, "cpu", 2).backend) == ("fp32", "gloo")


def test_the_global_batch_is_kept() -> None:
    for procs, micro, expected in ((1, 64, (64, 1)), (4, 64, (16, 1)), (3, 5, (5, 5)), (2, 7, (7, 5))):
        found = plan(FOUR, "cpu", procs, micro_batch=micro)
        assert (found.micro_batch, found.accumulation) == expected
        assert found.global_batch == 64
    with pytest.raises(Problem, match="leave one of them out"):
        plan(FOUR, "cpu", 1, micro_batch=8, accumulation=3)
    with pytest.raises(Problem, match=r"plan.strategy=ddp does not go with 1 process"):
        plan(FOUR, "cpu", 1, strategy="ddp")


def test_a_plan_survives_json() -> None:
    one = plan(FOUR, "cuda", 4)
    assert Plan.from_json(one.to_json()) == one


def test_a_driver_that_never_answers_costs_the_timeout_only() -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        with_timeout(lambda: time.sleep(30), 0.2)
    assert time.monotonic() - begun < 1
