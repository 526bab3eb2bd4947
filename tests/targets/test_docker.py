"""The target docker and `drivetrain image build`, without an engine: commands, settings, and what failures tell."""

from __future__ import annotations

import csv
import json
import os
import re
import zipfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.launch.request import Request
from drivetrain.outcomes import Problem
from drivetrain.runs import Run
from drivetrain.targets.base import JobState
from drivetrain.targets.config import make_target
from drivetrain.targets.docker import engine
from drivetrain.targets.docker import target as docker
from drivetrain.targets.docker.command import ContainerJob, container_name, gpu_words, run_command, shm_size
from drivetrain.targets.docker.engine import Engine, check_local
from drivetrain.targets.docker.target import DockerTarget, container_state
from drivetrain.targets.environment import EnvironmentLock
from drivetrain.targets.gcp.builds import Builder
from drivetrain.targets.image import failures
from drivetrain.targets.image.build import ImageBuild, cloud_build_config, render_build
from drivetrain.targets.image.failures import failed_build
from drivetrain.targets.image.record import BuiltImage, read_images, record_image
from drivetrain.targets.image.wheel import make_wheel, wheel_name
from drivetrain.targets.submission import Submission
from tests.command import expect_error, run_ok

OUTPUTS = Path(__file__).parent / "outputs"
GOLDEN = Path(__file__).with_name("docker_golden.txt")
SECRET = "hf_" + "planted" * 4
JOB = ContainerJob(
    engine="docker", name="drivetrain-small-001-0a1b2c3d", run_dir=Path("/home/me/runs/small-001"), run="small-001", image="drivetrain:cpu",
    words=["train", "digits", "--run-dir", "/runs/small-001"],
)  # fmt: skip


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user with the number 1000 in /home/me, an engine with root, no GPU, and no image built yet."""
    monkeypatch.setattr(docker, "host_gpus", lambda: 0)
    monkeypatch.setattr(docker, "_is_rootless", lambda engine: False)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(os, "getgid", lambda: 1000)
    monkeypatch.setattr(os, "getcwd", lambda: "/home/me")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def target(**settings: Any) -> DockerTarget:
    made = make_target("box", "docker", {"engine": "docker"} | settings, Path("drivetrain.yaml"))
    assert isinstance(made, DockerTarget)
    return made


def submission(**request: Any) -> Submission:
    return Submission(
        Run(Path("runs/small-001")), "small-001", Request(settings=("hidden=512",), **request), "digits", None, EnvironmentLock(()), "p", ("HF_TOKEN",)
    )  # fmt: skip


def words(**settings: Any) -> list[str]:
    return list(target(**settings).render(submission()).commands[0].words)


# --- the command -------------------------------------------------------------------------------


def test_golden_commands(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands for a CPU and for one GPU, beside this file."""
    cpu = target(data="/srv/data", cpus=4, memory="16g", env={"OMP_NUM_THREADS": "2"}).render(submission(device="cpu")).text()
    gpu = target(options=["--ulimit=memlock=-1"]).render(submission(device="cuda", procs=1)).text()
    podman = target(engine="podman", image="registry.example/team/train:3").render(submission(device="cuda", procs=1)).text()
    text = f"# CPU\n{cpu}\n# one GPU\n{gpu}\n# one GPU, podman\n{podman}"
    assert text == GOLDEN.read_text()


def test_gpus_are_given_only_where_they_are(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [word for word in words() if "gpu" in word]
    monkeypatch.setattr(docker, "host_gpus", lambda: 2)
    assert "--gpus=all" in words()
    assert "drivetrain:gpu" in words()
    assert not [word for word in words(device="cpu", gpus="none") if "gpu" in word]
    request = submission(device="cpu")
    assert not [word for word in target().render(request).commands[0].words if "gpu" in word]


@pytest.mark.parametrize(
    ("engine", "gpus", "expected"),
    [
        ("docker", "all", ["--gpus=all"]),
        ("docker", "2", ["--gpus=2"]),
        ("docker", "device=1", ["--gpus=device=1"]),
        ("docker", "device=0,1", ['--gpus="device=0,1"']),
        ("podman", "all", ["--device=nvidia.com/gpu=all"]),
        ("podman", "2", ["--device=nvidia.com/gpu=0", "--device=nvidia.com/gpu=1"]),
        ("podman", "device=0,3", ["--device=nvidia.com/gpu=0", "--device=nvidia.com/gpu=3"]),
    ],
)
def test_gpus(engine: str, gpus: str, expected: list[str]) -> None:
    assert gpu_words(engine, gpus) == expected


def test_without_root_files_belong_to_the_user() -> None:
    assert "--user=0:0" in run_command(replace(JOB, is_rootless=True)), "root in a container without root is the user of this machine"
    assert {"--userns=keep-id", "--user=1000:1000"} <= set(run_command(replace(JOB, engine="podman", is_rootless=True)))


def test_shared_memory_is_enough_for_the_loader_workers() -> None:
    assert shm_size((), procs=1, has_gpus=False) == "64m", "on a CPU a plan chooses no loader workers"
    assert shm_size((), procs=2, has_gpus=True) == "2624m"
    assert shm_size(("plan.workers=3",), procs=2, has_gpus=False) == "1600m"


def test_settings_of_the_target_win_over_the_defaults(host: None) -> None:
    chosen = words(shm="8g", network="none", image="mine:1", env={"A": "b c"})
    assert {"--shm-size=8g", "--network=none", "mine:1", "A=b c"} <= set(chosen)
    assert "--pull=never" not in chosen, "an image that the user names may come from a registry"
    assert "--pull=never" in words(), "drivetrain:cpu is this machine's; in a registry it would be a stranger's"


def test_the_image_that_was_built_last_is_used(host: None) -> None:
    record_image("cpu", BuiltImage(tag="mine:2", digest="sha256:1", source="x", version="1", base="b", built=0.0))
    assert "mine:2" in words()
    assert list(read_images()) == ["cpu"]


def test_runs_of_one_name_in_two_folders_have_two_containers() -> None:
    names = {container_name("digits-001", Path(folder)) for folder in ("/a/runs/digits-001", "/b/runs/digits-001")}
    assert len(names) == 2


hostile = st.text(st.characters(min_codepoint=32, exclude_categories=["Cc", "Cs", "Zl", "Zp", "Cf", "Zs", "Cn", "Co"]), min_size=1, max_size=30) | st.sampled_from(
    ["$(touch x)", "`id`", "a; rm -rf /", "--privileged", "-v=/:/host", "a b", "'", '"', "a,readonly=false", "é=ü", "\\", "{}", "%s", "a:b:rw"]
)  # fmt: skip


@given(run=hostile, folder=hostile, value=hostile, word=hostile)
def test_hostile_text_stays_in_one_word(run: str, folder: str, value: str, word: str) -> None:
    run_dir = Path("/home/me") / folder.replace("/", "") / "runs" / "x"
    job = replace(
        JOB, run=run, run_dir=run_dir, name=container_name(run, run_dir), variables={"NAME": value}, words=["train", "task.py", word],
        secrets=["HF_TOKEN"],
    )  # fmt: skip
    made = run_command(job)
    plain = run_command(replace(JOB, variables={"NAME": "x"}, words=["train", "task.py", "x"], secrets=["HF_TOKEN"]))
    assert len(made) == len(plain) + (":" in str(run_dir)), "no text becomes a word more or less, so that none becomes an option"
    assert made[-3:] == ["train", "task.py", word]
    assert f"NAME={value}" in made
    assert made[made.index("--name") + 1].replace("-", "").replace("_", "").replace(".", "").isalnum()
    if ":" in str(run_dir):
        (fields,) = csv.reader([made[made.index("--mount") + 1]])
        assert fields == ["type=bind", f"source={run_dir}", f"target=/runs/{run}"]
    else:
        assert f"--volume={run_dir}:/runs/{run}" in made


@pytest.mark.parametrize("image", ["--privileged", "", "a b", "-v"])
def test_an_image_is_no_option(image: str) -> None:
    with pytest.raises(Problem, match="is no name of an image"):
        run_command(replace(JOB, image=image))


def test_secrets_are_named_and_not_written(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    made = words()
    assert made[made.index("HF_TOKEN") - 1] == "--env"
    assert SECRET not in target().render(submission()).text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpus": "two"}, "gpus: 'two'"),
        ({"shm": "much"}, "shm: 'much' is no size"),
        ({"memory": "1 g"}, "memory: '1 g' is no size"),
        ({"cpus": "some"}, "box.cpus is 'some'"),
        ({"env": {"HF_TOKEN": SECRET}}, r"secrets: \[HF_TOKEN\]"),
        ({"engin": "docker"}, "unknown key 'engin'"),
    ],
)
def test_wrong_settings(host: None, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(Problem, match=message):
        words(**settings)


def test_what_one_container_cannot_do(host: None) -> None:
    with pytest.raises(Problem, match="kind ssh or slurm"):
        target().render(submission(nodes=2))
    with pytest.raises(Problem, match="start=/data/NAME"):
        target().render(replace(submission(), request=Request(settings=("start=runs/digits-001",))))


# --- the engine --------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["tcp://10.0.0.7:2375", "ssh://me@box", "https://box.example"])
def test_an_engine_of_another_machine_is_refused(address: str) -> None:
    with pytest.raises(Problem, match=r"another machine.*kind ssh"):
        check_local("docker", {"DOCKER_HOST": address})
    with pytest.raises(Problem, match="CONTAINER_HOST"):
        check_local("podman", {"CONTAINER_HOST": address})


@pytest.mark.parametrize("address", ["", "unix:///run/podman/podman.sock", "tcp://localhost:2375", "tcp://127.0.0.1:2375"])
def test_an_engine_of_this_machine_is_used(address: str) -> None:
    check_local("docker", {"DOCKER_HOST": address})


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"Status": "running", "ExitCode": 0}, JobState("running")),
        ({"Status": "exited", "ExitCode": 200}, JobState("ended", 200, "")),
        ({"Status": "Exited", "ExitCode": 1, "Error": "it broke"}, JobState("ended", 1, "it broke")),
    ],
)
def test_states(state: dict[str, Any], expected: JobState) -> None:
    assert container_state(state) == expected
    full = container_state({"Status": "exited", "ExitCode": 137, "OOMKilled": True})
    assert full.code == 137
    assert "raise memory:" in full.reason


EXPLAINED = {
    "gpus": "NVIDIA Container Toolkit",
    "runtime": "NVIDIA Container Toolkit",
    "name-taken": "choose another --name",
    "network": "no network nope: correct network:",
    "never": "there is no image mine:1: build it with `drivetrain image build`",
    "no-daemon": "does not answer: start Docker",
    "no-service": "`podman system service`",
    "no-entrypoint": "does not have drivetrain as its entry point",
    "pull-denied": "cannot be reached",
    "socket-permission": "join the group docker",
    "image-never-pulled": "there is no image mine:1",
    "image-short-name": "mine:1",
    "image-unreachable": "the registry of mine:1 cannot be reached",
    "memory": "raise memory:",
}
RUN_OUTPUTS = sorted(path for path in OUTPUTS.glob("*.txt") if path.name.startswith(("docker", "podman")))


@pytest.mark.parametrize("output", RUN_OUTPUTS, ids=lambda path: path.stem)
def test_what_engines_print_becomes_one_line_with_the_fix(output: Path) -> None:
    """The outputs are those of Docker 20.10 and 28, and of podman 4.3, itself and behind Docker's command; names of hosts are changed."""
    problem = Engine("docker").problem(output.read_text(), 125, "mine:1")
    kind = output.stem.removeprefix("docker-").removeprefix("podman-").removeprefix("api-")
    assert EXPLAINED[kind] in str(problem)
    assert "\n" not in str(problem)
    assert problem.outcome.code == 2, "the same command fails again"


def test_an_unknown_error_is_shown_without_dockers_hint() -> None:
    text = "docker: Error response from daemon: the moon is in the way\n\nRun 'docker run --help' for more information\n"
    assert str(Engine("docker").problem(text, 125)) == "docker: docker: Error response from daemon: the moon is in the way"


def test_an_engine_that_does_not_exist(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "bin").mkdir()
    message = expect_error("train", "digits", "--on", "docker", PATH=str(folder / "bin"))
    assert (
        message
        == "drivetrain: there is no docker or podman on this machine: install Docker or podman, or train without containers: --on local"
    )


def test_a_gpu_that_nobody_has(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "facts", lambda self: {})
    monkeypatch.setattr(engine.shutil, "which", lambda program: program)
    made = target()
    with pytest.raises(Problem, match=r"no NVIDIA GPU.*--device cpu"):
        made.submit(submission(device="cuda"), made.render(submission(device="cuda")), print)


# --- the image ---------------------------------------------------------------------------------

BUILD_OUTPUTS = sorted(OUTPUTS.glob("build*.txt"))


@pytest.mark.parametrize("output", BUILD_OUTPUTS, ids=lambda path: path.stem)
def test_a_failed_build_names_its_step(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's classic builder, its BuildKit (20.10; 23 is written after its documentation), and podman; of the Dockerfile beside them."""
    monkeypatch.setattr(failures, "FOLDER", OUTPUTS)
    message = str(failed_build("docker", output.read_text(), 1, "nothing-here", Path("build.log")))
    if output.stem.endswith("-from"):
        assert message.startswith("line 4 of the Dockerfile failed (FROM nothing-here): ")
    else:
        assert message.startswith("line 20 of the Dockerfile failed (RUN export PIP_BREAK_SYSTEM_PACKAGES=1")
        assert message.endswith("ERROR: No matching distribution found for datasets>=4 (from drivetrain[lora,rl]) (all of it: build.log)")


def test_dry_run_shows_the_dockerfile_and_the_command(folder: Path) -> None:
    text = run_ok("image", "build", "--gpu", "--engine", "docker", "--push", "registry.example/me/train:1", "--dry-run")
    for part in ("ARG BASE=", 'ENTRYPOINT ["drivetrain"]', "USER 1000:1000", 'VOLUME ["/data", "/runs"]', "--build-arg TORCH_BACKEND=cu"):
        assert part in text
    assert text.rstrip().endswith("$ docker push registry.example/me/train:1")


def test_cloud_build() -> None:
    build = ImageBuild(variant="gpu", push="registry.example/me/train:1", arguments={"PIP_ARGS": "--index-url $HOST"})
    text = cloud_build_config(build, Builder("demo-project"))
    assert "PIP_ARGS=--index-url $$HOST" in text, "Cloud Build would read $HOST as a variable of its own"
    assert "gcloud builds submit CONTEXT" in render_build(build, Builder("demo-project")).text()
    assert "--cloud-build needs --push" in expect_error("image", "build", "--cloud-build")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tag", "--privileged"), "--tag"),
        (("--base", "a b"), "is no name of an image"),
        (("--build-arg", "x"), "write NAME=VALUE"),
        (("--build-arg", f"TOKEN={SECRET}"), "TOKEN is a secret: it would stay in the image"),
    ],
)
def test_wrong_flags_of_a_build(words: tuple[str, ...], message: str) -> None:
    assert message in expect_error("image", "build", "--dry-run", *words)


def test_the_wheel_holds_this_package_and_can_be_made_twice(tmp_path: Path) -> None:
    data = make_wheel()
    assert data == make_wheel()
    with zipfile.ZipFile(BytesIO(data)) as wheel:
        names = wheel.namelist()
        metadata = next(wheel.read(name).decode() for name in names if name.endswith("METADATA"))
        assert len(wheel.read(next(name for name in names if name.endswith("RECORD"))).decode().splitlines()) == len(names)
    assert {"drivetrain/__main__.py", "drivetrain/targets/image/files/Dockerfile"} <= set(names)
    assert "Requires-Dist: torch<2.14,>=2.11" in metadata
    assert wheel_name().endswith("-py3-none-any.whl")


def test_the_list_of_images(folder: Path) -> None:
    state = str(folder / "state")
    assert "no image was built yet" in run_ok("image", "list", XDG_STATE_HOME=state)
    path = folder / "state" / "drivetrain" / "images.json"
    path.parent.mkdir(parents=True)
    image = {"tag": "mine:2", "digest": "sha256:1", "source": "x", "version": "1", "base": "b", "built": 0.0}
    path.write_text(json.dumps({"cpu": image}))
    assert run_ok("image", "list", XDG_STATE_HOME=state).startswith("cpu   mine:2   sha256:1")


def test_no_file_of_the_image_names_a_registry() -> None:
    for path in failures.FOLDER.iterdir():
        hosts = re.findall(r"[\w-]+\.(?:org|io|com|dev)\b|https?://\S+", path.read_text())
        assert not hosts, f"{path.name}: {hosts}"
