"""A stand-in for SkyPilot's `sky`: it answers in the words of the real one (0.14.1, recorded), and starts what the test hands it.

The folder $SKY_STAND_IN has its state: calls.jsonl (what it was called with), clusters.json, and for a failure VERB.fail with the text to
print. `launch` runs the program `start` in that folder, if there is one, with the cluster's name and the task file; `down` runs `end`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

STATE = Path(os.environ.get("SKY_STAND_IN", "/nowhere"))
OUTPUTS = Path(__file__).with_name("outputs")


def main(words: list[str]) -> int:
    with open(STATE / "calls.jsonl", "a") as file:
        file.write(json.dumps(words) + "\n")
    if words == ["--version"]:
        print((STATE / "version").read_text() if (STATE / "version").exists() else "skypilot, version 0.14.1")
        return 0
    verb = "dryrun" if "--dryrun" in words else words[0]
    if (STATE / f"{verb}.fail").exists():
        print((STATE / f"{verb}.fail").read_text(), file=sys.stderr)
        return 1
    return {"check": check, "status": status, "dryrun": dryrun, "launch": launch, "down": down}[verb](words)


def clusters() -> dict[str, dict[str, Any]]:
    path = STATE / "clusters.json"
    return json.loads(path.read_text()) if path.exists() else {}


def save(rows: dict[str, dict[str, Any]]) -> None:
    (STATE / "clusters.json").write_text(json.dumps(rows))


def check(words: list[str]) -> int:
    print(
        json.dumps({"default": {} if (STATE / "no-cloud").exists() else {"aws": ["compute", "storage"], "lambda": ["compute"]}}, indent=2)
    )
    return 0


def status(words: list[str]) -> int:
    names = [word for word in words[1:] if not word.startswith("-") and word != "json"]
    print("\x1b[2mFailed to connect to SkyPilot API server at http://127.0.0.1:46580. Starting a local server.\x1b[0m")
    rows = clusters()
    for name in names:
        if name not in rows:
            print(f"Cluster(s) not found: \x1b[1m{name}\x1b[0m.")
    print(json.dumps([row for name, row in rows.items() if not names or name in names], indent=2))
    return 0


def dryrun(words: list[str]) -> int:
    task = yaml.safe_load(Path(words[-1]).read_text())
    print(f"YAML to run: {words[-1]}")
    name = "sky-offer" if task["num_nodes"] > 1 else "sky-offer-spot" if task["resources"]["use_spot"] else "sky-offers"
    print((OUTPUTS / f"{name}.txt").read_text())
    return 0


def launch(words: list[str]) -> int:
    name, task_path = words[words.index("-c") + 1], words[-1]
    task = yaml.safe_load(Path(task_path).read_text())
    print("\x1b[0m⚙︎ Launching on Lambda us-east-1.", flush=True)
    if (STATE / "start").exists():
        launch_id = words[words.index("--env") + 1].partition("=")[2]
        subprocess.run([STATE / "start", name, task_path, launch_id, str(task["num_nodes"])], check=True)
    row = {"name": name, "status": "UP", "nodes": task["num_nodes"], "resources_str": "1x(gpus=A10:1, gpu_1x_a10, ...)", "init_kind": None}
    save(clusters() | {name: row})
    print(f"✓ Cluster launched: {name}.")
    return 0


def down(words: list[str]) -> int:
    rows = clusters()
    for name in [word for word in words[1:] if not word.startswith("-")]:
        if (STATE / "end").exists():
            subprocess.run([STATE / "end", name], check=True)
        rows.pop(name, None)
    if not (STATE / "down-does-nothing").exists():
        save(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
