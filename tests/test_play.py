"""`play`: serves or writes the page and its agents and nothing else; refuses agents that cannot be played."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from drivetrain import play
from drivetrain.export.calls import as_named
from drivetrain.export.graphs import write_graph
from drivetrain.outcomes import Problem
from drivetrain.runs import EXPORT_CARD, Run
from drivetrain.tasks.rl.envs.snake import SnakeEnv
from drivetrain.tasks.rl.exported import export_graphs
from drivetrain.tasks.rl.nets import ConvAgent
from tests.browser import served
from tests.command import COMMAND, environment, expect_error, run_ok, write_task

SMALL = ["epochs=1", "envs=8", "horizon=8", "global_batch=32", "eval_episodes=2", "-q"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(play.site(play.shipped_agents())) as url:
        yield url


def fetch(url: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as response:
            return response.status, dict(response.headers), response.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def wasm() -> str:
    [path] = play.PAGE.glob("assets/*.wasm.gz")
    return path.name.removesuffix(".gz")


def test_the_page_and_its_agents_are_served(address: str) -> None:
    status, headers, page = fetch(address)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    for link in re.findall(r'(?:src|href)="\./([^"]+)"', page.decode()):
        assert fetch(address + link)[0] == 200, link
    agents = json.loads(fetch(address + "agents.json")[2])["agents"]
    assert [a["name"] for a in agents] == ["cartpole", "snake"]
    for agent in agents:
        card = json.loads(fetch(f"{address}{agent['folder']}/export.json")[2])
        for graph in card["graphs"].values():
            assert len(fetch(f"{address}{agent['folder']}/{graph['file']}")[2]) == graph["bytes"]


def test_the_wasm_is_compressed_for_browsers_that_accept_gzip(address: str) -> None:
    _, headers, packed = fetch(f"{address}assets/{wasm()}", **{"Accept-Encoding": "gzip, br"})
    assert (headers["Content-Type"], headers["Content-Encoding"]) == ("application/wasm", "gzip")
    _, headers, plain = fetch(f"{address}assets/{wasm()}")
    assert "Content-Encoding" not in headers
    assert gzip.decompress(packed) == plain and plain.startswith(b"\0asm")
    assert len(packed) < 4e6


def test_nothing_else_is_served(address: str) -> None:
    server = http.client.HTTPConnection(address.split("/")[2], timeout=60)
    paths = [
        "/../play.py",
        "/%2e%2e/play.py",
        "/assets/../../play.py",
        "//etc/passwd",
        "/assets",
        "/assets/",
        "/agents/",
        "/agents/README.md",
    ]
    for path in paths:
        server.request("GET", path)
        response = server.getresponse()
        assert (response.status, b"import" in response.read()) == (404, False), path
    server.request("POST", "/")
    assert server.getresponse().status == 501


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        (["localhost:{port}"], 200), (["127.0.0.1"], 200), (["[::1]:8080"], 200), (["LOCALHOST"], 200),
        (["evil.example:{port}"], 403), (["127.0.0.1.evil.example"], 403), (["127.0.0.1@evil.example"], 403), (["localhost:{port}", "evil.example"], 403),
        ([], 403),
    ],
)  # fmt: skip
def test_a_foreign_host_name_is_refused(hosts: list[str], status: int, address: str) -> None:
    """DNS rebinding: otherwise another site's page could read everything."""
    host_and_port = address.split("/")[2]
    server = http.client.HTTPConnection(host_and_port, timeout=60)
    server.putrequest("GET", "/agents.json", skip_host=True)
    for host in hosts:
        server.putheader("Host", host.format(port=host_and_port.split(":")[1]))
    server.endheaders()
    response = server.getresponse()
    assert (response.status, b"agents" in response.read()) == (status, status == 200)


def test_a_static_site_has_relative_paths_only(folder: Path) -> None:
    output = run_ok("play", "--out", "site", "snake")
    files = {p.relative_to("site").as_posix(): p for p in Path("site").rglob("*") if p.is_file()}
    size = sum(path.stat().st_size for path in files.values())
    assert f"site: {len(files)} files, {size / 1e6:.0f} MB" in output
    assert {"index.html", "agents.json", f"assets/{wasm()}", "agents/snake/policy.onnx", "agents/snake/export.json"} <= files.keys()
    assert not any(name.endswith((".gz", ".safetensors")) or "cartpole" in name for name in files)
    assert not re.search(r'(src|href)="(/|http)', files["index.html"].read_text())
    for name, path in files.items():
        assert str(Path.home()).encode() not in path.read_bytes(), name


def test_a_site_is_written_over_another_and_over_nothing_else(folder: Path) -> None:
    run_ok("play", "snake", "--out", "site")
    run_ok("play", "cartpole", "--out", "site")
    assert [p.name for p in Path("site/agents").iterdir()] == ["cartpole"]
    Path("other").mkdir()
    Path("other/agents.json").write_text("[]")
    assert "not empty, and not a site" in expect_error("play", "snake", "--out", "other")
    assert [p.name for p in Path("other").iterdir()] == ["agents.json"]
    assert "is a file" in expect_error("play", "snake", "--out", "other/agents.json")
    assert "other/agents.json/site cannot be written: Not a directory" in expect_error("play", "snake", "--out", "other/agents.json/site")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was played once, and one that cannot be played."""
    top = tmp_path_factory.mktemp("trained")
    before = Path.cwd()
    os.chdir(top)
    try:
        run_ok("train", "bandit", *SMALL, "--name", "plays")
        assert not list(Path("runs").rglob("*.onnx"))
        run_ok("play", "plays", "--out", "site")
        run_ok("train", write_task().name, "epochs=1", "-q", "--name", "other")
    finally:
        os.chdir(before)
    return top


@pytest.fixture
def runs(trained: Path, folder: Path) -> Path:
    shutil.copytree(trained / "runs", "runs")
    shutil.copytree(trained / "site", "site")
    return folder / "runs"


def test_a_run_is_exported_when_it_is_first_played_and_when_it_has_changed(runs: Path) -> None:
    card = json.loads(Path("site/agents/plays/export.json").read_text())
    assert (card["run"], card["settings"]["envs"]) == ("plays", 8)
    graph = runs / "plays/model/step.onnx"
    first = graph.stat().st_mtime_ns
    run_ok("play", "plays", "--out", "site")
    assert graph.stat().st_mtime_ns == first, "nothing had changed"
    exported = runs / "plays/model/export.json"
    exported.write_text(exported.read_text().replace('"envs": 8', '"envs": 16'))
    run_ok("play", "plays", "--out", "site")
    assert graph.stat().st_mtime_ns > first
    card = json.loads(exported.read_text())
    assert card["settings"]["envs"] == 8
    del card["sha256"]  # as earlier versions wrote it
    exported.write_text(json.dumps(card))
    assert not play.is_current(play.ExportedAgent("plays", exported.parent), Run(runs / "plays"))


def test_unplayable_runs_are_refused(runs: Path) -> None:
    assert "cannot be played" in expect_error("play", "other", "--out", "new")
    assert not list((runs / "other").rglob("*.onnx")) and not Path("new").exists()
    assert "there is no run 'nobody'" in expect_error("play", "nobody")


def test_a_broken_file_is_named(runs: Path) -> None:
    policy = runs / "plays/model/policy.onnx"
    original = policy.read_bytes()
    policy.write_bytes(original[:-100])
    assert "policy.onnx is broken: it has" in expect_error("play", "plays", "--out", "site")
    policy.write_bytes(b"\xff" * len(original))
    message = expect_error("play", "plays", "--out", "site")
    assert "policy.onnx is broken: " in message and "drivetrain export plays writes it again" in message
    flipped = bytearray(original)  # a flipped bit in the weights: the graph can still be read
    flipped[len(original) // 2] ^= 255
    policy.write_bytes(flipped)
    with pytest.raises(
        Problem, match=r"policy.onnx is broken: its SHA-256 is not the one in export.json; drivetrain export plays writes it"
    ):
        play.check(play.ExportedAgent("plays", policy.parent))
    policy.unlink()
    assert "policy.onnx is missing" in expect_error("play", "plays", "--out", "site")
    card = json.loads((policy.parent / EXPORT_CARD).read_text())
    del card["graphs"]["policy"]["file"]
    (policy.parent / EXPORT_CARD).write_text(json.dumps(card))
    with pytest.raises(Problem, match=r"export.json cannot be read"):
        play.check(play.ExportedAgent("plays", policy.parent))
    (runs / "plays/model/export.json").write_text("{")
    assert "export.json cannot be read" in expect_error("play", "plays", "--out", "site")


def test_a_policy_for_another_grid_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes in the files are compared; without onnxruntime, those in export.json."""
    small, agent_folder = SnakeEnv(4, 10, 10), tmp_path / "snake"
    shutil.copytree(play.SHIPPED_AGENTS / "snake", agent_folder)
    agent = play.ExportedAgent("other", agent_folder)
    play.check(agent)
    policy_of_small = write_graph(
        "policy", as_named("policy", export_graphs(small, ConvAgent(small.shape, small.actions), steps=1)["policy"]), agent_folder
    )
    message = "policy.onnx takes observation of 4x5x10x10, reset.onnx gives 4x5x20x20: they are of different worlds"
    with pytest.raises(Problem, match=f"{message}; drivetrain export other writes them again"):
        play.check(agent)
    card = json.loads((agent_folder / EXPORT_CARD).read_text())
    card["graphs"]["policy"] = asdict(policy_of_small)
    (agent_folder / EXPORT_CARD).write_text(json.dumps(card))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", None)
        with pytest.raises(Problem, match=message):
            play.check(agent)
    for name in ("policy", "step"):
        shutil.copy(play.SHIPPED_AGENTS / ("snake" if name == "policy" else "cartpole") / f"{name}.onnx", agent_folder)
    with pytest.raises(Problem, match=r"policy.onnx takes observation of 4x5x20x20, step.onnx gives 1x4"):
        play.check(agent)


def test_the_command_serves_until_ctrl_c(folder: Path) -> None:
    def restore_sigint() -> None:
        """Makes the child react to SIGINT: background processes of a script ignore it, and so do their children."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    command = [*COMMAND, "play", "snake", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), preexec_fn=restore_sigint) as process:
        assert process.stdout
        line = process.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert url and "snake" in line, line
        assert b"<title>drivetrain play</title>" in fetch(url[0])[2]
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert process.stdout.read().strip() == "ended"


def test_a_port_that_is_in_use(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"port {port} is in use: leave --port out" in expect_error("play", "snake", "--no-open", "--port", str(port))
    assert "to 65535" in expect_error("play", "snake", "--no-open", "--port", "70000")
