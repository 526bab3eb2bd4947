"""Stand-ins for gcloud, terraform and ssh, with a cloud that is a JSON file. They answer in the form of the real programs.

A test puts programs that call `main` on the PATH, and sets STAND_IN_CLOUD to a folder:

    cloud.json    all resources, and the number of commands so far
    calls.jsonl   the words of each command
    inject.json   what goes wrong: {"fail": {PREFIX OF WORDS: {"err": TEXT, "code": 1}}, "kill_after": N, "kill_in_apply": KIND}
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
PLACES = {"machine": "zone", "disk": "zone", "subnetwork": "region", "repository": "location"}
"""The flag with which gcloud needs to know where a resource is."""


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
    if plain[:2] == ["builds", "submit"]:
        return build(Path(plain[2]), flags)
    if plain[:2] == ["config", "get-value"]:
        print("(unset)")
    elif plain[:2] == ["auth", "list"]:
        print("me@example.com")
    elif plain[:2] == ["auth", "application-default"]:
        print("planted-access-token")
    else:
        answers = read("answers.json", {})
        print(json.dumps(next((answer for words, answer in answers.items() if " ".join(plain).startswith(words)), [])))
    return 0


def build(folder: Path, flags: dict[str, str]) -> int:
    """Keeps what Cloud Build would get; prints as gcloud does."""
    (ROOT / "build.json").write_text(
        json.dumps({"configuration": Path(flags["config"]).read_text(), "files": sorted(path.name for path in folder.iterdir())})
    )
    sys.stderr.write("Creating temporary archive of 3 file(s) totalling 1.0 MiB before compression.\n")
    print("Step #0: Step 1/9 : ARG BASE", "sha256:" + "5" * 64, sep="\n")
    return 0


def resource(verb: str, kind: str, names: list[str], flags: dict[str, str]) -> int:
    facts = cloud()
    if verb == "get-serial-port-output":
        return serial_console(names[0], int(flags.get("start", 0)))
    if verb == "list":
        print(json.dumps([row(entry) for entry in facts["resources"] if entry["kind"] == kind and matches(entry, flags["filter"])]))
        return 0
    if verb == "delete":
        return delete(facts, kind, names[0].removeprefix("gs://"), flags)
    return 0


def delete(facts: dict[str, Any], kind: str, name: str, flags: dict[str, str]) -> int:
    """Deletes a resource, if the flags say rightly where it is and nothing uses it."""
    found = [entry for entry in facts["resources"] if entry["kind"] == kind and name in (entry["name"], entry.get("email"))]
    place = PLACES.get(kind, "")
    if not found or (place and flags.get(place) != found[0][place]):
        sys.stderr.write(
            f"ERROR: (gcloud) Could not fetch resource:\n - The resource 'projects/demo-project/{kind}s/{name}' was not found\n"
        )
        return 1
    if users := [entry["name"] for entry in facts["resources"] if [kind, name] in entry.get("uses", [])]:
        sys.stderr.write(f"ERROR: (gcloud) Could not delete resource:\n - The {kind} '{name}' is already being used by '{users[0]}'\n")
        return 1
    if found[0].get("num_files"):
        sys.stderr.write("ERROR: (gcloud.storage.buckets.delete) HTTPError 409: The bucket you tried to delete is not empty.\n")
        return 1
    gone = [found[0], *(entry for entry in facts["resources"] if kind == "machine" and entry["kind"] == "disk" and entry["name"] == name)]
    facts["resources"] = [entry for entry in facts["resources"] if entry not in gone]
    write_cloud(facts)
    return 0


def matches(entry: dict[str, Any], wanted: str) -> bool:
    label = entry.get("labels", {}).get("drivetrain", "")
    if wanted.startswith("labels.drivetrain="):
        return bool(label == wanted.partition("=")[2])
    return bool(label) if wanted == "labels.drivetrain:*" else str(entry.get("description", "")).startswith("drivetrain=")


def row(entry: dict[str, Any]) -> dict[str, Any]:
    base = "https://www.googleapis.com/compute/v1/projects/demo-project"
    if entry["kind"] == "repository":
        return entry | {"name": f"projects/demo-project/locations/{entry['location']}/repositories/{entry['name']}"}
    if entry["kind"] != "machine":
        return entry | {place: f"{base}/{place}s/{entry[place]}" for place in ("zone", "region") if place in entry}
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
    if words == ["version"]:
        print("Terraform v1.11.4\non linux_amd64")
        return 0
    folder, verb, rest = Path(words[0].removeprefix("-chdir=")), words[1], words[2:]
    if verb == "init":
        assert list(folder.glob("*.tf")), "terraform init in a folder without configuration"
        (folder / ".terraform").mkdir(exist_ok=True)
        return 0
    variables = json.loads((folder / "terraform.tfvars.json").read_text())
    actions = {"plan": make_plan, "show": show, "apply": apply, "destroy": destroy, "output": output}
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
    suffix, name, region = f"-{variables['deployment']}", variables["deployment"], variables["region"]
    note, labels = {"description": f"drivetrain={name}"}, {"labels": {"drivetrain": name}}
    account, network, subnet = f"dt-vm{suffix}@demo-project.iam.gserviceaccount.com", f"dt-network{suffix}", f"dt-subnet{suffix}"
    in_network = {"uses": [["network", network]]}
    resources: dict[str, dict[str, Any]] = {
        "google_service_account.machine[0]": {"kind": "account", "name": f"projects/demo-project/serviceAccounts/{account}", "email": account, **note},
        "google_storage_bucket.models": {"kind": "bucket", "name": f"demo-project-distributed-training{suffix}", **labels},
        "google_artifact_registry_repository.images": {"kind": "repository", "name": f"drivetrain{suffix}", "location": region, **labels},
        "google_compute_network.machines[0]": {"kind": "network", "name": network, **note},
        "google_compute_subnetwork.machines[0]": {"kind": "subnetwork", "name": subnet, "region": region, **in_network, **note},
        "google_compute_firewall.between_machines[0]": {"kind": "firewall", "name": f"dt-between-machines{suffix}", **in_network, **note},
        "google_compute_firewall.ssh[0]": {"kind": "firewall", "name": f"dt-ssh{suffix}", "ranges": variables["ssh_source_ranges"], **in_network, **note},
    }  # fmt: skip
    if variables.get("cloud_build_user"):
        builder = f"dt-build{suffix}@demo-project.iam.gserviceaccount.com"
        facts = {"kind": "account", "name": f"projects/demo-project/serviceAccounts/{builder}", "email": builder}
        resources["google_service_account.build[0]"] = facts | note
    zones = variables["zones"] or [variables["zone"]]
    for number in range(variables["num_workers"] + 1):
        machine = f"dt-{'master' if number == 0 else 'worker' if number == 1 else f'worker-{number}'}{suffix}"
        facts = {
            "kind": "machine",
            "name": machine,
            "zone": zones[number % len(zones)],
            "spot": variables["spot"],
            "limit": variables["max_run_minutes"],
            "uses": [["subnetwork", subnet]],
        }
        resources[f'google_compute_instance.machine["{machine}"]'] = facts | labels
    return resources


def make_plan(folder: Path, words: list[str], variables: dict[str, Any]) -> int:
    state = read_state(folder)
    statuses = {entry["name"]: entry.get("status") for entry in cloud()["resources"] if entry["kind"] != "disk"}
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
    resources = [
        {"address": address, "type": address.partition(".")[0], "mode": "managed", "values": values}
        for address, values in read_state(folder).items()
    ]
    print(json.dumps({"format_version": "1.0", "values": {"root_module": {"resources": resources}}}))
    return 0


def output(folder: Path, words: list[str], variables: dict[str, Any]) -> int:
    state = read_state(folder)
    account = state.get("google_service_account.build[0]", {}).get("name", "")
    values = (
        {"build_service_account": account, "model_bucket": state.get("google_storage_bucket.models", {}).get("name", "")} if state else {}
    )
    print(json.dumps({name: {"sensitive": False, "type": "string", "value": value} for name, value in values.items()}))
    return 0


def apply(folder: Path, words: list[str], variables: dict[str, Any]) -> int:
    for change in json.loads((folder / words[-1]).read_text())["resource_changes"]:
        address, after, actions = change["address"], change["change"]["after"], change["change"]["actions"]
        if actions == ["no-op"]:
            continue
        print(f"{address}: {'Creating' if actions == ['create'] else 'Modifying'}...", flush=True)
        facts = cloud()
        kind = after["kind"]
        present = next((entry for entry in facts["resources"] if (entry["kind"], entry["name"]) == (kind, after["name"])), None)
        if actions == ["create"] and (present is not None or (kind == "machine" and has_disk(facts, after))):
            sys.stderr.write(f"\nError: Error creating it: googleapi: Error 409: {EXISTS.get(kind, EXISTS['other']).format(**after)}\n")
            return 1
        if present is None:
            present = dict(after)
            if kind == "machine":
                facts["resources"].append({"kind": "disk"} | {key: after[key] for key in ("name", "zone", "labels")})
                write_cloud(facts)
                killed_while_making("disk")
            facts["resources"].append(present)
        if kind == "machine":
            start(facts, present)
        write_cloud(facts)
        killed_while_making(kind)
        state_path(folder).write_text(json.dumps(read_state(folder) | {address: after}))
        print(f"{address}: Creation complete after 1s [id={after['name']}]", flush=True)
    print("\nApply complete! Resources: 1 added, 0 changed, 0 destroyed.")
    return 0


EXISTS = {
    "account": "Service account {email} already exists within project projects/demo-project., alreadyExists",
    "bucket": "Your previous request to create the named bucket succeeded and you already own it., conflict",
    "repository": "the repository already exists",
    "other": "The resource 'projects/demo-project/{name}' already exists, alreadyExists",
}
"""What Google answers to a name that is taken."""


def has_disk(facts: dict[str, Any], machine: dict[str, Any]) -> bool:
    return any((entry["kind"], entry["name"]) == ("disk", machine["name"]) for entry in facts["resources"])


def killed_while_making(kind: str) -> None:
    """Kills terraform, if asked to: the resource exists then, but Terraform's state does not have it."""
    if read("inject.json", {}).get("kill_in_apply") == kind:
        os.kill(os.getpid(), signal.SIGKILL)


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
    names = {values["name"] for values in state.values()}  # a disk has its machine's name
    full = [entry for entry in facts["resources"] if entry["name"] in names and entry.get("num_files")]
    facts["resources"] = [entry for entry in facts["resources"] if entry["name"] not in names or entry in full]
    write_cloud(facts)
    left = {entry["name"] for entry in full}
    state_path(folder).write_text(json.dumps({address: values for address, values in state.items() if values["name"] in left}))
    for name in left:
        sys.stderr.write(f"\nError: Error trying to delete bucket {name} containing objects without `force_destroy` set to true\n")
    return 1 if left else 0


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
