"""Text for a terminal: what users, peers, files and tasks wrote, without the codes that a terminal would obey."""

from __future__ import annotations

import re

# Whole escape sequences (CSI, OSC and other strings, two-character ones), so that their letters do not stay behind.
SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)(?P<parameters>[0-?]*)[ -/]*(?P<final>[@-~])"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
# C0 and C1 controls without tab and newline, line separators, and marks that reverse the direction of text.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069]")
UNENCODABLE = re.compile("[\ud800-\udfff]")
RESET = "\x1b[0m"


def printable(text: object, colours: bool = False) -> str:
    """Returns the text without escape codes and control characters; tabs, newlines and, with `colours`, colours stay."""
    plain = str(text)
    if plain.isascii() and plain.isprintable():
        return plain
    kept = [m for m in SEQUENCE.finditer(plain) if colours and _is_colour(m)]
    parts, begin = [], 0
    for match in kept:
        parts += [_strip(plain[begin : match.start()]), match[0]]
        begin = match.end()
    parts.append(_strip(plain[begin:]))
    return "".join(parts) + (RESET if kept and kept[-1]["parameters"].strip("0") else "")


def one_line(text: object, colours: bool = False) -> str:
    """Returns the printable text as a terminal would leave it on a single line: newlines become spaces, and what precedes a
    carriage return is overwritten."""
    last = str(text).rstrip("\r\n").rpartition("\r")[2]
    return printable(last, colours).replace("\n", " ")


def show(text: object = "") -> None:
    """Prints text that may hold names and messages from elsewhere."""
    print(printable(text))


def _is_colour(match: re.Match[str]) -> bool:
    return match["final"] == "m" and match[0].startswith("\x1b[") and not match["parameters"].strip("0123456789;:")


def _strip(text: str) -> str:
    return UNENCODABLE.sub("\ufffd", CONTROL.sub("", SEQUENCE.sub("", text)))
