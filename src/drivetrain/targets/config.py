"""Reads targets from drivetrain.yaml (the project's) and ~/.config/drivetrain/targets.yaml (the user's)."""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
import typing
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.confidential import looks_secret_variable, secret_in_line
from drivetrain.names import check_name
from drivetrain.outcomes import Problem
from drivetrain.settings import brief, coerce, nearest
from drivetrain.settings_reader.live import field_docs
from drivetrain.structured import parse_yaml, read_text
from drivetrain.targets.base import Target
from drivetrain.targets.docker.target import DockerTarget
from drivetrain.targets.gcp.target import GcpTarget
from drivetrain.targets.kubernetes.target import KubernetesTarget
from drivetrain.targets.local import LocalTarget
from drivetrain.targets.sky.target import SkyTarget
from drivetrain.targets.slurm.target import SlurmTarget
from drivetrain.targets.ssh import SshTarget
from drivetrain.terminal import one_line

PROJECT_FILE = "drivetrain.yaml"
KINDS: dict[str, type[Target]] = {
    kind.kind: kind for kind in (LocalTarget, DockerTarget, SshTarget, SlurmTarget, KubernetesTarget, GcpTarget, SkyTarget)
}


def user_file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "drivetrain" / "targets.yaml"


def config_files() -> list[Path]:
    """Returns the files with targets, the project's first: its targets win."""
    project = next((folder / PROJECT_FILE for folder in (Path.cwd(), *Path.cwd().parents) if (folder / PROJECT_FILE).is_file()), None)
    return [path for path in (project, user_file()) if path is not None and path.is_file() and _is_trusted(path)]


def _is_trusted(path: Path) -> bool:
    """Whether only this user, the user's groups or root can have written a file: its options and lines are run. If not, says so on stderr."""
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()):
        fix = f"if you trust it: sudo chown {os.geteuid()} {shlex.quote(str(path))}"
        _report_once(f"{path} is not used, because it belongs to another user, whose commands would run: {fix}")
        return False
    if status.st_mode & stat.S_IWOTH:
        _report_once(f"{path} is not used, because every user can write it: chmod o-w {shlex.quote(str(path))}")
        return False
    return True


@cache
def _report_once(text: str) -> None:
    print(f"drivetrain: {one_line(text)}", file=sys.stderr)


def find_target(name: str) -> Target:
    """Returns the target of this name; each kind is also a target with its defaults."""
    entries = _entries()
    if name not in entries:
        if name in KINDS:
            return make_target(name, name, {}, Path(name))
        files = " and ".join(map(str, config_files())) or f"{PROJECT_FILE} or {user_file()}"
        raise Problem(
            f"there is no target {brief(name)}{nearest(name, [*entries, *KINDS])} (kinds: {', '.join(KINDS)}; your own: in {files})"
        )
    path, entry = entries[name]
    return _target_of_entry(name, entry, path)


class WrongEntry(NamedTuple):
    """A target, or a file with targets, that cannot be read."""

    name: str
    kind: str
    problem: Problem


def all_targets() -> list[Target | WrongEntry]:
    """Returns the targets of the files, then the kinds that no target of the same name hides. A wrong entry hides no other."""
    wrong: list[Target | WrongEntry] = []
    entries = _entries(wrong)
    targets = [_target_or_wrong(name, entry, path) for name, (path, entry) in entries.items()]
    return targets + wrong + [make_target(kind, kind, {}, Path(kind)) for kind in KINDS if kind not in entries and kind != "ssh"]


def _target_or_wrong(name: str, entry: Any, path: Path) -> Target | WrongEntry:
    try:
        return _target_of_entry(name, entry, path)
    except Problem as problem:
        kind = entry.get("kind", name) if isinstance(entry, dict) else name
        return WrongEntry(name, kind if isinstance(kind, str) and kind in KINDS else "?", problem)


def _entries(wrong: list[Target | WrongEntry] | None = None) -> dict[str, tuple[Path, Any]]:
    """Returns name -> (file, entry). Files that cannot be read are added to `wrong`; without it they raise Problem."""
    by_name: dict[str, tuple[Path, Any]] = {}
    for path in config_files():
        try:
            entries = _entries_of(path)
        except Problem as problem:
            if wrong is None:
                raise
            wrong.append(WrongEntry(path.name, "?", problem))
            continue
        for name, entry in entries.items():
            by_name.setdefault(str(name), (path, entry))
    return by_name


def _entries_of(path: Path) -> dict[Any, Any]:
    content = parse_yaml(read_text(path, "the targets"), path)
    entries = content.get("targets", {}) if isinstance(content, dict) else None
    if not isinstance(entries, dict):
        raise Problem(f"{path} has no targets: write `targets:`, below it `NAME:`, and below that `kind: ssh`")
    return entries


def _target_of_entry(name: str, entry: Any, path: Path) -> Target:
    check_name(name, f"{path}: the target")
    values = dict(entry) if isinstance(entry, dict) else {}
    kind = values.pop("kind", name if name in KINDS else None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise Problem(f"{path}: {name} needs a kind: one of {', '.join(KINDS)}{nearest(str(kind), KINDS) if kind else ''}")
    return make_target(name, kind, values, path)


def make_target(name: str, kind: str, values: Mapping[str, Any], path: Path) -> Target:
    """Returns a target with checked settings; raises Problem for unknown keys, values of another type, and secrets."""
    cls = KINDS[kind]
    types = typing.get_type_hints(cls.settings_class)
    known = [entry.name for entry in fields(cls.settings_class)]
    checked: dict[str, Any] = {}
    for key, value in values.items():
        label = f"{path}: {name}.{key}"
        if key not in known:
            raise Problem(
                f"{path}: {name} has the unknown key {brief(key)}{nearest(str(key), known)} (a target of kind {kind} has {', '.join(known)})"
            )
        if types[key] == dict[str, str]:
            checked[key] = _check_variables(value, label)
            continue
        try:
            checked[key] = coerce(types[key], value)
        except ValueError as error:
            raise Problem(f"{label} is {brief(value)}, not {error}") from None
        _check_printable(checked[key], label)
    return cls(name, cls.settings_class(**checked))


def _check_variables(value: Any, label: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(k, str) and k.isidentifier() for k in value):
        raise Problem(f"{label} is a mapping of environment variables, such as {{OMP_NUM_THREADS: 4}}")
    for name, text in value.items():
        if looks_secret_variable(name, str(text)):
            raise Problem(f"{label}.{name} is a secret: export it on this machine, and write only its name: secrets: [{name}]")
        _check_secrets(str(text), f"{label}.{name}")
    return {name: str(text) for name, text in value.items()}


def _check_printable(value: Any, label: str) -> None:
    """Refuses secrets, line breaks and other control characters: the value becomes a word of a command or a line of a script."""
    for text in value if isinstance(value, list) else [value]:
        _check_secrets(str(text), label)
        if isinstance(text, str) and not text.isprintable():
            raise Problem(f"{label} contains a line break or a control character: write it in one line")


def _check_secrets(text: str, label: str) -> None:
    name = secret_in_line(text)
    if name:
        variable = re.sub(r"\W", "_", name)
        raise Problem(f"{label} contains a secret ({name}): export it on this machine, and write only its name: secrets: [{variable}]")
    if name is not None:
        raise Problem(
            f"{label} contains a secret: write a URL without its password, or export a variable on this machine and write only its name: secrets: [NAME]"
        )


def settings_help(kind: str) -> list[tuple[str, str]]:
    """Returns the keys of a kind with their descriptions."""
    cls = KINDS[kind].settings_class
    docs = {name: doc for base in reversed(cls.__mro__[:-1]) for name, doc in field_docs(base).items()}
    return [(entry.name, docs.get(entry.name, "")) for entry in fields(cls)]
