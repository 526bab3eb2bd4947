"""The page in a real browser, also on a phone: its episodes equal those of Python, and its messages name what is wrong."""

from __future__ import annotations

import gzip
import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor

from drivetrain import play
from drivetrain.export.calls import as_named
from drivetrain.export.graphs import write_graph
from drivetrain.runs import sha256_of
from drivetrain.task_ref import find_task, instantiate
from drivetrain.tasks.rl.envs import Env, State
from drivetrain.tasks.rl.envs.snake import SnakeEnv
from drivetrain.tasks.rl.episode_random import episode_uniform
from drivetrain.tasks.rl.episodes import play_episodes
from drivetrain.tasks.rl.exported import export_graphs
from drivetrain.tasks.rl.nets import Agent, ConvAgent, LstmAgent, MlpAgent
from tests.browser import Browser, served

ROOT = Path(__file__).parent.parent.parent
SEEDS = [0, 7, 4_000_000_000]
PLAY_STEPS = """(async (episode, steps) => {
  drivetrain.pause();
  const moments = [await drivetrain.reset(episode)];
  while (moments.length <= steps && !moments.at(-1).done) moments.push(await drivetrain.step());
  return moments;
})"""
PLAY_TO_END = """(async (episode, steps = Infinity) => {
  drivetrain.pause();
  let moment = await drivetrain.reset(episode);
  while (!moment.done && moment.steps < steps) moment = await drivetrain.step();
  return moment;
})"""


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of web/ with its packages."""
    for program in ("npm", "chromium"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program} (tests/system/install)")
    web_copy = tmp_path_factory.mktemp("web") / "web"
    shutil.copytree(ROOT / "web", web_copy, ignore=shutil.ignore_patterns("node_modules", "dist"))
    subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=web_copy, check=True, capture_output=True)
    return web_copy


@pytest.fixture(scope="module")
def browser(web: Path) -> Iterator[Browser]:
    started = Browser(web)
    yield started
    started.close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(play.site(play.shipped_agents())) as url:
        yield url


def open_page(browser: Browser, url: str, **options: Any) -> None:
    browser(open=url, **options)
    browser.wait_until("window.drivetrain?.state()")


def test_the_committed_build_is_that_of_the_sources(web: Path, tmp_path: Path) -> None:
    subprocess.run(["npm", "run", "build"], cwd=web, check=True, capture_output=True)
    subprocess.run(["node", "ship.mjs", str(tmp_path)], cwd=web, check=True)

    def files(folder: Path) -> dict[str, bytes]:
        contents = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        return {n: gzip.decompress(b) if n.endswith(".gz") else b for n, b in contents.items() if not n.startswith("agents/")}

    built, committed = files(tmp_path), files(play.PAGE)
    assert built.keys() == committed.keys(), "make page, then commit"
    assert [name for name in built if built[name] != committed[name]] == [], "make page, then commit"


class OnnxAgent:
    """An agent that computes its actions with the exported policy graph."""

    memory = 0

    def __init__(self, name: str, agents: int) -> None:
        self.session, self.agents = onnxruntime.InferenceSession(str(play.SHIPPED_AGENTS / name / "policy.onnx")), agents

    def choose(self, observation: Tensor, draws: Tensor, greedy: bool) -> Tensor:
        [action] = self.session.run(["likeliest" if greedy else "action"], {"observation": observation.numpy(), "random": draws.numpy()})
        return torch.from_numpy(action)

    def policy(self, observation: Tensor) -> Tensor:
        inputs = {
            "observation": observation.unflatten(0, (-1, self.agents)).numpy(),
            "random": np.zeros((len(observation) // self.agents, self.agents), "f4"),
        }
        return torch.from_numpy(self.session.run(["probability"], inputs)[0]).flatten(0, 1).log()


def world_of(name: str) -> tuple[Env, bool]:
    settings = json.loads((play.SHIPPED_AGENTS / name / "export.json").read_text())["settings"]
    return instantiate(find_task(name), settings).env(), settings["greedy"]


def state_of(moment: dict[str, Any], reference: State) -> State:
    return {part: torch.tensor(moment["state"][part]).to(value.dtype).view(value.shape) for part, value in reference.items()}


@pytest.mark.parametrize("episode", SEEDS)
@pytest.mark.parametrize("name", ["snake", "cartpole"])
def test_each_step_equals_pythons(name: str, episode: int, browser: Browser, address: str) -> None:
    """Every action and state equals torch's; for Snake exactly. A pole amplifies rounding errors a thousandfold in two seconds,
    so each of its steps is computed from the browser's last state, and only the first hundred also without it."""
    env, greedy = world_of(name)
    agent, ids = OnnxAgent(name, env.agents), torch.tensor([episode])
    open_page(browser, f"{address}#{name}")
    moments = browser(run=f"{PLAY_STEPS}({episode}, 120)")
    assert len(moments) > 100
    python_state = env.reset(episode_uniform(ids, 0, env.chances))
    tolerance = 1e-4 if name == "cartpole" else 0.0
    for number, (before, after) in enumerate(itertools.pairwise(moments), 1):
        draws = episode_uniform(ids, number, env.chances + env.agents)
        browser_state = state_of(before, python_state)
        action = agent.choose(env.observe(browser_state).reshape(1, env.agents, *env.shape), draws[:, env.chances :], greedy)
        assert after["actions"] == action[0].tolist(), number
        env_action = action if env.agents > 1 else action[:, 0]
        after_browser_state, python_state = (
            env.step(state, env_action, draws[:, : env.chances])[0] for state in (browser_state, python_state)
        )
        for part, value in state_of(after, python_state).items():
            torch.testing.assert_close(value, after_browser_state[part], rtol=0, atol=tolerance / 100)
            if name == "snake" or number <= 100:
                torch.testing.assert_close(value, python_state[part], rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["snake", "cartpole"])
def test_an_episode_is_the_one_of_an_evaluation(name: str, browser: Browser, address: str) -> None:
    env, greedy = world_of(name)
    env.limit = 200
    open_page(browser, f"{address}#{name}")
    last_moments = [browser(run=f"{PLAY_TO_END}({episode}, {env.limit})") for episode in SEEDS]
    metrics = play_episodes(env, OnnxAgent(name, env.agents), torch.tensor(SEEDS), greedy)  # type: ignore[arg-type]
    assert [np.mean(end["returns"]) for end in last_moments] == pytest.approx(metrics["return"].tolist(), rel=1e-4)


def test_random_numbers_equal_pythons_bit_for_bit(browser: Browser, address: str) -> None:
    open_page(browser, address)
    for episode in (0, 1, 12345, 2**31, 2**32 - 1):
        for step, count in ((0, 1), (1, 5), (999, 8), (10**6, 3)):
            expected = episode_uniform(torch.tensor([episode]), step, count)[0].tolist()
            assert browser(run=f"drivetrain.chance({episode}, {step}, {count})") == expected


@pytest.mark.parametrize(("name", "min_steps"), [("snake", 20), ("cartpole", 100)])
def test_the_page_plays_500_frames_without_requests_to_other_sites(name: str, min_steps: int, browser: Browser, address: str) -> None:
    open_page(browser, f"{address}#{name}")
    browser(run="new Promise((done) => { let n = 0; (function next() { ++n > 500 ? done(n) : requestAnimationFrame(next); })(); })")
    state, traffic = browser(run="drivetrain.state()"), browser(seen=True)
    assert state["steps"] + 500 * state["episode"] > min_steps
    assert "FPS" in browser(run="document.getElementById('rate').textContent")
    assert traffic["errors"] == []
    assert [url for url in traffic["requests"] if not url.startswith(address)] == []
    assert sum(size for url, size in traffic["bytes"].items() if not url.endswith(".wasm")) < 4e6
    assert sum(traffic["bytes"].values()) < 6e6, "with the compressed wasm"


def test_the_next_episode_follows(browser: Browser, address: str) -> None:
    open_page(browser, f"{address}#cartpole")
    browser(run=f"{PLAY_TO_END}(3)")
    browser(run="drivetrain.play()")
    browser.wait_until("drivetrain.state().episode === 4 && document.getElementById('seed').value === '4'")


PHONES = [(320, 568), (360, 740), (390, 740), (568, 320), (844, 390), (932, 430)]


@pytest.mark.parametrize(("width", "height"), PHONES, ids=lambda size: str(size))
@pytest.mark.parametrize("name", ["snake", "cartpole"])
def test_a_phone_has_no_horizontal_scroll_and_large_targets(name: str, width: int, height: int, browser: Browser, address: str) -> None:
    """In portrait and landscape, the board and its controls are on the screen without scrolling."""
    open_page(browser, f"{address}#{name}", width=width, height=height, touch=True)
    if name == "snake":
        browser(choose=["#person", "2"])
    assert browser(run="document.documentElement.scrollWidth") <= width
    seen = "['#play', '#step', '#reset', 'canvas', '#pad button'].flatMap((name) => [...document.querySelectorAll(name)])"
    below = f"{seen}.filter((e) => e.offsetParent && e.getBoundingClientRect().bottom > innerHeight).map((e) => e.id || e.textContent)"
    assert browser(run=below) == []
    shown = "[...document.querySelectorAll('button, select, input, summary')].filter((e) => e.offsetParent)"
    small = f"{shown}.filter((e) => e.offsetHeight < 44 || e.offsetWidth < 44).map((e) => e.id || e.textContent)"
    assert browser(run=small) == []


def test_a_person_turns_a_snake(browser: Browser, address: str) -> None:
    open_page(browser, f"{address}#snake")
    browser(click="#play")  # pause
    browser(run="drivetrain.reset(0)")
    browser(choose=["#person", "0"])
    moment = browser(run="drivetrain.step()")
    assert moment["actions"][0] == moment["state"]["way"][0] == 3, "the first snake starts to the right"
    for key, direction in (("ArrowUp", 0), ("a", 2), ("ArrowDown", 1)):
        browser(press=key)
        assert browser(run="drivetrain.step()")["state"]["way"][0] == direction
    browser(click="#pad [data-way='3']")
    assert browser(run="drivetrain.step()")["state"]["way"][0] == 3
    browser(press="ArrowLeft")
    assert browser(run="drivetrain.step()")["state"]["way"][0] == 3, "a snake cannot turn back"
    swipe = "new PointerEvent(kind, { clientX: 100, clientY: 100 - 40 * i })"
    browser(run=f"['pointerdown', 'pointermove', 'pointerup'].forEach((kind, i) => canvas.dispatchEvent({swipe}))")
    assert browser(run="drivetrain.step()")["state"]["way"][0] == 0, "a swipe upwards"
    assert "Snake 1 (you)" in browser(run="document.getElementById('scores').textContent")


PLAY_UNTIL_DEATH = """(async () => {
  let moment = await drivetrain.reset(0);
  while (!moment.ended[0] && !moment.done) moment = await drivetrain.step();
  return moment;
})()"""


def test_a_persons_death_gives_a_notice_and_the_offer_of_another_game(browser: Browser, address: str) -> None:
    open_page(browser, f"{address}#snake")
    browser(click="#play")  # pause
    browser(choose=["#person", "0"])
    notice = "document.getElementById('notice').hidden ? '' : document.getElementById('notice').innerText"
    for restart_by in ("click", "press"):  # a snake that only goes straight dies soon
        moment = browser(run=PLAY_UNTIL_DEATH)
        assert moment["ended"][0] and not moment["done"]
        assert f"You died at step {moment['steps']}" in browser(run=notice) and "The others play on" in browser(run=notice)
        browser(press="ArrowUp")  # a key after death has no effect, not even on the next game
        browser(click="#again") if restart_by == "click" else browser(press="Enter")
        browser.wait_until("drivetrain.state().episode === 1 && drivetrain.state().steps > 0")
        assert browser(run="document.getElementById('play').textContent") == "Pause", "it plays"
        assert "You died" not in browser(run=notice)
        browser(run="drivetrain.pause()")
    browser(run=PLAY_UNTIL_DEATH)
    browser(choose=["#person", "1"])
    assert browser(run=notice) == "", "another snake's player is not dead"
    browser(choose=["#person", "0"])
    assert "Snake 1 is dead" in browser(run=notice) and "Play again" in browser(run=notice)


def test_a_person_is_not_hurried_into_the_next_episode(browser: Browser, address: str) -> None:
    open_page(browser, f"{address}#snake")
    browser(choose=["#person", "0"])
    browser(run=f"{PLAY_TO_END}(5)")
    browser(run="drivetrain.play()")
    browser.wait_until("document.getElementById('notice').innerText.includes('Over after')")
    browser(run="new Promise((done) => setTimeout(done, 2000))")
    assert browser(run="drivetrain.state().episode") == 5
    browser(choose=["#person", ""])
    browser.wait_until("drivetrain.state().episode === 6")


def test_a_page_opened_from_disk_asks_for_a_web_server(browser: Browser, tmp_path: Path) -> None:
    play.write_site(play.site(play.shipped_agents()), tmp_path / "a site")
    browser(open=(tmp_path / "a site" / "index.html").as_uri())
    text = browser.wait_until("document.getElementById('notice').innerText")
    assert "needs a web server" in text and "drivetrain play" in text and "Loading" not in text
    assert not browser(run="document.getElementById('progress').offsetParent")


def test_without_https_the_page_warns_that_files_are_not_checked(browser: Browser, address: str) -> None:
    """A browser computes SHA-256 only on localhost and over https; elsewhere the page plays with a warning."""
    open_page(browser, address)
    assert "SHA-256 checked" in browser(run="document.getElementById('facts').textContent")
    open_page(browser, address, insecure=True)
    assert "not checked: browsers compute SHA-256 over https" in browser(run="document.getElementById('facts').textContent")


def test_controls(browser: Browser, address: str) -> None:
    open_page(browser, f"{address}#snake")
    browser(press="Space")
    assert browser(run="document.getElementById('play').textContent") == "Play"
    browser(click="#reset")
    browser.wait_until("drivetrain.state().steps === 0")
    browser(click="#step")
    browser.wait_until("drivetrain.state().steps === 1")
    assert browser(run="document.getElementById('greedy').value") == "drawn", "as the run's own evaluation"
    browser(choose=["#agent", "agents/cartpole"])
    browser.wait_until("drivetrain.state()?.state.motion && document.getElementById('greedy').value === 'likeliest'")
    assert browser(run="document.getElementById('facts').textContent.includes('cartpole')")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [("policy.onnx", b"\x08\x0brubbish", "its SHA-256 is not the one in export.json"), ("step.onnx", None, "is missing"), ("export.json", b"{", "not JSON"), ("export.json", b"{}", "nothing")],
    ids=["broken", "missing", "torn", "other"],
)  # fmt: skip
def test_a_broken_model_is_named(file: str, content: bytes | None, message: str, browser: Browser) -> None:
    files = play.site(play.shipped_agents())
    path = f"agents/snake/{file}"
    if content is None:
        del files[path]
    else:
        files[path] = content
    with served(files) as url:
        browser(open=f"{url}#snake")
        browser.wait_until("document.querySelector('#notice.trouble')")
        text = browser(run="document.getElementById('notice').innerText")
        assert path in text and message in text and "drivetrain export RUN" in text
        assert browser(run="document.querySelector('fieldset').disabled")


def test_a_policy_for_another_grid_size_is_named(browser: Browser, tmp_path: Path) -> None:
    small = SnakeEnv(4, 10, 10)
    write_graph("policy", as_named("policy", export_graphs(small, ConvAgent(small.shape, small.actions), steps=1)["policy"]), tmp_path)
    card = json.loads((play.SHIPPED_AGENTS / "snake" / "export.json").read_text())
    card["sha256"]["policy.onnx"] = sha256_of(tmp_path / "policy.onnx")
    other: play.Site = {"agents/snake/policy.onnx": tmp_path / "policy.onnx", "agents/snake/export.json": json.dumps(card).encode()}
    with served(play.site(play.shipped_agents()) | other) as url:
        browser(open=f"{url}#snake")
        browser.wait_until("document.querySelector('#notice.trouble')")
        text = browser(run="document.getElementById('notice').innerText")
        assert "agents/snake/policy.onnx" in text and "drivetrain export RUN" in text
        assert "takes observation of 4x5x10x10, reset.onnx gives 4x5x20x20: they are of different worlds" in text


def test_a_static_site_in_a_sub_path(browser: Browser, tmp_path: Path) -> None:
    play.write_site(play.site(play.shipped_agents()), tmp_path)
    below: play.Site = {f"some/where/{p.relative_to(tmp_path).as_posix()}": p for p in tmp_path.rglob("*") if p.is_file()}
    with served(below) as url:
        open_page(browser, f"{url}some/where/index.html#snake")
        assert browser(seen=True)["errors"] == []


class Corridor(Env):
    """Seven cells in a row, without randomness; the page has no drawing for it."""

    actions, shape, limit = 2, (7,), 12

    def reset(self, rand: Tensor) -> State:
        return {"place": torch.zeros(rand.shape[0], dtype=torch.int64), "warm": torch.zeros(rand.shape[0], 2, dtype=torch.bool)}

    def step(self, state: State, action: Tensor, rand: Tensor) -> tuple[State, Tensor, Tensor]:
        place = (state["place"] + 2 * action - 1).clamp(0, 6)
        return {"place": place, "warm": ~state["warm"]}, place.float() - 0.5, place == 6

    def observe(self, state: State) -> Tensor:
        return torch.nn.functional.one_hot(state["place"], 7).float()


@pytest.mark.parametrize("agent", [MlpAgent(7, 2, 8, 1, "tanh"), LstmAgent(7, 2, 8)], ids=["mlp", "lstm"])
def test_a_world_without_a_drawing_shows_its_numbers(agent: Agent, browser: Browser, tmp_path: Path) -> None:
    """The agents' random numbers and their memory are those of an evaluation, although the environment has no randomness."""
    env = Corridor()
    torch.manual_seed(0)
    for parameter in agent.parameters():
        torch.nn.init.normal_(parameter)
    graphs = {name: asdict(write_graph(name, as_named(name, graph), tmp_path)) for name, graph in export_graphs(env, agent).items()}
    digests = {graph["file"]: sha256_of(tmp_path / graph["file"]) for graph in graphs.values()}
    training = {"date": "", "step": 0, "seconds": 0, "hardware": "", "versions": {}, "metrics": {}}
    facts = {"format": 2, "run": "walk", "task": "walk", "settings": {"greedy": False}}
    card = facts | {"graphs": graphs, "sha256": digests, "training": training}
    (tmp_path / "export.json").write_text(json.dumps(card))
    with served(play.site([play.ExportedAgent("walk", tmp_path)])) as url, torch.no_grad():
        open_page(browser, url)
        last_moments = [browser(run=f"{PLAY_TO_END}({episode})") for episode in SEEDS]
        assert browser(seen=True)["errors"] == []
    metrics = play_episodes(env, agent, torch.tensor(SEEDS), False)
    assert [end["returns"][0] for end in last_moments] == metrics["return"].tolist()
    assert [end["steps"] for end in last_moments] == metrics["length"].tolist()
    assert last_moments[0]["state"]["warm"] == [last_moments[0]["steps"] % 2] * 2
