"""A stand-in for Google Cloud: the programs of cloud_programs.py in a folder, and commands of drivetrain that find them there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.command import run_drivetrain

PROGRAMS = Path(__file__).with_name("cloud_programs.py")
TARGET = {"kind": "gcp", "project": "demo-project", "deployment": "gcp", "nodes": 2, "python": sys.executable}
APPLY = ["apply", "-input=false", "-no-color", "up.tfplan"]


class StandInCloud:
    """The folder of the stand-ins, and commands that use them."""

    def __init__(self, folder: Path, path: str) -> None:
        self.folder, self.path = folder, path
        self.write_target()

    def write_target(self, **changes: Any) -> None:
        Path("drivetrain.yaml").write_text(json.dumps({"targets": {"gcp": TARGET | changes}}))

    def run(self, *words: str, code: int = 0) -> str:
        """Runs a command to its end; returns what it printed."""
        done = run_drivetrain(*words, **self.variables)
        assert done.returncode == code, f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    @property
    def variables(self) -> dict[str, str]:
        return {"PATH": self.path, "STAND_IN_CLOUD": str(self.folder), "XDG_STATE_HOME": str(self.folder / "state")}

    def inject(self, **faults: Any) -> None:
        (self.folder / "inject.json").write_text(json.dumps(faults))

    @property
    def calls(self) -> list[list[str]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def applied(self) -> int:
        """How often `terraform apply` ran."""
        return sum(call[0] == "terraform" and call[2:] == APPLY for call in self.calls)

    @property
    def resources(self) -> list[dict[str, Any]]:
        path = self.folder / "cloud.json"
        return list(json.loads(path.read_text())["resources"]) if path.exists() else []

    def change_machine(self, name: str, **changes: Any) -> None:
        facts = json.loads((self.folder / "cloud.json").read_text())
        for entry in facts["resources"]:
            if entry["name"] == name:
                entry.update(changes)
        (self.folder / "cloud.json").write_text(json.dumps(facts))

    @property
    def state(self) -> Path:
        return self.folder / "state" / "drivetrain" / "gcp" / "demo-project" / "gcp"


def make_cloud(folder: Path) -> StandInCloud:
    """Returns a cloud without resources, whose programs and facts are in this folder."""
    (folder / "bin").mkdir()
    for name in ("gcloud", "terraform", "ssh"):
        program = folder / "bin" / name
        call = f"import sys; sys.path.insert(0, {str(PROGRAMS.parent)!r}); import cloud_programs; sys.exit(cloud_programs.main({name!r}, sys.argv[1:]))"
        program.write_text(f"#!{sys.executable} -ES\n{call}\n")
        program.chmod(0o755)
    (folder / "cloud" / "machines").mkdir(parents=True)
    (folder / "cloud" / "consoles").mkdir()
    return StandInCloud(folder / "cloud", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
