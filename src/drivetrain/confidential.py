"""Recognises secrets among settings, so that they never get into run.json, logs and job scripts."""

from __future__ import annotations

import re

SECRET_NAME = re.compile(
    r"(.*[_.-])?(pass(word|wd|phrase)?|secret|credentials?|api_?key|(secret|access|private|account)_key|(auth|access|api|bearer|hf|github|wandb)_?token)",
    re.IGNORECASE,
)
SECRET_VALUE = re.compile(
    r"://[^/@\s:]*:[^/@\s]+@"  # a URL with a password
    r"|\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bsk-[\w-]{20,}|\bAKIA[0-9A-Z]{16}\b|\bxox[abp]-[\w-]{10,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
)
NO_VALUE = re.compile(r"|none|null|true|false|[\d.,eE+-]+", re.IGNORECASE)
"""A value that hides nothing: empty, a number, yes or no."""


def looks_secret(name: str, value: str) -> bool:
    """Whether a setting or a variable is a secret, by its name or by the form of its value."""
    if SECRET_VALUE.search(value):
        return True
    return SECRET_NAME.fullmatch(name) is not None and NO_VALUE.fullmatch(value) is None
