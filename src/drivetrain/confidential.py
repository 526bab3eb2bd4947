"""Recognises secrets among settings, so that they never get into run.json, logs and job scripts."""

from __future__ import annotations

import re

SECRET_NAME = re.compile(
    r"(.*[_.-])?(pass(word|wd|phrase)?|secret|credentials?|api[_-]?key|(secret|access|private|account)[_-]key|(auth|access|api|bearer|hf|github|wandb)[_-]?token)"
    r"|(.*\.)?token",
    re.IGNORECASE,
)
PASSWORD_NAME = re.compile(r"(.*[_.-])?pass(word|wd|phrase)", re.IGNORECASE)
VARIABLE_NAME = re.compile(r".*token", re.IGNORECASE)
"""An environment variable of such a name is a secret too; among settings, tokens are words of a text, as in pad_token."""
SECRET_VALUE = re.compile(
    r"://[^/@\s:]*:[^/@\s]+@"  # a URL with a password
    r"|\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bsk-[\w-]{20,}|\bAKIA[0-9A-Z]{16}\b|\bxox[abp]-[\w-]{10,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
)
NO_VALUE = re.compile(r"|none|null|true|false", re.IGNORECASE)
"""A value that hides nothing: empty, yes or no."""
NUMBER = re.compile(r"[\d.,eE+-]+")
ASSIGNMENT = re.compile(r"(?<![A-Za-z0-9_])(?:(?=[A-Za-z_])([\w.-]+)=|--([A-Za-z][\w-]*)\s+(?![\s-]))")
"""NAME= and --NAME VALUE in a line."""
VALUE = re.compile(r"\"([^\"]*)\"?|'([^']*)'?|([^\s,;&|\"']*)")
REFERENCE = re.compile(r"\$(\w+|\{\w+\}|\(.*)|`.*")
"""A value that a shell gets from elsewhere: $NAME, $(cat FILE)."""


def looks_secret(name: str, value: str) -> bool:
    """Whether a setting is a secret, by its name or by the form of its value."""
    return SECRET_VALUE.search(value) is not None or (SECRET_NAME.fullmatch(name) is not None and _hides(name, value))


def looks_secret_variable(name: str, value: str) -> bool:
    """Whether an environment variable is a secret."""
    return looks_secret(name, value) or (VARIABLE_NAME.fullmatch(name) is not None and _hides(name, value))


def _hides(name: str, value: str) -> bool:
    """Whether a value can be a secret, if the name is that of one. A password may be a number."""
    return NO_VALUE.fullmatch(value) is None and (NUMBER.fullmatch(value) is None or PASSWORD_NAME.fullmatch(name) is not None)


def secret_in_line(line: str) -> str | None:
    """Returns the name of a secret that a line of a script or the words of a command assign; "" for a secret without a name; None if
    there is none."""
    for match in ASSIGNMENT.finditer(line):
        name, found = match[1] or match[2], VALUE.match(line, match.end())
        in_double_quotes, in_quotes, bare = found.groups() if found is not None else ("", "", "")
        text = in_double_quotes or bare or ""
        is_reference = REFERENCE.fullmatch(text) is not None
        if not is_reference and looks_secret_variable(name, in_quotes or text):
            return name
    return "" if SECRET_VALUE.search(line) else None
