"""PPO's kernels compile for every supported shape, which needs NVRTC but no GPU."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from contextlib import nullcontext
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain.data import StepperContext
from drivetrain.tasks.rl.envs import Env
from drivetrain.tasks.rl.envs.cartpole import CartPoleEnv
from drivetrain.tasks.rl.fused import program
from drivetrain.tasks.rl.fused.stepper import KERNEL_ENVS, why_unsupported
from drivetrain.tasks.rl.nets import MlpAgent
from drivetrain.tasks.rl.ppo import Ppo
from drivetrain.tasks.rl.rollout import Rollout
from drivetrain.tasks.rl.worlds import CartPole as CartPoleTask

DEFAULT = {"INPUTS": 4, "WIDTH": 64, "ACTIONS": 2, "LAYERS": 2, "RELU": 0, "RESIDENT": 3}
SHAPES: list[tuple[str, dict[str, int], str]] = [
    ("sm_90", {}, "cartpole.cu"),
    ("sm_80", {}, "cartpole.cu"),
    ("sm_90", {"INPUTS": 2}, "bandit.cu"),
    ("sm_90", {"WIDTH": 32, "LAYERS": 1, "RELU": 1, "RESIDENT": 1}, ""),
    ("sm_80", {"INPUTS": 64, "ACTIONS": 64, "WIDTH": 48, "LAYERS": 3, "RESIDENT": 1}, ""),
    ("sm_90", {"INPUTS": 5, "ACTIONS": 9, "WIDTH": 128, "LAYERS": 3, "RESIDENT": 1}, ""),
    ("sm_90", {"INPUTS": 64, "ACTIONS": 64, "WIDTH": 32}, ""),
    ("sm_90", {"INPUTS": 45, "ACTIONS": 4}, ""),
]


def nvrtc() -> ctypes.CDLL:
    package_files = importlib.metadata.files("nvidia-cuda-nvrtc") or []
    return ctypes.CDLL(str(next(Path(str(f.locate())) for f in package_files if f.name.startswith("libnvrtc.so"))))


def compile_kernels(arch: str, constants: dict[str, int], rules: str) -> tuple[bytes, str]:
    """Returns the kernels, and the compiler's output."""
    folder = files("drivetrain.tasks.rl.fused")
    source = "\n".join(folder.joinpath(name).read_text() for name in ("ppo.cu", rules, "play.cu") if name)
    options = [
        f"--gpu-architecture={arch}",
        "-default-device",
        "--std=c++17",
        "--ptxas-options=-v",
        *(f"-D{k}={v}" for k, v in constants.items()),
    ]
    log: list[str] = []
    return program.compile_source(nvrtc(), source, options, log.append), "".join(log)


@pytest.mark.system  # the compiler is slow
@pytest.mark.parametrize(("arch", "shape", "rules"), SHAPES)
def test_kernels_compile(arch: str, shape: dict[str, int], rules: str) -> None:
    image, log = compile_kernels(arch, DEFAULT | shape, rules)
    assert image.startswith(b"\x7fELF")
    names = set(re.findall(r"entry function '(\w+)'", log))
    assert {
        "prepare",
        "learn",
        "reduce_gradients",
        "update",
        "advance",
        "act",
        "record_step",
        "draw",
        "value",
        "compute_advantages",
        "shuffle",
    } <= names
    assert ("play" in names) is bool(rules)
    if not shape:  # the sums of gradients must stay in registers
        spilled = re.search(r"'learn'.*?(\d+) bytes spill stores", log, re.DOTALL)
        assert spilled is not None and int(spilled[1]) <= 128


@pytest.mark.system
def test_a_failed_compilation_gives_the_reason() -> None:
    with pytest.raises(program.KernelsUnavailable, match=r"do not compile here.*INPUTS"):
        compile_kernels("sm_90", {}, "")


def test_unsupported_trainings_are_named() -> None:
    class OwnLoss(Ppo):
        def loss(self, model: Any, batch: Any) -> Any:
            return super().loss(model, batch)

    def why(task_class: Any = Ppo, adam: Any = torch.optim.AdamW, horizon: int = 16, actions: int = 2, **settings: Any) -> str:
        task = task_class(**settings)
        agent = MlpAgent(4, actions, task.width, task.layers, task.activation)
        return why_unsupported(task, Rollout(CartPoleEnv(), 64, horizon, 4, 0.99, 0.95), agent, adam(agent.parameters()))

    assert why() == "" and why(width=128, layers=3) == ""
    assert "32, 48, ... 128" in why(width=40) and "1 to 3 layers" in why(layers=4)
    assert "256 samples" in why(horizon=512) and "64 actions" in why(actions=65)
    assert "kl_stop" in why(kl_stop=0.1) and "a loss of its own" in why(task_class=OwnLoss)
    assert "all parameters" in why(adam=lambda p: torch.optim.AdamW(list(p)[:-1]))
    assert "Adam" in why(adam=lambda p: torch.optim.SGD(p, 0.1)) and "Adam" in why(adam=lambda p: torch.optim.Adam(p, weight_decay=0.1))
    assert all(
        issubclass(env, Env) and files("drivetrain.tasks.rl.fused").joinpath(rules).is_file() for env, (rules, _) in KERNEL_ENVS.items()
    )


@pytest.mark.parametrize(
    ("capability", "missing_library", "message"),
    [
        ((7, 5), "", "this GPU (compute capability 7.5)"),
        ((9, 0), "libcuda", "no NVIDIA driver here"),
        ((9, 0), "nvrtc", "no CUDA compiler (NVRTC)"),
    ],
)
def test_without_kernels_the_engine_takes_the_steps_and_the_user_gets_a_notice(
    capability: tuple[int, int], missing_library: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def library(name: str) -> Any:
        if missing_library and missing_library in name:
            raise OSError(name)
        return SimpleNamespace()

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(program, "ctypes", SimpleNamespace(CDLL=library))
    task = CartPoleTask(envs=8, horizon=8, global_batch=32)
    model: Any = task.model()
    optimizer = torch.optim.AdamW(model.parameters())
    notices: list[str] = []
    context = StepperContext(
        torch.device("cpu"),
        optimizer,
        torch.zeros(8),
        torch.zeros(4, 16),
        1,
        lambda epoch: [0],
        lambda work: lambda: None,
        lambda: nullcontext([]),
        notices.append,
    )
    before = [p.data_ptr() for p in model.parameters()]
    assert task.train_data().stepper(model, context) is None
    assert len(notices) == 1 and notices[0].startswith("PPO's own kernels are not used: ") and message in notices[0]
    assert [p.data_ptr() for p in model.parameters()] == before and not optimizer.state, "the model and the optimizer are unchanged"
