"""Text for a terminal: what users, files and tasks wrote, without the control codes that a terminal would execute."""

from __future__ import annotations

import re

ESCAPE_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)(?P<parameters>[0-?]*)[ -/]*(?P<final>[@-~])"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
"""Whole escape sequences: CSI, OSC and other strings, and those of two characters."""
CONTROL_CHARACTER = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069]")
"""C0 and C1 controls except tab and newline, line separators, and marks that reverse the direction of text."""
UNENCODABLE = re.compile("[\ud800-\udfff]")
RESET = "\x1b[0m"


def printable(text: object, colours: bool = False) -> str:
    """Returns the text without escape codes and control characters; tabs, newlines and, with `colours`, colours stay."""
    plain = str(text)
    if plain.isascii() and plain.isprintable():
        return plain
    colour_codes = [m for m in ESCAPE_SEQUENCE.finditer(plain) if colours and _is_colour(m)]
    parts, begin = [], 0
    for match in colour_codes:
        parts += [_strip(plain[begin : match.start()]), match[0]]
        begin = match.end()
    parts.append(_strip(plain[begin:]))
    return "".join(parts) + (RESET if colour_codes and colour_codes[-1]["parameters"].strip("0") else "")


def one_line(text: object, colours: bool = False) -> str:
    """Returns printable text on one line: newlines become spaces, and only what follows the last carriage return stays."""
    last = str(text).rstrip("\r\n").rpartition("\r")[2]
    return printable(last, colours).replace("\n", " ")


def show(text: object = "") -> None:
    """Prints text that may contain names and messages of others."""
    print(printable(text))


def _is_colour(match: re.Match[str]) -> bool:
    return match["final"] == "m" and match[0].startswith("\x1b[") and not match["parameters"].strip("0123456789;:")


def _strip(text: str) -> str:
    return UNENCODABLE.sub("\ufffd", CONTROL_CHARACTER.sub("", ESCAPE_SEQUENCE.sub("", text)))
