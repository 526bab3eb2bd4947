"""Names, labels and annotations of our objects. Pure: a run may have any name, an object only letters, digits and -."""

from __future__ import annotations

import getpass
import hashlib
import re
import socket

MANAGED_BY = {"app.kubernetes.io/managed-by": "drivetrain"}
RUN_LABEL, PROJECT_LABEL, OWNER_LABEL, ROLE_LABEL = "drivetrain/run", "drivetrain/project", "drivetrain/owner", "drivetrain/role"
RUN_ANNOTATION = "drivetrain/run-name"
MAX_SLUG = 32
"""A job's name has at most 41 characters: operators add the pod's role and number to it, and a service's name has at most 63."""
DIGEST_LENGTH = 8


def slug(text: str, length: int = MAX_SLUG) -> str:
    """Returns a part of an object's name: lower-case letters, digits and -, first a letter."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"run-{plain}".strip("-")
    return plain[:length].strip("-")


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()


def job_name(project: str, run: str) -> str:
    """Returns the name of a run's job, which no other run has."""
    return f"{slug(run)}-{digest(project, run)[:DIGEST_LENGTH]}"


def secret_name(job: str) -> str:
    return f"{job}-secret"


def code_name(code_digest: str) -> str:
    return f"drivetrain-code-{code_digest[:32]}"


def owner() -> str:
    """Returns the label of those who submit from this account: several people may share a namespace, and `down` removes only one's own."""
    user = getpass.getuser()
    return f"{slug(user, 20)}-{digest(user, socket.gethostname())[:DIGEST_LENGTH]}"


def own_labels() -> dict[str, str]:
    """Returns the labels by which `down` finds what this account has made."""
    return MANAGED_BY | {OWNER_LABEL: owner()}


def run_labels(project: str, run: str) -> dict[str, str]:
    return own_labels() | {RUN_LABEL: f"{slug(run)}-{digest(run)[:DIGEST_LENGTH]}", PROJECT_LABEL: slug(project, 60)}


def selector(labels: dict[str, str]) -> str:
    """Returns a label selector for kubectl."""
    return ",".join(f"{key}={value}" for key, value in labels.items())
