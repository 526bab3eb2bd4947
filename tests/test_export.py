"""`export`: ONNX graphs give torch's numbers for any number of rows; models that cannot be exported are refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import drivetrain
from drivetrain import Outcome, Problem, Task, Tensors
from drivetrain.cli import export as cli_export
from drivetrain.cli import predict as cli_predict
from drivetrain.engine.model import weights_of
from drivetrain.export.calls import graphs_of
from drivetrain.export.graphs import WrittenGraph, write_graph
from drivetrain.task_ref import find_task, instantiate
from tests.command import TASK, expect_error, run_drivetrain, run_ok, write_task

SMALL = ["epochs=1", "envs=8", "horizon=8", "global_batch=32", "eval_episodes=2", "-q"]


DATA_DEPENDENT_MODEL = """

class UnusualModel(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        y = self.last(x.flatten(1))
        return y if y.sum().item() > 0 else -y
"""


def session(path: Path) -> Any:
    return onnxruntime.InferenceSession(str(path))


PREDICT = """
    def predict(self, model, given, tokens: int = 1):
        return {"number": 7, "fault": lambda: undefined, "piece": [1.5, "x"]}[given] if given != "fault" else undefined
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, exported into a folder with a space in its name."""
    top = tmp_path_factory.mktemp("finished")
    old_folder = Path.cwd()
    os.chdir(top)
    try:
        write_task(text=TASK + PREDICT)
        run_ok("train", "small.py", "epochs=1", "--name", "one", "-q")
        output = run_ok("export", "one", "--out", "a folder")
        assert "running the code kept in runs/one/task" in output, "the user sees that code of the run is executed"
    finally:
        os.chdir(old_folder)
    return top


@pytest.fixture
def one(finished: Path, folder: Path) -> Path:
    """A copy of the finished run."""
    for name in ("runs", "a folder"):
        shutil.copytree(finished / name, name)
    return Path("runs/one")


def test_a_users_model_is_exported_as_metrics_calls_it(one: Path) -> None:
    card = json.loads(Path("a folder/export.json").read_text())
    assert card["graphs"]["model"]["inputs"] == [{"name": "input", "dtype": "float32", "shape": ["rows", 8, 8]}]
    model = drivetrain.load("runs/one")
    x = torch.rand(5, 8, 8)
    [output] = session(Path("a folder/model.onnx")).run(["output"], {"input": x.numpy()})
    np.testing.assert_allclose(output, model(x).detach().numpy(), atol=1e-5)
    assert b"site-packages" not in Path("a folder/model.onnx").read_bytes(), "the file has no paths of this machine"
    assert load_file("a folder/model.safetensors").keys() == model.state_dict().keys()


def test_every_file_has_its_sha256(one: Path) -> None:
    out = Path("a folder")
    card = json.loads((out / "export.json").read_text())
    assert card["sha256"].keys() == {"model.onnx", "model.safetensors"}
    assert {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in card["sha256"]} == card["sha256"]
    weights = out / "model.safetensors"
    assert weights_of(str(weights))
    damaged = bytearray(weights.read_bytes())
    damaged[-3] ^= 255
    weights.write_bytes(damaged)
    with pytest.raises(Problem, match=r"model.safetensors is broken: its SHA-256 is not the one in export.json"):
        weights_of(str(weights))


def test_an_unwritable_folder_is_refused(one: Path) -> None:
    Path("file").write_text("")
    for out, why in (
        ("file/deep", "file is a file: name a folder"),
        ("/proc/none", "/proc/none cannot be written: No such file or directory"),
    ):
        with pytest.raises(Problem, match=why):
            cli_export.run("export", ["one", "--out", out, "-q"])


def test_an_interrupted_export_leaves_nothing(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:1000])
        raise KeyboardInterrupt

    before = {path: path.read_bytes() for path in Path("a folder").iterdir()}
    dead_process = subprocess.Popen(["true"])
    dead_process.wait()
    left_folder = Path("a folder") / f".export-{os.uname().nodename}-{dead_process.pid}-x"  # as a killed export leaves it
    left_folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cli_export.run("export", ["one", "--out", "a folder", "-q"])
    assert {path: path.read_bytes() for path in Path("a folder").iterdir()} == before
    assert sorted(path.name for path in Path().iterdir()) == ["a folder", "runs"]


def test_predict_may_yield_text_and_other_results_are_refused(one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_predict.run("predict", ["one", "piece"]) == 0
    output = capsys.readouterr()
    assert output.out == "1.5x\n" and "running the code kept in runs/one/task" in output.err
    with pytest.raises(Problem, match=r"Small.predict gave a int: yield pieces of text"):
        cli_predict.run("predict", ["one", "number"])
    with pytest.raises(Problem) as caught:
        cli_predict.run("predict", ["one", "fault"])
    assert caught.value.outcome is Outcome.USER_ERROR
    assert "NameError: name 'undefined'" in str(caught.value) and "drivetrain/cli" not in str(caught.value), (
        "only lines of the user's code are shown"
    )


# --- unusual models ---------------------------------------------------------------------------------

X, Y = torch.rand(20, 6), torch.randint(0, 3, (20,))


@dataclass
class Result:
    logits: Tensor
    parts: Any


class Net(nn.Module):
    """A module whose forward() is an argument."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.linear, self.parts = nn.Linear(6, 3), nn.ModuleDict(parts)
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)


class TaskWithCall(Task):
    """A task whose `call` calls the model in metrics()."""

    call = staticmethod(lambda model, x: model(x))
    samples = None

    def train_data(self) -> Any:
        return Tensors(X, Y) if self.samples is None else self.samples

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        type(self).call(model, batch[0])
        return {}


def exported(folder: Path, net: Net, **attributes: Any) -> WrittenGraph:
    """Exports the model of a task that has these attributes."""
    static = {name: staticmethod(value) if callable(value) else value for name, value in attributes.items()}
    task = type("Named", (TaskWithCall,), static)()
    [(name, graph)] = graphs_of(task, net.eval()).items()
    return write_graph(name, graph, folder)


def shapes(specs: Any) -> dict[str, Any]:
    return {spec.name: (spec.dtype, spec.shape) for spec in specs}


def test_dicts_keywords_whole_numbers_and_nested_results_have_names(tmp_path: Path) -> None:
    def forward(self: Net, batch: dict[str, Any], *, scale: Tensor, flag: bool) -> Result:
        y = self.linear(batch["x"]) + self.parts["embed"](batch["ids"][0]) * scale
        return Result(y, [{"scale": y + flag}, None, (batch["x"], 3)])

    def call(model: nn.Module, x: Tensor) -> Any:
        return model({"x": x, "ids": [(9 * x[:, 0]).long()]}, scale=x[:, :1], flag=True)

    graph = exported(tmp_path, Net(forward, embed=nn.Embedding(10, 3)), call=call, samples=Tensors(X[:1], Y[:1]))
    assert shapes(graph.inputs) == {
        "x": ("float32", ["rows", 6]), "ids_0": ("int64", ["rows"]), "scale": ("float32", ["rows", 1]),
    }  # fmt: skip
    assert list(shapes(graph.outputs)) == ["logits", "parts_0_scale", "parts_2_0"]


@pytest.mark.system
def test_a_time_first_model_has_its_rows_in_the_second_dimension(tmp_path: Path) -> None:
    def collate(samples: list[Any]) -> Any:
        return np.stack([np.tile(x.numpy(), (5, 1)) for x, _ in samples], 1), None

    net = Net(lambda self, x: self.parts["rnn"](x)[0], rnn=nn.GRU(6, 4))
    graph = exported(tmp_path, net, samples=list(zip(X, Y, strict=True)), collate=collate)
    assert shapes(graph.inputs) == {"input": ("float32", [5, "rows", 6])}
    [output] = session(tmp_path / "model.onnx").run(None, {"input": np.ones((5, 13, 6), "f4")})
    assert output.shape == (5, 13, 4)


def padded(samples: list[Any]) -> Any:
    return nn.utils.rnn.pad_sequence([x.repeat(2 + i, 1) for i, (x, _) in enumerate(samples)], batch_first=True), None


def test_batches_are_those_of_collate_and_lengths_are_free(tmp_path: Path) -> None:
    net = Net(lambda self, x: self.parts["rnn"](x)[0], rnn=nn.GRU(6, 4, batch_first=True))
    graph = exported(tmp_path, net, samples=list(zip(X, Y, strict=True)), collate=padded)
    for [(_, (rows, length, _))] in (shapes(graph.inputs).values(), shapes(graph.outputs).values()):
        assert rows == "rows" and isinstance(length, str)
    x = torch.rand(2, 40, 6)
    np.testing.assert_allclose(session(tmp_path / "model.onnx").run(None, {"input": x.numpy()})[0], net(x).detach().numpy(), atol=1e-5)


class Branch(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if y.sum() > 0 else -y


class Svd(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.svd(x[:, :, None] * x[:, None])[0]


@dataclass
class Batch:
    x: Tensor


@pytest.mark.parametrize(
    ("net", "members", "message"),
    [
        (Branch(len), {}, r"test_export.py:\d+ \(return y if y.sum\(\) > 0 else -y\) branches on the values of a tensor\nUse torch.where"),
        (Svd(len), {}, r"test_export.py:\d+ \(return torch.linalg.svd.*No ONNX function found.*\nChange that part, or define exports"),
        (Net(lambda self, x: F.dropout(self.linear(x))), {}, r"outputs change from call to call, because of random numbers in test_export.py:\d+ .*F.dropout"),
        (Net(lambda self, x: torch.multinomial(self.linear(x).softmax(-1), 1)), {}, "random numbers of .*multinomial.*\n.* exports\\(model\\)"),
        (Net(lambda self, x: self.linear(x).detach().numpy()), {}, "gives a ndarray without tensors: define exports"),
        (Net(lambda self, x: torch.fft.fft(self.linear(x))), {}, "'output' is complex64"),
        (Net(lambda self, x, n: self.linear(x) / n), {"call": lambda model, x: model(x, len(x))}, r"differs between batches \(8, 3, 1\)"),
        (Net(lambda self, b: self.linear(b.x)), {"call": lambda model, x: model(Batch(x))}, "called with a Batch, whose tensors have no names"),
        (Net(lambda self, x: x), {"call": lambda model, x: model.linear(x)}, "metrics never calls the model itself"),
        pytest.param(Net(lambda self, x: self.parts["rnn"](x.transpose(0, 1))[0], rnn=nn.GRU(6, 4)),
            {"samples": list(zip(X, Y, strict=True)), "collate": padded}, r"works for the sizes it was made with \(input 8x9x6\): make all batches of", marks=pytest.mark.system),
    ],
    ids=["branch", "operator", "dropout", "sampling", "no tensors", "complex", "number", "object", "method", "lengths"],
)  # fmt: skip
def test_an_unexportable_model_is_refused_in_two_lines(net: Net, members: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(Problem, match=message) as caught:
        exported(tmp_path, net, **members)
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("exports", "message"),
    [
        ([1], "gave a list: return a dict"),
        ({"a/b": (nn.Identity(), {"x": X})}, "names a graph 'a/b'"),
        ({"a": nn.Identity()}, r"exports\(model\)\['a'\] must be"),
        ({"a": (nn.Identity(), {"x": X, "y": X[:3]})}, "have different numbers of rows: {'x': 20, 'y': 3}"),
    ],
    ids=["list", "path", "no inputs", "rows"],
)
def test_malformed_exports_are_refused(exports: Any, message: str) -> None:
    with pytest.raises(Problem, match=message):
        graphs_of(type("Named", (TaskWithCall,), {"exports": lambda self, model: exports})(), nn.Identity())


def test_a_classifier_takes_raw_images(folder: Path) -> None:
    run_ok("train", "digits", "epochs=2", "--name", "one", "-q")
    assert "images -> logits, probability" in run_ok("export", "one", "--out", "out")
    from drivetrain import datasets

    images, labels = datasets.digits("test")[:]
    [probability] = session(Path("out/model.onnx")).run(["probability"], {"images": torch.as_tensor(images).numpy()})
    accuracy = json.loads(Path("runs/one/model/task.json").read_text())["metrics"]["accuracy"]
    assert (probability.argmax(1) == np.asarray(labels)).mean() == pytest.approx(accuracy, abs=0.003)
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
def test_the_graphs_of_an_environment_reproduce_it(world: list[str], folder: Path) -> None:
    """100 steps with the ONNX graphs give the same states as 100 steps with torch."""
    run_ok("train", *world, *SMALL, "--name", "one")
    run_ok("export", "one", "-q")
    reset, policy, step = (session(Path(f"runs/one/model/{name}.onnx")) for name in ("reset", "policy", "step"))
    card = json.loads(Path("runs/one/model/export.json").read_text())
    settings = card["settings"]
    task = instantiate(find_task(world[0]), settings)
    env, agent = task.env(), drivetrain.load("runs/one")
    random = np.random.default_rng(0)
    input_shapes = {p["name"]: p["shape"] for p in card["graphs"]["reset"]["inputs"]}
    first = random.random((3, *input_shapes["random"][1:]), dtype=np.float32)
    names = [o.name for o in reset.get_outputs()]
    outputs = dict(zip(names, reset.run(names, {"random": first}), strict=True))
    state = env.reset(torch.from_numpy(first))
    for _ in range(100):
        policy_random, step_random = random.random((3, env.agents), dtype=np.float32), random.random(first.shape, dtype=np.float32)
        [action] = policy.run(["action"], {"observation": outputs["observation"], "random": policy_random})
        logits = agent.policy(env.observe(state).reshape(-1, *env.shape)).view(3, env.agents, -1)
        expected_action = (logits.softmax(-1).cumsum(-1)[..., :-1] <= torch.from_numpy(policy_random)[..., None]).sum(-1)
        assert np.array_equal(action, expected_action.numpy())
        inputs = {k.removeprefix("next_"): v for k, v in outputs.items() if k.startswith("next_")} | {
            "action": action,
            "random": step_random,
        }
        inputs = {i.name: inputs[i.name] for i in step.get_inputs()}
        outputs = dict(zip([o.name for o in step.get_outputs()], step.run(None, inputs), strict=True))
        state, _, _ = env.step(state, expected_action if env.agents > 1 else expected_action[:, 0], torch.from_numpy(step_random))
        for name, value in state.items():
            np.testing.assert_allclose(outputs[f"next_{name}"], value.numpy(), atol=1e-4)


@pytest.mark.system  # slow
def test_a_limit_ends_an_episode(folder: Path) -> None:
    run_ok("train", "bandit", *SMALL, "--name", "one")
    run_ok("export", "one", "-q")
    step = session(Path("runs/one/model/step.onnx"))
    zero = np.zeros((2, 1), dtype=np.int64)
    steps = np.array([97, 99])
    [process] = step.run(["done"], {"side": zero[:, 0], "steps": steps, "action": zero, "random": zero.astype(np.float32)})
    assert process.tolist() == [False, True]


def test_a_refused_export_writes_nothing(folder: Path) -> None:
    write_task(
        text=TASK + DATA_DEPENDENT_MODEL,
        change=("return nn.Sequential(", "return UnusualModel(self.hidden)\n        return nn.Sequential("),
    )
    run_ok("train", "small.py", "--name", "one", "-q")
    assert "model cannot be exported: small.py:" in expect_error("export", "one", code=2)
    assert not list(Path("runs/one/model").glob("*.onnx"))
    assert "no run" in expect_error("export", "nothing", code=2)


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


@pytest.mark.system  # slow
def test_a_graph_that_differs_from_torch_is_refused_and_nothing_is_left(folder: Path) -> None:
    """The second graph gives other numbers each time; the first one is correct but useless without it."""
    write_task(text=TASK + NOISY)
    run_ok("train", "small.py", "--name", "one", "-q")
    before = sorted(Path("runs/one").rglob("*"))
    message = expect_error("export", "one", code=2)
    assert "second cannot be exported: its outputs change from call to call, because of random numbers in small.py:" in message
    assert sorted(Path("runs/one").rglob("*")) == before
    assert "cannot be exported" in expect_error("export", "one", "--out", "files", code=2)
    assert not Path("files").exists()


@pytest.mark.system  # slow
def test_an_unfinished_runs_last_checkpoint(folder: Path) -> None:
    write_task()
    run_drivetrain("train", "small.py", "--name", "one", "-q", "save_every=5", DRIVETRAIN_FAULTS="kill@step:12")
    run_ok("export", "one")
    assert sorted(p.name for p in Path("runs/one/export").iterdir()) == ["export.json", "model.onnx", "model.safetensors"]
    assert not Path("runs/one/model/model.safetensors").exists()
