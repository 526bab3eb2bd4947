"""What a target on Google Cloud writes and runs: a golden file, hostile settings, and secrets, which appear nowhere."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.launch.request import Request
from drivetrain.outcomes import Problem
from drivetrain.targets.archive import package_archive
from drivetrain.targets.config import make_target
from drivetrain.targets.gcp.cloud import INSTALL
from drivetrain.targets.gcp.machines import Machine, order_of, read_machine, to_facts
from drivetrain.targets.gcp.orphans import KINDS, delete_words, owner_of
from drivetrain.targets.gcp.prices import cost_of, price_list
from drivetrain.targets.gcp.settings import ATTACHED, SPECIFIC, GcpSettings, deployment_name, terraform_variables
from drivetrain.targets.gcp.target import GcpTarget
from drivetrain.targets.host.connection import FIND_PYTHON
from tests.targets.test_rendering import WILD, _control_path, submission

GOLDEN = Path(__file__).with_name("gcp_golden.txt")
MACHINES = [
    Machine("dt-master-gcp", "4711", "us-central1-a", "RUNNING", "203.0.113.7", "10.128.0.2"),
    Machine("dt-worker-gcp", "4712", "us-central1-f", "RUNNING", "203.0.113.8", "10.128.0.3"),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "two T4": {"nodes": 2, "zones": ["us-central1-a", "us-central1-f"]},
    "four L4, spot": {"accelerator_type": "nvidia-l4", "gpus_per_machine": 4, "spot": True, "max_cost": 50.0, "state_bucket": "my-tfstate"},
    "CPU, open port": {
        "use_gpu": False,
        "ssh_source_ranges": ["203.0.113.0/24"],
        "budget_amount": 20,
        "billing_account": "012345-6789AB-CDEF01",
    },
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def target_of(name: str = "gcp", **values: Any) -> GcpTarget:
    target = make_target(name, "gcp", {"project": "demo-project", "deployment": "gcp", **values}, Path("drivetrain.yaml"))
    assert isinstance(target, GcpTarget)
    return target


def with_machines(target: GcpTarget) -> GcpTarget:
    target.deployment.folder.mkdir(parents=True, exist_ok=True)
    target.deployment.write_machines(MACHINES)
    return target


def plain(text: str, home: Path) -> str:
    for original, replacement in (
        (FIND_PYTHON, "FIND_PYTHON"), (FIND_PYTHON.replace("'", "'\"'\"'"), "FIND_PYTHON"), (package_archive().digest, "PACKAGE"),
        (f'"size": {len(package_archive().data)}', '"size": SIZE'),
        (_control_path(), "CONTROL"), (str(home), "HOME"), (shlex.quote(sys.executable), "PYTHON"),
    ):  # fmt: skip
        text = text.replace(original, replacement)
    return text


def test_golden_renderings(home: Path) -> None:
    """After a wanted change: DRIVETRAIN_WRITE_GOLDEN=1 pytest tests/targets, and read the difference."""
    text = ""
    for name, values in SETTINGS.items():
        cost, rendering = target_of(**values).render_up(None)
        text += f"=== up: {name} ===\n\n" + "\n".join(cost.lines()) + f"\n\n{rendering.text()}\n"
    one, two = Request(device="cuda", procs=1), Request(device="cuda", procs=1, nodes=2)
    text += f"=== train: through the proxy ===\n\n{with_machines(target_of(nodes=2)).render(submission(two)).text()}\n"
    text += f"=== train: open port ===\n\n{with_machines(target_of(ssh_source_ranges=['203.0.113.0/24'])).render(submission(one)).text()}\n"
    text = plain(text, home)
    if os.environ.get("DRIVETRAIN_WRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert "planted-token" not in text


@settings(max_examples=60, deadline=None)
@given(WILD)
def test_a_hostile_setting_gets_no_further_than_one_word(text: str) -> None:
    """What a user writes reaches the machine as JSON on stdin; ssh's words are constant."""
    target = with_machines(target_of())
    value = f"note={text}"
    *_, one = target.render(submission(Request(), (value,), name="a run")).commands
    *_, plain_one = target.render(submission(Request(), (), name="a run")).commands
    assert one.words == plain_one.words
    assert value in json.loads(one.request)["words"]


@settings(max_examples=100, deadline=None)
@given(WILD)
def test_a_hostile_name_is_refused_or_plain(text: str) -> None:
    """Names of deployments, projects and zones become names of resources, and words of a command that ssh hands to a shell."""
    for values in ({"deployment": text}, {"project": text}, {"zone": text}, {"zones": [text]}):
        with contextlib.suppress(Problem):
            target = target_of(**values)
            target.render_up(None)
            used = [target.deployment.name, target.deployment.project, target.settings.zone, *target.settings.zones]
            assert set("".join(used)) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.:")


@given(st.text(max_size=60))
def test_the_name_of_a_target_is_a_label_or_refused(name: str) -> None:
    with contextlib.suppress(Problem):
        assert set(deployment_name(GcpSettings(), name, "Maria.J")) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    with pytest.raises(Problem, match="write `deployment: NAME` in the target"):
        deployment_name(GcpSettings(), "7 machines", "me")
    assert deployment_name(GcpSettings(), "gcp", "Maria.J") == "gcp-maria-j", (
        "two users of a project do not take each other's machines for orphans"
    )
    assert deployment_name(GcpSettings(), "gcp", "maria-magdalena") == "gcp-maria-magdalen"


def test_the_proxy_command_keeps_its_words_apart(home: Path) -> None:
    host = with_machines(target_of()).hosts()[0]
    (proxy,) = (word for word in host.ssh if word.startswith("ProxyCommand="))
    words = shlex.split(proxy.partition("=")[2])
    assert words[:5] == ["gcloud", "compute", "start-iap-tunnel", "dt-master-gcp", "22"]
    assert host.address == "drivetrain@dt-master-gcp" and "HostKeyAlias=drivetrain-4711" in host.ssh


def test_secrets_appear_nowhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "planted-secret")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/planted-secret.json")
    target = with_machines(target_of(secrets=["WANDB_API_KEY"]))
    text = target.render(submission(Request())).text() + target.render_up(None)[1].text()
    files = [path for path in target.deployment.folder.rglob("*") if path.is_file()]
    assert files
    assert not [part for part in (text, *(path.read_text() for path in files)) if "planted-secret" in part]


def test_only_googles_proxy_reaches_port_22_by_default() -> None:
    """The variable is always given, so that no default of Terraform's files can open the port."""
    for chosen, expected in (
        (GcpSettings(), ["35.235.240.0/20"]),
        (GcpSettings(ssh_source_ranges=["203.0.113.7/32"]), ["203.0.113.7/32"]),
    ):
        assert terraform_variables(chosen, "demo-project", "gcp", "KEY", 0)["ssh_source_ranges"] == expected


@pytest.mark.parametrize(("own_limit", "expected"), [(None, 3420), (600.0, 600)])
def test_a_run_saves_before_google_stops_its_machine(home: Path, own_limit: float | None, expected: int) -> None:
    target = target_of()
    target.deployment.folder.mkdir(parents=True)
    target.deployment.write_machines([replace(MACHINES[0], ends=time.time() + 3600)])
    *_, command = target.render(submission(Request(time_limit=own_limit))).commands
    words = json.loads(command.request)["words"]
    assert abs(float(words[words.index("--time-limit") + 1].removesuffix("s")) - expected) < 10
    target.deployment.write_machines([replace(MACHINES[0], ends=time.time() + 100)])
    with pytest.raises(Problem, match="drivetrain up gcp gives them more time"):
        target.render(submission(Request()))


# --- what gcloud prints ------------------------------------------------------------------------


def test_machines_are_in_the_order_of_their_ranks() -> None:
    names = ["dt-master-exp-7", "dt-worker-exp-7", "dt-worker-2-exp-7", "dt-worker-10-exp-7"]
    assert sorted(set(names), key=order_of) == names
    assert sorted(["dt-worker-2", "dt-worker", "dt-master"], key=order_of) == ["dt-master", "dt-worker", "dt-worker-2"]


def test_a_stopped_machine_has_no_address() -> None:
    row = {"name": "dt-master", "id": "47", "zone": "https://www.googleapis.com/compute/v1/projects/p/zones/us-central1-a", "status": "TERMINATED",
           "networkInterfaces": [{"networkIP": "10.128.0.2", "accessConfigs": [{"type": "ONE_TO_ONE_NAT"}]}],
           "scheduling": {"provisioningModel": "SPOT"}, "lastStartTimestamp": "2026-11-19T02:00:00.000-08:00"}  # fmt: skip
    machine = read_machine(row)
    assert (machine.zone, machine.address, machine.is_stopped, machine.is_spot, machine.ends) == ("us-central1-a", "", True, True, None)
    assert machine.started == 1795082400.0
    assert Machine(**to_facts([machine])[0]) == machine


def test_how_each_kind_of_resource_is_deleted() -> None:
    rows = {"zone": "https://x/zones/us-central1-a", "region": "https://x/regions/us-central1", "description": "drivetrain=gcp"}
    words = {kind.noun: " ".join(delete_words(kind, rows | {"name": "N"})) for kind in KINDS}
    assert words["machine"] == "compute instances delete N --zone=us-central1-a"
    assert words["subnetwork"] == "compute networks subnets delete N --region=us-central1"
    assert words["bucket"] == "storage buckets delete gs://N"
    repository = {"name": "projects/p/locations/us-central1/repositories/drivetrain-gcp", "labels": {"drivetrain": "gcp"}}
    assert " ".join(delete_words(KINDS[-1], repository)) == "artifacts repositories delete drivetrain-gcp --location=us-central1"
    assert owner_of(repository) == owner_of(rows) == "gcp"
    assert owner_of({"description": "drivetrain=gcp and more"}) == "", "somebody else's words"


# --- prices ------------------------------------------------------------------------------------


def test_every_machine_with_gpus_has_a_price_with_date_and_source() -> None:
    for gpu, numbers in (ATTACHED | SPECIFIC).items():
        for number in numbers:
            cost = cost_of(GcpSettings(accelerator_type=gpu, gpus_per_machine=number), None)
            assert cost.hourly > 0.3 * number
            assert price_list()["read"] in cost.source and "Google" in cost.source


def test_the_users_own_price() -> None:
    cost = cost_of(GcpSettings(use_gpu=False, machine_type="c4-standard-96", hourly_price=4.5, nodes=2), 90.0)
    assert cost.prices[0].hourly == 9.0
    assert cost.max_hours is not None and 9.9 < cost.max_hours < 10
    with pytest.raises(Problem, match="write `hourly_price: DOLLARS` in the target"):
        cost_of(GcpSettings(use_gpu=False, machine_type="c4-standard-96"), None)


def test_each_program_has_its_installation() -> None:
    assert {"gcloud", "terraform", "ssh"} <= set(INSTALL)
