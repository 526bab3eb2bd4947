"""Stand-ins for gcloud, terraform and ssh, with a cloud that is a JSON file. They answer in the form of the real programs.

A test puts programs that call `main` on the PATH, and sets STAND_IN_CLOUD to a folder:

    cloud.json    all resources, and the number of commands so far
    calls.jsonl   the words of each command
    inject.json   what goes wrong: {"fail": {PREFIX OF WORDS: {"err": TEXT, "code": 1}}, "kill_after": N, "kill_in_apply": true}
    consoles/     what each machine has written to its serial console
    machines/     the home folder of each machine: ssh runs commands there
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("STAND_IN_CLOUD", "/nowhere"))
READY = "drivetrain: preparing this machine\r\ndrivetrain: packages\r\ndrivetrain: ready\r\n"
LISTS = {
    "compute instances": "machine", "compute disks": "disk", "compute addresses": "address", "compute firewall-rules": "firewall",
    "compute networks subnets": "subnetwork", "compute networks": "network", "iam service-accounts": "account", "storage buckets": "bucket",
    "artifacts repositories": "repository",
}  # fmt: skip


def read(name: str, default: Any) -> Any:
    path = ROOT / name
    return json.loads(path.read_text()) if path.exists() else default


def cloud() -> dict[str, Any]:
    return dict(read("cloud.json", {"resources": [], "commands": 0, "next": 1000}))


def write_cloud(facts: dict[str, Any]) -> None:
    temporary = ROOT / f"cloud.json-{os.getpid()}"
    temporary.write_text(json.dumps(facts))
    os.replace(temporary, ROOT / "cloud.json")


def main(program: str, words: list[str]) -> int:
    with open(ROOT / "calls.jsonl", "a") as file:
        file.write(json.dumps([program, *words]) + "\n")
    facts = cloud()
    facts["commands"] += 1
    write_cloud(facts)
    code = injected([program, *words])
    if code is None:
        code = {"gcloud": gcloud, "terraform": terraform, "ssh": ssh}[program](words)
    sys.stdout.flush()
    if read("inject.json", {}).get("kill_after") == facts["commands"]:
        os.kill(os.getppid(), signal.SIGKILL)
    return code


def injected(words: list[str]) -> int | None:
    text = " ".join(word for word in words if not word.startswith("-chdir="))
    for prefix, failure in read("inject.json", {}).get("fail", {}).items():
        if text.startswith(prefix):
            sys.stderr.write(failure["err"])
            return int(failure.get("code", 1))
    return None


# --- gcloud ------------------------------------------------------------------------------------


def gcloud(words: list[str]) -> int:
    plain = [word for word in words if not word.startswith("--")]
    flags = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
    for prefix, kind in LISTS.items():
        length = len(prefix.split())
        if plain[:length] == prefix.split():
            return resource(plain[length], kind, plain[length + 1 :], flags)
    if plain[:2] == ["config", "get-value"]:
        print("(unset)")
    elif plain[:2] == ["auth", "list"]:
        print("me@example.com")
    elif plain[:2] == ["auth", "application-default"]:
        print("planted-access-token")
    else:
        print(json.dumps(read("answers.json", {}).get(" ".join(plain[:3]), [])))
    return 0


def resource(verb: str, kind: str, names: list[str], flags: dict[str, str]) -> int:
    facts = cloud()
    if verb == "get-serial-port-output":
        return serial_console(names[0], int(flags.get("start", 0)))
    if verb == "list":
        print(json.dumps([row(entry) for entry in facts["resources"] if entry["kind"] == kind and matches(entry, flags["filter"])]))
        return 0
    if verb == "delete":
        (name,) = (name.removeprefix("gs://") for name in names)
        found = [entry for entry in facts["resources"] if entry["kind"] == kind and name in (entry["name"], entry.get("email"))]
        if not found:
            sys.stderr.write(
                f"ERROR: (gcloud) Could not fetch resource:\n - The resource 'projects/demo-project/{kind}s/{name}' was not found\n"
            )
            return 1
        facts["resources"] = [entry for entry in facts["resources"] if entry not in found]
        write_cloud(facts)
    return 0


def matches(entry: dict[str, Any], wanted: str) -> bool:
    label = entry.get("labels", {}).get("drivetrain", "")
    if wanted.startswith("labels.drivetrain="):
        return bool(label == wanted.partition("=")[2])
    return bool(label) if wanted == "labels.drivetrain:*" else str(entry.get("description", "")).startswith("drivetrain=")


def row(entry: dict[str, Any]) -> dict[str, Any]:
    if entry["kind"] != "machine":
        return entry
    base = "https://www.googleapis.com/compute/v1/projects/demo-project"
    access = [{"name": "external-nat", "natIP": entry["address"], "type": "ONE_TO_ONE_NAT"}] if entry["status"] == "RUNNING" else [{}]
    facts = {
        "name": entry["name"], "id": entry["id"], "zone": f"{base}/zones/{entry['zone']}", "status": entry["status"], "labels": entry["labels"],
        "lastStartTimestamp": entry["started"], "scheduling": {"provisioningModel": "SPOT" if entry["spot"] else "STANDARD"},
        "networkInterfaces": [{"networkIP": entry["internal"], "accessConfigs": access}],
        "disks": [{"source": f"{base}/zones/{entry['zone']}/disks/{entry['name']}"}],
    }  # fmt: skip
    if entry.get("ends"):
        facts["resourceStatus"] = {"scheduling": {"terminationTimestamp": entry["ends"]}}
    return facts


def serial_console(name: str, start: int) -> int:
    path = ROOT / "consoles" / name
    text = path.read_bytes() if path.exists() else READY.encode()
    sys.stdout.write(text[start:].decode())
    sys.stderr.write(
        f"\nSpecify --start={len(text)} in the next get-serial-port-output invocation to get only the new output starting from here.\n"
    )
    return 0


# --- terraform ---------------------------------------------------------------------------------


def terraform(words: list[str]) -> int:
    folder = Path(words[0].removeprefix("-chdir="))
    verb, rest = words[1], words[2:]
    if verb == "version":
        print("Terraform v1.11.4\non linux_amd64")
        return 0
    if verb == "init":
        assert list(folder.glob("*.tf")), "terraform init in a folder without configuration"
        (folder / ".terraform").mkdir(exist_ok=True)
        return 0
    variables = json.loads((folder / "terraform.tfvars.json").read_text())
    actions = {"plan": make_plan, "show": show, "apply": apply, "destroy": destroy}
    return actions[verb](folder, rest, variables)


def state_path(folder: Path) -> Path:
    backend = folder / "backend.tf"
    bucket = re.search(r'bucket = "([^"]+)"', backend.read_text()) if backend.exists() else None
    return ROOT / f"state-{bucket[1]}.json" if bucket else folder / "terraform.tfstate"


def read_state(folder: Path) -> dict[str, Any]:
    path = state_path(folder)
    return dict(json.loads(path.read_text())) if path.exists() else {}


def wanted(variables: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns address -> resource, as infra/gcp makes them."""
    suffix, name = f"-{variables['deployment']}", variables["deployment"]
    note, labels = {"description": f"drivetrain={name}"}, {"labels": {"drivetrain": name}}
    resources: dict[str, dict[str, Any]] = {
        "google_service_account.machine[0]": {"kind": "account", "name": f"projects/demo-project/serviceAccounts/dt-machine{suffix}@demo-project.iam.gserviceaccount.com",
                                              "email": f"dt-machine{suffix}@demo-project.iam.gserviceaccount.com", **note},
        "google_storage_bucket.models": {"kind": "bucket", "name": f"demo-project-distributed-training{suffix}", **labels},
        "google_compute_network.machines[0]": {"kind": "network", "name": f"dt-network{suffix}", **note},
        "google_compute_firewall.between_machines[0]": {"kind": "firewall", "name": f"dt-between-machines{suffix}", **note},
    }  # fmt: skip
    zones = variables["zones"] or [variables["zone"]]
    for number in range(variables["num_workers"] + 1):
        machine = f"dt-{'master' if number == 0 else 'worker' if number == 1 else f'worker-{number}'}{suffix}"
        facts = {
            "kind": "machine",
            "name": machine,
            "zone": zones[number % len(zones)],
            "spot": variables["spot"],
            "limit": variables["max_run_minutes"],
        }
        resources[f'google_compute_instance.machine["{machine}"]'] = facts | labels
    return resources


def make_plan(folder: Path, words: list[str], variables: dict[str, Any]) -> int:
    state, statuses = read_state(folder), {entry["name"]: entry.get("status") for entry in cloud()["resources"]}
    changes = []
    for address, resource_facts in wanted(variables).items():
        actions = ["no-op"]
        if address not in state or resource_facts["name"] not in statuses:
            actions = ["create"]
        elif state[address].get("limit") != resource_facts.get("limit"):
            actions = ["delete", "create"]
        elif statuses[resource_facts["name"]] == "TERMINATED":
            actions = ["update"]
        changes.append(
            {
                "address": address,
                "mode": "managed",
                "type": address.partition(".")[0],
                "change": {"actions": actions, "after": resource_facts},
            }
        )
    (folder / "up.tfplan").write_text(json.dumps({"format_version": "1.2", "resource_changes": changes}))
    return 2 if any(change["change"]["actions"] != ["no-op"] for change in changes) else 0


def show(folder: Path, words: list[str], variables: dict[str, Any]) -> int:
    if words[-1] != "-json":
        print((folder / words[-1]).read_text())
        return 0
    resources = [{"address": address, "mode": "managed", "values": values} for address, values in read_state(folder).items()]
    print(json.dumps({"format_version": "1.0", "values": {"root_module": {"resources": resources}}}))
    return 0


def apply(folder: Path, words: list[str], variables: dict[str, Any]) -> int:
    for change in json.loads((folder / words[-1]).read_text())["resource_changes"]:
        address, after, actions = change["address"], change["change"]["after"], change["change"]["actions"]
        if actions == ["no-op"]:
            continue
        print(f"{address}: {'Creating' if actions == ['create'] else 'Modifying'}...", flush=True)
        facts = cloud()
        present = next((entry for entry in facts["resources"] if entry["name"] == after["name"]), None)
        if actions == ["create"] and present is not None:
            sys.stderr.write(
                f"\nError: Error creating instance: googleapi: Error 409: The resource 'projects/demo-project/{after['name']}' already exists, alreadyExists\n"
            )
            return 1
        if present is None:
            present = dict(after)
            facts["resources"].append(present)
        if present["kind"] == "machine":
            start(facts, present)
        write_cloud(facts)
        if read("inject.json", {}).get("kill_in_apply") and present["kind"] == "machine":
            os.kill(os.getpid(), signal.SIGKILL)
        state_path(folder).write_text(json.dumps(read_state(folder) | {address: after}))
        print(f"{address}: Creation complete after 1s [id={after['name']}]", flush=True)
    print("\nApply complete! Resources: 1 added, 0 changed, 0 destroyed.")
    return 0


def start(facts: dict[str, Any], machine: dict[str, Any]) -> None:
    """Starts a machine: it gets another external address, and its time limit begins again."""
    facts["next"] += 1
    now = time.time()
    machine |= {
        "status": "RUNNING", "id": machine.get("id", str(facts["next"])), "address": f"203.0.113.{facts['next'] % 256}",
        "internal": machine.get("internal", f"10.128.0.{facts['next'] % 256}"), "started": timestamp(now),
        "ends": timestamp(now + 60 * machine["limit"]) if machine["limit"] else None,
    }  # fmt: skip
    (ROOT / "machines" / machine["name"]).mkdir(parents=True, exist_ok=True)


def timestamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + ".000+00:00"


def destroy(folder: Path, words: list[str], variables: dict[str, Any]) -> int:
    state, facts = read_state(folder), cloud()
    names = {values["name"] for values in state.values()}
    facts["resources"] = [entry for entry in facts["resources"] if entry["name"] not in names]
    write_cloud(facts)
    state_path(folder).write_text("{}")
    return 0


# --- ssh ---------------------------------------------------------------------------------------


def ssh(words: list[str]) -> int:
    """Runs a command in the machine's home folder, as an SSH server would."""
    if "-G" in words:
        print("hostname machine")
        return 0
    from_rsync = "-l" in words
    at = words.index("-l") + 2 if from_rsync else next(index for index, word in enumerate(words) if word.startswith("drivetrain@"))
    address, command = words[at].removeprefix("drivetrain@"), " ".join(words[at + 1 :])
    machine = next(
        (entry for entry in cloud()["resources"] if entry["kind"] == "machine" and address in (entry["name"], entry["address"])), None
    )
    if machine is None or machine["status"] != "RUNNING":
        sys.stderr.write("ERROR: (gcloud.compute.start-iap-tunnel) Error while connecting [4003: 'failed to connect to backend'].\n")
        sys.stderr.write("kex_exchange_identification: Connection closed by remote host\n")
        return 255
    if command.startswith("cmp -s /var/lib/drivetrain/ready"):
        path = ROOT / "consoles" / machine["name"]
        return 0 if not path.exists() or path.read_text().rstrip().endswith("drivetrain: ready") else 1
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STAND_IN")} | {"HOME": str(ROOT / "machines" / machine["name"])}
    return subprocess.run(["/bin/sh", "-c", command], env=environment, cwd=environment["HOME"]).returncode
