"""The target `sky`: what it renders, what it makes of SkyPilot's answers, and that it spends nothing without consent. `sky` is a stand-in here
(sky_stand_in.py); its answers and failures in outputs/sky-* are SkyPilot's, or come from its public issues where a cloud is needed."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.doctor import check_target
from drivetrain.launch.request import Request
from drivetrain.names import private_cache
from drivetrain.outcomes import Outcome, Problem
from drivetrain.runs import Run
from drivetrain.targets.base import JobState
from drivetrain.targets.config import make_target
from drivetrain.targets.consent import Consent, Cost, Price, ask_consent
from drivetrain.targets.errors import FolderMissing
from drivetrain.targets.record import Record
from drivetrain.targets.sky import machines as machines_module
from drivetrain.targets.sky.failures import sky_problem
from drivetrain.targets.sky.program import SkyProgram
from drivetrain.targets.sky.settings import SkySettings
from drivetrain.targets.sky.target import SkyTarget
from drivetrain.targets.sky.task_file import RUN, SETUP, cluster_name, cluster_prefix, host_names, is_of_target, task_file
from drivetrain.targets.submission import Submission
from tests.targets.test_rendering import WILD, replace_machine_texts, submission

GOLDEN = Path(__file__).with_name("sky_golden.txt")
OUTPUTS = Path(__file__).with_name("outputs")
GPU = {"gpus": "A10:1", "infra": "lambda"}
COST = Cost((Price("1 x gpu_1x_a10", 0.75),), "a list of 2026-01-01")


def consent(cost: Cost = COST) -> Consent:
    return ask_consent("start machines", cost, lambda text: None, None, is_agreed=True)


def sky_target(**values: Any) -> SkyTarget:
    target = make_target("sky", "sky", values, Path("drivetrain.yaml"))
    assert isinstance(target, SkyTarget)
    return target


# --- renderings --------------------------------------------------------------------------------

SHAPES: dict[str, tuple[dict[str, Any], Request]] = {
    "CPU, all defaults": ({}, Request()),
    "one GPU": (GPU, Request(device="cuda", procs=1)),
    "2x8 spot GPUs": (
        {"gpus": "H100:8", "spot": True, "disk_gb": 500, "idle_minutes": 5, "down_when_idle": True},
        Request(device="cuda", procs=8, nodes=2),
    ),
}


def rendered_text(shape: str) -> str:
    values, request = SHAPES[shape]
    target = sky_target(python="/opt/python", **values)
    text = replace_machine_texts(target.render(submission(request)).text())
    for original, replacement in ((str(private_cache("sky-keys")), "KEYS"), (str(private_cache("sky")), "TASKS")):
        text = text.replace(original, replacement)
    return text.replace(cluster_prefix("sky"), "CLUSTER").replace(os.path.expanduser("~/.sky"), "HOME/.sky")


def test_golden_renderings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After a wanted change: DRIVETRAIN_WRITE_GOLDEN=1 pytest tests/targets, and read the difference."""
    monkeypatch.chdir(tmp_path)
    text = "".join(f"=== {shape} ===\n\n{rendered_text(shape)}\n" for shape in SHAPES)
    if os.environ.get("DRIVETRAIN_WRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert "planted-token" not in text


def test_the_price_becomes_a_limit_for_each_machine() -> None:
    """SkyPilot tries other regions and clouds if one has no machines; it must not take dearer ones."""
    task = yaml.safe_load(task_file(SkySettings(gpus="A10:1"), 2, 1.50))
    assert task["resources"]["max_hourly_cost"] == pytest.approx(0.76)
    assert "max_hourly_cost" not in task_file(SkySettings(gpus="A10:1"), 2)


@settings(max_examples=60, deadline=None)
@given(WILD, WILD)
def test_hostile_text_stays_one_value_of_the_task_file(infra: str, image: str) -> None:
    task = yaml.safe_load(task_file(SkySettings(infra=infra, image=image, gpus=image), 1))
    assert (task["resources"]["infra"], task["resources"]["image_id"], task["resources"]["accelerators"]) == (infra, image, image)
    assert (task["setup"], task["run"]) == (SETUP, RUN), "constant: no text of the user is in a script"


@given(st.text(min_size=1, max_size=60))
def test_a_cluster_has_a_name_that_sky_takes(name: str) -> None:
    cluster = cluster_name(name, 12)
    assert len(cluster) <= 40 and cluster.replace("-", "").isalnum() and cluster.isascii() and cluster[0] == "d"
    assert is_of_target(cluster, name) and not is_of_target(f"{cluster}-worker1", name) and not is_of_target(cluster, f"{name}x")


def test_secrets_travel_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "planted-secret")
    one = replace(submission(Request(nodes=2)), secrets=("MY_API_KEY",))
    text = sky_target(**GPU).render(one).text()
    assert "$MY_API_KEY" in text and "planted-secret" not in text and "planted-token" not in text
    with pytest.raises(Problem, match="is a secret"):
        sky_target(env={"AWS_SECRET_ACCESS_KEY": "planted-secret"})


# --- scripts that run on the machines ----------------------------------------------------------


def test_the_setup_ends_with_the_addresses(tmp_path: Path) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "DRIVETRAIN_LAUNCH": "ab12",
        "SKYPILOT_SETUP_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    stand_ins = "rsync() { :; }\n"
    subprocess.run(["bash", "-c", stand_ins + SETUP], env=environment, check=True)
    assert (tmp_path / ".drivetrain-addresses").read_text().split() == ["ab12", "10.0.0.1", "10.0.0.2"]


def test_the_setup_installs_a_python_where_none_is_new_enough(tmp_path: Path) -> None:
    """sudo, apt-get and uv are stand-ins that print; python3 says that it is too old until a link was made."""
    uv = tmp_path / ".local" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text('#!/bin/sh\n[ "$2" = find ] && echo /python312 || echo uv "$@" >> "$HOME/log"\n')
    uv.chmod(0o755)
    stand_ins = (
        'sudo() { "$@"; }; apt-get() { echo apt-get "$@" >> "$HOME/log"; }; ln() { echo ln "$@" >> "$HOME/log"; }\n'
        'for p in python3.14 python3.13 python3.12 python3.11 python3; do eval "$p() { grep -q ^ln \\"$HOME/log\\"; }"; done\n'
        "command() { return 1; }\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "DRIVETRAIN_LAUNCH": "ab12", "SKYPILOT_SETUP_NODE_IPS": "10.0.0.1"}
    subprocess.run(["bash", "-c", stand_ins + SETUP], env=environment, check=True, capture_output=True)
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == [
        "apt-get update -qq", "apt-get install -y -qq rsync", "uv python install 3.12", "ln -sf /python312 /usr/local/bin/python3.12",
    ]  # fmt: skip


def test_a_machine_is_not_idle_while_a_run_is_active(tmp_path: Path) -> None:
    """The job of SkyPilot's queue lasts as long as a process has drivetrain's variable; /proc and sleep are stand-ins."""
    process = tmp_path / "7"
    process.mkdir()
    (process / "environ").write_bytes(b"A=b\0DRIVETRAIN_JOB=/x\0")

    def seconds(end_after: int) -> int:
        (process / "environ").write_bytes(b"A=b\0DRIVETRAIN_JOB=/x\0" if end_after else b"A=b\0")
        stand_in = f'n=0; sleep() {{ n=$((n + 1)); if [ "$n" = {end_after} ]; then echo A=b > {process}/environ; fi; }}\n'
        done = subprocess.run(
            ["bash", "-c", stand_in + RUN.replace("/proc/", f"{tmp_path}/") + "echo $n"], capture_output=True, text=True, check=True
        )
        return 30 * int(done.stdout)

    assert seconds(0) == 20 * 60, "no run begins"
    assert seconds(100) == 30 * (100 + 1), "ends soon after the run"


# --- the stand-in ------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the stand-in's state."""
    folder = tmp_path / "state"
    folder.mkdir()
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "sky"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("sky_stand_in.py")} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SKY_STAND_IN", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return folder


def calls(state: Path) -> list[list[str]]:
    path = state / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def launches(state: Path) -> list[list[str]]:
    return [words for words in calls(state) if words[0] == "launch" and "--dryrun" not in words]


def write_clusters(state: Path, *rows: tuple[str, str]) -> None:
    content = {
        name: {
            "name": name,
            "status": status.split()[0],
            "nodes": 1,
            "resources_str": "1x(A10)",
            "init_kind": "unhealthy" if " " in status else None,
        }
        for name, status in rows
    }
    (state / "clusters.json").write_text(json.dumps(content))


def record_of(target: SkyTarget, one: Submission) -> Record:
    return Record(one.run, {"handle": target.known_handle(one)})


@pytest.mark.parametrize(
    ("values", "nodes", "item", "hourly"),
    [
        (GPU, 1, "1 x 1x_A10_SECURE at RunPod (US)", 0.75),
        (GPU | {"spot": True}, 1, "1 x 1x_A10_SECURE[Spot] at RunPod (US)", 0.40),
        (GPU, 2, "2 x gpu_1x_a10 at Lambda (us-east-1)", 1.50),
    ],
)
def test_the_price_is_skys_own_answer(values: dict[str, Any], nodes: int, item: str, hourly: float, state: Path) -> None:
    cost = sky_target(**values).cost(submission(Request(nodes=nodes)))
    assert (cost.prices[0].item, cost.hourly) == (item, hourly)
    assert cost.source.startswith("SkyPilot 0.14.1, 20")
    assert launches(state) == []


def test_the_users_price_wins_and_asks_nobody(state: Path) -> None:
    cost = sky_target(**GPU, price=0.5).cost(submission(Request(nodes=2)))
    assert (cost.hourly, cost.source) == (1.0, "price: in the target sky")
    assert calls(state) == []


def test_trials_share_a_cluster_and_its_price(state: Path) -> None:
    cost = sky_target(**GPU).cost_together([submission(Request())] * 3)
    assert cost.hourly == 0.75


def test_without_a_price_in_the_answer_the_user_gives_one(state: Path) -> None:
    (state / "version").write_text("skypilot, version 0.14.1")
    path = state / "task.yaml"
    path.write_text(yaml.safe_dump({"num_nodes": 1, "resources": {"use_spot": False}}))
    assert SkyProgram().offer(path).hourly == 0.75
    (state / "sky").write_text("#!/bin/sh\necho Considered resources\n")
    (state / "sky").chmod(0o755)
    with pytest.raises(Problem, match="set price: in the target"):
        SkyProgram(str(state / "sky")).offer(path)


def test_no_path_starts_machines_without_consent(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """submit, submit_array and bring_run are all that shared code calls to start a run."""
    one, target = submission(Request()), sky_target(**GPU)
    for start in (
        lambda: target.submit(one, target.render(one), print),
        lambda: list(target.submit_array([one], print)),
        lambda: target.bring_run(one, print),
    ):
        with pytest.raises(Problem, match="nothing was started without consent"):
            start()
    with pytest.raises(TypeError):
        SkyProgram().launch("c", Path("t.yaml"), "1", None, print)  # type: ignore[arg-type]
    assert launches(state) == []


def test_only_one_function_starts_machines() -> None:
    """`launch` without --dryrun is in launch_words alone, which only `launch` hands to sky."""
    package = Path(machines_module.__file__).parent
    texts = {path.name: path.read_text() for path in package.glob("*.py")}
    places = [(name, line.strip()) for name, text in texts.items() for line in text.splitlines() if '"launch"' in line]
    assert sorted(name for name, _ in places) == ["program.py", "program.py"]
    assert sum('"--dryrun"' in line for _, line in places) == 1
    uses = [line.strip() for text in texts.values() for line in text.splitlines() if "launch_words(" in line and "def " not in line]
    assert len(uses) == 2 and sum("RenderedCommand" in line for line in uses) == 1
    asked = set(re.findall(r"_(?:ask|json|start)\(\s*\"([\w-]+)\"", texts["program.py"]))
    assert asked == {"--version", "check", "status", "launch", "down"}, "no other verb of sky, such as start or exec"
    assert [name for name, text in texts.items() if "subprocess" in text] == ["program.py"]


def launch_with_consent(target: SkyTarget, nodes: int, monkeypatch: pytest.MonkeyPatch, state: Path) -> list[str]:
    """Brings machines up, whose setup is complete at once; returns the notices."""
    monkeypatch.setattr(machines_module.SkyMachines, "wait_for_setup", lambda machines, launch: ["10.1.2.3", "10.1.2.4"][:nodes])
    sent: list[Any] = []
    monkeypatch.setattr(machines_module.SkyMachines, "submit", lambda machines, one, *rest: sent.append(machines.start_arguments(one, 0)))
    one = replace(submission(Request(nodes=nodes, device="cpu")), consent=consent(target.cost(submission(Request(nodes=nodes)))))
    notices: list[str] = []
    handle = target.submit(one, target.render(one), notices.append)
    assert handle["hosts"] == host_names(handle["cluster"], nodes)
    assert len(sent) == 1
    if nodes > 1:
        assert f"10.1.2.3:{one.port}" in " ".join(sent[0]["words"]), "the machines meet at the first one's address in their own network"
    return notices


@pytest.mark.parametrize("nodes", [1, 2])
def test_with_consent_machines_start_at_no_higher_price(nodes: int, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = sky_target(**GPU, python="/opt/python")
    notices = launch_with_consent(target, nodes, monkeypatch, state)
    (words,) = launches(state)
    assert words[:5] == ["launch", "-y", "-d", "-c", cluster_name("sky", nodes)]
    task = yaml.safe_load(Path(words[-1]).read_text())
    assert task["num_nodes"] == nodes
    assert task["resources"]["max_hourly_cost"] == pytest.approx(0.76)
    assert task["resources"]["autostop"] == {"idle_minutes": 10, "down": False, "wait_for": "jobs"}
    assert any("Launching on Lambda us-east-1" in notice for notice in notices)
    launch_with_consent(target, nodes, monkeypatch, state)
    assert len(launches(state)) == 2, "each submission tells sky that the machines are not idle"


def test_new_machines_have_new_host_keys(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of a machine that is up must not change; a new machine has another one."""
    target = sky_target(**GPU)
    key = private_cache("sky-keys") / cluster_name("sky", 1)
    key.write_text("old")
    write_clusters(state, (key.name, "UP"))
    launch_with_consent(target, 1, monkeypatch, state)
    assert key.exists()
    write_clusters(state, (key.name, "STOPPED"))
    launch_with_consent(target, 1, monkeypatch, state)
    assert not key.exists()


# --- what became of the machines ---------------------------------------------------------------

UNREACHABLE = Problem("the machine cannot be reached", Outcome.INFRA)


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine answers."""

    def fail(*arguments: object, **values: object) -> Any:
        raise UNREACHABLE

    for action in ("state", "pull", "stop", "mirror"):
        monkeypatch.setattr(machines_module.SshTarget, action, fail)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (None, "the cloud took them back, or they were removed"),
        ("STOPPED", "its machines are stopped, with their disks"),
        ("AUTOSTOPPING", "its machines are stopped, with their disks"),
        ("INIT unhealthy", "some of its machines are gone: the cloud took them back"),
    ],
)
def test_a_run_whose_machines_are_gone_is_lost(status: str | None, reason: str, state: Path, unreachable: None) -> None:
    one, target = submission(Request()), sky_target(**GPU)
    record = record_of(target, one)
    write_clusters(state, *([(cluster_name("sky", 1), status)] if status else []))
    found = target.state(record)
    assert found.phase == "lost" and reason in found.reason and "drivetrain resume digits-001" in found.reason
    assert list(target.mirror(record, follow=True)) == []
    target.stop(record)
    with pytest.raises(FolderMissing, match="what was copied before"):
        target.pull(record)


@pytest.mark.parametrize("status", ["UP", "INIT"])
def test_a_machine_that_does_not_answer_is_not_lost(status: str, state: Path, unreachable: None) -> None:
    target = sky_target(**GPU)
    record = record_of(target, submission(Request()))
    write_clusters(state, (cluster_name("sky", 1), status))
    for action in (target.state, target.stop, target.pull, lambda record: list(target.mirror(record, follow=True))):
        with pytest.raises(Problem, match="cannot be reached"):
            action(record)


def test_a_run_is_not_lost_while_sky_cannot_be_asked(state: Path, unreachable: None) -> None:
    target = sky_target(**GPU)
    (state / "status.fail").write_text((OUTPUTS / "sky-no-server.txt").read_text())
    with pytest.raises(Problem) as caught:
        target.state(record_of(target, submission(Request())))
    assert caught.value.outcome is Outcome.INFRA, "whoever follows the run asks again"


# --- down, doctor ------------------------------------------------------------------------------


def test_down_removes_what_this_target_started_here_and_nothing_else(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = [cluster_name("sky", 1), cluster_name("sky", 2)], "drivetrain-sky-00000000"
    write_clusters(state, *((name, "UP") for name in (*mine, other, "mywork")))
    line = sky_target().down()
    assert line == f"removed {', '.join(mine)} with their disks; of other folders or targets: {other} (sky down NAME)"
    assert [words for words in calls(state) if words[0] == "down"] == [["down", "-y", *mine]]
    assert "sky has no cluster of this folder and target" in sky_target().down()


def test_down_spares_an_active_run(state: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, one = sky_target(), replace(submission(Request()), run=Run("runs/night"))
    one.run.path.mkdir(parents=True)
    facts = {"target": target.name, "kind": "sky", "phase": "running", "pulled": False, "handle": target.known_handle(one)}
    Record(one.run, facts).write()
    monkeypatch.setattr(SkyTarget, "state", lambda target, record: JobState("running"))
    target.prepare_down()  # its cluster is gone
    write_clusters(state, (cluster_name("sky", 1), "UP"))
    with pytest.raises(Problem, match="night is running on sky: drivetrain stop night first, or --force"):
        target.prepare_down()


def test_down_says_if_machines_are_still_there(state: Path) -> None:
    write_clusters(state, (cluster_name("sky", 1), "UP"))
    (state / "down-does-nothing").touch()
    with pytest.raises(Problem, match="may still cost money"):
        sky_target().down()


def evidence(target: SkyTarget) -> dict[str, tuple[str, str, str]]:
    return {check.subject: (check.verdict, check.evidence, check.fix) for check in check_target(target)}


def test_doctor_shows_version_clouds_price_and_clusters(state: Path) -> None:
    write_clusters(state, (cluster_name("sky", 1), "UP"), ("drivetrain-old-12345678", "STOPPED"))
    checks = list(check_target(sky_target(**GPU)))
    lines = [f"{check.subject}: {check.verdict}, {check.evidence}" for check in checks]
    assert lines[0] == "reach: ok, SkyPilot 0.14.1; A10:1 at lambda"
    assert lines[1] == "clouds: ok, aws, lambda"
    assert lines[2].startswith("price: ok, $0.75 an hour for 1 x 1x_A10_SECURE at RunPod (US) (SkyPilot 0.14.1")
    assert lines[3] == f"cluster: ok, {cluster_name('sky', 1)}: UP, 1 x 1x(A10)"
    assert "drivetrain-old-12345678" in lines[4] and checks[4].fix == "if nothing needs it: sky down drivetrain-old-12345678"
    assert launches(state) == []


def test_doctor_shows_the_failure_of_a_question(state: Path) -> None:
    (state / "dryrun.fail").write_text((OUTPUTS / "sky-no-such-gpu.txt").read_text())
    verdict, text, fix = evidence(sky_target())["price"]
    assert (verdict, text) == ("fault", "no cloud that sky may use has such machines") and "sky gpus list" in fix
    (state / "check.fail").write_text((OUTPUTS / "sky-no-server.txt").read_text())
    verdict, text, fix = evidence(sky_target())["clouds"]
    assert verdict == "fault" and text.startswith("sky's API server does not answer at http") and "sky api start" in fix


def test_doctor_names_what_is_missing(state: Path) -> None:
    (state / "no-cloud").touch()
    assert evidence(sky_target())["clouds"] == (
        "fault", "sky may use none", "set up the credentials of a cloud: `sky check` tells what is missing",
    )  # fmt: skip
    assert evidence(sky_target(program="/nowhere/sky"))["reach"][0] == "fault"
    assert "pip install 'skypilot[aws]'" in evidence(sky_target(program="/nowhere/sky"))["reach"][2]
    (state / "version").write_text("skypilot, version 0.11.2")
    assert "0.12.1 or later (pip install -U skypilot)" in " ".join(evidence(sky_target())["reach"])


# --- failures ----------------------------------------------------------------------------------

FAILURES = {
    "sky-no-cloud": "sky may use no cloud: set up the credentials of one",
    "sky-no-server": "sky's API server does not answer at http://127.0.0.1:1: start it with `sky api start`",
    "sky-no-price-lists": "sky cannot download its price lists: is the network up?",
    "sky-no-such-gpu": "no cloud that sky may use has such machines: correct gpus:",
    "sky-multi-node": "(RunPod has no multi-node): set another infra:, or change --nodes or spot:",
    "sky-features": "(Lambda has no spot_instance; RunPod has no multi-node): set another infra:",
    "sky-price-risen": "no cloud has such machines for $0.1 an hour each any more, the price that you agreed to",
    "sky-cluster-unknown": "`drivetrain resume RUN` starts new machines",
    "sky-capacity": "no zone that was tried has such machines free now: try later",
    "sky-quota-aws": "your account may not have so many such machines (VcpuLimitExceeded): ask the cloud for more quota",
    "sky-quota-gcp": "your account may not have so many such machines (quotaExceeded): ask the cloud for more quota",
    "sky-no-stop": "Lambda cannot stop such machines: set down_when_idle: true in the target",
    "sky-old": "this sky does not know maxx: drivetrain needs SkyPilot 0.12.1 or later",
    "sky-option": "this sky does not know --nix: drivetrain needs SkyPilot 0.12.1 or later",
    "sky-credentials-expired": "the cloud refuses your credentials, which have expired: log in to the cloud again",
}
RETRYABLE = {"sky-no-server", "sky-no-price-lists", "sky-capacity"}


@pytest.mark.parametrize("name", FAILURES)
def test_known_output_names_the_fix(name: str) -> None:
    problem = sky_problem((OUTPUTS / f"{name}.txt").read_text(), 1)
    assert FAILURES[name] in str(problem)
    assert "\n" not in str(problem)
    assert problem.outcome is (Outcome.INFRA if name in RETRYABLE else Outcome.USAGE)


def test_every_output_is_expected() -> None:
    assert {path.stem for path in OUTPUTS.glob("sky-*")} == {*FAILURES, "sky-offer", "sky-offers", "sky-offer-spot"}


def test_unknown_output_is_shown() -> None:
    assert str(sky_problem("one\n\x1b[31mlast line\x1b[0m\n\n", 3)) == "sky: last line"
    assert str(sky_problem("", 3)) == "sky: it ended with code 3"


@pytest.mark.parametrize(("verb", "action"), [
    ("dryrun", lambda target: target.cost(submission(Request()))),
    ("launch", lambda target: target.bring_run(replace(submission(Request()), consent=consent()), print)),
    ("status", lambda target: target.down()),
])  # fmt: skip
def test_each_call_explains_its_failure(verb: str, action: Callable[[SkyTarget], Any], state: Path) -> None:
    (state / f"{verb}.fail").write_text((OUTPUTS / "sky-quota-aws.txt").read_text())
    with pytest.raises(Problem, match="ask the cloud for more quota"):
        action(sky_target(**GPU))


def test_an_answer_that_is_no_json_is_shown(state: Path) -> None:
    program = state / "sky"
    program.write_text("#!/bin/sh\necho something else\n")
    program.chmod(0o755)
    with pytest.raises(Problem, match="does not answer with JSON: 'something else'"):
        SkyProgram(str(program)).clusters()
    with pytest.raises(Problem, match="it is not SkyPilot's sky"):
        SkyProgram(str(program)).version()


def test_machines_that_are_never_set_up(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines_module, "SETUP_SECONDS", 0.0)
    monkeypatch.setattr(machines_module.SkyMachines, "_read_addresses", lambda machines, host: ["another launch", "10.0.0.1"])
    machines = sky_target(**GPU).machines(submission(Request()))
    with pytest.raises(Problem, match=r"`sky logs drivetrain-sky-.*` shows why"):
        machines.wait_for_setup("this launch")


def test_a_host_key_file_per_machine() -> None:
    """With an image in docker: all machines of a cluster have the address localhost in SkyPilot's SSH files."""
    target = sky_target(**GPU)
    first, second = target.machines(submission(Request(nodes=2))).hosts()
    assert (first.address, second.address) == (cluster_name("sky", 2), f"{cluster_name('sky', 2)}-worker1")
    assert any(word.startswith("UserKnownHostsFile=") and word.endswith('/%n"') for word in first.ssh)
    assert first.ssh.index("StrictHostKeyChecking=accept-new") < first.ssh.index("StrictHostKeyChecking=yes"), "ssh takes the first one"


def test_the_run_of_a_record_is_found_without_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, one = sky_target(**GPU), submission(Request(nodes=2))
    record = Record(Run(tmp_path), {"handle": target.known_handle(one)})
    monkeypatch.chdir(tmp_path)
    assert target.recorded_machines(record).cluster == record.handle["cluster"] != cluster_name("sky", 2)
