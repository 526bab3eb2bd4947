"""What the targets would run: golden files, and hostile names and settings, which no shell may interpret."""

from __future__ import annotations

import json
import os
import shlex
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.launch.request import Request
from drivetrain.outcomes import Problem
from drivetrain.recipe import load
from drivetrain.runs import Run
from drivetrain.targets import submit
from drivetrain.targets.archive import make_archive, package_archive
from drivetrain.targets.base import RenderedCommand, Target
from drivetrain.targets.config import make_target
from drivetrain.targets.environment import EnvironmentLock
from drivetrain.targets.host.connection import FIND_PYTHON, SshHost
from drivetrain.targets.slurm.script import SlurmJob, job_name, script, slurm_time
from drivetrain.targets.submission import Submission
from tests.command import run_ok, write_task

GOLDEN = Path(__file__).with_name("golden.txt")
SHAPES = {
    "CPU": Request(),
    "one GPU": Request(device="cuda", procs=1, time_limit=4 * 3600),
    "2x8 GPUs": Request(device="cuda", procs=8, nodes=2, time_limit=26 * 3600),
}
TARGETS = {
    "local": {},
    "ssh": {"hosts": ["gpu1", "gpu2"], "rendezvous": "10.0.0.1"},
    "slurm": {
        "partition": "gpu",
        "prologue": ["module load cuda"],
        "sbatch": ["--exclusive"],
        "mem": "64G",
        "python": "/shared/venv/bin/python",
    },
}
WILD = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=300)
"""What a setting's value may contain: quotes, $(), newlines, up to 300 characters."""


def submission(request: Request, words: tuple[str, ...] = ("epochs=5",), name: str = "digits-001") -> Submission:
    settings = {"procs": request.procs, "device": request.device, "nodes": request.nodes, "time_limit": request.time_limit}
    there = Request(settings=words, **settings)  # type: ignore[arg-type]
    token = "planted-token" if request.nodes > 1 else ""
    lock = EnvironmentLock(("numpy==2.0", "torch==2.13.0"))
    return Submission(
        Run(Path("runs") / name), name, there, "mine.py:Mine", make_archive({"mine.py": b"x = 1\n"}), lock, "project-0a1b2c3d", (), token
    )


def target_of(kind: str) -> Target:
    return make_target(kind, kind, TARGETS[kind], Path("drivetrain.yaml"))


def rendered_text(kind: str, shape: str) -> str:
    """Returns what --dry-run prints."""
    return replace_machine_texts(target_of(kind).render(submission(SHAPES[shape])).text())


def replace_machine_texts(text: str) -> str:
    """Replaces what differs between machines and versions."""
    for original, replacement in (
        (shlex.quote(sys.executable), "PYTHON"),
        (sys.executable, "PYTHON"), (FIND_PYTHON, "FIND_PYTHON"), (FIND_PYTHON.replace("'", "'\"'\"'"), "FIND_PYTHON"),
        (package_archive().digest, "PACKAGE"), (f'"size": {len(package_archive().data)}', '"size": SIZE'), (os.getcwd(), "FOLDER"), (_control_path(), "CONTROL"),
    ):  # fmt: skip
        text = text.replace(original, replacement)
    return text


def _control_path() -> str:
    words = SshHost(None, "x").ssh
    return next(word for word in words if word.startswith("ControlPath="))


def test_golden_renderings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After a wanted change: DRIVETRAIN_WRITE_GOLDEN=1 pytest tests/targets, and read the difference."""
    monkeypatch.chdir(tmp_path)
    text = ""
    for kind in TARGETS:
        for shape in SHAPES:
            if (kind, shape) != ("local", "2x8 GPUs"):
                text += f"=== {kind}, {shape} ===\n\n{rendered_text(kind, shape)}\n"
    if os.environ.get("DRIVETRAIN_WRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert "planted-token" not in text


@pytest.mark.parametrize("lacks_all", [True, False])
@pytest.mark.parametrize("torch", ["auto", "cu126"])
@pytest.mark.parametrize("shape", ["one GPU", "2x8 GPUs"])
def test_the_requests_that_are_shown_are_those_that_are_sent(
    shape: str, torch: str, lacks_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One machine says what it lacks when it is to start; several are asked before any of them starts."""
    target = make_target("ssh", "ssh", TARGETS["ssh"] | {"torch": torch}, Path("drivetrain.yaml"))
    one = submission(SHAPES[shape])
    shown = [json.loads(command.request) for command in target.render(one).commands]
    sent: dict[str, list[dict[str, Any]]] = {}

    def call(host: SshHost, verb: str, data: bytes = b"", notice: object = None, **arguments: Any) -> dict[str, Any]:
        requests = sent.setdefault(host.name, [])
        requests.append({"verb": verb, **arguments})
        assert verb != "store" or arguments["size"] == len(data)
        if verb == "missing":
            return {"archives": arguments["archives"], "environment": True} if lacks_all else {"archives": [], "environment": False}
        facts = {"gpus": [{"driver": "535.1"}]}
        if verb == "start" and len(requests) == 1 and lacks_all:
            return {"missing": arguments["needs"] | facts}
        return facts if verb == "facts" else {}

    monkeypatch.setattr(SshHost, "call", call)
    target.submit(one, target.render(one), print)
    text = json.dumps(shown).replace("$TORCH_BACKEND", "cu126").replace("$DRIVETRAIN_TOKEN", "planted-token")
    expected = [request for request in json.loads(text) if lacks_all or request["verb"] == "start"]
    asked = ("missing", "facts") if shape == "2x8 GPUs" else ()
    changed = [request for name in sorted(sent) for request in sent[name] if request["verb"] not in asked]
    if shape == "one GPU" and lacks_all:
        assert changed.pop(0) == changed[-1], "what is asked first is the start itself"
    assert changed == expected


def test_two_dry_runs_print_the_same(folder: Path) -> None:
    Path("drivetrain.yaml").write_text("targets: {box: {kind: ssh, hosts: [gpu1]}}")
    write_task()
    words = ("train", "small.py", "--on", "box", "--dry-run")
    output = run_ok(*words)
    assert output == run_ok(*words)
    assert '"verb": "store"' in output and '"requirements": [' in output and "--torch-backend=$TORCH_BACKEND" in output
    assert "a new run gets random digits in place of the zeros" in output


# --- hostile input -----------------------------------------------------------------------------


def run_script(text: str, array_index: str = "0") -> list[list[str]]:
    """Runs a script with stand-ins for Slurm's programs; returns the words of each srun."""
    stand_ins = 'srun() { python3 -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"; }; scontrol() { echo NodeAddr=10.0.0.7 ; }\n'
    environment = {"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": array_index, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "1"}
    done = subprocess.run(["bash", "-c", stand_ins + text], capture_output=True, text=True, env=environment, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.system  # slow
@settings(max_examples=60, deadline=None)
@given(st.lists(WILD.filter(lambda text: not text.startswith("~/")), min_size=1, max_size=4), WILD)
def test_no_shell_interprets_a_slurm_script(words: list[str], stop_file: str) -> None:
    job = SlurmJob(
        name="x",
        commands=[["python", *words]],
        run_dirs=["/nowhere/" + stop_file],
        stop_files=["/nowhere/" + stop_file],
        variables={"A": words[0]},
    )
    assert run_script(script(job)) == [["--kill-on-bad-exit=0", "python", *words]]
    several = SlurmJob(
        name="x",
        nodes=2,
        commands=[["other"], ["python", *words]],
        run_dirs=["/a", "/nowhere/" + stop_file],
        stop_files=["/a", "/nowhere/" + stop_file],
        outputs=["/dev/stdout"] * 2,
    )
    assert run_script(script(several), "1") == [["--kill-on-bad-exit=0", "python", *words, "--rendezvous", "10.0.0.7:29500"]]


def test_the_home_folder_is_found_where_the_script_runs() -> None:
    job = SlurmJob(name="x", commands=[["~/a b/python", "x=~/y"]], run_dirs=["~/run"], stop_files=["~/stop"])
    assert run_script("HOME=/home/me\n" + script(job)) == [["--kill-on-bad-exit=0", "/home/me/a b/python", "x=~/y"]]


@settings(max_examples=60, deadline=None)
@given(WILD)
def test_hostile_text_gets_no_further_than_one_word(text: str) -> None:
    """For ssh the words travel as JSON on stdin; the command for the login shell is constant."""
    value = f"note={text}"
    for kind in ("local", "ssh"):
        one = submission(Request(), (value,), name="a run")
        commands = target_of(kind).render(one).commands
        plain = target_of(kind).render(submission(Request(), (), name="a run")).commands
        assert [command.words for command in commands] == [command.words for command in plain]
        assert value in json.loads(_start(commands).request)["words"]


def _start(commands: tuple[RenderedCommand, ...]) -> RenderedCommand:
    return next(command for command in commands if json.loads(command.request)["verb"] == "start")


@given(st.text(max_size=300))
def test_job_names_are_plain(text: str) -> None:
    name = job_name(text)
    assert 0 < len(name) <= 64
    assert set(name) <= set(string.ascii_letters + string.digits + "_.-")


@pytest.mark.parametrize("value", ["a b", "x\ny", "$(touch /tmp/x)", "a;b", "'", '"', "`id`", "a\\b", ""])
def test_an_sbatch_value_is_one_word(value: str) -> None:
    with pytest.raises(Problem, match="no value for sbatch"):
        script(SlurmJob(name="x", commands=[["true"]], run_dirs=["/a"], stop_files=["/a"], options={"partition": value}))


@pytest.mark.parametrize("line", ["exclusive", "--x\nrm -rf /", "", "$(id)"])
def test_an_sbatch_line_is_one_option(line: str) -> None:
    with pytest.raises(Problem, match="is no option"):
        script(SlurmJob(name="x", commands=[["true"]], run_dirs=["/a"], stop_files=["/a"], extra=[line]))


@pytest.mark.parametrize(("seconds", "text"), [(1, "00:01:00"), (61.5, "00:01:02"), (4 * 3600, "04:00:00"), (90_061, "1-01:01:01")])
def test_time_limits(seconds: float, text: str) -> None:
    assert slurm_time(seconds) == text


# --- outcomes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "failures", "is_queued_again"),
    [
        (0, 0, False),
        (1, 0, False),
        (2, 0, False),
        (70, 0, False),
        (137, 0, False),
        (138, 0, True),
        (200, 99, True),
        (201, 0, True),
        (203, 2, True),
        (202, 3, False),
    ],
)
def test_which_outcomes_are_queued_again(code: int, failures: int, is_queued_again: bool, tmp_path: Path) -> None:
    stop_file = tmp_path / "stop"
    text = script(SlurmJob(name="x", commands=[["true"]], run_dirs=[str(tmp_path)], stop_files=[str(stop_file)]))
    stand_ins = f"srun() {{ return {code}; }}; scontrol() {{ echo scontrol $*; }}; SLURM_JOB_ID=7\n"
    Path(f"{stop_file}.failures").write_text("201\n" * failures)
    done = subprocess.run(["bash", "-c", stand_ins + text], capture_output=True, text=True)
    assert ("scontrol requeue 7" in done.stdout) == is_queued_again
    assert done.returncode == (0 if is_queued_again else code)
    stop_file.touch()
    stopped = subprocess.run(["bash", "-c", stand_ins + text], capture_output=True, text=True)
    assert (stopped.stdout, stopped.returncode) == ("", 200 if code == 138 else code), "drivetrain stop asked for the end"


@pytest.mark.parametrize("parent", ["checkpoints", "2-b/checkpoints"])
def test_a_run_that_is_preempted_before_it_can_save_is_given_up(parent: str, tmp_path: Path) -> None:
    """It is queued again three times in a row; each new checkpoint begins the count again."""
    checkpoints = tmp_path / "a run" / parent
    checkpoints.mkdir(parents=True)
    text = script(SlurmJob(name="x", commands=[["true"]], run_dirs=[str(tmp_path / "a run")], stop_files=[str(tmp_path / "stop")]))

    def end() -> subprocess.CompletedProcess[str]:
        stand_ins = "srun() { return 200; }; scontrol() { echo scontrol $*; }; SLURM_JOB_ID=7\n"
        return subprocess.run(["bash", "-c", stand_ins + text], capture_output=True, text=True)

    for step in (None, 9, 10, 100):
        if step is not None:
            (checkpoints / f"step-{step:08d}").mkdir()
        for _ in range(3 if step == 100 else 2):
            done = end()
            assert "scontrol requeue 7" in done.stdout and done.returncode == 0
    (checkpoints / ".step-00000200").mkdir()  # a save that was interrupted
    done = end()
    assert "3 times in a row it saved nothing new: give it more time" in done.stdout
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (200, "", 1)


# --- guides ------------------------------------------------------------------------------------


def test_a_dry_run_needs_neither_a_file_nor_slurm(folder: Path) -> None:
    output = run_ok("train", "digits", "--on", "slurm", "--nodes", "2", "--dry-run")
    assert "#SBATCH --nodes=2" in output
    assert "sbatch --parsable" in output
    assert not list(folder.iterdir()), "nothing was written"


def test_the_script_of_guide_002_is_one_dry_run_away(folder: Path) -> None:
    """One node, four GPUs, 24 hours."""
    write_task()
    output = run_ok(
        "train", "small.py", "--on", "slurm", "--device", "cuda", "--procs", "4", "--time-limit", "24h", "--dry-run", "--name", "ad_train"
    )
    for line in ("--job-name=ad_train", "--nodes=1", "--gres=gpu:4", "--time=1-00:00:00"):
        assert f"#SBATCH {line}\n" in output


def test_the_words_of_a_submission_load_the_same_recipe(folder: Path) -> None:
    write_task()
    (recipe,) = load("small.py", ["hidden=7", "plan.threads=1"], {"DRIVETRAIN_EPOCHS": "3"})
    made = submit.prepare(target_of("local"), [recipe], Request(target="small.py"), Run("runs/x"))
    made.code.unpack(folder / "there")  # type: ignore[union-attr]
    words = made.words("python", "runs/x", str(folder / "there"))
    (again,) = load(words[5], [word for word in words[6:] if "=" in word], {})
    assert again.identity() == recipe.identity()
    assert again.pins == recipe.pins
