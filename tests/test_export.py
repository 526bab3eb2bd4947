"""`export`: ONNX that gives torch's numbers, whatever the number of rows; what cannot be exported is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file

import drivetrain
from drivetrain.recipe import find_task, instantiate
from tests.command import TASK, bad, good, write_task
from tests.command import drivetrain as drivetrain_command

SMALL = ["epochs=1", "envs=8", "horizon=8", "global_batch=32", "eval_episodes=2", "-q"]


ODD = """

class Odd(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        y = self.last(x.flatten(1))
        return y if y.sum().item() > 0 else -y
"""


def session(path: Path) -> Any:
    return onnxruntime.InferenceSession(str(path))


def test_a_users_model_as_its_task_calls_it(folder: Path) -> None:
    write_task()
    good("train", "small.py", "--name", "one", "-q")
    said = json.loads(good("export", "one", "--json"))
    assert said["graphs"]["model"]["inputs"] == [{"name": "input", "dtype": "float32", "shape": [8, 8]}]
    model = drivetrain.load("runs/one")
    x = torch.rand(5, 8, 8)
    [found] = session(Path("runs/one/model/model.onnx")).run(["output"], {"input": x.numpy()})
    np.testing.assert_allclose(found, model(x).detach().numpy(), atol=1e-5)
    assert b"site-packages" not in Path("runs/one/model/model.onnx").read_bytes(), "it tells nothing of this machine"
    assert load_file("runs/one/model/model.safetensors").keys() == model.state_dict().keys()


def test_a_classifier_takes_raw_images(folder: Path) -> None:
    good("train", "digits", "epochs=2", "--name", "one", "-q")
    assert "images -> logits, probability" in good("export", "one", "--out", "out")
    from drivetrain import datasets

    images, labels = datasets.digits("test")[:]
    [probability] = session(Path("out/model.onnx")).run(["probability"], {"images": torch.as_tensor(images).numpy()})
    found = json.loads(Path("runs/one/model/task.json").read_text())["metrics"]["accuracy"]
    assert (probability.argmax(1) == np.asarray(labels)).mean() == pytest.approx(found, abs=0.003)
    assert sorted(p.name for p in Path("out").iterdir()) == ["export.json", "model.onnx", "model.safetensors"]


@pytest.mark.parametrize(
    "world",
    [
        ["cartpole"],
        pytest.param(["snake", "grid=6", "agents=2", "policies=independent"], marks=pytest.mark.system),
        pytest.param(["snake", "grid=5", "agents=1", "walls=true"], marks=pytest.mark.system),
    ],
    ids=" ".join,
)
def test_a_world_is_played_by_its_graphs_alone(world: list[str], folder: Path) -> None:
    """100 steps by ONNX alone, and the same by torch: the same states."""
    good("train", *world, *SMALL, "--name", "one")
    good("export", "one", "-q")
    reset, policy, step = (session(Path(f"runs/one/model/{name}.onnx")) for name in ("reset", "policy", "step"))
    card = json.loads(Path("runs/one/model/export.json").read_text())
    settings = card["settings"]
    task = instantiate(find_task(world[0]), settings)
    env, agent = task.env(), drivetrain.load("runs/one")
    random = np.random.default_rng(0)
    draws = {p["name"]: p["shape"] for p in card["graphs"]["reset"]["inputs"]}
    first = random.random((3, *draws["random"]), dtype=np.float32)
    names = [o.name for o in reset.get_outputs()]
    told = dict(zip(names, reset.run(names, {"random": first}), strict=True))
    state = env.reset(torch.from_numpy(first))
    for _ in range(100):
        draw, chance = random.random((3, env.agents), dtype=np.float32), random.random(first.shape, dtype=np.float32)
        [action] = policy.run(["action"], {"observation": told["observation"], "random": draw})
        logits = agent.policy(env.observe(state).reshape(-1, *env.shape)).view(3, env.agents, -1)
        mine = (logits.softmax(-1).cumsum(-1)[..., :-1] <= torch.from_numpy(draw)[..., None]).sum(-1)
        assert np.array_equal(action, mine.numpy())
        given = {k.removeprefix("next_"): v for k, v in told.items() if k.startswith("next_")} | {"action": action, "random": chance}
        given = {i.name: given[i.name] for i in step.get_inputs()}
        told = dict(zip([o.name for o in step.get_outputs()], step.run(None, given), strict=True))
        state, _, _ = env.step(state, mine if env.agents > 1 else mine[:, 0], torch.from_numpy(chance))
        for name, value in state.items():
            np.testing.assert_allclose(told[f"next_{name}"], value.numpy(), atol=1e-4)


@pytest.mark.system  # it takes its time
def test_a_limit_ends_an_episode(folder: Path) -> None:
    good("train", "bandit", *SMALL, "--name", "one")
    good("export", "one", "-q")
    step = session(Path("runs/one/model/step.onnx"))
    zero = np.zeros((2, 1), dtype=np.int64)
    steps = np.array([97, 99])
    [done] = step.run(["done"], {"side": zero[:, 0], "steps": steps, "action": zero, "random": zero.astype(np.float32)})
    assert done.tolist() == [False, True]


def test_what_cannot_be_exported_is_refused(folder: Path) -> None:
    write_task(text=TASK + ODD, change=("return nn.Sequential(", "return Odd(self.hidden)\n        return nn.Sequential("))
    good("train", "small.py", "--name", "one", "-q")
    assert "model cannot be exported: " in bad("export", "one", code=2)
    assert not list(Path("runs/one/model").glob("*.onnx"))
    assert "no run" in bad("export", "nothing", code=2)


NOISY = """
    def exports(self, model):
        class Noisy(nn.Module):
            def forward(self, x):
                return {"output": x + torch.rand_like(x)}

        class Plain(nn.Module):
            def forward(self, x):
                return {"output": 2 * x}

        x = torch.ones(4, 3)
        return {"first": (Plain(), {"x": x}), "second": (Noisy(), {"x": x})}
"""


@pytest.mark.system  # it takes its time
def test_a_graph_that_differs_from_torch_is_refused_and_nothing_is_left(folder: Path) -> None:
    """onnxruntime draws other numbers than torch; the graph before it is good, and of no use without it."""
    write_task(text=TASK + NOISY)
    good("train", "small.py", "--name", "one", "-q")
    before = sorted(Path("runs/one").rglob("*"))
    message = bad("export", "one", code=2)
    assert "second.onnx was refused: with " in message and "its 'output' differs from torch's" in message
    assert sorted(Path("runs/one").rglob("*")) == before
    assert "was refused" in bad("export", "one", "--out", "files", code=2)
    assert not Path("files").exists()


@pytest.mark.system  # it takes its time
def test_an_unfinished_runs_last_checkpoint(folder: Path) -> None:
    write_task()
    drivetrain_command("train", "small.py", "--name", "one", "-q", "save_every=5", DRIVETRAIN_FAULTS="kill@step:12")
    good("export", "one")
    assert sorted(p.name for p in Path("runs/one/export").iterdir()) == ["export.json", "model.onnx", "model.safetensors"]
    assert not Path("runs/one/model/model.safetensors").exists()
