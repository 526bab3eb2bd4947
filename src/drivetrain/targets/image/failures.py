"""What the output of a failed image build tells: the line of the Dockerfile, its instruction, and the reason."""

from __future__ import annotations

import re
from pathlib import Path

from drivetrain.outcomes import Outcome, Problem
from drivetrain.targets.errors import DOCKER, UNREACHABLE, explain
from drivetrain.terminal import one_line

FOLDER = Path(__file__).with_name("files")
DOCKERFILE = "Dockerfile"
STEP = re.compile(
    r"^(?:Step|STEP) \d+/\d+ ?: (?P<instruction>.*)$"  # Docker's classic builder, podman
    r"|^ > \[[^\]]*\d+/\d+\] (?P<solved>.*?):?$|^ > \[internal\] (?P<base>load metadata for) .*$"  # BuildKit
    r"|^Dockerfile:(?P<line>\d+)$",
    re.MULTILINE,
)
REASON = re.compile(r"error|not found|no such|cannot|can't|denied|failed|unable|no space", re.IGNORECASE)
FRAME = re.compile(
    r"building at STEP|returned a non-zero code|did not complete successfully|executor failed running|^-{3,}|^> \[|^\d+ \||DEPRECATED"
    r"|^Install the buildx|failed to solve"
)
"""Lines of an engine that only repeat that a step has failed."""
PREFIX = re.compile(r"^(#\d+ )?\d+\.\d+ |\x1b\[\d*m")
"""What BuildKit writes before each line, and colours."""
MAX_INSTRUCTION, MAX_REASON = 100, 300


def failed_build(program: str, output: str, code: int, base: str, log: Path) -> Problem:
    """Returns the problem of a failed build. `log` is the file with all of the output."""
    steps = list(STEP.finditer(output))
    if not steps:
        return explain(program, output, code, DOCKER, image=base)
    line = _line_of(steps[-1])
    lines = (FOLDER / DOCKERFILE).read_text().splitlines()
    instruction = lines[line - 1] if line else steps[-1]["instruction"] or steps[-1]["solved"] or "?"
    where = f"line {line} of the Dockerfile failed" if line else "a step of the Dockerfile failed"
    if instruction.startswith("FROM"):
        if re.search(UNREACHABLE, output):
            return Problem(
                f"{where} (FROM {base}): the registry of {base} cannot be reached: is the network up, and is the name right?", Outcome.INFRA
            )
        return Problem(
            f"{where} (FROM {base}): there is no such image, or you may not pull it: correct --base, or log in to its registry",
            Outcome.INFRA,
        )
    short = instruction.rstrip(" \\")[:MAX_INSTRUCTION]
    return Problem(f"{where} ({short}): {_reason(output)} (all of it: {log})", Outcome.INFRA)


def _line_of(step: re.Match[str]) -> int:
    """Returns the number of the Dockerfile's line in which a step begins; 0 if it is not there."""
    if step["line"]:
        return int(step["line"])
    printed = "FROM" if step["base"] else _plain(step["instruction"] or step["solved"])
    for number, line in enumerate((FOLDER / DOCKERFILE).read_text().splitlines(), 1):
        constant = _plain(line).partition("$")[0].strip()  # engines print some variables by name, and some by value
        if line and not line.startswith(("#", " ")) and (printed.startswith(constant) or printed == constant):
            return number
    return 0


def _plain(line: str) -> str:
    return re.sub(r"[\s\\]+", " ", line).strip()


def _reason(output: str) -> str:
    lines = [PREFIX.sub("", line).strip() for line in output.splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if REASON.search(line) and not FRAME.search(line)]
    return one_line((errors or lines)[-1])[-MAX_REASON:]
