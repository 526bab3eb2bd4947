"""The objects of a submission, and the YAML of --dry-run, which `kubectl apply -f -` takes as it is."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any

import yaml

from drivetrain.targets.base import Rendering

PLAIN = re.compile(r"(?:[A-Za-z]|/|--[a-z])[\w./:@=-]{2,}")


@dataclass(frozen=True)
class KubernetesRendering(Rendering):
    """What a submission creates, in this order: the ConfigMap of the code, then the job; before them the Secret, which is never shown."""

    objects: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    """What the reader of --dry-run must know: each becomes a comment."""
    secret: str = ""
    """The name of the Secret with the variables `secret_variables`; "": the run needs none."""
    secret_variables: tuple[str, ...] = ()

    @property
    def job(self) -> dict[str, Any]:
        return self.objects[-1]

    def text(self) -> str:
        comments = [f"# {line}" for note in self.notes for line in note.splitlines()]
        comments += [f"# {line}" for line in self._secret_comment()]
        documents = "".join(f"---\n{to_yaml(value)}" for value in self.objects)
        return "".join(f"{line}\n" for line in comments) + documents

    def _secret_comment(self) -> list[str]:
        if not self.secret:
            return []
        namespace = self.job["metadata"].get("namespace")
        words = ["kubectl", *(["--namespace", namespace] if namespace else []), "create", "secret", "generic", self.secret]
        values = " ".join(f'--from-literal={name}="${name}"' for name in self.secret_variables)
        lines = ["`train` without --dry-run creates this Secret from the environment. For kubectl apply create it first:"]
        if "DRIVETRAIN_TOKEN" in self.secret_variables:
            lines.append("  export DRIVETRAIN_TOKEN=$(python3 -c 'import secrets; print(secrets.token_urlsafe(32))')")
        return [*lines, f"  {shlex.join(words)} {values}"]


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    """Writes text so that every reader of YAML takes it for text: kubectl's takes 1e3, which PyYAML would not quote, for a number."""
    is_block = "\n" in value and value.isascii() and all(char.isprintable() or char == "\n" for char in value)
    style = "|" if is_block else None if PLAIN.fullmatch(value) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(value: dict[str, Any]) -> str:
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=150))
