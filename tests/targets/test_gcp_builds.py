"""`image build --cloud-build`, on a stand-in for gcloud: project, account and price; and which code may start programs of the cloud."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import yaml

import drivetrain
from drivetrain.targets.gcp.cloud import Cloud
from tests.targets.stand_in_cloud import StandInCloud

SOURCE = Path(drivetrain.__file__).parent
REF = "us-central1-docker.pkg.dev/demo-project/drivetrain-gcp/drivetrain:1"
BUILD = ("image", "build", "--cloud-build", "--push", REF, "--quiet")


def builds(cloud: StandInCloud) -> list[list[str]]:
    """Returns the words after `gcloud builds submit` of each build."""
    return [call[3:] for call in cloud.calls if call[:3] == ["gcloud", "builds", "submit"]]


def test_nothing_is_built_without_consent(cloud: StandInCloud) -> None:
    output = cloud.run(*BUILD, code=2)
    assert "at most $0.36 in 1.0 hours, then $0.10 a month for each GB in the registry" in output
    assert "cloud.google.com/build/pricing" in output and "read 2026-11-19" in output
    assert "costs money and nobody can be asked: repeat the command with --yes" in output
    assert not builds(cloud)
    with pytest.raises(TypeError, match="consent"):
        Cloud("demo-project").submit_build(None, [], print)  # type: ignore[arg-type]


def test_a_build_in_the_project_of_its_registry(cloud: StandInCloud) -> None:
    assert f"{REF}   sha256:{'5' * 64}" in cloud.run(*BUILD, "--yes")
    (words,) = builds(cloud)
    assert "--project=demo-project" in words and not [word for word in words if "service-account" in word]
    assert "options" not in yaml.safe_load(json.loads((cloud.folder / "build.json").read_text())["configuration"])
    cloud.run("image", "build", "--cloud-build", "--push", "registry.example/me/train:1", "--dry-run", code=2)  # no project anywhere


def test_a_build_with_the_account_that_terraform_made(cloud: StandInCloud) -> None:
    cloud.write_target(cloud_build_user="me@example.com")
    cloud.run("up", "gcp", "--yes")
    cloud.run(*BUILD, "--on", "gcp", "--yes")
    (words,) = builds(cloud)
    assert "--service-account=projects/demo-project/serviceAccounts/dt-build-gcp@demo-project.iam.gserviceaccount.com" in words
    assert "--gcs-source-staging-dir=gs://demo-project-distributed-training-gcp/build" in words and "--project=demo-project" in words
    facts = json.loads((cloud.folder / "build.json").read_text())
    assert yaml.safe_load(facts["configuration"])["options"] == {"logging": "CLOUD_LOGGING_ONLY"}
    assert len(facts["files"]) == 3 and {"Dockerfile", "cloudbuild.yaml"} < set(facts["files"]), (
        "and the wheel; nothing of the user's folder"
    )
    assert "--service-account=projects/demo-project" in cloud.run(*BUILD, "--on", "gcp", "--dry-run")
    assert len(builds(cloud)) == 1


def test_a_target_without_such_an_account(cloud: StandInCloud) -> None:
    assert "gcp has no account for builds (set cloud_build_user: YOUR E-MAIL, and drivetrain up gcp)" in cloud.run(
        *BUILD, "--on", "gcp", "--yes"
    )
    assert "--project=demo-project" in builds(cloud)[0]
    assert "needs a target of kind gcp" in cloud.run(*BUILD, "--on", "local", "--yes", code=2)


def test_a_failed_build_is_one_line(cloud: StandInCloud) -> None:
    failed = 'ERROR: (gcloud.builds.submit) build 47-11 completed with status "FAILURE"\n'
    cloud.inject(fail={"gcloud builds submit": {"err": failed}})
    assert "gcloud beta builds log 47-11 --project=demo-project" in cloud.run(*BUILD, "--yes", code=201)


# --- which code starts programs ----------------------------------------------------------------


def test_only_cloud_py_starts_programs_of_the_cloud() -> None:
    """In targets/gcp no other file can start a process. Elsewhere no file that can has a command of gcloud or terraform in it."""
    starts = {"subprocess", "os.system", "os.popen", "os.exec", "os.spawn", "os.posix_spawn", "asyncio", "pty"}
    found = []
    for path in SOURCE.rglob("*.py"):
        tree, name = ast.parse(path.read_text()), path.relative_to(SOURCE).as_posix()
        nodes = list(ast.walk(tree))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        names |= {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        can_start = any(text == start or text.startswith(start) for text in names for start in starts)
        lists = [node.elts[0] for node in nodes if isinstance(node, ast.List | ast.Tuple) and node.elts]
        first = [
            node.args[0] for node in nodes if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).startswith(tuple(starts))
        ]
        is_gcp = name.startswith("targets/gcp/")
        if can_start and (is_gcp or any(_is_program(node) for node in lists + first)):
            found.append(name)
    assert found == ["targets/gcp/cloud.py"]


def _is_program(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(" ")[0] in ("gcloud", "terraform")
